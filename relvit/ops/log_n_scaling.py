"""Log-n scaling of attention logits, for more or fewer keys than in training (`relvit.models.set_reach`)."""

import torch
from torch import Tensor

from relvit.ops.grid import key_mask
from relvit.ops.inputs import AttentionInputs, with_axis_factor


def with_log_n_scaling(inputs: AttentionInputs) -> AttentionInputs:
    """Multiply all logits, the bias included, by log(n) / log(trained_keys), with n the number of keys of a sample.

    Prefix tokens, and keys that a mask or causality hides, count as keys; padding does not. Numbers in `attn_mask` are
    added afterwards, unscaled. Source: logits times log(n), Chiang & Cholak 2022 (arXiv 2202.12172); the division by
    log(trained_keys) is Qwen's LogN-scaling (Bai et al. 2023, arXiv 2309.16609), here also used with fewer keys than in
    training.

    `inputs` have all defaults filled in, see `relvit.ops.inputs.completed`. The result is `inputs` with multiplied
    queries, position queries, position keys, bias tables and axis logits; dtypes do not change. If n is `trained_keys`,
    no value changes.

    Raises:
        ValueError: there is a bias, whose tables all samples share, and each sample has its own padding mask, and so
            its own factor.
    """
    if inputs.trained_keys is None:
        return inputs
    query, key, terms = inputs.query, inputs.position_key, inputs.terms
    valid = key_mask(inputs.key_grid)
    precision = torch.promote_types(query.dtype, torch.float32)
    if valid is None:
        count = query.new_full((1, 1, 1, 1), inputs.key.shape[2], dtype=precision)
    else:
        # A sample that is all padding has no logits, but its factor must be finite, so count one key.
        count = valid.sum(dim=1).clamp(min=1).to(precision)[:, None, None, None]
    # Both logarithms are computed by PyTorch, so that the ratio is exactly 1 if n is `trained_keys`.
    factor = count.log() / torch.full_like(count, inputs.trained_keys).log()

    def times(tensor: Tensor, factor: Tensor) -> Tensor:
        return (tensor * factor).to(tensor.dtype)

    if terms.bias is not None:
        if factor.shape[0] > 1:
            raise ValueError(
                "trained_keys (of reach 'logn') cannot be combined with terms.bias for a padded batch, such as one of "
                "native images: the temperature differs by sample, and all samples share one bias; give images of one "
                "size, or take reach 'trained'"
            )
        bias = type(terms.bias)(*(times(table, factor.flatten()) for table in terms.bias))
        terms = terms._replace(bias=bias)
    scaled = times(query, factor)
    return inputs._replace(
        query=scaled,
        position_query=scaled if inputs.position_query is query else times(inputs.position_query, factor),
        position_key=key if terms.query is None else times(key, factor),
        terms=with_axis_factor(terms, factor),
    )
