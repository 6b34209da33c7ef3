"""Strategies that divide the weights among devices are refused before anything is written; DDP is not."""

import pytest
from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy, ModelParallelStrategy
from photos import TINY

from relvit.cli import main
from relvit.training.optim.strategy import check_strategy


def test_the_command_line_refuses_them(photos, tmp_path, capsys):
    arguments = ["fit", "--data=ImageFolderData", f"--data.root={photos}", f"--runs={tmp_path}", *TINY]
    assert main([*arguments, "--trainer.strategy=deepspeed_stage_3"]) == 2
    assert "strategy deepspeed_stage_3 cannot train here" in (error := capsys.readouterr().err)
    assert "give --trainer.strategy ddp" in error
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("strategy", [FSDPStrategy(), ModelParallelStrategy(), "fsdp", "fsdp2", "fsdp_cpu_offload"])
def test_they_are_named(strategy):
    name = strategy if isinstance(strategy, str) else type(strategy).__name__
    with pytest.raises(ValueError, match=f"{name} cannot train here"):
        check_strategy(strategy)


@pytest.mark.parametrize("strategy", ["auto", "ddp", "ddp_find_unused_parameters_true", DDPStrategy()])
def test_others_are_not(strategy):
    check_strategy(strategy)
