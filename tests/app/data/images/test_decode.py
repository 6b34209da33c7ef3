"""Known pixel values for every kind of image file; tests/support/data/broken_input.py has the broken files."""

import contextlib
import gc
import os
import struct
import warnings
import zlib

import numpy as np
import PIL
import pytest
import torch
from broken_input import IMAGES
from PIL import Image, ImageOps
from stored_images import write as write_stored

from relvit.app.cli import main
from relvit.app.data import ImageNetData, ReaderData, UnreadableImageError, load_rgb
from relvit.app.data.images.decode import as_rgb
from relvit.app.data.images.given_images import to_pil


def pixels(path):
    return np.asarray(load_rgb(path)).tolist()


def saved(image, path, **options):
    image.save(path, **options)
    return path


def png(path, width, depth, colour, row, transparent):
    """Write a PNG with one row of pixels, in a mode that Pillow cannot write."""

    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, 1, depth, colour, 0, 0, 0)
    parts = [(b"IHDR", header), (b"tRNS", transparent), (b"IDAT", zlib.compress(b"\0" + row)), (b"IEND", b"")]
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + b"".join(chunk(*part) for part in parts))
    return path


def tiff(path, order, tags, strips):
    """Write a TIFF in the byte order '<' or '>', with tags and strips that Pillow cannot write."""
    defaults = {257: [len(strips)], 259: [1], 277: [1], 278: [1], 279: [len(strip) for strip in strips]}
    tags = sorted((defaults | {273: [0] * len(strips)} | tags).items())
    start = 10 + 12 * len(tags) + 4
    offset = start + sum(4 * len(numbers) for _, numbers in tags)
    directory, long = struct.pack(f"{order}H", len(tags)), b""
    for tag, numbers in tags:
        if tag == 273:
            numbers = [offset + sum(map(len, strips[:index])) for index in range(len(strips))]
        # A single number stands in the directory itself, and several numbers behind it.
        place = numbers[0] if len(numbers) == 1 else start + len(long)
        directory += struct.pack(f"{order}HHII", tag, 4, len(numbers), place)
        long += struct.pack(f"{order}{len(numbers)}I", *numbers)
    header = {"<": b"II*\0", ">": b"MM\0*"}[order] + struct.pack(f"{order}I", 8)
    path.write_bytes(header + directory + bytes(4) + long + b"".join(strips))
    return path


def test_rgb_is_unchanged(tmp_path):
    values = np.arange(24, dtype=np.uint8).reshape(2, 4, 3)
    assert pixels(saved(Image.fromarray(values), tmp_path / "a.png")) == values.tolist()


@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [
        ("a.png", {"transparency": 1}, [[10, 20, 30], [255, 255, 255], [0, 0, 200]]),
        ("a.png", {"transparency": bytes([255, 0, 51])}, [[10, 20, 30], [255, 255, 255], [204, 204, 244]]),
        ("a.gif", {"transparency": 2}, [[10, 20, 30], [200, 0, 0], [255, 255, 255]]),
    ],
)
def test_palette(tmp_path, name, options, expected):
    palette = Image.new("P", (3, 1))
    palette.putdata([0, 1, 2])
    palette.putpalette([10, 20, 30, 200, 0, 0, 0, 0, 200])
    assert np.abs(np.subtract(pixels(saved(palette, tmp_path / name, **options)), [expected])).max() <= 1


def test_alpha_hides_the_colour_below(tmp_path):
    values = np.array([[[255, 0, 0, 0], [255, 0, 0, 51], [255, 0, 0, 255]]], np.uint8)
    path = saved(Image.fromarray(values, "RGBA"), tmp_path / "a.png")
    assert pixels(path) == [[[255, 255, 255], [255, 204, 204], [255, 0, 0]]]
    for name in ("a.png", "a.tif"):
        image = Image.merge("LA", [Image.new("L", (1, 1), 100), Image.new("L", (1, 1), 0)])
        assert pixels(saved(image, tmp_path / name)) == [[[255] * 3]]


@pytest.mark.skipif(int(PIL.__version__.split(".")[0]) < 13, reason="Pillow 13 is the first to read such a file")
def test_premultiplied_grey(tmp_path):
    path = saved(Image.merge("LA", [Image.new("L", (1, 1), 20), Image.new("L", (1, 1), 51)]), tmp_path / "a.tif")
    # Pillow cannot write this kind of TIFF, so change the tag ExtraSamples (338) in the file from 2 (straight alpha) to
    # 1 (premultiplied alpha).
    straight, premultiplied = (struct.pack("<HHIH", 338, 3, 1, kind) for kind in (2, 1))
    stored = path.read_bytes()
    assert stored.count(straight) == 1
    path.write_bytes(stored.replace(straight, premultiplied))
    assert pixels(path) == [[[20 + 204] * 3]]


def test_transparent_colour_of_every_depth(tmp_path):
    grey = Image.fromarray(np.array([[7, 100]], np.uint8))
    assert pixels(saved(grey, tmp_path / "g.png", transparency=7)) == [[[255] * 3, [100] * 3]]
    rgb = Image.new("RGB", (1, 1), (1, 2, 3))
    assert pixels(saved(rgb, tmp_path / "c.png", transparency=(1, 2, 3))) == [[[255] * 3]]
    two_bit = png(tmp_path / "2.png", 4, 2, 0, b"\x1b", struct.pack(">H", 2))
    assert pixels(two_bit) == [[[0] * 3, [85] * 3, [255] * 3, [255] * 3]]
    four_bit = png(tmp_path / "4.png", 2, 4, 0, b"\x5a", struct.pack(">H", 5))
    assert pixels(four_bit) == [[[255] * 3, [170] * 3]]
    one_bit = png(tmp_path / "1.png", 2, 1, 0, b"\x40", struct.pack(">H", 0))
    assert pixels(one_bit) == [[[255] * 3, [255] * 3]]
    colour = struct.pack(">3H", 0x1234, 0x5678, 0x9ABC)
    rgb = png(tmp_path / "rgb.png", 2, 16, 2, colour + struct.pack(">3H", 0, 256, 512), colour)
    assert pixels(rgb) == [[[255] * 3, [0, 1, 2]]]
    grey = png(tmp_path / "16.png", 2, 16, 0, struct.pack(">2H", 300, 257 * 9), struct.pack(">H", 300))
    assert pixels(grey) == [[[255] * 3, [9] * 3]]


def test_cmyk_as_jpeg(tmp_path):
    image = Image.merge("CMYK", [Image.new("L", (8, 8), v) for v in (255, 0, 0, 0)])
    red, green, blue = pixels(saved(image, tmp_path / "a.jpg", quality=100))[4][4]
    assert red <= 3
    assert min(green, blue) >= 252


def test_16_bit_grey_is_scaled(tmp_path):
    values = np.array([[0, 128, 129, 257 * 100, 65535]], np.uint16)
    for name in ("a.png", "a.tif"):
        assert pixels(saved(Image.fromarray(values), tmp_path / name)) == [[[v] * 3 for v in (0, 0, 1, 100, 255)]]
    assert pixels(saved(Image.new("I;16B", (1, 1), 257 * 18), tmp_path / "b.tif")) == [[[18] * 3]]
    with pytest.raises(ValueError, match="grey values from -1 to -1 do not fit 16 bits; scale its values to 8 bits, 0"):
        load_rgb(saved(Image.new("I", (1, 1), -1), tmp_path / "c.tif"))


def test_tiff_of_12_bits(tmp_path):
    values = [[0, 2048, 4095], [16, 3000, 1]]
    rows = ("".join(f"{value:012b}" for value in row) + "0000" for row in values)
    path = tiff(
        tmp_path / "a.tif", "<", {256: [3], 258: [12], 262: [1]}, [int(row, 2).to_bytes(5, "big") for row in rows]
    )
    expected = [[[round(value * 255 / 4095)] * 3 for value in row] for row in values]
    assert pixels(path) == expected
    assert np.asarray(to_pil(Image.open(path))).tolist() == expected


@pytest.mark.parametrize("order", "<>")
@pytest.mark.parametrize(("mode", "extra"), [("RGB", {}), ("RGBA", {338: [2]})])
def test_tiff_of_16_bits_with_a_plane_for_each_channel(tmp_path, order, mode, extra):
    """tifffile writes an array (3, height, width) in this way."""
    values = np.random.default_rng(0).integers(0, 256, (2, 3, len(mode)))
    planes = [(257 * plane).astype(f"{order}u2").tobytes() for plane in values.transpose(2, 0, 1)]
    bits = [16] * len(mode)
    tags = {256: [3], 257: [2], 258: bits, 262: [2], 277: [len(mode)], 278: [2], 284: [2], **extra}
    expected = as_rgb(Image.fromarray(values.astype(np.uint8), mode))
    assert pixels(tiff(tmp_path / "a.tif", order, tags, planes)) == np.asarray(expected).tolist()
    packed = [zlib.compress(plane) for plane in planes]
    assert pixels(tiff(tmp_path / "b.tif", order, tags | {259: [8]}, packed)) == np.asarray(expected).tolist()


@pytest.mark.parametrize("compression", [None, "tiff_lzw"])
def test_tiff_whose_zero_is_white(tmp_path, compression):
    grey = np.array([[0, 3, 100, 255]], np.uint8)
    for name, values in {"8": grey, "16": grey.astype(np.uint16) * 257}.items():
        # Pillow stores 16 bits as they are, but inverts 8 bits itself.
        stored = values if name == "16" else 255 - values
        path = saved(
            Image.fromarray(stored), tmp_path / name, format="TIFF", compression=compression, tiffinfo={262: 0}
        )
        assert Image.open(path).tag_v2[262] == 0
        assert pixels(path) == [[[255 - value] * 3 for value in grey[0].tolist()]]


@pytest.mark.parametrize(("name", "tolerance"), [("a.jpg", 8), ("a.tif", 0), ("a.png", 0)])
@pytest.mark.parametrize(("orientation", "corner"), [(3, (2, 1)), (6, (1, 0)), (8, (0, 2))])
def test_exif_orientation(tmp_path, name, tolerance, orientation, corner):
    """The upper left block of the stored 3 x 2 blocks is white; ``corner`` is where it is shown (x, y)."""
    blocks = np.zeros((2, 3), np.uint8)
    blocks[0, 0] = 255
    image = Image.fromarray(np.kron(blocks, np.ones((16, 16), np.uint8))).convert("RGB")
    exif = Image.Exif()
    exif[0x0112] = orientation
    shown = load_rgb(saved(image, tmp_path / name, exif=exif, **({"quality": 95} if name == "a.jpg" else {})))
    x, y = corner
    expected = np.zeros((2, 3) if orientation == 3 else (3, 2))
    expected[y, x] = 255
    centres = np.asarray(shown)[8::16, 8::16, 0].astype(int)
    assert np.abs(centres - expected).max() <= tolerance
    # `Predictor` and the page of `relvit demo` call `as_rgb` on decoded images, and transformers calls
    # `exif_transpose`. Neither must turn the image again.
    for again in (as_rgb(shown), ImageOps.exif_transpose(shown)):
        assert np.array_equal(again, shown), "an upright image is turned a second time"


def test_a_limit_of_pixels_holds_before_decoding(tmp_path, monkeypatch):
    path = saved(Image.new("RGB", (30, 20)), tmp_path / "a.png")
    assert load_rgb(path, max_pixels=600).size == (30, 20)
    monkeypatch.setattr(Image.Image, "load", None)
    with pytest.raises(ValueError, match=r"a.png: it has 30 x 20 pixels, the most are 599; make it smaller"):
        load_rgb(path, max_pixels=599)


@pytest.mark.parametrize("ending", ["jpg", "png", "gif", "tif", "webp", "bmp"])
def test_more_pixels_than_pillow_allows(ending, tmp_path, monkeypatch):
    path = saved(Image.new("RGB", (30, 20)), tmp_path / f"a.{ending}")
    # Pillow refuses twice this number of pixels.
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    assert load_rgb(path, max_pixels=600).size == (30, 20)
    assert Image.MAX_IMAGE_PIXELS == 100


@pytest.mark.parametrize("ending", ["jpg", "png", "gif", "tif", "webp", "bmp"])
def test_a_decoder_that_reads_on_after_its_time_is_stopped(ending, tmp_path, monkeypatch):
    path, clock = tmp_path / f"a.{ending}", [0.0]
    noise = np.random.default_rng(0).integers(0, 256, (300, 400, 3), dtype=np.uint8)
    Image.fromarray(noise).save(path)
    monkeypatch.setattr("relvit.app.data.images.decode.time.monotonic", lambda: clock[0])
    assert load_rgb(path, max_seconds=5).tobytes() == load_rgb(path).tobytes()
    # Each reading of the clock is two seconds later than the last one.
    monkeypatch.setattr(
        "relvit.app.data.images.decode.time.monotonic", lambda: clock.append(clock.pop() + 2) or clock[0]
    )
    with pytest.raises(UnreadableImageError, match="decoding it takes more than 5 seconds"):
        load_rgb(path, max_seconds=5)


def test_odd_files_print_nothing(tmp_path, capfd, recwarn):
    """libtiff and Pillow would print messages that do not name the file."""
    image = Image.fromarray(np.random.default_rng(0).integers(0, 255, (64, 80, 3), np.uint8))
    for compression, picture in (("tiff_deflate", image), ("group4", image.convert("1"))):
        picture.save(tmp_path / "a.tif", compression=compression)
        content = bytearray((tmp_path / "a.tif").read_bytes())
        content[200:240] = b"\xff" * 40
        for odd in (content, content[: len(content) * 2 // 3]):
            (tmp_path / "a.tif").write_bytes(odd)
            with contextlib.suppress(UnreadableImageError):
                load_rgb(tmp_path / "a.tif")
    assert capfd.readouterr() == ("", "")
    assert not recwarn.list


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="counts open files through /proc")
def test_files_are_closed(tmp_path):
    good = saved(Image.new("RGB", (4, 4)), tmp_path / "good.tif")
    bad = []
    # Leave out the file without permission to read, and the decompression bomb, which is slow.
    left_out = ("no right to read it", "decompression bomb of 16,000 x 16,000 pixels")
    for number, case in enumerate(case for case in IMAGES if case.reason and case.kind not in left_out):
        (tmp_path / str(number)).mkdir()
        bad.append(case.write(tmp_path / str(number)))
    with warnings.catch_warnings():
        warnings.simplefilter("error", ResourceWarning)
        before = len(os.listdir("/proc/self/fd"))
        image = load_rgb(good)
        for path in bad:
            with pytest.raises(ValueError, match="cannot read"):
                load_rgb(path)
        assert len(os.listdir("/proc/self/fd")) == before
        gc.collect()
    assert image.getpixel((0, 0)) == (0, 0, 0)


# Each file has its upper left and its lower right pixel, as an image viewer shows them.
ODD = {"turned.png": ([255] * 3, [0] * 3), "transparent.png": ([255] * 3, [1, 2, 3])}


def write_odd(folder):
    folder.mkdir(parents=True)
    exif = Image.Exif()
    exif[0x0112] = 6  # The first stored row is shown as the right column.
    stored = np.zeros((4, 6), np.uint8)
    stored[3, 0] = 255  # This lower left pixel comes to the upper left.
    Image.fromarray(stored).save(folder / "turned.png", exif=exif)
    rgba = np.full((6, 4, 4), (1, 2, 3, 255), np.uint8)
    rgba[0, 0] = (200, 0, 0, 0)
    Image.fromarray(rgba).save(folder / "transparent.png")


def test_every_data_module_of_files_decodes_so(tmp_path):
    """Every data module of files handles orientation and transparency, in test and in predict."""
    options = {"img_size": (6, 4), "num_workers": 0, "crop_pct": 1.0, "mean": (0.0,) * 3, "std": (1.0,) * 3}
    names = ["n00000001", "n00000002"]
    for name in names:
        write_odd(tmp_path / "test" / name)
    files = [(f"{name}/{file}", (tmp_path / "test" / name / file).read_bytes(), name) for name in names for file in ODD]
    stored = write_stored("tar", tmp_path / "tar", {"test": files})
    for data in (
        ImageNetData(str(tmp_path), **options),
        ReaderData(**stored, test_split="test", class_names=names, **options),
    ):
        for split in ("test", "predict"):
            dataset = data.dataset(split)
            paths = [path for path, _ in dataset.samples] if split == "test" else dataset.paths
            assert len(paths) == 4
            for (image, _), path in zip(dataset, map(str, paths), strict=True):
                corners = (image[:, 0, 0] * 255).round().tolist(), (image[:, -1, -1] * 255).round().tolist()
                assert corners == ODD[path.rsplit("/", 1)[1]], path
                assert (image.shape, image.dtype) == ((3, 6, 4), torch.float32)


def test_every_command_takes_a_limit_of_pixels(tmp_path, monkeypatch, fails):
    monkeypatch.setenv("RELVIT_MAX_PIXELS", "100")
    Image.new("L", (11, 10)).save(tmp_path / "a.png")
    message = r"the most are 100 \(--max_pixels, in Python RELVIT_MAX_PIXELS\); make it smaller or allow more"
    with pytest.raises(UnreadableImageError, match=message):
        load_rgb(tmp_path / "a.png")
    for given in (["--max_pixels", "109"], ["--max_pixels=109"]):
        main(["check-data", str(tmp_path), *given])
        assert os.environ["RELVIT_MAX_PIXELS"] == "109"
    for wrong in ("0", "-1", "many", ""):
        assert "--max_pixels must be a whole number, 1 or more" in fails(["check-data", f"--max_pixels={wrong}"])
    monkeypatch.setenv("RELVIT_MAX_PIXELS", "1e9")
    assert load_rgb(tmp_path / "a.png", 110).size == (11, 10)
    message = r"the environment variable RELVIT_MAX_PIXELS must be a whole number, as 250000000, got '1e9'$"
    with pytest.raises(ValueError, match=f"^{message}"):
        load_rgb(tmp_path / "a.png")


def test_strips_of_16_bits_are_those_of_the_whole():
    values = np.random.default_rng(0).integers(0, 65536, (1100, 3)).astype(np.uint16)
    found = np.asarray(as_rgb(Image.fromarray(values)))
    np.testing.assert_array_equal(found[..., 0], np.round(values / 257).astype(np.uint8))
