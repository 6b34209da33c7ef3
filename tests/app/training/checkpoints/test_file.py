"""Checkpoints are written atomically; damaged files, unusual weights and huge descriptions are refused."""

import errno
import os
import pickle
import re
import resource
import shutil
import subprocess
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file
from sample_files import write_sample

import relvit
from relvit.app.cli.errors import describe
from relvit.app.cli.trainer.command_folder import explain_full_disk
from relvit.app.evaluation import calibrate
from relvit.app.training import Checkpoint, average_checkpoints, load_classifier, write_checkpoint
from relvit.app.training.checkpoints.file import DiskSpaceError, check_disk_space
from relvit.app.training.checkpoints.pretrained import Pretrained
from relvit.app.utils.files import has_links, remove_parts
from relvit.app.utils.nested_values import check_bounds

OLD, NEW = {"weights": torch.arange(3.0)}, {"weights": torch.arange(5.0), "epoch": 2}


@pytest.fixture(scope="module")
def sample(tmp_path_factory):
    return write_sample(tmp_path_factory.mktemp("samples") / "last.ckpt")


def same(path, expected):
    found = torch.load(path, weights_only=True)
    assert set(found) == set(expected)
    assert torch.equal(found["weights"], expected["weights"])


def test_a_new_one_takes_the_place_of_the_old_one(tmp_path):
    path = tmp_path / "x.ckpt"
    for content in (OLD, NEW):
        write_checkpoint(content, path)
        same(path, content)
    assert os.listdir(tmp_path) == ["x.ckpt"]
    # The file has the same permissions as a file that `touch` creates.
    (tmp_path / "plain").touch()
    assert path.stat().st_mode == (tmp_path / "plain").stat().st_mode


@pytest.mark.parametrize("reached", ["half of the content", "the disk", "the new name"])
def test_whatever_fails_the_old_one_stays_and_nothing_else(reached, tmp_path, monkeypatch):
    def fail(*_):
        raise KeyboardInterrupt

    path, content, error = tmp_path / "x.ckpt", dict(NEW), KeyboardInterrupt
    write_checkpoint(OLD, path)
    if reached == "half of the content":
        content["hook"], error = lambda: None, (AttributeError, pickle.PicklingError)
    else:
        monkeypatch.setattr(os, "fsync" if reached == "the disk" else "replace", fail)
    with pytest.raises(error):
        write_checkpoint(content, path)
    same(path, OLD)
    assert os.listdir(tmp_path) == ["x.ckpt"]


def test_a_full_disk_is_called_one(tmp_path):
    path = tmp_path / "x.ckpt"
    write_checkpoint(OLD, path)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    # Instead of filling a disk, limit the size of files to a megabyte.
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, hard))
    try:
        with pytest.raises(OSError, match="File too large"):
            write_checkpoint({"weights": torch.zeros(2**20)}, path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    same(path, OLD)
    assert os.listdir(tmp_path) == ["x.ckpt"]
    error = explain_full_disk(OSError(errno.EFBIG, "File too large"), "fit", tmp_path / "run")
    assert "File too large; there is no earlier checkpoint" in str(error)


@pytest.mark.parametrize(
    ("number", "filename", "cure"),
    [
        (
            errno.ENOSPC,
            "runs/test-1/metrics.csv",
            "metrics.csv: make room, or give another folder than runs/test-1 .--runs.$",
        ),
        (errno.ENOSPC, "cache/shard-3.tar", "cache/shard-3.tar: make room$"),
        (errno.EDQUOT, None, "make room, or if runs/test-1 is on that disk, give another folder .--runs.$"),
        (errno.EROFS, "photos/.index", "photos/.index: make the disk writable$"),
        (
            errno.EFBIG,
            "elsewhere/x.csv",
            "elsewhere/x.csv: raise the limit on the size of files .ulimit -f, or the file system's.$",
        ),
    ],
)
def test_what_to_do_about_an_error_of_the_disk(number, filename, cure):
    error = OSError(number, os.strerror(number), *([filename] if filename else []))
    assert re.search(cure, str(explain_full_disk(error, "test", Path("runs/test-1"))))


def test_commands_without_a_folder_of_a_run_say_it_too():
    error = OSError(errno.ENOSPC, "No space left on device", "a.npz")
    assert describe(error, "embed") == "No space left on device: a.npz: make room"


@pytest.mark.parametrize(
    ("method", "reason"),
    [
        (zipfile.ZIP_DEFLATED, "it has compressed entries,"),
        (zipfile.ZIP_STORED, "it is a ZIP archive without the entry"),
    ],
)
def test_a_checkpoint_that_was_packed(method, reason, sample, tmp_path):
    with zipfile.ZipFile(tmp_path / "best.zip", "w", method) as archive:
        archive.write(sample, "best.ckpt")
    message = f"best.zip cannot be read: {reason} .*; if a checkpoint was packed, unpack it and give the c"
    with pytest.raises(ValueError, match=message):
        load_classifier(tmp_path / "best.zip")
    with zipfile.ZipFile(tmp_path / "best.zip") as archive:
        load_classifier(archive.extract("best.ckpt", tmp_path))


@pytest.mark.parametrize(("ema", "links", "copies"), [(None, True, 3), (0.9, True, 3), (None, False, 4)])
def test_the_disk_takes_the_average_and_the_copy_that_replaces_another(ema, links, copies, tmp_path, monkeypatch):
    layer = torch.nn.Linear(1000, 1000, bias=False)
    layer.hparams = {"ema_decay": ema}
    trainer = SimpleNamespace(
        lightning_module=layer, optimizers=[torch.optim.AdamW(layer.parameters())], is_global_zero=True
    )
    monkeypatch.setattr("relvit.app.training.checkpoints.file.has_links", lambda folder: links)
    # AdamW keeps two numbers for each weight, so a checkpoint needs 12 MB, or 16 MB with averaged weights.
    size = 12 if ema is None else 16

    def fits(megabytes):
        free = SimpleNamespace(free=megabytes * 10**6)
        monkeypatch.setattr("shutil.disk_usage", lambda folder: free)
        try:
            check_disk_space(tmp_path / "checkpoints", trainer)
        except DiskSpaceError:
            return False
        return True

    assert not fits(copies * size - 1)
    with pytest.raises(DiskSpaceError, match=rf"takes about {size}\.0 MB and {copies} of them have to fit"):
        check_disk_space(tmp_path / "checkpoints", trainer)
    assert fits(copies * size)
    # The existing checkpoint has two names (hard links), so one checkpoint less has to be written.
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "last.ckpt").touch()
    os.link(tmp_path / "checkpoints" / "last.ckpt", tmp_path / "checkpoints" / "epoch.ckpt")
    assert fits((copies - 1) * size)
    assert not fits((copies - 1) * size - 1)


def test_what_a_killed_process_left_is_removed_at_the_next_start(tmp_path):
    ended = subprocess.Popen(["true"])
    ended.wait()
    kept = [".last.ckpt.cafe.1.part", "last.ckpt", ".a.part"]
    # The first process of every container may have the number of this one.
    for name in (f".last.ckpt.cafe.{ended.pid}.part", f".last.ckpt.cafe.{os.getpid()}.part", *kept):
        (tmp_path / name).touch()
    # A killed `publish --to` leaves a folder.
    (tmp_path / f".published.cafe.{ended.pid}.part" / "images").mkdir(parents=True)
    remove_parts(tmp_path)
    assert sorted(os.listdir(tmp_path)) == sorted(kept)


def test_hard_links_where_there_are_some(tmp_path, monkeypatch):
    assert has_links(tmp_path)
    monkeypatch.setattr("os.link", lambda *names: os.stat("no such file"))
    assert not has_links(tmp_path)
    assert os.listdir(tmp_path) == []


USES = (
    relvit.load,
    load_classifier,
    Checkpoint.read,
    lambda path: Pretrained(str(path)).weights(),
    lambda path: average_checkpoints(
        [path, shutil.copy(path, path.with_name("twin"))], path.with_name("averaged.ckpt")
    ),
    lambda path: calibrate(path, path.with_name("calibrated.ckpt")),
)


def test_weights_that_are_not_finite_are_refused_wherever_a_checkpoint_is_used(sample, tmp_path, fails):
    path = tmp_path / "bad.ckpt"
    for part, bad in (("state_dict", -torch.inf), ("ema_state_dict", torch.nan)):
        content = torch.load(sample, weights_only=True)
        content[part]["net.head.weight"][1, 2] = bad
        torch.save(content, path)
        with pytest.raises(ValueError, match=r"bad.ckpt .* net.head.weight .*: take another checkpoint"):
            Checkpoint.read(path)
    for use in USES:
        with pytest.raises(ValueError, match=r"net.head.weight"):
            use(path)
    for command, *rest in (["predict", tmp_path], ["test"], ["validate"], ["probe"], ["show"]):
        assert "net.head.weight" in fails([command, path, *rest])


def test_plain_weights_that_are_not_finite_are_refused(tmp_path):
    for name, save in (("w.pth", torch.save), ("w.safetensors", save_file)):
        save({"head.weight": torch.tensor([1.0, torch.nan])}, tmp_path / name)
        with pytest.raises(ValueError, match=r"holds values in head\.weight that are infinite or not a number"):
            Pretrained(str(tmp_path / name)).weights()
        save({"head.weight": torch.ones(2)}, tmp_path / name)
        assert Pretrained(str(tmp_path / name)).weights().state["head.weight"].sum() == 2


def test_damaged_files_are_refused(sample, tmp_path):
    original = sample.read_bytes()
    with zipfile.ZipFile(sample) as archive:
        tensors = [entry for entry in archive.infolist() if "/data/" in entry.filename]
        largest = max(tensors, key=lambda entry: entry.file_size)
        start = original.index(archive.read(largest))
    damages = {
        # PyTorch reads these files without an error: one has changed signs of numbers, one has bytes of 0xff.
        "signs": bytes(byte ^ 0x80 if n % 4 == 3 else byte for n, byte in enumerate(original[start : start + 64])),
        "ones": b"\xff" * 64,
    }
    path = tmp_path / "damaged.ckpt"
    for damage in damages.values():
        path.write_bytes(original[:start] + damage + original[start + 64 :])
        torch.load(path, weights_only=True)
        for use in USES:
            with pytest.raises(ValueError, match="is damaged, the checksum of"):
                use(path)
    # A file without checksums has nothing to compare with its contents, so it is accepted.
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(torch.load(sample, weights_only=True), path)
    finally:
        torch.serialization.set_crc32_options(True)
    relvit.load(path)


@pytest.mark.parametrize("part", ["model", "data"])
def test_nested_shared_lists_are_refused_at_once(part, sample, tmp_path):
    content = torch.load(sample, weights_only=True)
    nested = [0.5]
    for _ in range(30):
        nested = [nested] * 10
    content["relvit"][part]["x"] = nested
    torch.save(content, tmp_path / "nested.ckpt")
    with pytest.raises(ValueError, match="describes more than"):
        Checkpoint.read(tmp_path / "nested.ckpt")


@pytest.mark.parametrize("name", ["", "lr.", "img size", 3])
def test_names_of_arguments_are_names(name, sample, tmp_path, fails):
    for *parts, wrong in (("model", "model"), ("data", "init_args", "data.init_args")):
        content = torch.load(sample, weights_only=True)
        place = content["relvit"]
        for part in parts:
            place = place[part]
        place[name] = None
        torch.save(content, tmp_path / "odd.ckpt")
        assert f"relvit.{wrong} is missing or has a wrong value" in fails(["validate", tmp_path / "odd.ckpt"])


def test_bounds():
    deep = value = []
    for _ in range(40):
        value.append([])
        value = value[0]
    with pytest.raises(ValueError, match="x describes more than 32 levels"):
        check_bounds(deep, "x")
    with pytest.raises(ValueError, match="1,000,000 values"):
        check_bounds({"a": [0] * 10**6}, "x")
    check_bounds({"class_names": [str(number) for number in range(30_000)], "a": {"b": [1, (2, [3])]}}, "x")


STRANGE = {
    "expanded": (torch.zeros(1).expand(6000, 6000), "stores .* bytes of tensors that stand for"),
    "strided": (torch.zeros(60).as_strided((6000, 6000), (0, 0)), "stores .* bytes of tensors that stand for"),
    "many names": ([torch.zeros(2**20)] * 40, "stores .* bytes of tensors that stand for"),
    "sparse": (torch.zeros(3, 16).to_sparse(), "head.weight as a sparse tensor"),
    "meta": (torch.empty(3, 16, device="meta"), "head.weight without its values"),
    "float8": (torch.zeros(3, 16).to(torch.float8_e4m3fn), "head.weight as a float8_e4m3fn tensor"),
    "complex NaN": (torch.full((3, 16), complex(0, torch.nan)), "head.weight that are infinite or not a number"),
    "beyond float32": (torch.full((3, 16), 1e300, dtype=torch.float64), "head.weight that are infinite"),
}


@pytest.mark.filterwarnings("error:Validating sparse")
@pytest.mark.parametrize("strange", STRANGE)
def test_tensors_that_are_none_or_stand_for_more_than_is_stored_are_refused_before_any_arithmetic(
    strange, sample, tmp_path, fails
):
    tensor, message = STRANGE[strange]
    named = {f"{n}": one for n, one in enumerate(tensor)} if isinstance(tensor, list) else {"net.head.weight": tensor}
    for part in ("state_dict", "ema_state_dict", "optimizer_states"):
        content = torch.load(sample, weights_only=True)
        weights = content[part] if part != "optimizer_states" else content[part][0]["state"][0]
        weights.update(named)
        torch.save(content, tmp_path / "bad.ckpt")
        if part != "optimizer_states" or "stores" in message:
            with pytest.raises(ValueError, match=message):
                Checkpoint.read(tmp_path / "bad.ckpt")
    weights = {name.removeprefix("net."): each for name, each in named.items()}
    torch.save(weights, tmp_path / "bad.pth")
    with pytest.raises(ValueError, match=message):
        Pretrained(str(tmp_path / "bad.pth")).weights()
    content = torch.load(sample, weights_only=True)
    content["state_dict"].update(named)
    torch.save(content, tmp_path / "bad.ckpt")
    fails(["predict", tmp_path / "bad.ckpt", tmp_path])


def test_shared_weights_and_those_of_half_precision_are_read(tmp_path):
    table = torch.ones(100, 7)
    state = {f"{name}.table": table for name in range(12)} | {"half": table.half(), "count": torch.tensor(3)}
    torch.save(state, tmp_path / "w.pth")
    assert len(Pretrained(str(tmp_path / "w.pth")).weights().state) == 14
