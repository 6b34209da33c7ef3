"""Texts of messages: the nearest name among very many names, articles."""

from relvit.utils.messages import an, nearest


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


def test_articles():
    names = ["Linear", "LeViT", "LSHAttention", "MLP", "ImageEncoderViT", "eva", "SamModel"]
    assert [an(name).split()[0] for name in names] == ["a", "a", "an", "an", "an", "an", "a"]


def test_a_number_is_no_misspelling_of_another_number():
    """Classes may be numbers: '12' is none of '0' to '9', and nobody has mistyped '1'."""
    assert nearest("12", [str(number) for number in range(10)]) is None
    assert nearest("12345", ["123456"]) is None
    assert nearest("2026-11-31", ["2026-11-30"]) == "2026-11-30"


def test_words_in_another_order():
    names = ["trained", "stretch", "logn", "stretch-logn"]
    assert nearest("logn_stretch", names) == "stretch-logn"
