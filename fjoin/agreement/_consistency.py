"""Checks that all ranks do the same at one place of a program."""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch

from .._errors import DesyncError
from ..groups._mesh import Mesh
from ..transforms.pipelines._pipeline import Pipeline
from ..transforms.transform._transform import Transform
from ._device_reads import read_now


def same_rates(mesh: Mesh, rates: list[tuple[str, float]]) -> None:
    """Raise on all ranks unless they begin with the same hyperparameters.

    Raises:
        DesyncError: naming the first rank that differs from the majority.
    """
    if problem := mesh.exchange("fjoin.ddp.register", repr(rates), _odd):
        rank, there, usual = problem
        raise DesyncError(
            f"rank {rank} has the hyperparameters {there}, but other ranks {usual}; a schedule must not depend on the rank",
            rank=rank,
        )


def same_loops(mesh: Mesh, axes: tuple[str, ...], loop: str) -> None:
    """Raise on all ranks of some axes, before the first message, unless they run the same kind of loop.

    Raises:
        DesyncError: naming the first rank that differs from the majority.
    """
    if problem := mesh.exchange("the first step", loop, _odd, axes):
        rank, there, usual = problem
        raise DesyncError(
            f"rank {rank} runs {there}, but other ranks {usual}; run the same loop on all ranks", rank=rank
        )


def same_step(mesh: Mesh, step: int) -> None:
    """Raise on all ranks unless they continue from the same step.

    Raises:
        DesyncError: naming the first rank that differs from the majority.
    """
    if problem := mesh.exchange("the first pass after load_state_dict", step, _odd):
        rank, there, usual = problem
        raise DesyncError(
            f"rank {rank} goes on from step {there}, but other ranks from step {usual}; load the same state on all ranks",
            rank=rank,
            step=there,
        )


def parameters_fit(mesh: Mesh, fit: bool, step: int) -> None:
    """Raise on all ranks unless each of them has the parameters that go with the state that it has loaded.

    Raises:
        DesyncError: naming the first rank that has others.
    """
    odd = mesh.exchange(
        "the first pass after load_state_dict", fit, lambda fits: fits.index(False) if False in fits else None
    )
    if odd is not None:
        raise DesyncError(
            f"rank {odd} goes on from step {step} with other parameters than those that go with the state_dict() it has loaded. "
            f"Load each rank's own weights after DistributedDataParallel(...), which sends rank 0's to all ranks",
            rank=odd,
            step=step,
        )


def _odd(values: list[Any]) -> Any:
    """The first rank whose value differs from the majority's: `[rank, value, majority's value]`; None if none does."""
    usual = Counter(values).most_common(1)[0][0]
    return next(([rank, value, usual] for rank, value in enumerate(values) if value != usual), None)


def sum_names(mesh: Mesh, axes: tuple[str, ...], mine: list[str] | None) -> tuple[str, ...] | None:
    """The names in aux["sum"], agreed on by the ranks of some axes; None if no rank knows them.

    Only ranks with a batch know the names.

    Raises:
        DesyncError: two ranks with a batch have different names.
    """
    found = mesh.exchange("the first step", mine, _common_names, axes)
    if "problem" in found:
        raise DesyncError(found["problem"], rank=found["rank"])
    return None if found["names"] is None else tuple(found["names"])


def _common_names(values: list[list[str] | None]) -> dict[str, Any]:
    known = [(rank, sorted(names)) for rank, names in enumerate(values) if names is not None]
    for rank, names in known:
        if names != known[0][1]:
            return {
                "rank": rank,
                "problem": f"aux['sum'] has the names {names} on rank {rank}, but {known[0][1]} on rank {known[0][0]}; "
                f"they must be the same on all ranks",
            }
    return {"names": known[0][1] if known else None}


def same_joinables(mesh: Mesh, device: torch.device, joinables: Sequence[Any], throws: bool) -> None:
    """Raise on all ranks unless they enter a Join with the same kinds of joinables: one small message.

    Raises:
        DesyncError: naming the first rank that differs from rank 0.
    """
    kinds = [f"{type(joinable).__module__}.{type(joinable).__qualname__}" for joinable in joinables]
    mine = torch.tensor([zlib.crc32(repr((kinds, throws)).encode())], device=device)
    for axis in reversed(mesh.over(tuple(mesh.shape))):
        mine = axis.run("all_gather", mine, None)
    seen = read_now(mesh, mine.flatten())
    odd = [rank for rank, value in enumerate(seen) if value != seen[0]]
    if odd:
        raise DesyncError(
            f"rank {odd[0]} enters this Join with other joinables, or another throw_on_early_termination, than rank 0; "
            f"here: {[type(joinable).__name__ for joinable in joinables]}. All ranks must enter with the same ones in the same "
            f"order",
            rank=odd[0],
        )


def same_hook(mesh: Mesh, hook: Transform | Pipeline) -> None:
    """Raise on all ranks unless they register the same hook or pipeline.

    Raises:
        DesyncError: naming the first rank that differs from rank 0.
    """

    def odd(values: list[list[str]]) -> Any:
        for rank, (spec, shown) in enumerate(values):
            if spec != values[0][0]:
                return [
                    rank,
                    f"rank {rank} registers {shown}, but rank 0 {values[0][1]}; register the same on all ranks",
                ]
        return None

    problem = mesh.exchange("fjoin.ddp.register", [hook.spec.canonical(), repr(hook)], odd)
    if problem:
        raise DesyncError(problem[1], rank=problem[0])
