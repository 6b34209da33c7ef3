"""Lightning's private attributes: they exist, do what they are used for, and only one file of relvit uses them."""

import ast
import inspect
from pathlib import Path

import lightning
import pytest
import torch
from lightning import Callback, LightningDataModule, LightningModule
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.pytorch.callbacks import LambdaCallback, RichProgressBar
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.loops.evaluation_loop import RestartStage
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from lightning.pytorch.strategies import ModelParallelStrategy, Strategy
from lightning.pytorch.tuner import lr_finder
from small_training import build, train

import relvit
from relvit.cli.fit.trainer import RelvitCLI
from relvit.training import ImageClassifier
from relvit.training import lightning_internals as internals
from relvit.training.optim.sharding import FullySharded

ROOT = Path(relvit.__file__).parent
MEND = f"Lightning {lightning.__version__} has changed this: mend relvit/training/lightning_internals.py"
# Private names of Python and PyTorch.
OTHERS = {"_actions", "_asdict", "_fields", "_replace", "_apply", "_compiled_call_impl", "_dynamo"}


def test_batches_steps_and_validations():
    """Six batches, two in a step, a validation after every third."""
    found, module = [], build()
    functions = (internals.training_batches_done, internals.stepped_within_epoch, internals.validation_due)
    watch = LambdaCallback(on_train_batch_end=lambda trainer, *_: found.append([of(trainer) for of in functions]))
    assert internals.attached_trainer(module) is None, MEND
    trainer = train(module, max_epochs=1, accumulate_grad_batches=2, val_check_interval=3, callbacks=[watch])
    last, stepped, validates = zip(*found, strict=True)
    assert last == (False,) * 5 + (True,), MEND
    assert stepped == (False, True, False, True, False, False), MEND
    assert validates == (False, False, True, False, False, True), MEND
    assert internals.attached_trainer(module) is trainer, MEND
    assert isinstance(internals.cluster_environment(trainer), LightningEnvironment), MEND


def test_resuming_before_a_validation():
    trainer = train(build(), max_epochs=1, limit_train_batches=1)
    loop = trainer.fit_loop.epoch_loop
    for skip in (True, False):
        steps = loop._batches_that_stepped
        internals.resume_before_validation(trainer, skip)
        assert loop._batches_that_stepped == steps - 1, MEND
        assert (loop.val_loop._restart_stage == RestartStage.RESTARTED_MID_EVALUATION) != skip, MEND
    assert "self._batches_that_stepped += 1" in inspect.getsource(_TrainingEpochLoop), MEND


def test_sharding_over_all_devices():
    strategy = ModelParallelStrategy()
    strategy.parallel_devices = [torch.device("cpu")] * 3
    strategy.num_nodes = 2
    assert strategy._data_parallel_size == "auto", MEND
    internals.shard_over_all_devices(strategy)
    assert strategy._data_parallel_size == 6
    assert "_data_parallel_size" in inspect.getsource(ModelParallelStrategy.setup_environment), MEND


def test_the_range_tests_bar_can_be_hidden():
    assert "= tqdm(" in inspect.getsource(lr_finder), "Lightning has changed its bar: mend optim/lr_finder.py"


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        (RichProgressBar, ["_get_train_description"]),
        (LightningCLI, ["_get", "_instantiate_trainer", "_run_subcommand", "_prepare_subcommand_kwargs"]),
        (LightningCLI, ["_parse_ckpt_path"]),
    ],
)
def test_methods_that_are_extended_are_still_called(kind, names):
    for name in names:
        assert hasattr(kind, name), f"{kind.__name__}.{name}: {MEND}"
        assert inspect.getsource(inspect.getmodule(kind)).count(f"self.{name}(") > 0, f"{kind.__name__}.{name}: {MEND}"


def test_no_other_file_uses_private_attributes_of_lightning():
    trees = {path: ast.parse(path.read_text()) for path in ROOT.rglob("*.py") if path.stem != "lightning_internals"}
    nodes = [(path, node) for path, tree in trees.items() for node in ast.walk(tree)]
    own = {node.name for _, node in nodes if isinstance(node, ast.FunctionDef)} | OTHERS
    attributes = [(path, node) for path, node in nodes if isinstance(node, ast.Attribute)]
    own |= {node.attr for _, node in attributes if isinstance(node.ctx, ast.Store)}
    training = [pair for pair in attributes if pair[0].relative_to(ROOT).parts[0] in ("training", "evaluation", "cli")]
    assert training
    for path, node in training:
        private = node.attr.startswith("_") and not node.attr.startswith("__")
        assert not private or node.attr in own, (
            f"{path}:{node.lineno} uses {ast.unparse(node)}: private attributes of Lightning are used in "
            "relvit/training/lightning_internals.py alone"
        )


def subclasses(kind):
    return {kind}.union(*map(subclasses, kind.__subclasses__()))


def test_no_other_class_overrides_private_methods_of_lightning():
    found = set().union(*map(subclasses, (LightningModule, LightningDataModule, Callback, Strategy, LightningCLI)))
    ours = [kind for kind in found if kind.__module__.startswith("relvit.") and kind.__module__ != internals.__name__]
    assert {ImageClassifier, RelvitCLI, FullySharded} <= set(ours)
    for kind in ours:
        theirs = {name for base in kind.__mro__ if base.__module__.startswith("lightning") for name in vars(base)}
        private = {name for name in vars(kind) if name.startswith("_") and not name.startswith("__")} - {"_abc_impl"}
        assert not private & theirs, f"{kind}: extend these in relvit/training/lightning_internals.py"
