"""A step calls few functions: each costs 2 to 3 microseconds, with what it calls. Limits that a change may only lower."""

from __future__ import annotations

import gc
import os
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import fjoin
from fjoin import transforms as tx

# Functions of ours that a steady step calls, and their calls, comprehensions included; one message over gloo.
LIMITS = {"train_step": (115, 145), "donate": (81, 138), "pure": (83, 157), "registered": (106, 156), "loop": (44, 67)}
ROOTS = tuple(os.path.dirname(os.path.realpath(module.__file__ or "")) for module in (fjoin, tx))
PIPELINE = tx.fuse(tx.mean("data"), tx.adamw(1e-3))


def params_of(layers: int) -> dict[str, dict[str, torch.Tensor]]:
    return {f"layer{i}": {"w": torch.full((4, 4), 0.1), "b": torch.zeros(4)} for i in range(layers)}


def loss_fn(params: Any, batch: torch.Tensor) -> torch.Tensor:
    for layer in params.values():
        batch = torch.tanh(batch @ layer["w"] + layer["b"])
    return batch.square().mean()


def steps(kind: str, mesh: fjoin.Mesh, depth: int) -> Callable[[], None]:
    """A function that takes a step."""
    batch = torch.ones(2, 4)
    if kind == "train_step":
        step = fjoin.train_step(loss_fn, PIPELINE, mesh=mesh)
        held: list[Any] = [step.init(params_of(depth))]

        def run() -> None:
            held[0], _ = step(held[0], batch)

    elif kind == "registered":
        layers = [layer for _ in range(depth) for layer in (torch.nn.Linear(4, 4), torch.nn.Tanh())]
        model = DistributedDataParallel(torch.nn.Sequential(*layers))
        fjoin.ddp.register(model, PIPELINE, mesh)

        def run() -> None:
            model(batch).square().mean().backward()

    elif kind == "loop":  # an iteration of a loop of one's own, whose position is not asked for
        batches = iter(fjoin.join([torch.ones(2, 4)] * 20, mesh=mesh))

        def run() -> None:
            next(batches)

    else:
        params = params_of(depth)
        held = [params, PIPELINE.init(params)]
        grads = params_of(depth)

        def run() -> None:
            held[:] = PIPELINE.step(held[0], grads, held[1], donate=kind == "donate")

    return run


def counted(kind: str, depth: int) -> tuple[int, int]:
    """The fewest functions and calls of three steps: a rank that waits long for a message looks for failures meanwhile."""
    mesh = fjoin.mesh({"data": -1}, transport="gloo")
    run, found = steps(kind, mesh, depth), list[Counter[Any]]()

    def called(frame: Any, event: str, arg: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(ROOTS):
            found[-1][frame.f_code.co_filename, frame.f_code.co_firstlineno, frame.f_code.co_name] += 1

    with fjoin.bind(mesh):
        for _ in range(6):
            run()
        for _ in range(3):
            gc.collect()  # what earlier tests have left calls functions of ours when it is freed
            found.append(Counter())
            sys.setprofile(called)
            try:
                run()
            finally:
                sys.setprofile(None)
    return min((len([name for *_, name in one if not name.startswith("<")]), sum(one.values())) for one in found)


@pytest.mark.parametrize("kind", LIMITS)
def test_a_step_calls_few_functions(pool: Any, kind: str) -> None:
    """Of 74 layers."""
    functions, calls = LIMITS[kind]
    for found in pool.run(2, counted, kind, 74):
        assert found[0] <= functions and found[1] <= calls, (found, LIMITS[kind])
