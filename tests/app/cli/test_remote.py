"""Checkpoints at remote addresses work as local checkpoints; runs are not written to remote addresses."""

import functools
import http.server
import threading

import fsspec
import pytest
import torch
from command_line import QUIET, fit, printed, rows

import relvit
from relvit.app.cli import main
from relvit.app.training import read_checkpoint
from relvit.app.training.checkpoints.pretrained import Pretrained

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def places(best):
    """The path of a checkpoint, and the address of a copy of it."""
    fsspec.filesystem("memory").pipe("/runs/best.ckpt", best.read_bytes())
    return best, "memory://runs/best.ckpt"


def loss(arguments, capsys):
    assert main(arguments) == 0
    return printed("val/loss", capsys.readouterr().out)


def same(first, second):
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_what_lies_at_an_address_now_counts(best, tmp_path, capsys):
    """Lightning's own download would read the older file of the same name again."""
    content = torch.load(best, weights_only=True)
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(tmp_path))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address, losses = f"http://127.0.0.1:{server.server_address[1]}/best.ckpt", []
        for shift in (0.0, 1.0):
            content["state_dict"]["net.head.bias"][0] += shift
            torch.save(content, tmp_path / "best.ckpt")
            losses.append(loss(["validate", f"--ckpt_path={address}", *QUIET], capsys))
            assert losses[-1] == loss(["validate", f"--ckpt_path={tmp_path / 'best.ckpt'}", *QUIET], capsys)
        server.shutdown()
    assert losses[0] != losses[1]


def test_commands_and_python(places, photos, tmp_path, fails):
    path, address = places
    image = photos / "test" / "cat" / "0.jpg"
    assert relvit.load(address).predict(image) == relvit.load(path).predict(image)
    for name, source in (("local", path), ("remote", address)):
        folder = tmp_path / name
        folder.mkdir()
        assert main(["predict", f"--ckpt_path={source}", f"--data.root={photos}", f"--runs={folder}", *QUIET]) == 0
        paths = f"--ckpt_paths=[{source},{path.with_name('last.ckpt')}]"
        assert main(["average", paths, f"--output={folder / 'x.ckpt'}"]) == 0
        sizes = ["--sizes=[16]", "--accelerator=cpu", f"--output={folder / 'sizes.csv'}"]
        assert main(["resolutions", f"--ckpt_path={source}", *sizes]) == 0
    tables = [next((tmp_path / name).glob("*/predictions.csv")).read_text() for name in ("local", "remote")]
    assert tables[0] == tables[1]
    same(*(read_checkpoint(tmp_path / name / "x.ckpt")["state_dict"] for name in ("local", "remote")))
    sizes = [row for name in ("local", "remote") for row in rows(tmp_path / name / "sizes.csv")]
    assert [row.pop("checkpoint") for row in sizes] == [str(path), address]
    assert all(float(row.pop("images_per_second")) > 0 for row in sizes)
    assert sizes[0] == sizes[1]
    twice = ["average", f"--ckpt_paths=[{address},{address}]", f"--output={tmp_path / 'x.ckpt'}"]
    assert f"{address} is given twice" in fails(twice)


def test_a_training_goes_on_from_an_address_as_from_a_file(run, resumed, photos, tmp_path):
    fsspec.filesystem("memory").pipe("/runs/last.ckpt", (run / "checkpoints" / "last.ckpt").read_bytes())
    folder = fit(photos, tmp_path, "--ckpt_path=memory://runs/last.ckpt", "--trainer.max_epochs=6")
    same(*(read_checkpoint(each / "checkpoints" / "last.ckpt")["state_dict"] for each in (folder, resumed[0])))


def test_a_training_starts_from_weights_at_an_address_as_from_a_file(places, photos, tmp_path):
    weights = []
    for number, source in enumerate(places):
        folder = fit(photos, tmp_path / str(number), f"--model.pretrained={source}")
        weights.append(read_checkpoint(folder / "checkpoints" / "last.ckpt")["state_dict"])
    same(*weights)


def test_weights_of_other_kinds(best, tmp_path):
    state = read_checkpoint(best)["state_dict"]
    torch.save(state, tmp_path / "x.pth")
    fsspec.filesystem("memory").put_file(str(tmp_path / "x.pth"), "/weights/x.pth")
    same(Pretrained("memory://weights/x.pth").weights().state, state)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["fit", "--data=DigitsData", "--runs=s3://bucket/runs"], "--runs s3://bucket/runs is a remote address"),
        (["fit", "--resume=s3://bucket/runs/RUN"], "--resume s3://bucket/runs/RUN is a remote address"),
        (["test", "--ckpt_path=BEST", "--runs=s3://bucket"], "--runs s3://bucket is a remote address"),
        (
            ["export", "--ckpt_path=BEST", "--output=s3://x/y.onnx"],
            "output s3://x/y.onnx is a remote address",
        ),
    ],
)
def test_what_is_not_written_to_addresses(arguments, message, best, tmp_path, fails, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert message in fails([argument.replace("BEST", str(best)) for argument in arguments])
    assert list(tmp_path.iterdir()) == []


def test_what_cannot_be_fetched_is_one_sentence(fails):
    message = fails(["validate", "--ckpt_path=http://127.0.0.1:1/best.ckpt", *QUIET], status=1)
    (line,) = message.strip().splitlines()
    assert line.startswith("relvit validate: error: http://127.0.0.1:1/best.ckpt could not be fetched: Client")
