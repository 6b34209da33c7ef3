"""Results by image size compared with logits, formulas and timm's resampling; several checkpoints; errors."""

import copy
import shutil
from typing import NamedTuple

import pytest
import timm
import torch
from command_line import write_checkpoint_like
from photos import CLASSES
from torchmetrics.functional.classification import multiclass_calibration_error
from torchvision.transforms import v2

from relvit.app.data import DigitsData, eval_transform
from relvit.app.data.images.decode import load_rgb
from relvit.app.evaluation import count_macs, evaluate_size, evaluate_sizes, peak_memory
from relvit.app.evaluation.standard_error import accuracy_error
from relvit.app.training.checkpoints.load import load_classifier
from relvit.app.training.optim.ema import WeightAverage

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
VIT = {"patch_size": 8, "embed_dim": 16, "depth": 2, "num_heads": 2}


@pytest.fixture(scope="module")
def other(best, tmp_path_factory):
    """Return a function that writes the checkpoint of a timm model with random weights, as if trained like `best`."""

    def write(model, kwargs, **data):
        return write_checkpoint_like(best, tmp_path_factory.mktemp(model) / "best.ckpt", model, kwargs, **data)

    return write


@pytest.fixture(scope="module")
def vit(other):
    return other("vit_tiny_patch16_224", VIT)


@pytest.fixture(scope="module")
def gmlp(other):
    """A model that takes only one image size, because its weights mix a fixed number of tokens."""
    return other("gmlp_ti16_224", {})


def logits_and_labels(net, photos, split, transform):
    logits, labels = [], []
    for label, name in enumerate(CLASSES):
        for path in sorted((photos / split / name).iterdir()):
            logits.append(net(transform(load_rgb(path))[None])[0].detach())
            labels.append(label)
    return torch.stack(logits), torch.tensor(labels)


class Wide(NamedTuple):
    """The rows of 16 x 16 and 16 x 40 px, and the transform, logits and labels by hand at 16 x 40 px."""

    protocol: str
    split: str
    square: dict
    row: dict
    transform: v2.Compose
    logits: torch.Tensor
    labels: torch.Tensor


@pytest.fixture(scope="module", params=[("crop", "val"), ("resize", "val"), ("field", "train")], ids="-".join)
def wide(request, best, photos):
    protocol, split = request.param
    square, row = evaluate_sizes(best, [16, (16, 40)], split, accelerator="cpu", protocol=protocol, squares=True)
    transform = eval_transform((16, 40), MEAN, STD, 0.9, protocol, 16)
    given = logits_and_labels(load_classifier(best), photos, split, transform)
    return Wide(protocol, split, square, row, transform, *given)


def test_a_row_says_of_which_model_and_images_it_is(wide, best):
    protocol, row = wide.protocol, wide.row
    assert (row["height"], row["width"], row["images"], row["protocol"]) == (16, 40, 18, protocol)
    assert ("fill" in row) == (protocol == "field")
    assert (row["checkpoint"], row["model"], row["train_sizes"]) == (str(best), "test_relvit", [[16, 16]])


def test_figures_are_those_of_the_logits(wide):
    row, logits, labels = wide.row, wide.logits, wide.labels
    probabilities = logits.softmax(-1)
    assert row["acc1"] == pytest.approx(float((logits.argmax(-1) == labels).float().mean()))
    assert row["acc1_se"] == pytest.approx(accuracy_error(row["acc1"], 18))
    assert row["loss"] == pytest.approx(float(-probabilities.log()[range(18), labels].mean()), rel=1e-4)
    expected = float(multiclass_calibration_error(probabilities, labels, 3, n_bins=15, norm="l1"))
    assert row["calibration_error"] == pytest.approx(expected, abs=1e-5)
    assert "acc5" not in row
    assert row["images_per_second"] > 0


def test_a_square_has_no_squashed_square_beside_it(wide):
    assert "square" not in wide.square


def test_squashed_images_show_the_same_on_a_square_of_as_many_patches(wide, best, photos):
    """16 x 40 px are 2 x 5 patches. The square with about as many, 3 x 3, shows the same part of the image."""
    protocol, split, _, row, transform, _, labels = wide
    net = load_classifier(best)
    *shown, tensor, scale, normalise = transform.transforms
    # The resized image is squashed in one step.
    steps = [*(shown if protocol != "resize" else []), v2.Resize((24, 24), v2.InterpolationMode.BICUBIC)]
    squashed, _ = logits_and_labels(net, photos, split, v2.Compose([*steps, tensor, scale, normalise]))
    right = float((squashed.argmax(-1) == labels).float().mean())
    assert (row["square"], row["square_acc1"]) == (24, pytest.approx(right))


@pytest.fixture(scope="module")
def digits(digits_run):
    return load_classifier(digits_run / "checkpoints" / "best.ckpt"), DigitsData(batch_size=100)


def test_a_classifier_and_a_data_module_in_memory_are_not_changed(digits):
    classifier, data = digits
    before = {name: value.clone() for name, value in classifier.state_dict().items()}
    random = torch.get_rng_state()
    classifier.train()
    evaluate_size(classifier, data, (8, 12), "test", "field", "grey")
    assert data.img_size == (8, 8)
    assert all(torch.equal(before[name], value) for name, value in classifier.state_dict().items())
    assert not any(module.training for module in classifier.modules())
    assert torch.equal(torch.get_rng_state(), random)


def test_results_do_not_depend_on_pytorchs_default_device(digits):
    row = evaluate_size(*digits, 8)
    with torch.device("meta"):
        again = evaluate_size(*digits, 8)
    assert (row["loss"], row["macs"]) == (again["loss"], again["macs"])


def test_a_classifier_in_bfloat16(digits):
    classifier, data = digits
    row, again = evaluate_size(classifier, data, 8), evaluate_size(copy.deepcopy(classifier).bfloat16(), data, 8)
    assert again["macs"] == row["macs"]
    assert again["loss"] == pytest.approx(row["loss"], rel=0.02)


def test_figures_of_a_classifier_in_memory_at_another_size(digits):
    classifier, data = digits
    given = {"field": "grey", "resize": None}
    rows = {name: evaluate_size(classifier, data, (8, 12), "test", name, fill) for name, fill in given.items()}
    images, labels = zip(*data.dataset("test"), strict=True)
    images, labels = torch.stack(images), torch.tensor(labels)
    # The padding is the mean grey after normalisation, which is zero up to rounding to 8 bits.
    grey = (round(255 * data.mean[0]) / 255 - data.mean[0]) / data.std[0]
    padded = torch.nn.functional.pad(images, (2, 2, 0, 0), value=grey)
    with torch.no_grad():
        logits = classifier(padded)
    assert rows["field"]["acc1"] == pytest.approx(float((logits.argmax(-1) == labels).float().mean()))
    assert rows["field"]["acc5"] == pytest.approx(
        float((logits.topk(5).indices == labels[:, None]).any(1).float().mean())
    )
    assert rows["field"]["loss"] == pytest.approx(float(torch.nn.functional.cross_entropy(logits, labels)), rel=1e-5)
    assert rows["resize"]["loss"] != pytest.approx(rows["field"]["loss"], rel=1e-3)


def test_differences_to_squashed_squares(digits_run):
    (row,) = evaluate_sizes(digits_run / "checkpoints" / "best.ckpt", [(8, 16)], accelerator="cpu", squares=True)
    assert row["square"] == 12
    assert row["square_difference"] == pytest.approx(row["acc1"] - row["square_acc1"])
    assert row["square_difference"] != 0 < row["square_difference_se"] < 0.1


def test_averaged_weights_of_a_training(digits_run):
    classifier, data = load_classifier(digits_run / "checkpoints" / "best.ckpt"), DigitsData(batch_size=100)
    expected = evaluate_size(classifier, data, 12, "val")
    classifier.average = WeightAverage(classifier.net, 0.9, warmup=True)
    with torch.no_grad():
        classifier.net.head.weight.zero_()
    assert evaluate_size(classifier, data, 12, "val")["loss"] == pytest.approx(expected["loss"])


def test_files_that_cannot_be_read(best, photos, tmp_path):
    root = shutil.copytree(photos, tmp_path / "photos")
    (root / "val" / "dog" / "0.jpg").write_bytes(b"")
    skipping = write_checkpoint_like(best, tmp_path / "a.ckpt", "test_vit", VIT, on_error="skip")
    with pytest.warns(UserWarning, match=r"^1 image of val could not be read and was left out\. .*dog/0\.jpg: "):
        (row,) = evaluate_sizes(skipping, [16], root=str(root), accelerator="cpu")
    assert row["images"] == 17
    with pytest.raises(ValueError, match=r"dog/0\.jpg"):
        evaluate_sizes(best, [16], root=str(root), accelerator="cpu")
    for file in root.glob("val/*/*"):
        file.write_bytes(b"")
    with pytest.raises(ValueError, match="none of the images of val could be read"):
        evaluate_sizes(skipping, [16], root=str(root), accelerator="cpu")


def test_macs_by_formula():
    """4 x 6 patches of 8 px: patch embedding, four projections, an MLP of ratio 4, and both products of attention."""
    net = timm.create_model("vit_tiny_patch16_224", **VIT, img_size=(32, 48), num_classes=5).eval()
    patches, tokens, dim = 24, 25, 16
    block = tokens * 12 * dim**2 + 2 * tokens**2 * dim
    assert count_macs(net, (32, 48)) == patches * 3 * 8 * 8 * dim + 2 * block + 5 * dim


@pytest.mark.parametrize(("height", "width"), [(4, 6), (2, 250)])
def test_macs_of_relative_attention(height, width):
    """'fused' multiplies wider vectors; beyond 256 channels 'tiled' runs, whose products are in place."""
    kwargs = {"patch_size": 2, "embed_dim": 32, "depth": 1, "num_heads": 2, "num_classes": 5, "max_distance": (1, 2)}
    plain, relative = (timm.create_model("test_relvit", **kwargs, rel_terms=terms).eval() for terms in ("", "kv"))
    size = (2 * height, 2 * width)
    patches, heads, head_dim = height * width, 2, 16
    # Each patch is multiplied, for its logits and for its output, by all rows of both tables and a zero row, padded to
    # a multiple of 8.
    tables = 2 * patches * heads * head_dim * 16
    added = count_macs(relative, size) - count_macs(plain, size)
    if width > 6:
        assert added == tables
    else:
        widest = -(-(head_dim + height + width) // 8) * 8
        assert added == tables + 2 * heads * patches**2 * (widest - head_dim)


def test_peak_memory_by_hand():
    net = torch.nn.Sequential(torch.nn.Linear(6, 50, bias=False), torch.nn.ReLU(), torch.nn.Linear(50, 2, bias=False))
    images = torch.randn(10, 6)
    with torch.inference_mode():
        # The peak has the weights, the images, and the hidden layer before and after ReLU.
        assert peak_memory(net, images) == 4 * (6 * 50 + 50 * 2 + 10 * 6 + 2 * 10 * 50)


def test_a_timm_vit_of_one_size_is_what_timm_builds_for_another(vit, photos):
    rows = evaluate_sizes(vit, [16, (24, 40)], accelerator="cpu")
    trained = load_classifier(vit).net
    for row, size in zip(rows, [(16, 16), (24, 40)], strict=True):
        net = timm.create_model("vit_tiny_patch16_224", **VIT, num_classes=3, img_size=size)
        state = timm.models.vision_transformer.checkpoint_filter_fn(trained.state_dict(), net)
        net.load_state_dict(state)
        logits, labels = logits_and_labels(net.eval(), photos, "val", eval_transform(size, MEAN, STD, 0.9))
        assert row["loss"] == pytest.approx(float(torch.nn.functional.cross_entropy(logits, labels)), rel=1e-5)


def test_sizes_that_one_cannot_take_are_left_out(best, vit, gmlp):
    reason = "gmlp_ti16_224 cannot take images of 32 x 32 px .*give img_size 16"
    with pytest.warns(UserWarning, match=f"{gmlp} is left out at this size: {reason}"):
        rows = evaluate_sizes([best, gmlp, vit], [16, 32], accelerator="cpu")
    found = [(row["checkpoint"], row["height"]) for row in rows]
    assert found == [(str(best), 16), (str(best), 32), (str(gmlp), 16), (str(vit), 16), (str(vit), 32)]
    # Rows of further checkpoints have the difference to the first checkpoint at the same size.
    assert ["acc1_difference" in row for row in rows] == [False, False, True, True, True]
    for row, first in zip(rows[2:], (rows[0], *rows[:2]), strict=True):
        assert row["acc1_difference"] == pytest.approx(row["acc1"] - first["acc1"], abs=1e-6)
        assert 0 <= row["acc1_difference_se"] <= 1
    with pytest.raises(ValueError, match=reason):
        evaluate_sizes(gmlp, [16, 32], accelerator="cpu")


def test_a_size_that_none_can_take_is_refused(best, vit):
    with pytest.raises(ValueError, match="20"):
        evaluate_sizes([best, vit], [16, 20], accelerator="cpu")


def test_checkpoints_of_other_classes_are_refused(best, digits_run):
    with pytest.raises(ValueError, match=r"best\.ckpt has the classes .*'cat', 'dog', 'owl'.*: evaluate them apart"):
        evaluate_sizes([best, digits_run / "checkpoints" / "best.ckpt"], [16])


def test_the_shape_of_the_training_cannot_be_changed(best):
    """With `img_size` 48, objects would have the scale of 48 px in protocol 'field', though the training had 16."""
    with pytest.raises(ValueError, match="img_size of the data is that of the training: leave it out"):
        evaluate_sizes(best, [16], protocol="field", data="ImageFolderData", data_args={"img_size": 48})


def test_data_whose_classes_are_in_another_order_are_refused(best):
    """Labels are indices of classes, so the accuracy would be computed from wrong labels."""
    with pytest.raises(ValueError, match=r"best\.ckpt was trained on other classes .*: their order is another; "):
        evaluate_sizes(best, [16], data="ImageFolderData", data_args={"class_names": ["owl", "cat", "dog"]})


def test_checkpoints_of_other_folders_need_the_folder_of_both(best, other, photos, tmp_path):
    several = {"train_sizes": [16, [24, 32]], "batch_size": 3, "crop_pct": 0.5}
    elsewhere = other("vit_tiny_patch16_224", VIT, root=str(tmp_path), **several)
    with pytest.raises(
        ValueError, match=f"was trained with root '{photos}', .*{elsewhere} with '{tmp_path}': give the"
    ):
        evaluate_sizes([best, elsewhere], [16])
    rows = evaluate_sizes([best, elsewhere], [16], root=str(photos), accelerator="cpu")
    assert [row["images"] for row in rows] == [18, 18]
    assert [row["train_sizes"] for row in rows] == [[[16, 16]], [[16, 16], [24, 32]]]


def test_of_named_images_without_a_val_a_warning_says_that_val_is_a_part(best, photos, recwarn):
    for root, notes in ((photos / "train", 1), (photos, 0)):
        recwarn.clear()
        (row,) = evaluate_sizes(best, [16], root=str(root), accelerator="cpu")
        text = f"so val is a part of them, the {row['images']} that a training holds out"
        assert sum(text in str(warning.message) for warning in recwarn) == notes


def test_checkpoints_of_other_images_are_refused(best, other):
    divided = other("vit_tiny_patch16_224", VIT, split_seed=1)
    with pytest.raises(ValueError, match=r"was trained with split_seed 0, .* with 1: evaluate them apart"):
        evaluate_sizes([best, divided], [16])


def test_a_checkpoint_twice_is_refused(best):
    with pytest.raises(ValueError, match=r"best\.ckpt is given more than once"):
        evaluate_sizes([best, best], [16])


def test_wrong_arguments(best):
    for options, message in (
        ({"protocol": "fields"}, "protocol is 'fields'"),
        ({"protocol": "field", "fill": "black"}, "fill is 'black'"),
        ({"split": "valid"}, "split is 'valid'"),
        ({"fill": "grey"}, "fill 'grey' is for protocol 'field', not 'crop'"),
        ({"sizes": [0]}, "sizes is 0; give a positive integer"),
        ({"sizes": []}, "no size is given: give one or more"),
        ({"sizes": [16, (16, 16)]}, r"size \(16, 16\) is given more than once"),
    ):
        with pytest.raises(ValueError, match=message):
            evaluate_sizes(best, **{"sizes": [16], "accelerator": "cpu"} | options)
