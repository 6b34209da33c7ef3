"""Training of models: parameter groups, dropout, initialisation, averages, copies."""

import copy
import math
import pickle
from functools import partial

import pytest
import timm
import torch
from timm.models import model_parameters
from timm.models.vision_transformer import VisionTransformer
from timm.optim import create_optimizer_v2
from timm.scheduler import CosineLRScheduler
from timm.utils import ModelEmaV3
from timm_versions import needs_timm
from torch import nn
from vits import DEFAULTS, SMALL, assert_same, bias_for, groups_of, images, small

import relvit
from relvit.models import param_groups


def tables_of(model):
    return {name: p for name, p in model.named_parameters() if ".position." in name}


@needs_timm("1.0.28")
def test_layer_decay_reaches_the_tables_of_each_block():
    model = small(rel_terms="qkvb", class_token=True, pos_embed="learn")
    assert model.no_weight_decay() == {"pos_embed", "cls_token", "reg_token", "dist_token", *tables_of(model)}
    for key, (scale, decay) in groups_of(model).items():
        if key.startswith("blocks."):
            # The scale halves per layer, from the head (1) down through three blocks to the stem.
            assert scale == 0.5 ** (3 - int(key.split(".")[1])), key
        elif key.startswith(("head", "fc_norm")):
            assert scale == 1, key
        else:
            assert scale == 0.5**4, key
        tabled = ".position." in key or key in ("cls_token", "reg_token", "pos_embed")
        assert decay == (0.0 if tabled or model.get_parameter(key).ndim == 1 else 0.05), key
    plain = VisionTransformer(**{**SMALL, "depth": 1})
    for coarse in (False, True):
        assert model.group_matcher(coarse) == plain.group_matcher(coarse)


@needs_timm("1.0.31")
@pytest.mark.parametrize("layer_decay", [None, 0.5])
def test_an_option_of_timms_optimiser_keeps_tables_from_muon(layer_decay):
    model = small(rel_terms="kv", pos_embed="learn")
    options = {"layer_decay": layer_decay, "fallback_no_weight_decay": True}
    groups = create_optimizer_v2(model, "muon", lr=0.01, weight_decay=0.05, **options).param_groups
    by_muon = {id(p) for group in groups if not group.get("use_fallback") for p in group["params"] if p.ndim > 1}
    names = {name for name, parameter in model.named_parameters() if id(parameter) in by_muon}
    weights = {name for name, parameter in model.named_parameters() if parameter.ndim > 1}
    assert names == weights - {*tables_of(model), "pos_embed"}


@pytest.mark.parametrize("layer_decay", [None, 0.5])
def test_relative_positions_have_a_rate_of_their_own_under_every_schedule(layer_decay):
    """As in a user's own training loop, timm makes the optimiser from `param_groups`."""
    model = small(rel_terms="kv", class_token=True)
    function = partial(param_groups, lr=0.01, layer_decay=layer_decay)
    optimizer = create_optimizer_v2(model, "adamw", lr=0.01, param_group_fn=function)
    groups, scales = optimizer.param_groups, groups_of(model)
    assert sum(len(group["params"]) for group in groups) == len(scales)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    expected = [0.01 * (10 if ".position." in name else 1) * (scales[name][0] if layer_decay else 1) for name in scales]

    def rates():
        found = {names[id(parameter)]: group["lr"] for group in groups for parameter in group["params"]}
        return [found[name] for name in scales]

    assert rates() == pytest.approx(expected)
    assert all(group["weight_decay"] == scales[names[id(p)]][1] for group in groups for p in group["params"])
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.25)
    assert rates() == pytest.approx([0.25 * rate for rate in expected])
    schedule = CosineLRScheduler(optimizer, t_initial=4)
    schedule.step(2)
    assert rates() == pytest.approx([0.5 * rate for rate in expected])


@pytest.mark.parametrize(
    "wrap",
    [partial(torch.compile, backend="eager"), nn.DataParallel, nn.Sequential],
    ids=["compiled", "parallel", "in"],
)
def test_layers_of_a_wrapped_model_have_the_rates_of_the_model(wrap):
    model = small(pos_embed="learn")
    options = {"layer_decay": 0.5, "weight_decay": 0.3}
    expected = param_groups(model, 0.01, no_weight_decay_list=["head.weight"], **options)
    wrapped = wrap(model)
    (head,) = (name for name, parameter in wrapped.named_parameters() if parameter is model.head.weight)
    assert param_groups(wrapped, 0.01, no_weight_decay_list=[head], **options) == expected
    assert len({group["lr"] for group in expected if "position_lr_scale" not in group}) == len(model.blocks) + 2


def test_a_module_without_layers_takes_no_layer_decay():
    detector = nn.ModuleDict({"backbone": small(), "boxes": nn.Linear(12, 4)})
    with pytest.raises(ValueError, match=r"layer_decay 0\.5 has no effect on ModuleDict, in which timm finds no"):
        param_groups(detector, 0.01, layer_decay=0.5)
    assert {group["lr"] for group in param_groups(detector, 0.01, 1, layer_decay=1)} == {0.01}


@pytest.mark.parametrize("layer_decay", [None, 0.5])
def test_names_without_decay_that_a_user_gives_join_those_of_the_model(layer_decay):
    model = small(pos_embed="learn")
    groups = param_groups(model, 0.01, layer_decay=layer_decay, no_weight_decay_list=["head.weight"])
    decays = {id(parameter): group["weight_decay"] for group in groups for parameter in group["params"]}
    for name in ("head.weight", "pos_embed", "blocks.0.attn.position.key_rows"):
        assert decays[id(model.get_parameter(name))] == 0, name
    assert decays[id(model.blocks[0].mlp.fc1.weight)] == 0.05


def test_parametrized_tables_have_no_decay_either():
    model = small(position="low-rank", pos_embed="learn")
    nn.utils.parametrizations.weight_norm(model, "pos_embed")
    nn.utils.parametrizations.weight_norm(model.blocks[0].attn.position, "query")
    nn.utils.parametrizations.orthogonal(model.blocks[1].attn.position, "key")
    nn.utils.parametrizations.weight_norm(model.blocks[0].attn.qkv)
    groups = param_groups(model, 0.01)
    decays = {id(parameter): group["weight_decay"] for group in groups for parameter in group["params"]}
    stored = {name: decays[id(p)] for name, p in model.named_parameters() if "parametrizations." in name}
    assert len(stored) == 7
    assert stored == {name: 0.05 if ".qkv." in name else 0.0 for name in stored}


def test_positions_that_do_not_learn_have_no_rate():
    for model in (small(position="slopes"), small().requires_grad_(False), timm.create_model("test_vit")):
        plain = param_groups(model, 0.01, position_lr_scale=1)
        assert len(plain) < 3
        assert param_groups(model, 0.01) == plain
        with pytest.raises(ValueError, match=f"position_lr_scale 10 has no effect on {type(model).__name__}, which"):
            param_groups(model, 0.01, position_lr_scale=10)


def shared_tables():
    small = {"embed_dim": 16, "depth": 2, "num_heads": 2, "img_size": 48}
    return relvit.retrofit(timm.create_model("vit_srelpos_small_patch16_224", **small))


@pytest.mark.parametrize(
    "make",
    [
        lambda: small(pos_embed="axial"),
        lambda: small("test_relvit_universal", halting="act"),
        shared_tables,
        lambda: relvit.restore(shared_tables()),
    ],
    ids=["axial", "halting", "shared tables", "restored"],
)
def test_timms_adaptive_clipping_leaves_out_the_classifier_alone(make):
    model = make()
    clipped = {id(parameter) for parameter in model_parameters(model, exclude_head=True)}
    left_out = {name for name, parameter in model.named_parameters() if id(parameter) not in clipped}
    assert left_out == {"head.weight", "head.bias"}


def test_dropouts_are_timms():
    rates = {"drop_rate": 0.3, "proj_drop_rate": 0.4, "pos_embed": "learn", "pos_drop_rate": 0.2, "class_token": True}
    model = small(position="slopes", **rates).double()
    plain = VisionTransformer(**{**SMALL, **DEFAULTS, "mlp_ratio": 3, **rates}).double()
    plain.load_state_dict(model.state_dict())
    x = images(16, 40, dtype=torch.float64)
    results = []
    for net, mask in ((model, None), (plain, bias_for(plain, x)), (model, None)):
        torch.manual_seed(4)
        results.append(net.train()(x, attn_mask=mask))
    assert_same(results[0], results[1], atol=1e-6)
    assert (model(x) - results[2]).abs().max() > 1e-3  # This forward pass has drawn other random numbers.
    assert_same(model.eval()(x), plain.eval()(x, attn_mask=bias_for(plain, x)), atol=1e-6)


def test_attention_dropout_and_drop_path_are_of_training():
    model = small(attn_drop_rate=0.5)
    x = images(16, 40)
    torch.testing.assert_close(model.eval()(x), small().eval()(x))
    assert (model.train()(x) - model(x)).abs().max() > 1e-3
    # The drop rates are 0 and 1, so in training the second block adds nothing.
    model = small(drop_path_rate=1.0, depth=2)
    first = model.eval().forward_intermediates(x, [0], output_fmt="NLC", intermediates_only=True)[0]
    assert_same(model.train().forward_intermediates(x, [1], output_fmt="NLC", intermediates_only=True)[0], first, 1e-6)
    assert (model.eval().forward_features(x) - first).abs().max() > 1e-3


def test_fix_init_scales_by_depth():
    made = []
    for fix_init in (False, True):
        torch.manual_seed(0)
        made.append(timm.create_model("test_relvit", fix_init=fix_init, **SMALL).blocks[2])
    for path in ("attn.proj.weight", "mlp.fc2.weight"):
        free, fixed = (block.get_parameter(path) for block in made)
        torch.testing.assert_close(fixed, free / math.sqrt(2 * 3))


@pytest.mark.parametrize("mode", ["", "jax_nlhb", "moco", "reset"])
def test_init_weights_in_every_mode(mode):
    options = {"embed_dim": 48, "num_classes": 20, "class_token": True, "pos_embed": "learn"}
    model = small(weight_init="skip" if mode == "reset" else mode, std=9.0, rel_terms="kvb", **options)
    assert model.weight_init_mode == mode
    model.init_weights()
    for name, table in tables_of(model).items():
        assert 0.05 < table.std() < 0.15, name
    if mode != "reset":
        plain = VisionTransformer(**{**SMALL, **DEFAULTS, "mlp_ratio": 3, **options}, weight_init=mode)
        for name, parameter in plain.named_parameters():
            one, other = model.get_parameter(name).float(), parameter.float()
            if one.numel() > 300 and other.std() > 0:
                assert 0.8 < one.std() / other.std() < 1.25, name
                assert (one.mean() - other.mean()).abs() < 0.4 * other.std(), name
            # PyTorch's default initialises this bias at random.
            elif name != "patch_embed.proj.bias":
                torch.testing.assert_close(one, other, rtol=0, atol=1e-4)
    if mode == "jax_nlhb":
        torch.testing.assert_close(model.head.bias, torch.full((20,), -math.log(20)))


MADE = [
    ("test_relvit", {"init_values": 0.5, "pos_embed": "axial"}),
    ("test_relvit", {"position": "slopes"}),
    ("test_relvit_universal", {"halting": "act"}),
    *(("test_relvit_aft", {"mixer": mixer}) for mixer in ("conv", "full", "local", "simple")),
]


def named_tensors(model):
    return [*model.named_parameters(), *model.named_buffers()]


@pytest.mark.parametrize(("kind", "options"), MADE, ids=str)
def test_made_without_memory_and_filled_later(kind, options):
    options = {**SMALL, "embed_dim": 64, "class_token": True, **options}
    torch.manual_seed(0)
    model, ready = timm.create_model(kind, device="meta", **options), timm.create_model(kind, **options).eval()
    assert {tensor.device.type for _, tensor in named_tensors(model)} == {"meta"}
    model.to_empty(device="cpu")
    own = (".position.", "axial.", "signals.", "halting.", *(f".attn.{name}" for name in ("u", "v", "kernel", "gamma")))
    for mode in ("", "reset"):
        with torch.no_grad():
            for _, tensor in named_tensors(model):
                tensor.fill_(torch.nan)
        torch.manual_seed(0)
        model.init_weights(mode)
        for (name, tensor), (_, other) in zip(named_tensors(model), named_tensors(ready), strict=True):
            assert tensor.isfinite().all(), name
            if any(part in name for part in own):
                one, other = (t.double().square().mean().sqrt() for t in (tensor, other))
                assert (one - other).abs() <= 0.5 * other, name
    ready.load_state_dict(model.state_dict())
    assert_same(model.eval()(images()), ready(images()), atol=0)


@pytest.mark.parametrize(("dtype", "position"), [(torch.float64, "slopes"), (torch.bfloat16, "tables")])
def test_made_in_a_dtype(dtype, position):
    torch.manual_seed(0)
    model = timm.create_model("test_relvit", dtype=dtype, position=position, **SMALL).eval()
    assert {p.dtype for p in model.parameters()} == {dtype}
    out = model(images(dtype=dtype))
    assert out.dtype == dtype
    wide = copy.deepcopy(model).double()
    assert_same(out.double(), wide(images(dtype=dtype).double()), atol=1e-12 if dtype == torch.float64 else 0.03)


def test_moving_averages_and_copies():
    model = small(position="slopes").eval()
    ema = ModelEmaV3(model, decay=0.75)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    assert_same(ema(images()), model(images()), atol=0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    ema.update(model)
    for name, parameter in ema.module.named_parameters():
        torch.testing.assert_close(parameter, before[name] + 0.25)
    assert ema.module.blocks[0].attn.position.slopes.tolist() == [1 / 16, 1 / 256]
    model = small(class_token=True).eval()
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert_same(other(images()), model(images()), atol=0)
        torch.nn.init.zeros_(other.blocks[0].attn.position.key_rows)
        assert (other(images()) - model(images())).abs().max() > 1e-5
