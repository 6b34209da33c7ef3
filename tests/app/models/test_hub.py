"""Access to the Hugging Face hub: the error of a file that is not in the cache."""

import pytest

from relvit.app.models import hub
from relvit.app.utils.remote import DownloadError


def test_a_hub_that_the_user_forbids_is_not_one_that_does_not_answer(monkeypatch):
    monkeypatch.setattr(hub.constants, "HF_HUB_OFFLINE", True)
    message = "^the environment variable HF_HUB_OFFLINE or TRANSFORMERS_OFFLINE forbids the hub, and its cache lacks"
    with pytest.raises(DownloadError, match=message), hub.hub_access():
        raise FileNotFoundError("not in the cache")
