"""Attention over longer vectors on PyTorch's CPU flash kernel, with a backward written out so that little is kept.

It computes what `fused` composes from stock parts. Autograd would keep the longer vectors, and the longer output beside
the result. Here backward lengthens the vectors again, and does without the longer output O: of it, the backward of
flash attention takes nothing but the sum over channels of dO * O (D_i in Dao et al. 2022, arXiv 2205.14135, appendix
B.2). The result is r = content + marginals A, A being the value vectors of all rows and columns as the query sees them,
so dO = (g, g A^T) for the gradient g of r, and the sum is g . content + g A^T . marginals = g . r: the result itself,
with zeros beside it, serves as O.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx
from torch.nn.attention import SDPBackend

from relvit.ops.channels import Channels
from relvit.ops.longer import join, lengthen, shorten, times_table

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def applies(query: Tensor, key: Tensor) -> bool:
    """Whether gradients are wanted and `scaled_dot_product_attention` would take the flash kernel, on the CPU."""
    return (
        query.device.type == "cpu"
        and torch.is_grad_enabled()
        and not torch.compiler.is_compiling()
        # torch.func has rules of its own for the stock parts.
        and torch._C._autograd._saved_tensors_hooks_is_enabled()
        # All three will have one width.
        and torch._fused_sdp_choice(query, key, key) == SDPBackend.FLASH_ATTENTION.value
    )


class CpuFlash(torch.autograd.Function):
    """`apply(query, key, value, query_logits, key_logits, table, appended, is_causal, scale)` -> (B, heads, Nq, dim).

    Logits as `lengthen` takes them; `table` is the joined value table, None without a value term.
    """

    @staticmethod
    def forward(
        ctx: FunctionCtx,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        query_logits: Tensor | None,
        key_logits: Tensor | None,
        table: Tensor | None,
        appended: Channels,
        is_causal: bool,
        scale: float,
    ) -> Tensor:
        longer = lengthen(query, key, value, query_logits, key_logits, appended)
        out, logsumexp = _flash(*longer, 0.0, is_causal, scale=scale)
        result, weights = shorten(out, value.shape[-1], table, appended)
        if table is None:
            # The channels left out are freed.
            result = result.transpose(1, 2).contiguous().transpose(1, 2)
        ctx.save_for_backward(query, key, value, query_logits, key_logits, table, weights, result, logsumexp)
        ctx.appended, ctx.is_causal, ctx.scale = appended, is_causal, scale
        return result

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, query_logits, key_logits, table, weights, result, logsumexp = ctx.saved_tensors
        appended: Channels = ctx.appended
        if appended.alive is not None:
            grad = torch.where(appended.alive, grad, 0.0)
        grads, grad_table = [grad], None
        if table is not None:
            tokens = grad.transpose(1, 2)
            on_entries = times_table(tokens, table.mT).transpose(1, 2)
            grads.append(on_entries.gather(-1, appended.value.index.expand(*on_entries.shape[:-1], -1)))
            if ctx.needs_input_grad[5]:
                shared = table.dim() == 2
                equation = "bnhe,bnhd->ed" if shared else "bnhe,bnhd->hed"
                grad_table = torch.einsum(equation, weights, tokens.to(weights.dtype)).to(table.dtype)
        long_grad, long_out = join(grads, appended.width), join([result], appended.width)
        longer = lengthen(query, key, value, query_logits, key_logits, appended)
        grad_query, grad_key, grad_value = _flash_backward(
            long_grad, *longer, long_out, logsumexp, 0.0, ctx.is_causal, scale=ctx.scale
        )
        grad_logits = [None, None]
        start = query.shape[-1]
        if query_logits is not None:
            grad_logits[0] = grad_query[..., start : start + query_logits.shape[-1]]
            start += query_logits.shape[-1]
        if key_logits is not None:
            grad_logits[1] = grad_key[..., start : start + key_logits.shape[-1]]
        contents = (
            grad_query[..., : query.shape[-1]],
            grad_key[..., : key.shape[-1]],
            grad_value[..., : value.shape[-1]],
        )
        return (*contents, *grad_logits, grad_table, None, None, None)
