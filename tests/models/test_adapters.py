"""LoRA by PEFT: an adapted model computes with W + scale B A in place of W, and tables can be trained."""

import copy

import pytest
import torch
from own_positions import MVITS, mvit
from retrofit_cases import build, images, retrofitted
from torch import nn
from vits import FAMILIES, small

import relvit
from relvit.families.transformer_xl import set_bands
from relvit.models import set_reach

peft = pytest.importorskip("peft", reason="pip install 'relvit[peft]' brings peft")
pytestmark = pytest.mark.elsewhere

RELVIT = {
    "tables": {"rel_terms": "qkvb"},
    "class token": {"class_token": True, "reg_tokens": 1, "prefix_bias": True},
    "xl": {"position": "xl"},
    "network": {"position": "cpb"},
    "of tokens": {"position": "pape"},
    "reversible": {"reversible": True},
}
RETROFITTED = ("qk_norm", "eva02", "grouped", "naflex", "relpos", "relpos mlp", "beit", "sam", "swinv2")


def model_of(case):
    if case in RELVIT:
        return small(**RELVIT[case], std=0.2).double().eval()
    if case in FAMILIES:
        return small(case, std=0.2).double().eval()
    return retrofitted(build(case))


@pytest.mark.parametrize("case", [*RELVIT, *FAMILIES, *RETROFITTED])
def test_adapted_models(case):
    model = model_of(case)
    tables = {name.rpartition(".")[0] for name, _ in model.named_parameters() if ".position." in name}
    tables = {name.partition(".position")[0] + ".position" for name in tables}
    tables |= {name for name, _ in model.named_modules() if name.endswith(".prefix_bias")}
    linear = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and "blocks." in name and ".position." not in name
    ]
    plain = copy.deepcopy(model)
    adapted = peft.get_peft_model(
        model, peft.LoraConfig(r=2, lora_alpha=6, target_modules=linear, modules_to_save=[*tables, "head"])
    ).eval()
    torch.manual_seed(2)
    for parameter in adapted.parameters():
        if parameter.requires_grad:
            nn.init.normal_(parameter, std=0.1)

    # Add the update to the weights of the plain model.
    parts = dict(adapted.base_model.model.named_modules())
    with torch.no_grad():
        for name in linear:
            lora = parts[name]
            product = lora.lora_B["default"].weight @ lora.lora_A["default"].weight
            plain.get_submodule(name).weight += 3 * product
        for name in (*tables, "head"):
            plain.get_submodule(name).load_state_dict(parts[name].modules_to_save["default"].state_dict())
    height, width = (24, 40) if "swin" in case else (40, 56) if "sam" in case else (24, 16)
    x = images(height, width)
    expected = plain(x)
    torch.testing.assert_close(adapted(x), expected, rtol=0, atol=1e-10)

    adapted(x).square().sum().backward()
    expected.square().sum().backward()
    for name in tables:
        ours = dict(parts[name].modules_to_save["default"].named_parameters())
        for leaf, parameter in plain.get_submodule(name).named_parameters():
            torch.testing.assert_close(ours[leaf].grad, parameter.grad, rtol=0, atol=1e-8, msg=f"{name}.{leaf}")
    without = [
        name for name, parameter in adapted.named_parameters() if parameter.requires_grad and parameter.grad is None
    ]
    assert not [name for name in without if "lora_" in name], without

    merged = adapted.merge_and_unload()
    torch.testing.assert_close(merged(x), expected, rtol=0, atol=1e-10)
    assert merged.state_dict().keys() == plain.state_dict().keys()


@pytest.mark.parametrize("case", ["tables", "dinov2", "beit", "sam", "swinv2", *MVITS])
def test_an_adapter_of_the_convolution_that_embeds_patches(case):
    model = relvit.retrofit(mvit(case)) if case in MVITS else model_of(case)
    sizes = {"sam": (40, 56), "swinv2": (24, 40), **dict.fromkeys(MVITS, (64, 64))}
    x = images(*sizes.get(case, (24, 16)))
    before = model(x)
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["qkv", "proj"])).eval()
    assert type(adapted.base_model.model.patch_embed.proj).__module__.startswith("peft.")
    for parameter in adapted.parameters():
        if parameter.requires_grad:
            nn.init.normal_(parameter, std=0.1)
    changed = adapted(x)
    assert (changed - before).abs().max() > 1e-3
    torch.testing.assert_close(adapted.merge_and_unload()(x), changed, rtol=0, atol=1e-10)


@pytest.mark.parametrize("reach", ["stretch", "bands", "mirror"])
@pytest.mark.parametrize("inner", [False, True])
def test_a_reach_of_an_adapted_model_is_that_of_the_merged_one(reach, inner):
    options = {"pos_embed": "learn"} if reach == "mirror" else {}
    model, x = small(**options).double().eval(), images(40, 48)
    config = peft.LoraConfig(r=2, target_modules=["attn.qkv"], modules_to_save=["position", "head"])
    adapted = peft.get_peft_model(model, config).eval()
    before = adapted(x)
    set_reach(adapted.base_model.model if inner else adapted, reach)
    found = adapted(x)
    assert (found - before).abs().max() > 1e-4
    merged = adapted.merge_and_unload()
    torch.testing.assert_close(merged(x), found, rtol=0, atol=1e-10)
    torch.testing.assert_close(set_reach(merged, "trained")(x), before, rtol=0, atol=1e-10)
    torch.testing.assert_close(set_reach(merged, reach)(x), found, rtol=0, atol=1e-10)


def test_bands_of_an_adapted_model_are_those_of_the_merged_one():
    adapted = peft.get_peft_model(small().double().eval(), peft.LoraConfig(r=2, target_modules=["attn.qkv"])).eval()
    x = images(40, 48)
    before, found = adapted(x), set_bands(adapted, 2, 1)(x)
    assert (found - before).abs().max() > 1e-4
    merged = adapted.merge_and_unload()
    torch.testing.assert_close(merged(x), found, rtol=0, atol=1e-10)
    torch.testing.assert_close(set_bands(merged, None)(x), before, rtol=0, atol=1e-10)
