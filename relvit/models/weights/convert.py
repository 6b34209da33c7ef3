"""Convert checkpoints: plain ViTs, DeiT, JAX, tables of another clip distance; other classes: `transfer.py`."""

import logging
import math
import re
import zipfile
from collections.abc import Callable
from typing import Any

import torch
from timm.layers import resample_abs_pos_embed, resample_patch_embed, to_2tuple
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from relvit.layers import RelativePosition2d
from relvit.layers.positions.axial import look_up
from relvit.layers.positions.tables import TERMS
from relvit.models.weights.irpe import convert_irpe
from relvit.utils.messages import listing

_logger = logging.getLogger(__name__)

PATCHES = "patch_embed.proj.weight"
# timm's models put prefix tokens with these names in this order; relvit's models have no distillation token.
PREFIX_TOKENS = ("cls_token", "dist_token", "reg_token")
# relvit's models have no head for a distillation token, and no layer `pre_logits` before the classifier, so these parts
# of a checkpoint are left out.
IGNORED = ("head_dist.", "pre_logits.")
# In the state dict of `relvit.app.training.ImageClassifier` the names of the model's tensors have this prefix.
CLASSIFIER_NET = "net."
GAMMA = re.compile(r"\.ls[12]\.gamma$")


def checkpoint_filter_fn(state_dict: dict[str, Any], model: VisionTransformer, log: bool = True) -> dict[str, Tensor]:
    """Turn a checkpoint of a Vision Transformer into the state dict of `model`.

    timm calls this function for `create_model(..., pretrained=True)`; for a file use
    `timm.models.load_checkpoint(model, path, filter_fn=checkpoint_filter_fn)`. A conversion is called exact if `model`
    then computes what the checkpoint's model computes, otherwise an approximation:

    - Relative tables that the checkpoint lacks are zero (exact). Tables of a smaller clip distance repeat their
      outermost row (exact). Tables of a larger clip distance are cut (exact for offsets within the model's clip
      distance). Tables that the checkpoint's heads share are repeated for every head, and row and column tables are
      added up if the model has joint tables (both exact).
    - Prefix biases that the checkpoint lacks are zero (exact). Learned frequencies of a rotary embedding that it lacks
      keep the model's values (an approximation).
    - Tables of iRPE's DeiT become joint tables (exact), see `relvit.models.weights.irpe`.
    - An absolute embedding is resampled to the model's grid (an approximation at another size). If the model has no
      absolute embedding, the part for prefix tokens is added to these tokens, and the rest is left out (an
      approximation).
    - Axial tables are resampled as by `AxialPositionEmbedding.set_grid_size` (an approximation at another size). Axial
      tables that the checkpoint lacks are zero (exact).
    - A class token is left out if the model has none, and a distillation token and its head are always left out
      (approximations).
    - Layer scale is multiplied into the weights if the model has no layer scale, and is one if the checkpoint has none
      (both exact).
    - The patch embedding is resampled to another patch size (an approximation; FlexiViT, Beyer et al. 2023, arXiv
      2212.08013).
    - The last norm moves before or after the pooling, as in the model (an approximation, but exact for token pooling).

    timm itself adapts input channels and a classifier of another size, see `timm.models.load_pretrained`.

    Examples:
        >>> weights = timm.create_model("relvit_tiny", depth=1, max_distance=3).state_dict()
        >>> model = timm.create_model("relvit_tiny", depth=1, max_distance=7)
        >>> found = checkpoint_filter_fn(weights, model)
        >>> weights["blocks.0.attn.position.key_rows"].shape, found["blocks.0.attn.position.key_rows"].shape
        (torch.Size([7, 64]), torch.Size([15, 64]))

    Args:
        state_dict: tensors by name; or a dictionary with these tensors as the entry 'model', as in DeiT's files, or
            'state_dict'. Names may have the prefix 'net.', as in a checkpoint of `relvit fit`.
        model: a relvit model; its weights are not changed, but its `pretrained_cfg` gets the number of classes.
        log: whether to warn of tensors that are left out.

    Raises:
        ValueError: the checkpoint has a table for each head, and the model's heads share one table.
        ValueError: the checkpoint has joint tables, and the model has tables per axis (layout 'separate').
        ValueError: the clip distances differ, and the model's `bucketing` is not 'clip'.
        ValueError: tables of iRPE do not fit, see `relvit.models.weights.irpe.convert_irpe`.
        ValueError: no known grid has as many places as the checkpoint's absolute embedding has vectors: not the grid of
            its images, nor the model's grid, nor a square.
    """
    state_dict = unwrap(state_dict)
    state = {name: tensor for name, tensor in state_dict.items() if not name.startswith(IGNORED)}
    own = model.state_dict()
    cfg = cfg_of(model)
    head = state.get(f"{cfg.get('classifier')}.weight")
    if head is not None and head.shape[0] == model.num_classes and cfg.get("num_classes", 0) >= 0:
        # timm would drop the checkpoint's classifier if the configuration had another `num_classes` than the model, so
        # give the configuration the model's number. But a negative number, as in timm's train.py, asks for a new
        # classifier.
        cfg["num_classes"] = model.num_classes
    # Early ViT checkpoints store the patch embedding's weight as a matrix, (dim, channels * height * width): give it
    # the shape of a convolution's weight.
    if PATCHES in state and state[PATCHES].dim() == 2:
        state[PATCHES] = state[PATCHES].unflatten(1, (-1, *own[PATCHES].shape[-2:]))
    _convert_layer_scale(state, own)
    _convert_absolute(state, model)
    for name in PREFIX_TOKENS:
        if name not in own:
            state.pop(name, None)
    if PATCHES in state:
        state[PATCHES] = resample_patch_embed(state[PATCHES], list(own[PATCHES].shape[-2:]))
    for here, there in (("fc_norm", "norm"), ("norm", "fc_norm")):
        if f"{here}.weight" in own and f"{here}.weight" not in state and f"{there}.weight" not in own:
            for part in ("weight", "bias"):
                if f"{there}.{part}" in state:
                    state[f"{here}.{part}"] = state.pop(f"{there}.{part}")
    _convert_axial(state, own)
    convert_irpe(state, model)
    convert_positions(state, model, own)
    unused = [name for name in ("pos_embed", *PREFIX_TOKENS) if name in state_dict and name not in own]
    unused += [name for name in state_dict if name.startswith("head_dist.")]
    if unused and log:
        _logger.warning("left out, since the model has no use for it: %s", ", ".join(sorted(unused)))
    return state


def unwrap(state_dict: dict[str, Any]) -> dict[str, Tensor]:
    """Return the tensors without wrapping dictionaries, and without the prefix of `relvit fit` in their names."""
    for wrapper in ("model", "state_dict"):
        state_dict = state_dict.get(wrapper, state_dict)
    if not any(name.startswith(CLASSIFIER_NET) for name in state_dict):
        return state_dict
    _logger.warning(
        "these are the raw weights of a checkpoint of relvit fit; if the training kept an average, relvit.load(path)"
        ".model has it"
    )
    named = (item for item in state_dict.items() if item[0].startswith(CLASSIFIER_NET))
    return {name.removeprefix(CLASSIFIER_NET): tensor for name, tensor in named}


def load_jax_archive(
    model: VisionTransformer,
    path: str,
    prefix: str = "",
    filter_fn: Callable[[dict[str, Any], VisionTransformer], dict[str, Tensor]] = checkpoint_filter_fn,
) -> None:
    """Load an .npz archive of the original JAX Vision Transformers into a relvit model.

    timm reads the archive, whose names begin with `prefix`, into its own Vision Transformer. `filter_fn`, a function
    like `checkpoint_filter_fn`, converts the weights.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is not an .npz archive, or lacks tensors of the model, which is not changed then.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            names = [name.removesuffix(".npy") for name in archive.namelist()]
    except zipfile.BadZipFile as error:
        raise ValueError(
            f"{path!r} is not an .npz archive: timm.models.load_checkpoint reads .pth and .safetensors"
        ) from error
    block = model.blocks[0]
    plain = VisionTransformer(
        img_size=model.patch_embed.img_size,
        patch_size=model.patch_embed.patch_size,
        in_chans=model.in_chans,
        num_classes=model.num_classes,
        embed_dim=model.embed_dim,
        depth=len(model.blocks),
        num_heads=block.attn.num_heads,
        mlp_ratio=block.mlp.fc1.out_features / model.embed_dim,
        class_token=any(name.split("/")[-1] == "cls" for name in names),
        global_pool="map" if model.global_pool == "map" else "avg",
        fc_norm=False,
    )
    plain.load_pretrained(path, prefix)
    state = filter_fn(plain.state_dict(), model)
    # Compare here, because `load_state_dict` copies the tensors that fit before it raises.
    given, own = ({name: tensor.shape for name, tensor in held.items()} for held in (state, model.state_dict()))
    if misfits := sorted({name for name, _ in given.items() ^ own.items()}):
        raise ValueError(
            f"{path!r} does not fit this {type(model).__name__}: one of the two lacks {listing(misfits, 3)}, or has "
            "another shape; build the model without the options that change these tensors"
        )
    model.load_state_dict(state)


def _convert_layer_scale(state: dict[str, Tensor], own: dict[str, Tensor]) -> None:
    """Rename DeiT-III's layer scale; if only one side has layer scale, multiply it into the weights, or add ones."""
    for name in list(state):
        state[re.sub(r"\.gamma_([12])$", r".ls\1.gamma", name)] = state.pop(name)
    if not any(map(GAMMA.search, state)):
        state.update({name: torch.ones_like(tensor) for name, tensor in own.items() if GAMMA.search(name)})
    for name in [name for name in state if GAMMA.search(name) and name not in own]:
        # A half-precision checkpoint may be loaded into a float32 model: multiply in the dtype of the model, because in
        # float16 the products of small factors and weights would be rounded to few digits, or to zero.
        gamma = _at_least(state.pop(name), next(iter(own.values())))
        last = name.replace("ls1.gamma", "attn.proj").replace("ls2.gamma", "mlp.fc2")
        state[f"{last}.weight"] = gamma[:, None] * state[f"{last}.weight"]
        if f"{last}.bias" in state:
            state[f"{last}.bias"] = gamma * state[f"{last}.bias"]


def _convert_absolute(state: dict[str, Tensor], model: VisionTransformer) -> None:
    """Resample `pos_embed` for the model's grid; add its part for prefix tokens to the tokens if the model has none."""
    if "pos_embed" not in state:
        return
    embedding = state.pop("pos_embed")
    lengths = {name: state[name].shape[1] for name in PREFIX_TOKENS if name in state}
    target = model.pos_embed if isinstance(model.pos_embed, Tensor) else None
    prefix, old_size = grid_of(
        "pos_embed",
        embedding.shape[1],
        sum(lengths.values()),
        state.get(PATCHES),
        model,
        None if target is None else target.shape[1],
    )
    parts: dict[str, Tensor] = {}
    if prefix:
        parts = dict(zip(lengths, embedding[:, :prefix].split(list(lengths.values()), dim=1), strict=True))
    if target is None or model.no_embed_class:
        for name, part in parts.items():
            state[name] = state[name] + part
    if target is None:
        return
    new_size = model.patch_embed.grid_size
    patches = resample_abs_pos_embed(embedding[:, prefix:], new_size, old_size, num_prefix_tokens=0)
    if not model.no_embed_class:
        tokens = {"cls_token": model.cls_token, "reg_token": model.reg_token}
        # Make the zeros on the checkpoint's device, which may be another device than the model's.
        missing = embedding.new_zeros
        ahead = [parts.get(name, missing(token.shape)) for name, token in tokens.items() if token is not None]
        patches = torch.cat([*ahead, patches], dim=1)
    state["pos_embed"] = patches


def grid_of(
    name: str, length: int, tokens: int, kernel: Tensor | None, model: VisionTransformer, own_length: int | None
) -> tuple[int, tuple[int, int]]:
    """Find the grid of a checkpoint's tensor, and the number of entries for prefix tokens before it (0 or all).

    Args:
        name: name of the tensor, for the error.
        length: number of entries of the tensor, for patches and perhaps prefix tokens.
        tokens: number of prefix tokens in the checkpoint.
        kernel: weight of the checkpoint's patch embedding, if the checkpoint has one.
        own_length: number of entries in the model's tensor of this name; None: the model has no such tensor.

    Raises:
        ValueError: neither the grid of the images in training, nor the model's grid, nor a square grid has this number
            of entries.
    """
    for prefix in (tokens, 0):
        known = _trained_grid(model, kernel)
        if known is not None and math.prod(known) == length - prefix:
            return prefix, known
    # If the checkpoint's tensor is as long as the model's tensor, assume the model's grid, although a grid of another
    # shape can have as many patches.
    if length == own_length:
        prefix = length - model.patch_embed.num_patches
        if prefix == tokens or (prefix == 0 and model.no_embed_class):
            return prefix, model.patch_embed.grid_size
    for prefix in (tokens, 0):
        side = math.isqrt(length - prefix)
        if side * side == length - prefix:
            return prefix, (side, side)
    for prefix in (tokens, 0):
        if length - prefix == model.patch_embed.num_patches:
            return prefix, model.patch_embed.grid_size
    size = cfg_of(model).get("input_size")
    trained = f", and no image of {size[1:]} pixels" if size else ""
    raise ValueError(
        f"{name} has {length} entries: with or without prefix tokens ({tokens}) they fit no square grid{trained}; "
        "build the model with the checkpoint's img_size and patch_size, or give timm.create_model the checkpoint's "
        "input_size in pretrained_cfg_overlay"
    )


def cfg_of(model: nn.Module) -> dict[str, Any]:
    """Return timm's configuration of a model, `pretrained_cfg`; empty for a model that was built by its class."""
    return getattr(model, "pretrained_cfg", None) or {}


def _trained_grid(model: VisionTransformer, kernel: Tensor | None) -> tuple[int, int] | None:
    """Return how many rows and columns of patches the checkpoint's images had, by timm's record of their size."""
    if kernel is None or kernel.ndim != 4:
        return None
    # If timm loads a model from a saved folder, `pretrained_model_args` holds the arguments that the folder records,
    # which may differ from the size in `pretrained_cfg`: take the folder's size.
    recorded = getattr(model, "pretrained_model_args", {}).get("img_size")
    size = recorded or cfg_of(model).get("input_size", ())[-2:]
    if not size:
        return None
    height, width = to_2tuple(size)
    return height // kernel.shape[2], width // kernel.shape[3]


def _convert_axial(state: dict[str, Tensor], own: dict[str, Tensor]) -> None:
    """Resample axial tables to the model's grid; set them to zero if the checkpoint has none."""
    foreign = not any(name.startswith("axial.") for name in state)
    for name in [name for name in own if name.startswith("axial.")]:
        size = own[name].shape[0]
        if name in state:
            state[name] = look_up(state[name], torch.arange(size, device=state[name].device), size)
        elif foreign:
            state[name] = torch.zeros_like(own[name])


def convert_positions(state: dict[str, Tensor], model: nn.Module, own: dict[str, Tensor]) -> None:
    """Convert the relative tables of a state dict to those of a relvit or retrofitted model in place; add missing ones.

    `own` is the model's state dict. The first three errors of `checkpoint_filter_fn` are raised here.
    """
    held = {name.rpartition(".")[2].rpartition("_")[0] for name in state if ".position." in name}
    # Blocks may share a position module. Such a module has one name per block, and the state dict has tensors for each
    # name, so visit it once per name.
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, RelativePosition2d):
            for term in (TERMS[letter] for letter in module.rel_terms):
                if term in held:
                    _convert_term(state, f"{name}.{term}", module, own)
                else:
                    state.update({key: torch.zeros_like(own[key]) for key in own if key.startswith(f"{name}.{term}_")})
        elif name.endswith(".position") and not held:
            # The checkpoint has no relative positions. Tables get zeros above, with which the model computes what the
            # checkpoint's model computes. For other positions such values are not known, so their parameters keep the
            # model's values.
            state.update({key: tensor for key, tensor in own.items() if key.startswith(f"{name}.")})
    for part, fill in ((".prefix_bias.weight", torch.zeros_like), (".rope.frequencies", torch.Tensor.detach)):
        if not any(key.endswith(part) for key in state):
            state.update({key: fill(tensor) for key, tensor in own.items() if key.endswith(part)})


def _convert_term(state: dict[str, Tensor], name: str, module: RelativePosition2d, own: dict[str, Tensor]) -> None:
    axes = {"rows": (0,), "cols": (1,), "table": (0, 1)}
    given = {part: state.pop(f"{name}_{part}") for part in axes if f"{name}_{part}" in state}
    if "table" in given and module.layout == "separate":
        raise ValueError(f"{name}_table is a joint table, the model's is not: build the model with layout='joint'")
    width = 0 if name.endswith("bias") else 1
    for part, table in given.items():
        for index, axis in enumerate(axes[part]):
            dim = table.dim() - width - len(axes[part]) + index
            table = to_distance(table, dim, module.max_distance[axis], f"{name}_{part}", module.bucketing)
        given[part] = table
    if module.layout == "joint" and "rows" in given and "cols" in given:
        rows, cols = (_at_least(given.pop(part), next(module.parameters())) for part in ("rows", "cols"))
        given["table"] = rows.unsqueeze(-1 - width) + cols.unsqueeze(-2 - width)
    for part, table in given.items():
        want = own.get(f"{name}_{part}")
        if want is not None and table.dim() > want.dim():
            raise ValueError(
                f"{name}_{part} in the checkpoint has one table per head, {tuple(table.shape)}; the model's heads "
                f"share one, {tuple(want.shape)}: build the model with shared_heads=False"
            )
        if want is not None and table.dim() < want.dim():
            table = table.expand(want.shape[0], *table.shape).clone()
        state[f"{name}_{part}"] = table


def _at_least(tensor: Tensor, like: Tensor) -> Tensor:
    """Convert a tensor to the dtype of `like` if this dtype is more precise."""
    return tensor.to(torch.promote_types(tensor.dtype, like.dtype))


def to_distance(table: Tensor, dim: int, distance: int, name: str, bucketing: str) -> Tensor:
    """Return the rows for offsets -distance ... distance along `dim`; the outermost row repeats beyond the table."""
    reach = (table.shape[dim] - 1) // 2
    if reach == distance:
        return table
    if bucketing != "clip":
        raise ValueError(
            f"{name} is for clip distance {reach}, the model's is {distance}: with bucketing {bucketing!r} rows cannot "
            f"be converted, so build the model with max_distance={reach}"
        )
    offsets = torch.arange(-distance, distance + 1, device=table.device).clamp(-reach, reach)
    return table.index_select(dim, offsets + reach)
