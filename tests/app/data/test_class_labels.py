"""Class names: printed counts, and names that may be two spellings of one class."""

import itertools
import re

import numpy as np
import pytest

from relvit.app.data.class_labels import (
    check_printable,
    checked_classes,
    class_counts,
    classes_of,
    counts_text,
    doubtful_classes,
    names_in,
    positions,
)
from relvit.app.data.modules.paths import ImagePathsData


@pytest.mark.parametrize(
    "expected",
    [
        ["10", "2", "a"],
        ["2", "10"],
        ["01", "1", "2"],
        ["-1", "0", "1"],
        ["1.0", "2.0", "2.5", "10.0"],
        ["cat", "nan"],
    ],
)
def test_classes_are_in_one_order_however_labels_come(expected):
    for labels in itertools.permutations(expected):
        assert classes_of([*labels, labels[0]]) == expected


@pytest.mark.parametrize("name", ["a\x1b[31m", "a\nb", "a\r", "a\u202eb", "a\u2066", "\x00", "a\x9b", "a\u2028"])
def test_names_that_a_terminal_would_obey_are_no_classes(name):
    escaped = re.escape(name.encode("unicode_escape").decode())
    with pytest.raises(ValueError, match=rf"^list.csv: the class name '{escaped}' has control characters; rename it$"):
        check_printable(["cat", name], "list.csv")
    # Every data module refuses such names, from whatever source they come.
    with pytest.raises(ValueError, match=rf"^class_names: the class name '{escaped}' has control characters"):
        ImagePathsData([], ["cat", name], 8, (0.5,), (0.5,), 1.0)


def test_names_in_utf8_where_the_locale_is_another_name_the_cure(monkeypatch):
    name = "Käfer".encode().decode("ascii", "surrogateescape")
    with pytest.raises(ValueError, match=r"the class name 'K\\xc3\\xa4fer' is not UTF-8; rename it$"):
        check_printable([name], "photos")
    monkeypatch.setattr("sys.getfilesystemencoding", lambda: "ascii")
    cure = "is not ascii; rename it, or set PYTHONUTF8=1 where names are UTF-8$"
    with pytest.raises(ValueError, match=rf"^photos: the class name 'K\\xc3\\xa4fer' {cure}"):
        check_printable([name], "photos")


def test_names_of_all_languages_are_classes():
    names = ["cat", "chat é", "e\u0301", "猫", "قطة", "חתול", "🐈\u200d⬛", "a b_c-d (1)", "50 %", "Washington, D.C."]
    check_printable(names, "list.csv")
    assert checked_classes(names) == names


def test_names_may_be_numbers_and_texts_of_numpy():
    for names in (np.arange(3), np.array(["0", "1", "2"]), range(3)):
        assert [*map(repr, checked_classes(names))] == ["'0'", "'1'", "'2'"]


def test_labels_are_names_or_positions():
    assert positions(["1", "0", "1"], ["bee", "cat"]) == {"0": 0, "1": 1}
    assert positions(["1", "bee"], ["bee", "cat"]) == {"bee": 0, "cat": 1}
    # If the class names are numbers, a label is a name and not a position.
    assert positions(["1", "0"], ["1", "0"]) == {"1": 0, "0": 1}


def test_counts():
    counts = class_counts([0, 2, 2, (0, 2), ()], ["cat", "dog", "owl"])
    assert counts == {"cat": 2, "dog": 0, "owl": 3}
    assert counts_text(counts) == "cat 2, dog 0, owl 3"
    many = {f"c{number}": 1000 + number for number in range(13)}
    few, most = "c0 1,000, c1 1,001, c2 1,002, c3 1,003", "c12 1,012, c11 1,011, c10 1,010, c9 1,009"
    assert counts_text(many) == f"13 classes, fewest: {few}; most: {most}"


@pytest.mark.parametrize(
    ("counts", "doubt"),
    [
        ({"Cat": 5, "cat ": 5, "dog": 5}, "the classes 'Cat', 'cat ' differ in case, spaces"),
        ({"great_owl": 5, "Great Owl": 5}, "the classes 'great_owl', 'Great Owl' differ"),
        ({"caf\u00e9": 5, "cafe\u0301": 5}, "differ in case, spaces, hyphens, zeros of a number or accents' encoding"),
        ({"1": 5, "01": 5, "10": 5}, "the classes '1', '01' differ"),
        ({"dgo": 1, "dog": 500, "cat": 500}, "the class 'dgo' (images: 1) may be a typo of 'dog' (500)"),
        ({"dogg": 1, "dog": 20}, "may be a typo of 'dog'"),
        ({"elephnat": 2, "elephant": 60}, "may be a typo of 'elephant'"),
        # The less frequent name is not taken as a typo if it has many images, is another word, a number or one letter.
        ({"dgo": 26, "dog": 500}, None),
        ({"owl": 1, "dog": 500, "ant": 1, "cat": 500}, None),
        ({"Quercus alba": 1, "Quercus rubra": 500}, None),
        ({"n01440764": 1, "n01440765": 500, "10": 1, "1": 500, "a": 1, "b": 500, "": 1}, None),
        ({"owl": 0, "bowl": 500}, None),
        ({"-1": 5, "1": 5}, None),
    ],
)
def test_doubtful_classes(counts, doubt):
    found = doubtful_classes(counts)
    assert len(found) == (doubt is not None)
    assert doubt is None or doubt in found[0]


@pytest.mark.parametrize("given", ["cat", {0: "cat", 1: "dog"}])
def test_class_names_are_a_list(given):
    """A string or transformers' dictionary id2label is refused: its letters or keys would become classes."""
    with pytest.raises(TypeError, match=f"class_names must be a list .*, got {re.escape(repr(given))}"):
        checked_classes(given)


def test_each_class_has_a_name_of_its_own():
    """Two classes of one name would share a probability in the demo, and weights in a transfer."""
    for take in (names_in, checked_classes):
        with pytest.raises(ValueError, match="class_names holds 'crane' more than once; name each class once"):
            take(["crane", "owl", "crane"])
