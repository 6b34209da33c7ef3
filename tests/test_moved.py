"""Public names of the release before are found where they were, with a warning."""

from importlib import import_module

import pytest

from relvit._moved import MOVED


@pytest.mark.parametrize(
    ("package", "name", "place"), [(p, n, to) for p, names in MOVED.items() for n, to in names.items()]
)
def test_a_moved_name_is_the_new_one_with_a_warning(package, name, place):
    with pytest.warns(DeprecationWarning, match=f"{package}.{name} is now {place}.{name}"):
        found = getattr(import_module(package), name)
    assert found is getattr(import_module(place), name)


def test_other_names_are_missing():
    with pytest.raises(AttributeError, match=r"module 'relvit.layers' has no attribute 'AFT'"):
        import_module("relvit.layers").AFT  # noqa: B018
