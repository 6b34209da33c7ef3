"""Reversible Vision Transformers with relative attention, registered with timm as `relvit_rev_*`."""

from __future__ import annotations

import operator
from functools import partial
from typing import Any

from timm.models import DefaultCfg

from relvit.models.entry_points import default_cfgs_of, entry_point
from relvit.models.relative_vit import BASE, LARGE, SMALL, TEST, RelVisionTransformer
from relvit.models.weights.convert import checkpoint_filter_fn

# `VARIANTS` maps the name of each model to its arguments of `RelVisionTransformer`.
VARIANTS: dict[str, dict[str, Any]] = {
    "relvit_rev_small": SMALL | {"reversible": True},
    "relvit_rev_base": BASE | {"reversible": True},
    "relvit_rev_large": LARGE | {"reversible": True},
    "test_relvit_rev": TEST | {"reversible": True},
}
default_cfgs: dict[str, DefaultCfg] = default_cfgs_of(VARIANTS)
for _name, _own in VARIANTS.items():
    globals()[_name] = entry_point(
        _name, RelVisionTransformer, checkpoint_filter_fn, partial(operator.or_, _own), __name__
    )
