"""Skip tests of features that older versions of timm lack."""

import pytest
import timm
from packaging.version import Version


def since(version: str) -> None:
    """Skip the rest of a test if timm is older than a version."""
    if Version(timm.__version__) < Version(version):
        pytest.skip(f"needs timm {version} or newer")


def needs_timm(version: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(Version(timm.__version__) < Version(version), reason=f"needs timm {version} or newer")
