"""`relvit average`: every command takes the averaged checkpoint, but no training can resume from it."""

import pytest
import torch
from command_line import QUIET, by_hand, evaluate, only, printed, rows
from photos import CLASSES, TINY

import relvit
from relvit.app.cli import main
from relvit.app.data import ImageFolderData


@pytest.fixture(scope="module")
def averaged(best, tmp_path_factory):
    """The average of the run's best checkpoint and a noisy copy, and a classifier with the mean of their weights."""
    folder = tmp_path_factory.mktemp("average")
    other = torch.load(best, weights_only=True)
    generator = torch.Generator().manual_seed(0)
    for tensor in other["state_dict"].values():
        tensor += 0.2 * torch.randn(tensor.shape, generator=generator)
    torch.save(other, folder / "other.ckpt")
    classifier = relvit.load(best).classifier
    state = classifier.state_dict()
    classifier.load_state_dict({name: (state[name] + other["state_dict"][name]) / 2 for name in state})
    output = folder / "averaged.ckpt"
    assert main(["average", f"--ckpt_paths=[{best},{folder / 'other.ckpt'}]", f"--output={output}"]) == 0
    return output, classifier


def test_other_commands_take_it(averaged, photos, tmp_path, capsys):
    path, classifier = averaged
    data = ImageFolderData(str(photos), img_size=16, num_workers=0)
    assert main(["validate", str(path), *QUIET]) == 0
    loss = by_hand(classifier, data.dataset("val"))[1]
    assert printed("val/loss", capsys.readouterr().out) == pytest.approx(loss, rel=1e-4)
    table = rows(evaluate("predict", path, tmp_path / "predict", photos / "test") / "predictions.csv")
    with torch.no_grad():
        images = torch.stack([image for image, _ in data.dataset("test")])
        probability, label = classifier(images).softmax(-1).max(-1)
    assert [row["class"] for row in table] == [list(CLASSES)[i] for i in label]
    assert [float(row["probability"]) for row in table] == pytest.approx(probability.tolist(), abs=2e-6)
    found = [prediction.probability for prediction in relvit.load(path).predict(photos / "test")]
    assert found == pytest.approx(probability.tolist(), rel=1e-5)


def test_a_training_starts_from_it_but_does_not_go_on(averaged, photos, tmp_path, fails):
    path, classifier = averaged
    common = [argument for argument in TINY if not argument.startswith("--model.")]
    fit = ["fit", "--data=ImageFolderData", f"--data.root={photos}", f"--runs={tmp_path}", *common]
    still = ["--trainer.max_epochs=1", "--model.lr=0", "--model.min_lr=0"]
    assert main([*fit, *still, f"--model.pretrained={path}"]) == 0
    found = relvit.load(only(tmp_path) / "checkpoints" / "best.ckpt").classifier.state_dict()
    for name, tensor in classifier.state_dict().items():
        torch.testing.assert_close(found[name], tensor)
    message = fails([*fit, f"--ckpt_path={path}"])
    assert "averaged.ckpt holds only weights (as an average does), so no training can resume from it" in message
    assert f"--model.pretrained {path}" in message
    assert len(message.splitlines()) == 1


def test_what_is_written_is_said_and_nothing_is_overwritten(averaged, best, tmp_path, capsys, fails):
    path, _ = averaged
    before = path.read_bytes()
    several = f"--ckpt_paths=[{best},{best.with_name('last.ckpt')}]"
    assert f"output {path} exists" in fails(["average", several, f"--output={path}"])
    assert path.read_bytes() == before
    output = tmp_path / "mean.ckpt"
    assert main(["average", "--ckpt_paths", f"[{best}, {path}]", "--output", str(output)]) == 0
    out = capsys.readouterr().out
    assert f"{output} holds the mean of 2 checkpoints" in out
    assert main([*out.splitlines()[-1].split()[1:], "--trainer.accelerator=cpu"]) == 0
    one = ["average", f"--ckpt_paths={best}", f"--output={tmp_path / 'x.ckpt'}"]
    assert "two checkpoints or more, got 1" in fails(one)
