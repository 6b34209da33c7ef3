"""Declarations of the study of photographs: images, models, kinds of training, and how each of them is tested."""

from __future__ import annotations

from typing import Any, NamedTuple

# Fine-tunings start from the plain model of this seed.
BASE_SEED = 0
Size = tuple[int, int]


class Setting(NamedTuple):
    """Images, the shape that the models share, and the sizes of trainings and tests.

    Args:
        packed: the splits of `photograph_images.pack`.
        size: side of the images of the trainings from scratch.
        shape: arguments that all models share.
        clips: clip distances of the trainings from scratch with `kv`; the first one is also the clip distance of other
            tables.
        epochs, least_area: the epochs of the trainings from scratch, and the least area of their random crops.
        tests: sides at which the whole image is tested.
        scaled, fields: the side to which images are scaled for the part 'field', and the sides of their middle; the
            first one is trained.
        larger, rectangle: sizes of fine-tunings.
        tuned: the share of the training images that fine-tunings see.
    """

    packed: dict[str, tuple[str, int | None, int]]
    size: int
    shape: dict[str, Any]
    clips: tuple[int, ...]
    epochs: int
    least_area: float
    tests: tuple[int, ...]
    scaled: int
    fields: tuple[int, ...]
    larger: int
    rectangle: Size
    tuned: float = 1.0


SETTINGS = {
    "imagenette": Setting(
        packed={"train": ("train", 160, 10**6), "test": ("val", 224, 10**6)},
        size=112,
        shape={"patch_size": 8, "embed_dim": 192, "depth": 6, "num_heads": 3},
        clips=(4, 2, 7),
        epochs=20,
        least_area=0.35,
        tests=(80, 96, 112, 144, 176, 224),
        scaled=160,
        fields=(112, 128, 144, 160),
        larger=160,
        rectangle=(112, 160),
    ),
    # 2,000 images of each class and 400 for tests, 8 epochs, as in the recipe "one" of study.py. Fine-tunings see a
    # fifth of the images, so that a CPU completes each fine-tuning in minutes.
    "cifar10": Setting(
        packed={"train": ("train", None, 2000), "test": ("test", None, 400)},
        size=32,
        shape={"patch_size": 4, "embed_dim": 128, "depth": 4, "num_heads": 4},
        clips=(2, 4),
        epochs=8,
        least_area=0.5,
        tests=(16, 24, 32, 40, 48),
        scaled=32,
        fields=(24, 28, 32),
        larger=48,
        rectangle=(32, 48),
        tuned=0.2,
    ),
}
TOY = Setting(
    packed={},
    size=16,
    shape={"patch_size": 4, "embed_dim": 16, "depth": 1, "num_heads": 2},
    clips=(1, 2),
    epochs=1,
    least_area=0.5,
    tests=(16, 24),
    scaled=24,
    fields=(16, 24),
    larger=24,
    rectangle=(16, 24),
)


# Arguments with which timm's model with a relative bias has the biases and the initial weights of timm's plain ViT.
RELPOS_AS_VIT = {"rel_pos_type": "bias", "init_values": 0.0, "qkv_bias": True, "weight_init": ""}


class Model(NamedTuple):
    """Name and arguments of a model of timm's registry."""

    name: str
    arguments: dict[str, Any]


class FineTuning(NamedTuple):
    """How the plain model is changed before a fine-tuning, and how fast its tables learn.

    Args:
        retrofit: arguments of `relvit.retrofit`; None: the model stays as it is.
        reach: see `relvit.models.set_reach`.
        rate: factor of the learning rate of the tables, which start at zero.
    """

    retrofit: dict[str, Any] | None
    reach: str = "trained"
    rate: float = 1.0


class Part(NamedTuple):
    """A kind of training.

    Args:
        size: height and width of the images in training.
        share: the part of an image's height and width, around its middle, from which crops are taken.
        tuned: the number of epochs of a fine-tuning; None: a training from scratch.
        images: the share of the training images.
        optimizer, lr: an optimiser of timm and its learning rate; fine-tunings take half of the rate.
    """

    size: Size
    share: float = 1.0
    tuned: int | None = None
    images: float = 1.0
    optimizer: str = "adamw"
    lr: float = 1e-3


class Test(NamedTuple):
    """Images of a test: the middle of the photographs, of a share of their height and width, scaled to a size."""

    protocol: str
    size: Size
    share: tuple[float, float] = (1.0, 1.0)


class Run(NamedTuple):
    """One training."""

    part: str
    model: str
    seed: int
    epochs: int

    @property
    def folder(self) -> str:
        return "_".join(map(str, self))


def models_of(setting: Setting) -> dict[str, Model]:
    """Declare the models that are trained from scratch."""
    shape = setting.shape
    of_timm = shape | {"class_token": False, "global_pool": "avg"}
    clip = setting.clips[0]
    learned = shape | {"pos_embed": "learn"}
    return {
        "learned": Model("vit_tiny_patch16_224", of_timm | {"dynamic_img_size": True}),
        **{f"kv-{each}-learned": Model("relvit_tiny", learned | {"max_distance": each}) for each in setting.clips},
        # In timm, the blocks of this model start with a LayerScale of 1e-5 and its head starts near zero. All other
        # models but "relpos" start as the plain ViT does, so a short training does not compare positions alone.
        "rope-mixed-learned": Model("vit_small_patch16_rope_mixed_ape_224", of_timm | {"dynamic_img_size": True}),
        "rope-mixed-learned-vit-start": Model("relvit_tiny", learned | {"rope": "mixed", "rel_terms": ""}),
        "kv-2-rope-mixed-learned": Model("relvit_tiny", learned | {"rope": "mixed", "max_distance": 2}),
        # LookHere needs four heads; all four are directed heads.
        "lookhere": Model("relvit_tiny", shape | {"position": "lookhere", "num_heads": 4}),
        "kv-2-lookhere": Model(
            "relvit_tiny", shape | {"position": "lookhere+tables", "max_distance": 2, "num_heads": 4}
        ),
        f"v-{clip}-learned": Model("relvit_tiny", learned | {"max_distance": clip, "rel_terms": "v"}),
        # The blocks of this model start with a LayerScale of 1e-6, because `timm.create_model` ignores arguments that
        # are None, and the other weights as PyTorch's layers do. The second model starts as the plain ViT does.
        "relpos": Model("vit_relpos_small_patch16_224", of_timm | {"rel_pos_type": "bias", "init_values": None}),
        "relpos-vit-start": Model("vit_relpos_small_patch16_224", of_timm | RELPOS_AS_VIT),
        # This model has a narrower MLP, since its attention has more parameters.
        "pape-learned": Model("relvit_tiny", learned | {"position": "pape", "mlp_ratio": 3.2}),
        "fire-learned": Model("relvit_tiny", learned | {"position": "fire"}),
        # This model has a slightly wider MLP, since its attention has fewer parameters.
        "aft-conv": Model("relvit_aft_conv_tiny", shape | {"mlp_ratio": 4.5}),
    }


def tunings_of(setting: Setting) -> dict[str, FineTuning]:
    """Declare what is done to the plain model before a fine-tuning."""
    clip = setting.clips[0]
    kv = {"rel_terms": "kv", "max_distance": clip}
    return {
        "plain": FineTuning(None),
        f"kv-{clip}": FineTuning(kv),
        # Tables with the same learning rate as the other weights would stay small in the few steps of a fine-tuning.
        **{f"kv-{clip}-rate-{rate}": FineTuning(kv, rate=rate) for rate in (10, 30)},
        **{f"kv-{each}": FineTuning(kv | {"max_distance": each}) for each in (2, 4) if each != clip},
        f"v-{clip}": FineTuning(kv | {"rel_terms": "v"}),
        f"b-{clip}": FineTuning(kv | {"rel_terms": "b"}),
        f"kv-{clip}-mirrored": FineTuning(kv, "mirror"),
        f"kv-{clip}-dropped": FineTuning(kv | {"abs_pos": "drop"}),
    }


def parts_of(setting: Setting) -> dict[str, Part]:
    """Declare the kinds of training."""
    own, larger = (setting.size,) * 2, (setting.larger,) * 2
    field = (setting.fields[0],) * 2
    return {
        "scratch": Part(own),
        "muon": Part(own, optimizer="muon", lr=2e-3),
        "field": Part(field, share=setting.fields[0] / setting.scaled),
        "larger": Part(larger, tuned=5, images=setting.tuned),
        "shape": Part(setting.rectangle, tuned=5, images=setting.tuned),
        "own": Part(own, tuned=5, images=setting.tuned),
        "tenth": Part(own, tuned=5, images=setting.tuned / 10),
    }


def tests_of(setting: Setting, part: str) -> list[Test]:
    """List the tests of a part."""
    if part == "field":
        shares = [(side, side / setting.scaled) for side in setting.fields]
        return [Test("field", (side, side), (share, share)) for side, share in shares]
    height, width = setting.rectangle
    cut = (height / max(height, width), width / max(height, width))
    return [*(Test("resize", (side, side)) for side in setting.tests), Test("shape", setting.rectangle, cut)]


def base_of(setting: Setting) -> Run:
    """Return the training of the plain model from which fine-tunings start."""
    return Run("scratch", "learned", BASE_SEED, setting.epochs)
