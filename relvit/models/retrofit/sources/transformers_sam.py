"""SAM's and SAM-HQ's vision encoders of Hugging Face `transformers` after `relvit.retrofit`."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor, nn
from transformers.models.sam import modeling_sam as sam
from transformers.models.sam_hq import modeling_sam_hq as sam_hq
from transformers.utils.generic import ModelOutput, merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from relvit.models.retrofit.source import Classes, Exchange
from relvit.models.retrofit.sources.hugging_face import TransformersModel
from relvit.models.retrofit.sources.sam import SamEncoder, SamPatchEmbed, SamRowsAttention


class TransformersSamAttention(SamRowsAttention):
    """Mixin before `transformers`' attention of SAM."""

    # This says whether the original attention returns its weights, as with `attn_implementation="eager"`.
    forms_weights: ClassVar[bool] = True

    @property
    def num_heads(self) -> int:
        """Number of heads."""
        return self.num_attention_heads

    def forward(self, hidden_states: Tensor, output_attentions: bool | None = None) -> tuple[Tensor, None]:
        """Map (B, rows, columns, dim) tokens to the same shape, and return no attention weights."""
        return self.attend_rows(hidden_states), None


class RetrofittedSamEagerAttention(TransformersSamAttention, sam.SamVisionAttention):
    """`SamVisionAttention` after a retrofit."""


class RetrofittedSamSdpaAttention(TransformersSamAttention, sam.SamVisionSdpaAttention):
    """`SamVisionSdpaAttention` after a retrofit."""

    forms_weights: ClassVar[bool] = False


class RetrofittedSamHQEagerAttention(TransformersSamAttention, sam_hq.SamHQVisionAttention):
    """`SamHQVisionAttention` after a retrofit."""


class RetrofittedSamHQSdpaAttention(TransformersSamAttention, sam_hq.SamHQVisionSdpaAttention):
    """`SamHQVisionSdpaAttention` after a retrofit."""

    forms_weights: ClassVar[bool] = False


class RetrofittedSamPatchEmbeddings(SamPatchEmbed, sam.SamPatchEmbeddings):
    """`SamPatchEmbeddings` after a retrofit."""


class RetrofittedSamHQPatchEmbeddings(SamPatchEmbed, sam_hq.SamHQPatchEmbeddings):
    """`SamHQPatchEmbeddings` after a retrofit."""


class TransformersSamEncoder(TransformersModel, SamEncoder):
    """Mixin before `transformers`' vision encoders of SAM and SAM-HQ."""

    container: ClassVar[str] = "layers"

    @property
    def original_size(self) -> tuple[int, int]:
        return tuple(self.patch_embed.image_size)

    @classmethod
    def dropout(cls, attn: nn.Module) -> float:
        # Ignore the attribute `dropout` of `SamVisionSdpaAttention` and `SamHQVisionSdpaAttention`, which have no
        # dropout.
        return attn.dropout if cls.attention_classes[type(attn)].forms_weights else 0.0

    @merge_with_config_defaults
    @capture_outputs(tie_last_hidden_states=False)
    def forward(self, pixel_values: Tensor | None = None, **kwargs: Any) -> ModelOutput:
        """Map images (B, channels, height, width) to features (B, output_channels, rows, columns).

        Raises:
            ValueError: `pixel_values` is None, or attention weights are requested of a model with eager attention.
        """
        if pixel_values is None:
            raise ValueError("You have to specify pixel_values")
        attentions = kwargs.get("output_attentions", getattr(self.config, "output_attentions", False))
        if attentions and any(layer.attn.forms_weights for layer in self.layers):
            raise ValueError(
                "output_attentions: after relvit.retrofit no attention weights are formed; leave it out, or call "
                "relvit.restore(model) first"
            )
        x, of_global_layers = self.embed(pixel_values), []
        for layer in self.layers:
            x = layer(x)
            if layer.window_size == 0:
                of_global_layers.append(x)
        return self.as_output(self.neck(x), of_global_layers)


class RetrofittedSamVisionEncoder(TransformersSamEncoder, sam.SamVisionEncoder):
    """`SamVisionEncoder` of `transformers` after `relvit.retrofit`."""

    block_classes: ClassVar[Classes] = (sam.SamVisionLayer,)
    attention_classes: ClassVar[Exchange] = {
        sam.SamVisionAttention: RetrofittedSamEagerAttention,
        sam.SamVisionSdpaAttention: RetrofittedSamSdpaAttention,
    }
    patch_embed_classes: ClassVar[Exchange] = {sam.SamPatchEmbeddings: RetrofittedSamPatchEmbeddings}

    def as_output(self, features: Tensor, of_global_layers: list[Tensor]) -> ModelOutput:
        """Return a `SamVisionEncoderOutput`, as transformers does."""
        return sam.SamVisionEncoderOutput(last_hidden_state=features)


class RetrofittedSamHQVisionEncoder(TransformersSamEncoder, sam_hq.SamHQVisionEncoder):
    """`SamHQVisionEncoder` of `transformers` after `relvit.retrofit`."""

    block_classes: ClassVar[Classes] = (sam_hq.SamHQVisionLayer,)
    attention_classes: ClassVar[Exchange] = {
        sam_hq.SamHQVisionAttention: RetrofittedSamHQEagerAttention,
        sam_hq.SamHQVisionSdpaAttention: RetrofittedSamHQSdpaAttention,
    }
    patch_embed_classes: ClassVar[Exchange] = {sam_hq.SamHQPatchEmbeddings: RetrofittedSamHQPatchEmbeddings}

    def as_output(self, features: Tensor, of_global_layers: list[Tensor]) -> ModelOutput:
        """Return a `SamHQVisionEncoderOutput`, as transformers does."""
        return sam_hq.SamHQVisionEncoderOutput(last_hidden_state=features, intermediate_embeddings=of_global_layers)
