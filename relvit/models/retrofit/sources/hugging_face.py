"""Make retrofitted BEiT and SAM models of Hugging Face `transformers` return outputs and save weights as before."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils.output_capturing import _CAN_RECORD_REGISTRY

from relvit.layers.attention import GridAttention
from relvit.layers.attention_weights import attention_weights, record_logit_inputs
from relvit.models.retrofit.source import OwnPositions
from relvit.ops import Grid
from relvit.ops.tracing import is_compiling


class TransformersModel(OwnPositions):
    """Mixin before a model of `transformers` whose `forward` records outputs of its layers.

    This mixin derives from `OwnPositions`, because all these models have relative positions.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        # transformers' `capture_outputs` looks up the model's class in this registry by name, to find the layers whose
        # outputs it returns. So enter the retrofitted class, too.
        dict.__setitem__(_CAN_RECORD_REGISTRY, str(cls), getattr(cls, "_can_record_outputs", None) or {})
        if issubclass(cls, PreTrainedModel):
            # `save_pretrained` writes the name of the class into config.json, and looks up by this name which names the
            # weights have in files. So take the name of the original class. Pickles are not affected, because they
            # find a class by its `__qualname__`.
            type.__setattr__(cls, "__name__", cls.__bases__[-1].__name__)

    @classmethod
    def is_custom_code(cls) -> bool:
        """Return False, so that `save_pretrained` gives weights the same names in files as for the original class."""
        return False


def attend_and_show(
    attn: GridAttention, x: Tensor, grid: Grid, mask: Tensor | None, show: bool
) -> tuple[Tensor, Tensor | None]:
    """Attend; with `show` also return the attention weights (B, heads, N, N), without gradients and dropout."""
    if not show:
        return attn.attend(x, grid, mask, False, None), None
    if is_compiling():
        raise ValueError(
            "output_attentions: after relvit.retrofit compiled graphs form no attention weights; leave it out, or call "
            "the model without torch.compile"
        )
    with record_logit_inputs() as record:
        mixed = attn.attend(x, grid, mask, False, None)
    return mixed, attention_weights(record[attn.attn_drop]).to(x.dtype)
