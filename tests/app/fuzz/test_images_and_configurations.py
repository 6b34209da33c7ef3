"""Images and configurations with random changes: each is accepted, or refused in one line.

FUZZ_EXAMPLES=400 pytest -m fuzz tests/app/fuzz/test_images_and_configurations.py --hypothesis-seed=31
"""

import contextlib
import faulthandler
import io
import random
import warnings

import pytest
import yaml
from fuzzed import fuzzed
from PIL import Image, ImageFilter
from spoil import damaged, foreign

from relvit.app.cli.fit.fit import fit
from relvit.app.cli.shipped_configs import shipped_configs
from relvit.app.cli.trainer.lightning_cli import RelvitCLI
from relvit.app.cli.typed_words import Arguments
from relvit.app.data import eval_transform, load_rgb

pytestmark = pytest.mark.fuzz


def images():
    """Yield small images of every format and mode that relvit reads, some of them stored in several ways."""
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


def configurations():
    """Yield the configurations that relvit ships, with the arguments that their headers require."""
    for path in shipped_configs().values():
        content = path.read_bytes().replace(b"root: null", b"root: photos")
        yield content if "data" in yaml.safe_load(content) else content + b"data: DigitsData\n"


class ParserAlone(RelvitCLI):
    def instantiate_classes(self):
        """Build nothing."""


@pytest.fixture(scope="module")
def parse():
    cli = ParserAlone(fit, Arguments(["--data=DigitsData"], {}, {}))
    return lambda path: cli.parser.parse_args([f"--config={path}"])


def read(path):
    eval_transform(16, (0.5,) * 3, (0.5,) * 3)(load_rgb(path))


def accepts(target, path, content):
    """Return whether a file with this content is accepted; a refusal has one line, and a hang ends the process."""
    path.write_bytes(content)
    refusal = None
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


def test_honest_images_and_configurations_are_accepted(parse, tmp_path):
    assert all(accepts(read, tmp_path / "image", content) for content in images())
    assert all(accepts(parse, tmp_path / "config.yaml", content) for content in configurations())


@fuzzed(200)
def test_a_changed_image_is_accepted_or_refused(tmp_path, chance):
    # Image formats keep sizes near the start of a file.
    accepts(read, tmp_path / "image", damaged(chance.choice(list(images())), chance, near_start=0.5))


@fuzzed(25)
def test_a_changed_configuration_is_accepted_or_refused(parse, tmp_path, chance):
    content = chance.choice(list(configurations()))
    if chance.random() < 0.5:
        changed = damaged(content, chance)
    else:
        value = foreign(yaml.safe_load(content), chance)
        changed = yaml.safe_dump(value, allow_unicode=True).encode("utf-8", "surrogatepass")
    accepts(parse, tmp_path / "config.yaml", changed)
