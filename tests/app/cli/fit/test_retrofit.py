"""A retrofitted timm model on the command line: training, and evaluation of its checkpoint at other sizes."""

import numpy as np
import pytest
import timm
import torch
from command_line import QUIET, evaluate, only, rows

from relvit.app.cli import main
from relvit.app.evaluation import evaluate_size
from relvit.app.training import Checkpoint, load_classifier, read_checkpoint
from relvit.models import set_reach

SMALL = {"patch_size": 8, "embed_dim": 16, "depth": 2, "num_heads": 2}


@pytest.fixture(scope="module")
def checkpoint(photos, tmp_path_factory):
    """The checkpoint of a timm ViT, retrofitted with relative keys and values, after one epoch."""
    runs = tmp_path_factory.mktemp("runs")
    config = runs / "retrofit.yaml"
    config.write_text("model:\n  model: test_vit\n  retrofit:\n    rel_terms: kv\n    max_distance: [1, 2]\n")
    arguments = ["fit", f"--config={config}", "--data=ImageFolderData", f"--data.root={photos}", f"--runs={runs}"]
    arguments += [f"--model.model_kwargs.{name}={value}" for name, value in SMALL.items()]
    arguments += ["--data.img_size=16", "--data.batch_size=8", "--data.num_workers=0", "--trainer.max_epochs=1"]
    assert main([*arguments, *QUIET]) == 0
    (folder,) = (path for path in runs.iterdir() if path.is_dir())
    return folder / "checkpoints" / "best.ckpt"


def test_its_tables_are_trained_and_made_from_plain_values(checkpoint):
    assert read_checkpoint(checkpoint)["relvit"]["model"]["retrofit"] == {"rel_terms": "kv", "max_distance": [1, 2]}
    net = load_classifier(checkpoint).net
    position = net.blocks[0].attn.position
    assert position.max_distance == (1, 2)
    assert position.value_rows.detach().abs().max() > 0
    saved = torch.load(checkpoint, weights_only=True)["state_dict"]["net.blocks.0.attn.position.value_rows"]
    assert torch.equal(position.value_rows, saved)


def test_it_is_evaluated_at_sizes_that_the_original_does_not_take(checkpoint, photos, tmp_path, capsys):
    assert main(["validate", f"--ckpt_path={checkpoint}", "--data.img_size=[16,40]", *QUIET]) == 0
    assert "val/acc1" in capsys.readouterr().out
    table = tmp_path / "table.csv"
    sizes = ["--sizes=[16,[24,16]]", "--accelerator=cpu", f"--output={table}"]
    assert main(["resolutions", f"--ckpt_path={checkpoint}", *sizes]) == 0
    assert [(row["height"], row["width"]) for row in rows(table)] == [("16", "16"), ("24", "16")]
    evaluate("predict", checkpoint, tmp_path / "runs", photos / "test" / "cat")
    assert "6 predictions" in capsys.readouterr().out


@pytest.mark.slow
def test_resolutions_mirror_its_embedding_where_the_field_of_view_grows(checkpoint, tmp_path):
    """A model whose embedding NumPy has mirrored, from 2 x 2 to 4 x 6 patches, has the same loss."""
    content = torch.load(checkpoint, weights_only=True)
    # After one epoch positions hardly affect the outputs, so enlarge their weights.
    for name, tensor in content["state_dict"].items():
        tensor *= 30 if "pos_embed" in name or ".position." in name else 3 if "attn." in name else 1
    best, table = tmp_path / "best.ckpt", tmp_path / "table.csv"
    torch.save(content, best)
    options = [f"--output={table}", "--sizes=[16,[32,48]]", "--protocol=field", "--accelerator=cpu"]
    losses = {}
    for reach in ("trained", "mirror", "stretch-mirror"):
        assert main(["resolutions", str(best), f"--reach={reach}", *options]) == 0
        losses[reach] = [float(row["loss"]) for row in rows(table)]
    assert losses["trained"][0] == losses["mirror"][0] == losses["stretch-mirror"][0]
    assert abs(losses["trained"][1] - losses["mirror"][1]) > 1e-4

    classifier, data = load_classifier(best), Checkpoint.read(best).data_module()
    embedding = classifier.net.pos_embed.detach()
    patches = np.pad(embedding[0, 1:].unflatten(0, (2, 2)).numpy(), ((1, 1), (2, 2), (0, 0)), "symmetric")
    larger = torch.cat((embedding[:, :1], torch.from_numpy(patches).flatten(0, 1)[None]), dim=1)
    classifier.net.pos_embed, classifier.net.patch_embed.grid_size = torch.nn.Parameter(larger), (4, 6)
    for reach, tables in (("mirror", "trained"), ("stretch-mirror", "stretch")):
        set_reach(classifier.net, tables, 16)
        expected = evaluate_size(classifier, data, (32, 48), protocol="field")["loss"]
        assert losses[reach][1] == pytest.approx(expected, rel=1e-6)


def test_positions_that_a_model_brings(photos, tmp_path, capsys):
    """`fit`, `test` and `validate` with timm's weights for larger images, at a size that timm's model does not take."""
    kwargs = {**SMALL, "rel_pos_type": "bias", "class_token": True}
    donor = timm.create_model("test_vit_relpos", img_size=32, num_classes=3, **kwargs)
    torch.save(donor.state_dict(), tmp_path / "timm.pth")
    arguments = ["fit", "--model.model=test_vit_relpos", "--model.retrofit={}"]
    arguments += [f"--model.pretrained={tmp_path}/timm.pth"]
    arguments += ["--data=ImageFolderData", f"--data.root={photos}", f"--runs={tmp_path / 'runs'}"]
    arguments += [f"--model.model_kwargs.{name}={value}" for name, value in kwargs.items()]
    arguments += ["--data.img_size=16", "--data.batch_size=8", "--data.num_workers=0", "--trainer.max_epochs=1"]
    assert main([*arguments, *QUIET]) == 0
    best = only(tmp_path / "runs") / "checkpoints" / "best.ckpt"
    evaluate("test", best, tmp_path / "test")
    out = capsys.readouterr().out
    assert "test/acc1" in out
    assert "test_vit_relpos, retrofitted (" in out
    assert main(["validate", f"--ckpt_path={best}", "--data.img_size=[16,40]", *QUIET]) == 0
    position = load_classifier(best).net.blocks[0].attn.position
    # The table was cut from the donor's 7 x 7 offsets to the 3 x 3 offsets of this size, and then trained.
    theirs = donor.blocks[0].attn.rel_pos.relative_position_bias_table[:49].T.unflatten(1, (7, 7)).flip(1, 2)
    torch.testing.assert_close(position.bias_table, theirs[:, 2:5, 2:5], rtol=0, atol=5e-3)


def test_mistakes_are_named(checkpoint, photos, tmp_path, fails):
    had = "was trained with retrofit {'rel_terms': 'kv'"
    for option, message in {
        "--model.retrofit.rel_terms=k": f"{had}}}, not {{'rel_terms': 'k'}}",
        "--model.retrofit=null": f"{had}, 'max_distance': [1, 2]}}, not None",
        # The weight decay has no effect in a validation, so it must not differ from the checkpoint's.
        "--model.weight_decay=0.5": "was trained with weight_decay 0.05, not 0.5: drop that option",
    }.items():
        assert message in fails(["validate", f"--ckpt_path={checkpoint}", option, *QUIET])
    common = ["fit", "--model.model=test_vit", "--data=ImageFolderData", f"--data.root={photos}", f"--runs={tmp_path}"]
    for options, message in {
        ("--model.retrofit.rel_term=k",): "retrofit has no argument 'rel_term' (did you mean 'rel_terms'?)",
        ("--model.retrofit.rel_terms=x",): "rel_terms must be made of the letters",
        ("--model.model=test_resnet", "--model.retrofit.rel_terms=k"): "ResNet cannot be retrofitted",
    }.items():
        assert message in fails([*common, "--data.img_size=32", *options, *QUIET])
