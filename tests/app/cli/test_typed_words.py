"""Short names of options of `fit`, and typing mistakes; tests/app/cli/test_usage.py tests unnamed arguments."""

import inspect
import subprocess
import sys

import pytest
import yaml
from lightning import Trainer
from photos import TINY

from relvit.app.cli import COMMANDS
from relvit.app.cli.config_text import load_config
from relvit.app.cli.errors import UsageError
from relvit.app.cli.functions import function_of
from relvit.app.cli.typed_words import ONLY_IN_TRAINING, read_arguments
from relvit.app.data import ImageFilesData


def read(command, words):
    return read_arguments(command, function_of(COMMANDS[command][0], command), words)


@pytest.mark.parametrize(
    ("command", "given", "expected"),
    [
        ("fit", "--lr=0.1 --epochs 3", "--model.lr=0.1 --trainer.max_epochs=3"),
        ("fit", "--model relvit_tiny", "--model.model=relvit_tiny"),
        ("fit", "--model model.yaml", "--model=model.yaml"),
        ("fit", "--model={lr:1}", "--model={lr:1}"),
        ("fit", "--devices -1", "--trainer.devices=-1"),
        ("fit", "--root a", "--data=ImageFolderData --data.root=a"),
        ("fit", "--root a --data ImageNetData", "--data=ImageNetData --data.root=a"),
        ("fit", "--img_size 64 --config c.yaml", "--config=c.yaml --data.img_size=64"),
        ("fit", "--root a --config=c.yaml", "--config=c.yaml --data.root=a"),
        ("fit", "--data.root=a --data=ImageNetData", "--data=ImageNetData --data.root=a"),
        ("fit", "--model.opt_kwargs.betas [0.9,0.99]", "--model.opt_kwargs.betas=[0.9,0.99]"),
        ("fit", "--trainer.callbacks+=Timer", "--trainer.callbacks+=Timer"),
        ("fit", "--root a --data.class_path m.Mine", "--data=m.Mine --data.root=a"),
        ("test", "a.ckpt --data.class_path=m.Mine", "--data=m.Mine --ckpt_path=a.ckpt"),
        ("calibrate", "a.ckpt --data.class_path m.Mine", "--data=m.Mine --ckpt_path=a.ckpt"),
        ("validate", "--model a.ckpt", "--ckpt_path=a.ckpt"),
        ("predict", "--model a.onnx --device cpu", "--ckpt_path=a.onnx --device=cpu"),
        ("fit", "--quiet --lr=1", "--quiet=true --model.lr=1"),
        ("fit", "--epochs 3 --config c.yaml --lr 1", "--config=c.yaml --trainer.max_epochs=3 --model.lr=1"),
        ("fit", "--lr 1 --model m.yaml --config c.yaml", "--config=c.yaml --model=m.yaml --model.lr=1"),
        ("embed", "--output x.npz --config c.yaml", "--config=c.yaml --output=x.npz"),
    ],
)
def test_names_of_options(command, given, expected):
    assert " ".join(read(command, given.split()).words) == expected


def test_the_home_folder_is_no_folder_of_the_name_tilde(monkeypatch, tmp_path):
    """A shell leaves `~` as it is after an equals sign."""
    monkeypatch.setenv("HOME", str(tmp_path))
    assert read("embed", ["a.ckpt", "--output=~/a.npz"]).values["output"] == f"{tmp_path}/a.npz"
    assert read("fit", ["--runs=~/runs"]).words == [f"--runs={tmp_path}/runs"]


@pytest.mark.parametrize(
    ("command", "given", "message"),
    [
        ("fit", "--lr 0.1 --model.lr 0.2", "--lr 0.1 and --model.lr 0.2 are two values for one option: give one"),
        ("test", "--data A --data.class_path B", "--data A and --data.class_path B are two values for one option"),
        ("embed", "--root a --data.root b", "--root a and --data.root b are two values"),
        ("fit", "photos", "unexpected argument 'photos': each value follows the name of its option; relvit fit --help"),
        ("validate", "a.ckpt b", "unexpected argument 'b'"),
        ("validate", "a.ckpt --ckpt_path b.ckpt", "unexpected argument 'a.ckpt': --ckpt_path given already"),
        ("embed", "a.ckpt x y", "unexpected argument 'y'"),
        ("export", "a.ckpt model.onnx", r"unexpected argument 'model.onnx' \(did you mean --output model.onnx\?\)"),
        ("publish", "a.ckpt folder", r"unexpected argument 'folder' \(did you mean --to folder\?\)"),
        ("test", "a.ckpt images", r"unexpected argument 'images' \(for images in a folder: --root images\);"),
        ("calibrate", "a.ckpt images", r"unexpected argument 'images' \(for images in a folder: --root images\);"),
        ("demo", "a.ckpt images", "unexpected argument 'images': each value follows the name of its option"),
        (
            "fit",
            "--img_size 48 64",
            r"unexpected argument '64': several .* a list in brackets, such as --img_size '\[64,96",
        ),
        ("test", "a.ckpt --sizes 32 64", "--sizes: test takes one --img_size; for several: relvit resolutions CKPT"),
        ("resolutions", "a.ckpt --img_size 32", "--img_size: resolutions takes one or several --sizes"),
        ("validate", "a.ckpt --split test", "--split: validate uses the images of val; .* relvit test --split SPLIT"),
        ("validate", "a.ckpt --runs x", "--runs: validate prints its results and writes no file"),
        ("predict", "a.ckpt photos -q", "--quiet: --trainer.enable_progress_bar false hides the progress bar"),
        ("embed", "a.ckpt photos --quiet", "--quiet: the progress bar is written to standard error, which 2>/dev/null"),
        *(
            (command, f"a.ckpt --data ImageFolderData --data.{option}", f"--data.{option.split()[0]} is for a training")
            for command, option in zip(
                ("validate", "test", "predict", "resolutions", "calibrate", "probe", "probe", "probe"),
                (
                    *("augment none", "color_jitter 0.4", "random_erasing 0.1", "balance loss"),
                    *("repeats 2", "train_sizes [16,24]", "size_schedule progressive", "cache true"),
                ),
                strict=True,
            )
        ),
        ("test", "a.ckpt --trainer.max_epochs 3", "--trainer.max_epochs is for a training, and test does not train"),
        ("show", "a.ckpt --kind tables --kind cam", r"--kind is given twice: .* in one list, as --kind '\[A,B\]'"),
        ("resolutions", "--ckpt_path a --ckpt_path b --sizes 8", "--ckpt_path is given twice: give all its values"),
        ("average", "--ckpt_paths a --ckpt_paths b", "--ckpt_paths is given twice: give all its values"),
        ("validate", "a.ckpt --trainer.limit_test_batches 3", "validate has --trainer.limit_val_batches instead"),
    ],
)
def test_mistakes(command, given, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "images").mkdir()
    with pytest.raises(UsageError, match=message):
        read(command, given.split())


def test_options_of_the_training_exist():
    found = {f"data.{name}" for name in ImageFilesData.argument_names()}
    found |= {f"trainer.{name}" for name in inspect.signature(Trainer).parameters}
    assert found >= ONLY_IN_TRAINING


def test_a_users_data_module_may_have_options_of_these_names():
    assert "--data.cache=true" in read("test", ["a.ckpt", "--data", "mine.Scans", "--data.cache", "true"]).words


@pytest.mark.parametrize(
    ("command", "option", "name"),
    [
        ("fit", "pretrained", "model.pretrained"),
        ("fit", "model.pretrained", "model.pretrained"),
        ("fit", "model.teacher", "model.teacher"),
        ("explain", "model", "model"),
    ],
)
def test_the_folder_of_a_run_stands_for_its_best_checkpoint(command, option, name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    best = tmp_path / "runs" / "a" / "checkpoints" / "best.ckpt"
    best.parent.mkdir(parents=True)
    best.touch()
    for given, found in {"runs/a": "runs/a/checkpoints/best.ckpt", "runs": "runs"}.items():
        assert read(command, [f"--{option}", given]).words == [f"--{name}={found}"]


@pytest.mark.parametrize(
    ("word", "root"), [("photos/test", "photos"), ("photos/valid/", "photos"), ("photos", "photos"), ("test", "test")]
)
def test_the_root_of_a_folder_that_is_a_split_is_the_folder_above_it(word, root, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for folder in ("photos/test/ant", "photos/valid/ant", "test/train/ant"):
        (tmp_path / folder).mkdir(parents=True)
    with pytest.raises(UsageError, match=rf"unexpected argument '{word}' \(for images in a folder: --root {root}\);"):
        read("test", ["a.ckpt", word])


def test_images_of_the_command_line_override_those_of_a_configuration(tmp_path, fails):
    config = tmp_path / "c.yaml"
    config.write_text("images: [no-such.jpg]\n")
    assert "no file or folder 'mine.jpg'" in fails(["show", "a.ckpt", "mine.jpg", f"--config={config}"])


@pytest.mark.parametrize(
    ("command", "option"),
    [("validate", "ckpt_path: a.ckpt"), ("test", "robustness: photos"), ("predict", "paths: [a.jpg]")],
)
def test_an_option_that_has_no_effect_in_a_configuration_is_refused(command, option, best, tmp_path, fails):
    config, name = tmp_path / "c.yaml", option.partition(":")[0]
    config.write_text(f"{option}\n")
    message = fails([command, best, f"--config={config}"])
    assert f"in {config} has no effect: take it out of the file, and give --{name} on the command line" in message


def test_the_same_value_twice_is_no_mistake():
    assert read("fit", ["--lr", "0.1", "--model.lr=0.1"]).words == ["--model.lr=0.1", "--model.lr=0.1"]


def test_a_value_that_begins_with_a_hash_is_no_comment(fails):
    assert "no list at" in fails(["check-data", "--data=ImageListData", "--data.train=#1.csv"])
    assert "#1 is not a folder" in fails(["check-data", "--data=ImageListData", "--data.train=a", "--data.root=#1"])


def test_a_root_of_null_is_missing(fails):
    assert "missing: --root" in fails(["fit", "--root", "null"])


@pytest.mark.parametrize("text", ["1e3", "-1_0E+5", "1.5e3", "+2.E7", "1e", "e3", "1.5", "null"])
def test_texts_of_a_recorded_configuration_stay_texts(text):
    assert load_config(yaml.safe_dump({"root": text})) == {"root": text}


def test_messages_name_what_was_typed(photos, tmp_path, fails):
    fit = ["fit", f"--root={photos}", f"--runs={tmp_path}", *TINY]
    for given, message in {
        "--lr=fast": "--lr must be a number, got fast",
        "--model.lr=fast": "--model.lr must be a number, got fast",
        "--learning_rate=1e-3": "unknown option --learning_rate (did you mean '--lr'?)",
        "--data.workers=1": "unknown option --data.workers (did you mean '--num_workers'?)",
        "--optimizer=sgd": "unknown option --optimizer (did you mean '--model.opt'?)",
        "--epoch=3": "unknown option --epoch (did you mean '--epochs'?)",
        "--img_sise=3": "unknown option --img_sise (did you mean '--img_size'?)",
    }.items():
        assert message in fails([*fit, given])
    assert "unknown option --sharing; relvit fit --help-all lists the options\n" in fails([*fit, "--sharing=3"])
    usage = "missing: --sizes; usage: relvit resolutions CKPT ... --sizes SIZE ... [options]"
    assert usage in fails(["resolutions", "a.ckpt"])
    assert "unknown option --ouput (did you mean '--output'?)" in fails(["export", "a.ckpt", "--ouput=x.onnx"])


@pytest.mark.slow
def test_the_command_line_starts_without_lightning():
    """Importing Lightning takes seconds, so the help, `--version` and errors must not import Lightning."""
    code = "import sys, relvit.app.cli.typed_words; sys.exit('lightning' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
