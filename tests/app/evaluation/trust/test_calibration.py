"""Temperature scaling compared with SciPy's optimiser, and commands that take a calibrated checkpoint."""

import contextlib
import json
import re
import shlex
import shutil

import pytest
import torch
from command_line import QUIET, only, rows, summary, write_checkpoint_like
from photos import TINY
from scipy.optimize import minimize_scalar
from scipy.special import log_softmax

import relvit
from relvit.app.cli import main
from relvit.app.evaluation import calibrate, calibration_error, fit_temperature
from relvit.app.evaluation.standard_error import accuracy_error
from relvit.app.evaluation.trust import calibration
from relvit.app.training import Checkpoint, classifier_of
from relvit.app.training.checkpoints.file import AVERAGE_KEY


@pytest.mark.parametrize("scale", [0.001, 0.3, 5.0, 2000.0])
def test_the_optimum_is_that_of_a_bounded_search(scale):
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(0, 7, (300,), generator=generator)
    logits = scale * (torch.randn(300, 7, generator=generator) + torch.eye(7)[labels])

    def nll(log_t):
        return -log_softmax(logits.double().numpy() / 10**log_t, axis=1)[range(300), labels].mean()

    expected = 10 ** minimize_scalar(nll, bounds=(-6, 6), method="bounded", options={"xatol": 1e-12}).x
    assert fit_temperature(logits, labels) == pytest.approx(expected, rel=1e-5)


def test_where_there_is_no_optimum():
    labels = torch.tensor([0, 1, 2, 0])
    right = torch.eye(3)[labels]
    for logits, message in (
        (right, r"no wrong prediction for 4 images, .*: use other images \(another split or root\)"),
        (-right, "no better than chance"),
        (right[:1], "no wrong prediction for 1 image, so"),
        (right / 0, "not a number"),
    ):
        with pytest.raises(ValueError, match=message):
            fit_temperature(logits, labels[: len(logits)])


@pytest.fixture(scope="module")
def calibrated(digits_run, tmp_path_factory):
    """A checkpoint whose averaged weights differ from its raw weights, and its calibrated copy."""
    path = tmp_path_factory.mktemp("calibrated") / "best.ckpt"
    content = torch.load(digits_run / "checkpoints" / "best.ckpt", weights_only=True)
    content[AVERAGE_KEY] = {name: 3 * tensor for name, tensor in content["state_dict"].items()}
    torch.save(content, path)
    assert main(["calibrate", str(path)]) == 0
    return path, path.with_name("best_calibrated.ckpt")


def test_a_checkpoint_that_a_training_replaces_meanwhile(calibrated, tmp_path, monkeypatch):
    """The temperature is written with the weights that it was fitted to."""
    path, other = tmp_path / "best.ckpt", tmp_path / "other.ckpt"
    shutil.copy(calibrated[0], path)
    content = torch.load(path, weights_only=True)
    before = content["state_dict"]
    content["state_dict"] = {name: tensor + 1 for name, tensor in before.items()}
    torch.save(content, other)
    outcomes = calibration._outcomes

    def replacing(*arguments):
        shutil.copy(other, path)
        return outcomes(*arguments)

    monkeypatch.setattr(calibration, "_outcomes", replacing)
    calibrate(path, tmp_path / "new.ckpt")
    written = torch.load(tmp_path / "new.ckpt", weights_only=True)["state_dict"]
    assert all(torch.equal(tensor, before[name]) for name, tensor in written.items())


def logits_and_labels(path, split, **changes):
    checkpoint = Checkpoint.read(path)
    data, net = checkpoint.data_module(**changes), classifier_of(checkpoint).net
    items = [data.dataset(split)[index] for index in range(len(data.dataset(split)))]
    with torch.no_grad():
        logits = net(torch.stack([image for image, _ in items])).double()
    return logits, torch.tensor([int(label) for _, label in items])


def next_command(out):
    """Return the arguments of the last command that is printed, without the name of the program."""
    program, *arguments = shlex.split(out.strip().splitlines()[-1])
    assert program == "relvit"
    return arguments


def test_the_temperature_is_that_of_val(calibrated):
    expected = fit_temperature(*logits_and_labels(calibrated[0], "val"))
    assert Checkpoint.read(calibrated[1]).temperature == pytest.approx(expected, rel=1e-4)


def test_only_the_temperature_is_new(calibrated):
    before, after = (torch.load(each, weights_only=True) for each in calibrated)
    del after["relvit"]["temperature"]
    plain = [json.dumps(content, default=lambda tensor: tensor.tolist()) for content in (before, after)]
    assert plain[0] == plain[1]


def test_no_tensor_is_in_the_file_twice(calibrated):
    path, output = calibrated
    assert output.stat().st_size < 1.1 * path.stat().st_size


@pytest.fixture
def again(calibrated, tmp_path, capsys):
    """A checkpoint that was calibrated twice, and what the second command printed."""
    path = tmp_path / "again.ckpt"
    assert main(["calibrate", str(calibrated[1]), "--output", str(path), "--split", "val"]) == 0
    return path, capsys.readouterr().out


def test_a_calibrated_checkpoint_is_calibrated_as_if_it_were_not(calibrated, again):
    assert Checkpoint.read(again[0]).temperature == Checkpoint.read(calibrated[1]).temperature


def test_the_next_command_needs_no_folder_that_the_checkpoint_remembers(again):
    assert next_command(again[1]) == ["test", str(again[0])]


def test_the_likelihood_before_and_after_is_printed(calibrated, again):
    _, out = again
    logits, labels = logits_and_labels(calibrated[0], "val")
    temperature = Checkpoint.read(calibrated[1]).temperature
    nll = [torch.nn.functional.cross_entropy(logits / t, labels).item() for t in (1, temperature)]
    assert [float(text) for text in re.search(r"likelihood\s+(\S+)\s+(\S+)", out).groups()] == pytest.approx(
        nll, abs=6e-5
    )
    assert nll[1] < nll[0] - 1e-3


def test_an_output_that_exists_is_kept(calibrated, again, fails):
    output, (again, _) = calibrated[1], again
    assert "exists: give another one (--output)" in fails(["calibrate", output, "--output", again])


def test_the_default_name_of_a_calibrated_checkpoint_is_its_own_and_never_replaced(calibrated, fails):
    before = calibrated[1].read_bytes()
    assert f"output {calibrated[1]} exists: give another one (--output), or move" in fails(["calibrate", calibrated[1]])
    assert calibrated[1].read_bytes() == before


@pytest.fixture(scope="module")
def probabilities(calibrated):
    """Compute calibrated probabilities of images in val and test, by split, and the labels."""
    temperature, found = Checkpoint.read(calibrated[1]).temperature, {}
    for split in ("val", "test"):
        logits, labels = logits_and_labels(calibrated[0], split)
        found[split] = (logits / temperature).softmax(-1), labels
    return found


def mean_nll(probabilities, labels):
    return -probabilities[range(len(labels)), labels].log().mean().item()


def test_test_uses_it(calibrated, probabilities, tmp_path):
    assert main(["test", str(calibrated[1]), "--split=val", f"--runs={tmp_path / 'test'}", *QUIET]) == 0
    results, (probabilities, labels) = summary(only(tmp_path / "test")), probabilities["val"]
    assert results["test/loss"] == pytest.approx(mean_nll(probabilities, labels), rel=1e-4)
    confidence, predicted = probabilities.max(-1)
    right = (predicted == labels).numpy()
    assert results["test/acc1"] == pytest.approx(right.mean())
    assert results["test/acc1_se"] == pytest.approx(accuracy_error(right.mean(), len(right)))
    assert results["test/calibration_error"] == pytest.approx(calibration_error(confidence.numpy(), right), abs=1e-5)


def test_resolutions_use_it(calibrated, probabilities, tmp_path):
    options = ["--sizes=8", "--accelerator=cpu", f"--output={tmp_path / 'r.json'}"]
    assert main(["resolutions", str(calibrated[1]), *options]) == 0
    (row,) = json.loads((tmp_path / "r.json").read_text())
    assert row["loss"] == pytest.approx(mean_nll(*probabilities["val"]), rel=1e-4)


def test_predict_uses_it(calibrated, probabilities, tmp_path):
    assert main(["predict", str(calibrated[1]), "--data=DigitsData", f"--runs={tmp_path / 'p'}", *QUIET]) == 0
    table = rows(only(tmp_path / "p") / "predictions.csv")
    expected = probabilities["test"][0].amax(1).tolist()
    assert [float(row["probability"]) for row in table] == pytest.approx(expected, abs=2e-6)


def test_load_uses_it(calibrated):
    raw = relvit.load(calibrated[0])
    image = torch.rand(1, 8, 8, generator=torch.Generator().manual_seed(0))
    pixels, _ = next(raw.batches([image]))
    expected = (raw.model(pixels)[0] / Checkpoint.read(calibrated[1]).temperature).softmax(-1)
    found = relvit.load(calibrated[1]).predict(image, top=10).probabilities
    assert found == pytest.approx(expected.sort(descending=True).values.tolist(), rel=1e-5)


def test_export_uses_it(calibrated, tmp_path):
    """All formats export the same wrapper of the model, which works for every model."""
    path, temperature = tmp_path / "best.ckpt", Checkpoint.read(calibrated[1]).temperature
    kwargs = {"dynamic_img_size": False, "patch_size": 4, "embed_dim": 16, "depth": 1}
    write_checkpoint_like(calibrated[1], path, "test_vit", kwargs, img_size=[8, 8])
    assert main(["export", str(path), f"--output={tmp_path / 'model.pt2'}"]) == 0
    pixels = torch.randn(1, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    expected = relvit.load(path).model(pixels) / temperature
    assert temperature != 1
    found = torch.export.load(tmp_path / "model.pt2").module()(pixels)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_a_training_goes_on_without_it(calibrated, tmp_path):
    common = [a for a in TINY if not a.startswith(("--model.", "--data."))]
    assert main(["fit", f"--ckpt_path={calibrated[1]}", f"--runs={tmp_path}", "--epochs=2", *common]) == 0
    last = only(tmp_path) / "checkpoints" / "last.ckpt"
    assert "temperature" not in torch.load(last, weights_only=True)["relvit"]
    losses = [float(row["val/loss"]) for row in rows(only(tmp_path) / "metrics.csv") if row["val/loss"]]
    nll = torch.nn.functional.cross_entropy(*logits_and_labels(last, "val")).item()
    assert losses[-1] == pytest.approx(nll, rel=1e-4)


@pytest.fixture
def moved(best, photos, tmp_path):
    """A copy of a checkpoint and its images; the folder's name has spaces, and one image has a wrong label."""
    shutil.copytree(photos, tmp_path / "my photos")
    for split in ("train", "val", "test"):
        shutil.copy(photos / split / "dog" / "1.jpg", tmp_path / "my photos" / split / "cat" / "dog.jpg")
    shutil.copy(best, tmp_path / "best.ckpt")
    return tmp_path


def test_the_next_command_works_with_these_images(moved, capsys, monkeypatch):
    monkeypatch.chdir(moved)
    for split, following in (("train", "test"), ("test", "val")):
        assert calibrate("best.ckpt", f"{split}.ckpt", split, "my photos").next_split == following
    # Without a test folder the results are of val, or else of the split of the calibration.
    shutil.rmtree(moved / "my photos" / "test")
    assert calibrate("best.ckpt", "again.ckpt", "train", "my photos").next_split == "val"
    assert "too good" not in capsys.readouterr().out
    assert main(["calibrate", "best.ckpt", "--root", "my photos"]) == 0
    out = capsys.readouterr().out
    assert "Only val is left to test it on, the images of the fit: the figures there are too good\n" in out
    command = next_command(out)
    assert command == ["test", "best_calibrated.ckpt", "--split", "val", "--root", "my photos"]
    assert main([*command, *QUIET]) == 0


def test_the_next_command_names_the_data_that_were_given(best, photos, tmp_path, capsys):
    lines = [f"{path},{path.parent.name}" for path in sorted((photos / "test").glob("*/*.jpg"))]
    (tmp_path / "my list.csv").write_text("\n".join(["path,label", *lines]))
    # A temperature can be fitted only if at least one prediction is wrong.
    shutil.copy(photos / "test" / "dog" / "1.jpg", tmp_path / "dog.jpg")
    with open(tmp_path / "my list.csv", "a") as file:
        file.write(f"\n{tmp_path / 'dog.jpg'},cat\nbroken.jpg,cat\n")
    data = ["--data", "ImageListData", "--data.val", str(tmp_path / "my list.csv"), "--data.num_workers", "0"]
    data += ["--data.on_error", "skip"]
    with pytest.warns(
        UserWarning, match=r"^1 image of val could not be read and was left out\. .*/broken\.jpg: there is"
    ):
        assert main(["calibrate", str(best), *data, "--output", str(tmp_path / "list.ckpt")]) == 0
    command = next_command(capsys.readouterr().out)
    assert command == ["test", str(tmp_path / "list.ckpt"), "--split", "val", *data]
    assert main([*command, f"--runs={tmp_path / 'runs'}", *QUIET]) == 0


def test_a_temperature_that_harms_val_is_not_written(moved, capsys):
    """In val the classes have exchanged names, so a temperature from train makes the model too confident."""
    checkpoint, root = moved / "best.ckpt", moved / "my photos"
    assert main(["calibrate", str(checkpoint), f"--root={root}", "--split=train", f"--output={moved / 'a.ckpt'}"]) == 0
    classes = sorted(path.name for path in (root / "val").iterdir())
    for name in classes:
        (root / "val" / name).rename(root / "val" / f"{name}_")
    for name, other in zip(classes, [*classes[1:], classes[0]], strict=True):
        (root / "val" / f"{name}_").rename(root / "val" / other)
    content = {path.name for path in moved.iterdir()}
    assert main(["calibrate", str(checkpoint), f"--root={root}", "--split=train"]) == 1
    message = capsys.readouterr().err
    before, after = map(float, re.search(r"the 19 images of val from ([\d.]+) to ([\d.]+): nothing", message).groups())
    assert before < after
    assert {path.name for path in moved.iterdir()} == content
    nll = torch.nn.functional.cross_entropy(*logits_and_labels(checkpoint, "val", root=str(root)))
    assert before == pytest.approx(nll.item(), abs=6e-5)


def test_a_temperature_that_is_none(calibrated, tmp_path):
    content = torch.load(calibrated[1], weights_only=True)
    content["relvit"]["temperature"] = -1.0
    torch.save(content, tmp_path / "wrong.ckpt")
    shutil.copy(calibrated[0], tmp_path / "right.ckpt")
    assert Checkpoint.read(tmp_path / "right.ckpt").temperature == 1
    with pytest.raises(ValueError, match=r"relvit.temperature is missing or has a wrong value"):
        Checkpoint.read(tmp_path / "wrong.ckpt")


def test_of_named_images_without_a_val_a_warning_says_that_val_is_a_part(best, photos, tmp_path, recwarn):
    for root, notes in ((photos / "train", 1), (photos, 0)):
        recwarn.clear()
        # With so few images the fit may fail, which this test ignores.
        with contextlib.suppress(ValueError):
            calibrate(best, tmp_path / f"{notes}.ckpt", root=str(root))
        assert sum("so val is a part of them" in str(warning.message) for warning in recwarn) == notes
