"""The contract of all depths: intermediate states, features, pruning, masks, checkpointing, transforms, precision."""

import pytest
import torch
from vits import assert_same, images, small

from relvit import RelVisionTransformer
from relvit.models import set_reach
from relvit.models.attention_maps import attention_rollout
from relvit.models.depth import lack

DEPTHS = {
    "plain": {},
    "reversible": {"reversible": True},
    "universal": {"name": "test_relvit_universal"},
    "halting": {"name": "test_relvit_universal", "halting": "act"},
}
# The image is not square, and class and register tokens come before the patches.
X = images(16, 40, batch=3, dtype=torch.float64)
each_depth = pytest.mark.parametrize("kind", DEPTHS)


def build(kind, **options):
    options = {"depth": 3, "class_token": True, "reg_tokens": 1, "global_pool": "avg", **options}
    return small(**DEPTHS[kind], **options).double().eval()


def states(model, **choice):
    return model.forward_intermediates(X, intermediates_only=True, output_fmt="NLC", **choice)


@each_depth
def test_states_are_those_of_every_way_to_features(kind):
    model = build(kind)
    taken = states(model, return_prefix_tokens=True)
    assert len(taken) == len(model.feature_info) == model.depth_plan.count(model) == 3
    assert [(patches.shape, prefix.shape) for patches, prefix in taken] == [((3, 10, 12), (3, 2, 12))] * 3
    assert_same(states(model, indices=[0, 2]), [taken[0][0], taken[2][0]], atol=0)
    assert_same(states(model, indices=[1], stop_early=True), [taken[1][0]], atol=0)
    final, normed = model.forward_intermediates(X, norm=True, output_fmt="NLC", return_prefix_tokens=True)
    # With halting, intermediate states are computed for all tokens, but outputs only for tokens that have not halted.
    assert_same(final, model.forward_features(X), atol=1e-10)
    if kind != "halting":
        assert_same(torch.cat(normed[-1][::-1], dim=1), final, atol=0)
    assert (final - model.forward_features(X + 1)).abs().max() > 1e-3
    options = {"depth": 3, "class_token": True, "reg_tokens": 1, "global_pool": "avg"}
    features = small(features_only=True, out_indices=(0, 2), **DEPTHS[kind], **options).double().eval()
    assert features.feature_info.get_dicts(["index", "reduction"]) == [{"index": i, "reduction": 8} for i in (0, 2)]
    features.model.load_state_dict(model.state_dict(), strict=False)
    assert_same(features(X), model.forward_intermediates(X, [0, 2], intermediates_only=True), atol=0)


@each_depth
@pytest.mark.parametrize("way", ["hook", "fx"])
def test_features_by_hooks_and_graphs_are_refused_where_no_block_has_the_states(kind, way):
    options = {**DEPTHS[kind], "features_only": True, "out_indices": (0, 2), "feature_cls": way}
    if lack(build(kind), "hooks"):
        with pytest.raises(ValueError, match=r"feature_cls 'getter', got"):
            small(**options)
    else:
        assert len(small(**options)(images())) == 2


@each_depth
def test_pruned_models_compute_the_first_states(kind):
    model = build(kind)
    before = states(model, indices=[1])
    assert model.prune_intermediate_layers([1], prune_head=True) == [1]
    assert model.depth_plan.count(model) == 2
    assert_same(states(model), [*states(model, indices=[0]), *before], atol=0)


@each_depth
def test_causal_attention_is_that_under_the_mask(kind):
    model = build(kind)
    mask = torch.ones(12, 12, dtype=torch.bool).tril()
    expected = model(X, attn_mask=mask)
    assert_same(model(X, is_causal=True), expected, atol=1e-10)
    assert (expected - model(X)).abs().max() > 1e-4


@each_depth
def test_checkpointing_changes_neither_outputs_nor_gradients(kind):
    model, results = build(kind, drop_path_rate=0.2, proj_drop_rate=0.1).train(), []
    if why := lack(model, "checkpointing"):
        with pytest.raises(ValueError, match=why[:40]):
            model.set_grad_checkpointing()
        model.set_grad_checkpointing(False)
        return
    for enable in (False, True):
        model.set_grad_checkpointing(enable)
        torch.manual_seed(3)
        out = model(X)
        results.append([out, *torch.autograd.grad(out.square().sum(), list(model.parameters())), torch.rand(2)])
    assert_same(*results)


@each_depth
def test_without_gradients_and_under_transforms(kind):
    model = build(kind)
    expected = model(X).detach()
    with torch.no_grad():
        assert_same(model(X), expected)
    with torch.inference_mode():
        assert_same(model(X), expected)
    assert_same(torch.func.vmap(model)(X[:, None])[:, 0], expected, atol=1e-10)
    parameters = dict(model.named_parameters())
    loss = lambda given: torch.func.functional_call(model, given, X).square().sum()  # noqa: E731
    grads = torch.autograd.grad(model(X).square().sum(), list(parameters.values()))
    assert_same(list(torch.func.grad(loss)(parameters).values()), list(grads), atol=1e-8)


@each_depth
def test_half_precision(kind):
    model = small(**DEPTHS[kind], depth=3, std=0.1, class_token=True).eval()
    x = X.float()
    expected = model.forward_features(x).detach()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = [model.forward_features(x)]
    found.append(model.bfloat16().forward_features(x.bfloat16()))
    assert found[1].dtype == torch.bfloat16
    for half in found:
        assert (half.float() - expected).norm() < 0.05 * expected.norm()


@each_depth
def test_what_a_depth_lacks_is_said(kind):
    model = build(kind)
    assert model.depth_plan.lacks.keys() <= {"memory", "rollout", "hooks", "checkpointing"}
    for need, why in model.depth_plan.lacks.items():
        assert lack(model, need) == why


def test_a_depth_of_ones_own_is_not_taken_for_blocks_one_after_the_other():
    class Looped(RelVisionTransformer):
        def _count_steps(self):
            return 2 * len(self.blocks)

        def _run_steps(self, x, grid, attn_mask, is_causal, take, last):
            states = [x]
            for step in range(last + 1):
                states.append(self._run_block(self.blocks[step % 2], states[-1], grid, attn_mask, is_causal))
            return states[-1], [states[step + 1] for step in take]

    options = {"img_size": 16, "patch_size": 8, "embed_dim": 12, "depth": 2, "num_heads": 2}
    model = Looped(**options).eval()
    assert type(model).depth_plan is not RelVisionTransformer.depth_plan
    with pytest.raises(ValueError, match="Looped cannot compute in bands: its own _run_steps"):
        set_reach(model, "bands")
    with pytest.raises(ValueError, match="Looped cannot compute in bands: its own _run_steps"):
        Looped(band_rows=1, **options)
    with pytest.raises(ValueError, match="no attention rollout of Looped: its own _run_steps"):
        attention_rollout(model, images())
    with pytest.raises(ValueError, match="Looped runs its blocks in another way: leave reversible out"):
        Looped(reversible=True, **options)
    with pytest.raises(ValueError, match=r"Looped has 4 states of 2 blocks, .* use forward_intermediates"):
        model.prune_intermediate_layers([1])
    assert lack(model, "hooks")
