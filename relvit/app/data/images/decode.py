"""Decode one image file as 8-bit RGB (`load_rgb`), or report in one line why it cannot be read."""

import contextlib
import ctypes
import os
import stat
import threading
import time
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, UnidentifiedImageError

from relvit.app.utils.shown_text import one_line, visible

# Pillow multiplies grey PNG values of 2 and 4 bits by these factors to widen them to 8 bits, but not the transparent
# colour in the tRNS chunk, so relvit multiplies this colour.
_GREY_TRANSPARENCY_SCALE = {"L;2": 85, "L;4": 17}

_FIX = "delete or replace it"
_SHRINK = "make it smaller"
_RESCALE = "scale its values to 8 bits, 0 to 255, or to 16 bits, 0 to 65535"

Image.init()
# libtiff prints a line for each error without the file's name, although Pillow raises an error, too. So turn the
# printing off. In some builds of Pillow, such as those for Windows, these functions of libtiff are not found; libtiff
# then continues to print.
with contextlib.suppress(AttributeError, OSError):
    _libtiff = ctypes.CDLL(Image.core.__file__)
    _libtiff.TIFFSetErrorHandler(None)
    _libtiff.TIFFSetWarningHandler(None)
# Only these formats are read, whatever the name of a file is. Pillow reads more formats, and hands some of them
# (PostScript) to other programs.
_SAFE = ("AVIF", "BMP", "DIB", "GIF", "JPEG", "JPEG2000", "PNG", "PPM", "TIFF", "WEBP")
_FORMATS = [name for name in _SAFE if name in Image.OPEN]
# PFM files are left out, because they hold floats, which have no known range.
IMAGE_ENDINGS = tuple(
    sorted(ending for ending, name in Image.registered_extensions().items() if name in _FORMATS and ending != ".pfm")
)
# Files with these endings (raw images of cameras, drawings and other formats) are not read, and a warning counts them.
_CAMERAS = (".arw", ".cr2", ".cr3", ".dng", ".nef", ".orf", ".raf", ".raw", ".rw2")
_DRAWN = (".cur", ".emf", ".eps", ".icns", ".ico", ".ps", ".psd", ".svg", ".wmf", ".xcf")
_PIXELS = (".avif", ".dds", ".exr", ".hdr", ".heic", ".heif", ".jp2", ".jxl", ".mpo", ".pcx", ".pfm", ".qoi", ".tga")
OTHER_ENDINGS = tuple(ending for ending in (*_CAMERAS, *_DRAWN, *_PIXELS) if ending not in IMAGE_ENDINGS)

# This environment variable holds the largest number of pixels of an image. `relvit.app.cli.main` sets the
# variable to the value of `--max_pixels`, and workers inherit the variable.
MAX_PIXELS = "RELVIT_MAX_PIXELS"
_DEFAULT_MAX_PIXELS = 250_000_000
# libjpeg refuses longer sides. Decoders of some other formats, such as PNG and TIFF, would accept such sides and could
# take gigabytes for one row of pixels, so longer sides are refused in all formats.
_LONGEST_SIDE = 65_500
# Each scan of a progressive JPEG passes over all pixels, and files of cameras and editors have about ten scans. A file
# is refused if it has more than `_MOST_SCANS` scans, or if scans times pixels exceeds `_SCANS_OF_MOST_PIXELS` times the
# largest number of pixels that is allowed.
_MOST_SCANS, _SCANS_OF_MOST_PIXELS = 100, 10
# Pillow joins a GIF's comments one by one, which takes quadratic time in their length, so longer comments are refused.
_LONGEST_COMMENTS = 2**20
_ROWS = 512
# `_ORIENTATION` is the number of the EXIF orientation tag. `_UPRIGHT` maps values of the tag to operations that turn
# the image upright.
_ORIENTATION = 0x0112
_UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
# These are the numbers of TIFF tags: the bits of each sample; the photometric interpretation, which is 0 if the value
# zero is white; and the planar configuration, which is 2 if the channels are stored one after the other.
_BITS, _PHOTOMETRIC, _PLANES = 258, 262, 284
_pillows_limit = threading.Lock()


class UnreadableImageError(ValueError):
    """An image file that cannot be read.

    Args:
        message: One line with the path, the reason and what to do.
        path: The file, or the name of a stored image.
        reason: Why the file cannot be read, in plain words.
    """

    # A DataLoader worker passes only the message of an error to the main process, so other arguments have defaults.
    def __init__(self, message: str, path: str = "", reason: str = "") -> None:
        super().__init__(message)
        self.path = path
        self.reason = reason


class StoredImage(ABC):
    """An encoded image inside of another file, such as an archive.

    ``str()`` of a stored image names the outer file and the image in it, and differs between the images of a dataset.
    DataLoader workers get copies of stored images, which therefore hold no open file.
    """

    __slots__ = ()

    @property
    def shared(self) -> Any:
        """A large object that all images of the dataset hold, such as an opened table; None: there is none."""
        return None

    @abstractmethod
    def read(self) -> bytes:
        """Read the encoded image. Any exception becomes the reason of an UnreadableImageError."""

    @abstractmethod
    def __str__(self) -> str: ...


ImageSource = str | os.PathLike[str] | StoredImage


def load_rgb(source: ImageSource, max_pixels: int | None = None, max_seconds: float | None = None) -> Image.Image:
    """Decode an image file completely, as 8-bit RGB, the way a viewer would show it.

    The EXIF orientation is applied; a broken EXIF block is ignored. Grey, 1-bit, palette and CMYK images are converted.
    Transparent images are laid on white, so the colours of transparent pixels have no effect. 16-bit grey values are
    divided by 257 and rounded, and values of 12-bit TIFFs are scaled in the same way. A 16-bit file does not say
    whether its values use 12 bits only, with which the image is nearly black: multiply such values by 16 before saving.
    If a file has several frames, the first frame is read. The file is closed on return.

    Args:
        source: The path of an image file, or a stored image.
        max_pixels: Refuse an image whose header says that it has more pixels, before decoding it; None: the value of
            the environment variable RELVIT_MAX_PIXELS, or 250 million. No side may be longer than 65,500 pixels.
        max_seconds: Give up an image whose decoding takes longer. The time is checked whenever the decoder reads from
            the file: for most formats every 64 kB, but for AVIF and WebP only at the start. None: never give up.

    Returns:
        An image of mode 'RGB', completely in memory, without metadata.

    Raises:
        UnreadableImageError: A ValueError: the file is missing, empty, truncated, otherwise broken, or not an image of
            a format that relvit reads.
        UnreadableImageError: The image has more than `max_pixels` pixels, a side longer than 65,500 pixels,
            floating-point pixels, or grey values outside 0 ... 65535.
        UnreadableImageError: Decoding takes more than `max_seconds`.
        UnreadableImageError: A progressive JPEG has so many scans, or a GIF such long comments, that decoding would
            take far more time than the number of pixels explains.
        ValueError: RELVIT_MAX_PIXELS is no whole number.
    """
    name = str(source) if isinstance(source, StoredImage) else os.fspath(source)
    # A wrong environment variable is no fault of this image, so read the variable outside of `try`.
    most = _most_pixels() if max_pixels is None else max_pixels
    try:
        # Pillow's warnings about an odd file, such as broken metadata, name no file and do not affect the pixels, so
        # ignore them.
        with warnings.catch_warnings(action="ignore"), open_image(source, max_seconds) as image:
            _check_cost(image, most, by_option=max_pixels is None)
            with _pillows_limit:
                limit = Image.MAX_IMAGE_PIXELS
            # Pillow checks its own limit a second time when it decodes a TIFF. Without that limit only one thread can
            # decode, so leave the limit as it is for smaller images.
            large = limit is not None and image.width * image.height > limit
            with _no_pillows_limit() if large else contextlib.nullcontext():
                return as_rgb(image)
    except MemoryError:
        raise
    # Pillow's decoders raise almost any type of error for a broken file (SyntaxError, struct.error, IndexError), so
    # catch all of them.
    except Exception as error:
        reason, fix = explain(error)
        raise UnreadableImageError(f"cannot read image {visible(name)}: {reason}; {fix}", name, reason) from error


def as_rgb(image: Image.Image) -> Image.Image:
    """Convert an open PIL image of any mode to 8-bit RGB, see :func:`load_rgb`. Broken files raise almost any error."""
    _scale_transparency(image)
    _widen_planes(image)
    # Pillow applies the orientation of a TIFF when it decodes the file, and removes the orientation tag. So read the
    # tag only after decoding.
    image.load()
    turn = _UPRIGHT.get(_orientation(image))
    # Only the images of TIFF files have tags.
    converted = _to_rgb(image if turn is None else image.transpose(turn), getattr(image, "tag_v2", {}))
    # The caller's image may belong to a file that will be closed, so return a copy.
    converted = converted.copy() if converted is image else converted
    # Pillow hands metadata on to converted images. With the orientation tag still there, `Predictor` and transformers
    # would turn the image a second time.
    converted.info = {}
    return converted


def _orientation(image: Image.Image) -> int | None:
    """Return the orientation in an image's EXIF block; None if there is no block, or if it is broken."""
    with warnings.catch_warnings(action="ignore"):
        try:
            found = image.getexif().get(_ORIENTATION)
        except Exception:
            return None
    return found if isinstance(found, int) else None


def _most_pixels() -> int:
    """Return the largest number of pixels that the environment allows, or the default."""
    given = os.environ.get(MAX_PIXELS, str(_DEFAULT_MAX_PIXELS))
    if not given.isdecimal():
        raise ValueError(f"the environment variable {MAX_PIXELS} must be a whole number, as 250000000, got {given!r}")
    return int(given)


def _check_cost(image: Image.Image, most: int, by_option: bool) -> None:
    """Refuse an open image, not yet decoded, that takes too much memory or time."""
    pixels, found = image.width * image.height, f"it has {image.width} x {image.height} pixels"
    if pixels > most:
        option, more = (f" (--max_pixels, in Python {MAX_PIXELS})", " or allow more") if by_option else ("", "")
        raise _RefusedError(f"{found}, the most are {most:,}{option}", f"{_SHRINK}{more}")
    if max(image.size) > _LONGEST_SIDE:
        raise _RefusedError(f"{found}, the longest side is {_LONGEST_SIDE:,}", _SHRINK)
    if image.format == "JPEG" and "progressive" in image.info:
        # In the compressed data of a JPEG, a byte 255 is followed by 0 unless it begins a marker. So each pair of bytes
        # FF DA marks a scan of the image, or of a thumbnail in its metadata, which has few scans.
        image.fp.seek(0)
        scans = image.fp.read().count(b"\xff\xda")
        if scans > _MOST_SCANS or scans * pixels > _SCANS_OF_MOST_PIXELS * most:
            raise _RefusedError(f"it has {scans} scans, each over all its {pixels:,} pixels")


class _RefusedError(Exception):
    """The reason, in plain words, why relvit itself refuses a file, and what to do."""

    def __init__(self, reason: str, fix: str = _FIX) -> None:
        super().__init__(reason)
        self.fix = fix


class _TimedFile(BytesIO):
    """A file in memory that refuses reads after some seconds, as nothing else can stop a decoder."""

    def __init__(self, content: bytes, seconds: float) -> None:
        super().__init__(content)
        self.seconds = seconds
        self.start = time.monotonic()

    def read(self, size: int | None = -1, /) -> bytes:
        if time.monotonic() - self.start > self.seconds:
            raise _RefusedError(f"decoding it takes more than {self.seconds:g} seconds")
        return super().read(size)


def open_image(source: ImageSource, max_seconds: float | None = None) -> Image.Image:
    """Open an image file without decoding it; pipes, sockets and devices are never opened."""
    if isinstance(source, StoredImage):
        content = source.read()
        file, size = BytesIO(content), len(content)
    else:
        found = os.stat(source)
        # Do not open a pipe: opening would wait until something is written to the pipe, maybe for ever.
        if not stat.S_ISREG(found.st_mode) and not stat.S_ISDIR(found.st_mode):
            raise _RefusedError("it is not a file but a pipe, a socket or a device")
        file, size = source, found.st_size
    if size == 0:
        raise _RefusedError("the file is empty (zero bytes)")
    if max_seconds is not None:
        content = file.getvalue() if isinstance(file, BytesIO) else Path(file).read_bytes()
        file = _TimedFile(content, max_seconds)
    _check_comments(file)
    with _no_pillows_limit(), warnings.catch_warnings(action="ignore"):
        return Image.open(file, formats=_FORMATS)


@contextlib.contextmanager
def _no_pillows_limit() -> Iterator[None]:
    """Switch off Pillow's own limit of pixels, because `_check_cost` refuses large images with a clearer message."""
    # The limit is a global variable, so only one thread at a time may change it.
    with _pillows_limit:
        limit, Image.MAX_IMAGE_PIXELS = Image.MAX_IMAGE_PIXELS, None
        try:
            yield
        finally:
            Image.MAX_IMAGE_PIXELS = limit


def _check_comments(file: BytesIO | str | os.PathLike[str]) -> None:
    """Refuse a GIF with more than a megabyte of comments and other blocks before its first image."""
    with contextlib.nullcontext(file) if isinstance(file, BytesIO) else open(file, "rb") as opened:
        start = opened.read(13)
        if start[:3] == b"GIF" and len(start) == 13:
            opened.seek(3 * 2 ** ((start[10] & 7) + 1) if start[10] & 128 else 0, os.SEEK_CUR)
            length = 0
            while opened.read(1) == b"!":
                opened.read(1)
                while count := int.from_bytes(opened.read(1), "big"):
                    opened.seek(count, os.SEEK_CUR)
                    length += count + 1
                    if length > _LONGEST_COMMENTS:
                        raise _RefusedError("it has more than a megabyte of comments before its first image")
        opened.seek(0)


def explain(error: Exception) -> tuple[str, str]:
    """Explain an exception met while reading: reason and remedy in plain words."""
    match error:
        case _RefusedError():
            return str(error), error.fix
        case FileNotFoundError():
            return "there is no such file", "correct the path, or delete or replace a broken link"
        case IsADirectoryError():
            return "it is a folder, not a file", "give the path of an image file"
        case PermissionError():
            return "permission denied", "make it readable, or " + _FIX
        case UnidentifiedImageError():
            return "it is not an image, or of an unknown format", _FIX
        case Image.DecompressionBombError() | Image.DecompressionBombWarning():
            return f"it is too large, maybe a decompression bomb ({error})", _FIX
        # If there is an errno, the error comes from the operating system: OSErrors of Pillow's decoders have none.
        case OSError() if error.errno is not None:
            return f"the system cannot read it ({error.strerror})", "try again, or " + _FIX
        case _:
            return f"the image data are truncated or broken ({one_line(error)})", _FIX


def _scale_transparency(image: Image.Image) -> None:
    """Scale the transparent colour of a PNG, before decoding, to the range of the decoded pixels."""
    if "transparency" not in image.info or not image.tile:
        return
    raw_mode = image.tile[0][3]
    if raw_mode == "RGB;16B":
        image.info["transparency"] = tuple(value >> 8 for value in image.info["transparency"])
    elif raw_mode in ("L;2", "L;4"):
        image.info["transparency"] *= _GREY_TRANSPARENCY_SCALE[raw_mode]


def _widen_planes(image: Image.Image) -> None:
    """Let Pillow read all 16 bits of a TIFF that stores its channels one after the other: Pillow would read 8 bits."""
    tags = getattr(image, "tag_v2", {})
    if 16 not in tags.get(_BITS, ()) or tags.get(_PLANES) != 2:
        return
    ending = ";16B" if tags.prefix == b"MM" else ";16L"
    for number, tile in enumerate(image.tile):
        codec, extents, offset, (raw_mode, *rest) = tile
        # The raw mode of a channel is one letter, such as "R". If the TIFF is compressed, libtiff reads all channels,
        # with 16 bits.
        if len(raw_mode) == 1:
            make = getattr(tile, "_make", tuple)  # Before Pillow 11, tiles are plain tuples.
            image.tile[number] = make((codec, extents, offset, (raw_mode + ending, *rest)))


def _to_rgb(image: Image.Image, tags: Mapping[int, Any]) -> Image.Image:
    if image.mode == "F":
        raise _RefusedError("32-bit float pixels have no known range", _RESCALE)
    if image.mode == "I" or image.mode.startswith("I;16"):
        return _grey16_to_rgb(image, tags)
    if image.has_transparency_data:
        if image.mode == "La":  # Pillow cannot convert premultiplied grey to RGBA directly.
            image = image.convert("LA")
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, (255, 255, 255, 255))
        image = Image.alpha_composite(white, image)
    return image if image.mode == "RGB" else image.convert("RGB")


def _grey16_to_rgb(image: Image.Image, tags: Mapping[int, Any]) -> Image.Image:
    values = np.asarray(image)
    # Pillow opens a TIFF of 12 bits as one of 16 bits, but does not scale its values to 16 bits.
    largest = 4095 if tags.get(_BITS) == (12,) else 65535
    grey = np.empty(values.shape, np.uint8)
    # Convert the image in strips, because the 64-bit integers of a large image would take several gigabytes.
    for first in range(0, len(values), _ROWS):
        strip = values[first : first + _ROWS].astype(np.int64)
        if strip.min() < 0 or strip.max() > 65535:
            raise _RefusedError(f"grey values from {strip.min()} to {strip.max()} do not fit 16 bits", _RESCALE)
        part = grey[first : first + _ROWS]
        part[:] = (255 * strip + largest // 2) // largest  # This rounds to nearest; no ties occur: `largest` is odd.
        if "transparency" in image.info:
            part[strip == image.info["transparency"]] = 255
    # If zero is white, Pillow inverts the values of a TIFF of up to 8 bits, but not those of 16 bits.
    if tags.get(_PHOTOMETRIC) == 0:
        np.subtract(255, grey, out=grey)
    return Image.fromarray(grey).convert("RGB")
