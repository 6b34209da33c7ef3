"""A user's own data module on the command line: with ``**options``, with typed arguments, and without arguments."""

import contextlib
import functools
import io
import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml
from command_line import QUIET, evaluate, only, rows, summary, write_checkpoint_like
from photos import TINY

from relvit.app.cli import main
from relvit.app.data.registry import data_modules, import_data_module
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


class Elsewhere(DatasetData):
    # Another class for a test, which says nothing about the transforms.
    def __init__(self, **options):
        super().__init__(test=dataset(6), class_names=NAMES, **options)


class Faulty(DatasetData):
    def __init__(self):
        {}["labels"]


class Private(DatasetData):
    # Data behind a password. A key that is not given is one of the environment.
    def __init__(self, password: str, token=None, api_key=None, storage=None, **options):
        assert (password, storage) == (SECRETS["password"], SECRETS["storage"])
        self.api_key = api_key or "3nv1r0n"
        super().__init__(**splits(), **options)


SECRETS = {"password": "p4ss", "storage": {"headers": {"X": "h3ad"}, "user": "me"}}


class Object(DatasetData):
    def __init__(self, thing: object = object(), **options):
        super().__init__(**splits(), **options)


class Listed(DatasetData):
    def __init__(self, things: dict = {"a": [object()]}, **options):
        super().__init__(**splits(), **options)


class Untransformed(ImageData):
    def __init__(self):
        super().__init__(class_names=NAMES, in_chans=3, img_size=16, num_workers=0)

    def missing(self, split):
        return None

    def build(self, split):
        return TensorDataset(IMAGES[..., :16, :16], torch.arange(24) % 3)
"""
NAME = "own_data_of_a_user"
MODEL = [option for option in TINY if not option.startswith("--data.")]
SIZES = ["--data.img_size=16", "--data.batch_size=8", "--data.num_workers=0"]
SECRET = ["--data.password=p4ss", "--data.token=t0k3n", '--data.storage={"headers": {"X": "h3ad"}, "user": "me"}']
# A training on each class needs these options.
OPTIONS = {"Handed": SIZES, "Typed": ["--img_size=16"], "Private": [*SIZES, *SECRET]}
CLASSES = ["Defaults", "Nothing", *(pytest.param(name, marks=pytest.mark.slow) for name in ("Handed", "Typed"))]


@pytest.fixture(scope="module", autouse=True)
def place(tmp_path_factory):
    """The working directory, with a module of these classes that no code has imported yet."""
    place = tmp_path_factory.mktemp("own_data")
    (place / f"{NAME}.py").write_text(MODULE)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(place)
        patch.chdir(place)
        yield place
    # Make the classes abstract, so that `data_modules` does not list them in the tests of other files.
    for cls in data_modules():
        if cls.__module__.startswith(NAME):
            cls.__abstractmethods__ = frozenset({"build"})


@pytest.fixture(scope="module")
def trained(place):
    """Return a function that trains on a class, once per class, and returns the run's folder and the printed text."""

    @functools.cache
    def train(cls):
        arguments, printed = ["fit", f"--data={NAME}.{cls}", *MODEL, *OPTIONS.get(cls, [])], io.StringIO()
        arguments += ["--trainer.max_epochs=1", f"--runs={place / cls}"]
        with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(printed):
            patch.setattr("sys.argv", ["relvit", *arguments])
            assert main(arguments) == 0
        return only(place / cls), printed.getvalue()

    return train


@pytest.fixture
def best(trained):
    """Return a function from a class to its best checkpoint."""
    return lambda cls: trained(cls)[0] / "checkpoints" / "best.ckpt"


@pytest.mark.parametrize("cls", CLASSES)
def test_a_training_names_its_class_and_records_it(cls, trained, best):
    run, out = trained(cls)
    assert "16 x 16 px" in out
    assert f"relvit validate {run.relative_to(Path.cwd())}/checkpoints/best.ckpt --img_size 24 --data {NAME}" in out
    assert summary(run)["test/images"] == 9
    checkpoint = Checkpoint.read(best(cls))
    assert (checkpoint.class_names(), checkpoint.transforms().img_size) == (["ant", "bee", "cat"], (16, 16))
    assert yaml.safe_load((run / "config.yaml").read_text())["data"]["class_path"] == f"{NAME}.{cls}"


@pytest.mark.parametrize("cls", CLASSES)
def test_a_training_goes_on_without_naming_the_class(cls, trained, tmp_path):
    run = shutil.copytree(trained(cls)[0], tmp_path / "run")
    assert main(["fit", "--resume", str(run), "--epochs", "2"]) == 0
    assert len(rows(run / "metrics.csv")) == 2


@pytest.mark.parametrize("cls", CLASSES)
def test_evaluation_takes_the_images_of_the_class_at_a_size_that_it_allows(cls, best, tmp_path, capsys):
    data, size = f"--data={NAME}.{cls}", 16 if cls == "Nothing" else 24
    larger = [] if cls == "Nothing" else ["--img_size=24"]
    tested = summary(evaluate("test", best(cls), tmp_path / "tested", data, *larger))
    assert (tested["images"], tested["img_size"]) == (9, [size, size])
    assert main(["validate", str(best(cls)), data, *QUIET]) == 0
    capsys.readouterr()
    assert main(["resolutions", str(best(cls)), "--sizes", "16", "24", *data.split("="), "--accelerator", "cpu"]) == 0
    assert "12 images of val" in capsys.readouterr().out
    assert main(["calibrate", str(best(cls)), data, "--output", str(tmp_path / "c.ckpt")]) in (0, 1)


@pytest.mark.parametrize("cls", CLASSES)
def test_predict_takes_the_images_of_the_class(cls, best, tmp_path):
    found = evaluate("predict", best(cls), tmp_path, f"--data={NAME}.{cls}")
    assert len(rows(found / "predictions.csv")) == 9


def test_predict_takes_images_that_are_named(best, photos, tmp_path):
    found = rows(evaluate("predict", best("Defaults"), tmp_path, photos / "val") / "predictions.csv")
    assert len(found) == 18
    assert {row["class"] for row in found} <= {"ant", "bee", "cat"}


@pytest.fixture
def fine_tuned(best, tmp_path):
    """A checkpoint whose images have mean and std of pretrained weights, which are no arguments of the class."""
    content = torch.load(best("Handed"), weights_only=True)
    content["relvit"]["images"] |= {"mean": [0.4] * 3, "std": [0.3] * 3, "crop_pct": 0.8}
    torch.save(content, tmp_path / "fine_tuned.ckpt")
    return str(tmp_path / "fine_tuned.ckpt")


def transforms(data):
    return data.img_size, data.mean, data.crop_pct


@pytest.mark.parametrize("cls", ["Handed", "Elsewhere"])
def test_a_class_that_gives_no_transforms_has_those_of_the_training(cls, fine_tuned):
    checkpoint = Checkpoint.read(fine_tuned).with_data(import_data_module(f"{NAME}.{cls}"))
    expected = (16, 16), (0.4, 0.4, 0.4), 0.8
    assert transforms(checkpoint.data_module()) == expected
    assert transforms(checkpoint.data_module(img_size=24, crop_pct=1.0)) == ((24, 24), expected[1], 1.0)
    assert transforms(import_data_module(f"{NAME}.{cls}")()) == ((224, 224), (0.485, 0.456, 0.406), 1.0)
    giving = checkpoint.with_data(import_data_module(f"{NAME}.Typed"))
    assert transforms(giving.data_module(crop=1.0)) == (*expected[:2], 1.0)


def test_another_class_has_the_native_shapes_of_the_training(fine_tuned):
    checkpoint = Checkpoint.read(fine_tuned)
    native = checkpoint.images | {"native": True, "max_tokens": 9, "patch_size": [8, 8]}
    checkpoint = replace(checkpoint, images=native).with_data(import_data_module(f"{NAME}.Elsewhere"))
    shapes = [checkpoint.data_module(**options).shape for options in ({}, {"img_size": 16}, {"native": False})]
    expected = [{"img_size": [n, n], "patch_size": [8, 8], "max_tokens": n * n // 64} for n in (24, 16)]
    assert [shape.record() for shape in shapes[:2]] == expected
    assert shapes[2].fixed


def test_a_checkpoint_without_a_list_of_means_is_refused(fine_tuned, fails):
    content = torch.load(fine_tuned, weights_only=True)
    content["relvit"]["images"]["mean"] = 5
    torch.save(content, fine_tuned)
    assert "mean and std must be lists" in fails(["validate", fine_tuned, f"--data={NAME}.Elsewhere", *QUIET])


def test_another_class_is_tested_as_the_training_was_validated(fine_tuned, tmp_path, capsys):
    data = f"--data={NAME}.Elsewhere"
    tested = summary(evaluate("test", fine_tuned, tmp_path / "tested", data))
    assert (tested["images"], tested["img_size"]) == (6, [16, 16])
    sizes = ["--sizes", "16", "--split", "test", "--accelerator", "cpu", "--output", str(tmp_path / "sizes.json")]
    assert main(["resolutions", fine_tuned, data, *sizes]) == 0
    (row,) = json.loads((tmp_path / "sizes.json").read_text())
    assert row["loss"] == pytest.approx(tested["test/loss"], rel=1e-5)


@pytest.mark.parametrize("how", ["--data.class_path", "--config"])
def test_a_class_may_be_named_as_in_a_configuration(how, place, fine_tuned, capsys):
    module = f"{NAME}_{how.strip('-').replace('.', '_')}"
    (place / f"{module}.py").write_text(f"from {NAME} import Elsewhere\n\n\nclass Later(Elsewhere):\n    pass\n")
    (place / "data.yaml").write_text(f"data:\n  class_path: {module}.Later\n")
    content = torch.load(fine_tuned, weights_only=True)
    content["relvit"]["data"]["class_path"] = "not.imported"
    torch.save(content, fine_tuned)
    named = f"{how}={'data.yaml' if how == '--config' else f'{module}.Later'}"
    assert main(["test", fine_tuned, named, f"--runs={place / module}", *QUIET]) == 0
    assert "6 images of test at 16 x 16 px" in capsys.readouterr().out


def test_a_configuration_and_paths_cannot_both_name_the_images(best, photos, fails):
    Path("named.yaml").write_text(f"data: {NAME}.Handed")
    message = fails(["predict", best("Handed"), photos / "val", "--config=named.yaml", *QUIET])
    assert f"--data {NAME}.Handed and {photos / 'val'} both name the images" in message


def test_images_of_other_classes_are_refused(best, photos, fails):
    folder = ["--data=ImageFolderData", f"--data.root={photos}"]
    assert "known are 'ant', 'bee', 'cat'" in fails(["test", best("Defaults"), *folder, *QUIET])


@pytest.mark.slow
@pytest.mark.parametrize("cls", ["Typed", "Nothing"])
def test_export(cls, best, tmp_path, capsys):
    """For a class without an argument `img_size`, the export does not change the image size."""
    kwargs = {"dynamic_img_size": False, "patch_size": 8, "embed_dim": 16, "depth": 1}
    file = str(write_checkpoint_like(best(cls), tmp_path / "vit.ckpt", "test_vit", kwargs))
    data = f"--data={NAME}.{cls}"
    capsys.readouterr()
    assert main(["export", file, data, "--output", str(tmp_path / "m.onnx"), "--int8"]) == 0
    assert "on 12 images of val" in capsys.readouterr().out


def test_a_checkpoint_chooses_no_module(best, tmp_path, fails):
    """Importing a class runs code, so the user has to name it; `--resume` takes the name from the run's config.yaml."""
    Path("never.py").write_text("raise SystemExit('imported')")
    stored = torch.load(best("Handed"), weights_only=True)
    stored["relvit"]["data"]["class_path"] = "never.Mine"
    torch.save(stored, tmp_path / "foreign.ckpt")
    for command in ("test", "validate", "predict", "resolutions", "calibrate"):
        sizes = ["--sizes=16"] if command == "resolutions" else []
        message = fails([command, tmp_path / "foreign.ckpt", *sizes])
        assert "with the data module never.Mine: import it, or give --data never.Mine" in message
        assert "relvit predict takes images by their paths, too" in message
    assert "never.Mine" in fails(["fit", f"--ckpt_path={tmp_path / 'foreign.ckpt'}", "--epochs=2"])


def test_what_a_class_cannot_do_is_said(best, tmp_path, fails):
    data, file = f"--data={NAME}.Untransformed", best("Untransformed")
    message = fails(["resolutions", file, "--sizes=24", data])
    assert "Untransformed builds a TensorDataset, whose images cannot get another size" in message
    message = fails(["predict", file, data, *QUIET, f"--runs={tmp_path / 'p'}"], 1)
    assert "items to predict are pairs of an image and its name" in message
    assert "unknown option --img_size" in fails(["fit", data, "--img_size=8"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--data={}.NAMES"], "--data: {}.NAMES must be a subclass of relvit.app.data.DatasetData, whose constructor"),
        (["--data={}.Nothing", "--img_size=8"], "unknown option --img_size: the constructor of Nothing sets it itself"),
        (["--data={}.Faulty"], "error: KeyError: 'labels'\n(with --debug it shows where this happened)"),
        (["--data=gone.Mine"], "gone.Mine: No module named 'gone'; run the command in the folder that holds it, or"),
        (["--config=c.yaml"], "data in c.yaml holds 'root', 'n' beside class_path: put options into init_args"),
    ],
)
def test_what_is_wrong_with_a_class_is_said(words, message, fails):
    Path("c.yaml").write_text(f"data: {{class_path: {NAME}.Handed, root: photos, n: 3}}")
    words = [word.format(NAME) for word in words]
    assert message.format(NAME) in fails(["fit", *words], 1 if "KeyError" in message else 2)


def test_a_default_that_no_configuration_can_hold(fails, tmp_path, capsys):
    fit = ["fit", f"--data={NAME}.Object", *MODEL, *SIZES, f"--runs={tmp_path}", "--trainer.fast_dev_run=true"]
    message = fails(fit)
    assert "config.yaml cannot hold <object object at " in message
    assert ">, the value of data.init_args.thing, so no run could be resumed: give it as text or a number\n" in message
    assert ", the value of data.init_args.things.a.0, so no run" in fails([fit[0], f"--data={NAME}.Listed", *fit[2:]])
    for given in ("text", "3"):
        assert main([*fit, f"--data.thing={given}"]) == 0


def test_a_class_is_looked_for_in_the_module_that_was_named(best, fails):
    missing = "relvit.app.data.Untransformed: module 'relvit.app.data' has no attribute 'Untransformed'"
    assert missing in fails(["fit", "--data=relvit.app.data.Untransformed"])
    file = best("Defaults")
    assert "no data module 'mine.Data'" in fails(["resolutions", file, "--sizes=24", "--data=mine.Data"])


def test_secrets_are_recorded_as_stars(trained, best):
    run, _ = trained("Private")
    recorded = yaml.safe_load((run / "config.yaml").read_text())["data"]["init_args"]
    for arguments in (recorded, Checkpoint.read(best("Private")).data_args):
        names = ("password", "token", "api_key", "storage")
        known = {"headers": "***", "user": "me"}
        assert [arguments[name] for name in names] == ["***", "***", None, known]


def test_secrets_that_no_file_records_are_asked_for(trained, best, tmp_path, fails):
    (run, _), file, data, runs = trained("Private"), best("Private"), f"--data={NAME}.Private", f"--runs={tmp_path}"
    asked = (
        "Private had 'password', 'storage', which no file of the training records: give --data.password --data.storage"
    )
    for again in (
        ["fit", f"--resume={run}", "--epochs=2"],
        ["fit", f"--config={run / 'config.yaml'}", runs],
        ["fit", f"--ckpt_path={file}", data, "--epochs=2", runs],
        *([command, file, data, runs] for command in ("test", "predict")),
        ["validate", file, data],
    ):
        assert asked in fails(again)
    for again in (["calibrate", file], ["resolutions", file, "--sizes=16", "--accelerator=cpu"]):
        assert "trained with 'password', 'storage' of Private" in fails([*again, data])


def test_images_that_are_named_need_no_secret_since_no_data_module_is_built(best, photos, tmp_path):
    found = evaluate("predict", best("Private"), tmp_path, photos / "val")
    assert len(rows(found / "predictions.csv")) == 18


@pytest.mark.slow
def test_secrets_that_are_given_again_are_accepted_and_written_nowhere(trained, place, tmp_path, monkeypatch, capsys):
    run, printed = trained("Private")
    run = shutil.copytree(run, tmp_path / "run")
    best, data, runs = str(run / "checkpoints" / "best.ckpt"), f"--data={NAME}.Private", f"--runs={tmp_path}"
    Checkpoint.read(best).data_module(password="p4ss", storage={"headers": {"X": "h3ad"}, "user": "me"})
    for arguments in (
        # The resumed training accepts another token.
        ["fit", f"--resume={run}", "--epochs=2", SECRET[0], "--data.token=n3w", SECRET[2]],
        # A secret that has a default can be left out.
        ["fit", f"--resume={run}", "--epochs=3", SECRET[0], SECRET[2]],
        ["validate", best, data, SECRET[0], SECRET[2], *QUIET],
        ["test", best, data, *SECRET, *QUIET, runs],
        ["validate", best, data, *SECRET, *QUIET],
        ["resolutions", best, "--sizes=16", "--accelerator=cpu", data, *SECRET],
        ["probe", best, data, *SECRET, *SIZES, "--shares=1", "--k=2"],
        ["publish", best, "--to", str(tmp_path / "published")],
    ):
        monkeypatch.setattr("sys.argv", ["relvit", *arguments])
        assert main(arguments) == 0
    assert main(["calibrate", best, data, *SECRET]) in (0, 1)
    out, err = capsys.readouterr()
    assert "12 images of val" in out
    folders = (place / "Private", tmp_path)
    written = b"".join(path.read_bytes() for folder in folders for path in folder.rglob("*") if path.is_file())
    written += (printed + out + err).encode()
    for secret in (b"p4ss", b"t0k3n", b"3nv1r0n", b"h3ad", b"n3w"):
        assert secret not in written, written[written.index(secret) - 300 :][:600]


def test_options_of_a_class_are_typed_and_named(best, fails):
    """Commands whose `--data` takes a name also take the arguments of the class's constructor."""
    again, data = ["resolutions", str(best("Typed")), "--sizes=16", "--accelerator=cpu"], f"--data={NAME}.Typed"
    assert main([*again, data, "--data.crop=0.5"]) == 0
    assert "--data.crop must be a number, got much" in fails([*again, data, "--data.crop=much"])
    assert "unknown option --data.corp (did you mean '--data.crop'?)" in fails([*again, data, "--data.corp=1"])
    assert "--data.crop needs --data NAME" in fails([*again, "--data.crop=0.5"])


def test_no_argument_of_relvits_own_data_is_a_secret():
    for cls in (cls for cls in data_modules() if not cls.__module__.startswith(NAME)):
        arguments = dict.fromkeys(cls.argument_names(), "x")
        assert mask_secrets(arguments, cls.public_names()) == arguments
