"""Fetch files of the Hugging Face hub without its warnings, and from its cache alone where it cannot be reached."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from huggingface_hub import constants
from huggingface_hub.utils import get_session, logging

from relvit.app.utils.remote import DownloadError

# If the hub does not answer within this number of seconds, relvit uses only files in the cache.
PATIENCE = 10


@contextmanager
def hub_access() -> Iterator[None]:
    """Keep the hub's library silent, and offline if the hub does not answer.

    Without this function, huggingface_hub would try again and again for 23 seconds without a network, for each
    requested file, even if the file is in the cache. huggingface_hub has no option to shorten that time.

    Raises:
        DownloadError: The hub does not answer, and a file is not in the cache.
    """
    before = logging.get_verbosity()
    logging.set_verbosity_error()
    offline = constants.HF_HUB_OFFLINE or not _answers()
    try:
        with mock.patch.object(constants, "HF_HUB_OFFLINE", offline):
            yield
    # Versions of huggingface_hub raise different errors for a missing file; all of them are OSErrors, so catch this
    # type.
    except OSError as error:
        if not offline:
            raise
        # If the user has set one of these variables, the hub was not asked.
        chosen = "the environment variable HF_HUB_OFFLINE or TRANSFORMERS_OFFLINE forbids the hub"
        why = chosen if constants.HF_HUB_OFFLINE else f"{constants.ENDPOINT} does not answer"
        raise DownloadError(
            f"{why}, and its cache lacks the file; give weights that you have: "
            "a checkpoint, a folder of weights or, as --pretrained with --model NAME, a file of weights"
        ) from error
    finally:
        logging.set_verbosity(before)


def _answers() -> bool:
    try:
        get_session().head(constants.ENDPOINT, timeout=PATIENCE)
    # Catch everything: versions of huggingface_hub use different HTTP clients, whose errors for proxies, names and
    # connections differ.
    except Exception:
        return False
    return True
