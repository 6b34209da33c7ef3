"""Native batches of images of any shapes, from timm's NaFlex loader: embedding and pooling."""

from __future__ import annotations

from typing import Any

import torch
from timm.models.naflexvit import create_attention_mask, global_pool_naflex
from torch import Tensor, nn

from relvit.layers.patch_embed import base_layer
from relvit.models.depth import lack
from relvit.ops import Grid, grid_from_naflex
from relvit.utils.messages import listing

# These are the names of the tensors in a batch of timm's NaFlex loader.
NAMES = ("patches", "patch_coord", "patch_valid")


def embed_native(model: nn.Module, batch: dict[str, Any]) -> tuple[Tensor, Grid]:
    """Embed the patches of a batch, add prefix tokens and absolute embeddings, and make the grid of the tokens.

    The convolution of the patch embedding gets the patches of an image side by side, as an image of one row of patches.
    Absolute embeddings are resampled to the rows and columns of each image, as if the image were not in a batch.

    Args:
        model: a timm `VisionTransformer` with relvit's `GridForward`.
        batch: timm's dictionary, for patches of p x q pixels: 'patches' (B, N, p, q, C), or flattened, (B, N, p q C);
            'patch_coord' (B, N, 2) integers, rows and columns from 0 on; 'patch_valid' (B, N) booleans, False for
            padding. The optional 'grid_size', which relvit's loaders give, holds a number of rows and a number of
            columns that no image exceeds; if it is given, coordinates are not checked.

    Returns:
        Tokens (B, prefix + N, embed_dim), and their grid.

    Raises:
        ValueError: a tensor is missing, patches have another size than the model's, or the model needs images of one
            size.
        ValueError: the batch holds an 'attn_mask', which timm's `NaFlexVit` would use.
    """
    if missing := [name for name in NAMES if name not in batch]:
        raise ValueError(f"a native batch must hold {listing(NAMES)}; it has no {listing(missing)}")
    if batch.get("attn_mask") is not None:
        raise ValueError("a native batch must hold no attn_mask: give it to the model as an argument of this name")
    patches, coord, valid = (batch[name] for name in NAMES)
    channels, (height, width) = _projection(model).in_channels, model.patch_embed.patch_size
    # Set the padding to zero, because it may hold NaN, and NaN times an attention weight of zero would be NaN.
    patches = patches.flatten(2).masked_fill(~valid[..., None], 0)
    if patches.shape[2] != (values := height * width * channels):
        raise ValueError(
            f"patches have {patches.shape[2]} values each, the model takes {values}: cut patches of "
            f"{height} x {width} px with {channels} channels"
        )
    # Lay the patches of each image side by side, (B, C, height, N width), and call the projection as a module, so that
    # its hooks, and adapters such as LoRA's, run.
    row = patches.unflatten(2, (height, width, channels)).permute(0, 4, 2, 1, 3).flatten(3)
    x = model.patch_embed.norm(model.patch_embed.proj(row).flatten(2).transpose(1, 2))
    prefix = model.num_prefix_tokens
    if "grid_size" in batch:
        grid = Grid(*batch["grid_size"], prefix, coord, valid)
    else:
        rows, columns = (coord.masked_fill(~valid[..., None], 0).amax((0, 1)) + 1).tolist()
        grid = grid_from_naflex(coord, valid, rows, columns, prefix)
    # To get only the prefix tokens and the absolute embedding from `embed_tokens`, give it patches of zeros.
    blank = x.new_zeros(1, 1, 1, x.shape[2])
    if model.pos_embed is None and getattr(model, "axial", None) is None:
        return torch.cat((model.embed_tokens(blank)[:, :prefix].expand(len(x), -1, -1), x), dim=1), grid
    sizes = [tuple(size) for size in (coord.masked_fill(~valid[..., None], 0).amax(1) + 1).tolist()]
    of_size = {(h, w): model.embed_tokens(blank.expand(1, h, w, -1))[0] for h, w in set(sizes)}
    dtype = of_size[sizes[0]].dtype
    # Backward adds up the gradients of all images. In half precision each addition would round, so use float32.
    of_size = {size: tokens.to(torch.promote_types(dtype, torch.float32)) for size, tokens in of_size.items()}
    index = prefix + coord[..., 0] * torch.tensor([w for _, w in sizes], device=x.device)[:, None] + coord[..., 1]
    added = torch.stack([of_size[size][i] for size, i in zip(sizes, index.masked_fill(~valid, 0), strict=True)])
    first = torch.stack([of_size[size][:prefix] for size in sizes])
    return torch.cat((first, x + added), dim=1).to(dtype), grid


def _projection(model: nn.Module) -> nn.Conv2d:
    """Return the convolution that embeds patches; refuse models that are made for grids of one size."""
    embed, name = model.patch_embed, type(model).__name__
    projection = base_layer(getattr(embed, "proj", None))
    if not isinstance(projection, nn.Conv2d) or not projection.kernel_size == projection.stride == embed.patch_size:
        raise ValueError(
            f"{name} takes no native images: its patch embedding {type(embed).__name__} has no convolution `proj` of "
            "separate patches; give images of one size"
        )
    if why := lack(model, "native"):
        raise ValueError(f"{name} takes no native images: {why}")
    if hasattr(model, "dist_token"):
        raise ValueError(f"{name} takes no native images: it has a distillation token; give images of one size")
    return projection


def pool_native(model: nn.Module, x: Tensor, valid: Tensor) -> Tensor:
    """Pool tokens (B, prefix + N, dim) to (B, dim) as `NaFlexVit` does, without padding, where `valid` (B, N) is False.

    Raises:
        ValueError: the model pools by 'prr', which cannot leave out padding.
    """
    if model.attn_pool is None:
        options = {"num_prefix_tokens": model.num_prefix_tokens, "reduce_include_prefix": model.pool_include_prefix}
        # Use float32, because timm's function adds up all tokens before it divides, and a float16 sum may overflow.
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        return global_pool_naflex(wide, valid, pool_type=model.global_pool, **options).to(x.dtype)
    if model.global_pool != "map":
        raise ValueError(f"global_pool {model.global_pool!r} has no mask for the padding of native images: use 'avg'")
    prefix = model.num_prefix_tokens if model.pool_include_prefix else 0
    mask = create_attention_mask(valid, prefix, symmetric=False, q_len=1, dtype=x.dtype)
    return model.attn_pool(x[:, model.num_prefix_tokens - prefix :], attn_mask=mask)
