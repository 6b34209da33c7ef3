"""Nothing in checkpoints, weights and configurations is run, whatever reads them; the refusal is one sentence."""

import json
import sys

import fsspec
import pytest
import torch
from hostile_files import Payload, bombs, checkpoints, saved
from photos import TINY

import relvit
from relvit.cli import main

CPU = ["--trainer.accelerator=cpu", "--trainer.enable_progress_bar=false"]
KINDS = ["in_state_dict", "in_hyper_parameters", "in_relvit", "as_key", "legacy", "pickle", "tar", "torchscript"]
COMMANDS = ["test", "predict", "validate", "ckpt_path", "resume", "pretrained", "teacher", "embed", "export"]
COMMANDS += ["resolutions", "load"]


@pytest.fixture(scope="module")
def place(run, tmp_path_factory):
    """A folder with all hostile checkpoints; its marker appears when something is run."""
    folder = tmp_path_factory.mktemp("hostile")
    files = checkpoints(run / "checkpoints" / "best.ckpt", folder, folder / "marker")
    return folder, files


def use(command, file, photos, tmp_path, run):
    """Give a file to a command; its exit status."""
    tmp_path.mkdir(exist_ok=True)
    fit = ["fit", "--data=ImageFolderData", f"--data.root={photos}", f"--runs={tmp_path}", "--trainer.max_epochs=9"]
    match command:
        case "test" | "predict":
            return main([command, f"--ckpt_path={file}", f"--runs={tmp_path}", *CPU])
        case "validate":
            return main([command, f"--ckpt_path={file}", *CPU])
        case "ckpt_path":
            return main([*fit, *TINY, f"--ckpt_path={file}"])
        case "resume":
            folder = tmp_path / "resumed"
            (folder / "checkpoints").mkdir(parents=True)
            (folder / "config.yaml").write_bytes((run / "config.yaml").read_bytes())
            (folder / "checkpoints" / "last.ckpt").write_bytes(file.read_bytes())
            return main(["fit", f"--resume={folder}"])
        case "pretrained" | "teacher":
            return main([*fit, *TINY, f"--model.{command}={file}"])
        case "embed":
            return main([command, f"--ckpt_path={file}", f"--root={photos}", f"--output={tmp_path / 'x.npz'}"])
        case "export":
            return main([command, f"--ckpt_path={file}", f"--output={tmp_path / 'x.pt2'}"])
        case "resolutions":
            return main([command, f"--ckpt_path={file}", "--sizes=[16]", "--accelerator=cpu"])
        case _:
            try:
                relvit.load(file)
            except ValueError as error:
                print(error, file=sys.stderr)
                return 2
            return 0


def refused(command, file, photos, tmp_path, run, capsys):
    """The sentence of the refusal."""
    capsys.readouterr()
    assert use(command, file, photos, tmp_path, run) == 2
    message = capsys.readouterr().err
    lines = [line for line in message.splitlines() if line and "Seed set" not in line]
    assert len(lines) == 1, message
    return lines[0]


def test_the_payload_works(tmp_path):
    """Where pickles are run, it does what the other tests look for."""
    torch.load(saved(tmp_path / "x", Payload(tmp_path / "marker")), weights_only=False)
    assert (tmp_path / "marker").exists()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("command", ["validate", "load"])
def test_every_kind_of_checkpoint(command, kind, place, photos, tmp_path, run, capsys):
    folder, files = place
    message = refused(command, files[kind], photos, tmp_path, run, capsys)
    assert "cannot be read: it is damaged, no checkpoint, or holds more than tensors and plain values" in message
    assert not (folder / "marker").exists()


@pytest.mark.parametrize("command", COMMANDS)
def test_every_reader_of_checkpoints(command, place, photos, tmp_path, run, capsys):
    folder, files = place
    for kind in ("in_relvit", "legacy"):
        message = refused(command, files[kind], photos, tmp_path / kind, run, capsys)
        assert "holds more than tensors and plain values" in message
    assert not (folder / "marker").exists()


@pytest.mark.parametrize("command", [command for command in COMMANDS if command != "resume"])
def test_at_remote_addresses(command, place, photos, tmp_path, run, capsys):
    folder, files = place
    valid = (run / "checkpoints" / "best.ckpt").read_bytes()
    for kind, content in (("in_relvit", files["in_relvit"].read_bytes()), ("cut", valid[: len(valid) // 2])):
        fsspec.filesystem("memory").pipe(f"/hostile/{kind}.ckpt", content)
        message = refused(command, f"memory://hostile/{kind}.ckpt", photos, tmp_path / kind, run, capsys)
        assert f"memory://hostile/{kind}.ckpt cannot be read: it is damaged, no checkpoint, or holds more" in message
    assert not (folder / "marker").exists()


@pytest.mark.parametrize("legacy", [False, True])
@pytest.mark.parametrize("option", ["pretrained", "teacher"])
def test_weights_and_folders_of_timm(option, legacy, photos, tmp_path, run, capsys):
    weights, options = {"head.weight": Payload(tmp_path / "marker")}, {"_use_new_zipfile_serialization": not legacy}
    message = refused(option, saved(tmp_path / "x.pth", weights, **options), photos, tmp_path / "a", run, capsys)
    assert "x.pth" in message
    folder = tmp_path / "timm"
    folder.mkdir()
    saved(folder / "pytorch_model.bin", weights, **options)
    (folder / "config.json").write_text(json.dumps({"architecture": "vit_tiny_patch16_224", "pretrained_cfg": {}}))
    assert "timm" in refused(option, folder, photos, tmp_path / "b", run, capsys)
    assert not (tmp_path / "marker").exists()


@pytest.mark.parametrize(
    "config",
    [
        "not JSON",
        "[]",
        "{}",
        '{"architecture": 7}',
        '{"architecture": "os.system"}',
        '{"architecture": "hf-hub:other/model"}',
        '{"architecture": "vit_tiny_patch16_224", "model_args": 3}',
        '{"architecture": "vit_tiny_patch16_224", "model_args": {"checkpoint_path": "MARKER.pth"}}',
        '{"architecture": "vit_tiny_patch16_224", "model_args": {"depth": "x"}}',
        '{"architecture": "vit_tiny_patch16_224", "model_args": {"depth": 1000000000}}',
        '{"architecture": "vit_tiny_patch16_224", "pretrained_cfg": {"file": "MARKER.pth"}}',
    ],
)
def test_odd_config_json(config, photos, tmp_path, run, capsys):
    (tmp_path / "timm").mkdir()
    saved(tmp_path / "MARKER.pth", Payload(tmp_path / "marker"))
    (tmp_path / "timm" / "config.json").write_text(config.replace("MARKER", str(tmp_path / "MARKER")))
    refused("pretrained", tmp_path / "timm", photos, tmp_path / "runs", run, capsys)
    assert not (tmp_path / "marker").exists()


@pytest.mark.parametrize("kind", ["deflated", "overlapping", "outside"])
def test_archives_that_unpack_to_more_or_elsewhere(kind, tmp_path, run, photos, capsys):
    (tmp_path / "a" / "b").mkdir(parents=True)
    file = bombs(run / "checkpoints" / "best.ckpt", tmp_path / "a" / "b")[kind]
    assert str(file) in refused("load", file, photos, tmp_path, run, capsys)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a"]


@pytest.mark.parametrize("command", ["validate", "load", "teacher", "ckpt_path"])
def test_a_checkpoint_of_a_model_beyond_measure(command, run, tmp_path, photos, capsys):
    content = torch.load(run / "checkpoints" / "best.ckpt", weights_only=True)
    content["relvit"]["model"]["model_kwargs"]["depth"] = 10**9
    content["relvit"]["model"]["model"] = "test_relvit"
    file = saved(tmp_path / "x.ckpt", content)
    message = refused(command, file, photos, tmp_path / "runs", run, capsys)
    assert "1e+09 cannot be meant" in message or "was trained with model_kwargs" in message


@pytest.mark.parametrize("command", ["validate", "test", "predict", "resolutions"])
@pytest.mark.parametrize(
    "name", ["os.system", "relvit.data.something.not.a.class", "relvit.data.images.datasets.os.system", "x", ""]
)
def test_a_checkpoint_does_not_choose_what_is_imported(command, name, run, tmp_path, photos, capsys):
    content = torch.load(run / "checkpoints" / "best.ckpt", weights_only=True)
    content["relvit"]["data"]["class_path"] = name
    file = saved(tmp_path / "x.ckpt", content)
    message = refused(command, file, photos, tmp_path / "runs", run, capsys)
    assert f"was trained with the data module {name}" in message


def test_nor_beside_data_that_are_given(run, tmp_path, photos, monkeypatch):
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules" / "hostile_module.py").write_text(f"open({str(tmp_path / 'marker')!r}, 'w')\n")
    monkeypatch.syspath_prepend(tmp_path / "modules")
    content = torch.load(run / "checkpoints" / "best.ckpt", weights_only=True)
    content["relvit"]["data"]["class_path"] = "hostile_module.Data"
    file = saved(tmp_path / "x.ckpt", content)
    given = ["--data=ImageFolderData", f"--data.root={photos}", "--data.img_size=16"]
    assert main(["validate", f"--ckpt_path={file}", *given, *CPU]) == 0
    assert not (tmp_path / "marker").exists()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model: !!python/object/apply:os.system ['touch MARKER']\n", "python/object/apply:os.system"),
        ("model: !!python/name:os.system ''\n", "python/name:os.system"),
        ("trainer: {callbacks: [!!python/object/new:os.system ['touch MARKER']]}\n", "python/object/new:os.system"),
        ("model: {lr: 1, lr: 2}\n", "the key 'lr' comes twice (line 1)"),
        ("model: " + "[" * 99 + "]" * 99 + "\n", "more than 50 levels"),
        ("model: " + "[" * 99_999 + "\n", "more than 50 levels"),
        ("a: &a [*a]\n", "unknown or endless alias *a"),
        ("".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9 if i else ['x'])}]\n" for i in range(9)), "values"),
        ("data: \udcff\n", "not UTF-8 text"),
        ("data: \0\n", "control characters"),
    ],
)
def test_configurations(text, message, tmp_path, capsys):
    config = tmp_path / "x.yaml"
    config.write_bytes(text.replace("MARKER", str(tmp_path / "marker")).encode("utf-8", "surrogateescape"))
    assert main(["fit", f"--config={config}", f"--runs={tmp_path / 'runs'}"]) == 2
    told = capsys.readouterr().err
    assert message in told
    assert len(told.strip().splitlines()) == 1
    assert not (tmp_path / "marker").exists()


def test_classes_in_the_arguments_of_a_checkpoint_are_not_made(run, tmp_path, photos, capsys):
    content = torch.load(run / "checkpoints" / "best.ckpt", weights_only=True)
    call = {"class_path": "subprocess.Popen", "init_args": {"args": ["touch", str(tmp_path / "marker")]}}
    for number, part in enumerate(("model_kwargs", "opt_kwargs", "retrofit")):
        content["relvit"]["model"][part] = {"x": call}
        file = saved(tmp_path / f"{number}.ckpt", content)
        for command in ("validate", "load"):
            refused(command, file, photos, tmp_path / "runs", run, capsys)
    content["relvit"]["data"]["init_args"]["root"] = call
    refused("validate", saved(tmp_path / "x.ckpt", content), photos, tmp_path / "runs", run, capsys)
    assert not (tmp_path / "marker").exists()
