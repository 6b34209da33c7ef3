"""`relvit.retrofit`: refuse a model with the reason, or exchange the classes of it and its attention, see `sources`."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from relvit.layers.positions.by_name import position_factory
from relvit.models.base import GridVisionTransformer, put_classifier_last
from relvit.models.retrofit.original import record_changes, snapshot
from relvit.models.retrofit.recognise import TIMM, refusal_of, source_of
from relvit.models.retrofit.source import SHARED_MODULES, Retrofitted
from relvit.models.weights.convert import cfg_of
from relvit.ops.attention import BACKENDS
from relvit.ops.checks import check_backend, check_model, int_pair
from relvit.utils.messages import an, check_choice, part_of, with_near_names

ABS_POS = ("keep", "freeze", "drop")
# `timm.create_model` creates retrofitted models by this name, see `registered.py`.
RETROFITTED_NAME = "retrofitted"
# Wrappers from these modules read the class or the parameters of a model when they wrap it. After a later retrofit,
# DistributedDataParallel would not average the gradients of the new tables, and PEFT would not save the tables.
WRAPPERS = ("timm.", "peft.", "torch.nn.parallel.", "torch.distributed.", "torch.optim.")


@with_near_names
def retrofit(
    model: nn.Module,
    rel_terms: str | None = None,
    *,
    max_distance: int | Sequence[int] | None = None,
    shared_heads: bool | None = None,
    layout: str | None = None,
    bucketing: str | None = None,
    init_std: float = 0.0,
    position: str | Callable[..., nn.Module] | None = None,
    abs_pos: str = "keep",
    backend: str = "auto",
    max_grid: int | Sequence[int] | None = None,
) -> nn.Module:
    """Give a Vision Transformer relative positions in 2D, in place; by default its outputs stay as they are.

    Every attention module gets tables as in `RelativePosition2d` (state dict keys `blocks.N.attn.position.*`; all other
    keys stay) and computes `relvit.ops.relative_attention`. If the model normalises or rotates queries and keys, tables
    are multiplied by queries and keys after the norms and before the rotation. The model then takes images of every
    size whose sides are multiples of the patch: absolute embeddings are interpolated as in timm, and rotary embeddings
    are computed for the size. Features, checkpointing, layer decay, pruning, `set_input_size` and `reset_classifier` of
    timm work as before.

    Models that already have relative positions keep their tables, and relvit's modules read these tables: at the
    training size outputs stay as they are, and at other sizes offsets beyond a table use the table's outermost entry.
    Only timm's `set_input_size` and reach 'stretch' of `relvit.models.set_reach` interpolate these tables. The
    arguments `abs_pos` and `backend` also apply to these models. `relvit.restore` undoes the retrofit of these models.

    Examples:
        >>> model = timm.create_model("vit_tiny_patch16_224", num_classes=5).eval()
        >>> images = torch.randn(1, 3, 224, 224)
        >>> before = model(images)
        >>> model = retrofit(model, rel_terms="kv", max_distance=4)
        >>> torch.allclose(model(images), before, atol=1e-5)  # tables begin at zero
        True
        >>> model(torch.randn(1, 3, 160, 240)).shape
        torch.Size([1, 5])

    Args:
        model: timm's `VisionTransformer`, `VisionTransformerDistilled`, `Eva` or `NaFlexVit`; with relative positions
            `VisionTransformerRelPos`, `Beit`, `VisionTransformerSAM`, `SwinTransformer`, `SwinTransformerV2` or
            `MultiScaleVit`. From other libraries: SAM's image encoders, `SamVisionEncoder` and `SamHQVisionEncoder` of
            `transformers` and `ImageEncoderViT` of `segment_anything`, and `BeitModel` and `Data2VecVisionModel` of
            `transformers`. The model is changed in place.
        rel_terms, max_distance, shared_heads, layout, bucketing: see `RelativePosition2d`; None: its defaults.
        init_std: standard deviation that initialises the parameters of a position; with 0 the outputs stay as they were
            before the retrofit.
        position: a name as in `RelVisionTransformer`, or your own class, called as `position(head_dim, num_heads,
            device=, dtype=)` for each block. None: 'tables'. With 'slopes', 'slopes-euclidean' and 'lookhere', which
            are not learned, the outputs change at once.
        abs_pos: what happens to the absolute embedding: 'keep' (nothing), 'freeze' (it is not trained further) or
            'drop' (it is removed).
        backend: see `relvit.ops.relative_attention`.
        max_grid: for `NaFlexVit`, the largest number of rows and of columns of patches of an image in a NaFlex batch,
            one number for both or (rows, columns); None: 64. Images that are given as tensors may be larger.

    Returns:
        `model` itself.

    Raises:
        TypeError: `model` is not a module, `position` makes no module that maps a `Grid` to `RelativeTerms`, or an
            argument is unknown or of a wrong type.
        ValueError: the model cannot be retrofitted; the message names the module at fault and the reason.
        ValueError: `position` or an argument of tables is given for a model that keeps its own relative positions.
        ValueError: `abs_pos` is given for a model without absolute embedding, or `max_grid` is given for another model
            than NaFlexVit.
        ValueError: a name is unknown, or a number is out of its range. After any of these errors the model is as
            before.
    """
    tables = {
        "rel_terms": rel_terms,
        "max_distance": max_distance,
        "shared_heads": shared_heads,
        "layout": layout,
        "bucketing": bucketing,
        "init_std": init_std,
    }
    others = {"position": position, "abs_pos": abs_pos, "backend": backend, "max_grid": max_grid}
    defaults = inspect.signature(retrofit).parameters
    chosen = {name: value for name, value in (tables | others).items() if value != defaults[name].default}
    becomes = _source_of(model)
    becomes.check(model)
    check_choice("abs_pos", abs_pos, ABS_POS)
    check_backend(backend, tuple(BACKENDS))
    if max_grid is not None:
        if not hasattr(becomes, "max_grid"):
            raise ValueError(
                f"max_grid is for NaFlexVit, got {max_grid!r} for {type(model).__name__}: leave max_grid out"
            )
        max_grid = int_pair("max_grid", max_grid, 1)
    absolute = [name for name, _ in model.named_parameters() if name in becomes.absolute]
    if abs_pos != "keep" and not absolute:
        raise ValueError(
            f"abs_pos={abs_pos!r}: this {type(model).__name__} has no absolute embedding, leave abs_pos out"
        )
    if becomes.own_positions and (of_tables := [name for name in (*tables, "position") if name in chosen]):
        name = of_tables[0]
        raise ValueError(
            f"{name}={chosen[name]!r} is for models without relative positions; {type(model).__name__} keeps its own: "
            f"leave {name} out"
        )
    factory = position_factory("tables" if position is None else position, **tables)
    layers = becomes.make_layers(model, factory)

    before = snapshot(model)

    # All checks have passed: nothing fails from here on, so an error never leaves the model half changed.
    uses = Counter(module for modules in layers.values() for module in modules.values())
    shared: dict[str, nn.Module] = {}
    for path, modules in layers.items():
        attn = model.get_submodule(path)
        attn.__class__ = becomes.attention_classes[type(attn)]
        attn.backend = backend
        if not attn.head_dim:
            # Some classes do not store the width of a head. Store it now, because users may later replace `proj` by a
            # module without `in_features`, such as an adapter of their own.
            attn.head_dim = attn.proj.in_features // attn.num_heads
        if getattr(model, "rope", None) is not None:
            attn.rotates = True
        for name in becomes.replaced:
            if hasattr(attn, name):
                setattr(attn, name, None)
        for name, module in modules.items():
            module.train(attn.training)
            if becomes.own_positions and uses[module] > 1:
                # Layers share this module, so only the model registers it as a submodule, and each layer has it as a
                # plain attribute. If several layers registered the module, `torch.func.functional_call` would not put
                # the module's own weights back after the call.
                vars(attn)[name] = shared[name] = module
            else:
                setattr(attn, name, module)
    if shared:
        setattr(model, SHARED_MODULES, nn.ModuleDict(shared))
        put_classifier_last(model)
    for name in absolute if abs_pos != "keep" else ():
        owner, _, leaf = name.rpartition(".")
        if abs_pos == "freeze":
            model.get_parameter(name).requires_grad_(False)
        else:
            setattr(model.get_submodule(owner), leaf, None)
    model.__class__ = becomes
    if max_grid is not None:
        model.max_grid = max_grid
    model.open_to_all_sizes()
    _describe(model, chosen)
    if becomes.own_positions:
        record_changes(model, before)
    return model


def retrofit_arguments() -> tuple[str, ...]:
    """Return the names of the arguments of `retrofit` that a configuration may hold; a position is given by its name.

    Examples:
        >>> retrofit_arguments()[:2]
        ('rel_terms', 'max_distance')
    """
    return tuple(name for name in inspect.signature(retrofit).parameters if name != "model")


def _describe(model: nn.Module, chosen: dict[str, Any]) -> None:
    """Put `RETROFITTED_NAME` into the description that `save_for_hf` saves, for models that `timm.create_model` made.

    `timm.create_model` then loads the saved model through `relvit.models.retrofit.registered`.
    """
    # timm's `set_input_size` and `reset_classifier` also give `_model_args` to a model that was built by its class.
    # Such a model has no configuration with the name of an architecture, so timm could not create it again.
    if hasattr(model, "_model_args") and (cfg := cfg_of(model)):
        model._model_args = {**model._model_args, "model": cfg["architecture"], "retrofit": chosen}
        # Set both attributes: some functions of timm read `pretrained_cfg`, and some read `default_cfg`.
        model.pretrained_cfg = model.default_cfg = {**cfg, "architecture": RETROFITTED_NAME}


def can_retrofit(model: nn.Module) -> bool:
    """Return whether `retrofit` knows all parts of a model."""
    try:
        _source_of(model).check(model)
    except ValueError:
        return False
    return True


def _source_of(model: nn.Module) -> type[Retrofitted]:
    """Return the class that a model becomes, or raise with the reason why there is none."""
    check_model(model)
    if (found := source_of(type(model))) is not None:
        return found
    takes = "help(relvit.retrofit) lists the models that it takes"
    base = next((f"{_library(cls)}'s {cls.__name__}" for cls in type(model).__mro__ if source_of(cls)), None)
    inner = next((name for name, part in model.named_modules() if source_of(type(part))), None)
    done = next((name for name, part in model.named_modules() if isinstance(part, Retrofitted)), None)
    own = next((name for name in model.state_dict() if "rel_pos" in name or "relative_position" in name), None)
    if isinstance(model, Retrofitted):
        why = "it has been retrofitted already"
    elif isinstance(model, GridVisionTransformer):
        why = "it has relative positions, chosen by the arguments of timm.create_model"
    elif (reason := refusal_of(type(model))) is not None:
        why = reason
    elif base is not None:
        why = f"it is a subclass of {base}, and what it does differently is not known; {takes}"
    elif inner is not None:
        names = inner.split(".")
        *outer, part = (type(model.get_submodule(".".join(names[:level]))) for level in range(len(names) + 1))
        why = f"it wraps {inner}, {an(part.__name__)}: retrofit that one "
        wrapped = any(cls.__module__.startswith(WRAPPERS) for cls in outer)
        why += "before it is wrapped" if wrapped else f"in it, {part_of(inner)}"
    elif done is not None:
        why = f"{done} in it has been retrofitted already"
    elif own is not None:
        why = f"it has relative positions of its own, {own}; {takes}"
    else:
        why = f"retrofit takes timm's {', '.join(TIMM)}; help(relvit.retrofit) lists all"
    # Name the library, because several libraries have classes of the same name, such as `VisionTransformer`.
    raise ValueError(f"{_library(type(model))}'s {type(model).__name__} cannot be retrofitted: {why}")


def _library(model_class: type) -> str:
    return model_class.__module__.partition(".")[0]
