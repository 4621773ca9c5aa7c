"""Unusable arguments, states and values, by public name: a typed error that says which. A function without a row fails."""

from __future__ import annotations

import collections
import enum
import inspect
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

import fjoin
import fjoin.checkpoint
import fjoin.ddp
import fjoin.fsdp
import fjoin.jax
import fjoin.testing
from fjoin import transforms as tx
from tests.helpers import raises_text
from tests.refusals import of_optimizers, of_shell, of_transforms

ROWS: dict[str, list[tuple[Any, ...]]] = collections.defaultdict(list)
TABLES = (
    of_transforms.ROWS,
    of_transforms.HOOKS,
    of_shell.ROWS,
    of_shell.MODULES,
    of_optimizers.ROWS,
    of_optimizers.RATES,
)
for table in TABLES:
    for name, rows in table.items():
        ROWS[name] += rows


def in_pair(call: Callable[[], Any]) -> Callable[[], Any]:
    return lambda: tx.simulate(call, {"data": 2})


for name, rows in of_transforms.COLLECTIVES.items():
    ROWS[name] += [(in_pair(call), *expected) for call, *expected in rows]

FACES = (fjoin, tx, fjoin.ddp, fjoin.fsdp, fjoin.checkpoint, fjoin.testing, fjoin.jax)


@pytest.mark.parametrize("name", ROWS)
def test_it_is_refused(name: str) -> None:
    for call, kind, *words in ROWS[name]:
        raises_text(kind, call, *words)


# Classes whose objects fjoin makes, and functions that take any tree, or leave it to Python and torch to refuse an argument.
MADE = {
    "Call", "Codec", "Handle", "JoinHook", "Members", "Mesh", "Metrics", "PerRank", "Timing", "ShardedHandle", "TrainState", "TrainStep",
    "NO_BATCH",
}  # fmt: skip
ANY = {"apply_activation_checkpointing", "flat", "nested", "to_jax", "to_torch", "SyncBatchNorm"}
CHECKS = {"check_average", "check_codec", "check_feedback", "check_optimizer", "check_transform"}


def functions(face: Any) -> set[str]:
    """The public names that are called with values of the user's."""
    found = set()
    for name in dir(face):
        value = getattr(face, name)
        record = isinstance(value, type) and (
            issubclass(value, (BaseException, tuple, enum.Enum))
            or inspect.isabstract(value)
            or getattr(value, "_is_protocol", False)
        )
        if not name.startswith("_") and callable(value) and not record and name not in MADE | ANY | CHECKS:
            found |= {name} if inspect.signature(value).parameters else set()
    return found


@pytest.mark.parametrize("face", FACES, ids=lambda face: face.__name__)
def test_each_public_function_has_a_row(face: Any) -> None:
    assert functions(face) - ROWS.keys() == set()


def on_real_ranks() -> None:
    with fjoin.bind(fjoin.mesh({"data": -1})):
        for rows in of_transforms.COLLECTIVES.values():
            for call, kind, *words in rows:
                raises_text(kind, call, *words)


def test_real_ranks_refuse_the_same(pool: Any) -> None:
    pool.run(2, on_real_ranks)


def test_nothing_is_lost_by_an_error_in_a_step() -> None:
    """The state is unchanged, and the next step takes it."""
    weights, sums = iter((1.0, 1e300, "3", 1.0, 1.0)), iter((1.0, 1e300, 1.0))
    step = fjoin.train_step(
        lambda p, b: (of_shell.loss(p, b), {"sum": {"a": next(sums)}}), of_shell.PIPE, weight=lambda b: next(weights),  # type: ignore[arg-type,return-value]
    )  # fmt: skip
    state, _ = step(step.init(of_shell.P), torch.ones(3))
    before = state.params["w"].tolist()
    raises_text(ValueError, lambda: step(state, torch.ones(3)), "weight(batch)")
    raises_text(TypeError, lambda: step(state, torch.ones(3)), "weight(batch)")
    raises_text(ValueError, lambda: step(state, torch.ones(3)), "1e+300")
    assert state.params["w"].tolist() == before
    assert step(state, torch.ones(3))[1].sums == {"a": 1.0}


@pytest.mark.long
def test_values_just_within_the_limits_are_accepted() -> None:
    def run(loss: Any = of_shell.loss, **options: Any) -> Any:
        step = fjoin.train_step(loss, of_shell.PIPE, **options)
        return step(step.init(of_shell.P), torch.ones(3))[1]

    for weight in (1e-30, 1e30, torch.tensor(2.0), True, 0):
        expected = pytest.approx(3.0 if weight else math.nan, rel=1e-6, nan_ok=True)
        assert run(weight=lambda b, w=weight: w).loss == expected  # type: ignore[misc]
    assert run(lambda p, b: (of_shell.loss(p, b), {"sum": {"a": 1e40}})).sums == {"a": pytest.approx(1e40, rel=1e-6)}
    assert tx.explain(of_shell.PIPE, of_shell.P, {"data": 2**20}).messages == 1
    assert len(tx.simulate(lambda: tx.axis_size("data"), {"data": 300})) == 300
    assert fjoin.mesh({"data": 1}, timeout_s=0.5).size == 1
