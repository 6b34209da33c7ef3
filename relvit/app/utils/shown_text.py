"""Texts to show: plurals, one line, without secrets in addresses or characters that a terminal would execute."""

import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any


def size_text(size: Sequence[int]) -> str:
    """Return (height, width) as an option takes them: '80' for equal sides, else '[64,80]'."""
    height, width = size
    return str(height) if height == width else f"[{height},{width}]"


def counted(number: int, noun: str) -> str:
    """Return a number and its noun: '1 image', '1,437 images', '3 classes'."""
    return f"{number:,} {noun}" + ("" if number == 1 else "es" if noun.endswith("s") else "s")


def printable(name: str) -> str:
    r"""Return a file name as valid UTF-8: bytes that are not UTF-8 become ``\xff``."""
    return name.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


# This pattern finds characters that a terminal executes instead of showing: C0 and C1 control characters (ESC begins
# commands), line separators, Unicode's marks that reverse the direction of text, and surrogates, by which Python
# represents bytes that are not UTF-8.
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


# This pattern finds addresses with possible secrets: user and password, and a query or fragment (signatures, tokens).
# Passwords should be percent-encoded, but often are not, so a password may hold '/', '?' or spaces. The text after a
# colon may also be a port, which is not a secret.
_PLAIN_USER = r"[^\s/?#'\"]*@"
_ODD_PASSWORD = r"[^\s/?#'\"@:]*:(?!\d{1,5}(?:[/?#\s,;)\]]|$))(?:(?!://)[^'\"\n])*?@"
_ADDRESS = re.compile(rf"([A-Za-z][\w+.-]*://)(?:{_PLAIN_USER}|{_ODD_PASSWORD})?([^\s?#'\"]*)([?#][^\s'\"]*)?")


def without_secrets(value: Any) -> Any:
    """Return a text, or the texts in mappings and lists, whose addresses have neither user and password nor query.

    Messages, recorded arguments, and the CSV and JSON files that relvit writes go through this function. The `?` of a
    pattern such as s3://bucket/shard-?.tar stays.
    """

    def public(found: re.Match[str]) -> str:
        query = found[3] or ""
        pattern = not found[1].lower().startswith("http") and "=" not in query
        return f"{found[1]}{found[2]}{query if pattern else ''}"

    if isinstance(value, str):
        return _ADDRESS.sub(public, value) if "://" in value else value
    if isinstance(value, Mapping):
        return {name: without_secrets(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(without_secrets, value)) if type(value) in (list, tuple) else value
    return value


def visible(text: str, keep: str = "") -> str:
    r"""Return a text as a terminal may show it: control characters, and bytes that are not UTF-8, become ``\x1b``.

    Args:
        text: the name of a file or a class, or a whole message with such names.
        keep: control characters that stay, such as the ends of a message's lines.
    """

    def escape(found: re.Match[str]) -> str:
        if "\udc80" <= found[0] <= "\udcff":
            return f"\\x{ord(found[0]) - 0xDC00:x}"
        return found[0] if found[0] in keep else found[0].encode("unicode_escape").decode()

    return _CONTROL.sub(escape, text)


def undecoded(name: str) -> str:
    """Return what to say of a name with bytes that Python could not decode, which surrogates represent; else ''.

    The name is not UTF-8, or only the locale is not, which PYTHONUTF8=1 cures.
    """
    if not re.search("[\ud800-\udfff]", name):
        return ""
    read = sys.getfilesystemencoding()
    cure = "" if read == "utf-8" else ", or set PYTHONUTF8=1 where names are UTF-8"
    return f"is not {'UTF-8' if read == 'utf-8' else read}; rename it{cure}"


def visible_lines(text: str) -> str:
    """Return a message of several lines as a terminal may show it, see `visible` and `without_secrets`."""
    return visible(without_secrets(text), keep="\n\t")


def one_line(error: Exception) -> str:
    """Return the message of an error on one line, or the name of the error's class where there is no message."""
    text = f"there is no {error}" if isinstance(error, KeyError) else str(error)
    return visible(" ".join(text.split())) or type(error).__name__


def cut(value: object, most: int = 500) -> str:
    """Return the text of a value on one line, with dots at the end of a text that is longer than `most` characters."""
    text = " ".join(str(value).split())
    return text if len(text) <= most else f"{text[: most - 3]}..."
