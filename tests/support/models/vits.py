"""Small relvit models, and timm's Vision Transformer that computes the same."""

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
# These are the small models of all other classes: tests of what every family promises take a new family from here.
FAMILIES = [name for name in timm.list_models("test_relvit*") if name not in NAMES]
SMALL = {"img_size": (24, 16), "patch_size": 8, "embed_dim": 12, "depth": 3, "num_heads": 2, "num_classes": 5}
# These arguments of timm's class correspond to relvit's defaults.
DEFAULTS = {"class_token": False, "global_pool": "avg", "pos_embed": "", "dynamic_img_size": True}
SLOPES = (1 / 16, 1 / 256)  # ALiBi's slopes of two heads.


def small(name="test_relvit", std=0.3, **kwargs):
    """Build a model with large random parameters, so that each one affects the outputs visibly."""
    torch.manual_seed(0)
    model = timm.create_model(name, **{**SMALL, **kwargs})
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=std)
    return model


def images(height=24, width=16, batch=2, channels=3, dtype=torch.float32):
    return torch.randn(batch, channels, height, width, generator=torch.Generator().manual_seed(1), dtype=dtype)


def native_batch(pictures, patch, flat=False):
    """Make a batch by timm's patches and collation, in single precision, with more padding than needed."""
    items = [(Patchify(patch, flatten_patches=flat)(picture), 0) for picture in pictures]
    return NaFlexCollator(1 + max(len(item["patches"]) for item, _ in items))(items)[0]


def twins(**options):
    """Build a relvit model with ALiBi's slopes, and timm's with the same parameters, which needs `bias` as mask.

    Both models are in float64 and in evaluation mode.
    """
    model = small(position="slopes", **options).double().eval()
    plain = VisionTransformer(**{**SMALL, **DEFAULTS, "mlp_ratio": 3, **options}).double().eval()
    plain.load_state_dict(model.state_dict())
    return model, plain


def bias(rows, cols, prefix=0):
    """Compute -m (|dy| + |dx|) for each pair of patches, zero with prefix tokens: (1, heads, N, N)."""
    y, x = (line.flatten() for line in torch.meshgrid(torch.arange(rows), torch.arange(cols), indexing="ij"))
    distance = (y[:, None] - y).abs() + (x[:, None] - x).abs()
    out = torch.zeros(1, len(SLOPES), *[prefix + rows * cols] * 2, dtype=torch.float64)
    for head, slope in enumerate(SLOPES):
        out[0, head, prefix:, prefix:] = -slope * distance
    return out


def band_mask(rows, columns, band, memory):
    """Return whether patch i attends to patch j, for an image in bands with a memory of some or all rows."""

    def allowed(i, j):
        first = i // columns // band * band
        return j // columns < first + band and (memory is None or j // columns >= first - memory)

    count = rows * columns
    return torch.tensor([[allowed(i, j) for j in range(count)] for i in range(count)])


def bias_for(plain, x):
    """Compute the bias with which timm's model `plain` equals the relvit model, for images `x`."""
    return bias(
        x.shape[-2] // plain.patch_embed.patch_size[0],
        x.shape[-1] // plain.patch_embed.patch_size[1],
        plain.num_prefix_tokens,
    )


def groups_of(model):
    """Return, by parameter name, the scale of its learning rate (halved per block) and its weight decay (0.05 or 0)."""
    skip = model.no_weight_decay()
    groups = param_groups_layer_decay(model, weight_decay=0.05, no_weight_decay_list=skip, layer_decay=0.5)
    found = {id(p): (group["lr_scale"], group["weight_decay"]) for group in groups for p in group["params"]}
    return {name: found[id(parameter)] for name, parameter in model.named_parameters()}


def precision(options):
    """Return the tolerance: timm interpolates absolute embeddings in single precision."""
    return 1e-6 if options.get("pos_embed") else 1e-12


def assert_same(got, expected, atol=1e-12):
    """Compare tensors in nested lists, tuples and dictionaries; None equals only None."""
    assert type(got) is type(expected)
    torch.testing.assert_close(got, expected, rtol=0, atol=atol)
