"""Several train_steps over one mesh: called in the same order on all ranks, from one thread."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fjoin
from fjoin import transforms as tx
from tests.helpers import judged, raises_text, same_bits

HOOKS: dict[str, Any] = {
    "mean": lambda: tx.mean("data"), "clip": lambda: tx.chain(tx.mean("data"), tx.clip_by_global_norm(1e4)),
    "int8": lambda: tx.compress(tx.int8(), tx.mean("data")), "noop": lambda: tx.identity(),
    "twice": lambda: tx.chain(tx.mean("data"), tx.mean("data", over="live")), "left out": lambda: tx.mean("data"),
}  # fmt: skip


def pipeline_of(hook: str) -> tx.Pipeline:
    if hook == "local":
        return tx.local_sgd(tx.sgd(1.0), tx.mean("data"), 9)
    pipeline = tx.fuse(HOOKS[hook](), tx.sgd(1.0), after=tx.average_parameters("data") if hook == "noop" else None)
    return tx.skip_if_nonfinite(pipeline) if hook == "left out" else pipeline


def three_steps(hook: str, mesh: Any, on_device: bool = False) -> Any:
    pipeline = pipeline_of(hook)
    steps = [
        judged(fjoin.train_step(lambda p, b, k=k: (p["w"] * b * k).sum(), pipeline, mesh=mesh), on_device)
        for k in (1, 2, 3)
    ]
    return steps, [step.init({"w": torch.zeros(3)}) for step in steps]


def in_another_order(hook: str, on_device: bool = False) -> None:
    """All ranks have the error, and their states still have the values from before the odd step."""
    mesh = fjoin.mesh({"data": -1}, timeout_s=60)
    steps, states = three_steps(hook, mesh, on_device)
    for i in (0, 1, 2):
        states[i], _ = steps[i](states[i], 1.0)
    before = [state.clone() for state in states]

    def odd() -> None:
        order = (1, 2, 0) if mesh.rank == 1 else (0, 1, 2)
        for i in order * 3:  # on a device the host knows two steps later
            states[i], _ = steps[i](states[i], 1.0)

    if hook == "local":  # known one step later
        raises_text(fjoin.DesyncError, odd, "step 1", "different train_steps", "each has taken its own step")
        return
    raises_text(fjoin.DesyncError, odd, "different train_steps", "same order", "nothing has changed")
    assert all(same_bits(a.params, b.params) for a, b in zip(before, states, strict=True))


@pytest.mark.sample(3)
@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("hook", [*HOOKS, "local"])
def test_different_step_order_raises_before_any_change(hook: str, on_device: bool) -> None:
    for ranks in (2, 3):
        tx.simulate(lambda: in_another_order(hook, on_device), {"data": ranks})


@pytest.mark.sample(2)
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("hook", ["mean", "int8", "noop"])
def test_another_order_on_processes(pool: Any, hook: str, ranks: int) -> None:
    pool.run(ranks, in_another_order, hook)
