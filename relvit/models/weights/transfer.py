"""Transfer a classifier's weights into one with other classes, image size, channels or positions, with a report."""

from __future__ import annotations

import inspect
import re
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from relvit.models.retrofit.source import OwnPositions, Retrofitted
from relvit.models.weights.convert import cfg_of, convert_positions
from relvit.models.weights.irpe import convert_irpe
from relvit.utils.messages import listing

# Each pattern matches names of tensors that only one kind of model has. The text is the part of the error message that
# says why no other kind of model can use these tensors; 'in this' and the class of the other model follow the text.
# Packages in `relvit.families` add entries.
UNFIT: dict[re.Pattern[str], str] = {}

POSITION = ".position."
ABSOLUTE = "pos_embed"


@dataclass(frozen=True)
class Weights:
    """State dict of a trained model, and facts about its training; a fact that is not known is None.

    Attributes:
        source: name of the weights, for messages.
        state: tensors by name.
        class_names: names of the classes, in the order of the classifier's outputs.
        input_size: channels, height and width of the images in training.
        mean, std: normalisation of the images in training.
    """

    source: str
    state: dict[str, Tensor]
    class_names: list[str] | None = None
    input_size: tuple[int, int, int] | None = None
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None


@dataclass
class TransferReport:
    """Names of the tensors of a model that were loaded, and of the tensors that were not.

    Attributes:
        source: see `Weights`.
        loaded: names of the model's tensors that were loaded, also resized or in part.
        resized: names of the loaded tensors that have another shape in the checkpoint, such as absolute embeddings,
            tables and patch embeddings.
        in_part: maps each tensor of which only a part was loaded to a description of the part; the rest of the tensor
            is as initialised.
        new: names of the model's tensors that the checkpoint lacks; these tensors are as initialised, or have values
            without effect, see `relvit.models.checkpoint_filter_fn`: zero in tables, one in layer scale.
        skipped: names of the checkpoint's tensors that the model lacks, also under another name. A conversion may still
            have used their numbers: it multiplies layer scale into weights, and adds up row and column tables.
        reordered: whether the classifier's rows were put into the order of the model's classes.
    """

    source: str
    loaded: list[str]
    resized: list[str] = field(default_factory=list)
    in_part: dict[str, str] = field(default_factory=dict)
    new: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    reordered: bool = False

    def __str__(self) -> str:
        """Return the report on one line."""
        text = f"{len(self.loaded)} of {len(self.loaded) + len(self.new)} tensors from {self.source}"
        if self.reordered:
            text += ", the classifier's rows in the order of the classes here"
        for title, names in self._titled().items():
            if names:
                text += f"; {title.replace('_', ' ')}: {', '.join(names)}"
        return text

    def plain(self) -> dict[str, Any]:
        """Return the report in plain types, for a file."""
        return {
            "source": self.source,
            "loaded": len(self.loaded),
            **self._titled(),
            "reordered": self.reordered,
        }

    def _titled(self) -> dict[str, list[str]]:
        parts = [f"the {part} of {name}" for name, part in self.in_part.items()]
        titled = {"resized": self.resized, "in_part": parts, "new": self.new, "skipped": self.skipped}
        return {title: _in_short(names) for title, names in titled.items()}


def transfer_weights(net: nn.Module, weights: Weights, class_names: Sequence[str] | None = None) -> TransferReport:
    """Load the weights of a classifier that fit into another classifier, in place.

    - `relvit.models.checkpoint_filter_fn`, or timm's function for an architecture of timm, adapts sizes: absolute
      embeddings, patch sizes, axial tables, clip distances.
    - Input channels are repeated or summed up, as timm does.
    - If `weights` and `net` have the same class names, the rows of the last layer are put into the order of `net`'s
      classes. If the names differ, `net`'s last layer stays as initialised. If `weights` or `net` has no names, the
      rows are loaded in their order, or, if the numbers of classes differ, `net`'s last layer stays as initialised.
    - Relative tables that the checkpoint lacks are zero in relvit's models. In retrofitted models such tables are as
      initialised, or zero if the checkpoint has tables for other terms.

    Examples:
        >>> trained = timm.create_model("relvit_tiny", img_size=64, depth=2, num_classes=3)
        >>> model = timm.create_model("relvit_tiny", img_size=(64, 96), depth=2, num_classes=5)
        >>> report = transfer_weights(model, Weights("trained", trained.state_dict(), input_size=(3, 64, 64)))
        >>> report.new
        ['head.weight', 'head.bias']

    Args:
        net: the model, built for its own classes and image size.
        weights: the weights.
        class_names: names of the model's classes, in the order of its outputs; None: they have no names.

    Raises:
        ValueError: after the conversion no tensor of `weights` has the name of a tensor of `net`.
        ValueError: after the conversion a tensor of `weights` has another shape than `net`'s tensor of this name, for
            example because the widths of the models differ.
        ValueError: the classes or their order differ, and `net` has no `get_classifier()`, which names the last layer.
        ValueError: the weights are of an attention-free model (`relvit.families.aft`), and `net` is not such a model.
        ValueError: tables or embeddings cannot be converted, see `relvit.models.checkpoint_filter_fn`.
    """
    own = net.state_dict()
    given = {name: tensor for name, tensor in weights.state.items() if isinstance(tensor, Tensor)}
    if isinstance(net, OwnPositions):
        given = net.adapt_tables(given)
    elif hasattr(net, "blocks"):
        convert_irpe(given, net)
    for tensors, reason in UNFIT.items():
        if any(map(tensors.search, given)) and not any(map(tensors.search, own)):
            raise ValueError(
                f"{weights.source} {reason} in this {type(net).__name__}: build the model that the weights were "
                "trained in"
            )
    in_part: dict[str, str] = {}
    state = _convert(dict(given), net, own, weights.input_size, in_part)
    _adapt_channels(state, net, own)
    reordered = _fit_classifier(state, net, own, weights, class_names)

    fitting = {name: tensor for name, tensor in state.items() if name in own}
    differ = [name for name, tensor in fitting.items() if tensor.shape != own[name].shape]
    if differ:
        shapes = ", ".join(f"{name} {tuple(fitting[name].shape)}, here {tuple(own[name].shape)}" for name in differ[:2])
        raise ValueError(
            f"{weights.source} does not fit this {type(net).__name__}: another shape in {len(differ)} of "
            f"{len(fitting)} tensors ({shapes}); build the model that the weights were trained in"
        )
    # Find out which tensors of the checkpoint the filter used, and which tensors it added. A tensor that the filter
    # only renamed is still the same object. A tensor that the filter added is a tensor of the model, or has the same
    # number everywhere, such as zero.
    theirs, used = ({id(tensor) for tensor in tensors.values()} for tensors in (given, fitting))

    def is_added(name: str, tensor: Tensor) -> bool:
        return tensor.data_ptr() == own[name].data_ptr() or bool((tensor == tensor.flatten()[:1]).all())

    loaded = [
        name for name, tensor in fitting.items() if name in given or id(tensor) in theirs or not is_added(name, tensor)
    ]
    if not loaded:
        raise ValueError(
            f"nothing in {weights.source} fits this {type(net).__name__}: it holds {listing(list(given), 3) or 'none'}"
            f", the model {listing(list(own), 3)}; if only a prefix of the names differs, remove it, otherwise "
            "build the model that the weights were trained in"
        )
    net.load_state_dict(fitting, strict=False)
    return TransferReport(
        source=weights.source,
        loaded=loaded,
        resized=[
            name for name in loaded if name in given and name not in in_part and given[name].shape != own[name].shape
        ],
        in_part=in_part,
        new=[name for name in own if name not in loaded],
        skipped=[name for name, tensor in given.items() if name not in own and id(tensor) not in used],
        reordered=reordered,
    )


def _convert(
    state: dict[str, Tensor],
    net: nn.Module,
    own: dict[str, Tensor],
    input_size: tuple[int, int, int] | None,
    in_part: dict[str, str],
) -> dict[str, Tensor]:
    """Return the state dict in the names and sizes of the model; `in_part` receives tensors loaded in part."""
    if isinstance(net, Retrofitted) and not any(ABSOLUTE in name for name in own):
        # Leave out the checkpoint's absolute embedding: timm's filters would resize it to the model's embedding, which
        # `relvit.retrofit` has dropped.
        state = {name: tensor for name, tensor in state.items() if ABSOLUTE not in name}
    filter_fn = filter_of(net, in_part)
    if filter_fn is not None:
        cfg = cfg_of(net)
        # The filters compute the grid of the checkpoint's absolute embedding from this `input_size`, so it must be the
        # size of the checkpoint's images.
        net.pretrained_cfg = cfg | ({"input_size": input_size} if input_size else {})
        try:
            state = filter_fn(state)
        finally:
            net.pretrained_cfg = cfg
    if isinstance(net, Retrofitted) and any(POSITION in name for name in state):
        convert_positions(state, net, own)
    return state


def filter_of(net: nn.Module, in_part: dict[str, str]) -> Callable[[dict[str, Tensor]], dict[str, Tensor]] | None:
    """Return the function that adapts checkpoints to the model's architecture, found beside its class, as in timm."""
    for cls in type(net).__mro__:
        function = getattr(sys.modules[cls.__module__], "checkpoint_filter_fn", None)
        if function is None:
            continue
        parameters = inspect.signature(function).parameters
        # `adapt_layer_scale` converts the names that layer scale has in DeiT III's files. `log` is False, because the
        # report names the tensors that are left out.
        wanted = {"adapt_layer_scale": True, "log": False, "in_part": in_part}
        extra = {name: value for name, value in wanted.items() if name in parameters}
        rest = (net,) if len(parameters) > 1 else ()
        return lambda state, function=function, rest=rest, extra=extra: function(state, *rest, **extra)
    return None


def _adapt_channels(state: dict[str, Tensor], net: nn.Module, own: dict[str, Tensor]) -> None:
    first = cfg_of(net).get("first_conv") or ()
    for name in (f"{module}.weight" for module in ((first,) if isinstance(first, str) else first)):
        if name in state and name in own and state[name].dim() == own[name].dim() == 4:
            state[name] = _of_channels(state[name], own[name].shape[1])


def _of_channels(weight: Tensor, number: int) -> Tensor:
    """Repeat or sum up input channels as timm's `adapt_input_conv`, which before timm 1.0.31 takes only RGB weights."""
    given = weight.shape[1]
    if number == given:
        return weight
    if number == 1:
        return weight.float().sum(dim=1, keepdim=True).to(weight.dtype)
    repeated = weight.float().repeat(1, -(-number // given), 1, 1)[:, :number]
    return (repeated * (given / number)).to(weight.dtype)


def classifiers_of(net: nn.Module) -> tuple[nn.Module, ...]:
    """Return the last layers of a timm model, two if it has a distillation token; () of a model that names none.

    Examples:
        >>> classifiers_of(timm.create_model("relvit_tiny", num_classes=5, depth=1))
        (Linear(in_features=192, out_features=5, bias=True),)
    """
    heads = net.get_classifier() if hasattr(net, "get_classifier") else ()
    return heads if isinstance(heads, tuple) else (heads,)


def _fit_classifier(
    state: dict[str, Tensor],
    net: nn.Module,
    own: dict[str, Tensor],
    weights: Weights,
    ours: Sequence[str] | None,
) -> bool:
    """Leave out a classifier of other classes; put the rows of the same classes in order. Return whether rows moved."""
    theirs = weights.class_names
    parts = {id(parameter) for head in classifiers_of(net) for parameter in head.parameters()}
    names = [name for name, parameter in net.named_parameters() if id(parameter) in parts and name in state]
    named = theirs is not None and ours is not None
    if named and list(theirs) != list(ours) and not hasattr(net, "get_classifier"):
        raise ValueError(
            f"{type(net).__name__} has no get_classifier(), which returns the last layer, so that of the classes "
            f"{listing(list(theirs))} in {weights.source} cannot be fitted to the classes {listing(list(ours))} here: "
            "give the model this method"
        )
    if (named and sorted(theirs) != sorted(ours)) or any(state[name].shape != own[name].shape for name in names):
        for name in names:
            del state[name]
        return False
    if not named or not names or list(theirs) == list(ours):
        return False
    order, moved = [list(theirs).index(name) for name in ours], False
    for name in names:
        # Reorder only linear layers: a classifier may also have a norm (LeViT, RepVit), whose entries are not classes.
        weight = own.get(f"{name.rpartition('.')[0]}.weight", own[name])
        if len(state[name]) == len(order) and weight.dim() > 1:
            state[name], moved = state[name][order], True
    return moved


def _in_short(names: Sequence[str]) -> list[str]:
    """Return names with all blocks as one: 'blocks.*.attn.position.key_rows (12)'."""
    counts = Counter(re.sub(r"\.\d+(?=\.)", ".*", name) for name in names)
    return [name if count == 1 else f"{name} ({count})" for name, count in counts.items()]
