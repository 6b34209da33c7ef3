"""tools/study: each training adds a line with its evaluations, from which tables and figures are made."""

import json
import math
from collections import defaultdict

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from scripts import ROOT, load

import relvit  # noqa: F401  registers the models

STUDY, LINES_OF, REPORT, FIELD_LOSS, PHOTOGRAPHS = map(
    load, ("study", "study_lines", "study_report", "field_loss", "photograph_models")
)


def line(model, seed, low, recipe="several"):
    """Make a line: accuracy `low` at 16 px, a point more at each size; `field` and a reach add ten and twenty."""
    rows = []
    for extra, reach, protocol in ((0, "trained", "resize"), (0.1, "trained", "field"), (0.2, "stretch", "field")):
        for number, size in enumerate(STUDY.SIZES):
            if size != 32 or (reach, protocol) == ("trained", "resize"):
                rows.append({"reach": reach, "protocol": protocol, "size": size, "acc1": low + extra + number / 100})
    about = {
        "parameters": 800_000,
        "processor_minutes": 6.0,
        "versions": {"torch": "2"},
        "options": ["--trainer.precision=32-true"],
    }
    return {"model": model, "recipe": recipe, "seed": seed, "images": {"train": 5, "test": 4}, "rows": rows, **about}


LINES = [line("learned", 0, 0.40), line("learned", 1, 0.44), line("kv-3", 0, 0.43), line("kv-3", 1, 0.45)]


def test_curves_and_their_area():
    curve = LINES_OF.accuracies(LINES[0], "field")
    assert list(curve) == list(STUDY.SIZES)
    assert curve[16] == pytest.approx(50)
    assert curve[32] == pytest.approx(42)
    # The curve is linear over log2(size), so its mean is its height in the middle.
    assert LINES_OF.area({size: math.log2(size) for size in STUDY.SIZES}) == pytest.approx(5)


def test_differences_are_paired_by_seed_and_precision():
    other = line("kv-3", 1, 0.95) | {"options": ["--trainer.precision=bf16-mixed"]}
    lines = [*LINES, other, line("kv-3", 2, 0.9), line("kv-3", 0, 0.1, "one")]
    groups = LINES_OF.grouped(lines, "several")
    found = LINES_OF.difference(groups["kv-3"], groups["learned"], LINES_OF.at(64, "resize"))
    assert found.count == 2
    assert found.mean == pytest.approx(2)
    assert found.error == pytest.approx(np.std([3, 1], ddof=1) / math.sqrt(2))
    # Two runs with the same seed count as one, by their mean.
    every = LINES_OF.estimate(groups["kv-3"], LINES_OF.at(16, "resize"))
    assert every.count == 3
    assert every.mean == pytest.approx((43 + 70 + 90) / 3)


def photograph(part, model, seed, low):
    """Make a line with the accuracy `low` in all tests."""
    sides = REPORT.study_questions.FIELDS if part == "field" else REPORT.study_questions.SIDES
    protocol = "field" if part == "field" else "resize"
    tests = [(protocol, [side, side]) for side in sides] + [("shape", [112, 160])] * (part != "field")
    rows = [{"protocol": name, "size": size, "reach": "trained", "acc1": low} for name, size in tests]
    epochs = 20 if part in ("scratch", "field") else 5
    return {"setting": "imagenette", "part": part, "model": model, "seed": seed, "epochs": epochs, "rows": rows}


def write(file, lines):
    file.parent.mkdir()
    file.write_text("".join(json.dumps(each) + "\n" for each in lines))


PAGE_PARTS = ("own_size", "other_sizes", "retrofit")


@pytest.fixture(scope="module")
def reported(tmp_path_factory):
    """The folder of a report on these lines."""
    folder = tmp_path_factory.mktemp("study")
    lines = [*LINES, *(line(name, 0, 0.3, "one") for name in (LINES_OF.BASE, LINES_OF.OURS))]
    lines += [line(name, 1, 0.4 if name == LINES_OF.BASE else 0.44, "one") for name in (LINES_OF.BASE, LINES_OF.OURS)]
    # No other model has a run with this seed.
    lines.append(line("none", 5, 0.3, "one"))
    write(folder / "runs" / "several.jsonl", lines)
    photographs = [photograph(part, "learned", 0, 0.5) for part in ("scratch", "field")]
    photographs += [photograph("scratch", "kv-2-learned", 0, 0.53), photograph("field", "kv-2-learned", 0, 0.55)]
    tuned = [part.split(",")[0] for part, _ in REPORT.study_questions.TUNED.values()]
    photographs += [photograph(part, "plain", seed, 0.5) for part in tuned for seed in (0, 1)]
    photographs += [photograph(tuned[0], "kv-4", seed, 0.51 + seed / 100) for seed in (0, 1)]
    write(folder / "photographs" / "imagenette.jsonl", photographs)
    marks = (f"{name}\n<!-- {name}, written by tools/study/study_report.py -->old<!-- end -->\n" for name in PAGE_PARTS)
    (folder / "README.md").write_text("".join(marks))
    REPORT.main(folder)
    return folder


def test_the_page_answers_three_questions_with_means_errors_and_differences(reported):
    page = (reported / "README.md").read_text()
    assert "old" not in page
    # At 32 px accuracies are `low` and two points more; the differences of both pairs of seeds are 0 and 4 points.
    assert "| learned alone | 37.0 ± 5.0 % | 50.0 % |" in page
    assert "| kv, `max_distance` 2, and learned | +2.0 ± 2.0 | +3.0 |" in page
    assert "| kv, `max_distance` 2, and learned | 53.0 | 53.0 | 53.0 | 53.0 | 53.0 | 55.0 | 100.0 |" in page
    assert "| its own size, 112 px | as the rest | 2 | 50.0 ± 0.0 | +1.5 ± 0.5 |" in page
    # No model of this row has a run.
    assert "LookHere" not in page


def test_the_tables_have_every_model_and_every_reach(reported):
    tables = (reported / "tables.md").read_text()
    # At 32 px the accuracies are 42 and 46 %, and 45 and 47 %.
    assert "| learned | 2 | 44.0 ± 2.0 % |" in tables
    assert "| kv-3 | 2 | +2.0 ± 1.0 |" in tables
    # The accuracies are 68 and 70 % at 64 px, after 45 and 47 % at 32 px; `learned` has 55 and 59 % without a reach.
    assert "| +10.0 ± 0.0 | 150.0 ± 1.1 | +12.0 ± 1.0 |" in tables
    assert "| none | 1 | 32.0 % |" in tables
    assert "| kv-3 | stretch | 2 | +10.0 ± 0.0 |" in tables
    assert "CIFAR-10 took 0.9 processor hours" in tables


def test_each_question_has_a_figure(reported):
    assert min(Image.open(reported / f"{name}.png").width for name in PAGE_PARTS) > 700


def test_a_page_without_marks_is_refused():
    with pytest.raises(ValueError, match=r"own_size, written by .* 0 times"):
        REPORT.filled("a page", {"own_size": "a table"})


def test_models_have_the_same_size_and_are_named_in_the_report():
    counts = defaultdict(list)
    for model in STUDY.MODELS.values():
        net = timm.create_model(model.name, img_size=32, num_classes=10, **model.arguments)
        counts[model.arguments["patch_size"]].append(sum(parameter.numel() for parameter in net.parameters()))
    assert set(counts) == {2, 4}
    for of_patch in counts.values():
        assert max(of_patch) < 1.03 * min(of_patch)
    assert set(LINES_OF.SHOWN) <= set(STUDY.MODELS)


def test_models_of_the_answers_start_as_the_plain_vit_does():
    """Scales or a head near zero would slow the start, so that short trainings would not compare positions alone."""
    declared = (STUDY.MODELS, PHOTOGRAPHS.models_of(PHOTOGRAPHS.SETTINGS["imagenette"]))
    shown = zip(*REPORT.study_questions.MODELS.values(), strict=True)
    pairs = [(models, name) for models, names in zip(declared, shown, strict=True) for name in names]
    for model in [models[name] for models, name in pairs if name in models]:
        net = timm.create_model(model.name, img_size=32, num_classes=10, **model.arguments)
        assert not [name for name, _ in net.named_parameters() if "gamma" in name]
        # Layers without a bias are part of a position.
        layers = [layer for layer in (*net.blocks.modules(), net.head) if getattr(layer, "bias", None) is not None]
        linear = [layer for layer in layers if isinstance(layer, torch.nn.Linear)]
        # Take the median, since timm's truncated normal draws -2 once in 17 million numbers, which would change `std`.
        deviations = [float(layer.weight.detach().abs().median()) / 0.6745 for layer in linear]
        assert deviations == pytest.approx([0.02] * len(linear), rel=0.1), model.name
        assert not any(layer.bias.any() for layer in linear)


def test_no_image_of_a_recipe_is_in_two_splits():
    for recipe in STUDY.RECIPES.values():
        of_source = defaultdict(list)
        for source, first, last in recipe.images.values():
            of_source[source] += range(first, last)
        assert all(len(set(numbers)) == len(numbers) for numbers in of_source.values())
    assert STUDY.RECIPES["long"].images["train"] == ("train", 0, 5000)


@pytest.mark.slow
def test_a_run_is_trained_evaluated_and_not_done_twice(tmp_path, monkeypatch, capsys):
    random = np.random.default_rng(0)
    for split, count in (("train", 12), ("test", 4)):
        for label in range(10):
            folder = tmp_path / "images" / split / str(label)
            folder.mkdir(parents=True)
            for number in range(count):
                values = random.integers(0, 256, (32, 32, 3)).astype(np.uint8)
                Image.fromarray(values).save(folder / f"{number}.png")
    for name, value in {"SIZES": (16, 32), "REACH_SIZES": (16,)}.items():
        monkeypatch.setattr(STUDY, name, value)
    images = {"train": ("train", 0, 10), "val": ("train", 10, 12), "test": ("test", 0, 3)}
    short = STUDY.RECIPES["several"]._replace(epochs=1, images=images)
    monkeypatch.setitem(STUDY.RECIPES, "several", short)
    lines = tmp_path / "lines"
    arguments = [f"--images={tmp_path / 'images'}", f"--work={tmp_path / 'work'}", f"--lines={lines}"]
    arguments += ["--models", "kv-3", "--recipes", "several", "--seeds", "4"]
    STUDY.main(arguments)
    (made,) = [json.loads(text) for text in (lines / "several.jsonl").read_text().splitlines()]
    assert (made["model"], made["recipe"], made["seed"], made["processor_minutes"] > 0) == ("kv-3", "several", 4, True)
    kinds = [(row["reach"], row["protocol"], row["size"]) for row in made["rows"]]
    reaches = ("stretch", "logn")
    one_size = [("trained", "resize", 16), ("trained", "resize", 32), ("trained", "field", 16)]
    assert kinds == one_size + [(reach, protocol, 16) for reach in reaches for protocol in ("resize", "field")]
    STUDY.main(arguments)
    # A model that cannot be trained at several sizes gets no line, either.
    STUDY.main([argument.replace("kv-3", "relpos") for argument in arguments])
    assert len((lines / "several.jsonl").read_text().splitlines()) == 1


@pytest.mark.parametrize(
    ("how", "mode"), [("zero", "constant"), ("mean", "mean"), ("edge", "edge"), ("reflect", "symmetric")]
)
def test_continued_embedding(how, mode):
    """The embedding is continued as numpy.pad does, also beyond twice its side, around the trained grid."""
    learned = torch.randn(3, 2, 4)
    around = ((3, 4), (2, 2))
    padded = np.pad(learned.numpy(), (*around, (0, 0)), **({"mode": mode} if mode != "mean" else {"mode": "constant"}))
    if mode == "mean":
        outside = np.pad(np.zeros((3, 2, 1), bool), (*around, (0, 0)), constant_values=True)
        padded = np.where(outside, learned.mean((0, 1)).numpy(), padded)
    assert FIELD_LOSS.continued(how, learned, (10, 6)).numpy() == pytest.approx(padded)


def test_with_mirrored_places_a_field_of_copies_is_the_image():
    torch.manual_seed(0)
    ours = STUDY.MODELS["kv-2-learned-start-0.1"]
    net = timm.create_model(ours.name, img_size=32, **ours.arguments).double().eval()
    # Each patch has a single colour, so a mirrored patch equals the patch.
    colours, places = torch.rand(1, 3, 8, 8, dtype=torch.float64), FIELD_LOSS.mirrored(8, 16)
    copies = colours[:, :, places][..., places]
    image, field = (part.repeat_interleave(4, 2).repeat_interleave(4, 3) for part in (colours, copies))
    expected, before = net(image), net(field)
    for change in FIELD_LOSS.changes(64, 32)["reflect, offsets too"]:
        change(net)
    assert net(field).detach().numpy() == pytest.approx(expected.detach().numpy(), abs=1e-10)
    assert (before - expected).abs().max() > 1e-3
    assert FIELD_LOSS.mirrored(8, 12).tolist() == [1, 0, 0, 1, 2, 3, 4, 5, 6, 7, 7, 6]


def test_the_pages_in_the_documentation_are_those_of_the_lines():
    """The pages are made from the lines in the repository, so the tables are neither edited nor outdated."""
    lines, photographs = (LINES_OF.read(REPORT.SOURCE / name) for name in ("runs", "photographs"))
    assert REPORT.tables_page(lines, photographs) == (REPORT.SOURCE / "tables.md").read_text()
    page = (REPORT.SOURCE / "README.md").read_text()
    found = REPORT.study_questions.answers(lines, photographs)
    assert REPORT.filled(page, {name: answer.table for name, answer in found.items()}) == page
    assert all((REPORT.SOURCE / f"{name}.png").is_file() for name in found)


def test_the_text_has_the_figures_of_the_lines():
    """The sentences that claim most are written by hand; a new run may change their figures."""
    page, readme = (" ".join(file.read_text().split()) for file in (REPORT.SOURCE / "README.md", ROOT / "README.md"))
    lines, found = LINES_OF.read(REPORT.SOURCE / "runs"), LINES_OF.read(REPORT.SOURCE / "photographs")
    photographs = defaultdict(dict)
    for each in (each for each in found if (each["setting"], each["part"]) == ("imagenette", "scratch")):
        for row in each["rows"]:
            photographs[each["model"], *row["size"]][each["seed"]] = 100 * row["acc1"]

    def ahead(one, other):
        pairs = [(seeds, photographs[other, *size]) for (model, *size), seeds in photographs.items() if model == one]
        return [np.mean([ours[seed] - theirs[seed] for seed in ours.keys() & theirs.keys()]) for ours, theirs in pairs]

    lead, lookhere = ahead("kv-2-learned", "learned"), ahead("lookhere", "kv-2-learned")
    values = ahead("v-4-learned", "kv-4-learned")
    recipes = {name: LINES_OF.grouped(lines, name) for name in ("one", "long", "one, patches of 2 px")}
    names = (("one", LINES_OF.OURS), ("long", LINES_OF.OURS), ("one, patches of 2 px", "kv-2-learned"))
    at_32 = LINES_OF.at(32, "resize")
    small = [LINES_OF.difference(recipes[name][model], recipes[name]["learned"], at_32).mean for name, model in names]
    own = [*small, lead[2]]
    assert f"are {min(own):.1f} to {max(own):.1f} points better than it alone at the trained size" in readme
    assert f"on photographs {min(lead):.1f} to {max(lead):.1f} at other sizes" in readme
    assert f"`kv` 2 is {min(lead):.1f} to {max(lead):.1f} points at every size" in page
    assert f"LookHere is {min(lookhere):.1f} to {max(lookhere):.1f} points" in readme
    assert f"LookHere is {min(lookhere):.1f} to {max(lookhere):.1f} points above `kv` 2" in page
    assert f"on photographs {min(values):.1f} to {max(values):.1f} above it by size" in page
    groups = recipes["one"]
    late = LINES_OF.difference(groups["kv-3-start-0.1"], groups["kv-3"], at_32)
    assert f"from 0.02 `kv` 3 is {late.text()} points worse" in page
    k, b, kv = (
        LINES_OF.difference(groups[f"{terms}-7-start-0.1"], groups["none"], at_32).text() for terms in ("k", "b", "kv")
    )
    assert f"on keys alone are {k} points above no positions, a bias alone {b}, `kv` {kv} " in page
    rope = {
        size: LINES_OF.difference(
            groups[LINES_OF.OURS], groups["rope-mixed-learned-vit-start"], LINES_OF.at(size, "resize")
        )
        for size in (16, 40, 64)
    }
    assert f"{rope[16].text()} and {rope[64].text()} at 16 and 64 px on CIFAR-10" in page
    assert f"is {-rope[40].mean:.1f} ± {rope[40].error:.1f} ahead at 40 px" in page
