"""A user's own data module on the command line, with ``**options``, with typed arguments and with none."""

import pytest
import torch
import yaml
from command_line import QUIET, evaluate, only, rows, summary
from photos import TINY

from relvit.app.cli import main
from relvit.app.data.registry import data_modules
from relvit.app.training import Checkpoint
from relvit.app.utils.masks import mask_secrets

MODULE = """
import torch
from torch.utils.data import TensorDataset

from relvit.app.data import DatasetData, ImageData

NAMES = ["ant", "bee", "cat"]
IMAGES = torch.rand(24, 3, 20, 18, generator=torch.Generator().manual_seed(0))


def dataset(count=24):
    return TensorDataset(IMAGES[:count], torch.arange(count) % 3)


def splits():
    return {"train": dataset(), "val": dataset(12), "test": dataset(9), "class_names": NAMES}


class Handed(DatasetData):
    def __init__(self, root: str = "photos", **options):
        super().__init__(**splits(), **options)


class Defaults(DatasetData):
    def __init__(self, **options):
        super().__init__(**splits(), **{"img_size": 16, "num_workers": 0, "batch_size": 8} | options)


class Typed(DatasetData):
    def __init__(self, img_size: int = 32, batch_size: int = 8, crop: float = 0.9):
        super().__init__(**splits(), img_size=img_size, batch_size=batch_size, num_workers=0, crop_pct=crop)


class Nothing(DatasetData):
    def __init__(self):
        super().__init__(**splits(), img_size=16, num_workers=0, batch_size=8)


class Private(DatasetData):
    # Data behind a password. A key that is not given is one of the environment.
    def __init__(self, password: str, token=None, api_key=None, storage=None, **options):
        assert (password, storage) == (SECRETS["password"], SECRETS["storage"])
        self.api_key = api_key or "3nv1r0n"
        super().__init__(**splits(), **options)


SECRETS = {"password": "p4ss", "storage": {"headers": {"X": "h3ad"}, "user": "me"}}


class Untransformed(ImageData):
    def __init__(self):
        super().__init__(class_names=NAMES, in_chans=3, img_size=16, num_workers=0)

    def missing(self, split):
        return None

    def build(self, split):
        return TensorDataset(IMAGES[..., :16, :16], torch.arange(24) % 3)
"""
pytestmark = pytest.mark.usefixtures("blank_figures")

MODEL = [option for option in TINY if not option.startswith("--data.")]
SIZES = ["--data.img_size=16", "--data.batch_size=8", "--data.num_workers=0"]


@pytest.fixture
def module(tmp_path, monkeypatch, request):
    """The name of a fresh module with these classes, which nothing has imported yet."""
    name = f"own_data_{abs(hash(request.node.name))}"
    (tmp_path / f"{name}.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    yield name
    # The tests after these shall not be offered the classes.
    for cls in data_modules():
        if cls.__module__ == name:
            cls.__abstractmethods__ = frozenset({"build"})


@pytest.mark.parametrize(
    ("cls", "options", "larger"),
    [
        ("Handed", SIZES, ["--img_size=24"]),
        ("Defaults", [], ["--img_size=24"]),
        ("Typed", ["--img_size=16"], ["--img_size=24"]),
        ("Nothing", [], []),
    ],
)
def test_every_command_works(cls, options, larger, module, photos, tmp_path, capsys):
    data = f"--data={module}.{cls}"
    assert main(["fit", data, *MODEL, *options, "--trainer.max_epochs=1", f"--runs={tmp_path / 'runs'}"]) == 0
    run = only(tmp_path / "runs")
    out = capsys.readouterr().out
    assert "16 x 16 px" in out
    assert f"relvit validate {run.relative_to(tmp_path)}/checkpoints/best.ckpt --img_size 24 --data {module}" in out
    assert summary(run)["test/images"] == 9
    best = run / "checkpoints" / "best.ckpt"
    checkpoint = Checkpoint.read(best)
    assert (checkpoint.class_names(), checkpoint.transforms().img_size) == (["ant", "bee", "cat"], (16, 16))
    config = yaml.safe_load((run / "config.yaml").read_text())
    assert config["data"]["class_path"] == f"{module}.{cls}"

    assert main(["fit", "--resume", str(run), "--epochs", "2"]) == 0
    assert len(rows(run / "metrics.csv")) == 2
    tested = evaluate("test", best, tmp_path / "tested", data, *larger)
    assert summary(tested)["images"] == 9
    assert summary(tested)["img_size"] == ([24, 24] if larger else [16, 16])
    assert main(["validate", str(best), data, *QUIET]) == 0
    sizes = ["resolutions", str(best), "--sizes", "16", "24", "--data", f"{module}.{cls}", "--accelerator", "cpu"]
    capsys.readouterr()
    assert main(sizes) == 0
    assert "12 images of val" in capsys.readouterr().out
    assert len(rows(evaluate("predict", best, tmp_path / "test", data) / "predictions.csv")) == 9
    others = rows(evaluate("predict", best, tmp_path / "files", photos / "val") / "predictions.csv")
    assert len(others) == 18
    assert {row["class"] for row in others} <= {"ant", "bee", "cat"}
    assert main(["calibrate", str(best), data, "--output", str(tmp_path / "c.ckpt")]) in (0, 1)


def test_images_of_other_classes_are_refused(module, photos, tmp_path, fails):
    data = f"--data={module}.Defaults"
    assert main(["fit", data, *MODEL, "--trainer.max_epochs=1", f"--runs={tmp_path / 'runs'}"]) == 0
    best = only(tmp_path / "runs") / "checkpoints" / "best.ckpt"
    folder = ["--data=ImageFolderData", f"--data.root={photos}"]
    assert "known are 'ant', 'bee', 'cat'" in fails(["test", best, *folder, *QUIET])


@pytest.mark.slow
@pytest.mark.parametrize(("name", "size"), [("Typed", ["--img_size=16"]), ("Nothing", [])])
def test_export(module, tmp_path, capsys, name, size):
    """A class without an argument `img_size` is not asked to take one."""
    data = f"--data={module}.{name}"
    arguments = ["fit", data, *MODEL, *size, "--trainer.max_epochs=1", f"--runs={tmp_path / 'runs'}"]
    assert main(arguments) == 0
    best = only(tmp_path / "runs") / "checkpoints" / "best.ckpt"
    capsys.readouterr()
    assert main(["export", str(best), data, "--output", str(tmp_path / "m.onnx"), "--int8"]) == 0
    assert "on 12 images of val" in capsys.readouterr().out


def test_a_checkpoint_chooses_no_module(module, tmp_path, fails):
    """The class has to be named, since importing it runs code; `--resume` has it from the run's own configuration."""
    content = f"{module}.Handed"
    assert main(["fit", f"--data={content}", *MODEL, *SIZES, "--trainer.max_epochs=1", f"--runs={tmp_path / 'r'}"]) == 0
    run = only(tmp_path / "r")
    other = tmp_path / "never.py"
    other.write_text("raise SystemExit('imported')")
    path = run / "checkpoints" / "last.ckpt"
    stored = torch.load(path, weights_only=True)
    stored["relvit"]["data"]["class_path"] = "never.Mine"
    torch.save(stored, tmp_path / "foreign.ckpt")
    for command in ("test", "validate", "predict", "resolutions", "calibrate"):
        sizes = ["--sizes=16"] if command == "resolutions" else []
        message = fails([command, tmp_path / "foreign.ckpt", *sizes])
        assert "with the data module never.Mine: import it, or give --data never.Mine" in message
        assert "relvit predict takes images by their paths, too" in message
    assert "never.Mine" in fails(["fit", f"--ckpt_path={tmp_path / 'foreign.ckpt'}", "--epochs=2"])


def test_what_a_class_cannot_do_is_said(module, tmp_path, fails):
    data = f"--data={module}.Untransformed"
    assert main(["fit", data, *MODEL, "--trainer.max_epochs=1", f"--runs={tmp_path / 'runs'}"]) == 0
    best = only(tmp_path / "runs") / "checkpoints" / "best.ckpt"
    message = fails(["resolutions", best, "--sizes=24", data])
    assert "Untransformed builds a TensorDataset, whose images cannot get another size" in message
    message = fails(["predict", best, data, *QUIET, f"--runs={tmp_path / 'p'}"], 1)
    assert "items to predict are pairs of an image and its name" in message
    assert "unknown option --img_size" in fails(["fit", data, "--img_size=8"])
    # A class is looked for in the module that was named.
    missing = "relvit.app.data.Untransformed: module 'relvit.app.data' has no attribute 'Untransformed'"
    assert missing in fails(["fit", "--data=relvit.app.data.Untransformed"])
    assert "no data module 'mine.Data'" in fails(["resolutions", best, "--sizes=24", "--data=mine.Data"])


def test_secrets_are_recorded_nowhere_and_asked_for_again(module, photos, tmp_path, monkeypatch, fails, capsys):
    data, runs = f"--data={module}.Private", tmp_path / "runs"
    options = ["--data.password=p4ss", "--data.token=t0k3n", '--data.storage={"headers": {"X": "h3ad"}, "user": "me"}']
    start = ["fit", data, *MODEL, *SIZES, *options, "--trainer.max_epochs=1", f"--runs={runs}"]
    monkeypatch.setattr("sys.argv", ["relvit", *start])
    assert main(start) == 0
    run = only(runs)
    best = run / "checkpoints" / "best.ckpt"
    recorded = yaml.safe_load((run / "config.yaml").read_text())["data"]["init_args"]
    for arguments in (recorded, Checkpoint.read(best).data_args):
        names = ("password", "token", "api_key", "storage")
        known = {"headers": "***", "user": "me"}
        assert [arguments[name] for name in names] == ["***", "***", None, known]

    asked = "Private had 'password', 'token', 'storage', which no file of the training records: give --data.password"
    for again in (
        ["fit", f"--resume={run}", "--epochs=2"],
        ["fit", f"--config={run / 'config.yaml'}", f"--runs={runs}"],
        ["fit", f"--ckpt_path={best}", data, "--epochs=2", f"--runs={runs}"],
        *([command, best, data, f"--runs={runs}"] for command in ("test", "predict")),
        ["validate", best, data],
    ):
        assert asked in fails(again)
    named = ["--data", data.partition("=")[2]]
    others = (["calibrate", best], ["resolutions", best, "--sizes=16", "--accelerator=cpu"])
    for again in others:
        assert "trained with 'password', 'storage' of Private" in fails([*again, *named])
    Checkpoint.read(best).data_module(password="p4ss", storage={"headers": {"X": "h3ad"}, "user": "me"})
    # No data module is built for images that are named.
    assert len(rows(evaluate("predict", best, tmp_path / "files", photos / "val") / "predictions.csv")) == 18

    # Another token may be given.
    resumed = ["fit", f"--resume={run}", "--epochs=2", options[0], "--data.token=n3w", options[2]]
    monkeypatch.setattr("sys.argv", ["relvit", *resumed])
    assert main(resumed) == 0
    assert main(["test", str(best), data, *options, *QUIET, f"--runs={runs}"]) == 0
    assert main(["validate", str(best), data, *options, *QUIET]) == 0
    for again in others:
        assert main([*map(str, again), *named, *options]) in (0, 1)
    assert "12 images of val" in capsys.readouterr().out
    assert main(["probe", str(best), *named, *options, *SIZES, "--shares=1", "--k=2"]) == 0
    assert main(["publish", str(best), "--to", str(runs / "published")]) == 0
    written = b"".join(path.read_bytes() for path in runs.rglob("*") if path.is_file())
    written += "".join(capsys.readouterr()).encode()
    for secret in (b"p4ss", b"t0k3n", b"3nv1r0n", b"h3ad", b"n3w"):
        assert secret not in written, written[written.index(secret) - 300 :][:600]


def test_options_of_a_class_are_typed_and_named(module, tmp_path, fails):
    """Commands whose `--data` is a name take the arguments of the class's constructor, too."""
    data = f"--data={module}.Typed"
    start = ["fit", data, *MODEL, "--img_size=16", "--trainer.max_epochs=1", f"--runs={tmp_path / 'runs'}"]
    assert main(start) == 0
    again = ["resolutions", only(tmp_path / "runs") / "checkpoints" / "best.ckpt", "--sizes=16", "--accelerator=cpu"]
    assert main([*map(str, again), data, "--data.crop=0.5"]) == 0
    assert "--data.crop must be a number, got much" in fails([*again, data, "--data.crop=much"])
    assert "unknown option --data.corp (did you mean '--data.crop'?)" in fails([*again, data, "--data.corp=1"])
    assert "--data.crop is for --data NAME" in fails([*again, "--data.crop=0.5"])


def test_no_argument_of_relvits_own_data_is_a_secret():
    for cls in data_modules():
        arguments = dict.fromkeys(cls.argument_names(), "x")
        assert mask_secrets(arguments, cls.public_names()) == arguments
