"""BEiT, SAM, Swin and relpos ViTs of timm: outputs with extended tables at other sizes, checkpoints, parts of timm."""

import copy

import pytest
import timm
import torch
from own_positions import imported
from retrofit_cases import OWN, build, images, naflex_batch, with_exact_offsets
from timm.models import SwinTransformerV2
from timm.models._features import FeatureGetterNet
from timm_versions import needs_timm, since

import relvit
from relvit.layers.positions import ContinuousPosition2d
from relvit.models import set_reach
from relvit.models.weights.transfer import Weights, transfer_weights

SWINS = ("swin", "swinv2")
# Patches have 8 px; Swin has windows of 3 x 4 patches of 2 px. The sizes are smaller and larger than in training.
SIZES = [(16, 64), (48, 16), (64, 72)]
BIAS = ".relative_position_bias_table"


def trained_size(case):
    return OWN[case][1]["img_size"]


def extend(table, old, new):
    """Extend timm's bias table of one window to another: offsets beyond the table use its edge."""
    entries = []
    for dy in range(1 - new[0], new[0]):
        for dx in range(1 - new[1], new[1]):
            y = min(max(dy, 1 - old[0]), old[0] - 1) + old[0] - 1
            x = min(max(dx, 1 - old[1]), old[1] - 1) + old[1] - 1
            entries.append(table[y * (2 * old[1] - 1) + x])
    return torch.stack([*entries, *table[(2 * old[0] - 1) * (2 * old[1] - 1) :]])


def of_size(original, case, size):
    """Build timm's model for another image size, with the original's weights and extended tables."""
    cls, own = OWN[case]
    own = {**own, "dynamic_img_size": True} if case in SWINS else {**own, "img_size": size}
    model, state = cls(**own).double().eval(), original.state_dict()
    for name, tensor in model.state_dict().items():
        if name.endswith(BIAS) and case not in SWINS:
            grids = [tuple(side // 8 for side in sides) for sides in (trained_size(case), size)]
            state[name] = extend(state[name], *grids)
        elif name.endswith(("rel_pos_h", "rel_pos_w")):
            state[name] = extend(state[name], *(((len(part) + 1) // 2, 1) for part in (state[name], tensor)))
        elif name == "pos_embed":
            reference = imported(original)
            reference.set_input_size(size)
            state[name] = reference.pos_embed
    model.load_state_dict(state)
    for module in model.modules():
        if getattr(module, "mode", None) == "swin":
            module.pretrained_window_size = tuple(side // 8 for side in trained_size(case))
    return with_exact_offsets(model)


@pytest.mark.parametrize("case", [case for case in OWN if case not in ("relpos norm", "sam absolute")])
def test_at_other_sizes_offsets_beyond_a_table_have_its_edge(case):
    if case in ("beit both", "swin"):
        since("1.0.31")
    original = build(case)
    model = imported(original)
    for size in SIZES:
        x = images(*size)
        # timm interpolates absolute embeddings in single precision.
        atol = 1e-5 if case == "beit both" else 1e-10
        torch.testing.assert_close(model(x), of_size(original, case, size)(x), rtol=0, atol=atol)


@pytest.mark.parametrize("case", ["srelpos", "relpos mlp", "beit", "sam", "swin", "swinv2"])
def test_gradients_are_the_originals(case):
    original = build(case)
    model = imported(original)
    x, grads = images(*trained_size(case)), []
    for net in (original, model):
        net.set_grad_checkpointing(net is model and case != "srelpos")
        net(x).square().sum().backward()
        grads.append({name: parameter.grad for name, parameter in net.named_parameters()})
    assert all(grad is not None for grad in grads[1].values())
    common = [name for name in grads[0] if name in grads[1]]
    assert len(common) > 20
    for name in common:
        torch.testing.assert_close(grads[1][name], grads[0][name], rtol=0, atol=1e-9)
    for name, grad in grads[0].items():
        if name.endswith(BIAS):
            own = name.removesuffix(BIAS).removesuffix(".rel_pos")
            own = "rel_pos_bias_shared" if name.startswith("shared") else own
            table = grads[1][f"{own}.position.bias_table"]
            patches = table[0].numel()
            torch.testing.assert_close(table.flatten(1).T.flip(0), grad[:patches], rtol=0, atol=1e-9)
            if len(grad) > patches:
                torch.testing.assert_close(grads[1][f"{own}.prefix_bias.weight"], grad[patches:], rtol=0, atol=1e-9)


@pytest.mark.parametrize("case", [case for case in OWN if case != "sam absolute"])
def test_weights_come_back_from_checkpoints_of_both(case):
    # Files do not contain the shape of a grid, so the grid is assumed to be square, or the model's own grid.
    trained, larger = ({} if case in SWINS else {"img_size": size} for size in ((24, 24), (64, 72)))
    original = build(case, **trained)
    model, x = imported(original), images(*SIZES[0])
    fresh = imported(build(case, **trained))
    for parameter in fresh.parameters():
        torch.nn.init.zeros_(parameter)
    fresh.load_state_dict(model.state_dict())
    torch.testing.assert_close(fresh(x), model(x), rtol=0, atol=0)
    assert not any(name.endswith((BIAS, "cpb_mlp.0.weight")) for name in model.state_dict())
    # Transfer timm's weights to a model that was built for another size.
    other = imported(build(case, **larger))
    other.pretrained_cfg = {}
    for parameter in other.parameters():
        torch.nn.init.ones_(parameter)
    report = transfer_weights(other, Weights("there", original.state_dict(), input_size=(3, 24, 24)))
    assert (report.new, report.skipped) == ([], [])
    for block in other.blocks if case == "srelpos mlp" else ():
        # The window is the unit of offsets, so give the model the size for which the weights were trained.
        block.attn.position.window = (3, 3)
    # The absolute embedding was interpolated bicubically from another grid.
    atol = 1e-1 if case == "beit both" else 1e-10
    torch.testing.assert_close(other(x), model(x), rtol=0, atol=atol)


def test_modules_are_relvits():
    relpos, beit, swin = (imported(build(case)) for case in ("srelpos", "beit", "swinv2"))
    position = relpos.blocks[0].attn.position
    assert position is relpos.blocks[1].attn.position
    assert (position.rel_terms, position.layout, position.max_distance) == ("b", "joint", (2, 1))
    assert beit.blocks[0].attn.prefix_bias.weight.shape == (3, 2)
    assert isinstance(swin.layers[0].blocks[0].attn.position, ContinuousPosition2d)


def test_tables_of_sam_stay_at_the_scale_and_under_the_names_of_the_source():
    sam = imported(build("sam"))
    assert [block.attn.table_grid for block in sam.blocks] == [(3, 3), (5, 7)]
    assert {"blocks.0.attn.rel_pos_h", "blocks.1.attn.rel_pos_w"} <= sam.no_weight_decay()


@pytest.mark.parametrize("trained", ["none", "tables", "others"])
@pytest.mark.parametrize("case", ["beit", "srelpos", "srelpos mlp", "swinv2"])
def test_tables_are_frozen_as_they_were_before_a_retrofit_and_before_a_restoration(case, trained):
    def frozen(model, of_tables):
        for name, parameter in model.named_parameters():
            parameter.requires_grad_((name in of_tables(model)) == (trained == "tables") and trained != "none")
        return model

    def originals(model):
        return {name for name, _ in model.named_parameters() if BIAS in name or "rel_pos" in name or "cpb_mlp" in name}

    original = frozen(build(case), originals)
    model, trains = imported(original), {name for name, part in original.named_parameters() if part.requires_grad}
    ours = {name for name, _ in model.named_parameters() if name not in dict(original.named_parameters())}
    assert {model.get_parameter(name).requires_grad for name in ours} == {trained == "tables"}
    restored = relvit.restore(frozen(relvit.retrofit(build(case)), lambda _: ours))
    assert {name for name, part in restored.named_parameters() if part.requires_grad} == trains


@pytest.mark.parametrize("case", ["srelpos", "srelpos mlp"])
def test_functional_calls_leave_tables_that_layers_share(case):
    model, x = imported(build(case)), images()
    expected, weights = model(x), dict(model.named_parameters())
    other = torch.func.functional_call(model, {name: 2 * part for name, part in weights.items()}, (x,))
    assert (other - expected).abs().max() > 1e-3
    assert torch.equal(model(x), expected)
    assert all(part is weights[name] for name, part in model.named_parameters())


def test_tables_networks_and_scales_take_no_weight_decay():
    beit, swin = (imported(build(case)).no_weight_decay() for case in ("beit", "swinv2"))
    assert "blocks.0.attn.position.bias_table" in beit
    assert {"layers.1.blocks.0.attn.position.mlp.fc2.weight", "layers.0.blocks.1.attn.logit_scale"} <= swin


def test_explain_names_terms_and_widths():
    beit, sam, swin = (relvit.explain(imported(build(case))) for case in ("beit", "sam", "swinv2"))
    assert [plan.terms for plan in beit] == ["bc", "bc"]
    # The fused width has two channels per row and column: windows of 3 x 3, and a global layer of 5 x 7.
    assert [plan.width for plan in sam] == [(12, 18), (12, 24)]
    assert {plan.terms for plan in swin} == {"b"}


def test_what_timm_offers_for_vits_works():
    beit, x = imported(build("beit")), images(*SIZES[0])
    features = beit.forward_features(x)
    getter = FeatureGetterNet(copy.deepcopy(beit), out_indices=[1], norm=True)
    torch.testing.assert_close(getter(x)[0].flatten(2).mT, features[:, 1:], rtol=0, atol=0)
    maps = relvit.attention_maps(beit, x)
    assert maps.weights[0].shape == (2, 2, 17, 17)
    torch.testing.assert_close(maps.weights[1].sum(-1), torch.ones(2, 2, 17))
    mask = torch.ones(17, 17, dtype=torch.bool)
    torch.testing.assert_close(beit.forward_features(x, attn_mask=mask), features)
    # Compare each image of a padded batch with the image alone.
    batch = naflex_batch()
    together = beit(batch)
    alone = beit({name: part[1:, :8] for name, part in batch.items()})
    torch.testing.assert_close(together[1:], alone, rtol=0, atol=1e-10)
    beit.init_weights()
    imported(build("swin")).init_weights()


@needs_timm("1.0.31")
@pytest.mark.parametrize("case", [case for case in OWN if not case.startswith("sam")])
def test_set_input_size_does_what_timm_does(case):
    original = build(case)
    model, (height, width) = imported(original), trained_size(case)
    reaching = model if case in SWINS else set_reach(imported(original), "stretch")
    for size in ((2 * height, width), (2 * height, 3 * width)):
        for net in (model, original, reaching):
            net.set_input_size(size)
        # timm computes the coordinates for networks in single precision.
        torch.testing.assert_close(model(images(*size)), original(images(*size)), rtol=1e-5, atol=1e-5)
    # `set_input_size` does not change the offsets of mode 'cr', so this network is still stretched from its own size.
    same = torch.allclose(reaching(images(*size)), model(images(*size)), rtol=0, atol=1e-10)
    assert same == (case != "relpos mlp")


@needs_timm("1.0.31")
def test_a_fixed_window_of_the_pretraining_stays_the_unit_of_offsets():
    original = SwinTransformerV2(**OWN["swinv2"][1], pretrained_window_sizes=(5, 5))
    model = imported(original.eval())
    for net in (model, original):
        net.set_input_size((48, 80))
    torch.testing.assert_close(model(images(48, 80).float()), original(images(48, 80).float()), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("case", ["beit", "swinv2"])
def test_backward_hooks_on_a_projection_run(case):
    model, seen = imported(build(case)), []
    attention = next(part for part in model.modules() if getattr(part, "q_bias", None) is not None)
    attention.qkv.register_full_backward_hook(lambda *_: seen.append(True))
    model(images(*trained_size(case))).sum().backward()
    assert seen == [True]


@pytest.mark.parametrize("case", ["srelpos", "relpos mlp", "beit", "sam", "swin", "swinv2"])
def test_linear_layers_that_a_user_replaces_are_called(case):
    """As by adapters of the user's own, which have the parameters of a layer in a part; timm reads `qkv` of some."""
    model, x = imported(build(case)), images(*trained_size(case))
    expected, plans = model(x), relvit.explain(model)
    for part in list(model.modules()):
        for name in ("proj", "fc1", "fc2"):
            if isinstance(layer := getattr(part, name, None), torch.nn.Linear):
                setattr(part, name, torch.nn.Sequential(layer))
    torch.testing.assert_close(model(x), expected, rtol=0, atol=0)
    assert relvit.explain(model) == plans


def test_reaches_leave_windows_of_blocks_alone():
    sam = imported(build("sam"))
    x, larger = images(*trained_size("sam")), images(*SIZES[2])
    expected, other = sam(x), sam(larger)
    for reach in ("stretch-logn", "windows"):
        set_reach(sam, reach)
        torch.testing.assert_close(sam(x), expected, rtol=0, atol=1e-10)
        assert (sam(larger) - other).abs().max() > 1e-4
    with pytest.raises(ValueError, match="reach 'logn' is not for RetrofittedSwin, which has no relative attention to"):
        set_reach(imported(build("swin")), "logn")
    with pytest.raises(ValueError, match="blocks of RetrofittedSam with windows have no N x N weights"):
        relvit.attention_maps(set_reach(sam, "trained"), x)
    assert relvit.attention_maps(sam, x, [1]).weights[0].shape == (2, 2, 35, 35)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["beit", "sam"])
def test_compiled_for_several_sizes(case):
    torch.compiler.reset()
    model, names = imported(build(case, depth=1) if case == "beit" else build(case)).float(), []

    def backend(graph, examples):
        # Graphs for the other sizes have the same operations, so Inductor compiles only one of them.
        name = "inductor" if case == "beit" and not names else "eager"
        code = torch._dynamo.lookup_backend(name)(graph, examples)
        names.append(name)
        return code

    compiled = torch.compile(model, backend=backend, dynamic=True)
    # Without gradients Inductor compiles no backward, which `test_own_positions.py` tests for a retrofitted model. By
    # default Dynamo first makes a graph for any values of Python's floats, and later one for the actual values.
    with torch.no_grad(), torch._dynamo.config.patch(specialize_float=True):
        for size in SIZES[:1] + SIZES[2:]:
            torch.testing.assert_close(compiled(images(*size).float()), model(images(*size).float()), rtol=0, atol=1e-5)
    assert names[0] == ("inductor" if case == "beit" else "eager")


@needs_timm("1.0.31")
def test_nothing_of_n_x_n_is_kept():
    """timm's buffers are N x N. Relvit's modules have no such buffers, and keep no N x N tensor for backward."""
    model = timm.create_model("test_vit_relpos", img_size=160, patch_size=8, class_token=True, rel_pos_type="bias")
    assert max(buffer.numel() for buffer in model.buffers()) == 401**2
    relvit.retrofit(model)
    assert not [name for name, _ in model.named_buffers() if "position" in name]
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor.numel()) or tensor, lambda x: x):
        model(torch.randn(1, 3, 160, 160))
    assert max(kept) < 401**2


@pytest.mark.parametrize("case", ["beit", "sam", "swin"])
def test_images_that_do_not_divide_into_patches(case):
    model, x = imported(build(case)), images(40, 59)
    advice = r"image width 59 is not a multiple of the patch size .*dynamic_img_pad=True, .* set on its patch_embed"
    with pytest.raises(ValueError, match=advice):
        model(x)
    # The constructors of these models lack the option, so the error also names the attribute.
    model.patch_embed.dynamic_img_pad = True
    padded = torch.nn.functional.pad(x, (0, -59 % model.patch_embed.patch_size[1]))
    torch.testing.assert_close(model(x), model(padded), rtol=0, atol=1e-10)


@needs_timm("1.0.31")
def test_stages_of_one_window_are_shifted_in_larger_images_only_with_always_partition():
    size, x = (24, 40), images(24, 40)
    built = build("swin", img_size=size)(x)  # Its stages have 12 x 20 and 6 x 10 patches, in windows of 3 x 4.
    as_trained, partitioned = (
        imported(build("swin", img_size=(12, 16), always_partition=given))(x) for given in (False, True)
    )
    torch.testing.assert_close(partitioned, built, rtol=0, atol=1e-10)
    assert (as_trained - built).abs().max() > 1e-4


def test_absolute_embeddings_are_dropped_and_causality_is_refused():
    model = imported(build("beit both"), abs_pos="drop")
    assert model.pos_embed is None
    assert torch.isfinite(model(images(*SIZES[0]))).all()
    with pytest.raises(ValueError, match="RetrofittedBeit has no causal attention: give a causal attn_mask"):
        model.forward_features(images(), is_causal=True)
