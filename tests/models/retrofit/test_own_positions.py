"""Models of every library with their own relative positions: outputs, gradients, state dicts, hooks, `restore`."""

import copy
import pickle
import threading

import pytest
import retrofit_cases
import torch
from comparisons import assert_equal, assert_hooks_see_the_same
from own_positions import (
    KEPT,
    MVITS,
    SOURCES,
    imported,
    mvit,
    outputs,
    source_of,
    tables_of,
    tolerance_of,
    trained_images,
)
from retrofit_cases import EACH, SWIN, build, fingerprint, images, retrofitted, with_exact_offsets
from sam_cases import SAMS
from timm.models.swin_transformer_v2 import SwinTransformerV2, SwinTransformerV2Block
from timm_versions import needs_timm
from torch import nn

import relvit
from relvit.models import set_reach
from relvit.models.param_groups import scaled_positions


@pytest.mark.parametrize("case", SOURCES)
def test_at_its_size_it_computes_what_it_did_in_every_precision(case):
    source, x = source_of(case), trained_images(case)
    model = imported(source)
    exact = outputs(model, x)
    assert_equal(exact, outputs(source, x), tolerance_of(case))
    assert_equal(outputs(imported(source).float(), x.float()), outputs(source.float(), x.float()), 1e-5)
    source.double()
    if case in MVITS:
        # With large random weights, rounding errors would grow from layer to layer.
        for name, parameter in source.named_parameters():
            parameter.data *= 1 if "rel_pos" in name or parameter.dim() == 1 else 0.3
    # In half precision, compare with the outputs in double precision.
    halves = {torch.bfloat16: case in KEPT, torch.float16: case in SAMS}
    for dtype in (dtype for dtype, takes in halves.items() if takes):
        half = x.to(dtype)
        assert_equal(outputs(imported(source).to(dtype), half), outputs(source, half.double()), 2e-2)
    scaled, own = scaled_positions(model, 10), [model.get_parameter(name) for name in tables_of(model)]
    assert {id(parameter) for parameter in scaled} == {id(parameter) for parameter in own}
    # Changed tables change the outputs, so a wrong table would have been noticed.
    for name in tables_of(model):
        parameter = model.get_parameter(name)
        parameter.data = parameter.data if name.endswith("fc1.weight") else parameter.data.roll(1, -1)
    changed = outputs(model, x)
    assert max((tensor - changed[name]).abs().max() for name, tensor in exact.items()) > 1e-5


@pytest.mark.parametrize("case", ["relpos mlp", "srelpos mlp", "swinv2"])
def test_coordinates_that_a_source_rounds_to_single_precision(case, monkeypatch):
    # The other tests give these sources their coordinates in double precision.
    monkeypatch.setattr(retrofit_cases, "with_exact_offsets", lambda model: model)
    source, x = build(case), trained_images(case)
    got, expected = imported(source)(x), source(x)
    error = (got - expected).abs().max() / expected.abs().max()
    assert 1e-15 < error < 1e-6


GRADIENTS = [
    ("patches", None),
    ("class token", "timm"),
    ("max", None),
    ("hf beit", None),
    ("hf beit shared", "reentrant"),
    ("hf beit both", "not reentrant"),
    ("hf beit eager", "reentrant"),
    ("data2vec", "reentrant"),
    ("data2vec shared", "not reentrant"),
    ("data2vec eager", None),
    ("hf sam", "not reentrant"),
    ("hf sam eager", None),
    ("hf sam_hq", "reentrant"),
    ("segment_anything", None),
]


@pytest.mark.parametrize(("case", "checkpointing"), GRADIENTS)
def test_gradients_are_the_sources(case, checkpointing):
    source, x, grads = source_of(case), trained_images(case), []
    model = imported(source)
    if checkpointing == "timm":
        model.set_grad_checkpointing()
    elif checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": checkpointing == "reentrant"})
    for net in (source, model):
        net.train()
        # The gradients are of all outputs.
        sum((part * part.detach().sign()).mean() for part in outputs(net, x).values()).backward()
        grads.append({name: parameter.grad for name, parameter in net.named_parameters()})
    # MViT's norm of keys has a bias, which adds the same number to all logits of a query, so its gradient is only
    # rounding.
    for name in [name for name in grads[0] if name.endswith("norm_k.bias")]:
        assert max(part.pop(name).abs().max() for part in grads) < 1e-14
    assert_equal(grads[1], grads[0], tolerance_of(case))


@pytest.mark.parametrize("case", KEPT)
def test_state_dicts_are_the_sources(case):
    source, other, x = source_of(case), source_of(case), trained_images(case)
    for parameter in other.parameters():
        nn.init.normal_(parameter, std=0.5)
    model = imported(source)
    model.load_state_dict(other.state_dict())
    assert_equal(outputs(model, x), outputs(other, x), tolerance_of(case))
    others = {name for name in model.state_dict() if name.endswith(("pos_embed", "position_embeddings"))}
    # timm applies no weight decay to MViT's class token.
    others |= {"cls_token"} & set(model.state_dict())
    assert model.no_weight_decay() == {*tables_of(source), *others}


@pytest.mark.parametrize("case", [case for case in SOURCES if case != "beit both"])
def test_restored_models_are_the_originals(case):
    original, x = source_of(case), trained_images(case)
    model = copy.deepcopy(imported(original))
    # Models of transformers remember that they were asked for hidden states, so both models must be asked.
    exact, _ = outputs(original, x), outputs(model, x)
    if case not in ("swin", "swinv2"):
        set_reach(model, "stretch" if case in MVITS else "logn")
    assert with_exact_offsets(relvit.restore(model)) is model
    assert fingerprint(model) == fingerprint(original)
    # A state dict would lack the buffers that are not persistent, so compare all tensors.
    ours, theirs = (dict(net.named_parameters()) | dict(net.named_buffers()) for net in (model, original))
    assert list(ours) == list(theirs)
    for name, tensor in theirs.items():
        assert torch.equal(ours[name], tensor), name
        assert (ours[name].dtype, ours[name].requires_grad) == (tensor.dtype, tensor.requires_grad)
    assert_equal(outputs(model, x), exact, 0)
    # Retrofit the restored model a second time, and give it other weights.
    relvit.retrofit(model)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    trained, expected = copy.deepcopy(model.state_dict()), outputs(model, x)
    relvit.restore(model)
    assert fingerprint(model) == fingerprint(original)
    assert_equal(outputs(with_exact_offsets(model), x), expected, 1e-6)
    for name, tensor in trained.items() if case in KEPT else ():
        assert torch.equal(model.state_dict()[name], tensor), name


@pytest.mark.parametrize("case", ["swinv2", "relpos mlp", "srelpos"])
def test_hooks_of_an_object_that_cannot_be_copied_run_again_after_restore(case):
    class Record:
        def __init__(self):
            self.lock, self.seen = threading.Lock(), []

        def add(self, module, *_):
            self.seen.append(type(module).__name__)

    model, record = build(case), Record()
    handles = [part.register_forward_hook(record.add) for part in model.modules()]
    model(x := trained_images(case))
    before, record.seen = record.seen, []
    relvit.restore(relvit.retrofit(model))(x)
    assert record.seen == before
    for handle in handles:
        handle.remove()
    model(x)
    assert record.seen == before


@pytest.mark.parametrize("case", ["swinv2", "srelpos", "hf sam_hq", "segment_anything"])
def test_half_precision_training_mode_and_pickles(case):
    original, x = source_of(case), trained_images(case).half()
    model = pickle.loads(pickle.dumps(imported(original.float()).half().train()))
    if case in SAMS:
        assert_equal(outputs(model, x), outputs(imported(original.half()), x), 0)
    relvit.restore(model)
    assert all(part.training for part in model.modules())
    for name, tensor in original.half().state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor)


@pytest.mark.parametrize("computes", ["no method", "nothing", "all"])
def test_restored_models_have_the_buffers_that_timm_does_not_compute(computes, monkeypatch):
    # In timm 1.0.26 a block of Swin V2 lacks this method, which computes the mask of shifted windows.
    method = "init_non_persistent_buffers"
    if computes == "no method":
        monkeypatch.delattr(SwinTransformerV2Block, method, raising=False)
    elif computes == "nothing":
        monkeypatch.setattr(SwinTransformerV2Block, method, lambda self: None, raising=False)
    original = SwinTransformerV2(**SWIN | {"img_size": (32, 48), "window_size": 4}).eval()
    buffers, x = dict(original.named_buffers()), images(32, 48).float()
    assert any(name.endswith("attn_mask") for name in buffers)
    model = imported(original)
    # Newly allocated memory may contain the old numbers by chance, so let PyTorch fill it.
    torch.use_deterministic_algorithms(True)
    try:
        relvit.restore(model)
    finally:
        torch.use_deterministic_algorithms(False)
    restored = dict(model.named_buffers())
    assert restored.keys() == buffers.keys()
    assert all(torch.equal(restored[name], tensor) for name, tensor in buffers.items())
    assert torch.equal(model(x), original(x))
    assert fingerprint(model) == fingerprint(original)
    # The record has only tensors that `restore` cannot compute, and later conversions of the model apply to them.
    kept = {name for part in vars(relvit.retrofit(model))["_before_retrofit"].values() for name in part.values}
    assert kept <= {"attn_mask"}
    mask = next(tensor for name, tensor in relvit.restore(model.half()).named_buffers() if name.endswith("attn_mask"))
    assert mask.dtype == torch.float16


@needs_timm("1.0.31")
@pytest.mark.parametrize("case", ["beit", "srelpos mlp", "swin", "swinv2"])
def test_models_with_other_windows_are_restored_only_at_the_former_size(case):
    original, x = build(case), trained_images(case)
    model, height, width = imported(original), *x.shape[2:]
    model.set_input_size((2 * height, 2 * width))
    before = fingerprint(model)
    with pytest.raises(
        ValueError, match=r"windows of .* from \(3, \d\) to \(6, \d\) patches; call relvit.restore before"
    ):
        relvit.restore(model)
    assert fingerprint(model) == before
    original.set_input_size((2 * height, 2 * width))
    for net in (model, original):
        net.set_input_size((height, width))
    assert_equal({"": relvit.restore(model)(x)}, {"": original(x)}, 1e-6)


@pytest.mark.parametrize("case", ["sam", "beit"])
def test_blocks_that_were_pruned_stay_away(case):
    model = relvit.retrofit(build(case))
    model.prune_intermediate_layers([0])
    relvit.restore(model)
    assert len(model.blocks) == 1
    assert type(model.blocks[0].attn).__module__.startswith("timm.")


@pytest.mark.parametrize("case", ["class token", "hf sam", "hf sam_hq", "segment_anything"])
def test_hooks_stay_and_see_the_same(case):
    ends = ("attn", "pool_q", "norm_k", "attn.qkv", "mlp", "neck")
    assert_hooks_see_the_same(source_of(case), ends, imported, trained_images(case))


PLANS = {
    "hf sam": ("SamTables", "k", [2 * 5 * 12, 2 * 13 * 12]),
    "segment_anything": ("SamTables", "k", [2 * 5 * 12, 2 * 13 * 12]),
    "hf beit both": ("BeitTables", "bc", [2 * 2 * (81 + 3)] * 2),
    "data2vec": ("BeitTables", "bc", [2 * (81 + 3)] * 2),
}


@pytest.mark.parametrize("case", PLANS)
def test_plans_and_reaches(case):
    model, x, larger = imported(source_of(case)), trained_images(case), images(64, 72)
    position, terms, parameters = PLANS[case]
    assert [plan[1:3] + plan[-1:] for plan in relvit.explain(model)[:2]] == [
        (position, terms, number) for number in parameters
    ]
    expected, other = outputs(model, x), next(iter(outputs(model, larger).values()))
    set_reach(model, "stretch")
    assert_equal(outputs(model, x), expected, 1e-10)
    assert (next(iter(outputs(model, larger).values())) - other).abs().max() > 1e-4
    if case in SAMS:
        set_reach(model, "windows")
        assert_equal(outputs(model, x), expected, 1e-10)
        assert torch.isfinite(next(iter(outputs(model, larger).values()))).all()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore:`torch.jit.trace:DeprecationWarning")
@pytest.mark.parametrize(
    "case", ["class token", "hf beit shared", "hf sam", "segment_anything", "swin", "relpos mlp", "beit"]
)
def test_jit_traces_serve_other_sizes(case):
    model, x = imported(source_of(case)), trained_images(case)
    traced = torch.jit.trace(model, x, check_trace=False, strict=False)
    for size in (x.shape[2:], (48, 80)):
        got, expected = (net(images(*size)) for net in (traced, model))
        # Traced models of transformers return dictionaries.
        got, expected = (out if isinstance(out, torch.Tensor) else out["last_hidden_state"] for out in (got, expected))
        assert_equal({"": got}, {"": expected}, 1e-10)


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore:`torch.jit.trace:DeprecationWarning")
@pytest.mark.parametrize("case", [EACH[0], *(pytest.param(case, marks=pytest.mark.slow) for case in EACH[1:])])
def test_jit_traces_of_added_positions(case):
    model = retrofitted(build(case))
    # DINOv3's stored RoPE was computed in float32, and a trace computes it again, in the model's float64.
    assert_equal({"": torch.jit.trace(model, images(), check_trace=False)(images())}, {"": model(images())}, 1e-7)


# `test_beit_sam_swin.py` compiles timm's models, whose attention is the same, by Inductor.
@pytest.mark.slow
@pytest.mark.parametrize("case", ["hf beit both", "data2vec"])
def test_compiled_and_exported(case):
    source, x = source_of(case).float(), trained_images(case).float()
    model, expected = imported(source), {"": source(x)[0]}
    torch.compiler.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert_equal({"": compiled(x)[0]}, expected, 1e-5)
    assert_equal({"": torch.export.export(model, (x,)).module()(x)[0]}, expected, 1e-5)


@pytest.mark.slow
def test_attention_of_mvit_compiled_with_its_gradients_and_exported_model():
    # The model has one block, which pools queries, keys and values.
    options = {"depths": (1,), "embed_dim": (12,), "num_heads": (2,), "stride_q": ((2, 2),), "img_size": (32, 32)}
    source, x, grads = mvit("patches", **options).float(), images(32, 32).float(), []
    model = imported(source)
    torch.compiler.reset()
    for number, net in enumerate((source, model)):
        attention = net.stages[0].blocks[0].attn
        tokens = torch.randn(2, 64, 12, generator=torch.Generator().manual_seed(0)).requires_grad_()
        # Compile only the attention, because the other parts are timm's.
        out, _ = (torch.compile(attention, dynamic=False) if number else attention)(tokens, [8, 8])
        out.square().mean().backward()
        found = {name: part.grad for name, part in attention.named_parameters() if name != "norm_k.bias"}
        grads.append({"out": out.detach(), "tokens": tokens.grad, **found})
    assert_equal(grads[1], grads[0], 1e-4)
    assert_equal({"": torch.export.export(model, (x,)).module()(x)}, {"": source(x)}, 1e-5)
