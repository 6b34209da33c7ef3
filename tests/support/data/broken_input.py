"""Every kind of broken or odd image and folder, with the expected result.

`python tests/support/data/broken_input.py` writes the tables of docs/broken_input.md.
"""

import os
import shutil
import socket
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from grey_folders import GREY, add
from PIL import Image

DOCUMENT = Path(__file__).parents[3] / "docs" / "broken_input.md"
BEGIN, END = "<!-- written by tests/support/data/broken_input.py -->", "<!-- end -->"


class OddImage(NamedTuple):
    """An odd file: its kind, its name, a function that writes it, and the size and upper left pixel, or the error."""

    kind: str
    name: str
    make: Callable[[Path], Any]
    outcome: str
    size: tuple[int, int] | None = None
    pixel: tuple[int, int, int] | None = None
    reason: str = ""

    def write(self, folder: Path) -> Path:
        self.make(folder / self.name)
        return folder / self.name


class OddFolder(NamedTuple):
    """A change of a folder of two ants, bees and cats to train and one of each to validate, the images of train
    that are then read, by class (None: the folder is refused), and the error or warning."""

    kind: str
    spoil: Callable[[Path], Any]
    outcome: str
    counts: tuple[int, ...] | None = None
    message: str = ""


def saved(image: Image.Image, **options: Any) -> Callable[[Path], Any]:
    return lambda path: image.save(path, **options)


def stored(content: bytes) -> Callable[[Path], Any]:
    return lambda path: path.write_bytes(content)


def halved(path: Path) -> None:
    Image.fromarray(np.random.RandomState(0).randint(0, 256, (64, 64, 3)).astype(np.uint8)).save(path)
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])


def huge_png() -> bytes:
    """Return a PNG of a few bytes whose header claims 60,000 x 60,000 pixels."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", 60_000, 60_000, 8, 2, 0, 0, 0)
    parts = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(bytes(9))) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + parts


def progressive(scans: int) -> Callable[[Path], Any]:
    """Return a progressive JPEG whose last scan is repeated."""

    def write(path: Path) -> None:
        Image.new("RGB", (3, 2)).save(path, progressive=True)
        content = path.read_bytes()
        last = content[content.rindex(b"\xff\xda") : -2]
        path.write_bytes(content[:-2] + last * (scans - content.count(b"\xff\xda")) + content[-2:])

    return write


def commented(blocks: int) -> Callable[[Path], Any]:
    """Return a GIF with a comment of this number of blocks, of 255 bytes each, before its image."""

    def write(path: Path) -> None:
        FRAMES[0].save(path)
        content = path.read_bytes()
        start = 13 + 3 * 2 ** ((content[10] & 7) + 1)
        comment = b"!\xfe" + (b"\xff" + b"c" * 255) * blocks + b"\0"
        path.write_bytes(content[:start] + comment + content[start:])

    return write


def exif(orientation: int) -> Image.Exif:
    found = Image.Exif()
    found[0x0112] = orientation
    return found


def listen(path: Path) -> None:
    # Names of sockets must be short, so enter the folder first. The file of a socket remains after the socket is
    # closed.
    here = os.getcwd()
    os.chdir(path.parent)
    with socket.socket(socket.AF_UNIX) as found:
        found.bind(path.name)
    os.chdir(here)


def grey(value: int, mode: str = "L", size: tuple[int, int] = (3, 2)) -> Image.Image:
    return Image.new(mode, size, value)


RED, GREEN = (200, 0, 0), (0, 200, 0)
PALETTE = Image.new("P", (3, 2), 1)
PALETTE.putpalette([9, 8, 7, *RED])
SIDEWAYS = Image.fromarray(np.array([[0] * 3, [255, 0, 0]], np.uint8)).convert("RGB")
FRAMES = [Image.new("RGB", (3, 2), colour) for colour in (RED, GREEN)]
NOT_REGULAR = "it is not a file but a pipe, a socket or a device"
BROKEN, NO_IMAGE = "the image data are truncated or broken", "it is not an image, or of an unknown format"
READ, REFUSED, WARNED = "read", "refused", "warned"

IMAGES = [
    OddImage("EXIF orientation", "a.png", saved(SIDEWAYS, exif=exif(6)), "turned as a viewer does", (2, 3), (255,) * 3),
    OddImage("alpha channel", "a.png", saved(Image.new("RGBA", (3, 2), (9, 0, 0, 0))), "on white", (3, 2), (255,) * 3),
    OddImage("palette", "a.png", saved(PALETTE), "its colours", (3, 2), RED),
    OddImage("palette with transparency", "a.png", saved(PALETTE, transparency=1), "on white", (3, 2), (255,) * 3),
    OddImage("16-bit grey", "a.png", saved(Image.fromarray(np.full((2, 3), 25700, np.uint16))), "divided by 257",
             (3, 2), (100,) * 3),
    OddImage("32-bit integers within 16 bits", "a.tif", saved(grey(257 * 3, "I")), "divided by 257", (3, 2), (3,) * 3),
    OddImage("32-bit integers beyond 16 bits", "a.tif", saved(grey(65536, "I")), REFUSED, reason="do not fit 16 bits"),
    OddImage("1-bit", "a.png", saved(grey(1, "1")), "black and white", (3, 2), (255,) * 3),
    OddImage("8-bit grey", "a.png", saved(grey(100)), "grey as RGB", (3, 2), (100,) * 3),
    OddImage("CMYK", "a.tif", saved(Image.new("CMYK", (3, 2), (255, 0, 0, 0))), "converted", (3, 2), (0, 255, 255)),
    OddImage("32-bit float", "a.tif", saved(Image.new("F", (3, 2), 0.5)), REFUSED,
             reason="32-bit float pixels have no known range"),
    OddImage("animated GIF", "a.gif", saved(FRAMES[0], save_all=True, append_images=FRAMES[1:]), "its first frame",
             (3, 2), RED),
    *(OddImage(f"truncated {kind}", f"a.{kind.lower()}", halved, REFUSED, reason=BROKEN)
      for kind in ("JPEG", "PNG", "TIFF", "BMP", "WebP")),
    OddImage("zero bytes", "a.jpg", stored(b""), REFUSED, reason="the file is empty (zero bytes)"),
    OddImage("text named .jpg", "a.jpg", stored(b"not an image\n" * 100), REFUSED, reason=NO_IMAGE),
    OddImage("PostScript named .jpg", "a.jpg",
             saved(Image.new("RGB", (3, 2)), format="EPS"), REFUSED, reason=NO_IMAGE),
    OddImage("PNG named .jpg", "a.jpg", saved(Image.new("RGB", (3, 2), RED), format="PNG"), "by its content",
             (3, 2), RED),
    OddImage("decompression bomb of 16,000 x 16,000 pixels", "a.png",
             saved(Image.new("1", (16_000, 16_000))), REFUSED, reason="the most are 250,000,000 (--max_pixels"),
    OddImage("line of 1 x 70,000 pixels", "a.png", saved(Image.new("1", (1, 70_000))), REFUSED,
             reason="the longest side is 65,500"),
    OddImage("progressive JPEG with 400 scans", "a.jpg", progressive(400), REFUSED, reason="it has 400 scans"),
    OddImage("progressive JPEG", "a.jpg", saved(Image.new("RGB", (3, 2)), progressive=True), "as any other",
             (3, 2), (0, 0, 0)),
    OddImage("GIF with an endless comment", "a.gif", commented(5000), REFUSED, reason="a megabyte of comments"),
    OddImage("GIF with a comment", "a.gif", commented(2), "as any other", (3, 2), RED),
    OddImage("broken EXIF in a JPEG", "a.jpg", saved(Image.new("RGB", (3, 2)), exif=b"Exif\0\0garbage"), "as without",
             (3, 2), (0, 0, 0)),
    OddImage("broken EXIF in a PNG", "a.png", saved(Image.new("RGB", (3, 2)), exif=b"Exif\0\0garbage"), "as without",
             (3, 2), (0, 0, 0)),
    OddImage("header that claims 60,000 x 60,000 pixels", "a.png", stored(huge_png()), REFUSED,
             reason="the most are 250,000,000 (--max_pixels"),
    OddImage("one pixel", "a.png", saved(Image.new("RGB", (1, 1), RED)), "enlarged", (1, 1), RED),
    OddImage("line of 1 x 30,000 pixels", "a.png", saved(Image.new("RGB", (1, 30_000), RED)),
             "the middle, 64 times as long as the model's images", (1, 30_000), RED),
    OddImage("broken link", "a.jpg", lambda path: path.symlink_to("gone.jpg"), REFUSED, reason="there is no such file"),
    OddImage("link to itself", "a.jpg", lambda path: path.symlink_to(path), REFUSED,
             reason="the system cannot read it"),
    OddImage("pipe (FIFO) named .jpg", "a.jpg", os.mkfifo, REFUSED, reason=NOT_REGULAR),
    OddImage("socket named .jpg", "a.jpg", listen, REFUSED, reason=NOT_REGULAR),
    OddImage("link to a device named .jpg", "a.jpg", lambda path: path.symlink_to("/dev/zero"), REFUSED,
             reason=NOT_REGULAR),
    OddImage("folder given as an image", "a.jpg", Path.mkdir, REFUSED, reason="it is a folder, not a file"),
    OddImage("no right to read it", "a.jpg", lambda path: (path.write_bytes(b"x"), path.chmod(0)), REFUSED,
             reason="permission denied"),
    OddImage("commas and a newline in its name", 'a, "b"\nc.png', saved(Image.new("RGB", (3, 2), RED)),
             "quoted in CSV files", (3, 2), RED),
    OddImage("control characters in its name", "\x1b[2Ja\u202e.png", saved(Image.new("RGB", (3, 2), RED)),
             r"shown as `\x1b[2Ja\u202e.png` on the terminal", (3, 2), RED),
    OddImage("name that is not UTF-8", os.fsdecode(b"caf\xe9.png"), saved(Image.new("RGB", (3, 2), RED)),
             r"written as `caf\xe9.png`", (3, 2), RED),
]  # fmt: skip


def nested(root: Path) -> None:
    add(root / "train" / "ant" / "deep" / "er", GREY["ant"])


def linked(target: str, name: str = "train/ant/link") -> Callable[[Path], None]:
    return lambda root: (root / name).symlink_to(target)


def hidden(root: Path) -> None:
    add(root / "train" / ".ipynb_checkpoints")
    add(root / "train" / "ant" / ".ipynb_checkpoints")
    (root / "train" / "ant" / "._000.png").write_bytes(b"resource fork")


def gif(root: Path) -> None:
    grey(GREY["ant"], size=(8, 8)).save(root / "train" / "ant" / "a.GIF")


def not_read(root: Path, names: tuple[str, ...] = ("ant/a.heic", "bee/b.HEIC", "cat/c.svg")) -> None:
    for name in names:
        (root / "train" / name).write_bytes(b"not looked at")


def without(root: Path, *names: str) -> None:
    for name in names:
        shutil.rmtree(root / "train" / name)
        shutil.rmtree(root / "val" / name)


FOLDERS = [
    OddFolder("nested folders inside a class", nested, "images of the class", (3, 2, 2)),
    OddFolder("folder named .jpg inside a class", lambda root: add(root / "train" / "ant" / "x.jpg", GREY["ant"]),
              "a nested folder", (3, 2, 2)),
    OddFolder("link from a class to its parent", linked(".."), "not followed", (2, 2, 2)),
    OddFolder("link from a class to itself", linked("."), "not followed", (2, 2, 2)),
    OddFolder("links in a circle below a class",
              lambda root: (nested(root), linked("../..", "train/ant/deep/er/link")(root)), "not followed", (3, 2, 2)),
    OddFolder("link to a folder elsewhere", lambda root: (add(root / "more", GREY["ant"]), linked("../../more")(root)),
              "followed, once", (3, 2, 2)),
    OddFolder("two links to one folder elsewhere",
              lambda root: (add(root / "more", GREY["ant"]), linked("../../more")(root),
                            linked("../../more", "train/ant/again")(root)), "followed, once", (3, 2, 2)),
    OddFolder("hidden files and folders", hidden, "left out", (2, 2, 2)),
    OddFolder("GIF among the images of a class", gif, "read as the others", (3, 2, 2)),
    OddFolder("images of a format that is not read, by the ending", not_read, WARNED, (2, 2, 2),
              "3 files left out: 2 .heic, 1 .svg"),
    OddFolder("class folder with such images alone",
              lambda root: ((root / "train" / "dog").mkdir(), not_read(root, ("dog/a.heic",))), REFUSED, None,
              "holds no image that can be read (1 file left out: 1 .heic)"),
    OddFolder("images beside class folders", lambda root: add(root / "train"), WARNED, (2, 2, 2),
              "1 image is beside the class folders"),
    OddFolder("class names that differ by case",
              lambda root: (add(root / "train" / "ANT", count=2)), WARNED,
              (2, 2, 2, 2), "'ANT', 'ant' differ in case"),
    OddFolder("class name that is not UTF-8", lambda root: add(root / "train" / os.fsdecode(b"caf\xe9")), REFUSED,
              None, r"the class name 'caf\xe9' is not UTF-8; rename it"),
    OddFolder("control characters in a class name", lambda root: add(root / "train" / "b\x1b[2J\n"), REFUSED,
              None, r"the class name 'b\x1b[2J\n' has control characters; rename it"),
    OddFolder("control characters in a class name of val", lambda root: add(root / "val" / "b\u202e"), REFUSED,
              None, r"the class name 'b\u202e' has control characters; rename it"),
    OddFolder("Chinese, accents, emoji and spaces in class names",
              lambda root: [(root / split / "cat").rename(root / split / "猫 é 🐈") for split in ("train", "val")],
              "read as they are", (2, 2, 2)),
    OddFolder("one class alone", lambda root: without(root, "bee", "cat"), REFUSED, None,
              "classification needs two or more classes"),
    OddFolder("empty class folder", lambda root: (root / "train" / "dog").mkdir(), REFUSED, None, "holds no image"),
    OddFolder("no class folders", lambda root: (without(root, *GREY), add(root / "train")), REFUSED, None,
              "put the images of each class into a folder"),
    OddFolder("class of val that train does not have", lambda root: add(root / "val" / "dog"), REFUSED, None,
              "is a class that the training data or the checkpoint does not know"),
    OddFolder("both val and valid", lambda root: (root / "valid").mkdir(), REFUSED, None,
              "both hold validation images; keep one"),
    OddFolder("no such folder", shutil.rmtree, REFUSED, None, "is not a folder; give the one that holds train/"),
]  # fmt: skip


def table() -> str:
    """Return two Markdown tables of the cases, in which cases with the same result share a row, refused ones last."""
    lines = []
    for title, cases in (
        ("image", [(case.kind, case.outcome, "") for case in IMAGES]),
        ("folder", [(case.kind, case.outcome, case.message) for case in FOLDERS]),
    ):
        kinds: dict[str, list[str]] = {}
        for kind, outcome, message in cases:
            kinds.setdefault(f"{outcome}: “{message}”" if outcome == WARNED else outcome, []).append(kind)
        rows = sorted(kinds.items(), key=lambda row: row[0] == REFUSED)
        lines += ["", f"| {title} | result |", "|---|---|"]
        lines += [f"| {'; '.join(same)} | {result} |" for result, same in rows]
    return "\n".join(lines[1:])


def write_document() -> None:
    """Write the tables into docs/broken_input.md."""
    before, rest = DOCUMENT.read_text().split(BEGIN)
    DOCUMENT.write_text(f"{before}{BEGIN}\n\n{table()}\n\n{END}{rest.split(END)[1]}")


if __name__ == "__main__":
    write_document()
