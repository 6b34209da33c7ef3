"""Defaults and ranges of the options of `relvit fit`, `validate`, `test` and `predict`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from relvit.cli.errors import UsageError
from relvit.utils.ranges import Range

# Where they differ from Lightning's.
TRAINER_DEFAULTS: dict[str, Any] = {"max_epochs": 100, "enable_model_summary": False}

# Options that Lightning takes any number for, or refuses in other words: what they may be.
_POSITIVE, _COUNT = Range(1), Range(0)
RANGES: dict[str, Range] = {
    "seed_everything": Range(0, 2**32 - 1),
    "save_every": _POSITIVE,
    "patience": _POSITIVE,
    **dict.fromkeys(("trainer.max_epochs", "trainer.min_epochs"), _POSITIVE),
    **dict.fromkeys(("trainer.max_steps", "trainer.min_steps"), _POSITIVE),
    **dict.fromkeys(("trainer.accumulate_grad_batches", "trainer.check_val_every_n_epoch"), _POSITIVE),
    "trainer.num_nodes": _POSITIVE,
    **dict.fromkeys((f"trainer.limit_{split}_batches" for split in ("train", "test", "predict")), Range(0, above=True)),
    "trainer.val_check_interval": Range(0, above=True),
    **dict.fromkeys(("trainer.gradient_clip_val", "trainer.overfit_batches", "trainer.limit_val_batches"), _COUNT),
    **dict.fromkeys(("trainer.log_every_n_steps", "trainer.reload_dataloaders_every_n_epochs"), _COUNT),
    "trainer.num_sanity_val_steps": Range(-1),
}


def check_numbers(options: Mapping[str, Any]) -> None:
    """Refuse numbers of the trainer, and of the command's own options, that are out of their ranges.

    Raises:
        UsageError: one is.
    """
    for name, allowed in RANGES.items():
        number = options.get(name)
        # A training needs one end, as its schedule does.
        ends = name == "trainer.max_steps" or (options.get("trainer.max_steps") or -1) > 0
        endless = name in ("trainer.max_epochs", "trainer.max_steps") and number == -1 and ends
        if isinstance(number, int | float) and not isinstance(number, bool) and number not in allowed and not endless:
            raise UsageError(f"--{name} must be {allowed}, got {number}")
