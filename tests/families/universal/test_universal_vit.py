"""Universal Transformers: halting compared with the papers' loop over tokens, tokens that have halted, features."""

import math

import numpy as np
import pytest
import timm
import torch
from vits import SMALL, assert_same, groups_of, images, native_batch, small

from relvit.models import logit_inputs, set_reach
from relvit.ops import Grid
from relvit.ops.grid import patch_coords

PREFIXES = [{}, {"class_token": True, "reg_tokens": 2, "global_pool": "token"}]
STEPS = 5


def build(bias=-1.0, halting="act", **kwargs):
    model = small("test_relvit_universal", **{"depth": STEPS, "halting": halting, **kwargs}).double()
    if halting:
        torch.nn.init.constant_(model.halting.bias, bias)
    return model.eval()


def doubles(*size, batch=3):
    return images(*size, batch=batch, dtype=torch.float64)


def signal(gain, row, column, step):
    """Equations 4 and 5 of arXiv 1807.03819, channel by channel; one half is for the row, one half for the column."""
    dim = len(gain)

    def wave(position, channel, width):
        half = width // 2
        angle = position / 10000 ** (channel % half / half)
        return math.sin(angle) if channel < half else math.cos(angle)

    out = []
    for channel in range(dim):
        value = wave(step, channel, dim)
        if row is not None:
            value += wave(row if channel < dim // 2 else column, channel % (dim // 2), dim // 2)
        out.append(value * gain[channel])
    return torch.stack(out)


def reference(model, x):
    """Compute adaptive computation time by the paper, image by image and token by token: logits, steps and cost."""
    tokens, grid = model.embed(x)
    block, prefix, halting = model.blocks[0], grid.prefix, model.halting
    coords = patch_coords(grid).expand(len(x), -1, -1) if grid.coords is None else grid.coords
    results, all_steps, costs = [], [], []
    for image, places in zip(tokens, coords.tolist(), strict=True):
        places = [(None, None)] * prefix + places
        own = Grid(grid.height, grid.width, prefix, torch.tensor(places[prefix:]))
        state, inputs = list(image), [None] * len(image)
        total, steps, remainder = ([0.0] * len(image) for _ in range(3))
        output, running, ran = [0.0] * len(image), [True] * len(image), [True] * len(image)
        for step in range(1, model.steps + 1):
            for i, place in enumerate(places):
                # A token that has halted keeps its state.
                if ran[i]:
                    inputs[i] = state[i] + signal(model.signals.gain, *place, step)
            after = block(torch.stack(inputs)[None], own)[0]
            ran = list(running)
            for i in range(len(image)):
                if not running[i]:
                    continue
                state[i] = after[i]
                steps[i] = step
                probability = 0.0 if i < prefix else torch.sigmoid((halting.weight * inputs[i]).sum() + halting.bias[0])
                if step == model.steps or total[i] + probability >= 0.99:
                    remainder[i] = 1 - total[i]
                    output[i] = output[i] + remainder[i] * after[i]
                    running[i] = False
                else:
                    output[i] = output[i] + probability * after[i]
                    total[i] = total[i] + probability
        results.append(torch.stack(output))
        all_steps.append(steps[prefix:])
        costs.append(sum(n + r for n, r in zip(steps[prefix:], remainder[prefix:], strict=True)) / len(places[prefix:]))
    logits = model.forward_head(model.norm(torch.stack(results)))
    return logits, torch.tensor(all_steps), torch.stack(costs)


@pytest.mark.parametrize("prefix", PREFIXES, ids=str)
def test_halting_equals_a_loop_over_tokens(prefix):
    model = build(**prefix, rel_terms="qkvb")
    x, parameters = doubles(24, 40, batch=2), list(model.parameters())
    logits, steps, cost = reference(model, x)
    assert len(steps.unique()) > 3

    def gradients(*results):
        options = {"retain_graph": True, "allow_unused": True}
        return [torch.autograd.grad(result.sin().sum(), parameters, **options) for result in results]

    expected = gradients(logits, cost)
    for model.gather in (True, False):
        got = model.ponder(x)
        assert_same(tuple(got), (logits, steps, cost), atol=1e-10)
        assert_same(gradients(got.logits, got.cost), expected, atol=1e-10)
        with torch.no_grad():
            assert_same(tuple(model.ponder(x)), (logits, steps, cost), atol=1e-10)


def test_dropped_patches_and_attention_dropout_free_training():
    model = build(patch_drop_rate=0.4, class_token=True).train()
    x = doubles(32, 24)
    results = []
    for run in (model.ponder, lambda x: reference(model, x)):
        torch.manual_seed(3)
        results.append(tuple(run(x)))
    assert_same(*results, atol=1e-10)


def test_tokens_leave_with_other_positions_and_chunks():
    model, results = build(position="xl", mlp_chunk=4), []
    for model.gather in (True, False):
        results.append(tuple(model.ponder(doubles(24, 40))))
    assert_same(*results, atol=1e-10)


def test_images_of_a_native_batch_halt_as_each_alone():
    model = build(class_token=True, bias=0.0)
    pictures = [doubles(8 * rows, 8 * columns, batch=1).float() for rows, columns in ((3, 2), (1, 5), (2, 2))]
    alone = [model.ponder(picture.double()) for picture in pictures]
    batch = native_batch([picture[0] for picture in pictures], 8)
    batch, valid = batch | {"patches": batch["patches"].double()}, batch["patch_valid"]
    for model.gather in (True, False):
        got = model.ponder(batch)
        assert_same(got.logits, torch.cat([one.logits for one in alone]), atol=1e-10)
        assert_same(got.cost, torch.cat([one.cost for one in alone]), atol=1e-10)
        for steps, one, real in zip(got.steps, alone, valid, strict=True):
            assert steps[real].tolist() == one.steps[0].tolist()
            assert not steps[~real].any()
        assert_same(model(batch), got.logits, atol=0)


@pytest.mark.parametrize("prefix", PREFIXES, ids=str)
def test_tokens_that_have_halted_leave(prefix):
    model = build(**prefix)
    counts = []
    model.blocks[0].mlp.register_forward_pre_hook(lambda _module, given: counts.append(given[0].shape[1]))
    with torch.no_grad():
        steps = model.ponder(doubles(24, 40)).steps
        longest = [int((steps >= number).sum(1).max()) for number in range(1, STEPS + 1)]
        assert counts == [model.num_prefix_tokens + count for count in longest]
        counts.clear()
        # All patches halt after the first step, so only prefix tokens, if there are any, run on.
        torch.nn.init.constant_(model.halting.bias, 99.0)
        assert model.ponder(doubles(24, 40)).steps.tolist() == [[1] * 15] * 3
    assert counts == [model.num_prefix_tokens + 15, *([model.num_prefix_tokens] * (STEPS - 1) if prefix else [])]


def test_nothing_halts_at_the_start_of_a_training():
    model = timm.create_model("test_relvit_universal", halting="act", **SMALL).train()
    assert model.ponder(images()).steps.tolist() == [[3] * 6] * 2
    cost = model.ponder(images()).cost
    torch.testing.assert_close(cost, torch.full((2,), 3 + 1 - 2 * torch.tensor(-3.0).sigmoid().item()))


def test_another_number_of_steps_in_the_test():
    for halting in ("", "act"):
        model, longer = build(halting=halting), build(halting=halting, depth=7)
        longer.load_state_dict(model.state_dict())
        model.set_steps(7)
        assert_same(model(doubles()), longer(doubles()), atol=0)
        model.set_steps(1)
        assert model(doubles()).isfinite().all()


@pytest.mark.parametrize("prefix", PREFIXES, ids=str)
def test_all_steps_are_the_model_of_as_many_equal_blocks(prefix):
    """Intermediate layers in all forms, and models pruned to some of the steps, are the same, too."""
    model, plain = build(halting="", **prefix), small(depth=STEPS, **prefix).double().eval()
    state = model.state_dict()
    for name in plain.state_dict():
        part = name.split(".", 2)
        state[name] = state["blocks.0." + part[2]] if part[0] == "blocks" else state[name]
    plain.load_state_dict(state, strict=False)
    places = [(None, None)] * model.num_prefix_tokens + patch_coords(Grid(2, 5)).tolist()
    for step, block in enumerate(plain.blocks, start=1):
        added = torch.stack([signal(model.signals.gain, *place, step) for place in places])
        block.register_forward_pre_hook(lambda _module, given, added=added: (given[0] + added, *given[1:]))
    x = doubles(16, 40)
    assert_same(model(x), plain(x), atol=1e-10)
    mask = torch.rand(len(places), len(places)) > 0.3
    assert_same(model(x, attn_mask=mask), plain(x, attn_mask=mask), atol=1e-10)
    for choice in (
        {},
        {"indices": [0, 3], "norm": True, "return_prefix_tokens": True, "output_fmt": "NLC"},
        {"indices": [-3], "stop_early": True, "output_dict": True},
        {"indices": 2, "intermediates_only": True},
    ):
        assert_same(model.forward_intermediates(x, **choice), plain.forward_intermediates(x, **choice), atol=1e-10)
    assert_same(model.get_intermediate_layers(x, n=2), plain.get_intermediate_layers(x, n=2), atol=1e-10)
    assert model.prune_intermediate_layers([1, 2]) == plain.prune_intermediate_layers([1, 2])
    assert_same(model(x), plain(x), atol=1e-10)


def test_intermediates_with_halting_are_the_states_and_their_weighted_sum():
    model = build(class_token=True)
    x = doubles()
    final, taken = model.forward_intermediates(x, output_fmt="NLC", return_prefix_tokens=True)
    assert len(taken) == STEPS
    assert_same(final, model.forward_features(x), atol=1e-12)
    steps = model.ponder(x).steps
    for number in range(1, STEPS):
        unchanged = (taken[number][0] == taken[number - 1][0]).all(-1)
        assert torch.equal(unchanged, steps <= number)
        assert (taken[number][1] != taken[number - 1][1]).any()
    stopped = model.forward_intermediates(x, [2], stop_early=True)[0]
    model.prune_intermediate_layers(2 * [2], prune_norm=False, prune_head=False)
    assert model.steps == 3
    assert_same(stopped, model.forward_features(x), atol=1e-12)


def test_backward_hooks_of_the_block_are_called():
    model, grads = build(), []
    model.blocks[0].register_full_backward_hook(lambda _module, _inputs, outputs: grads.append(outputs[0]))
    model(doubles()).sum().backward()
    assert len(grads) == STEPS


def test_windows_masks_and_hooks_compute_all_tokens():
    model = build()
    x = doubles(48, 32)
    model.gather = False
    expected = model(x)
    model.gather = True
    everything = torch.ones(24, 24, dtype=torch.bool)
    assert_same(model(x, attn_mask=everything), expected, atol=1e-12)
    seen = []
    handle = model.blocks[0].attn.attn_drop.register_forward_pre_hook(lambda _module, given: seen.append(given[0]))
    assert_same(model(x), expected, atol=1e-12)
    assert [weights.shape for weights in seen] == [(3, 2, 24, 24)] * STEPS
    handle.remove()
    assert logit_inputs(model, x)["blocks.0.attn"].query.shape[2] == 24
    in_windows = set_reach(model, "windows", (24, 16))(x)
    assert (in_windows - expected).abs().max() > 1e-4


@pytest.mark.parametrize("name", ["qkv", "k_norm"])
def test_outputs_that_a_hook_keeps_stay_as_they_were(name):
    model, kept = small("test_relvit_universal", depth=6, halting="act", halting_epsilon=0.3).eval(), []
    with torch.no_grad():
        model.halting.weight.mul_(8)  # Tokens halt at different steps.
        handle = (
            model.blocks[0]
            .attn.get_submodule(name)
            .register_forward_hook(lambda _module, _given, out: kept.append((out, out.clone())))
        )
        got, steps = model(images(64, 64)), model.ponder(images(64, 64)).steps
        handle.remove()
        torch.testing.assert_close(model(images(64, 64)), got)
    assert len(steps.unique()) > 2
    assert all(torch.equal(*pair) for pair in kept)


def test_drop_path_is_that_of_every_step():
    model = build(halting="", drop_path_rate=1.0).train()
    tokens, grid = model.embed(doubles())
    for number in range(1, STEPS + 1):
        tokens = tokens + model.signals(grid) + model.signals.step(number)
    assert_same(model.forward_features(doubles()), model.norm(tokens), atol=1e-12)


def test_groups_of_parameters_and_no_decay():
    model = build(class_token=True)
    groups = groups_of(model)
    for name, (scale, _) in groups.items():
        of_stem, of_head = name.startswith(("cls", "patch")), name.startswith(("head", "fc_norm"))
        assert scale == (0.25 if of_stem else 1.0 if of_head else 0.5), name
    for name in groups:
        if name.startswith(("signals", "halting")):
            assert groups[name] == (0.5, 0.0), name


def test_in_training_the_cost_is_returned_beside_the_logits_in_single_precision():
    model = build()
    model.set_training_losses()
    assert isinstance(model(doubles()), torch.Tensor)
    assert_same(tuple(model.train()(doubles())), tuple(model.ponder(doubles())), atol=0)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert model.float().ponder(images()).cost.dtype == torch.float32


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"halting": "acts"}, r"halting is 'acts'; allowed are '', 'act' \(did you mean 'act'\?\)"),
        ({"halting": "", "halting_epsilon": 0.1}, "no effect without halting: leave them out, or give halting=.act."),
        ({"depth": 1}, "needs a depth of 2 steps or more, got 1"),
        ({"halting_epsilon": 1.0}, "halting_epsilon. must be above 0 and below 1, got 1.0"),
        ({"embed_dim": 18}, "a multiple of 4, got 18"),
        ({"reversible": True}, "reversible=True is for blocks that run one after the other"),
        ({"band_rows": 1}, "its block runs several times"),
    ],
)
def test_errors(kwargs, message):
    with pytest.raises(ValueError, match=message):
        build(**kwargs)


def test_no_parameter_is_a_scalar_which_fully_shard_refuses():
    assert all(parameter.dim() for parameter in build().parameters())


def test_errors_of_calls():
    model = build(halting="")
    for call in (lambda: model.ponder(doubles()), model.set_training_losses):
        with pytest.raises(ValueError, match="without halting='act'"):
            call()
    with pytest.raises(ValueError, match=r"number of steps \(depth\) must be at least 1, got 0"):
        model.set_steps(0)
    model.set_steps(np.int64(3))
    assert type(model.steps) is int
    assert model(doubles()).shape[1] == 5
    with pytest.raises(TypeError, match=r"no argument 'rel_term' \(did you mean 'rel_terms'\?\)"):
        build(rel_term="k")


# Each size has its width and its number of heads.
FAMILY = {"tiny": (192, 3), "small": (384, 6), "base": (768, 12)}


@pytest.mark.parametrize("name", FAMILY)
def test_registered_models_have_the_parameters_counted_by_hand(name):
    with torch.device("meta"):
        model = timm.create_model(f"relvit_universal_{name}")
    width, heads = FAMILY[name]
    block = 12 * width * width + 13 * width + 2 * 2 * 15 * (width // heads)
    expected = (3 * 16 * 16 + 1) * width + block + width + 2 * width + (width + 1) * 1000
    assert sum(p.numel() for p in model.parameters()) == expected
    assert (model.steps, len(model.blocks), len(model.feature_info)) == (12, 1, 12)
