"""The hyperparameters of a pure step, which must be the same on all ranks."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import torch
from torch import Tensor

from .._check import AxisName
from .._errors import DesyncError
from ..axes._collectives import axis_size
from ..axes._gather_scatter import all_gather
from ..optimizers.wrappers._inject import compared
from ..schedules._rates import check_rates
from ..spec._fingerprint import fingerprint
from ..step_param._lift import states_of
from ..step_param._optimizer import Optimizer
from ..tree._tree import State, Tree, plain

Rates = Sequence[tuple[str, float]]
NAME = "rates"  # in the lane
_PIPELINE = "pipeline"
# Numbers in [2^19, 2^20): none is a multiple of another, and their sums over 2^14 ranks are exact in the lane.
LEAST = 2**19


def number_of(*parts: object) -> float:
    """A number that tells values apart where it is summed over ranks: the sum is a multiple only where all are equal."""
    return float(LEAST + zlib.crc32(repr(parts).encode()) % LEAST)


def mark_of(*parts: object) -> list[tuple[str, float]]:
    """What a pipeline's first step compares in addition: a number that tells these parts from others."""
    return [(_PIPELINE, float(int(fingerprint(*parts)[:12], 16)))]


def rates_of(optimizer: Optimizer, params: Tree, slots: State) -> list[tuple[str, float]]:
    """The hyperparameters that may differ between ranks, by name; without those that Python cannot read now."""
    if not plain(params, slots):
        return []
    if optimizer.select is None and not compared(optimizer, optimizer.forms.probe):
        return []
    names, _, states, _ = states_of(params, slots)
    parts = {}
    for name, state in zip(names, states, strict=True):
        part = optimizer.at(name)
        parts[id(part)] = part, state
    hypers = [(compared(part, state), state.step) for part, state in parts.values()]
    return [rate for some, step in hypers if some for rate in check_rates(some, step)]


def check_sum(rates: Rates, summed: Tensor, axes: AxisName, step: int) -> None:
    """Raise DesyncError on all ranks of some axes unless they have these hyperparameters.

    Args:
        summed: The sum of `number_of(rates)` over the ranks, one or more times.
    """
    if float(summed.detach()) % (axis_size(axes) * number_of(rates)) == 0:
        return
    for some in (rates[:1], rates[1:]):  # of other pipelines there may be another number
        ranks = all_gather(torch.tensor([value for _, value in some], dtype=torch.float64), axes)
        for rank, there in enumerate(ranks.tolist()):
            for (name, _), value, first in zip(some, there, ranks[0].tolist(), strict=True):
                if value != first:
                    raise DesyncError(_text(name, rank, value, first, step), rank=rank, step=step)


def _text(name: str, rank: int, value: float, first: float, step: int) -> str:
    if name == _PIPELINE:
        return (
            f"step {step}: rank {rank} has another pipeline than rank 0; make it from the same arguments on all ranks"
        )
    return (
        f"step {step}: rank {rank} steps with {name}={value!r}, but rank 0 with {name}={first!r}; a schedule must not depend "
        f"on the rank or its data, and with_hyperparameters(...) takes equal values on all ranks"
    )
