"""Lightning's CLI, opened for extension: its public hooks alone, in place of the private methods that do the same."""

from __future__ import annotations

import inspect
from typing import Any

from lightning import Trainer
from lightning.pytorch.cli import LightningCLI


class OpenLightningCLI(LightningCLI):
    """Lightning's CLI, whose subclasses may extend how a subcommand runs and with which arguments."""

    def config_value(self, config: Any, key: str, default: Any = None) -> Any:
        """Return an option of the subcommand that runs."""
        return config[self.subcommand].get(key, default)

    def make_trainer(self, config: dict[str, Any], callbacks: list[Any]) -> Trainer:
        """Build the trainer from its options, with further callbacks behind those of the options."""
        return LightningCLI.instantiate_trainer(self, **config | {"callbacks": [*config["callbacks"], *callbacks]})

    def after_instantiate_classes(self) -> None:
        """Run the subcommand. Lightning would run it next, by a private method, but runs nothing where it is None."""
        self.run_subcommand(self.subcommand)
        self.subcommand = None

    def run_subcommand(self, subcommand: str) -> None:
        """Call `before_...`, the Trainer's method of that name, and `after_...`, where there are such methods."""
        getattr(self, f"before_{subcommand}", lambda: None)()
        getattr(self.trainer, subcommand)(**self.subcommand_arguments(subcommand))
        getattr(self, f"after_{subcommand}", lambda: None)()

    def subcommand_arguments(self, subcommand: str) -> dict[str, Any]:
        """Return the keyword arguments of the Trainer's method."""
        names = inspect.signature(getattr(self.trainer, subcommand)).parameters
        given = {name: value for name, value in self.config_init[subcommand].items() if name in names}
        return given | {"model": self.model, "datamodule": self.datamodule}
