"""The survey's answers for some of timm's smallest models; the tool itself surveys all models."""

import pytest
from one_block import use_one_block
from scripts import load

survey = load("retrofit_survey")


@pytest.mark.parametrize(
    ("name", "text", "kind"),
    [
        ("test_vit", "retrofitted", "VisionTransformer with Attention"),
        ("vit_tiny_r_s16_p8_224", "retrofitted", "VisionTransformer with Attention"),
        ("vit_small_patch16_rope_mixed_224", "retrofitted", "Eva with AttentionRope"),
        # 384 pixels are not a multiple of the patch of 14.
        ("vit_so400m_patch14_siglip_384", "retrofitted", "VisionTransformer with Attention"),
        (
            "vit_small_patch16_18x2_224",
            "refused, blocks.N is a timm.models.vision_transformer.ParallelThingsBlock",
            "VisionTransformer",
        ),
        ("test_vit_relpos", "retrofitted", "VisionTransformerRelPos with RelPosAttention"),
        ("swin_tiny_patch4_window7_224", "retrofitted", "SwinTransformer with WindowAttention"),
        ("swinv2_cr_tiny_224", "refused, it is another implementation of Swin V2", "SwinTransformerV2Cr"),
        ("test_resnet", "refused, retrofit takes timm's VisionTransformer, ", "ResNet"),
    ],
)
def test_answers(name, text, kind, monkeypatch):
    use_one_block(monkeypatch)
    answer, what = survey.answer(name)
    assert answer == text if text == "retrofitted" else answer.startswith(text)
    assert what == kind
