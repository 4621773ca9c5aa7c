"""The phases that `explain` lists are those in which messages change when every step is taken, found in a few calls."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fjoin import transforms as tx
from fjoin.transforms.axes.simulator import _lockstep
from tests.traffic import announced

PARAMS = {"w": torch.zeros(40, 10)}
MEAN, INT4 = tx.mean("data"), tx.quantized_mean("data", tx.int4())
HOOKS: dict[str, tuple[Callable[[], tx.Transform], int]] = {  # and the number of steps to take
    "mean": (lambda: tx.mean("data"), 3),
    "dgc": (lambda: tx.dgc("data", 0.01, warmup=7), 9),
    "dgc, at once": (lambda: tx.dgc("data", 0.01), 3),
    "dgc, one": (lambda: tx.dgc("data", 0.01, warmup=1), 3),
    "power_sgd": (lambda: tx.power_sgd("data", 1, start=3, min_compression_rate=0.5), 6),
    "batched power_sgd": (lambda: tx.batched_power_sgd("data", 1, start=2, min_compression_rate=0.5), 5),
    "1-bit Adam": (lambda: tx.one_bit_adam("data", 4), 7),
    "switch": (lambda: tx.switch_after(2, tx.mean("data"), tx.quantized_mean("data", tx.int8())), 5),
    "fed back": (lambda: tx.error_feedback(tx.switch_after(3, tx.cast(torch.bfloat16, MEAN), INT4)), 6),
}  # fmt: skip


def sent_by(hook: tx.Transform, steps: int, monkeypatch: pytest.MonkeyPatch) -> list[list[tuple[str, int]]]:
    """The collectives of the first of two ranks in each step, and their bytes, as they reach the axis."""
    seen: list[list[tuple[str, int]]] = []
    run = _lockstep.SimulatedAxis.run

    def watch(axis: Any, op: str, x: Tensor, arg: Any) -> Tensor:
        if int(axis.index()) == 0:
            seen[-1].append((op, x.numel() * x.element_size()))
        return run(axis, op, x, arg)

    monkeypatch.setattr(_lockstep.SimulatedAxis, "run", watch)

    def one_rank(rank: int) -> None:
        g = torch.Generator().manual_seed(rank)
        state = hook.init(PARAMS)
        for step in range(steps):
            grads = {path: torch.randn(p.shape, generator=g) for path, p in PARAMS.items()}
            if rank == 0:
                seen.append([])
            _, state = hook.update(grads, state, PARAMS, step=step)
            tx.axis_index("data")

    tx.simulate(one_rank, {"data": 2}, [0, 1])
    return seen


@pytest.mark.parametrize("name", HOOKS)
def test_phases_begin_where_messages_change(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A phase begins exactly where the messages differ from those of the step before."""
    make, steps = HOOKS[name]
    sent = sent_by(make(), steps, monkeypatch)
    what = tx.explain(make(), PARAMS, {"data": 2})
    said = [announced(what, step) for step in range(steps)]
    for step in range(1, steps):
        assert (sent[step] == sent[step - 1]) == (said[step] == said[step - 1]), step
    assert [len(one) for one in sent] == [len(one) for one in said]


def calls(hook: tx.Transform) -> tuple[int, int]:
    """The calls of `update` in an explain, and the phases shown."""
    made = []

    def counted(*args: Any, **extra: Any) -> Any:
        made.append(None)
        return hook.update(*args, **extra)

    what = tx.explain(dataclasses.replace(hook, update=counted), PARAMS, {"data": 2})
    return len(made), len(what.rows)


WARM_UPS: dict[str, tuple[Callable[[], tx.Transform], int]] = {  # and the number of its phases
    "dgc": (lambda: tx.dgc("data", 0.01, warmup=1000), 6),
    "dgc, longer": (lambda: tx.dgc("data", 0.01, warmup=100_000), 6),
    "1-bit Adam": (lambda: tx.one_bit_adam("data", 1000), 2),
    "power_sgd": (lambda: tx.power_sgd("data", 1, start=1000, min_compression_rate=0.5), 2),
    "batched power_sgd": (lambda: tx.batched_power_sgd("data", 1, start=1000, min_compression_rate=0.5), 2),
    "dgc, at once": (lambda: tx.dgc("data", 0.01), 1),
    "mean": (lambda: tx.mean("data"), 1),
}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            name,
            marks=[pytest.mark.long] * (name == "dgc, longer"),
        )
        for name in WARM_UPS
    ],
)
def test_a_stage_runs_at_most_twice_for_each_phase(name: str) -> None:
    """A long warm-up must not cost more than a short one."""
    make, phases = WARM_UPS[name]
    made, shown = calls(make())
    assert shown == phases
    assert made <= 2 * phases


@pytest.mark.long
@pytest.mark.parametrize("warmup", [100, 1000])
def test_the_phases_of_a_long_warm_up(warmup: int) -> None:
    """The share falls by the same factor in each of five stages of equal lengths; k = 0.01 from 0.25 on."""
    what = tx.explain(tx.dgc("data", 0.01, warmup=warmup), PARAMS, {"data": 2})
    starts = [int(row.when.split(",")[0].removeprefix("from step ")) for row in what.rows[1:]]
    assert what.rows[0].when == f"before step {warmup // 5}"
    assert starts == [warmup * (i + 1) // 5 for i in range(5)]
