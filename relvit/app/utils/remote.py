"""Fetch files from remote addresses such as https://..., s3://... and memory://..., by fsspec."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any

from relvit.app.utils.files import DISK_ERRORS, is_address
from relvit.utils.messages import did_you_mean

# A fetch stops after this number of seconds without a connection or without a received byte. The time for a whole file
# is not limited.
PATIENCE = 60


class DownloadError(ConnectionError):
    """A file at a remote address could not be fetched, or only a part of the file."""


def suffix_of(path: str | os.PathLike[str]) -> str:
    """Return the suffix of a file's name, such as '.ckpt'; of an address without the query."""
    name = os.fspath(path)
    return PurePosixPath(name.partition("?")[0] if is_address(name) else name).suffix


@contextmanager
def local_file(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield the path of a local file, or of a temporary copy of the file at a remote address.

    Raises:
        FileNotFoundError: there is nothing at the address, or it is a folder.
        ValueError: the kind of address is unknown, or needs a package that is not installed.
        DownloadError: the file could not be fetched.
        OSError: the disk has no space for the copy.
    """
    if not is_address(path):
        yield Path(path)
        return
    with tempfile.TemporaryDirectory(prefix="relvit-") as folder:
        copy = Path(folder) / f"copy{suffix_of(path)}"
        _fetch(os.fspath(path), copy)
        yield copy


def _fetch(address: str, copy: Path) -> None:
    # Import fsspec only here, because most commands never need it.
    from fsspec import available_protocols
    from fsspec.core import url_to_fs
    from fsspec.registry import registry

    protocol = address.partition("://")[0].partition("::")[0]
    known = {*available_protocols(), *registry}
    if protocol not in known:
        raise ValueError(
            f"{address} begins with {protocol!r}, which is not a known kind of address{did_you_mean(protocol, known)}: "
            "give a local path, or an address such as https://... or s3://..."
        )
    try:
        files, path = url_to_fs(address, **_options(protocol))
        files.get_file(path, str(copy))
    except ImportError as error:
        cause = error if error.name else error.__cause__
        package = getattr(cause, "name", None) or protocol
        raise ValueError(f"{address} cannot be read without the package {package}: pip install {package}") from error
    except FileNotFoundError as error:
        raise FileNotFoundError(f"there is no file at {address}: correct the address") from error
    # Catch everything, because each library behind fsspec raises different exceptions.
    except Exception as error:
        if isinstance(error, OSError) and error.errno in DISK_ERRORS:
            # The copy is not in a folder of the user's choice, so say where it is.
            cure = f"{DISK_ERRORS[error.errno]}, or let TMPDIR name another folder"
            raise OSError(error.errno, f"{error.strerror}: {copy}: {cure}") from error
        why = " ".join(f"{type(error).__name__}: {error}".split()).removesuffix(":")
        raise DownloadError(f"{address} could not be fetched: {why}") from error
    if not copy.is_file():
        raise FileNotFoundError(f"{address} is a folder: give the address of a file")


def _options(protocol: str) -> dict[str, Any]:
    """Return the options of fsspec's file system."""
    if protocol not in ("http", "https"):
        return {}
    from aiohttp import ClientTimeout

    # By default aiohttp stops a download after five minutes, and ignores the environment variables that name proxies,
    # so give it other limits, and tell it to read these variables.
    timeout = ClientTimeout(total=None, sock_connect=PATIENCE, sock_read=PATIENCE)
    return {"client_kwargs": {"timeout": timeout, "trust_env": True}}
