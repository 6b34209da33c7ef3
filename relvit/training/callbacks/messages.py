"""Messages in the middle of a training."""

from __future__ import annotations

import sys

from lightning.pytorch.utilities.rank_zero import rank_zero_only
from tqdm import tqdm


@rank_zero_only
def rank_zero_print(text: str) -> None:
    """Print on the main process, at once, above a progress bar if there is one.

    `LightningModule.print` hands the text to the bar, and not every bar prints: `TQDMProgressBar` drops what comes
    before its start.
    """
    tqdm.write(text)
    sys.stdout.flush()
