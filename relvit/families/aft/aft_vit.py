"""Attention-free Vision Transformers `relvit_aft_*`; from weights with attention they keep the values of `qkv`."""

from __future__ import annotations

import inspect
import logging
import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar

import torch
from timm.layers import to_2tuple
from timm.models import DefaultCfg
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor

from relvit.families.aft.mixers import AFTConv2d, AFTFull, AFTLocal, AFTSimple
from relvit.layers import MixerBlock, resample_embedding
from relvit.models.base import GridVisionTransformer
from relvit.models.entry_points import check_arguments, default_cfgs_of, entry_point
from relvit.models.relative_vit import PATCH4_32, TEST
from relvit.models.weights import convert
from relvit.utils.messages import check_choice, listing

_logger = logging.getLogger(__name__)

MIXERS: dict[str, type[AFTSimple]] = {"full": AFTFull, "local": AFTLocal, "simple": AFTSimple, "conv": AFTConv2d}
# `OWN` says which of the model's arguments `kernel_size`, `window` and `bias_dim` each mixer has. If such an argument
# is None, the mixer's class uses its default.
OWN: dict[str, set[str]] = {
    "full": {"bias_dim"},
    "local": {"bias_dim", "window"},
    "simple": set(),
    "conv": {"kernel_size"},
}

# This pattern finds the names of tensors that only attention-free mixers have, so a checkpoint with such names is of an
# attention-free model.
MIXER = re.compile(r"\.attn\.(u|v|kernel|gamma|beta)$")


class AFTVisionTransformer(GridVisionTransformer):
    """timm's `VisionTransformer` with attention-free mixers (Zhai et al. 2021, arXiv 2105.14103) for attention.

    `forward` takes images of any size whose sides are multiples of the patch. The mixer 'conv' depends on offsets only;
    the biases of 'full' and 'local', and absolute embeddings, are learned for `img_size` and interpolated. By default,
    as in the paper, a model with 'conv' has neither class token nor absolute embedding, and uses average pooling;
    models with other mixers have an absolute embedding and classify a class token.

    Args:
        mixer: 'full' (`AFTFull`), 'local' (`AFTLocal`), 'simple' (`AFTSimple`) or 'conv' (`AFTConv2d`).
        num_heads: number of heads of the mixer. Each head of 'conv' has its own biases in the window and its own keys;
            the other mixers, which have one head in the paper, compute the same with any number of heads. An attention
            pool (`global_pool` 'map' or 'prr') has heads of width 64, as in timm, or a single head if 64 does not
            divide `embed_dim`.
        kernel_size: size of the window of 'conv', see `AFTConv2d`.
        window: window of 'local', see `AFTLocal`.
        bias_dim: width of the bias factors of 'full' and 'local', see `AFTFull`.
        pos_embed, class_token: as in `GridVisionTransformer`; None: as in the paper for this mixer, see above.
        global_pool: as in `GridVisionTransformer`; None: 'token' if there is a class token, otherwise 'avg'.
        backend: see `aft_full` and `aft_conv`.
        **kwargs: see `GridVisionTransformer` (patch_drop_rate, reversible, mlp_chunk) and
            `timm.models.vision_transformer.VisionTransformer` (img_size, patch_size, embed_dim, depth ...), except the
            arguments of attention that `fixed` lists.

    Raises:
        ValueError: `mixer` or another name is unknown; an argument is in `fixed`; or `kernel_size`, `window` or
            `bias_dim` is given for a mixer without it.
        ValueError: in `forward`, `attn_mask` is given, or a side of an image is not a multiple of the patch.
        TypeError: an argument is unknown.
    """

    fixed: ClassVar[dict[str, str]] = {
        **dict.fromkeys(("qk_norm", "attn_drop_rate", "scale_attn_norm"), "there is no attention in these models"),
        **dict.fromkeys(
            ("position", "max_distance", "rel_terms", "shared_heads", "layout", "bucketing", "rel_init_std"),
            "it is for relvit's models with attention, and there is none in these",
        ),
    }

    def __init__(
        self,
        *,
        mixer: str = "conv",
        num_heads: int = 1,
        kernel_size: int | Sequence[int] | None = None,
        window: int | Sequence[int] | None = None,
        bias_dim: int | None = None,
        pos_embed: str | None = None,
        class_token: bool | None = None,
        global_pool: str | None = None,
        backend: str = "auto",
        **kwargs: Any,
    ) -> None:
        check_choice("mixer", mixer, tuple(MIXERS))
        check_arguments(type(self), kwargs)
        paper_has_token = mixer != "conv"
        class_token = paper_has_token if class_token is None else class_token
        if global_pool is None:
            global_pool = "token" if class_token else "avg"
        made = make_mixer(mixer, {"kernel_size": kernel_size, "window": window, "bias_dim": bias_dim}, backend)
        defaults = inspect.signature(VisionTransformer).parameters
        if issubclass(MIXERS[mixer], AFTFull):
            image, patch = (to_2tuple(kwargs.get(name, defaults[name].default)) for name in ("img_size", "patch_size"))
            grid_size = [size // side for size, side in zip(image, patch, strict=True)]
            made = partial(made, grid_size=grid_size, prefix=int(class_token) + kwargs.get("reg_tokens", 0))
        width = kwargs.get("embed_dim", defaults["embed_dim"].default)
        super().__init__(
            pos_embed=("learn" if paper_has_token else "") if pos_embed is None else pos_embed,
            class_token=class_token,
            global_pool=global_pool,
            num_heads=width // 64 if width % 64 == 0 else 1,
            # timm passes `num_heads` above, which is for the attention pool, to the blocks as well: give the mixer its
            # own number.
            block_fn=partial(MixerBlock, mixer=lambda dim, _, **options: made(dim, num_heads, **options)),
            **kwargs,
        )

    def set_input_size(
        self, img_size: int | tuple[int, int] | None = None, patch_size: int | tuple[int, int] | None = None
    ) -> None:
        """Interpolate absolute embeddings and biases for another image or patch size; None: the present size."""
        super().set_input_size(img_size, patch_size)
        for block in self.blocks:
            if isinstance(block.attn, AFTFull):
                block.attn.set_grid_size(self.patch_embed.grid_size)

    def load_pretrained(self, checkpoint_path: str, prefix: str = "") -> None:
        """Load an original JAX archive, converted by `checkpoint_filter_fn` below; see `convert.load_jax_archive`."""
        convert.load_jax_archive(self, checkpoint_path, prefix, checkpoint_filter_fn)


def make_mixer(mixer: str, given: dict[str, Any], backend: str) -> Callable[..., AFTSimple]:
    """Return a factory of mixers for blocks; `given` maps arguments for mixers to values, None for the default."""
    own = {name: value for name, value in given.items() if value is not None}
    for name in own.keys() - OWN[mixer]:
        theirs = listing([other for other, names in OWN.items() if name in names])
        raise ValueError(
            f"{name} is for mixer {theirs}, got {name}={own[name]!r} with mixer {mixer!r}: leave {name} out"
        )
    return partial(MIXERS[mixer], backend=backend, **own)


def checkpoint_filter_fn(
    state_dict: dict[str, Any],
    model: AFTVisionTransformer,
    log: bool = True,
    in_part: dict[str, str] | None = None,
) -> dict[str, Tensor]:
    """Turn a checkpoint of a Vision Transformer, attention-free or not, into the state dict of `model`.

    Tensors outside of mixers are converted as in `relvit.models.checkpoint_filter_fn`, tensors of mixers as follows:

    - The factors of a bias that was learned on another grid are interpolated (an approximation).
    - From a model with attention, the projections of values and outputs are loaded, as in the paper's fine-tuning of a
      pretrained DeiT (table 8). The projections to queries and keys, and tensors that only attention-free mixers
      have, keep the model's values.
    - The mixer 'simple' has tensors of the same names as attention, so this function cannot distinguish checkpoints of
      the two: a model with 'simple' loads all tensors of a checkpoint with attention.

    Args:
        state_dict, model, log: see `relvit.models.checkpoint_filter_fn`.
        in_part: a dictionary to which this function adds each tensor of which only a part is loaded, with a
            description of the part.

    For the result and errors see `relvit.models.checkpoint_filter_fn`.
    """
    state_dict = convert.unwrap(state_dict)
    state = convert.checkpoint_filter_fn(state_dict, model, log)
    own = model.state_dict()
    added = [name for name in own if MIXER.search(name)]
    if added and not any(MIXER.search(name) for name in state):
        state.update({name: own[name] for name in added})
        values = _keep_values(state, own)
        if log and values:
            _logger.warning("queries and keys of attention are left out: only the values of %s are taken", values[0])
        if in_part is not None:
            in_part.update(dict.fromkeys(values, "values"))
        return state
    prefix = sum(state_dict[name].shape[1] for name in convert.PREFIX_TOKENS if name in state_dict)
    for name in added:
        if name in state and name.endswith((".u", ".v")):
            factor = state[name]
            tokens, size = convert.grid_of(
                name, factor.shape[0], prefix, state_dict.get(convert.PATCHES), model, own[name].shape[0]
            )
            state[name] = resample_embedding(factor[None], size, model.patch_embed.grid_size, tokens)[0]
    return state


def _keep_values(state: dict[str, Tensor], own: dict[str, Tensor]) -> list[str]:
    """Replace the queries and keys of attention by the model's own; return the names of the changed projections."""
    names = [name for name in state if ".attn.qkv." in name and name in own]
    # Skip projections whose width differs from the model's: loading them raises an error that names the shapes.
    names = [name for name in names if state[name].shape[0] == 3 * own[name.replace("qkv", "proj")].shape[0]]
    for name in names:
        values = state[name].shape[0] // 3
        state[name] = torch.cat((own[name][:-values], state[name][-values:].to(own[name])))
    return names


TINY = {"embed_dim": 192, "depth": 12}
SMALL = {"embed_dim": 384, "depth": 12}


def _conv(kernel_size: int, num_heads: int) -> dict[str, Any]:
    return {"mixer": "conv", "kernel_size": kernel_size, "num_heads": num_heads}


# `VARIANTS` maps the name of each model to its arguments of `AFTVisionTransformer`; without `patch_size` a patch has 16
# px. Comments give the numbers of parameters that the paper's table 7 prints. `relvit_aft_conv_tiny` and
# `relvit_aft_conv_small` are the best models of their size in this table.
VARIANTS: dict[str, dict[str, Any]] = {
    "relvit_aft_full_tiny": TINY | {"mixer": "full"},  # 6.3 M parameters
    "relvit_aft_full_small": SMALL | {"mixer": "full"},  # 22.6 M parameters
    "relvit_aft_local_tiny": TINY | {"mixer": "local"},
    "relvit_aft_local_small": SMALL | {"mixer": "local"},
    "relvit_aft_simple_tiny": TINY | {"mixer": "simple"},
    "relvit_aft_simple_small": SMALL | {"mixer": "simple"},
    "relvit_aft_conv_tiny": TINY | _conv(11, 192),
    "relvit_aft_conv_small": SMALL | _conv(15, 384),
    "relvit_aft_conv_tiny_k11_h32": TINY | _conv(11, 32),  # 5.4 M parameters
    "relvit_aft_conv_tiny_k11_h192": TINY | _conv(11, 192),  # 5.9 M parameters
    "relvit_aft_conv_small_k11_h16": SMALL | _conv(11, 16),  # 20.3 M parameters
    "relvit_aft_conv_small_k11_h384": SMALL | _conv(11, 384),  # 22.5 M parameters
    "relvit_aft_conv_small_k15_h384": SMALL | _conv(15, 384),  # 23.0 M parameters
    # The next two models are for images of 32 px such as CIFAR's.
    "relvit_aft_conv_tiny_patch4_32": TINY | _conv(11, 192) | PATCH4_32,
    "relvit_aft_conv_small_patch4_32": SMALL | _conv(11, 384) | PATCH4_32,
    "test_relvit_aft": TEST | _conv(5, 2),
}


def _arguments(name: str, given: dict[str, Any]) -> dict[str, Any]:
    """Complete the arguments of a call with the model's own, except those that the chosen mixer does not have."""
    defaults = VARIANTS[name]
    mixer = given.get("mixer", defaults["mixer"])
    if mixer in OWN and mixer != defaults["mixer"]:
        foreign = set().union(*OWN.values()) - OWN[mixer]
        defaults = {argument: value for argument, value in defaults.items() if argument not in foreign}
    return {**defaults, **given}


default_cfgs: dict[str, DefaultCfg] = default_cfgs_of(VARIANTS)
for _name in VARIANTS:
    globals()[_name] = entry_point(_name, AFTVisionTransformer, checkpoint_filter_fn, partial(_arguments, _name))
