"""Valid images, configurations and checkpoints, spoilt at random: each is accepted, or refused in one line.

    FUZZ_EXAMPLES=100000 pytest -m fuzz tests/fuzz -k images

Without the variable the examples are few and the same each time. A crash of the process or a hang is a failure, too.
"""

import contextlib
import copy
import faulthandler
import io
import os
import random
import warnings

import pytest
import torch
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image, ImageFilter

import relvit
from relvit.cli.shipped_configs import shipped_configs
from relvit.cli.trainer.lightning_cli import RelvitCLI
from relvit.data import eval_transform, load_rgb

pytestmark = pytest.mark.fuzz

MORE = "FUZZ_EXAMPLES" in os.environ
# Numbers at which sizes and counts overflow, turn negative or ask for too much.
EDGES = (0, 1, 7, 0x7F, 0x80, 0xFF, 0x7FFF, 0x8000, 0xFFFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF)
ODD = [
    None,
    True,
    -1,
    0,
    7,
    2**40,
    -(2**63),
    0.5,
    1e308,
    float("nan"),
    float("inf"),
    "",
    "x",
    "relvit_tiny",
    "[",
    "../x",
]
ODD += [
    "é\u202e\n",
    "os.system",
    "relvit.data.ImageData",
    [],
    [[]],
    [1, "a"],
    {},
    {"": None},
    {"class_path": "os.system"},
]
ODD += [[None] * 50, "9" * 400]


def fuzzed(examples):
    """Run a test with so many examples, or as many as the environment variable asks for."""
    checks = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large]
    count = int(os.environ.get("FUZZ_EXAMPLES", examples))
    return settings(
        max_examples=count, deadline=None, database=None, derandomize=not MORE, suppress_health_check=checks
    )


def attempt(target, path):
    """Whether it is accepted; whatever else than a refusal is raised, or one of several lines, fails the test."""
    refusal = None
    # A hang ends the process, wherever it is.
    faulthandler.dump_traceback_later(60, exit=True)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            target(path)
    except (ValueError, FileNotFoundError) as error:
        refusal = str(error).strip()
    finally:
        faulthandler.cancel_dump_traceback_later()
    assert refusal is None or len(refusal.splitlines()) == 1, refusal
    return refusal is None


@st.composite
def spoilt_bytes(draw, files):
    """A file with one to three changes: bits, numbers at the edges, a cut, parts repeated, removed or of another."""
    content = bytearray(draw(st.sampled_from(files)))
    for _ in range(draw(st.integers(1, 3))):
        # Formats keep sizes near the start.
        most = len(content) if draw(st.booleans()) else min(96, len(content))
        start = draw(st.integers(0, max(most - 1, 0)))
        part = slice(start, start + draw(st.sampled_from((1, 4, 16, 200))))
        size = draw(st.sampled_from((1, 2, 4)))
        number = draw(st.sampled_from(EDGES)) % 256**size
        match draw(st.integers(0, 6)):
            case 0:
                content[start : start + 1] = bytes(b ^ 1 << draw(st.integers(0, 7)) for b in content[start : start + 1])
            case 1:
                content[start : start + size] = number.to_bytes(size, draw(st.sampled_from(("little", "big"))))
            case 2:
                del content[start:]
            case 3:
                content[part] = content[part] * draw(st.sampled_from((2, 50)))
            case 4:
                del content[part]
            case 5:
                content[part] = draw(st.binary(min_size=1, max_size=200))
            case _:
                other = draw(st.sampled_from(files))
                content[start:] = other[draw(st.integers(0, len(other) - 1)) :]
    return bytes(content)


def places(value):
    """Every entry in nested dictionaries and lists, as its holder and its key."""
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in pairs:
        yield value, key
        yield from places(inner)


@st.composite
def spoilt_value(draw, values):
    """A nested value of which a few entries are removed, renamed, or replaced by odd ones."""
    value = copy.deepcopy(draw(st.sampled_from(values)))
    for _ in range(draw(st.integers(1, 3))):
        if not (found := list(places(value))):
            break
        holder, key = draw(st.sampled_from(range(len(found))).map(found.__getitem__))
        change = draw(st.sampled_from(("remove", "rename", "replace", "replace", "replace")))
        if change == "remove":
            del holder[key]
        elif change == "rename" and isinstance(holder, dict):
            holder[draw(st.sampled_from(("x", "", "class_path", f"{key}x", 0)))] = holder.pop(key)
        else:
            holder[key] = copy.deepcopy(draw(st.sampled_from(ODD)))
    return value


def images():
    """Small images of every format and mode that is read, some stored in several ways."""
    noise = random.Random(0).randbytes(4 * 30 * 22)
    rgba = Image.frombytes("RGBA", (30, 22), noise).filter(ImageFilter.GaussianBlur(2))
    modes = {mode: rgba.convert(mode) for mode in ("1", "L", "LA", "P", "RGB", "CMYK")} | {"RGBA": rgba}
    modes["I;16"] = Image.frombytes("I;16", (30, 22), noise[: 2 * 30 * 22])
    exif = Image.Exif()
    exif[0x0112] = 6
    formats = {"JPEG": "L RGB CMYK", "PNG": "1 L LA P RGB RGBA I;16", "GIF": "L P", "BMP": "1 L P RGB RGBA"}
    formats |= {"TIFF": "1 L LA P RGB CMYK RGBA I;16", "WEBP": "RGB RGBA", "PPM": "1 L RGB"}
    plans = [(kind, mode, {}) for kind, names in formats.items() for mode in names.split()]
    plans += [("JPEG", "RGB", options) for options in ({"progressive": True}, {"exif": exif}, {"subsampling": 0})]
    plans += [("PNG", "P", {"transparency": bytes(range(256))}), ("PNG", "I;16", {"transparency": 5, "exif": exif})]
    plans += [("TIFF", "RGB", {"compression": c}) for c in ("tiff_lzw", "tiff_adobe_deflate", "jpeg", "packbits")]
    plans += [(kind, "P", {"save_all": True, "append_images": [modes["P"].rotate(9)]}) for kind in ("GIF", "WEBP")]
    for kind, mode, options in plans:
        file = io.BytesIO()
        modes[mode].save(file, kind, **options)
        yield file.getvalue()


def configs():
    """The configurations that come with relvit, with what their headers ask for on the command line."""
    for path in shipped_configs().values():
        content = path.read_bytes().replace(b"root: null", b"root: photos")
        yield content if "data" in yaml.safe_load(content) else content + b"data: DigitsData\n"


class ParserAlone(RelvitCLI):
    def instantiate_classes(self):
        """Build nothing."""


@pytest.fixture(scope="module")
def parse():
    cli = ParserAlone(["--data=DigitsData"])
    return lambda path: cli.parser.parse_args([f"--config={path}"])


def use(path):
    classifier = relvit.load(path)
    classifier.predict(torch.zeros(len(classifier.mean), 8, 8))


def read(path):
    eval_transform(16, (0.5,) * 3, (0.5,) * 3)(load_rgb(path))


def test_what_is_spoilt_was_valid(run, parse, tmp_path):
    for target, files in ((read, images()), (parse, configs())):
        for content in files:
            (tmp_path / "file").write_bytes(content)
            assert attempt(target, tmp_path / "file")
    assert attempt(use, run / "checkpoints" / "last.ckpt")


@fuzzed(200)
@given(content=spoilt_bytes(list(images())))
def test_images(content, tmp_path):
    (tmp_path / "image").write_bytes(content)
    attempt(read, tmp_path / "image")


@fuzzed(25)
@given(data=st.data())
def test_configurations(parse, data, tmp_path):
    files = list(configs())
    if data.draw(st.booleans()):
        content = data.draw(spoilt_bytes(files))
    else:
        value = data.draw(spoilt_value([yaml.safe_load(content) for content in files]))
        content = yaml.safe_dump(value, allow_unicode=True).encode("utf-8", "surrogatepass")
    (tmp_path / "config.yaml").write_bytes(content)
    attempt(parse, tmp_path / "config.yaml")


@fuzzed(40)
@given(data=st.data())
def test_checkpoints(run, data, tmp_path):
    valid, path = run / "checkpoints" / "last.ckpt", tmp_path / "spoilt.ckpt"
    if data.draw(st.booleans()):
        path.write_bytes(data.draw(spoilt_bytes([valid.read_bytes()])))
    else:
        content = torch.load(valid, weights_only=True)
        # The description of model and data is a small part of all values in a checkpoint.
        if data.draw(st.booleans()):
            content["relvit"] = data.draw(spoilt_value([content["relvit"]]))
        else:
            content = data.draw(spoilt_value([content]))
        torch.save(content, path)
    attempt(use, path)
