"""Commands and options in the README and in docs/*.md run as printed; each training takes one step of a tiny model."""

import re
import shlex
import shutil
from pathlib import Path

import pytest
import timm
from documents import ELSEWHERE, PAGES, ROOT, blocks, text
from photos import TINY

from relvit.app.cli import main

TINY_MODEL = [f"--model.model_kwargs.{name}" for name in ("patch_size=8", "embed_dim=12", "depth=1")]
# With small batches, learning rates that scale with the batch fall below the default of `min_lr`.
ONE_STEP = [*TINY[-3:], "--data.img_size=16", "--data.batch_size=4", "--trainer.fast_dev_run=true", "--model.min_lr=0"]
# Tests in tests/app/training run several devices and machines, and `test_fine_tuning` timm's weights.
OTHER_TESTS = ("docs/several_devices.md", "docs/fine_tune.md")
# Each of these options gets its own training, because it cannot be combined with the other options.
APART = ("--model.loss", "--model.teacher", "--model.compile", "--trainer.determ", "--lr_find", "--model.layer_decay")


def commands(page):
    lines = "\n".join(blocks(page, "bash")).replace("\\\n", " ").splitlines()
    found = [line for line in lines if line.startswith("relvit ")]
    # Pages other than the README use the folders of runs that no command on the page has made.
    return [shlex.split(line, comments=True) for line in found if "RUN" not in line or page == "README.md"]


@pytest.fixture
def random_weights(monkeypatch):
    """Replace timm's downloaded weights by random weights."""
    monkeypatch.setattr(
        "timm.models._builder.load_state_dict_from_hf",
        lambda name, *args, **kwargs: timm.create_model(name.removeprefix("timm/")).state_dict(),
    )


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in PAGES if commands(page) and page not in OTHER_TESTS])
def test_commands_run(page, place, random_weights, capsys):
    if page == "docs/trust.md":
        # `calibrate` needs a wrong label: without mistakes no temperature is best.
        Path("photos/val/cat/0.jpg").rename("photos/val/dog/cat.jpg")
    if page == "README.md":
        Path("runs/RUN/checkpoints").mkdir(parents=True)
        shutil.copy("best.ckpt", "runs/RUN/checkpoints")
        Path("more/photos").mkdir(parents=True)
        shutil.copy("photo.jpg", "more/photos")
    for _, command, *arguments in commands(page):
        extra = []
        if command == "fit":
            extra = [*TINY_MODEL, *ONE_STEP]
            if "--data.native" in arguments:
                extra.append("--data.patch_size=8")
            if "finetune" in arguments:
                extra = [*ONE_STEP, "--trainer.precision=32-true"]
            # If the page gives an option itself, use the page's value.
            extra = [option for option in extra if f"--{option.partition('=')[0].rpartition('.')[2]}" not in arguments]
            # Halting needs at least two steps.
            if "act" in arguments:
                extra.append("--model.model_kwargs.depth=2")
        if command == "resolutions" or "bands" in arguments:
            # A quarter of an image's sides has a sixteenth of the patches.
            arguments = [re.sub(r"\d{3,}", lambda size: str(int(size[0]) // 4), argument) for argument in arguments]
        if command in ("validate", "test", "predict"):
            extra = ["--trainer.accelerator=cpu", "--trainer.enable_progress_bar=false"]
        # Skip exports here: docs/sizes.md also exports in Python, which is quicker.
        if command != "export":
            assert main([command, *arguments, *extra]) == 0, (command, arguments, capsys.readouterr().err)
    if page == "docs/train_your_images.md":
        done = {command for _, command, *_ in commands(page)}
        assert done == {"fit", "validate", "resolutions", "test", "predict", "embed", "average", "export"}
        assert {path.name for path in place.iterdir()} >= {"features.npz", "averaged.ckpt", "runs"}


@pytest.mark.slow
def test_fine_tuning(place, random_weights, capsys):
    sources = []
    for command in commands("docs/fine_tune.md"):
        # The images have one patch of 16 px, or four patches of 8 px in the checkpoint's model.
        options = [*ONE_STEP, "--trainer.precision=32-true"]
        assert main([argument for argument in command[1:] if argument not in ("--img_size", "288")] + options) == 0
        out = capsys.readouterr().out
        sources += re.findall(r"^pretrained: \d+ of \d+ tensors from (\S+?);?(?: .*)?$", out, re.MULTILINE)
        assert "Note: the images are normalised" not in out
    names = ["deit3_small_patch16_224.fb_in22k_ft_in1k", "best.ckpt", "deit_small_patch16_224"]
    assert sources == [*names, "vit_small_patch16_224.augreg_in21k"]


def test_commands_in_the_text(place, capsys):
    found = set()
    for page in PAGES:
        prose = re.sub(r"```.*?```", "", text(page), flags=re.DOTALL)
        found |= {" ".join(code.split()) for code in re.findall(r"`(relvit [^`|]+)`", prose)}
    complete = [code for code in found if "check-data " in code or "help" in code]
    assert len(complete) == 5
    for code in complete:
        assert main(shlex.split(code)[1:]) == 0, code
    Path("photos/train/cat/0.jpg").write_bytes(b"nothing")
    capsys.readouterr()
    assert main(["check-data", "photos"]) == 1
    assert "train/cat/0.jpg: it is not an image" in capsys.readouterr().out.replace("\n", "")


def options_of_fit():
    """Return the options in docs/options.md: those of one training together, then each that needs its own."""
    rows = text("docs/options.md").partition("| options | what they do |\n")[2].partition("\n\n")[0].splitlines()
    options = [option for row in rows for option in re.findall(r"`(-[^`]+)`", row.split(" | ")[0])]
    assert len(options) >= 15
    # A training of one step keeps no checkpoints, and tests/app/cli/fit/test_options.py tests them. The logger needs
    # another package.
    options = [option for option in options if "ModelCheckpoint" not in option and "wandb" not in option]
    # Compiling would take a minute, so compile with the backend 'eager'.
    options = [option.replace("compile true", "compile eager").replace(" X ", " best.ckpt ") for option in options]
    apart = [option for option in options if option.startswith(APART)]
    return " ".join(option for option in options if option not in apart), *apart


def fit_photos(given):
    arguments = ["--model.model=test_relvit", *TINY_MODEL, *ONE_STEP, *shlex.split(given)]
    return main(["fit", "--config", "folder", "--data.root", "photos", *arguments])


def test_options_of_fit(place):
    assert fit_photos(options_of_fit()[0]) == 0


@pytest.mark.slow
def test_options_of_fit_that_cannot_be_together(place, capsys):
    for given in options_of_fit()[1:]:
        assert fit_photos(given) == 0, (given, capsys.readouterr().err)


def test_links_lead_to_files_and_headings():
    linked = set()
    for page in (*PAGES, *ELSEWHERE, "CONTRIBUTING.md"):
        for target in re.findall(r"\]\(([^)\s]+)\)", text(page)):
            if target.startswith("http"):
                continue
            path, _, anchor = target.partition("#")
            linked |= {Path(path).name} if page != "CONTRIBUTING.md" else set()
            file = (ROOT / page).parent / path if path else ROOT / page
            assert file.exists(), f"{page}: {target}"
            headings = re.findall(r"^#+ (.*)$", file.read_text(), re.MULTILINE) if anchor else []
            slugs = [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings]
            assert not anchor or anchor in slugs, f"{page}: {target}"
    assert {Path(page).name for page in (*PAGES[1:], *ELSEWHERE)} <= linked


@pytest.mark.parametrize(("page", "words"), [("README.md", 900), ("CONTRIBUTING.md", 900), ("docs/own_data.md", 600)])
def test_short_pages(page, words):
    assert len(text(page).split()) <= words
