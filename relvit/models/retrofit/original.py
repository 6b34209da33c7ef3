"""`relvit.restore`: give a model its original classes and tables back after `relvit.retrofit`."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from relvit.layers.attention import GridAttention
from relvit.models.base import put_classifier_last
from relvit.models.retrofit.source import OwnPositions, Retrofitted
from relvit.ops.checks import check_model
from relvit.utils.messages import part_of

MEMBERS = ("_parameters", "_buffers", "_modules")
# `relvit.models.set_reach` and users set these attributes after a retrofit. `restore` removes these attributes, because
# the original classes do not read them.
LATER = ("trained_keys", "window", "trained_grid", "recurrence", "mirrored_grid")
# These are the names that a retrofit adds to the arguments that timm saves with a model.
DESCRIPTION = ("model", "retrofit")
RECORD = "_before_retrofit"
WINDOWS = "_windows_before"


class Absent:
    """Marker for an attribute that a module did not have.

    The class itself is the marker, and not an object, because copies and pickles of a model refer to the same class.
    """


class Before(NamedTuple):
    """State of a module before its retrofit: all of it, or only the part that the retrofit has changed.

    `snapshot` stores all attributes and members; `record_changes` stores the former values of the changed ones.
    `members` has an entry for each of `MEMBERS`: the module's parameters, buffers and submodules by name. `values`
    holds the buffers that the module cannot compute again.
    """

    kind: type[nn.Module]
    attributes: dict[str, Any]
    members: dict[str, dict[str, Any]]
    values: Mapping[str, Tensor] = {}


def snapshot(model: nn.Module) -> dict[str, Before]:
    """Return the state of all modules by name: class, attributes and members; nothing is copied."""
    return {
        name: Before(
            type(module),
            {key: value for key, value in vars(module).items() if key not in MEMBERS},
            {kind: dict(vars(module)[kind]) for kind in MEMBERS},
        )
        for name, module in model.named_modules()
    }


def record_changes(model: nn.Module, before: Mapping[str, Before]) -> None:
    """Store in a model, for `restore`, the former state of all modules that differ from the snapshot.

    The record keeps the shapes of the tensors and modules that the retrofit has removed. The record keeps values only
    for buffers that no method can compute again.
    """
    record, after = {}, snapshot(model)
    for name, then in before.items():
        # If the retrofit has removed this module, the `members` of its parent record the removal. So compare the module
        # with itself: only `values` can then have something to record.
        now = after.get(name, then)
        values = _not_computed(then, now.members["_buffers"] if name in after else {})
        attributes = _changed(then.attributes, now.attributes)
        members = {kind: _changed(then.members[kind], now.members[kind]) for kind in MEMBERS}
        members = {kind: {key: _skeleton(value) for key, value in part.items()} for kind, part in members.items()}
        if then.kind is not now.kind or attributes or any(members.values()) or values:
            record[name] = Before(then.kind, attributes, members, values)
    setattr(model, RECORD, record)
    setattr(model, WINDOWS, model.windows())


def restore(model: nn.Module) -> nn.Module:
    """Give a retrofitted model that always had relative positions its original classes and tables back, in place.

    The function undoes `relvit.retrofit`: the model has the classes and the state dict's names of its own library
    again. Where nothing was trained, all tensors are equal bit by bit; where tables were trained, the original classes
    compute the same outputs from the trained tables at the training size. Hooks, the training mode, frozen parameters
    (also those of `abs_pos='freeze'`) and all other modules stay. If an error is raised, the model is not changed.

    Examples:
        >>> beit = timm.create_model("beit_base_patch16_224", img_size=64, depth=1)
        >>> type(relvit.retrofit(beit).blocks[0].attn).__module__.split(".")[0]
        'relvit'
        >>> type(restore(beit).blocks[0].attn).__module__.split(".")[0]
        'timm'

    Args:
        model: a retrofitted model that keeps its own relative positions; for a whole SAM, pass its image encoder.

    Returns:
        `model` itself.

    Raises:
        TypeError: `model` is not a module.
        ValueError: the model has not been retrofitted, or had no relative positions of its own before the retrofit, so
            that the original classes have no place for the tables.
        ValueError: the retrofit has added a table that all blocks share to a block's own table, and only the sum is
            known.
        ValueError: the retrofit has removed the absolute embedding (`abs_pos='drop'`).
        ValueError: after the retrofit timm's `set_input_size` has changed windows that have tables in the original.
    """
    check_model(model)
    if not isinstance(model, Retrofitted):
        inner = next((name for name, part in model.named_modules() if isinstance(part, Retrofitted)), None)
        hint = "" if inner is None else f"; its {inner} has: relvit.restore({part_of(inner)})"
        raise ValueError(f"{type(model).__name__} has not been retrofitted{hint}")
    if not isinstance(model, OwnPositions):
        raise ValueError(
            f"{type(model).__name__} cannot be restored: the original has no place for the tables that retrofit added; "
            "build the original model again"
        )
    record, windows = vars(model)[RECORD], vars(model)[WINDOWS]
    for name, now in model.windows().items():
        if now != windows[name]:
            raise ValueError(
                f"{type(model).__name__} cannot be restored: since the retrofit set_input_size has changed the windows "
                f"of {name} from {windows[name]} to {now} patches; call relvit.restore before set_input_size"
            )
    tables = model.original_tables(dict(_gone(record)))
    arguments = {name: given for name, given in vars(model).get("_model_args", {}).items() if name not in DESCRIPTION}

    # All checks have passed: nothing fails from here on, so an error never leaves the model half changed.
    for module in model.modules():
        if module is model or isinstance(module, GridAttention):
            for name in LATER:
                vars(module).pop(name, None)
    renewed: list[nn.Module] = []
    values: list[tuple[nn.Module, Mapping[str, Tensor]]] = []
    for name, then in record.items():
        try:
            module = model.get_submodule(name)
        except AttributeError:
            # The module was pruned after the retrofit, so skip it.
            continue
        module.__class__ = then.kind
        _put_back(vars(module), then.attributes)
        prefix = f"{name}." if name else ""
        for kind in MEMBERS:
            made = {key: _renewed(part, tables, prefix + key, module) for key, part in then.members[kind].items()}
            _put_back(vars(module)[kind], made)
            renewed += [part for new in made.values() if isinstance(new, nn.Module) for part in new.modules()]
        renewed += [module] if then.members["_buffers"] else []
        values.append((module, then.values))
    put_classifier_last(model)
    if hasattr(model, "_model_args"):
        # Keep changes that timm has recorded since the retrofit, such as a change by `reset_classifier`.
        model._model_args = {**model._model_args, **arguments}
    delattr(model, RECORD)
    delattr(model, WINDOWS)
    for module in renewed:
        # This method of timm computes the buffers that are not in a state dict, so call it for modules with new parts.
        if hasattr(module, "init_non_persistent_buffers"):
            module.init_non_persistent_buffers()
    for module, buffers in values:
        for key, value in buffers.items():
            like = module.get_buffer(key)
            module.register_buffer(key, value.to(like), key not in module._non_persistent_buffers_set)
    return model


def _changed(then: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, Any]:
    """Return the former values of the entries that have changed."""
    former = {key: then.get(key, Absent) for key in (*now, *then)}
    return {key: value for key, value in former.items() if value is not now.get(key, Absent)}


def _put_back(here: dict[str, Any], former: Mapping[str, Any]) -> None:
    for key, value in former.items():
        if value is Absent:
            here.pop(key, None)
        else:
            here[key] = value


def _not_computed(then: Before, now: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the buffers that the retrofit has removed from a module and that the module's class cannot compute again.

    In some versions of timm a class cannot compute its buffers again: Swin V2's block has no method for its mask of
    shifted windows.
    """
    buffers = {
        key: value
        for key, value in then.members["_buffers"].items()
        if value is not None and not value.is_meta and value is not now.get(key)
    }
    if not buffers or not hasattr(then.kind, "init_non_persistent_buffers"):
        return buffers
    # To find the buffers that timm's method does not compute as before, copy the module, fill the buffers of the copy
    # with wrong numbers, call the method, and compare.
    again = then.kind.__new__(then.kind)
    vars(again).update({**then.attributes, **{kind: dict(part) for kind, part in then.members.items()}})
    vars(again)["_non_persistent_buffers_set"] = set(then.attributes["_non_persistent_buffers_set"])
    vars(again)["_buffers"].update({key: torch.full_like(value, -7) for key, value in buffers.items()})
    again.init_non_persistent_buffers()
    computed = dict(again.named_buffers(recurse=False))
    return {key: value for key, value in buffers.items() if key in computed and not torch.equal(computed[key], value)}


def _skeleton(part: Any) -> Any:
    """Return a tensor or module on the meta device, where it takes no memory; anything else stays."""
    if isinstance(part, nn.Module):
        return _copied(part).to("meta")
    if isinstance(part, nn.Parameter):
        return nn.Parameter(torch.empty_like(part, device="meta"), part.requires_grad)
    return torch.empty_like(part, device="meta") if isinstance(part, Tensor) else part


def _copied(module: nn.Module) -> nn.Module:
    """Copy a module that keeps its hooks, which may belong to objects that cannot be copied, such as a log."""
    hooks = (value for part in module.modules() for name, value in vars(part).items() if "_hooks" in name)
    return copy.deepcopy(module, {id(each): each for each in hooks})


def _gone(record: Mapping[str, Before]) -> Iterator[tuple[str, Tensor]]:
    """Yield the names in the original's state dict that the model lacks, each with a tensor of its shape."""
    for name, then in record.items():
        parts = {**then.members["_parameters"], **then.members["_modules"]}
        for key, part in parts.items():
            path = f"{name}.{key}" if name else key
            if isinstance(part, nn.Module):
                yield from ((f"{path}.{leaf}", tensor) for leaf, tensor in part.state_dict().items())
            elif isinstance(part, Tensor):
                yield path, part


def _renewed(part: Any, tables: Mapping[str, Tensor], path: str, owner: nn.Module) -> Any:
    """Return a tensor or module of the original, which `_skeleton` has recorded, for its owner; anything else stays."""
    if isinstance(part, nn.Parameter):
        return nn.Parameter(tables[path].detach(), tables[path].requires_grad)
    if isinstance(part, nn.Module):
        state = {leaf: tables[f"{path}.{leaf}"] for leaf in part.state_dict()}
        like = next(iter(state.values()))
        # `half()` or `to(device)` may have converted the model since the skeleton was recorded, so take dtype and
        # device from the tables.
        module = _copied(part).to(like.dtype).to_empty(device=like.device).train(owner.training)
        module.load_state_dict(state)
        for leaf, parameter in module.named_parameters():
            parameter.requires_grad_(state[leaf].requires_grad)
        return module
    if isinstance(part, Tensor):
        like = next(owner.parameters())
        dtype = like.dtype if part.is_floating_point() else part.dtype
        return torch.empty_like(part, device=like.device, dtype=dtype)
    return part
