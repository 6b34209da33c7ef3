"""Numbers outside of their ranges are refused in Python and on the command line; the ends are accepted."""

import math
from typing import Annotated

import pytest
from photos import TINY

from relvit.app.cli import COMMANDS, main
from relvit.app.cli.functions import function_of
from relvit.app.cli.trainer.lightning_cli import RANGES
from relvit.app.data import DigitsData
from relvit.app.training import ImageClassifier
from relvit.app.utils.number_types import Share, ShareBelowOne, check_ranges, ranges_of
from relvit.utils.ranges import Range


def example(a: Share = 0.5, b: ShareBelowOne | None = None, *, c: list[Annotated[int, Range(2, 5, above=True)]] = ()):
    """Return a function whose arguments have ranges."""


@pytest.mark.parametrize(
    "given", [{}, {"a": 0}, {"a": 1.0}, {"b": 0}, {"b": None}, {"b": 0.999}, {"c": [3, 5]}, {"c": ()}, {"other": -1}]
)
def test_what_is_in_range(given):
    check_ranges(example, given)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"a": -0.1}, "a must be in 0 <= x <= 1, got -0.1"),
        ({"a": math.nan}, "a must be finite and in 0 <= x <= 1, got nan"),
        ({"b": 1}, "b must be in 0 <= x < 1, got 1"),
        ({"c": [3, 2]}, r"c must be in 2 < x <= 5, got \[3, 2\]"),
    ],
)
def test_what_is_not(given, message):
    with pytest.raises(ValueError, match=message):
        check_ranges(example, given)


def test_ranges_are_found_in_unions_and_lists():
    assert ranges_of(example) == {"a": Range(0, 1), "b": Range(0, 1, below=True), "c": Range(2, 5, above=True)}
    assert str(Range(1)) == "1 or more"
    assert str(Range(0, above=True)) == "positive"
    assert math.inf not in Range(0)


WRONG = {
    "weight_decay": -1,
    "warmup_epochs": -1,
    "lr": -1e-3,
    "label_smoothing": 1,
    "mixup": -0.1,
    "mix_prob": 1.1,
    "ema_decay": 1,
    "ponder_weight": -1,
    "layer_decay": 0,
    "position_lr_scale": 0,
    "freeze_epochs": -1,
    "class_weights": [1.0, 0.0],
    "num_classes": 0,
}


@pytest.mark.parametrize("name", WRONG)
def test_the_classifier(name):
    with pytest.raises(ValueError, match=f"{name} must be "):
        ImageClassifier(model="test_relvit", **{"num_classes": 2, name: WRONG[name]})


def test_the_data():
    for name, number in (("batch_size", 10**9), ("num_workers", 10**5), ("repeats", 0)):
        with pytest.raises(ValueError, match=f"{name} must be "):
            DigitsData(**{name: number})


OPTIONS = [
    ("--epochs=0", "--epochs must be 1 or more, got 0"),
    ("--epochs=-1", "--epochs must be 1 or more, got -1"),
    ("--trainer.max_steps=0", "--trainer.max_steps must be 1 or more, got 0"),
    ("--trainer.accumulate_grad_batches=0", "--trainer.accumulate_grad_batches must be 1 or more, got 0"),
    ("--trainer.gradient_clip_val=-1", "--trainer.gradient_clip_val must be 0 or more, got -1"),
    ("--trainer.check_val_every_n_epoch=0", "--trainer.check_val_every_n_epoch must be 1 or more, got 0"),
    ("--trainer.limit_train_batches=0", "--trainer.limit_train_batches must be positive, got 0"),
    ("--trainer.val_check_interval=0", "--trainer.val_check_interval must be positive, got 0"),
    ("--seed_everything=-1", "--seed_everything must be in 0 <= x <= 4294967295, got -1"),
    ("--save_every=0", "--save_every must be 1 or more, got 0"),
    ("--model.weight_decay=-1", "weight_decay must be 0 or more, got -1.0"),
    ("--model.warmup_epochs=-1", "warmup_epochs must be 0 or more, got -1.0"),
    ("--batch_size=1000000000", "batch_size must be in 1 <= x <= 65536, got 1000000000"),
    ("--devices=99999", "--devices 99999: each process on the CPU needs a core, so give "),
]


@pytest.mark.parametrize(("option", "message"), OPTIONS, ids=[option for option, _ in OPTIONS])
def test_the_command_line(option, message, fails, tmp_path):
    runs = tmp_path / "runs"
    model = ["--model.model=test_relvit", "--model.model_kwargs.patch_size=4"]
    arguments = ["fit", "--data=DigitsData", *model, f"--runs={runs}", "--accelerator=cpu", option]
    assert message in fails(arguments)
    assert not runs.exists()


def test_numbers_at_the_ends_of_their_ranges_train(photos, tmp_path, monkeypatch, capsys):
    """The training also prints a note at its start that other processes use the cores."""
    monkeypatch.setattr("os.getloadavg", lambda: (99.0, 0.0, 0.0))
    options = ["--trainer.max_epochs=-1", "--trainer.max_steps=1", "--trainer.gradient_clip_val=0", "--patience=1"]
    options += ["--model.weight_decay=0", "--model.warmup_epochs=0", "--trainer.num_sanity_val_steps=-1"]
    data = ["--data=ImageFolderData", f"--data.root={photos}", f"--runs={tmp_path}"]
    assert main(["fit", *data, *TINY, *options, "--seed_everything=0", "--save_every=1"]) == 0
    assert capsys.readouterr().out.count("Note: 99.0 processes") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["probe", "relvit_tiny", "--k", "0"], "k must be 1 or more, got 0"),
        (["demo", "x.ckpt", "--port", "99999"], "port must be in 0 <= x <= 65535, got 99999"),
        (["embed", "x.ckpt", "photos", "--output", "y.csv", "--batch_size", "0"], "batch_size must be in 1 <= x"),
    ],
)
def test_other_commands(arguments, message, fails):
    assert message in fails(arguments)


def test_every_number_of_a_command_has_a_range():
    free = {"show": {"layer", "patch"}, "probe": {"shares"}}
    for command, (module, _) in COMMANDS.items():
        if module != COMMANDS["fit"][0]:
            hints = function_of(module, command).__annotations__
            numbers = {name for name, hint in hints.items() if hint.split(" ")[0] in ("int", "float")}
            assert numbers <= free.get(command, set()), command
    assert all(name.partition(".")[0] in ("trainer", "seed_everything", "save_every", "patience") for name in RANGES)
