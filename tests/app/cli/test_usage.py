"""Every usage line in the help, with values filled in, is parsed to the options that the line describes."""

import dis
import inspect

import pytest
import yaml
from onnx_files import classifier_of

from relvit.app.cli import COMMANDS, main
from relvit.app.cli.functions import function_of
from relvit.app.cli.typed_words import parts

DIGITS = {"class_path": "relvit.app.data.DigitsData"}
# Each line of usage has the options that `--print_config` must then print. CKPT, RUN and ONNX are files of a training.
LINES = {
    "fit --root photos --epochs 3 --lr 0.1": {"data.root": "photos", "trainer.max_epochs": 3, "model.lr": 0.1},
    "fit --config digits --quiet": {"data.class_path": "relvit.app.data.DigitsData", "quiet": True},
    "fit --config digits -q --lr_find --patience 3": {"quiet": True, "lr_find": True, "patience": 3},
    "fit --config digits --logger csv --devices 1 --lr_find false": {"trainer.logger": False, "lr_find": False},
    "validate CKPT --img_size 48": {"data.img_size": 48},
    "validate RUN --batch_size 4 --reach logn": {"data.batch_size": 4, "reach": "logn"},
    "test --mirror CKPT --split val": {"mirror": True, "split": "val"},
    "test --mirror false CKPT": {"mirror": False},
    "test CKPT --robustness photos": {"data.root": "photos"},
    "predict CKPT": {"data.class_path": "relvit.app.data.ImageFolderData", "data.on_error": "skip"},
    "predict CKPT --data.on_error error": {"data.on_error": "error"},
    "predict CKPT --data.root photos --data ImageNetData": {"data.root": "photos", "data.on_error": "skip"},
    "predict CKPT a.jpg b": {"data.paths": ["a.jpg", "b"]},
    "predict CKPT --paths a.jpg": {"data.paths": ["a.jpg"]},
    "predict CKPT --paths [a.jpg,b]": {"data.paths": ["a.jpg", "b"]},
    "predict a.jpg --ckpt_path CKPT -- -b.jpg": {"data.paths": ["a.jpg", "-b.jpg"]},
    "predict CKPT a.jpg --step_maps --img_size [16,24]": {"step_maps": True, "data.img_size": [16, 24]},
    "predict --model ONNX b c --batch_size 2": {"data.paths": ["b", "c"], "data.batch_size": 2},
    "predict --ckpt_path ONNX b --on_error error": {"data.paths": ["b"], "data.on_error": "error"},
    "predict ONNX b --mirror": {"data.paths": ["b"], "data.img_size": [16, 16], "data.mean": [0.5, 0.5, 0.5]},
    "test --model ONNX --data ImageFolderData --root photos": {"data.root": "photos", "trainer.accelerator": "cpu"},
    "resolutions a.ckpt --sizes 24 [32,48] --data.root r": {
        "ckpt_path": "a.ckpt",
        "sizes": [24, [32, 48]],
        "root": "r",
    },
    "resolutions --sizes 16 24 a.ckpt b.ckpt": {"ckpt_path": ["a.ckpt", "b.ckpt"], "sizes": [16, 24]},
    "resolutions a.ckpt --sizes 16 24 --widths 24 32 48": {"sizes": [16, 24], "widths": [24, 32, 48]},
    "resolutions --sizes=24 a.ckpt": {"ckpt_path": "a.ckpt", "sizes": [24]},
    "resolutions --sizes=[24,32] --ckpt_path=[a.ckpt,b.ckpt]": {"ckpt_path": ["a.ckpt", "b.ckpt"], "sizes": [24, 32]},
    "embed a.ckpt photos --output x.npz": {"ckpt_path": "a.ckpt", "root": "photos", "output": "x.npz"},
    "embed RUN --data.root photos --output=x.npz": {"ckpt_path": "CKPT", "root": "photos"},
    "export a.ckpt --output x.onnx --int8": {"ckpt_path": "a.ckpt", "output": "x.onnx", "int8": True},
    "export a.ckpt --output x.onnx --int8 --calibration photos": {"int8": True, "calibration": "photos"},
    "publish a.ckpt --to hf-hub:a/b": {"ckpt_path": "a.ckpt", "to": "hf-hub:a/b"},
    "demo a.ckpt --port 0": {"ckpt_path": "a.ckpt", "port": 0},
    "show a.ckpt x --kind tables cam y": {"ckpt_path": "a.ckpt", "images": ["x", "y"], "kind": ["tables", "cam"]},
    "show a.ckpt --patch 3 4 5.jpg --layer -1": {"images": ["5.jpg"], "patch": [3, 4], "layer": -1},
    "show a.ckpt --patch=[3,4] --kind=cam": {"images": None, "patch": [3, 4], "kind": ["cam"]},
    "explain relvit_tiny --img_size 32 --model_kwargs.rel_terms k": {"model": "relvit_tiny", "img_size": 32},
    "explain a.ckpt": {"model": "a.ckpt"},
    "explain --model.model relvit_tiny --retrofit {}": {"model": "relvit_tiny", "retrofit": {}},
    "calibrate a.ckpt --output b.ckpt --data.batch_size=8": {"ckpt_path": "a.ckpt", "batch_size": 8},
    "probe a.ckpt relvit_tiny --root r --random": {"models": ["a.ckpt", "relvit_tiny"], "root": "r", "random": True},
    "probe --shares 0.1 1 a.ckpt --data DigitsData": {"models": ["a.ckpt"], "shares": [0.1, 1.0], "data": DIGITS},
    "average a b --output c": {"ckpt_paths": ["a", "b"], "output": "c"},
    "average --ckpt_paths [a,b] --output c": {"ckpt_paths": ["a", "b"]},
    "check-data photos --output x.json": {"root": "photos", "output": "x.json"},
    "check-data --data DigitsData --data.repeats 2": {
        "data.class_path": "relvit.app.data.DigitsData",
        "data.repeats": 2,
    },
}


def found(config, name):
    """Return an option of the printed configuration, in which options of the data are nested below `init_args`."""
    for key in name.split("."):
        config = config["init_args"] if key not in config and "init_args" in config else config
        config = config[key]
    return {"class_path": config["class_path"]} if isinstance(config, dict) and "class_path" in config else config


@pytest.mark.parametrize("line", LINES)
def test_a_line_of_use(line, run, tmp_path, capsys):
    best = str(run / "checkpoints" / "best.ckpt")
    exported = str(classifier_of(tmp_path / "a.onnx"))
    command, *words = [{"CKPT": best, "RUN": str(run), "ONNX": exported}.get(word, word) for word in line.split()]
    # `--print_config` prints only options that come before it, and after "--" no word is an option.
    end = words.index("--") if "--" in words else len(words)
    assert main([command, *words[:end], "--print_config", *words[end:]]) == 0, capsys.readouterr().err
    config = yaml.safe_load(capsys.readouterr().out)
    for name, value in LINES[line].items():
        assert found(config, name) == (best if value == "CKPT" else value), name


def test_every_command_has_a_line():
    assert {line.split()[0] for line in LINES} == set(COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_uses_each_of_its_arguments(command):
    """The code of each command uses all arguments in its signature, not only the parser and the help."""
    for part in parts(function_of(COMMANDS[command][0], command)):
        used = [each.argval for each in dis.get_instructions(part) if each.opname.startswith("LOAD_")]
        used = {name for value in used for name in (value if isinstance(value, tuple) else (value,))}
        assert set(inspect.signature(part).parameters) <= used
