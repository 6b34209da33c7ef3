"""No command runs code from checkpoints, weights or configurations; hostile files are refused in one sentence."""

import json
import shutil
import zipfile

import fsspec
import pytest
import torch
from command_line import QUIET
from hostile_files import Payload, bombs, checkpoints, saved
from photos import TINY

import relvit
from relvit.app.cli import main

pytestmark = pytest.mark.slow

KINDS = ["in_state_dict", "in_hyper_parameters", "in_relvit", "as_key", "legacy", "pickle", "tar", "torchscript"]
COMMANDS = ["test", "predict", "validate", "ckpt_path", "resume", "pretrained", "teacher", "embed", "export"]
COMMANDS += ["resolutions", "load"]
# The aliases of this YAML bomb expand to a million values.
BOMB = f"a: &a [{', '.join('x' * 1000)}]\nb: [{', '.join(['*a'] * 1000)}]\n"


@pytest.fixture(scope="module")
def place(best, tmp_path_factory):
    """A folder with all hostile checkpoints, and the marker file that their code would create."""
    folder = tmp_path_factory.mktemp("hostile")
    return folder, checkpoints(best, folder, folder / "marker")


@pytest.fixture
def content(best):
    return torch.load(best, weights_only=True)


@pytest.fixture
def refused(photos, tmp_path, run, fails):
    """Return a function that gives a file to a command, and returns the sentence of the refusal."""

    def check(command, file):
        if command == "load":
            with pytest.raises(ValueError) as caught:  # noqa: PT011 (the caller looks at the message)
                relvit.load(file)
            message = str(caught.value)
        else:
            message = fails(arguments_of(command, file, photos, tmp_path / "used", run))
        (line,) = message.strip().splitlines()
        return line

    return check


def arguments_of(command, file, photos, folder, run):
    """Return the arguments by which a command reads a file."""
    folder.mkdir(exist_ok=True)
    fit = ["fit", "--data=ImageFolderData", f"--data.root={photos}", f"--runs={folder}", "--trainer.max_epochs=9"]
    ckpt, runs, output = f"--ckpt_path={file}", f"--runs={folder}", f"--output={folder / 'x'}"
    if command == "resume":
        (folder / "run" / "checkpoints").mkdir(parents=True)
        shutil.copy(run / "config.yaml", folder / "run")
        shutil.copy(file, folder / "run" / "checkpoints" / "last.ckpt")
        return ["fit", f"--resume={folder / 'run'}"]
    return {
        "test": ["test", ckpt, runs, *QUIET],
        "predict": ["predict", ckpt, runs, *QUIET],
        "validate": ["validate", ckpt, *QUIET],
        "ckpt_path": [*fit, *TINY, ckpt],
        "pretrained": [*fit, *TINY, f"--model.pretrained={file}"],
        "teacher": [*fit, *TINY, f"--model.teacher={file}"],
        "embed": ["embed", ckpt, f"--root={photos}", f"{output}.npz"],
        "export": ["export", ckpt, f"{output}.pt2"],
        "resolutions": ["resolutions", ckpt, "--sizes=[16]", "--accelerator=cpu"],
    }[command]


def test_the_payload_works(tmp_path):
    """If pickles were run, the payload would create the marker, whose absence the other tests check."""
    torch.load(saved(tmp_path / "x", Payload(tmp_path / "marker")), weights_only=False)
    assert (tmp_path / "marker").exists()


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_checkpoint(kind, place, refused):
    folder, files = place
    message = refused("load", files[kind])
    reason = "is damaged, is not a checkpoint, or holds more than tensors and plain values"
    assert (
        f"cannot be read: it {'has compressed entries, as TorchScript has' if kind == 'torchscript' else reason}"
        in message
    )
    assert not (folder / "marker").exists()


@pytest.mark.parametrize("command", COMMANDS)
def test_every_reader_of_checkpoints(command, place, refused):
    folder, files = place
    assert "holds more than tensors and plain values" in refused(command, files["in_relvit"])
    assert not (folder / "marker").exists()


@pytest.mark.parametrize("command", ["validate", "ckpt_path", "pretrained", "teacher", "load"])
def test_at_remote_addresses(command, place, best, refused):
    folder, files = place
    best = best.read_bytes()
    for content in (files["in_relvit"].read_bytes(), best[: len(best) // 2]):
        fsspec.filesystem("memory").pipe("/hostile/x.ckpt", content)
        message = refused(command, "memory://hostile/x.ckpt")
        assert "memory://hostile/x.ckpt cannot be read: it is damaged, is not a checkpoint, or holds more" in message
    assert not (folder / "marker").exists()


@pytest.mark.parametrize("option", ["pretrained", "teacher"])
def test_weights_and_folders_of_timm(option, tmp_path, refused):
    weights = {"head.weight": Payload(tmp_path / "marker")}
    for legacy in (False, True):
        options = {"_use_new_zipfile_serialization": not legacy}
        assert "x.pth" in refused(option, saved(tmp_path / "x.pth", weights, **options))
    folder = tmp_path / "timm"
    folder.mkdir()
    saved(folder / "pytorch_model.bin", weights)
    (folder / "config.json").write_text(json.dumps({"architecture": "vit_tiny_patch16_224", "pretrained_cfg": {}}))
    assert "timm" in refused(option, folder)
    assert not (tmp_path / "marker").exists()
    with zipfile.ZipFile(folder / "pytorch_model.bin", "w", zipfile.ZIP_DEFLATED) as bomb:
        bomb.writestr("archive/data.pkl", bytes(2**24))
    assert "compressed entries" in refused(option, folder)


@pytest.mark.parametrize(
    "config",
    [
        "not JSON",
        "[]",
        '{"architecture": "os.system"}',
        '{"architecture": "hf-hub:other/model"}',
        '{"architecture": "vit_tiny_patch16_224", "model_args": 3}',
        '{"architecture": "vit_tiny_patch16_224", "model_args": {"checkpoint_path": "MARKER.pth"}}',
        '{"architecture": "vit_tiny_patch16_224", "model_args": {"depth": 1000000000}}',
        '{"architecture": "vit_tiny_patch16_224", "pretrained_cfg": {"file": "MARKER.pth"}}',
    ],
)
def test_odd_config_json(config, tmp_path, refused):
    (tmp_path / "timm").mkdir()
    saved(tmp_path / "MARKER.pth", Payload(tmp_path / "marker"))
    (tmp_path / "timm" / "config.json").write_text(config.replace("MARKER", str(tmp_path / "MARKER")))
    refused("pretrained", tmp_path / "timm")
    assert not (tmp_path / "marker").exists()


@pytest.mark.parametrize(
    ("kind", "reason"),
    [("deflated", "has compressed entries"), ("overlapping", "larger than the file"), ("outside", "")],
)
def test_archives_that_unpack_to_more_or_elsewhere(kind, reason, tmp_path, best, refused):
    (tmp_path / "a" / "b").mkdir(parents=True)
    file = bombs(best, tmp_path / "a" / "b")[kind]
    message = refused("load", file)
    assert str(file) in message
    assert reason in message
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


@pytest.mark.parametrize("command", ["validate", "load", "teacher"])
def test_a_checkpoint_of_a_model_beyond_measure(command, content, tmp_path, refused):
    content["relvit"]["model"]["model_kwargs"]["depth"] = 10**9
    message = refused(command, saved(tmp_path / "x.ckpt", content))
    assert "1e+09" in message or "1000000000" in message


@pytest.mark.parametrize("command", ["validate", "resolutions"])
@pytest.mark.parametrize("name", ["os.system", "relvit.app.data.images.file_datasets.os.system", ""])
def test_a_checkpoint_does_not_choose_what_is_imported(command, name, content, tmp_path, refused):
    content["relvit"]["data"]["class_path"] = name
    # An empty name means that the data were datasets in Python.
    expected = f"was trained with the data module {name}" if name else "was trained on datasets in Python"
    assert expected in refused(command, saved(tmp_path / "x.ckpt", content))


def test_nor_beside_data_that_are_given(content, tmp_path, photos, monkeypatch):
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules" / "hostile_module.py").write_text(f"open({str(tmp_path / 'marker')!r}, 'w')\n")
    monkeypatch.syspath_prepend(tmp_path / "modules")
    content["relvit"]["data"]["class_path"] = "hostile_module.Data"
    file = saved(tmp_path / "x.ckpt", content)
    given = ["--data=ImageFolderData", f"--data.root={photos}", "--data.img_size=16"]
    assert main(["validate", f"--ckpt_path={file}", *given, *QUIET]) == 0
    assert not (tmp_path / "marker").exists()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model: !!python/object/apply:os.system ['touch MARKER']\n", "python/object/apply:os.system"),
        ("trainer: {callbacks: [!!python/name:os.system '']}\n", "python/name:os.system"),
        ("model: {lr: 1, lr: 2}\n", "x.yaml: the key 'lr' comes twice: keep one (line 1)"),
        ("trainer: {a: 1}\nmodel: [1\n", "x.yaml: expected ',' or ']', but got '<stream end>' (line 3)"),
        (
            "model: relvit_tiny\n",
            "x.yaml must hold its options by name, such as 'model: {model: relvit_tiny}', got relvit_ti",
        ),
        ("- 1\n", "x.yaml: options go by name, such as 'trainer: {max_epochs: 10}', got [1]"),
        ("- " * 1_000 + "1\n", "maximum recursion depth"),
        (
            "trainer: &a {callbacks: [*a]}\n",
            "x.yaml: the configuration describes more",
        ),
        (
            BOMB,
            "x.yaml: the configuration describes more than 32 levels or 1,000,000",
        ),
        ("data: \udcff\n", "x.yaml: not UTF-8 text (invalid start byte at byte 6)"),
        ("data: \0\n", "x.yaml: unacceptable character"),
    ],
)
def test_configurations(text, message, tmp_path, fails):
    config = tmp_path / "x.yaml"
    config.write_bytes(text.replace("MARKER", str(tmp_path / "marker")).encode("utf-8", "surrogateescape"))
    (line,) = fails(["fit", f"--config={config}", f"--runs={tmp_path / 'runs'}"]).strip().splitlines()
    assert message in line
    assert not (tmp_path / "marker").exists()


def test_classes_in_the_arguments_of_a_checkpoint_are_not_made(content, tmp_path, refused):
    call = {"class_path": "subprocess.Popen", "init_args": {"args": ["touch", str(tmp_path / "marker")]}}
    content["relvit"]["data"]["init_args"]["root"] = call
    refused("validate", saved(tmp_path / "x.ckpt", content))
    for part in ("model_kwargs", "opt_kwargs", "retrofit"):
        content["relvit"]["model"][part] = {"x": call}
    for command in ("validate", "load"):
        refused(command, saved(tmp_path / "x.ckpt", content))
    assert not (tmp_path / "marker").exists()


@pytest.mark.parametrize("command", ["validate", "predict", "load"])
def test_a_class_named_as_the_schedule_of_a_checkpoint_is_not_imported(
    command, content, tmp_path, monkeypatch, refused
):
    """The type of `schedule` is `str | Callable`, for which the parser builds any class with `__call__`."""
    (tmp_path / "modules").mkdir()
    code = f"open({str(tmp_path / 'marker')!r}, 'w')\nclass Schedule:\n    def __call__(self, *_, **__): return 1.0\n"
    (tmp_path / "modules" / "hostile_schedule.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path / "modules")
    content["relvit"]["model"]["schedule"] = {"class_path": "hostile_schedule.Schedule"}
    message = refused(command, saved(tmp_path / "x.ckpt", content))
    assert "relvit.model.schedule is missing or has a wrong value" in message
    assert not (tmp_path / "marker").exists()
