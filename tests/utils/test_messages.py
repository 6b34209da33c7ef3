"""Texts of messages: the nearest name among very many names."""

from relvit.utils.messages import nearest


def test_the_nearest_of_many_near_names_is_found_in_one_pass():
    """A folder may hold a million names of images that differ in their digits."""
    compared = []

    class Name(str):
        __slots__ = ()

        def __eq__(self, other):
            compared.append(self)
            return str(self) == str(other)

        __hash__ = str.__hash__

    names = [Name(f"image{number:04d}") for number in range(300)]
    assert nearest("image250", names) == "image0250"
    assert len(compared) <= len(names)
