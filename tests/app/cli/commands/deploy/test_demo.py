"""`relvit demo`: the server with its defaults, from start to end, and the options that the command refuses."""

import os
import re
import signal
import socket
import sys
import tempfile
import urllib.request

import pytest
from processes import finish, start

from relvit.app.cli import main

ARGUMENTS = ["demo", "best.ckpt"]
LINE = r"The page is at (http://{}:\d+), and {} can open it\. Ctrl-C ends it\.\n"


@pytest.fixture(autouse=True)
def own_environment(monkeypatch):
    """Restore the environment variables that the command sets in this process."""
    for name in ("GRADIO_TEMP_DIR", "GRADIO_ANALYTICS_ENABLED"):
        monkeypatch.setenv(name, "")


@pytest.mark.slow
def test_it_serves_this_machine_until_it_is_ended_and_leaves_no_file(best, tmp_path):
    pytest.importorskip("gradio")
    process = start(["demo", best, "--port", "0"], tmp_path, env={"TMPDIR": str(tmp_path)})
    try:
        address = re.fullmatch(LINE.format("127.0.0.1", "only this machine"), process.stdout.readline())[1]
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        assert b"relvit: test_relvit" in opener.open(address, timeout=60).read()
        assert len(list(tmp_path.glob("relvit-demo-*"))) == 1
    finally:
        process.send_signal(signal.SIGTERM)
    assert finish(process) == (0, "", "")
    assert list(tmp_path.glob("relvit-demo-*")) == []


@pytest.mark.parametrize(
    ("options", "host", "who"),
    [
        ([], "127.0.0.1", "only this machine"),
        (["--host", "0.0.0.0"], "0.0.0.0", "everyone who can reach this machine, without a password,"),
    ],
)
def test_who_can_open_it(best, capsys, monkeypatch, tmp_path, options, host, who):
    uvicorn = pytest.importorskip("uvicorn")
    pytest.importorskip("gradio")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    stop = signal.getsignal(signal.SIGTERM)

    def served(server, sockets):
        assert sockets[0].getsockname()[0] == host
        assert os.environ["GRADIO_TEMP_DIR"] == str(next(tmp_path.glob("relvit-demo-*")))
        assert os.environ["GRADIO_ANALYTICS_ENABLED"] == "False"
        raise KeyboardInterrupt

    monkeypatch.setattr(uvicorn.Server, "run", served)
    try:
        assert main(["demo", str(best), "--port", "0", *options]) == 0
    finally:
        signal.signal(signal.SIGTERM, stop)
    assert re.fullmatch(LINE.format(host, who), capsys.readouterr().out)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--max_mb", "0"], "max_mb must be positive, got 0"),
        (["--max_pixels", "-1"], "max_pixels must be 1 or more, got -1"),
        (["--port", "70000"], "port must be in 0 <= x <= 65535, got 70000"),
        (
            ["--host", "no.such.host.invalid"],
            "at host no.such.host.invalid, port 7860: .* give an address of",
        ),
        # The addresses of this network are for documentation (RFC 5737), so no machine has this address.
        (["--host", "192.0.2.1"], "port 7860: .*; give an address of this machine, or 0.0.0.0 for all"),
        (["--reach", "far"], "--reach must be"),
    ],
)
def test_refusals(options, message, fails):
    pytest.importorskip("gradio")
    assert re.search(message, fails([*ARGUMENTS, *options]))


def test_a_port_in_use_and_a_missing_checkpoint(fails, monkeypatch, tmp_path):
    pytest.importorskip("gradio")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        message = fails([*ARGUMENTS, "--port", port])
    assert f"port {port}: " in message
    assert "--port 0 takes a free one" in message
    assert "no checkpoint at best.ckpt" in fails([*ARGUMENTS, "--port", "0"])
    assert list(tmp_path.iterdir()) == []


def test_without_gradio(fails, monkeypatch):
    monkeypatch.setitem(sys.modules, "gradio", None)
    monkeypatch.delitem(sys.modules, "relvit.app.evaluation.deploy.demo_page", raising=False)
    assert 'relvit demo needs the package gradio: pip install "relvit[demo]"' in fails(ARGUMENTS)
