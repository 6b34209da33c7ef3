"""Parameter groups compared with lists of names, and optimisers that timm builds by name."""

import io

import pytest
import timm
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from small_training import NoiseImages, assert_close, build, train

import relvit
from relvit.app.training import make_optimizer, warmup_cosine
from relvit.app.training.metrics import current_lr
from relvit.models import RelVisionTransformer

SIZES = {"img_size": (8, 12), "patch_size": 4, "embed_dim": 8, "depth": 2, "num_heads": 2, "num_classes": 7}
TABLES = {f"attn.position.{side}_{axis}" for side in ("key", "value") for axis in ("rows", "cols")}
MATRICES = {"attn.qkv.weight", "attn.proj.weight", "mlp.fc1.weight", "mlp.fc2.weight"}
NORMS = {f"norm{i}.{kind}" for i in (1, 2) for kind in ("weight", "bias")}
SPARED = NORMS | TABLES | {name.replace("weight", "bias") for name in MATRICES}


@pytest.fixture
def net():
    torch.manual_seed(0)
    return timm.create_model("test_relvit", **SIZES, reg_tokens=1, pos_embed="learn")


def groups(net, optimizer):
    """Return the names of the parameters for each (learning rate, decay, fallback)."""
    names = {id(parameter): name for name, parameter in net.named_parameters()}
    found = {}
    for group in optimizer.param_groups:
        key = round(group["lr"], 9), group["weight_decay"], group.get("use_fallback", False)
        found.setdefault(key, set()).update(names[id(parameter)] for parameter in group["params"])
    assert sum(len(group["params"]) for group in optimizer.param_groups) == len(names)
    return found


def block(number, names):
    return {f"blocks.{number}.{name}" for name in names}


def test_without_layer_decay_there_are_two_groups(net):
    spared = {"reg_token", "pos_embed", "patch_embed.proj.bias", "fc_norm.weight", "fc_norm.bias", "head.bias"}
    decayed = {"patch_embed.proj.weight", "head.weight"} | block(0, MATRICES) | block(1, MATRICES)
    spared |= block(0, SPARED) | block(1, SPARED)
    optimizer = make_optimizer(net, "adamw", lr=0.01, weight_decay=0.3)
    assert groups(net, optimizer) == {(0.01, 0.0, False): spared, (0.01, 0.3, False): decayed}


def test_layer_decay_by_depth_with_tables_in_their_blocks(net):
    optimizer = make_optimizer(net, "adamw", lr=0.01, weight_decay=0.3, layer_decay=0.5)
    assert groups(net, optimizer) == {
        (0.00125, 0.0, False): {"reg_token", "pos_embed", "patch_embed.proj.bias"},
        (0.00125, 0.3, False): {"patch_embed.proj.weight"},
        (0.0025, 0.0, False): block(0, SPARED),
        (0.0025, 0.3, False): block(0, MATRICES),
        (0.005, 0.0, False): block(1, SPARED),
        (0.005, 0.3, False): block(1, MATRICES),
        (0.01, 0.0, False): {"fc_norm.weight", "fc_norm.bias", "head.bias"},
        (0.01, 0.3, False): {"head.weight"},
    }


def test_muon_leaves_tables_embeddings_and_classifier_to_its_fallback(net):
    found = groups(net, make_optimizer(net, "muon", lr=0.01, weight_decay=0.3))
    assert found[0.01, 0.3, False] == {"patch_embed.proj.weight"} | block(0, MATRICES) | block(1, MATRICES)
    assert found[0.01, 0.3, True] == {"head.weight"}
    tables = block(0, TABLES) | block(1, TABLES)
    assert found[0.01, 0.0, True] == {"reg_token", "pos_embed", "head.bias"} | tables


def test_muon_also_finds_the_classifier_of_a_model_built_by_its_class():
    net = RelVisionTransformer(**SIZES)
    assert not hasattr(net, "pretrained_cfg")
    assert groups(net, make_optimizer(net, "muon", lr=0.01, weight_decay=0.3))[0.01, 0.3, True] == {"head.weight"}


def test_retrofitted_tables_belong_to_their_blocks():
    vit = relvit.retrofit(timm.create_model("test_vit", num_classes=7), rel_terms="kv")
    found = groups(vit, make_optimizer(vit, "adamw", lr=1.0, weight_decay=0.3, layer_decay=0.5))
    for number in range(len(vit.blocks)):
        assert block(number, TABLES) <= found[0.5 ** (len(vit.blocks) - number), 0.0, False]


@pytest.mark.parametrize(
    ("opt", "kwargs", "expected"),
    [
        ("adamw", {"betas": [0.8, 0.9]}, "AdamW"),
        ("sgd", {"momentum": 0.5, "nesterov": False}, "SGD"),
        ("lamb", {"eps": 1e-5}, "Lamb"),
        ("lion", {}, "Lion"),
        ("muon", {"momentum": 0.9}, "Muon"),
    ],
)
def test_optimisers_by_name_learn_and_their_state_is_plain(net, opt, kwargs, expected):
    optimizer = make_optimizer(net, opt, lr=0.003, weight_decay=0.05, opt_kwargs=kwargs)
    assert type(optimizer).__name__ == expected
    for key, value in kwargs.items():
        assert optimizer.param_groups[0][key] == (tuple(value) if isinstance(value, list) else value)
    images, labels = torch.randn(7, 3, 8, 12), torch.arange(7)
    losses = []
    for _ in range(8):
        losses.append(torch.nn.functional.cross_entropy(net(images), labels))
        optimizer.zero_grad()
        losses[-1].backward()
        optimizer.step()
    assert losses[-1] < losses[0]
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    assert torch.load(file, weights_only=True)["state"]


@pytest.mark.parametrize("layer_decay", [None, 0.5])
def test_relative_positions_have_their_factor_on_the_rate_of_their_layer(net, layer_decay):
    optimizer = make_optimizer(net, "adamw", lr=0.01, weight_decay=0.3, layer_decay=layer_decay, position_lr_scale=10)
    found = groups(net, optimizer)
    for number in (0, 1):
        rate = 0.01 * (layer_decay or 1) ** (2 - number)
        assert block(number, TABLES) <= found[round(10 * rate, 9), 0.0, False]
        assert block(number, SPARED - TABLES) <= found[round(rate, 9), 0.0, False]
        assert block(number, MATRICES) <= found[round(rate, 9), 0.3, False]
    assert "head.weight" in found[0.01, 0.3, False]


def test_muon_has_the_factor_in_its_fallback(net):
    found = groups(net, make_optimizer(net, "muon", lr=0.01, weight_decay=0.3, position_lr_scale=10))
    assert found[0.1, 0.0, True] == block(0, TABLES) | block(1, TABLES)


@pytest.mark.parametrize("scale", [0.1, 10])
def test_groups_and_their_rates_at_each_step_of_a_training_and_of_one_resumed(scale, tmp_path, capsys):
    options = {"lr": 0.01, "min_lr": 0.001, "warmup_epochs": 0.5, "layer_decay": 0.5, "position_lr_scale": scale}
    module, resumed = (build(**options, freeze_epochs=1, ema_decay=0.9) for _ in range(2))
    rates, few = [], {"max_epochs": 2, "limit_val_batches": 0}
    names = {id(parameter): name for name, parameter in module.net.named_parameters()}
    step = module.optimizer_step

    def recording(*args, **kwargs):
        each = {names[id(p)]: group["lr"] for group in args[2].param_groups for p in group["params"]}
        rates.append((each, current_lr(module.trainer)))
        step(*args, **kwargs)

    module.optimizer_step = recording
    save = ModelCheckpoint(tmp_path, "{step}", save_top_k=-1, every_n_train_steps=3)
    train(module, NoiseImages(16), enable_checkpointing=True, callbacks=[save], **few)
    assert f"learning rate 0.01, of relative positions {0.01 * scale:g}, steps 8" in capsys.readouterr().out
    for at, (each, shown) in enumerate(rates):
        factor = warmup_cosine(at, total=8, warmup=2, floor=0.1)
        assert shown == pytest.approx(0.01 * factor)
        # The learning rate halves per layer: head, block, stem.
        for name, rate in each.items():
            layer = 1 if name.startswith(("head", "fc_norm")) else 0.5 if name.startswith("blocks") else 0.25
            assert rate == pytest.approx(0.01 * factor * layer * (scale if ".position." in name else 1)), name
    train(resumed, NoiseImages(16), ckpt_path=tmp_path / "step=6.ckpt", **few)
    assert_close(resumed.net.state_dict(), module.net.state_dict())
    assert_close(resumed.average.net.state_dict(), module.average.net.state_dict())
