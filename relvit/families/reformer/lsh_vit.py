"""Vision Transformers with Reformer's LSH attention, registered with timm as `relvit_lsh_*`."""

from __future__ import annotations

import operator
from functools import partial
from typing import Any, ClassVar

from timm.models import DefaultCfg

from relvit.families.reformer.lsh_attention import LSHAttention, check_position
from relvit.models.entry_points import default_cfgs_of, entry_point, record_arguments
from relvit.models.relative_vit import SMALL, TEST, RelVisionTransformer
from relvit.models.weights.convert import checkpoint_filter_fn


class LSHVisionTransformer(RelVisionTransformer):
    """`RelVisionTransformer` whose attention is Reformer's LSH attention, with a bias by offset per head.

    Queries and keys come from one projection, so this model cannot use the projections to queries and keys of other
    Vision Transformers. Source: Kitaev et al. 2020, Reformer (arXiv 2001.04451); see `LSHAttention`.

    Args:
        rel_terms: 'b' (a learned bias) or '' (no bias). Instead of 'tables', `position` may be 'slopes' or your own
            position, if it returns only a bias.
        bucket_size, rounds: see `LSHAttention`; None: the defaults of `LSHAttention`.
        **kwargs: see `RelVisionTransformer`; the arguments in `fixed` are refused.

    Raises:
        ValueError: see `RelVisionTransformer`; or there are relative terms other than a bias; or, in `forward`, an
            `attn_mask` is given.
        TypeError: see `RelVisionTransformer`.
    """

    fixed: ClassVar[dict[str, str]] = {
        "backend": "LSH attention is computed in one way",
        "mixer": "it is LSH attention in these models",
    }

    def __init__(
        self, *, rel_terms: str = "b", bucket_size: int | None = None, rounds: int | None = None, **kwargs: Any
    ) -> None:
        for name in self.fixed.keys() & kwargs:
            raise ValueError(f"{name} cannot be chosen: {self.fixed[name]}")
        # Only 'tables' has `rel_terms`. If the user gives `rel_terms` with another position, pass it on, so that the
        # base class refuses it with an error; but leave out the default 'b'.
        if kwargs.get("position", "tables") == "tables" or rel_terms != "b":
            kwargs["rel_terms"] = rel_terms
        hashing = {"bucket_size": bucket_size, "rounds": rounds}
        hashing = {name: given for name, given in hashing.items() if given is not None}
        super().__init__(mixer=partial(LSHAttention, **hashing), **kwargs)
        for block in self.blocks:
            check_position(block.attn.position)

    def set_hashing(self, bucket_size: int, rounds: int) -> None:
        """Set `bucket_size` and `rounds` of all layers, see `LSHAttention.set_hashing`; timm saves them with the model.

        Raises:
            TypeError, ValueError: `bucket_size` or `rounds` is not an integer, or is below 1.
        """
        for block in self.blocks:
            block.attn.set_hashing(bucket_size, rounds)
        record_arguments(self, bucket_size=int(bucket_size), rounds=int(rounds))


# `VARIANTS` maps the name of each model to its arguments of `LSHVisionTransformer`.
VARIANTS: dict[str, dict[str, Any]] = {
    "relvit_lsh_small": SMALL,
    "test_relvit_lsh": TEST,
}
default_cfgs: dict[str, DefaultCfg] = default_cfgs_of(VARIANTS)
for _name, _own in VARIANTS.items():
    globals()[_name] = entry_point(_name, LSHVisionTransformer, checkpoint_filter_fn, partial(operator.or_, _own))
