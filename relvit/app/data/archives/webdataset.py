"""WebDataset reader: shards of samples, whose files in a tar archive share a name up to its first dot."""

import os
import re
import warnings
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from relvit.app.data.archives.reader import Content, Reader
from relvit.app.data.archives.tar import Member, members
from relvit.app.data.class_labels import as_label
from relvit.app.utils.files import canonical_paths, parse_json
from relvit.app.utils.shown_text import counted, one_line, visible
from relvit.utils.messages import did_you_mean, listing

# A pattern that expands to more than this number of names is refused, because the pattern must be a typing error.
MOST_ARCHIVES = 100_000

IMAGE_PARTS = "jpg;jpeg;png;webp"


class _Split(NamedTuple):
    """The shards of a split, the least number of samples in them, its source for messages, and the label's field."""

    files: list[str]
    least: int = 0
    source: str = "num_samples or shard_lengths of the split"
    field: str | None = None


class Shards(Reader):
    """Samples of image and label in WebDataset's uncompressed tar archives on disk, read in any order.

    A split is a name in ``_info.json`` (or ``info.json``) in root, in timm's format, or a pattern of shards relative to
    root, such as ``'name-{0000..0127}.tar'``; several patterns are joined by ``::``. ``|N`` at the end of a pattern
    means that there have to be at least N samples. Samples without an image are left out with a warning.

    Args:
        root: The folder of the shards.
        input_key: Endings of image files, separated by ``;``. If a sample has several image files, the file with the
            ending that comes first here is used.
        target_key: See :class:`relvit.app.data.ReaderData`; None: the field that ``_info.json`` names; if it names
            none, the label is the .cls file of each sample.
    """

    def __init__(self, root: str, input_key: str = IMAGE_PARTS, target_key: str | None = None) -> None:
        self.root = root
        self.endings: list[str] = [ending.strip().lstrip(".").lower() for ending in input_key.split(";")]
        self.target_key = target_key

    def find(self, split: str, labelled: bool) -> Content:
        """Find the images of a split in the order of shards and samples, see :class:`Reader`."""
        shards = self._split(split)
        images: list[Member] = []
        labels: list[str | None] = []
        left_out = 0
        for file in shards.files:
            samples, without = self._samples(file)
            left_out += without
            images += [next(parts[ending] for ending in self.endings if ending in parts) for parts in samples]
            if labelled:
                labels += _labels(file, samples, self.target_key or shards.field)
        if len(images) < shards.least:
            cure = "copy the shards again"
            if len(images) + left_out >= shards.least:
                cure = f"left out are {left_out} without a part {' or '.join(self.endings)}: give the ending of their "
                cure += "images, too (--data.input_key)"
            raise ValueError(
                f"{split} has {counted(len(images), 'sample')} with images in {self.root}, {shards.source} asks for "
                f"{shards.least}: {cure}, or correct that number"
            )
        return Content(images, labels)

    def key(self, image: Member) -> str:
        """Name an image by the shard, relative to root, and the name in it."""
        return f"{os.path.relpath(image.file, self.root)}/{image.name}"

    def _split(self, split: str) -> _Split:
        if not os.path.isdir(self.root):
            raise FileNotFoundError(f"root {self.root} is not a folder; give the one that holds the shards")
        refuse_remote(split)
        known = self._known_splits()
        self.splits: Sequence[str] = list(known)
        if split in known:
            found = _described(f"{self.root}/{split}", known[split])
        elif ".tar" in split or "{" in split:
            pattern, _, count = split.partition("|")
            if count and not count.isdigit():
                raise ValueError(f"{split!r} should name a number of samples behind '|', such as 'a-{{0..9}}.tar|1000'")
            names = [name for part in pattern.split("::") for name in expand_braces(part)]
            found = _Split(names, int(count or 0), "the text behind '|'")
        else:
            there = sorted(name for name in os.listdir(self.root) if name.endswith(".tar"))
            info = f"_info.json has {listing(sorted(known))}" if known else "there is no _info.json"
            raise ValueError(
                f"no split {split!r} in {self.root}{did_you_mean(split, known)}: {info}; or name the shards, such as "
                f"'name-{{0000..0127}}.tar' (there are {listing(there, 3) or 'none'})"
            )
        for name in found.files:
            refuse_remote(name)
        paths = [os.path.join(self.root, name) for name in found.files]
        if twice := [path for path, count in Counter(canonical_paths(paths)).items() if count > 1]:
            raise ValueError(f"{split!r} names {listing(twice)} more than once; name each shard once")
        return found._replace(files=paths)

    def _known_splits(self) -> dict[str, Any]:
        for name in ("_info.json", "info.json"):
            file = os.path.join(self.root, name)
            if os.path.isfile(file):
                try:
                    return dict(parse_json(Path(file).read_text(encoding="utf-8")).get("splits", {}))
                except (ValueError, AttributeError, TypeError) as error:
                    raise ValueError(f"{file} is not a description of shards in timm's format: {error}") from error
        return {}

    def _samples(self, file: str) -> tuple[list[dict[str, Member]], int]:
        """Find the parts (files) of each sample that has an image, and count the other samples."""
        samples = _samples(file)
        without = {name: parts for name, parts in samples.items() if parts.keys().isdisjoint(self.endings)}
        if without:
            name, parts = next(iter(without.items()))
            text = f"{file} has no part {' or '.join(self.endings)} for {len(without)} of "
            text += f"{counted(len(samples), 'sample')}, such as {name!r}, which has {listing(sorted(parts))}"
            if len(without) == len(samples):
                raise ValueError(f"{text}; give the ending of the images (--data.input_key)")
            warnings.warn(f"{text}: left out", stacklevel=2)
        return [parts for name, parts in samples.items() if name not in without], len(without)


def refuse_remote(name: str) -> None:
    """Refuse URLs, because nothing is downloaded, and ``pipe:``, which would run a command.

    Raises:
        ValueError: `name` begins like a URL.
    """
    if re.match(r"pipe:|[A-Za-z][\w+.-]*:/", name):
        raise ValueError(f"{name} is not on disk; download the archives first, no URL is opened and no command is run")


def expand_braces(pattern: str, most: int = MOST_ARCHIVES) -> list[str]:
    """Expand a pattern as a shell does: ``{000..127}``, with or without leading zeros, and ``{a,b}``.

    Raises:
        ValueError: The pattern has braces within braces, has a brace without its partner, or stands for more than
            `most` names.
    """
    before, opening, rest = pattern.partition("{")
    inside, closing, after = rest.partition("}")
    if "}" in before or bool(opening) != bool(closing) or "{" in inside:
        raise ValueError(f"{pattern!r} has braces that do not pair; allowed are '{{000..127}}' and '{{a,b}}'")
    if not opening:
        return [pattern]
    if numbers := re.fullmatch(r"(\d+)\.\.(\d+)", inside):
        first, last = numbers.groups()
        padded = any(len(number) > 1 and number.startswith("0") for number in (first, last))
        width = max(len(first), len(last)) if padded else 0
        step = 1 if int(first) <= int(last) else -1
        count = abs(int(last) - int(first)) + 1
        if count > most:
            raise ValueError(
                f"{pattern!r} stands for {count:,} archives or more, the most are {MOST_ARCHIVES:,}: check the numbers "
                "in braces"
            )
        choices = [f"{number:0{width}d}" for number in range(int(first), int(last) + step, step)]
    elif "," in inside:
        choices = inside.split(",")
    else:
        raise ValueError(f"{pattern!r} holds {{{inside}}}; allowed are '{{000..127}}' and '{{a,b}}'")
    ends = expand_braces(after, max(most // len(choices), 1))
    return [before + choice + end for choice in choices for end in ends]


def _samples(file: str) -> dict[str, dict[str, Member]]:
    """Map the name of each sample to its parts: files by their endings, in lower case, without the dot."""
    samples: dict[str, dict[str, Member]] = {}
    for member in members(file):
        folder, slash, base = member.name.rpartition("/")
        stem, dot, ending = base.partition(".")
        # Skip hidden files and WebDataset's own metadata (`__NAME__`, or files in such a folder): they are not samples.
        if not stem or not dot or re.match(r"__[^/]*__($|/)", member.name):
            continue
        parts = samples.setdefault(folder + slash + stem, {})
        if ending.lower() in parts:
            both = " and ".join(visible(part.name) for part in (parts[ending.lower()], member))
            raise ValueError(f"{file} holds {both}, which are the same part of one sample; write the shard anew")
        parts[ending.lower()] = member
    if not samples:
        raise ValueError(f"no samples in {file}; a sample is files such as '000.jpg' and '000.cls'")
    return samples


def _described(split: str, info: Any) -> _Split:
    """Parse a split of `_info.json`."""
    try:
        names, lengths = [str(name) for name in info["filenames"]], info.get("shard_lengths") or []
        if lengths and len(lengths) != len(names):
            raise ValueError(f"{len(names)} filenames and {len(lengths)} shard_lengths")
        least = max(int(info.get("num_samples") or 0), sum(lengths))
        return _Split(names, least, field=info.get("alt_label") or None)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"_info.json should describe {split} by 'filenames' and 'num_samples': {one_line(error)}"
        ) from error


def _labels(file: str, samples: Sequence[dict[str, Member]], field: str | None) -> list[str | None]:
    part = "json" if field else "cls"
    if samples and not any(part in sample for sample in samples):
        raise ValueError(
            f"no sample in {file} has a part {part!r}; the first has {listing(sorted(samples[0]))}: "
            "--data.target_key FIELD takes a field of the part 'json'"
        )
    with open(file, "rb") as stream:
        return [_label(sample[part], stream, field) if part in sample else None for sample in samples]


def _label(member: Member, stream: BinaryIO, field: str | None) -> str | None:
    try:
        content = member.read_from(stream)
        if field is None:
            return as_label(content.decode())
        fields = parse_json(content)
        if field not in fields:
            raise ValueError(f"no field {field!r}{did_you_mean(field, fields)}; there are {listing(sorted(fields))}")
        return as_label(fields[field])
    except (EOFError, ValueError, TypeError) as error:
        raise ValueError(f"cannot read the label {visible(str(member))}: {error}") from error
