"""Files at remote addresses are fetched completely, or the error is one line."""

import contextlib
import http.server
import os
import tempfile
import threading

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.registry import known_implementations

from relvit.app.utils.files import is_address
from relvit.app.utils.remote import DownloadError, local_file, suffix_of

CONTENT = os.urandom(100_000)


class Handler(http.server.BaseHTTPRequestHandler):
    """A server whose answer depends on the last word of the path."""

    def do_GET(self):
        status = {"missing": 404, "broken": 500}.get(self.path.rpartition("/")[2], 200)
        self.send_response(status)
        self.send_header("Content-Length", str(len(CONTENT)))
        self.end_headers()
        self.wfile.write(CONTENT[:50_000] if self.path.endswith("cut") else CONTENT)

    def log_message(self, *arguments):
        pass


@pytest.fixture(scope="module")
def server():
    """The address of a server on this machine."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as found:
        threading.Thread(target=found.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{found.server_address[1]}"
        found.shutdown()


@pytest.fixture(autouse=True)
def _nothing_is_left(tmp_path, monkeypatch):
    """Check that no copy of a file, complete or not, remains."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    yield
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith("relvit")] == []


def test_a_complete_copy_and_then_none(server, tmp_path):
    fsspec.filesystem("memory").pipe("/bucket/x.ckpt", CONTENT)
    for address in (f"{server}/a/x.ckpt", f"{server}/x.ckpt?token=a/b.c", "memory://bucket/x.ckpt"):
        with local_file(address) as copy:
            assert (copy.read_bytes(), copy.suffix) == (CONTENT, ".ckpt")
        assert not copy.exists()
    with local_file(tmp_path / "x.ckpt") as found:
        assert found == tmp_path / "x.ckpt"


def test_addresses_and_endings():
    assert is_address("s3://bucket/x.ckpt")
    assert not is_address("C:/folder/x.ckpt")
    endings = {"memory://x.ckpt": ".ckpt", "https://a.b/x.pth?v=1.ckpt": ".pth", "s3://a.b/x": "", "a?/x.bin": ".bin"}
    assert {name: suffix_of(name) for name in endings} == endings


@pytest.mark.parametrize(
    ("address", "error", "message"),
    [
        ("SERVER/x/missing", FileNotFoundError, "there is no file at SERVER/x/missing"),
        ("SERVER/x/broken", DownloadError, "SERVER/x/broken could not be fetched: .*500"),
        ("SERVER/x/cut", DownloadError, "SERVER/x/cut could not be fetched: .*not completed"),
        ("http://127.0.0.1:1/x.ckpt", DownloadError, "could not be fetched: Client"),
        ("memory://nothing/x.ckpt", FileNotFoundError, "there is no file at memory://nothing/x.ckpt: correct"),
        ("memory://folder", FileNotFoundError, "memory://folder is a folder: give the address of a file"),
        ("memorry://x.ckpt", ValueError, r"begins with 'memorry', .* \(did you mean 'memory'\?\): give a local path"),
        ("away://x.ckpt", ValueError, "pip install not_installed_here"),
    ],
)
def test_what_cannot_be_fetched(address, error, message, server, monkeypatch):
    fsspec.filesystem("memory").pipe("/folder/x", b"")
    monkeypatch.setitem(known_implementations, "away", {"class": "not_installed_here.FileSystem", "err": "Install it"})
    address, message = (text.replace("SERVER", server) for text in (address, message))
    with pytest.raises(error, match=message) as caught, local_file(address):
        pass
    assert len(str(caught.value).splitlines()) == 1


def test_a_full_disk_is_called_one(monkeypatch):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(MemoryFileSystem, "get_file", full)
    with pytest.raises(OSError, match="No space left") as caught, contextlib.ExitStack() as stack:
        stack.enter_context(local_file("memory://x"))
    assert not isinstance(caught.value, DownloadError)
    assert f"{tempfile.gettempdir()}/relvit-" in str(caught.value)
    assert "make room, or let TMPDIR name another folder" in str(caught.value)
