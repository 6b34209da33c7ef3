"""Valid images, configurations and checkpoints, and random ways to spoil them, for `tools/fuzz.py`."""

from __future__ import annotations

import copy
import io
import random
import re
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import yaml
from PIL import Image, ImageFilter

CONFIGS = Path(__file__).parent.parent / "configs"
KINDS = ("images", "configs", "checkpoints")
# Numbers at which sizes and counts overflow, turn negative or ask for too much.
EDGES = (0, 1, 2, 7, 0x7F, 0x80, 0xFF, 0x7FFF, 0x8000, 0xFFFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFE, 0xFFFFFFFF)
ODD_VALUES: tuple[Any, ...] = (
    *(None, True, -1, 0, 1, 7, 2**40, -(2**63), 0.5, -0.0, 1e308, float("nan"), float("inf"), "", "x", "relvit_tiny"),
    *(
        "é\u202e\n",
        "[",
        "../../x",
        "os.system",
        "relvit.data.modules.base.ImageData",
        [],
        [[]],
        [1, "a"],
        {},
        {"": None},
    ),
    *({"class_path": "os.system"}, [None] * 50, "9" * 400),
)


def images() -> list[bytes]:
    """Small images of every format and mode that is read, stored in several ways."""
    noise = random.Random(0).randbytes(4 * 30 * 22)
    rgba = Image.frombytes("RGBA", (30, 22), noise).filter(ImageFilter.GaussianBlur(2))
    modes = {mode: rgba.convert(mode) for mode in ("1", "L", "LA", "P", "RGB", "CMYK")} | {"RGBA": rgba}
    modes["I;16"] = Image.frombytes("I;16", (30, 22), noise[: 2 * 30 * 22])
    exif = Image.Exif()
    exif[0x0112], exif[0x010F] = 6, "maker"
    plans: list[tuple[str, str, dict[str, Any]]] = [
        *(("JPEG", mode, {}) for mode in ("L", "RGB", "CMYK")),
        *(("JPEG", "RGB", options) for options in ({"progressive": True}, {"exif": exif}, {"subsampling": 0})),
        *(("PNG", mode, {}) for mode in modes if mode != "CMYK"),
        *(("PNG", "P", {"transparency": t}) for t in (3, bytes(range(256)))),
        *(("PNG", mode, {"transparency": t, "exif": exif}) for mode, t in (("L", 9), ("RGB", (1, 2, 3)), ("I;16", 5))),
        *(("GIF", mode, {}) for mode in ("L", "P")),
        *(("GIF", "P", {"transparency": 3}), ("GIF", "P", {"save_all": True, "append_images": [modes["P"].rotate(9)]})),
        *(("BMP", mode, {}) for mode in ("1", "L", "P", "RGB", "RGBA")),
        *(("TIFF", mode, {}) for mode in modes),
        *(("TIFF", "RGB", {"compression": c}) for c in ("tiff_lzw", "tiff_adobe_deflate", "jpeg", "packbits")),
        *(("TIFF", "1", {"compression": c}) for c in ("group3", "group4")),
        *(("WEBP", mode, {"lossless": lossless}) for mode in ("RGB", "RGBA") for lossless in (False, True)),
        ("WEBP", "RGB", {"save_all": True, "append_images": [modes["RGB"].rotate(9)]}),
        *(("PPM", mode, {}) for mode in ("1", "L", "RGB")),
    ]
    found = []
    for kind, mode, options in plans:
        file = io.BytesIO()
        modes[mode].save(file, kind, **options)
        found.append(file.getvalue())
    return found


def configs() -> list[bytes]:
    """The configurations that come with relvit, with what their headers ask for on the command line."""
    found = []
    for path in sorted(CONFIGS.glob("*.yaml")):
        # Recipes for folders leave it to the command line where they are, additions which data.
        content = path.read_bytes().replace(b"root: null", b"root: photos")
        found.append(content if "data" in yaml.safe_load(content) else content + b"data: DigitsData\n")
    return found


def spoil_bytes(content: bytes, draw: random.Random, others: list[bytes]) -> bytes:
    """One to three random changes."""
    for _ in range(draw.randint(1, 3)):
        content = draw.choice(BYTE_CHANGES)(bytearray(content or b"\0"), draw, others)
    return content


def _flip(content: bytearray, draw: random.Random, others: list[bytes]) -> bytes:
    for _ in range(draw.choice((1, 1, 2, 8, 40))):
        content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    return bytes(content)


def _header(content: bytearray, draw: random.Random, others: list[bytes]) -> bytes:
    """A number of one, two or four bytes near the start, where formats keep sizes, becomes one at an edge."""
    kind = draw.choice("BHI")
    packed = struct.pack(draw.choice("<>") + kind, draw.choice(EDGES) & (256 ** struct.calcsize(kind) - 1))
    start = draw.randrange(max(1, min(96, len(content)) - len(packed)))
    return bytes(content[:start]) + packed + bytes(content[start + len(packed) :])


def _truncate(content: bytearray, draw: random.Random, others: list[bytes]) -> bytes:
    return bytes(content[: draw.randrange(len(content))])


def _splice(content: bytearray, draw: random.Random, others: list[bytes]) -> bytes:
    other = draw.choice(others)
    return bytes(content[: draw.randrange(len(content))]) + other[draw.randrange(len(other)) :]


def _part(content: bytearray, draw: random.Random) -> slice:
    start = draw.randrange(len(content))
    return slice(start, start + draw.choice((1, 4, 16, 200)))


def _repeat(content: bytearray, draw: random.Random, others: list[bytes]) -> bytes:
    part = _part(content, draw)
    return bytes(content[: part.stop] + content[part] * draw.choice((1, 2, 50)) + content[part.stop :])


def _delete(content: bytearray, draw: random.Random, others: list[bytes]) -> bytes:
    del content[_part(content, draw)]
    return bytes(content)


def _fill(content: bytearray, draw: random.Random, others: list[bytes]) -> bytes:
    part = _part(content, draw)
    length = len(content[part])
    content[part] = draw.choice((b"\0" * length, b"\xff" * length, draw.randbytes(length)))
    return bytes(content)


BYTE_CHANGES: tuple[Callable[[bytearray, random.Random, list[bytes]], bytes], ...] = (
    *(_flip, _header, _truncate, _splice, _repeat, _delete, _fill),
)


def spoil_config(content: bytes, draw: random.Random, others: list[bytes]) -> bytes:
    """Changes of bytes, of lines and of values."""
    match draw.randrange(4):
        case 0:
            return spoil_bytes(content, draw, others)
        case 1:
            return _spoil_lines(content, draw)
        case 2:
            value = spoil_value(yaml.safe_load(content), draw)
            return yaml.safe_dump(value, allow_unicode=draw.random() < 0.5).encode("utf-8", "surrogatepass")
        case _:
            depth = draw.choice((10, 60, 5000, 100_000))
            inside = draw.choice(
                ("[" * depth + "]" * depth, "{a: " * depth + "}" * depth, "- " * min(depth, 5000) + "a")
            )
            aliases = "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9) if i else 'x'}]\n" for i in range(9))
            tags = ("!!python/object/apply:os.system ['true']", "!!python/name:os.system ''", "!x y", "&a [*a]", "*b")
            added = draw.choice((f"model: {inside}\n", f"{aliases}model: *a8\n", *(f"model: {tag}\n" for tag in tags)))
            return draw.choice((content + added.encode(), added.encode() + content, added.encode()))


def _spoil_lines(content: bytes, draw: random.Random) -> bytes:
    lines = content.splitlines(keepends=True)
    for _ in range(draw.randint(1, 4)):
        here, there = (draw.randrange(len(lines)) for _ in range(2))
        match draw.randrange(5):
            case 0:
                lines.insert(there, lines[here])
            case 1:
                lines[here] = b" " * draw.randrange(9) + lines[here].lstrip()
            case 2:
                lines[here], lines[there] = lines[there], lines[here]
            case 3:
                value = yaml.safe_dump(draw.choice(ODD_VALUES), default_flow_style=True).split("\n")[0].encode()
                lines[here] = re.sub(rb":.*", lambda _, value=value: b": " + value, lines[here], count=1)
            case _:
                lines[here] = lines[here].replace(
                    b"e", draw.choice((b"\xff", b"\xc3\x28", b"\0", b"\t", b"\xed\xa0\x80")), 1
                )
    return b"".join(lines)


def spoil_value(value: Any, draw: random.Random) -> Any:
    """A few entries anywhere in nested dicts and lists removed, renamed, or replaced by something odd."""
    value = copy.deepcopy(value)
    for _ in range(draw.randint(1, 3)):
        places = list(_places(value))
        if not places:
            break
        holder, key = draw.choice(places)
        match draw.randrange(6):
            case 0:
                del holder[key]
            case 1 if isinstance(holder, dict):
                holder[draw.choice(("x", "", "class_path", f"{key}x", 0))] = holder.pop(key)
            case _:
                holder[key] = copy.deepcopy(draw.choice(ODD_VALUES))
    return value


def _places(value: Any) -> Any:
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in pairs:
        yield value, key
        yield from _places(inner)


def spoil_checkpoint(content: bytes, draw: random.Random, others: list[bytes]) -> bytes:
    """Changes of the file's bytes, of its pickle within a whole archive, or of the values that it holds."""
    match draw.randrange(3):
        case 0:
            return spoil_bytes(content, draw, others)
        case 1:
            file = io.BytesIO()
            kind = draw.choice((zipfile.ZIP_STORED, zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED))
            with zipfile.ZipFile(io.BytesIO(content)) as old, zipfile.ZipFile(file, "w", kind) as new:
                for entry in old.infolist():
                    data = old.read(entry)
                    pickled = entry.filename.endswith("data.pkl")
                    new.writestr(entry.filename, spoil_bytes(data, draw, [data]) if pickled else data)
            return file.getvalue()
        case _:
            values = torch.load(io.BytesIO(content), weights_only=True)
            file = io.BytesIO()
            # What a checkpoint says of its model and data is a small part of all its values.
            if draw.random() < 0.6:
                values["relvit"] = spoil_value(values["relvit"], draw)
            else:
                values = spoil_value(values, draw)
            torch.save(values, file)
            return file.getvalue()


SPOIL = {"images": spoil_bytes, "configs": spoil_config, "checkpoints": spoil_checkpoint}
