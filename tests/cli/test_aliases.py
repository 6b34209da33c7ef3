"""Short names of options and arguments without a name: what the parser gets, and what a user gets."""

import json

import pytest
from photos import TINY

from relvit.cli.aliases import rewrite
from relvit.cli.errors import UsageError


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
        ("fit", "--lr_find --patience 3", "--lr_find=true --patience=3"),
        ("fit", "--model.opt_kwargs.betas [0.9,0.99]", "--model.opt_kwargs.betas=[0.9,0.99]"),
        ("fit", "--trainer.callbacks+=Timer", "--trainer.callbacks+=Timer"),
        ("validate", "a.ckpt --img_size 48", "--ckpt_path=a.ckpt --data.img_size=48"),
        ("validate", "--batch_size 8 a.ckpt", "--ckpt_path=a.ckpt --data.batch_size=8"),
        ("test", "--mirror a.ckpt --split val", "--mirror=true --split=val --ckpt_path=a.ckpt"),
        ("test", "--mirror False a.ckpt", "--mirror=False --ckpt_path=a.ckpt"),
        ("predict", "a.ckpt", "--ckpt_path=a.ckpt"),
        ("predict", "a.ckpt x y", '--ckpt_path=a.ckpt --paths=["x", "y"]'),
        ("predict", "x --ckpt_path a.ckpt y", '--ckpt_path=a.ckpt --paths=["x", "y"]'),
        ("predict", "a.ckpt -- -x.jpg", '--ckpt_path=a.ckpt --paths=["-x.jpg"]'),
        ("resolutions", "a.ckpt --sizes 24 [32,48] --data.root r", "--sizes=[24,[32,48]] --root=r --ckpt_path=a.ckpt"),
        ("resolutions", "--sizes [24,32] a.ckpt", "--sizes=[24,32] --ckpt_path=a.ckpt"),
        ("resolutions", "--sizes=24 a.ckpt", "--sizes=[24] --ckpt_path=a.ckpt"),
        ("resolutions", "a.ckpt b.ckpt --sizes 16 24", '--sizes=[16,24] --ckpt_path=["a.ckpt", "b.ckpt"]'),
        ("resolutions", "--sizes 16 24 a.ckpt b.ckpt", '--sizes=[16,24] --ckpt_path=["a.ckpt", "b.ckpt"]'),
        ("embed", "a.ckpt photos --output x.npz", "--output=x.npz --ckpt_path=a.ckpt --root=photos"),
        ("embed", "a.ckpt --data.root photos", "--root=photos --ckpt_path=a.ckpt"),
        ("calibrate", "a.ckpt --data.batch_size=8", "--batch_size=8 --ckpt_path=a.ckpt"),
        (
            "probe",
            "a.ckpt --data=DigitsData --data.repeats=2",
            '--data=DigitsData --data.repeats=2 --models=["a.ckpt"]',
        ),
        ("show", "a.ckpt x --kind tables cam y", '--kind=[tables,cam] --ckpt_path=a.ckpt --images=["x", "y"]'),
        ("show", "a.ckpt --patch 3 4 5.jpg", '--patch=[3,4] --ckpt_path=a.ckpt --images=["5.jpg"]'),
        ("show", "a.ckpt --patch=[3,4] --kind=cam", "--patch=[3,4] --kind=[cam] --ckpt_path=a.ckpt"),
        ("fit", "-q --epochs 2", "-q --trainer.max_epochs=2"),
        ("fit", "--quiet --lr=1", "--quiet --model.lr=1"),
        ("average", "a b --output c", '--output=c --ckpt_paths=["a", "b"]'),
        ("check-data", "photos", "--root=photos"),
    ],
)
def test_rewrite(command, given, expected):
    found = rewrite(command, given.split())
    lists = [f"--{name}={json.dumps(values)}" for name, values in found.lists.items()]
    assert " ".join([*found.arguments, *lists]) == expected


@pytest.mark.parametrize(
    ("command", "given", "message"),
    [
        ("fit", "--lr 0.1 --model.lr 0.2", "--lr 0.1 and --model.lr 0.2 are two values for one option: give one"),
        ("embed", "--root a --data.root b", "--root a and --data.root b are two values"),
        ("fit", "photos", "unexpected argument 'photos': each value follows the name of its option; relvit fit --help"),
        ("validate", "a.ckpt b", "unexpected argument 'b'"),
        ("validate", "a.ckpt --ckpt_path b.ckpt", "unexpected argument 'a.ckpt': --ckpt_path given already"),
        ("embed", "a.ckpt x y", "unexpected argument 'y'"),
        ("validate", "a.ckpt --split test", "--split: validate uses the images of val; .* relvit test --split SPLIT"),
        ("validate", "a.ckpt --runs x", "--runs: validate prints its results and writes no file"),
    ],
)
def test_mistakes(command, given, message):
    with pytest.raises(UsageError, match=message):
        rewrite(command, given.split())


def test_the_same_value_twice_is_no_mistake():
    assert rewrite("fit", ["--lr", "0.1", "--model.lr=0.1"]).arguments == ["--model.lr=0.1", "--model.lr=0.1"]


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
    usage = "missing: --sizes; usage: relvit resolutions CKPT ... --sizes SIZE ... [options]"
    assert usage in fails(["resolutions", "a.ckpt"])
