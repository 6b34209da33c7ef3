"""`relvit publish`: the model card has results, sizes, the recipe and code that runs, and names what is missing."""

import contextlib
import io
import json
import os
import shlex
import shutil
from types import SimpleNamespace

import pytest
import torch
import yaml

import relvit
from relvit.app.cli import main
from relvit.app.evaluation.deploy import publish_model
from relvit.app.training import average_checkpoints


def published(*arguments):
    """Publish a model, and return the lines of the card below 'The model card lacks:'."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert main(["publish", *map(str, arguments)]) == 0
    return out.getvalue().partition("The model card lacks:\n")[2].splitlines()


def block(text, language):
    """Return the first code block of a card."""
    return text.partition(f"```{language}\n")[2].partition("```")[0]


@pytest.fixture(scope="module")
def card(run, photos, tmp_path_factory):
    """The card of a run with a table of sizes, and the card of a calibrated checkpoint outside of a run."""
    place = tmp_path_factory.mktemp("card")
    shutil.copytree(run, place / "run")
    best = place / "run" / "checkpoints" / "best.ckpt"
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.chdir(place):
        sizes = ["--sizes", "16", "24", f"--root={photos}", "--output=run"]
        assert main(["resolutions", str(best), *sizes]) == 0
        assert main(["publish", str(best), "--to", "owls"]) == 0
    content = torch.load(best, weights_only=True)
    content["relvit"]["temperature"] = 0.4321
    content["relvit"]["data"]["init_args"] |= {"cache": True, "crop_pct": 0.8}
    torch.save(content, place / "other.ckpt")
    shutil.copy(photos / "test" / "owl" / "0.jpg", place / "photo.jpg")
    return SimpleNamespace(
        place=place,
        best=best,
        out=out.getvalue(),
        text=(place / "owls" / "README.md").read_text(),
        summary=json.loads((place / "run" / "summary.json").read_text()),
    )


@pytest.fixture(autouse=True)
def beside_the_card(card, monkeypatch):
    monkeypatch.chdir(card.place)


def test_the_command_says_how_to_load_the_folder_and_what_the_card_lacks(card):
    assert "timm.create_model('local-dir:owls', pretrained=True)" in card.out
    assert card.out.endswith(
        "The model card lacks:\n  the licence of the weights: publish with --license NAME, such as apache-2.0\n"
    )


def test_all_files_are_for_the_same_users(card):
    assert len({path.stat().st_mode for path in (card.place / "owls").iterdir()}) == 1


def test_the_results_of_the_run_with_their_standard_errors(card, photos):
    summary = card.summary
    assert f"- test/acc1: {summary['test/acc1']:.4f} ± {summary['test/acc1_se']:.4f}\n" in card.text
    assert "_se" not in card.text
    assert f"- val/images: {len(list((photos / 'val').rglob('*.jpg')))}" in card.text


def test_the_folder_of_a_run_stands_for_its_best_checkpoint(card):
    publish_model("run", "from_folder")
    assert (card.place / "from_folder" / "README.md").read_text() == card.text.replace("owls", "from_folder")


def test_the_table_of_sizes(card):
    header, _, *lines = card.text.partition("by image size\n\n")[2].splitlines()[:4]
    assert header == "| size | protocol | reach | split | images | accuracy | calibration error | MACs |"
    rows = json.loads((card.place / "run" / "resolutions.json").read_text())
    for line, size, row in zip(lines, (16, 24), rows, strict=True):
        figures = f"{row['acc1']:.4f} ± {row['acc1_se']:.4f} | {row['calibration_error']:.4f}"
        assert line.startswith(f"| {size} x {size} | crop | trained | val | 18 | {figures} |")


def test_a_licence_that_is_not_given_is_said_to_be_unknown(card):
    assert "license: unknown" in card.text
    assert "**Licence:** not given" in card.text


def test_nothing_of_this_machine(card, photos):
    assert str(card.place) not in card.text
    assert str(photos) not in card.text


def test_the_recipe_has_what_was_not_default_and_trains(card, photos, tmp_path):
    (tmp_path / "recipe.yaml").write_text(block(card.text, "yaml"))
    recipe = yaml.safe_load((tmp_path / "recipe.yaml").read_text())
    assert recipe["model"]["lr"] == 5e-3
    assert recipe["data"]["init_args"] == {"img_size": [16, 16], "batch_size": 8}
    assert recipe["trainer"] == {"max_epochs": 4}
    options = [f"--data.root={photos}", "--trainer.fast_dev_run=true", "--data.num_workers=0"]
    assert main(["fit", f"--config={tmp_path}/recipe.yaml", *options, "--trainer.accelerator=cpu"]) == 0


@pytest.mark.parametrize("name", ["run/checkpoints/best.ckpt", "other.ckpt"])
def test_the_code_of_the_card_predicts_as_relvit_does(card, name, tmp_path, monkeypatch, capsys):
    published(name, f"--to={tmp_path / 'owls'}")
    text = (tmp_path / "owls" / "README.md").read_text()
    shutil.copy("photo.jpg", tmp_path)
    monkeypatch.chdir(tmp_path)
    capsys.readouterr()
    exec(block(text, "python"), {})
    found, probability = capsys.readouterr().out.split()
    expected = relvit.load(card.place / name).predict("photo.jpg")
    assert (found, float(probability)) == (expected.name, pytest.approx(expected.probability, abs=1e-6))


def test_the_temperature_is_published_and_changes_probabilities(card, tmp_path):
    published("other.ckpt", f"--to={tmp_path / 'owls'}")
    assert json.loads((tmp_path / "owls" / "config.json").read_text())["relvit"]["temperature"] == 0.4321
    calibrated, plain = (relvit.load(name).predict("photo.jpg").probability for name in ("other.ckpt", card.best))
    assert calibrated > plain + 1e-3


def test_of_a_calibrated_checkpoint_accuracies_stay_and_losses_do_not(card, tmp_path):
    calibrated = shutil.copy("other.ckpt", card.best.with_name("best_calibrated.ckpt"))
    published(calibrated, f"--to={tmp_path / 'owls'}")
    text = (tmp_path / "owls" / "README.md").read_text()
    recipe = yaml.safe_load(block(text, "yaml"))
    assert recipe["data"]["init_args"] == {"img_size": [16, 16], "crop_pct": 0.8, "cache": True, "batch_size": 8}
    assert f"- test/acc1: {card.summary['test/acc1']:.4f}" in text
    assert "test/loss" not in text


def test_a_checkpoint_outside_its_run_replaces_the_folder_without_the_results_of_another(card, tmp_path):
    published(card.best, f"--to={tmp_path / 'owls'}")
    licence, results, curve = published("other.ckpt", f"--to={tmp_path / 'owls'}")
    assert licence.startswith("  the licence of the weights: ")
    assert results.startswith("  results: publish best.ckpt in the folder of its run, ")
    remedy = "relvit resolutions other.ckpt --sizes SIZE ... --output curve.json, then publish with --curve curve.json"
    assert curve == f"  accuracy by image size: {remedy}"
    text = (tmp_path / "owls" / "README.md").read_text()
    assert "by image size" not in text
    assert "**Results:** not given" in text


def test_after_the_training_went_on_older_results_are_left_out(card, tmp_path):
    """A training that is resumed replaces best.ckpt, and writes its summary only at its end."""
    run = shutil.copytree(card.place / "run", tmp_path / "run")
    best = run / "checkpoints" / "best.ckpt"
    content = torch.load(best, weights_only=True)
    content["epoch"] += 1
    torch.save(content, best)
    rows = json.loads((run / "resolutions.json").read_text())
    (run / "resolutions.json").write_text(json.dumps([row | {"checkpoint": str(best)} for row in rows]))
    now = best.stat().st_mtime
    os.utime(run / "resolutions.json", (now, now - 1))
    _, results, curve = published(best, f"--to={tmp_path / 'owls'}")
    assert results.startswith("  results: ")
    assert curve.startswith("  accuracy by image size: ")
    text = (tmp_path / "owls" / "README.md").read_text()
    assert "**Results:** not given" in text
    assert "by image size" not in text
    os.utime(run / "resolutions.json", (now, now))
    (run / "summary.json").unlink()
    assert len(published(best, f"--to={tmp_path / 'owls'}")) == 2


def test_a_damaged_summary_is_named(card, tmp_path, fails):
    run = shutil.copytree(card.place / "run", tmp_path / "run")
    (run / "summary.json").write_text('{"val/acc1": ')
    message = fails(["publish", run, f"--to={tmp_path / 'owls'}"])
    assert "run/summary.json is damaged (Expecting value" in message
    assert not (tmp_path / "owls").exists()


def test_the_folder_of_a_run_lacks_nothing_that_its_best_checkpoint_has(card, tmp_path):
    shutil.copy("run/resolutions.json", tmp_path / "curve.json")
    for given in ([], [f"--curve={tmp_path / 'curve.json'}"]):
        assert published("run", f"--to={tmp_path / 'owls'}", "--license=mit", *given) == []


def test_a_folder_may_be_named_as_timm_names_it(card, tmp_path):
    assert publish_model("other.ckpt", f"local-dir:{tmp_path / 'a'}") == f"local-dir:{tmp_path / 'a'}"
    assert publish_model("other.ckpt", tmp_path / "b") == f"local-dir:{tmp_path / 'b'}"
    assert {"a", "b"} == {path.name for path in tmp_path.iterdir()}


def test_after_a_training_in_python_the_recipe_has_the_options_of_the_classifier_alone(card, tmp_path):
    """The checkpoint does not hold the options of the Trainer, so the card must not say that they are the defaults."""
    content = torch.load("other.ckpt", weights_only=True)
    content["relvit"]["fit"] = {}
    content["relvit"]["model"]["pretrained"] = str(tmp_path / "vit.safetensors")
    torch.save(content, tmp_path / "own.ckpt")
    published(tmp_path / "own.ckpt", f"--to={tmp_path / 'owls'}")
    text = (tmp_path / "owls" / "README.md").read_text()
    recipe = yaml.safe_load(block(text, "yaml"))
    assert (recipe["lr"], recipe["pretrained"]) == (5e-3, "vit.safetensors")
    assert not {"trainer", "seed_everything", "data"} & recipe.keys()
    assert "those of the Trainer are not known" in text
    assert "all others" not in text


def test_an_average_names_the_weights_of_its_start_and_no_recipe_of_one_training(card, tmp_path):
    """Its checkpoint does not hold the options of the trainings, so they must not be said to be the defaults."""
    content = torch.load("other.ckpt", weights_only=True)
    del content["relvit"]["temperature"]
    content["relvit"]["model"]["pretrained"] = str(tmp_path / "vit.safetensors")
    for name in "ab":
        torch.save(content, tmp_path / f"{name}.ckpt")
    average_checkpoints([tmp_path / "a.ckpt", tmp_path / "b.ckpt"], tmp_path / "mean.ckpt")
    published(tmp_path / "mean.ckpt", f"--to={tmp_path / 'owls'}")
    text = (tmp_path / "owls" / "README.md").read_text()
    assert "**Weights:** mean of the weights of 2 checkpoints\n" in text
    assert "the training started from `vit.safetensors`, whose licence applies as well" in text
    assert "Recipe" not in text


def test_figures_of_another_checkpoint_are_refused(tmp_path, fails):
    message = fails(["publish", "other.ckpt", f"--to={tmp_path / 'owls'}", "--curve=run/resolutions.json"])
    assert "run/resolutions.json has no results of other.ckpt" in message
    message = fails(["publish", "other.ckpt", f"--to={tmp_path / 'owls'}", "--curve=run"])
    assert "run is a folder: give the file that relvit resolutions --output FILE.json wrote" in message
    message = fails(["publish", "other.ckpt", f"--to={tmp_path / 'owls'}", "--curve=run/curve.json"])
    assert "no file run/curve.json: give the one that relvit resolutions --output FILE.json wrote" in message


def test_another_json_file_is_replaced_as_the_message_says(photos, tmp_path, fails):
    given, file = ["publish", "other.ckpt", f"--to={tmp_path / 'owls'}"], tmp_path / "odd.json"
    for odd in ("[1, 2]", '[{"checkpoint": "other.ckpt"}]'):
        file.write_text(odd)
        message = fails([*given, f"--curve={file}"])
        assert "(it is not a list of rows with a checkpoint and size): " in message
    command = shlex.split(message.split("write it again by relvit ")[1])
    assert main([*(word.replace("SIZE", "16") for word in command if word != "..."), f"--root={photos}"]) == 0
    published(*given[1:], f"--curve={file}")


def test_the_remedies_leave_nothing_that_the_card_lacks(card, photos, tmp_path):
    assert main(["resolutions", "other.ckpt", "--sizes=16", f"--root={photos}", f"--output={tmp_path}/curve.json"]) == 0
    given = [f"--to={tmp_path / 'owls'}", "--license=mit"]
    (results,) = published("other.ckpt", f"--curve={tmp_path}/curve.json", *given)
    assert results.startswith("  results: ")
    assert published(card.best, *given) == []
