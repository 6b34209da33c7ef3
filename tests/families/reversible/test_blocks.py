"""Reversible blocks: gradients equal autograd's, random numbers, autocast, frozen parts, memory, compilation."""

import copy
import importlib

import pytest
import timm
import torch
from packaging.version import Version
from timm.models import create_feature_extractor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from vits import assert_same, images, small

from relvit.families.reversible import reversible_blocks
from relvit.ops import Grid
from relvit.utils.memory import allocations

X = images(16, 40, dtype=torch.float64)


def plain_blocks(blocks, x, grid, attn_mask=None, is_causal=False, taken=()):
    """Compute the blocks by the formula from the parts of timm's block; autograd keeps all tensors."""
    first = second = x
    means = []
    for block in blocks:
        first = first + block.drop_path1(block.ls1(block.attn(block.norm1(second), grid, attn_mask, is_causal)))
        second = second + block.drop_path2(block.ls2(block.mlp(block.norm2(first))))
        means.append((first + second) / 2)
    return means[-1], [mean for number, mean in enumerate(means) if number in taken]


@pytest.fixture
def kept(monkeypatch):
    """Return a function that runs another function without recomputation: autograd keeps all tensors."""

    def run(function):
        with monkeypatch.context() as patch:
            patch.setattr("relvit.families.reversible.two_streams.reversible_blocks", plain_blocks)
            return function()

    return run


def results(model, x=X, seed=3, loss=lambda out: out.square().sum()):
    """Return the output, and the gradients of all tensors that require one."""
    torch.manual_seed(seed)
    out = model(x)
    wanted = [p for p in (x, *model.parameters()) if p.requires_grad]
    return [out, *torch.autograd.grad(loss(out), wanted, allow_unused=True), torch.rand(3)]


def build(name="test_relvit", **options):
    return small(name, **{"reversible": True, **options}).double().train()


MODELS = [
    {"rel_terms": "qkvb", "class_token": True, "reg_tokens": 2, "init_values": 0.5, "qk_norm": True},
    {"drop_path_rate": 0.4, "proj_drop_rate": 0.2, "attn_drop_rate": 0.2, "max_distance": (1, 2)},
    {"position": "slopes", "patch_drop_rate": 0.5, "pos_embed": "axial", "mlp_chunk": 3},
    {"layout": "joint", "mlp_layer": timm.layers.SwiGLU, "norm_layer": "rmsnorm"},
    {"name": "test_relvit_aft", "drop_path_rate": 0.4},
    {"name": "test_relvit_aft", "mixer": "full", "kernel_size": None, "proj_drop_rate": 0.2},
]


@pytest.mark.parametrize("options", MODELS, ids=str)
def test_gradients_are_those_of_plain_autograd(options, kept):
    model, x = build(**options), X.clone().requires_grad_()
    got, expected = results(model, x), kept(lambda: results(model, x))
    assert_same(got, expected, atol=1e-9)
    # Stochastic depth drops some blocks for all samples, whose parameters have zero gradients.
    assert sum(bool(grad.abs().max() > 0) for grad in got[1:-1]) > 0.6 * len(got)
    # A plain model has the same names in its state dict, but its outputs differ.
    plain = build(**{**options, "reversible": False})
    plain.load_state_dict(model.state_dict())
    assert (plain.eval()(X) - model.eval()(X)).abs().max() > 1e-6


def test_masks_get_gradients(kept):
    model, tokens = build(depth=2), torch.randn(2, 10, 12, dtype=torch.float64)
    mask = torch.randn(1, 2, 10, 10, dtype=torch.float64).requires_grad_()
    for causal in (False, True):
        found = []
        for run in (reversible_blocks, plain_blocks):
            given = (None, True) if causal else (mask.sin(), False)
            out, (inner,) = run(model.blocks, tokens, Grid(2, 5), *given, taken=(0,))
            loss = out.square().sum() + inner.sin().sum()
            wanted = [*model.blocks.parameters(), *[mask][causal:]]
            found.append([out, inner, *torch.autograd.grad(loss, wanted)])
        assert_same(*found, atol=1e-9)


@pytest.mark.parametrize("train_only", ["blocks.1", "head", "blocks.0.mlp", "blocks.2.attn", "patch_embed", "norm1"])
def test_frozen_parts(train_only, kept):
    model = build()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(train_only in name)
    got = results(model)
    assert_same(got, kept(lambda: results(model)), atol=1e-9)


def test_shared_blocks_accumulation_and_several_backwards(kept):
    model = build()
    model.blocks[2] = model.blocks[0]

    def twice():
        model.zero_grad()
        for x in (X, X.flip(0) * 2):
            out = model(x).square().sum()
            out.backward(retain_graph=True)
        out.backward()
        return [parameter.grad for parameter in model.parameters()]

    assert_same(twice(), kept(twice), atol=1e-9)


def test_intermediates(kept):
    model = build(class_token=True)

    def run():
        torch.manual_seed(0)
        out, taken = model.forward_intermediates(X, [0, 1], norm=True)
        loss = sum(map(torch.sum, map(torch.sin, (out, *taken))))
        return [out, *taken, *torch.autograd.grad(loss, [*model.parameters()], allow_unused=True)]

    assert_same(run(), kept(run), atol=1e-9)
    x = X.clone().requires_grad_()
    first = lambda: torch.autograd.grad(model.forward_intermediates(x, [0])[1][0].sin().sum(), x)  # noqa: E731
    assert_same(first(), kept(first), atol=1e-9)


@pytest.mark.parametrize("where", ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(
    not torch.cuda.is_available(), reason="no GPU"))])  # fmt: skip
@pytest.mark.parametrize("backward_inside", [False, True])
def test_autocast_is_entered_again_and_streams_stay_single(where, backward_inside, kept):
    model = small("test_relvit_rev", depth=12, init_values=0.3, proj_drop_rate=0.1).train().to(where)
    x = images(16, 40).to(where)

    def run():
        torch.manual_seed(3)
        with torch.autocast(where, dtype=torch.bfloat16):
            features = model.forward_features(x)
            out = model.forward_head(features)
            if backward_inside:
                out.square().sum().backward()
        if not backward_inside:
            out.square().sum().backward()
        grads = [parameter.grad for parameter in model.parameters()]
        model.zero_grad()
        return features, [out, *grads]

    (features, got), (_, expected) = run(), kept(run)
    assert features.dtype == torch.float32
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0.02, atol=0.02 * float(other.abs().max()))


def test_half_precision_has_streams_in_single(kept):
    model = build(depth=12, init_values=0.3).bfloat16()
    x = images(16, 40, dtype=torch.bfloat16)
    got, wide = results(model, x), copy.deepcopy(model).double()
    assert got[0].dtype == torch.bfloat16
    for one, other in zip(got[1:-1], kept(lambda: results(wide, x.double()))[1:-1], strict=True):
        assert (one.double() - other).norm() < 0.2 * other.norm()


def test_deep_models_lose_little_by_rounding(kept):
    model, x = small("test_relvit_rev", depth=24, std=0.05).train(), images(16, 40)
    got, expected = results(model, x), kept(lambda: results(copy.deepcopy(model).double(), x.double()))
    for one, other in zip(got[:-1], expected[:-1], strict=True):
        assert (one.double() - other).norm() <= 1e-4 * other.norm()


def kept_by(function):
    graph = []
    # The first call caches index tensors, which must not count.
    function()
    return sum(allocations(lambda: graph.append(function())))


def test_training_keeps_two_streams_at_any_depth():
    x = images(64, 64)
    stream = 2 * 64 * 12 * 4
    models = [small(reversible=True, depth=depth) for depth in (2, 4, 8)]
    found = [kept_by(lambda model=model: model(x).grad_fn) for model in models]
    assert found[0] == found[1] == found[2] < 3 * stream
    model = small(depth=4)
    model.set_grad_checkpointing()
    assert found[0] < kept_by(lambda: model(x).grad_fn) / 1.5


def test_without_gradients_there_is_no_recomputation(monkeypatch):
    monkeypatch.setattr("relvit.families.reversible.blocks.ReversibleBlock", None)
    model = build(depth=1)
    with torch.no_grad():
        expected = model(X)
    with torch.inference_mode():
        assert_same(model(X), expected, atol=0)
    # Traced graphs compute the blocks without recomputation.
    nodes = create_feature_extractor(model, ["blocks.0.attn", "head"])
    assert_same(nodes(X)["head"], expected, atol=1e-9)


@pytest.mark.slow
def test_exported(monkeypatch):
    monkeypatch.setattr("relvit.families.reversible.blocks.ReversibleBlock", None)
    model = build(depth=1).eval()
    with torch.no_grad():
        expected = model(X)
    assert_same(torch.export.export(model, (X,)).module()(X), expected, atol=1e-9)


def test_refusals():
    model = build()
    with pytest.raises(RuntimeError, match=r"no second derivatives.*torch.func, or a model with reversible=False"):
        torch.autograd.grad(model(X).square().sum(), [*model.parameters()], create_graph=True)
    out = model(X).square().sum()
    with torch.no_grad():
        model.blocks[1].mlp.fc1.weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified in place"):
        out.backward()
    exchanged = {name: p.detach() * 2 for name, p in model.named_parameters()}
    out = torch.func.functional_call(model, {n: p.requires_grad_() for n, p in exchanged.items()}, X).sum()
    with pytest.raises(RuntimeError, match="parameters of a reversible block changed after forward"):
        out.backward()
    with pytest.raises(ValueError, match="reversible must be True or False, got 'yes'"):
        build(reversible="yes")


def test_blocks_whose_parameters_are_sharded_are_refused_instead_of_getting_no_gradients():
    model = build()
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        for part in (*model.blocks, model):
            fully_shard(part, mesh=init_device_mesh("cpu", (1,)))
        out = model(X).square().sum()
        # PyTorch 2.8 does not gather the parameters again in backward, and refuses to compute with their shards.
        with pytest.raises(RuntimeError, match=r"without its own parameters.*DistributedData|Tensor and DTensor"):
            out.backward()
    finally:
        torch.distributed.destroy_process_group()


def last_of_two(**options):
    """Return a model of one block with stochastic depth; in deeper models the first block has a drop rate of 0."""
    model = build(depth=2, **options)
    del model.blocks[0]
    return model


@pytest.mark.slow
@pytest.mark.parametrize("way", ["method", "function"])
def test_compiled_numbers_are_the_same(way):
    model = last_of_two(drop_path_rate=0.3)
    expected = results(model)
    torch._dynamo.reset()
    graphs = []

    def backend(graph, example):
        graphs.append(graph)
        return torch._dynamo.lookup_backend("aot_eager")(graph, example)

    if way == "method":
        model.compile(backend=backend)
        compiled = model
    else:
        compiled = torch.compile(model, backend=backend)
    for _ in range(2):
        torch.manual_seed(3)
        out = compiled(X)
        got = [out, *torch.autograd.grad(out.square().sum(), [*model.parameters()]), torch.rand(3)]
        assert_same(got, expected, atol=1e-9)
    blocks = sum("softmax" in str(graph.code) or "attention" in str(graph.code) for graph in graphs)
    assert (blocks > 0) == (way == "method")
    model.eval()
    with torch.no_grad():
        assert_same(compiled(X), copy.deepcopy(model)(X), atol=1e-9)


@pytest.mark.slow
@pytest.mark.skipif(Version(torch.__version__) < Version("2.12"), reason="PyTorch >= 2.12: attention in float64")
def test_compiled_by_inductor_with_random_numbers():
    """Forward and recomputation are compiled to two graphs, which must draw the same random numbers."""
    model, names = last_of_two(name="test_relvit_aft", mixer="simple", proj_drop_rate=0.3, drop_path_rate=0.3), []

    def backend(graph, examples):
        # The C++ compiler takes most of the time, so Inductor compiles only the branch of the MLP.
        names.append("inductor" if "fc1" in graph.code else "eager")
        return torch._dynamo.lookup_backend(names[-1])(graph, examples)

    torch._dynamo.reset()
    model.compile(dynamic=False, backend=backend)
    weight, step = model.blocks[0].mlp.fc1.bias, 1e-6
    losses = []
    for change in (0, step, -step):
        torch.manual_seed(3)
        with torch.no_grad():
            weight.add_(change)
        losses.append(model(X).square().sum())
        if change == 0:
            (grad,) = torch.autograd.grad(losses[0], weight)
        with torch.no_grad():
            weight.sub_(change)
    assert names.count("inductor") == 2, names
    assert abs((losses[1] - losses[2]) / (2 * step) - grad.sum()) < 1e-4 * grad.abs().sum()


def test_replicas_of_data_parallel_give_the_parameters_their_gradients(monkeypatch):
    """`nn.DataParallel` makes replicas, which lack parameters; on a CPU the copies to the GPUs are plain copies."""

    def copies(tensors, devices, detach=False):
        return [[tensor.detach() if detach else tensor.clone() for tensor in tensors] for _ in devices]

    module = importlib.import_module("torch.nn.parallel.replicate")
    monkeypatch.setattr(module, "_broadcast_coalesced_reshape", copies)
    monkeypatch.setattr(module, "_get_device_index", lambda device, _: device)
    model, x = build(class_token=True), images(16, 40, batch=4, dtype=torch.float64)
    expected = results(model, x)
    first, second = module.replicate(model, [0, 1])
    found = results(model, x, loss=lambda _: first(x[:2]).square().sum() + second(x[2:]).square().sum())
    for gradient, own in zip(found[1:-1], expected[1:-1], strict=True):
        torch.testing.assert_close(gradient, own, rtol=0, atol=1e-10)


def test_spectral_norm_iterates_once_in_a_training_step(kept):
    model = build()
    for block in model.blocks:
        for layer in (block.attn.qkv, block.mlp.fc1):
            torch.nn.utils.parametrizations.spectral_norm(layer)
    plain = copy.deepcopy(model)
    assert_same(results(model), kept(lambda: results(plain)), atol=1e-9)
    assert_same([*model.buffers()], [*plain.buffers()], atol=1e-12)
