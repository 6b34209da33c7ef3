"""tools/study/photographs.py: crops, order of data, resumed trainings, fine-tunings, and tables made from lines."""

import fcntl
import json
import math
from collections import Counter

import numpy as np
import pytest
import torch
from PIL import Image
from scripts import load

IMAGES, MODELS, RUNS, COMMAND, TABLES = map(
    load, ("photograph_images", "photograph_models", "photograph_runs", "photographs", "photograph_tables")
)
TOY = MODELS.TOY
FEW = IMAGES.synthetic(20, 24, 0)


def photograph(height, width, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3)).astype(np.uint8)


def bytes_of(array):
    return torch.from_numpy(array).permute(2, 0, 1)[None]


def by_pillow(array, size, box=None):
    """Resize with Pillow, channel by channel as floats, which Pillow does not round."""
    height, width = size
    channels = [Image.fromarray(array[..., channel].astype(np.float32)) for channel in range(3)]
    return np.stack([np.asarray(each.resize((width, height), Image.BILINEAR, box=box)) for each in channels])


@pytest.mark.parametrize("size", [(9, 13), (30, 50), (17, 24)])
def test_boxes_are_scaled_as_pillow_does(size):
    array, box = photograph(17, 24), (2.5, 1.25, 16.75, 23.0)
    top, left, bottom, right = box
    expected = by_pillow(array, size, (left, top, right, bottom))
    pixels = bytes_of(array).expand(2, -1, -1, -1)
    found = IMAGES.resampled(pixels, torch.tensor([box, (top, right, bottom, left)]), size)
    np.testing.assert_allclose(found[0], expected, atol=1e-3)
    np.testing.assert_allclose(found[1], expected[:, :, ::-1], atol=1e-3)


def test_a_growing_field_is_the_middle_of_photographs_at_one_scale():
    setting = MODELS.SETTINGS["imagenette"]
    array = photograph(224, 224)
    whole = by_pillow(array, (160, 160))
    sides = []
    for test in MODELS.tests_of(setting, "field"):
        side = test.size[0]
        box = torch.tensor([IMAGES.middle((224, 224), test.share)])
        edge = (160 - side) // 2
        expected = whole[:, edge : edge + side, edge : edge + side]
        np.testing.assert_allclose(IMAGES.resampled(bytes_of(array), box, test.size)[0], expected, atol=1e-2)
        sides.append(side)
    assert sides == [112, 128, 144, 160]
    # Crops in this training are within the middle 112 px of photographs of 160 px.
    _, boxes = RUNS.epoch_of(setting, MODELS.parts_of(setting)["field"], 0, 0, IMAGES.synthetic(500, 160, 0))
    assert 24 <= float(boxes.min()) < 26
    assert 134 < float(boxes.max()) <= 136


def test_the_shape_is_cut_and_not_squashed():
    test = MODELS.tests_of(MODELS.SETTINGS["imagenette"], "shape")[-1]
    assert (test.protocol, test.size) == ("shape", (112, 160))
    top, left, bottom, right = IMAGES.middle((224, 224), test.share)
    assert (left, right) == (0, 224)
    assert (bottom - top) / (right - left) == pytest.approx(112 / 160)
    assert top + bottom == pytest.approx(224)


def test_random_boxes():
    within = (10.0, 20.0, 60.0, 100.0)
    top, left, bottom, right = IMAGES.random_boxes(torch.Generator().manual_seed(0), 4000, within, 1.6, 0.35).T
    mirrored = left > right
    assert 0.47 < mirrored.double().mean() < 0.53
    left, right = torch.minimum(left, right), torch.maximum(left, right)
    assert min(top.min() - within[0], left.min() - within[1]) >= 0
    assert max(bottom.max() - within[2], right.max() - within[3]) <= 1e-9
    height, width = bottom - top, right - left
    area, inside = height * width / 4000, (height < 50) & (width < 80)
    assert area[inside].min() >= 0.35
    ratios = (width / height)[inside]
    assert 1.6 * 0.75 <= ratios.min() < 1.3
    assert 2 < ratios.max() <= 1.6 * 4 / 3
    # Crops are at all places.
    spare = ((top - 10) / (50 - height))[height < 40]
    assert spare.min() < 0.05
    assert spare.max() > 0.95


def test_matched_models_see_the_same_data():
    parts = MODELS.parts_of(MODELS.SETTINGS["imagenette"])
    images = IMAGES.synthetic(300, 16, 0)
    # The model is not an argument, so order and boxes depend only on seed and epoch.
    first, again, later, other = (
        RUNS.epoch_of(TOY, parts["scratch"], seed, epoch, images) for seed, epoch in ((0, 1), (0, 1), (0, 2), (1, 1))
    )
    assert all(torch.equal(*pair) for pair in zip(first, again, strict=True))
    assert not torch.equal(first[0], later[0])
    assert not torch.equal(first[0], other[0])
    # There are two whole batches, and no image occurs twice.
    assert len(first[0]) == len(first[1]) == len(set(first[0].tolist())) == 256
    sorted_labels = images._replace(labels=images.labels.sort().values)
    tenth = RUNS.images_of(parts["tenth"], sorted_labels)
    assert Counter(tenth.labels.tolist()) == dict.fromkeys(range(10), 3)


def test_learning_rate():
    factors = [RUNS.rate_of(step, 100) for step in range(100)]
    assert factors[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1])
    assert factors[5:] == pytest.approx([(1 + math.cos(math.pi * step / 95)) / 2 for step in range(95)])


def test_muon_orthogonalises_the_steps_of_matrices(tmp_path, monkeypatch):
    # One step, at the full learning rate, from the same weights by both optimisers.
    monkeypatch.setattr(RUNS, "WARMUP", 0)
    images, steps = IMAGES.synthetic(20, 24, 0), {}
    for part in ("scratch", "muon"):
        run = COMMAND.Run(part, "learned", 0, 1)
        before = RUNS.create(TOY, run, tmp_path).blocks[0].attn.qkv.weight.detach()
        model, _ = RUNS.train(TOY, run, images, tmp_path)
        steps[part] = torch.linalg.svdvals(model.blocks[0].attn.qkv.weight.detach() - before)
    # The smallest ones of the 16 singular values are of a gradient of almost zero, which Muon leaves small.
    spread = {part: float(values[0] / values[11]) for part, values in steps.items()}
    assert spread["muon"] < 1.5 < 2 < spread["scratch"], spread


def test_models_have_the_same_size():
    setting = MODELS.SETTINGS["imagenette"]
    counts = {}
    for name, model in MODELS.models_of(setting).items():
        counts[name] = sum(parameter.numel() for parameter in RUNS.created(model, (112, 112)).parameters())
    assert len(counts) == 15
    assert max(counts.values()) < 1.03 * min(counts.values())
    assert counts["learned"] == pytest.approx(2.8e6, rel=0.03)


def test_all_runs_have_another_folder_and_the_most_important_ones_come_first():
    runs = COMMAND.runs_of(MODELS.SETTINGS["imagenette"], [0, 1])
    assert len({run.folder for run in runs}) == len(runs) == 2 * (15 + 4 + 4) + 3 * (9 + 9 + 8 + 8)
    assert [run[:3] for run in runs[:4]] == [
        ("scratch", "learned", 0),
        ("scratch", "kv-4-learned", 0),
        ("muon", "learned", 0),
        ("field", "learned", 0),
    ]
    # Fine-tunings need the plain model of the first seed.
    assert {run.part for run in COMMAND.runs_of(TOY, [1])} == {"scratch", "muon", "field"}


def test_a_fine_tuning_starts_from_the_plain_model(tmp_path):
    base = MODELS.base_of(TOY)
    plain, _ = RUNS.train(TOY, base, FEW, tmp_path)
    pixels = RUNS.normalised(FEW.pixels[:3, :, :16].float())
    for name in MODELS.tunings_of(TOY):
        model = RUNS.create(TOY, MODELS.Run("shape", name, 0, 5), tmp_path).eval()
        same = torch.allclose(model(pixels), plain.eval()(pixels), atol=1e-5)
        # At another size than in training, mirroring an embedding and interpolating it give different results.
        assert same == (name not in ("kv-1-dropped", "kv-1-mirrored")), name


@pytest.mark.parametrize("capability", ["avx512_f", "avx512_bf16", "amx_bf16"])
def test_a_processor_with_instructions_for_bfloat16_uses_them(capability, monkeypatch):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {capability: True})
    with RUNS.autocast(torch.device("cpu")):
        dtype = torch.ones(2, 2).mm(torch.ones(2, 2)).dtype
    assert dtype == (torch.float32 if capability == "avx512_f" else torch.bfloat16)


def test_a_resumed_training_is_the_same(tmp_path, monkeypatch):
    run = MODELS.Run("scratch", "kv-1-learned", 0, 3)
    expected, _ = RUNS.train(TOY, run, FEW, tmp_path / "whole")
    ticks = iter(range(100))
    monkeypatch.setattr(RUNS.time, "monotonic", lambda: next(ticks))
    assert RUNS.train(TOY, run, FEW, tmp_path / "stopped", stop=1) is None
    assert torch.load(tmp_path / "stopped" / run.folder / "last.pt")["epoch"] == 2
    resumed, _ = RUNS.train(TOY, run, FEW, tmp_path / "stopped")
    for (name, one), other in zip(expected.state_dict().items(), resumed.state_dict().values(), strict=True):
        assert torch.equal(one, other), name


def test_tables_learn_faster_than_the_rest(tmp_path):
    RUNS.train(TOY, MODELS.base_of(TOY), FEW, tmp_path)
    norms = {}
    for name in ("kv-1", "kv-1-rate-10", "kv-1-rate-30"):
        model, _ = RUNS.train(TOY, MODELS.Run("tenth", name, 0, 5), FEW, tmp_path)
        tables = [table.detach() for key, table in model.named_parameters() if ".position." in key]
        assert len(tables) == 4
        norms[name] = max(float(table.abs().max()) for table in tables)
    # A step of Adam is at most about as long as the learning rate, so the norms of tables show their rate.
    assert 5 * norms["kv-1"] < norms["kv-1-rate-10"] < 15 * norms["kv-1"]
    assert 2 * norms["kv-1-rate-10"] < norms["kv-1-rate-30"]


def test_a_growing_field_is_tested_with_the_embedding_stretched_and_in_the_centre(tmp_path):
    for model, reaches in (("learned", 2), ("rope-mixed-learned-vit-start", 2), ("lookhere", 1)):
        run = MODELS.Run("field", model, 0, 1)
        rows = RUNS.evaluate(TOY, run, RUNS.create(TOY, run, tmp_path), FEW)
        kinds = [(row["reach"], *row["size"]) for row in rows]
        assert kinds == [("trained", 16, 16), ("trained", 24, 24), ("mirror", 24, 24)][: 1 + reaches]


def test_packed_images(tmp_path):
    for split, size in (("train", 8), ("val", 12)):
        for label in "ab":
            (tmp_path / split / label).mkdir(parents=True)
            for number in range(3):
                Image.fromarray(photograph(size, size, number)).save(tmp_path / split / label / f"{number}.png")
    Image.fromarray(photograph(8, 8)[..., 0]).save(tmp_path / "train" / "b" / "1.png")
    file = tmp_path / "pack" / "images.npz"
    IMAGES.pack(tmp_path, file, {"train": ("train", None, 2), "test": ("val", 6, 9)})
    images = IMAGES.load(file)
    assert [tuple(each.pixels.shape) for each in images.values()] == [(4, 3, 8, 8), (6, 3, 6, 6)]
    assert [each.labels.tolist() for each in images.values()] == [[0, 0, 1, 1], [0, 0, 0, 1, 1, 1]]
    assert torch.equal(images["train"].pixels[:1], bytes_of(photograph(8, 8)))
    assert torch.equal(images["train"].pixels[3], images["train"].pixels[3, :1].expand(3, 8, 8))


def test_runs_get_a_line_each_and_are_not_done_twice(tmp_path, capsys):
    arguments = ["--toy", f"--lines={tmp_path}", "--models", "learned", "plain", "kv-1", "--parts", "scratch", "larger"]
    COMMAND.main(arguments)
    lines = [json.loads(text) for text in (tmp_path / "toy.jsonl").read_text().splitlines()]
    found = [(line["part"], line["model"], line["seed"]) for line in lines]
    tuned = [("larger", model, seed) for seed in range(3) for model in ("plain", "kv-1")]
    assert found == [("scratch", "learned", 0), *tuned]
    assert [(row["protocol"], row["size"]) for row in lines[1]["rows"]] == [
        ("resize", [16, 16]),
        ("resize", [24, 24]),
        ("shape", [16, 24]),
    ]
    COMMAND.main(arguments)
    COMMAND.main(["--toy", f"--lines={tmp_path}", "--minutes=0"])
    assert len((tmp_path / "toy.jsonl").read_text().splitlines()) == len(lines)


@pytest.mark.parametrize(("arguments", "said"), [("--toy --models kv-3", "kv-1-learned"), ("--work w", "give --pack")])
def test_what_cannot_be_trained_is_refused(arguments, said, capsys):
    with pytest.raises(SystemExit):
        COMMAND.main(arguments.split())
    assert said in capsys.readouterr().err


def test_choices_are_tested_on_training_images_that_are_left_out(monkeypatch, capsys, tmp_path):
    tried = {}
    monkeypatch.setattr(COMMAND, "do", lambda setting, run, images, *_: tried.update(images))
    monkeypatch.setattr(COMMAND, "load", lambda *_: {"train": IMAGES.synthetic(40, 4, 0), "test": FEW})
    COMMAND.main(["--choose", "--pack=images.npz", f"--work={tmp_path}", f"--lines={tmp_path}"])
    train, test = tried["train"].pixels, tried["test"].pixels
    assert (len(train), len(test)) == (36, 4)
    assert not any(torch.equal(one, other) for one in test for other in train)


def test_choices_do_not_resume_trainings_that_saw_the_images_left_out(monkeypatch, tmp_path):
    folders = []
    monkeypatch.setattr(COMMAND, "do", lambda setting, run, images, work, stop: folders.append(work / run.folder))
    monkeypatch.setattr(COMMAND, "load", lambda *_: {"train": FEW, "test": FEW})
    for further in ([], ["--choose"]):
        COMMAND.main([*further, "--pack=images.npz", f"--work={tmp_path}", f"--lines={tmp_path / 'lines'}"])
    assert len(set(folders)) == len(folders) > 0


def test_a_run_is_left_to_the_process_that_trains_it(tmp_path):
    run, base = MODELS.Run("larger", "plain", 0, 5), MODELS.base_of(TOY)
    (tmp_path / base.folder).mkdir()
    with open(tmp_path / base.folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert COMMAND.do(TOY, run, {"train": FEW, "test": FEW}, tmp_path, math.inf) is None
    assert not list(tmp_path.rglob("*.pt"))


@pytest.mark.slow
def test_the_whole_table_at_toy_size(tmp_path, capsys):
    COMMAND.main(["--toy", f"--lines={tmp_path}"])
    assert COMMAND.done(tmp_path / "toy.jsonl") == set(COMMAND.runs_of(TOY, [0]))


def line(part, model, seed, values, reaches=("trained",)):
    rows = [
        {"protocol": "field", "size": [side, side], "reach": reach, "acc1": value + number / 100}
        for number, reach in enumerate(reaches)
        for side, value in values.items()
        if reach == "trained" or side > min(values)
    ]
    return {"setting": "imagenette", "part": part, "model": model, "seed": seed, "epochs": 20, "rows": rows}


def test_tables_recompute_figures_from_the_lines(tmp_path, capsys):
    both = ("trained", "mirror")
    lines = [
        line("field", "learned", 0, {112: 0.60, 160: 0.54}),
        line("field", "learned", 1, {112: 0.64, 160: 0.56}),
        line("field", "kv-4-learned", 0, {112: 0.63, 160: 0.60}, both),
        line("field", "kv-4-learned", 1, {112: 0.65, 160: 0.61}, both),
        # No run of `learned` has this seed.
        line("field", "lookhere", 7, {112: 0.5, 160: 0.4}),
        line("scratch", "learned", 0, {112: 0.5}) | {"setting": "cifar10"},
    ]
    (tmp_path / "lines.jsonl").write_text("".join(json.dumps(each) + "\n" for each in lines))
    TABLES.main(["imagenette", str(tmp_path)])
    page = capsys.readouterr().out
    assert "scratch" not in page
    share = np.array([60 / 63, 61 / 65]) * 100
    error = share.std(ddof=1) / math.sqrt(2)
    assert "| learned | 2 | 62.0 ± 2.0 % | 55.0 ± 1.0 % |" in page
    assert f"| kv-4-learned | 2 | +2.0 ± 1.0 | +5.5 ± 0.5 | {share.mean():.1f} ± {error:.1f} |" in page
    # At the trained size, a mirrored embedding is the embedding itself.
    assert "| kv-4-learned, mirror | 2 | +2.0 ± 1.0 | +6.5 ± 0.5 |" in page
    assert "| lookhere | 1 | 50.0 % | 40.0 % | 80.0 |" in page
