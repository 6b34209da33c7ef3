"""Names and messages in a form that is safe in a terminal."""

import os
import unicodedata
import warnings

import pytest

from relvit.app.cli import quieten
from relvit.app.utils.progress import rank_zero_print
from relvit.app.utils.shown_text import one_line, visible, visible_lines, without_secrets

HONEST = [
    "cat",
    "Perserkatze",
    "chat siamois é",
    "e\u0301",
    "猫",
    "قطة",
    "חתול",
    "🐈\u200d⬛",
    "a b_c-d (1)",
    "50 %",
    "\\x1b",
]
HOSTILE = {
    "\x1b[2Jgone": r"\x1b[2Jgone",
    "\x1b]0;title\x07": r"\x1b]0;title\x07",
    "\x9b31mred": r"\x9b31mred",
    "one\ntwo\r\tthree": r"one\ntwo\r\tthree",
    "gpj.\u202eexe": r"gpj.\u202eexe",
    "\u2066x\u2069\u200f": r"\u2066x\u2069\u200f",
    "\u2028\u2029\x85\x7f\x00": r"\u2028\u2029\x85\x7f\x00",
    os.fsdecode(b"caf\xe9"): r"caf\xe9",
}


@pytest.mark.parametrize("name", HONEST)
def test_honest_names_stay(name):
    assert visible(name) == visible_lines(name) == one_line(ValueError(name)) == name


@pytest.mark.parametrize("name", HOSTILE)
def test_controls_are_escaped(name):
    assert visible(name) == HOSTILE[name]
    assert "\x1b" not in visible_lines(name)
    assert visible(visible(name)) == visible(name)


def test_every_control_character_of_unicode():
    """The set is the same as in Python's tables, including marks that change the direction of text."""
    marks = ("RLE", "LRE", "RLO", "LRO", "PDF", "RLI", "LRI", "FSI", "PDI")
    named = [unicodedata.lookup(f"{side} MARK") for side in ("LEFT-TO-RIGHT", "RIGHT-TO-LEFT", "ARABIC LETTER")]
    for character in map(chr, range(0x30000)):
        bad = unicodedata.category(character) in ("Cc", "Zl", "Zp", "Cs") or character in named
        bad |= unicodedata.bidirectional(character) in marks
        assert (visible(character) != character) == bad, hex(ord(character))


def test_what_is_printed_has_lines_but_no_controls(capsys, monkeypatch):
    rank_zero_print("one\n\ttwo \x1b[31m")
    assert capsys.readouterr().out == "one\n\ttwo \\x1b[31m\n"
    monkeypatch.setattr(warnings, "formatwarning", warnings.formatwarning)
    with warnings.catch_warnings():
        quieten()
        file = one_line.__code__.co_filename
        assert warnings.formatwarning(UserWarning("a\nb \x1b[31m"), UserWarning, file, 1) == "Warning: a\nb \\x1b[31m\n"


def test_passwords_that_are_not_encoded_are_left_out_and_ports_stay():
    for password in ("a/b", "a b", "a?b", "a#b", "/", "p w/x"):
        given = f"cannot fetch http://user:{password}@host:8080/x.pt, try again"
        assert without_secrets(given) == "cannot fetch http://host:8080/x.pt, try again"
    for kept in (
        "http://host:8080/a@2x.png",
        "see http://host:80 or me@host",
        "http://host:80/x; me@host",
        "s3://b/a@1",
    ):
        assert without_secrets(kept) == kept
