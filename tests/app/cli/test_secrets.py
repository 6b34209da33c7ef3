"""Secrets of loggers: in no file of a run, and taken from the command line or the environment again."""

import functools
import http.server
import json
import shutil
import threading

import pytest
import yaml
from command_line import fit
from lightning import Callback
from lightning.pytorch.loggers import CSVLogger

from relvit.app.cli import main
from relvit.app.cli.secrets import mask_command
from relvit.app.utils.masks import MASK, mask_secrets
from relvit.app.utils.shown_text import without_secrets

pytestmark = pytest.mark.usefixtures("blank_figures")
SEEN = []


class Service(CSVLogger):
    """A logger that wants a key, and takes one of the environment where none is given."""

    def __init__(self, save_dir: str, api_key: str | None = None, monitor_keys: str = "all", **settings: str) -> None:
        SEEN.append((api_key, monitor_keys, settings))
        super().__init__(save_dir)


class Reporter(Callback):
    """A callback that wants a token, or takes one of the environment."""

    def __init__(self, url: str, token: str | None = None) -> None:
        SEEN.append((url, token))


class StrictService(CSVLogger):
    """A logger that takes its key as an argument alone."""

    def __init__(self, save_dir: str, password: str) -> None:
        SEEN.append(password)
        super().__init__(save_dir)


def logger(kind, tmp_path, **arguments):
    """The options of a logger."""
    given = {"save_dir": str(tmp_path / "log"), **arguments}
    options = [f"--trainer.logger.init_args.{name}={value}" for name, value in given.items()]
    return [f"--trainer.logger={kind.__module__}.{kind.__name__}", *options]


def everything_written(folder):
    """All bytes of the files in a folder; checkpoints are not compressed."""
    return b"".join(path.read_bytes() for path in folder.rglob("*") if path.is_file())


def test_no_file_of_a_run_holds_a_key_and_a_resumed_run_takes_it_again(photos, tmp_path, monkeypatch, fails):
    options = logger(Service, tmp_path, api_key="s3cr3t", monitor_keys="loss")
    options[-2:-2] = ["--trainer.logger.dict_kwargs.hf_token=t0k3n", "--trainer.logger.dict_kwargs.team=blue"]
    monkeypatch.setattr("sys.argv", ["relvit", "fit", *options])
    SEEN.clear()
    run = fit(photos, tmp_path / "runs", *options)
    assert SEEN == [("s3cr3t", "loss", {"hf_token": "t0k3n", "team": "blue"})]
    assert b"api_key" in (run / "checkpoints" / "last.ckpt").read_bytes()
    assert not [secret for secret in (b"s3cr3t", b"t0k3n") if secret in everything_written(run)]
    config = yaml.safe_load((run / "config.yaml").read_text())["trainer"]["logger"]
    assert config["init_args"] == {"save_dir": str(tmp_path / "log"), "api_key": MASK, "monitor_keys": "loss"}
    assert config["dict_kwargs"] == {"hf_token": MASK, "team": "blue"}
    (session,) = json.loads((run / "run.json").read_text())["sessions"]
    assert f"--trainer.logger.init_args.api_key={MASK}" in session["command"]
    # Without a key the logger looks for one itself.
    assert "has reached its 1 epochs" in fails(["fit", f"--resume={run}"])
    assert SEEN[-1] == (None, "loss", {"team": "blue"})
    # A new key is not recorded either.
    again = [f"--resume={run}", "--trainer.max_epochs=2", "--trainer.logger.init_args.api_key=n3w"]
    monkeypatch.setattr("sys.argv", ["relvit", "fit", *again])
    assert main(["fit", *again, "--trainer.accelerator=cpu"]) == 0
    assert SEEN[-1] == ("n3w", "loss", {"team": "blue"})
    assert b"n3w" not in everything_written(run)
    assert MASK in (run / "config.yaml").read_text()


def test_a_key_that_only_an_argument_gives_is_asked_for(run, tmp_path, fails):
    run = shutil.copytree(run, tmp_path / "run")
    config = yaml.safe_load((run / "config.yaml").read_text())
    arguments = {"save_dir": str(tmp_path / "log"), "password": MASK}
    name = f"{StrictService.__module__}.{StrictService.__name__}"
    config["trainer"]["logger"] = {"class_path": name, "init_args": arguments}
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    before = everything_written(run)
    resumed = ["fit", f"--resume={run}"]
    message = "StrictService needs its password, which the configuration does not record: give"
    assert message in fails(resumed)
    assert everything_written(run) == before
    # The logger is made before the training finds that it has reached its end.
    assert "has reached its 4 epochs" in fails([*resumed, "--trainer.logger.init_args.password=s3cr3t"])
    assert SEEN[-1] == "s3cr3t"


NAMES = ["api_key", "hf_token", "client-secret", "password", "apiKey", "KEY", "Token2", "apikey", "passwd", "db_pwd"]
NAMES += ["credentials", "auth", "tokens", "headers", "smtp_passwords", "session_cookie", "passphrase", "bearer"]
NAMES += ["sentry_dsn", "passcode", "smtp_pass", "jwt", "slackWebhook", "accesskey", "oauth", "sas"]


@pytest.mark.parametrize("name", NAMES)
def test_names_of_secrets(name):
    assert mask_secrets({"init_args": {name: "x", "deep": [{name: {"a": 1}}]}}) == {
        "init_args": {name: MASK, "deep": [{name: MASK}]}
    }


@pytest.mark.parametrize(
    "name", ["monkey", "keyboard", "tokenizer", "keys", "secretary", "project", "passes", "pin_memory", "passenger"]
)
def test_names_of_others(name):
    assert mask_secrets([{"init_args": {name: "x"}}]) == [{"init_args": {name: "x"}}]


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *arguments):
        """The server's own log has the addresses as they are."""


@pytest.fixture
def server(best):
    """The host of a server of checkpoints."""
    handler = functools.partial(Quiet, directory=str(best.parent))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"127.0.0.1:{server.server_address[1]}"
        server.shutdown()


def test_no_file_and_no_line_holds_what_is_secret_in_addresses(photos, server, tmp_path, monkeypatch, capsys):
    address = f"http://user:p4ss@{server}/best.ckpt?X-Signature=s1gn"
    reporter = f"{Reporter.__module__}.Reporter"
    options = [f"--model.pretrained={address}", f"--model.teacher={address}", f"--trainer.callbacks={reporter}"]
    options += [f"--trainer.callbacks.url={address}", "--trainer.callbacks.token=t0k3n", "--trainer.logger=csv"]
    monkeypatch.setattr("sys.argv", ["relvit", "fit", *options])
    SEEN.clear()
    run = fit(photos, tmp_path / "runs", *options)
    # The callback itself and the download get them.
    assert [(address, "t0k3n")] == SEEN
    assert main(["publish", str(run / "checkpoints" / "best.ckpt"), f"--to={tmp_path / 'runs' / 'published'}"]) == 0
    assert main(["test", address, f"--root={photos}", f"--runs={tmp_path / 'runs'}"]) == 0
    assert main(["resolutions", address, "--sizes=16", f"--root={photos}", f"--output={tmp_path / 'runs'}"]) == 0
    assert main(["show", address.replace("best", "no")]) == 2
    written = everything_written(tmp_path / "runs") + "".join(capsys.readouterr()).encode()
    for secret in (b"p4ss", b"s1gn", b"t0k3n"):
        assert secret not in written, written[written.index(secret) - 300 :][:600]
    config = yaml.safe_load((run / "config.yaml").read_text())
    assert config["model"]["pretrained"] == config["model"]["teacher"] == f"http://{server}/best.ckpt"
    assert "`best.ckpt`, whose licence" in (tmp_path / "runs" / "published" / "README.md").read_text()
    # A training that goes on needs no pretrained weights; the teacher's address is given again.
    again = [f"--resume={run}", "--trainer.max_epochs=2", f"--model.teacher={address}"]
    monkeypatch.setattr("sys.argv", ["relvit", "fit", *again])
    assert main(["fit", *again]) == 0
    assert SEEN[-1] == (f"http://{server}/best.ckpt", None)
    assert b"s1gn" not in everything_written(run)


@pytest.mark.parametrize(
    ("text", "public"),
    [
        ("https://me:a%2Fb@host:80/a.ckpt?sig=1&x=2#part", "https://host:80/a.ckpt"),
        ("simplecache::s3://KEY:SECRET@bucket/a b.ckpt", "simplecache::s3://bucket/a b.ckpt"),
        ("no file at http://token@host/x?SIG, but 'ftp://u:p@h/y'", "no file at http://host/x but 'ftp://h/y'"),
        ("s3://bucket/shard-??.tar", "s3://bucket/shard-??.tar"),
        ("hf://datasets/me/birds@main/a.parquet", "hf://datasets/me/birds@main/a.parquet"),
        ("me@host: what? a=b", "me@host: what? a=b"),
    ],
)
def test_addresses(text, public):
    assert without_secrets({"a": [text, (text, 1)]}) == {"a": [public, (public, 1)]}


def test_commands_hide_a_secret_wherever_it_stands():
    config = {"init_args": {"api_key": 'a"b', "other_key": "a", "empty_token": "", "no_token": None}}
    command = ["--trainer.logger.api_key", 'a"b', '--trainer.logger={"api_key": "a\\"b"}', "--lr=1"]
    hidden = ["--tr***iner.logger.***pi_key", MASK, '--tr***iner.logger={"***pi_key": "***"}', "--lr=1"]
    assert mask_command(command, config, mask_secrets(config)) == hidden
    assert mask_command(command, None, None) == command
