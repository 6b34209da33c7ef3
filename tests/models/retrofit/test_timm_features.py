"""What timm offers with its models works with retrofitted ones: features, checkpointing, optimiser groups, graphs."""

import copy
import pickle

import pytest
import torch
from retrofit_cases import CASES, EVAS, NAFLEX, VITS, build, images, naflex_batch, retrofitted, tables
from timm.models import create_feature_extractor
from timm.models._features import FeatureGetterNet
from timm.optim import param_groups_layer_decay, param_groups_weight_decay

SIZES = [(24, 16), (16, 80), (136, 32), (64, 64)]


@pytest.mark.parametrize("case", CASES)
def test_checkpointing_changes_neither_outputs_nor_gradients(case):
    model = retrofitted(build(case), "qkvb").train()
    x = images(16, 40)
    runs = []
    for checkpointing in (False, True):
        model.set_grad_checkpointing(checkpointing)
        model.zero_grad()
        features = model.forward_features(x)
        features.square().sum().backward()
        runs.append((features, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}))
    (plain, grads), (again, other_grads) = runs
    torch.testing.assert_close(again, plain, rtol=0, atol=0)
    torch.testing.assert_close(other_grads, grads, rtol=0, atol=1e-10)
    assert set(tables(model)) < set(grads)


def test_blocks_are_run_twice_under_checkpointing():
    """As in timm: `checkpoint` forms each block again in backward."""
    for case in ("dinov2", "rope mixed", "naflex axial"):
        model, count = retrofitted(build(case)).train(), []
        model.blocks[0].attn.proj.register_forward_hook(lambda *_, count=count: count.append(1))
        model.set_grad_checkpointing()
        model(images()).sum().backward()
        assert len(count) == 2


@pytest.mark.parametrize("case", CASES)
def test_every_table_gets_a_gradient_from_the_start(case):
    model = retrofitted(build(case), "qkvb", trained=False, max_distance=1)
    # All tokens: where a class token alone is read, the last block's tables cannot matter, for it has no place.
    model.forward_features(images()).square().sum().backward()
    assert len(tables(model)) == 2 * 2 * 4
    assert all(table.grad.abs().sum() > 0 for table in tables(model).values())


@pytest.mark.parametrize("case", CASES)
def test_intermediates_are_the_features(case):
    model = retrofitted(build(case))
    x = images(16, 40)
    features, prefix = model.forward_features(x), model.num_prefix_tokens
    final, (first, last) = model.forward_intermediates(x, norm=True, return_prefix_tokens=prefix > 0)
    torch.testing.assert_close(final, features, rtol=0, atol=0)
    patches = last[0] if prefix else last
    assert patches.shape == (2, 24, 2, 5)
    torch.testing.assert_close(patches.flatten(2).transpose(1, 2), features[:, prefix:], rtol=0, atol=0)
    if prefix:
        torch.testing.assert_close(last[1], features[:, :prefix], rtol=0, atol=0)
        first = first[0]
    (alone,) = model.forward_intermediates(
        x, [0], norm=True, output_fmt="NLC", intermediates_only=True, stop_early=True
    )
    torch.testing.assert_close(alone, first.flatten(2).transpose(1, 2), rtol=0, atol=0)
    if case in VITS:
        torch.testing.assert_close(model.get_intermediate_layers(x, norm=True)[0], features[:, prefix:])
        as_dict = model.forward_intermediates(x, [0], norm=True, output_dict=True)
        torch.testing.assert_close(as_dict["image_intermediates"][0], first, rtol=0, atol=0)
    getter = FeatureGetterNet(copy.deepcopy(model), out_indices=[0], norm=True)
    torch.testing.assert_close(getter(x)[0], first, rtol=0, atol=0)
    assert model.prune_intermediate_layers([0]) == [0]
    assert len(model.blocks) == 1
    torch.testing.assert_close(model.forward_intermediates(x, norm=True)[1][0], first, rtol=0, atol=0)


def test_intermediates_of_a_padded_batch():
    original = build("naflex", embed_proj_type="linear")
    options = {"output_fmt": "NLC", "output_dict": True}
    want = original.forward_intermediates(naflex_batch(), **options)
    got = retrofitted(original, trained=False).forward_intermediates(naflex_batch(), **options)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-12)


@pytest.mark.parametrize("case", CASES)
def test_masks_and_heads_are_timms(case):
    original = build(case)
    model = retrofitted(original, trained=False)
    x, count = images(), original.num_prefix_tokens + 6
    mask = torch.randn(1, 1, count, count, dtype=torch.float64)
    want = original.forward_features(x, attn_mask=mask)
    torch.testing.assert_close(model.forward_features(x, attn_mask=mask), want, rtol=0, atol=1e-12)
    if case not in NAFLEX:
        causal = original.forward_features(x, is_causal=True)
        torch.testing.assert_close(model.forward_features(x, is_causal=True), causal, rtol=0, atol=1e-12)
    for net in (model, original):
        torch.manual_seed(0)
        net.reset_classifier(7)
    torch.testing.assert_close(model.double()(x), original.double()(x), rtol=0, atol=1e-12)


@pytest.mark.parametrize("case", {**VITS, **EVAS})
def test_set_input_size_is_timms(case):
    original = build(case)
    model = retrofitted(original, trained=False)
    for net in (model, original):
        net.set_input_size((16, 40))
    torch.testing.assert_close(model(images(16, 40)), original(images(16, 40)), rtol=0, atol=1e-12)
    assert model(images()).shape == (2, 5)


@pytest.mark.parametrize("case", CASES)
def test_tables_take_no_weight_decay_and_the_rate_of_their_block(case):
    model = retrofitted(build(case))
    skip = model.no_weight_decay()
    assert set(tables(model)) < skip
    groups = param_groups_weight_decay(model, no_weight_decay_list=skip)
    assert {id(p) for p in tables(model).values()} <= {id(p) for p in groups[0]["params"]}
    assert groups[0]["weight_decay"] == 0
    rate = {
        id(p): group["lr_scale"]
        for group in param_groups_layer_decay(model, no_weight_decay_list=skip, layer_decay=0.5)
        for p in group["params"]
    }
    for block in model.blocks:
        (own,) = {rate[id(p)] for p in block.attn.position.parameters()}
        assert own == rate[id(block.attn.proj.weight)]
    assert rate[id(model.blocks[0].attn.position.key_rows)] < rate[id(model.blocks[1].attn.position.key_rows)]


@pytest.mark.parametrize("case", CASES)
def test_weights_go_back_and_forth(case):
    original = build(case)
    model = retrofitted(original)
    x = images(8, 40)
    state = model.state_dict()
    assert {key for key in state if ".position." not in key} == set(original.state_dict())
    assert "blocks.1.attn.position.value_cols" in state
    fresh = retrofitted(build(case), trained=False)
    for parameter in fresh.parameters():
        torch.nn.init.zeros_(parameter)
    fresh.load_state_dict(state)
    torch.testing.assert_close(fresh(x), model(x), rtol=0, atol=0)
    missing, unexpected = model.load_state_dict(original.state_dict(), strict=False)
    assert set(missing) == set(tables(model))
    assert not unexpected
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        torch.testing.assert_close(copied(x), model(x), rtol=0, atol=0)


GRAPHS = ["dinov2", "siglip", "deit distilled", "eva", "eva02", "rope axial", "rope mixed"]


def single(case, **kwargs):
    return retrofitted(build(case, **kwargs), "qkvb", max_distance=2).float()


@pytest.mark.parametrize("case", ["dinov2", "dinov3"])
def test_compiled_without_break_into_one_graph_for_other_sizes(case):
    model, graphs = single(case, depth=1), []

    def count(graph, _example):
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend=count)
    with torch.no_grad():
        # The size that the embeddings were made for needs no interpolation, and so a graph of its own.
        for size in [*SIZES[1:], SIZES[0]]:
            x = images(*size).float()
            torch.testing.assert_close(compiled(x), model(x), rtol=0, atol=1e-5)
    assert len(graphs) <= 2


def test_compiled_training_step_has_the_gradients_of_the_plain_one():
    model = single("rope axial", depth=1)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend="aot_eager")
    grads = [
        torch.autograd.grad(net(images(16, 40).float()).square().sum(), list(tables(model).values()))
        for net in (model, compiled)
    ]
    for expected, grad in zip(*grads, strict=True):
        torch.testing.assert_close(grad, expected, rtol=1e-4, atol=1e-4)


# timm's own DINOv3 cannot be exported for all sizes either.
@pytest.mark.parametrize("case", GRAPHS)
def test_exported_once_for_all_sizes(case):
    model = single(case)
    height, width = (8 * torch.export.Dim(name, min=2, max=64) for name in ("height", "width"))
    sizes = ({2: height, 3: width},)
    exported = torch.export.export(model, (images(32, 40).float(),), dynamic_shapes=sizes).module()
    for size in SIZES:
        x = images(*size).float()
        torch.testing.assert_close(exported(x), model(x), rtol=0, atol=1e-4)


# timm's own distilled model cannot be traced with dynamic sizes either.
@pytest.mark.parametrize("case", [case for case in GRAPHS if case != "deit distilled"] + ["dinov3", "grouped"])
def test_symbolic_tracing_for_feature_extraction(case):
    model = single(case)
    traced = create_feature_extractor(model, ["norm"])
    x = images().float()
    torch.testing.assert_close(traced(x)["norm"], model.forward_features(x), rtol=0, atol=1e-6)


def test_training_tells_apart_what_the_original_cannot():
    """Without absolute positions a pooled model gives the same for an image whose columns of patches are swapped."""
    original = build("siglip", pos_embed="none")
    model = retrofitted(original, trained=False)
    x = images()
    swapped = torch.cat(x.split(8, dim=3)[::-1], dim=3)
    torch.testing.assert_close(model(x), model(swapped), rtol=0, atol=1e-10)
    optimizer = torch.optim.Adam(tables(model).values(), lr=0.05)
    for _ in range(5):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(torch.cat((model(x), model(swapped))), torch.tensor([0, 0, 1, 1])).backward()
        optimizer.step()
    assert (model(x) - model(swapped)).abs().max() > 0.1
