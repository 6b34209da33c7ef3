"""Secrets of loggers are in no file of a run; a resume needs them on the command line or in the environment."""

import contextlib
import functools
import http.server
import io
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

SEEN = []


class Service(CSVLogger):
    """A logger that needs a key: an argument or an environment variable."""

    def __init__(self, save_dir: str, api_key: str | None = None, monitor_keys: str = "all", **settings: str) -> None:
        SEEN.append((api_key, monitor_keys, settings))
        super().__init__(save_dir)


class Reporter(Callback):
    """A callback that needs a token: an argument or an environment variable."""

    def __init__(self, url: str, token: str | None = None) -> None:
        SEEN.append((url, token))


class StrictService(CSVLogger):
    """A logger that takes its key only as an argument."""

    def __init__(self, save_dir: str, password: str) -> None:
        SEEN.append(password)
        super().__init__(save_dir)


def logger(kind, tmp_path, **arguments):
    """Return the options of a logger."""
    given = {"save_dir": str(tmp_path / "log"), **arguments}
    options = [f"--trainer.logger.init_args.{name}={value}" for name, value in given.items()]
    return [f"--trainer.logger={kind.__module__}.{kind.__name__}", *options]


def everything_written(folder):
    """Return all bytes of the files in a folder; checkpoints are not compressed."""
    return b"".join(path.read_bytes() for path in folder.rglob("*") if path.is_file())


@pytest.fixture(scope="module")
def with_keys(photos, tmp_path_factory):
    """The run of a training whose logger had a key and a token, and what the logger was given."""
    place = tmp_path_factory.mktemp("keys")
    options = logger(Service, place, api_key="s3cr3t", monitor_keys="loss")
    options[-2:-2] = ["--trainer.logger.dict_kwargs.hf_token=t0k3n", "--trainer.logger.dict_kwargs.team=blue"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["relvit", "fit", *options])
        run = fit(photos, place / "runs", *options)
    return run, SEEN[-1]


def test_a_logger_gets_its_key_and_no_file_of_the_run_holds_it(with_keys):
    run, given = with_keys
    assert given == ("s3cr3t", "loss", {"hf_token": "t0k3n", "team": "blue"})
    assert b"api_key" in (run / "checkpoints" / "last.ckpt").read_bytes()
    assert not [secret for secret in (b"s3cr3t", b"t0k3n") if secret in everything_written(run)]


def test_a_key_is_masked_in_the_configuration_and_in_the_recorded_command(with_keys):
    run, _ = with_keys
    config = yaml.safe_load((run / "config.yaml").read_text())["trainer"]["logger"]
    place = str(run.parents[1] / "log")
    assert config["init_args"] == {"save_dir": place, "api_key": MASK, "monitor_keys": "loss"}
    assert config["dict_kwargs"] == {"hf_token": MASK, "team": "blue"}
    (session,) = json.loads((run / "run.json").read_text())["sessions"]
    assert f"--trainer.logger.init_args.api_key={MASK}" in session["command"]


def test_without_a_key_the_logger_of_a_resumed_run_looks_for_one_itself(with_keys, tmp_path, fails):
    run = shutil.copytree(with_keys[0], tmp_path / "run")
    assert "has reached its 1 epoch:" in fails(["fit", f"--resume={run}"])
    assert SEEN[-1] == (None, "loss", {"team": "blue"})


def test_a_resumed_run_takes_a_new_key_and_does_not_record_it(with_keys, tmp_path, monkeypatch):
    run = shutil.copytree(with_keys[0], tmp_path / "run")
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
    # The logger is made before the training notices that all epochs are done.
    assert "has reached its 4 epochs" in fails([*resumed, "--trainer.logger.init_args.password=s3cr3t"])
    assert SEEN[-1] == "s3cr3t"


NAMES = ["api_key", "hf_token", "client-secret", "password", "apiKey", "KEY", "Token2", "apikey", "passwd", "db_pwd"]
NAMES += ["credentials", "auth", "tokens", "headers", "smtp_passwords", "session_cookie", "passphrase", "bearer"]
NAMES += ["sentry_dsn", "passcode", "smtp_pass", "jwt", "slackWebhook", "accesskey", "oauth", "sas", "APIKey"]


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
        """Print nothing: the server's log would contain whole addresses."""


@pytest.fixture(scope="module")
def server(best):
    """The host of a server that serves checkpoints."""
    handler = functools.partial(Quiet, directory=str(best.parent))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"127.0.0.1:{server.server_address[1]}"
        server.shutdown()


@pytest.fixture(scope="module")
def signed(server):
    """The address of a checkpoint with a password and a signature."""
    return f"http://user:p4ss@{server}/best.ckpt?X-Signature=s1gn"


@pytest.fixture(scope="module")
def from_address(photos, signed, tmp_path_factory):
    """Train with an address for weights, teacher and callback; return run, output and the callback's arguments."""
    options = [f"--model.pretrained={signed}", f"--model.teacher={signed}", "--trainer.logger=csv"]
    options += [f"--trainer.callbacks={Reporter.__module__}.Reporter", f"--trainer.callbacks.url={signed}"]
    options += ["--trainer.callbacks.token=t0k3n"]
    printed = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(printed):
        patch.setattr("sys.argv", ["relvit", "fit", *options])
        with contextlib.redirect_stderr(printed):
            run = fit(photos, tmp_path_factory.mktemp("addresses"), *options)
    return run, printed.getvalue(), SEEN[-1]


def test_a_callback_gets_an_address_whole(from_address, signed):
    assert from_address[2] == (signed, "t0k3n")


def test_no_file_and_no_line_holds_what_is_secret_in_addresses(from_address, photos, signed, tmp_path, capsys):
    run, printed, _ = from_address
    assert main(["publish", str(run / "checkpoints" / "best.ckpt"), f"--to={tmp_path / 'published'}"]) == 0
    assert "`best.ckpt`, whose licence" in (tmp_path / "published" / "README.md").read_text()
    assert main(["test", signed, f"--root={photos}", f"--runs={tmp_path}"]) == 0
    assert main(["resolutions", signed, "--sizes=16", f"--root={photos}", f"--output={tmp_path / 'sizes'}"]) == 0
    assert main(["show", signed.replace("best", "no")]) == 2
    written = everything_written(run) + everything_written(tmp_path)
    written += (printed + "".join(capsys.readouterr())).encode()
    for secret in (b"p4ss", b"s1gn", b"t0k3n"):
        assert secret not in written, written[written.index(secret) - 300 :][:600]


def test_the_configuration_names_addresses_without_their_secrets(from_address, server):
    config = yaml.safe_load((from_address[0] / "config.yaml").read_text())
    assert config["model"]["pretrained"] == config["model"]["teacher"] == f"http://{server}/best.ckpt"


def test_a_resumed_run_takes_the_address_of_its_teacher_again(from_address, server, signed, tmp_path, monkeypatch):
    """A resumed run does not read the pretrained weights again."""
    run = shutil.copytree(from_address[0], tmp_path / "run")
    again = [f"--resume={run}", "--trainer.max_epochs=2", f"--model.teacher={signed}"]
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
