"""Fetch files of the Hugging Face hub without its warnings, and from its cache alone where it cannot be reached."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from huggingface_hub import constants
from huggingface_hub.utils import get_session, logging

from relvit.app.utils.remote import DownloadError

# Without an answer after this number of seconds, the hub counts as out of reach.
PATIENCE = 10


@contextmanager
def hub_access() -> Iterator[None]:
    """Keep the hub's library silent, and offline where the hub does not answer.

    huggingface_hub has no option for its retries: without a network it waits 23 seconds for each file that is asked
    for, even where the file is in the cache.

    Raises:
        DownloadError: The hub does not answer, and a file is not in the cache.
    """
    before = logging.get_verbosity()
    logging.set_verbosity_error()
    offline = constants.HF_HUB_OFFLINE or not _answers()
    try:
        with mock.patch.object(constants, "HF_HUB_OFFLINE", offline):
            yield
    # The errors for a missing file have other classes in older versions, and all of these classes are OSErrors.
    except OSError as error:
        if not offline:
            raise
        raise DownloadError(
            f"{constants.ENDPOINT} does not answer, and its cache lacks the file; give weights that you have, as "
            "--pretrained FOLDER, or as --pretrained weights.safetensors --model NAME"
        ) from error
    finally:
        logging.set_verbosity(before)


def _answers() -> bool:
    try:
        get_session().head(constants.ENDPOINT, timeout=PATIENCE)
    # Versions of huggingface_hub have different clients, whose errors for proxies, names and connections differ.
    except Exception:
        return False
    return True
