"""Relative errors, their limits, and the lines that `gpu_check.py` prints of them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

# In half precision, an error may be this many times the error of stock attention on the same contents: the logits of
# terms are rounded once more, as channels of the augmented vectors.
TIMES_STOCK = 3
Limits = dict[str, float] | float


class Measured(NamedTuple):
    """A relative error, the allowed error, and a remark."""

    error: float
    limit: float
    remark: str = ""


class Log:
    """Prints a line per check, and counts them by status."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    def check(self, name: str, measure: Callable[[], Measured]) -> None:
        """Compare what `measure` returns; an exception is a failure."""
        try:
            error, limit, remark = measure()
        except Exception as raised:
            error, limit = math.inf, 0.0
            remark = f"{type(raised).__name__}: {str(raised).partition(chr(10))[0][:200]}"
        # NaN is never within a limit: comparisons with NaN are false.
        self.print("ok" if error <= limit else "FAIL", name, f"{error:.1e} {limit:.1e} {remark}")

    def print(self, status: str, name: str, remark: str) -> None:
        """Print a line and count its status; status `note` cannot fail."""
        self.counts[status] += 1
        print(f"{status:4} {name} {remark}".rstrip(), flush=True)


def short(dtype: torch.dtype) -> str:
    """Return the name of a dtype."""
    return str(dtype).removeprefix("torch.")


def relative_error(got: Tensor, want: Tensor) -> float:
    """Return the RMS of the difference divided by the RMS of the wanted result; infinity if it differs from zeros."""
    difference, size = (float(t.norm()) for t in (got.detach().cpu().double() - want, want))
    if not math.isfinite(difference):
        return math.inf
    return difference / size if size else (0.0 if difference == 0 else math.inf)


def error_of(name: str, got: Tensor, want: Tensor) -> float:
    """Return the relative error, of the worst sample where there are samples, so that none is hidden by the others."""
    if name in ("result", "query", "key", "value"):
        return max(map(relative_error, got, want))
    return relative_error(got, want)


def stock_limits(got: dict[str, Tensor], exact: dict[str, Tensor], times: float = TIMES_STOCK) -> Limits:
    """Return the allowed errors of result and gradients in half precision, from the errors of stock attention."""
    errors = {name: times * error_of(name, got[name], exact[name]) for name in got}
    return {"result": errors.pop("result"), "gradient": max(errors.values())}


def worst(got: dict[str, Tensor], want: dict[str, Tensor], limits: Limits) -> Measured:
    """Return the error that is nearest to its limit, or furthest beyond it."""
    measured = []
    for name, tensor in got.items():
        limit = limits if isinstance(limits, float) else limits["result" if name == "result" else "gradient"]
        if not isinstance(limits, float) and name.removeprefix("position.").startswith("bias"):
            # In the gradient of a bias per offset, large terms of opposite signs cancel.
            limit *= 2
        measured.append(Measured(error_of(name, tensor, want[name]), limit, name))
    return max(measured, key=lambda one: one.error / one.limit)
