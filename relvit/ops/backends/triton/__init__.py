"""Relative attention in relvit's own Triton kernels, for GPUs: q, k and v are not augmented.

`fused` augments queries, keys and values by H + W channels each. Here a key tile is a rectangle of patches, so a query
has one relative logit for each row and one for each column of this rectangle. These logits are added to the products,
so all products are as narrow as in stock attention. The kernels read q, k, v and the tables, which `lookup.py`
prepares. The kernels write the result, the gradients of q, k and v, and for each query and table entry a sum of weights
or of gradients of logits, from which PyTorch computes the gradients of the tables. Triton is imported at the first
call.
"""

from __future__ import annotations

import importlib.util
import os
from functools import cache

import torch
from torch import Tensor

from relvit.ops.backends.triton.lookup import key_operands, value_operands
from relvit.ops.grid import key_mask
from relvit.ops.inputs import AttentionInputs, added_width
from relvit.ops.terms import JointTable
from relvit.ops.tracing import without_autocast
from relvit.utils.old_torch import BUILDS_KERNELS

LARGEST_DIM = 128
# GPUs of a lower compute capability have no bfloat16, and less shared memory than some tiles take.
LEAST_CAPABILITY = (8, 0)


def relative_attention(inputs: AttentionInputs) -> Tensor:
    """Compute attention with relative terms in Triton kernels; raise ValueError if `refusal` gives a reason."""
    reason = refusal(inputs)
    if reason is not None:
        raise ValueError(f"backend 'triton' {reason}")
    # Triton is imported here, because users of other backends need not install it.
    if isinstance(inputs.terms.bias, JointTable):
        from relvit.ops.backends.triton.joint.joint_launch import joint_attention

        with without_autocast(inputs.query.device):
            return joint_attention(inputs)
    from relvit.ops.backends.triton.launch import Attention, Operands

    query, key, value, terms, _, key_grid = inputs[:6]
    with without_autocast(query.device):
        valid, (height, width, prefix) = key_mask(key_grid), key_grid[:3]
        if valid is not None:
            valid = valid.to(torch.uint8).expand(query.shape[0], -1)
        if terms.key is None and terms.bias is None and terms.value is None:
            # Without terms the places of the keys do not matter, so treat all keys, prefix tokens included, as one
            # column of patches.
            prefix, height, width = 0, key.shape[2], 1
        # Without a key table no kernel reads the position queries or writes their gradient, so do not pass them.
        position = None if terms.key is None or inputs.position_query is query else inputs.position_query
        key_table, bias, *of_key = key_operands(inputs)
        value_table, *of_value = value_operands(inputs)
        operands = Operands(query, key, value, position, valid, key_table, bias, value_table, *of_key, *of_value)
        return Attention.apply(inputs.scale, (prefix, height, width), *operands)


def refusal(inputs: AttentionInputs, device: str | None = None) -> str | None:
    """Return why the kernels cannot compute inputs, on the query's or another kind of device; None where they can."""
    query, value, terms, key_grid = inputs.query, inputs.value, inputs.terms, inputs.key_grid
    dims = (query.shape[-1] + added_width(terms, query.dtype), value.shape[-1])
    if importlib.util.find_spec("triton") is None:
        return "needs the package triton, which PyTorch's builds for CUDA bring along: use 'auto'"
    interpreted = query.device.type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1"
    if (device or query.device.type) != "cuda" and not interpreted:
        return f"needs a GPU, the query is on {query.device} (its tests set TRITON_INTERPRET=1): use 'auto'"
    if not interpreted and torch.version.hip is not None:
        return "has instructions that only NVIDIA's GPUs know, this PyTorch is for AMD's: use 'auto'"
    if not (interpreted or BUILDS_KERNELS):
        return f"needs PyTorch 2.9, which brings Triton 3.5, got PyTorch {torch.__version__}: use 'auto'"
    if query.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        return f"takes float16, bfloat16 and float32, not {query.dtype}: use 'tiled'"
    if max(dims) > LARGEST_DIM:
        return f"takes head dimensions up to {LARGEST_DIM}, got {max(dims)}: use 'fused'"
    if terms.query is not None:
        return "has no query term (terms.query): use 'fused'"
    if terms.axis_logits is not None:
        return "takes no logits that are already computed (terms.axis_logits): use 'fused'"
    if key_grid.coords is not None:
        return "takes keys in raster order, not with coords of their own: use 'fused'"
    if inputs.attn_mask is not None or inputs.is_causal:
        return "takes no attn_mask and no is_causal (padding goes into the grid's `valid`): use 'fused'"
    if inputs.dropout_p:
        return f"has no dropout on attention weights, got dropout_p={inputs.dropout_p}: use 'fused'"
    return _refusal_of_joint_tables(inputs) or _refusal_of_gpu(query)


def _refusal_of_gpu(query: Tensor) -> str | None:
    # If PyTorch has not initialised CUDA, the query is a fake tensor, so there may be no GPU to ask.
    if not (query.is_cuda and torch.cuda.is_initialized()):
        return None
    if (capability := torch.cuda.get_device_capability(query.device)) < LEAST_CAPABILITY:
        found, least = (".".join(map(str, each)) for each in (capability, LEAST_CAPABILITY))
        return f"needs a GPU of compute capability {least} (Ampere) or newer, the query's has {found}: use 'auto'"
    return _failure_of_triton()


@cache
def _failure_of_triton() -> str | None:
    """Return why Triton cannot start: it compiles its launcher in C, and many containers have no C compiler."""
    try:
        from triton.runtime import driver

        driver.active.get_current_target()
    except Exception as error:
        reason = str(error).partition("\n")[0][:200]
        return (
            f"cannot start Triton ({type(error).__name__}: {reason}); it needs a C compiler and Python's header files, "
            "such as Debian's packages gcc and python3-dev: install them, or use 'auto'"
        )
    return None


def _refusal_of_joint_tables(inputs: AttentionInputs) -> str | None:
    terms = inputs.terms
    if any(isinstance(tables, JointTable) for tables in (terms.key, terms.value)):
        return "takes a joint table as the bias alone: use 'gathered'"
    if isinstance(terms.bias, JointTable):
        if terms.key is not None or terms.value is not None:
            return "takes a joint bias without key and value terms: use 'gathered'"
        if inputs.grid.coords is not None:
            return "takes a joint bias between rasters, without coords of the queries: use 'gathered'"
    return None
