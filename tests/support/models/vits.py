"""Small relvit models, and timm's own Vision Transformer that computes the same, for tests."""

import timm
import torch
from timm.data.naflex_dataset import NaFlexCollator
from timm.data.naflex_transforms import Patchify
from timm.models.vision_transformer import VisionTransformer
from timm.optim import param_groups_layer_decay

import relvit


def class_of(name):
    return timm.model_entrypoint(name).__annotations__["return"]


NAMES = [name for name in timm.list_models("*relvit*") if class_of(name) is relvit.RelVisionTransformer]
UNIVERSAL = timm.list_models("*relvit_universal*")
ATTENTION_FREE = timm.list_models("*relvit_aft*")
SMALL = {"img_size": (24, 16), "patch_size": 8, "embed_dim": 12, "depth": 3, "num_heads": 2, "num_classes": 5}
# What relvit's defaults are in terms of timm's class.
DEFAULTS = {"class_token": False, "global_pool": "avg", "pos_embed": "", "dynamic_img_size": True}
SLOPES = (1 / 16, 1 / 256)  # ALiBi's, of two heads


def small(name="test_relvit", std=0.3, **kwargs):
    """A model whose parameters are all drawn wide, so that every one of them matters."""
    torch.manual_seed(0)
    model = timm.create_model(name, **{**SMALL, **kwargs})
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=std)
    return model


def images(height=24, width=16, batch=2, channels=3, dtype=torch.float32):
    return torch.randn(batch, channels, height, width, generator=torch.Generator().manual_seed(1), dtype=dtype)


def native_batch(pictures, patch, flat=False):
    """By timm's own patches and collation, in single precision, longer than necessary."""
    items = [(Patchify(patch, flatten_patches=flat)(picture), 0) for picture in pictures]
    return NaFlexCollator(1 + max(len(item["patches"]) for item, _ in items))(items)[0]


def twins(**options):
    """A relvit model with ALiBi's slopes, and timm's model with the same parameters, which wants `bias` as its mask.

    Both in float64 and in evaluation.
    """
    model = small(position="slopes", **options).double().eval()
    plain = VisionTransformer(**{**SMALL, **DEFAULTS, "mlp_ratio": 3, **options}).double().eval()
    plain.load_state_dict(model.state_dict())
    return model, plain


def bias(rows, cols, prefix=0):
    """-m (|dy| + |dx|) for each pair of patches, zero with prefix tokens: (1, heads, N, N)."""
    y, x = (line.flatten() for line in torch.meshgrid(torch.arange(rows), torch.arange(cols), indexing="ij"))
    distance = (y[:, None] - y).abs() + (x[:, None] - x).abs()
    out = torch.zeros(1, len(SLOPES), *[prefix + rows * cols] * 2, dtype=torch.float64)
    for head, slope in enumerate(SLOPES):
        out[0, head, prefix:, prefix:] = -slope * distance
    return out


def band_mask(rows, columns, band, memory):
    """Whether patch i attends to patch j, pair by pair, in bands of an image with a memory of so many rows or all."""

    def allowed(i, j):
        first = i // columns // band * band
        return j // columns < first + band and (memory is None or j // columns >= first - memory)

    count = rows * columns
    return torch.tensor([[allowed(i, j) for j in range(count)] for i in range(count)])


def bias_for(plain, x):
    """The bias that makes timm's model `plain` the relvit one, for images `x`."""
    return bias(
        x.shape[-2] // plain.patch_embed.patch_size[0],
        x.shape[-1] // plain.patch_embed.patch_size[1],
        plain.num_prefix_tokens,
    )


def groups_of(model):
    """By name of the parameter, the scale of its rate, halved block by block, and its weight decay, 0.05 or 0."""
    skip = model.no_weight_decay()
    groups = param_groups_layer_decay(model, weight_decay=0.05, no_weight_decay_list=skip, layer_decay=0.5)
    found = {id(p): (group["lr_scale"], group["weight_decay"]) for group in groups for p in group["params"]}
    return {name: found[id(parameter)] for name, parameter in model.named_parameters()}


def precision(options):
    """timm interpolates absolute embeddings in single precision."""
    return 1e-6 if options.get("pos_embed") else 1e-12


def assert_same(got, expected, atol=1e-12):
    """Equal tensors in equal structures of lists, tuples and dictionaries; None equals None."""
    assert type(got) is type(expected)
    torch.testing.assert_close(got, expected, rtol=0, atol=atol)
