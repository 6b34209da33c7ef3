"""Texts of messages: the nearest allowed name, short lists, how to install a missing package; escapes for terminals."""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

# Optional package -> the extra of relvit that installs the package.
EXTRAS = {
    **dict.fromkeys(("lightning", "torchmetrics", "jsonargparse", "matplotlib", "sklearn"), "train"),
    "onnx": "onnx",
    "onnxruntime": "onnx",
    "onnxscript": "onnx",
    "pyarrow": "parquet",
    "datasets": "hfds",
    "wandb": "wandb",
    "mlflow": "mlflow",
    "pytorch_grad_cam": "show",
    "gradio": "demo",
    "lightly": "lightly",
}


def nearest(name: str, allowed: Iterable[str], parts: bool = True) -> str | None:
    """Return the allowed name that ``name`` is likely a misspelling of; None if there is none, as a guess misleads.

    Case, hyphens and underscores do not count. In a word one letter (two in words of seven letters and more) may be
    missing, wrong, added or exchanged with its neighbour. With `parts`, one name may also begin or end with the other
    name.
    """
    allowed = list(allowed)
    # PyTorch calls the GPU 'cuda'.
    if name in ("gpu", "gpus") and name not in allowed and "cuda" in allowed:
        return "cuda"
    typed = _letters(name)
    spelt = {each: _letters(each) for each in allowed}
    near = [
        (_edits(typed, other), other[:1] != typed[:1], allowed.index(each))
        for each, other in spelt.items()
        if typed == other or (abs(len(typed) - len(other)) <= 2 and _is_misspelt(name, each))
    ]
    typed = _letters(re.sub(r"(?<=[a-z]{4})s$", "", name))
    long = [each for each, other in spelt.items() if parts and _is_longer(*sorted((typed, other), key=len))]
    # A name that begins with the typed name is a better guess than a name with another ending or another letter.
    continued = [each for each in long if spelt[each].startswith(typed)]
    if near and (not continued or min(near)[0] == 0):
        return allowed[min(near)[2]]
    return min(continued or long, key=len, default=None)


def _is_misspelt(typed: str, other: str) -> bool:
    one, two = ([word.casefold() for word in re.split(r"[\s_-]+", name)] for name in (typed, other))
    if len(one) == len(two):
        return all(a == b or _edits(a, b) <= _most_edits(a, b) for a, b in zip(one, two, strict=True))
    # A name with an added short word, as in `freeze_bn`, means something else.
    added = {*one} <= {*two} or {*two} <= {*one}
    joined = "".join(one), "".join(two)
    return not added and _edits(*joined) <= min(1, _most_edits(*joined))


def _most_edits(typed: str, other: str) -> int:
    """Return how many faults a misspelling may have: few in a short word, or where the first letter is another."""
    # In a number, such as the day in the name of a run's folder, one digit may be wrong.
    if typed.isdigit() and other.isdigit():
        return 1
    # In a word of three letters, one wrong letter makes another word, such as 'ema' for 'eta'.
    if len(typed) < 4:
        return int(len(typed) == 3 and {*typed} <= {*other})
    same = typed[:1] == other[:1]
    return 1 + (same and len(typed) > 6) - (not same and len(typed) == 4)


def _letters(name: str) -> str:
    return re.sub(r"[\s_-]", "", name).casefold()


def _is_longer(short: str, long: str) -> bool:
    """Return whether one name begins with a large part of the other name, or ends with most of it.

    Two names that only begin alike, such as `cutmix_prob` and `cutmix_minmax`, mean different things.
    """
    begins = long.startswith(short) and len(short) >= max(5, 0.4 * len(long))
    return begins or (long.endswith(short) and len(short) >= max(5, 0.6 * len(long)))


def _edits(one: str, other: str) -> int:
    """Count the letters to insert, delete or replace, and the neighbours to exchange, between two names."""
    before, above = [], list(range(len(other) + 1))
    for row, letter in enumerate(one, 1):
        line = [row]
        for column, wanted in enumerate(other, 1):
            best = min(above[column] + 1, line[-1] + 1, above[column - 1] + (letter != wanted))
            if row > 1 and column > 1 and (letter, one[row - 2]) == (other[column - 2], wanted):
                best = min(best, before[column - 2] + 1)
            line.append(best)
        before, above = above, line
    return above[-1]


def did_you_mean(name: str, allowed: Iterable[str]) -> str:
    """Return ``" (did you mean 'x'?)"`` for the allowed name nearest to ``name``, or '' if none is near."""
    found = nearest(name, allowed)
    return "" if found is None else f" (did you mean {found!r}?)"


def an(name: str) -> str:
    """Return a name after its article: 'an ImageEncoderViT', 'a Linear'."""
    return f"{'an' if name[:1].lower() in 'aeio' else 'a'} {name}"


def size_text(size: Sequence[int]) -> str:
    """Return (height, width) as an option takes them: '80' for equal sides, else '[64,80]'."""
    height, width = size
    return str(height) if height == width else f"[{height},{width}]"


def printable(name: str) -> str:
    r"""Return a file name as valid UTF-8: bytes that are not UTF-8 become ``\xff``."""
    return name.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


# Characters that a terminal executes instead of showing: C0 and C1 control characters (ESC begins commands), line
# separators, and Unicode's marks that reverse the direction of text. Surrogates represent bytes that are not UTF-8.
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


# This pattern finds addresses with possible secrets: user and password, and a query or fragment (signatures, tokens).
# Passwords should be percent-encoded, but often are not, so a password may hold '/', '?' or spaces. The text after a
# colon may also be a port.
_PLAIN_USER = r"[^\s/?#'\"]*@"
_ODD_PASSWORD = r"[^\s/?#'\"@:]*:(?!\d{1,5}(?:[/?#\s,;)\]]|$))(?:(?!://)[^'\"\n])*?@"
_ADDRESS = re.compile(rf"([A-Za-z][\w+.-]*://)(?:{_PLAIN_USER}|{_ODD_PASSWORD})?([^\s?#'\"]*)([?#][^\s'\"]*)?")


def without_secrets(value: Any) -> Any:
    """Return a text, or the texts in mappings and lists, whose addresses have neither user and password nor query.

    Everything that relvit prints or writes goes through this function. The `?` of a pattern such as
    s3://bucket/shard-?.tar stays.
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


def visible_lines(text: str) -> str:
    """Return a message of several lines as a terminal may show it, see `visible` and `without_secrets`."""
    return visible(without_secrets(text), keep="\n\t")


def listing(names: Sequence[str], most: int = 10) -> str:
    """Join quoted names by commas; of many names the first ``most``, and how many more there are."""
    shown = ", ".join(map(repr, names[:most]))
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"


def part_of(name: str) -> str:
    """Return the expression for the part of this name, such as 'blocks.0.attn', of a module in the variable `model`."""
    return "model" + "".join(f"[{key}]" if key.isdigit() else f".{key}" for key in name.split("."))


def one_line(error: Exception) -> str:
    """Return the message of an error on one line, or the name of the error's class where there is no message."""
    text = f"there is no {error}" if isinstance(error, KeyError) else str(error)
    return visible(" ".join(text.split())) or type(error).__name__


def cut(value: object, most: int = 500) -> str:
    """Return the text of a value on one line, with dots at the end of a text that is longer than `most` characters."""
    text = " ".join(str(value).split())
    return text if len(text) <= most else f"{text[: most - 3]}..."


class LostProcessError(RuntimeError):
    """Another process of a run has ended, without which this one cannot go on."""


class MissingPackageError(ModuleNotFoundError):
    """An optional package is not installed; the message says how to install the package.

    Args:
        purpose: what needs the package.
        package: the name of the package or of one of its modules.
    """

    def __init__(self, purpose: str, package: str | None) -> None:
        name = (package or "").partition(".")[0]
        install = f'"relvit[{EXTRAS[name]}]"' if name in EXTRAS else name
        super().__init__(f"{purpose} needs the package {name}: pip install {install}", name=name)


def check_choice(argument: str, value: object, allowed: Sequence[str]) -> None:
    """Refuse a value that is not one of the allowed names.

    Raises:
        ValueError: `value` is not in `allowed`; the message has the nearest name.
    """
    if value not in allowed:
        hint = did_you_mean(str(value), allowed)
        raise ValueError(f"{argument} is {value!r}; allowed are {', '.join(map(repr, allowed))}{hint}")
