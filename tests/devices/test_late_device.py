"""Beside a late device a state is right or torn after any failure, and all ranks raise for NaN together."""

from __future__ import annotations

import contextlib
import functools
import itertools
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import fjoin
from fjoin import transforms as tx
from fjoin.groups._message import Unfinished
from fjoin.step import StepCheck, StepRecords
from tests.devices.fake_device import LateDevice, Make

pytestmark = pytest.mark.gloo
STEPS = 5
MEAN, SCATTER = tx.mean("data"), tx.scatter_mean("data")
PIPELINES: dict[str, Make] = {
    "mean": lambda: tx.fuse(MEAN, tx.sgd(0.1, momentum=0.5)),
    "clipped": lambda: tx.fuse(tx.chain(MEAN, tx.clip_by_global_norm(0.5)), tx.sgd(0.1)),
    "fed back": lambda: tx.fuse(tx.error_feedback(tx.compress(tx.int8(block=4), tx.mean("data"))), tx.sgd(0.1)),
    "zero": lambda: tx.fuse(SCATTER, tx.sgd(0.1, momentum=0.5)),
    "local": lambda: tx.local_sgd(tx.sgd(0.1), tx.mean("data"), 2),
}
# Parts of fjoin that are taken out: a method that does nothing.
PARTS: dict[str, Any] = {
    "settle": (Unfinished, "settle"), "drain": (StepCheck, "drain"), "forget": (StepRecords, "forget"),
    "age": (StepCheck, "raise_pending"),
}  # fmt: skip


def params() -> dict[str, torch.Tensor]:
    return {"a": torch.arange(6.0).reshape(2, 3) / 8, "b": torch.arange(4.0) / 4, "c": torch.ones(3)}


def batch_of(rank: int, step: int) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(10 * step + rank)
    return {path: torch.randn(p.shape, generator=g) for path, p in params().items()}


def loss_fn(p: Any, batch: Any) -> torch.Tensor:
    if batch is None:
        raise ValueError("bad batch")
    total: Any = sum((p[path] * p[path] * batch[path]).sum() for path in p)
    return total


def values(state: Any) -> list[float]:
    out: list[float] = torch.cat([p.detach().view(-1) for p in state.params.values()]).tolist()
    return out


def start(name: str, mesh: Any, **options: Any) -> tuple[fjoin.TrainStep, fjoin.TrainState]:
    step = fjoin.train_step(loss_fn, PIPELINES[name](), mesh=mesh, bucket_bytes=24, **options)
    return step, step.init(params())


@functools.cache
def of_one_process(name: str) -> list[list[list[float]]]:
    """By rank and step, of a run without failures."""

    def one_rank(rank: int) -> list[list[float]]:
        step, state = start(name, fjoin.mesh({"data": 2}))
        seen = [values(state)]
        for i in range(STEPS):
            state, _ = step(state, batch_of(rank, i))
            seen.append(values(state))
        step.close()
        return seen

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of local steps that are not averaged at the end
        out: list[list[list[float]]] = tx.simulate(one_rank, {"data": 2}, [0, 1])
    return out


@contextlib.contextmanager
def late_mesh(fault: str | None, timeout_s: float, gone: Callable[[], bool] = lambda: False) -> Iterator[fjoin.Mesh]:
    """A mesh of two ranks on late devices, perhaps with a part of fjoin taken out."""
    out = [(*PARTS[fault], lambda *args, **options: None)] if fault else []
    with warnings.catch_warnings(), LateDevice(gone).used(*out):
        warnings.simplefilter("ignore", UserWarning)
        mesh = fjoin.mesh({"data": 2}, transport="gloo", timeout_s=timeout_s)
        yield mesh
        mesh.close()


# -- failures ----------------------------------------------------------------------------------------------------------

Case = tuple[str, str, int, bool]


def failing(folder: str, cases: list[Case], fault: str | None = None) -> list[Any]:
    """Rank 1 fails in a step. Of each case: the error of this rank, and the values of its states, or why none."""
    rank, out = dist.get_rank(), []
    for number, (name, how, at, donate) in enumerate(cases):
        flag = Path(folder, str(number))
        dist.barrier()
        with late_mesh(fault, 1.0 if how == "sleeps" else 60.0, flag.exists) as mesh:
            step, state = start(name, mesh, donate=donate)
            states, error = [state], "none"
            try:
                for i in range(STEPS + 3):
                    batch: Any = batch_of(rank, i)
                    if rank == 1 and i == at:
                        flag.touch()
                        if how == "sleeps":
                            time.sleep(2.5)
                        else:
                            batch = None
                    states.append(step(states[-1], batch)[0])
            except Exception as found:
                error = type(found).__name__
                del found
            seen: list[Any] = []
            for state in states:
                try:
                    seen.append(values(state))
                except (fjoin.TornState, fjoin.DonatedState) as reason:
                    seen.append(type(reason).__name__)
            out.append((error, seen))
        dist.barrier()
    return out


def failed(pool: Any, folder: Path, cases: list[Case], fault: str | None = None) -> list[str]:
    """What breaks the law, in words."""
    wrong = []
    for rank, results in enumerate(pool.run(2, failing, str(folder), cases, fault)):
        for case, (error, states) in zip(cases, results, strict=True):
            name, how, _, donate = case
            lost = {"CollectiveTimeout", "PeerLost"}
            if error not in (lost if rank == 0 or how == "sleeps" else {"ValueError"}):
                wrong.append(f"{case}: rank {rank} raised {error}")
            for i, seen in enumerate(states):
                want = of_one_process(name)[rank][i] if i <= STEPS else []
                near = len(seen) == len(want) and all(abs(a - b) < 1e-5 for a, b in zip(seen, want, strict=True))
                if seen not in ("TornState", "DonatedState") and not near:
                    wrong.append(f"{case}: state {i} of rank {rank} is neither right nor torn")
            if states[0] == "TornState" and not donate:
                wrong.append(f"{case}: the first state of rank {rank} is torn")
    return wrong


FAILURES = [
    *((name, "raises", 3 - (not donate), donate) for name in PIPELINES for donate in (True, False)), ("mean", "sleeps", 3, False),
    *(pytest.param((name, *how), marks=pytest.mark.long) for name in PIPELINES
      for how in itertools.product(("raises", "sleeps"), (1, 4), (True, False))),
]  # fmt: skip


@pytest.mark.sample(2)
@pytest.mark.parametrize("case", FAILURES, ids=str)
def test_after_a_failure_a_state_is_right_or_torn(pool: Any, tmp_path: Path, case: Case) -> None:
    assert "\n".join(failed(pool, tmp_path, [case])) == ""


def test_states_of_steps_under_way_are_found(pool: Any, tmp_path: Path) -> None:
    """Where nothing marks the steps that the device has not ended."""
    wrong = failed(pool, tmp_path, [("mean", "raises", 3, False)], "settle")
    assert any("rank 0 is neither right nor torn" in line for line in wrong), wrong
    assert any("rank 1 is neither right nor torn" in line for line in wrong), wrong


# -- NaN ---------------------------------------------------------------------------------------------------------------


def nonfinite(cases: list[tuple[str, int, int, str]], fault: str | None = None) -> list[Any]:
    """A gradient of one rank is NaN in a step of a loop: (the step of the error, calls until then, steps of a next run)

    In each case: the pipeline, the rank, the step, and who reads the metrics, or how a plain loop ends.
    """
    rank, out = dist.get_rank(), []
    for name, bad_rank, at, reads in cases:
        dist.barrier()
        with late_mesh(fault, 20.0) as mesh:
            step, state = start(name, mesh)
            batches = [batch_of(rank, i) for i in range(STEPS)]
            if rank == bad_rank:
                batches[at]["a"].fill_(torch.nan)
            calls, again, errors = 0, 0, list[Any]()
            try:
                for batch in batches if reads in ("close", "leave") else step.join(batches):
                    calls += 1
                    state, metrics = step(state, batch)
                    if reads == "all" or reads == "first" and rank == 0:
                        _ = metrics.loss
                if reads == "close":
                    step.close()
            except Exception as found:
                errors += [type(found).__name__, getattr(found, "step", None)]
                del found
            state = step.init(params())  # what is pending of the run before is none of this one's
            try:
                for i in range(3):
                    state, _ = step(state, batch_of(rank, i))
                    again += 1
            except Exception as found:
                errors.append(type(found).__name__)
                del found
            out.append((errors, calls, again))
    return out


def raised(pool: Any, cases: list[Any], fault: str | None = None) -> list[str]:
    """What breaks the law, in words."""
    wrong = []
    ranks = pool.run(2, nonfinite, cases, fault)
    for case, first, second in zip(cases, *ranks, strict=True):
        if first != second:
            wrong.append(f"{case}: the ranks differ: {first} and {second}")
        (errors, calls, again), (_, _, at, reads) = first, case
        want = (
            [] if reads == "leave" else ["NonFinite", at]
        )  # there nothing reads the last decisions: the run is dropped
        if errors[: len(want)] != want:
            wrong.append(f"{case}: the loop ended with {errors}")
        if calls > at + 3:
            wrong.append(f"{case}: it ended only after {calls} calls")
        if again != 3 or len(errors) > len(want):
            wrong.append(f"{case}: the next run ended after {again} steps: {errors}")
    return wrong


@pytest.mark.sample(2)
@pytest.mark.parametrize("reads", ["none", "all", "first", "close", "leave"])
def test_ranks_raise_for_nan_at_the_same_step(pool: Any, reads: str) -> None:
    steps = [STEPS - 2, STEPS - 1] + [1] * (reads != "leave")
    assert "\n".join(raised(pool, [(name, 1, at, reads) for name in ("mean", "fed back") for at in steps])) == ""


@pytest.mark.parametrize(
    ("fault", "case", "says"),
    [
        ("drain", ("mean", 1, STEPS - 2, "none"), "ended with []"),
        ("drain", ("mean", 1, STEPS - 1, "close"), "ended with []"),
        ("forget", ("mean", 1, STEPS - 2, "leave"), "the next run ended"),
        ("age", ("mean", 1, 1, "none"), "it ended only after 5 calls"),
    ],
)
def test_late_decisions_are_found(pool: Any, fault: str, case: Any, says: str) -> None:
    wrong = raised(pool, [case], fault)
    assert any(says in line for line in wrong), wrong
