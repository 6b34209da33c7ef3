"""What the README prints runs as it stands there: its Python from top to bottom, its commands, its options."""

import re
import shlex
import shutil
from pathlib import Path

import pytest
import torch
from photos import TINY
from PIL import Image

from relvit.cli import main

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
# One step, on the CPU, of a tiny model. Learning rates that follow the batch come out smaller than the least one.
ONE_STEP = [*TINY, "--trainer.fast_dev_run=true", "--model.min_lr=0"]
# A compiler would take a minute.
QUICKER = {"--model.compile true": "--model.compile eager"}


@pytest.fixture
def place(run, photos, tmp_path, monkeypatch):
    """A working directory that has what the README names."""
    monkeypatch.chdir(tmp_path)
    for name in ("best", "a", "b"):
        shutil.copy(run / "checkpoints" / "best.ckpt", f"{name}.ckpt")
    shutil.copytree(photos, "photos")
    shutil.copytree(photos / "test", "folder/of/images")
    for name in ("photo.jpg", "other.png"):
        shutil.copy("photos/test/owl/0.jpg", name)
    Path("configs").symlink_to(ROOT / "configs")
    return tmp_path


def section(title):
    return re.search(rf"^## {title}\n(.*?)^## ", README.read_text(), re.DOTALL | re.MULTILINE)[1]


def test_python_blocks_run(place, capsys):
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert len(blocks) >= 4
    names = {}
    for block in blocks:
        exec(compile(block, str(README), "exec"), names)
    assert names["x"].shape == (2, 140, 64)
    assert (place / "model.onnx").is_file()
    assert names["features"].shape == (2, 16)
    assert names["received"].shape == (2, 2)
    torch.testing.assert_close(float(names["received"].sum()), 1.0)
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines() if line.startswith("photos")] == [
        f"photos/test/{name}/{number}.jpg" for name in ("cat", "dog", "owl") for number in range(6)
    ]


def test_commands_for_ones_own_images(place, capsys):
    blocks = re.findall(r"```bash\n(.*?)```", section("Training on your own images"), re.DOTALL)
    commands = [shlex.split(line, comments=True) for block in blocks for line in block.splitlines() if line]
    assert [command[0] for command in commands] == ["relvit"] * len(commands)
    done = set()
    for _, command, *arguments in commands:
        if any("RUN" in argument for argument in arguments):
            continue
        extra = []
        if command == "fit":
            extra = [option for option in ONE_STEP if not option.startswith("--model.model")]
            extra += [f"--model.model_kwargs.{name}" for name in ("embed_dim=12", "depth=1")]
        if command in ("validate", "test", "predict"):
            extra = ["--trainer.accelerator=cpu", "--trainer.enable_progress_bar=false"]
        # The Python above exports, too.
        if command != "export":
            assert main([command, *arguments, *extra]) == 0, (command, arguments, capsys.readouterr().err)
            done.add(command)
    assert done == {"fit", "validate", "resolutions", "test", "predict", "embed", "average"}
    assert {path.name for path in place.iterdir()} >= {"features.npz", "averaged.ckpt", "runs"}


def test_commands_in_the_text(place, capsys):
    text = re.sub(r"```.*?```", "", README.read_text(), flags=re.DOTALL)
    inline = {" ".join(code.split()) for code in re.findall(r"`(relvit [^`|]+)`", text)}
    whole = [code for code in inline if "check-data" in code or "help" in code]
    assert len(whole) == 5
    for code in whole:
        assert main(shlex.split(code)[1:]) == 0, code
    Path("photos/train/cat/0.jpg").write_bytes(b"nothing")
    capsys.readouterr()
    assert main(["check-data", "photos"]) == 1
    assert "train/cat/0.jpg: it is not an image" in capsys.readouterr().out.replace("\n", "")


def test_options_of_fit(place, capsys):
    table = re.search(r"^\| options \| what they do \|\n\|[-|]+\n((?:\|.*\n)+)", README.read_text(), re.MULTILINE)[1]
    cells = [row.split(" | ")[0] for row in table.splitlines()]
    options = [option for cell in cells for option in re.findall(r"`([^`]+)`", cell)]
    assert len(options) >= 15
    common = ["fit", "--config", "configs/folder.yaml", "--data.root", "photos", *ONE_STEP]
    for option in options:
        if "ModelCheckpoint" in option or "WandbLogger" in option:
            # One step keeps no checkpoints, tests/cli/test_options.py does; the logger needs a package of its own.
            continue
        given = QUICKER.get(option, option).replace(" X ", " best.ckpt ")
        assert main([*common, *shlex.split(given)]) == 0, (option, capsys.readouterr().err)


def test_training_past_broken_files(place, capsys):
    assert "`--data.on_error skip` trains" in README.read_text()
    for name in ("train/cat/0.jpg", "test/owl/1.jpg"):
        Image.new("RGB", (8, 8)).save(f"photos/{name}")
        Path("photos", name).write_bytes(Path("photos", name).read_bytes()[:100])
    fit = ["fit", "--config", "configs/folder.yaml", "--data.root", "photos", *TINY, "--trainer.max_epochs=1"]
    assert main([*fit, "--data.on_error", "skip"]) == 0
    (folder,) = Path("runs").iterdir()
    assert len((folder / "unreadable.csv").read_text().splitlines()) == 3
