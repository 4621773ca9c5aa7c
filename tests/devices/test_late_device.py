"""Beside a late device a state is right or torn after any failure, and all ranks raise for NaN together."""

from __future__ import annotations

import contextlib
import functools
import itertools
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import fjoin
from fjoin import transforms as tx
from fjoin.groups import StepEnd, _connect, _group_mesh, _teardown
from fjoin.groups._message import Unfinished
from fjoin.step import StepCheck, StepRecords
from fjoin.transforms.base import devices
from tests.devices.fake_device import LateDevice, Make
from tests.ranks import End, end_of, ends
from tests.traffic import watched

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


@pytest.mark.gloo
@pytest.mark.sample(2)
@pytest.mark.parametrize("case", FAILURES, ids=str)
def test_after_a_failure_a_state_is_right_or_torn(pool: Any, tmp_path: Path, case: Case) -> None:
    assert "\n".join(failed(pool, tmp_path, [case])) == ""


@pytest.mark.gloo
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


@pytest.mark.gloo
@pytest.mark.sample(2)
@pytest.mark.parametrize("reads", ["none", "all", "first", "close", "leave"])
def test_ranks_raise_for_nan_at_the_same_step(pool: Any, reads: str) -> None:
    steps = [STEPS - 2, STEPS - 1] + [1] * (reads != "leave")
    assert "\n".join(raised(pool, [(name, 1, at, reads) for name in ("mean", "fed back") for at in steps])) == ""


@pytest.mark.gloo
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


# -- a rank that waits for a device notices a failure of another rank, and does not wait forever --

NEVER = float("inf")
X = torch.ones(2)
AXES: dict[str, int] = {"node": 2, "local": 1}


class Later:
    """A device event that is complete after a number of queries; `synchronize` would wait forever."""

    def __init__(self, times: float) -> None:
        self.left = times

    def query(self) -> bool:
        self.left -= 1
        return self.left < 0


@contextlib.contextmanager
def on_a_device(event: Later) -> Any:
    """The CPU passes for a device, which has come so far when the event is complete."""
    with (
        mock.patch.object(devices, "current", lambda: torch.device("cpu")),
        mock.patch.object(devices, "here", lambda device: event),
    ):
        yield


def wait_for_a_device(rank: int) -> Any:
    mesh = fjoin.mesh({"data": -1}, timeout_s=300)
    if rank == 1:
        mesh.report_failure(ValueError("bad batch"), 3)
        return []
    step_check = fjoin.train_step(len, tx.fuse(tx.mean("data"), tx.sgd(0.1)), mesh=mesh).run.step_check
    step_check.reads.add((2, ()), torch.zeros(2), Later(3))
    step_check.synchronize()
    step_check.drain()
    step_check.reads.add((3, ()), torch.zeros(2), Later(NEVER))
    return [end_of(wait) for wait in (step_check.synchronize, step_check.drain)]


def test_a_wait_for_a_device_ends_with_a_failure() -> None:
    """A kernel of NCCL's that waits for a rank that has failed does not end."""
    for end in ends(2, wait_for_a_device)[0].value:
        assert (end.kind, end.rank) == ("PeerLost", 1) and "failed in step 3: ValueError: bad batch" in end.text


def wait_in_vain() -> Any:
    mesh = fjoin.mesh({"data": -1}, timeout_s=0.5)  # in which a busy machine makes it
    out: list[Any] = [end_of(lambda: mesh.await_event(Later(NEVER))).text]
    for times in (NEVER, 3):  # at the end of a program messages under way are aborted only if they do not end
        with (
            on_a_device(Later(times)),
            mock.patch.object(devices, "in_use", lambda: True),
            mock.patch.object(_group_mesh, "_LAST_S", 0.05),
            mock.patch.object(mesh, "_take_down", out.append),
        ):
            mesh.close()
    return out


def test_no_wait_for_a_device_is_endless(pool: Any) -> None:
    (texts,) = pool.run(1, wait_in_vain)
    assert "has not ended a step within 0.5 s" in texts[0] and "was under way" in texts[1] and texts[2:] == [""]


# -- communicators ------------------------------------------------------------------------------------------------------


def make_a_mesh(queries: float) -> Any:
    """What a mesh sends where gloo passes for the backend of an accelerator, or its error."""
    with (
        mock.patch.object(_connect, "speaks", lambda group, kind: True),
        on_a_device(Later(queries)),
        watched() as sent,
    ):
        try:
            mesh = fjoin.mesh(AXES, timeout_s=1.5)
        except fjoin.CollectiveTimeout as error:
            return str(error)
        found = len(sent)
        with fjoin.bind(mesh):
            tx.psum(torch.ones(1), "node")
        return found


def test_each_group_has_sent_a_message_before_a_mesh_is_there(pool: Any) -> None:
    assert pool.run(2, make_a_mesh, 2) == [len(AXES) + 1] * 2  # and that of all ranks
    for text in pool.run(2, make_a_mesh, NEVER):
        assert "not all ranks have made their communicators within 1.5 s" in text


@pytest.mark.parametrize("kind", [None, "cuda"])
def test_groups_of_the_host_send_nothing(pool: Any, kind: str | None) -> None:
    assert pool.run(2, messages_of_a_mesh, kind) == [0, 0]


def messages_of_a_mesh(kind: str | None) -> int:
    with mock.patch.object(devices, "kind", lambda: kind), watched() as sent:
        fjoin.mesh(AXES)
    return len(sent)


# -- steps that a device has not ended ----------------------------------------------------------------------------------


def test_before_an_abort_a_rank_waits_for_steps_that_all_have_begun() -> None:
    for failed_in, want in ((3, ["", "", "step 3"]), (None, ["", "", "step 3"]), (2, ["", "step 2", "step 3"])):
        steps = Unfinished()
        made = [steps.add(StepEnd(step, Later(times))) for step, times in ((1, 8), (2, 8), (3, NEVER))]
        for failed in (failed_in, None):  # they are judged once
            steps.settle(0.1, failed)
            for text, end in zip(want, made, strict=True):
                assert text in end.failed and bool(text) == bool(end.failed)


def fail_while_the_device_is_behind(rank: int) -> list[End]:
    """Rank 1 fails in step 3. The device of rank 0 has not ended step 2, to which rank 1 has contributed, nor step 3."""

    def end(self: Unfinished, step: int, device: Any) -> StepEnd:
        return self.add(StepEnd(step, Later(NEVER if step > 2 else 20)))

    def loss_fn(params: Any, batch: Any) -> torch.Tensor:
        if batch is None:
            raise ValueError("bad batch")
        return (params["w"] * batch).sum()

    def train() -> None:
        for i in range(6):
            if i == 3 and rank == 0:  # what its host has taken and its device never ends
                copies.append(states[-1].clone())
                states[-1]._body.ended = mesh.unfinished.add(StepEnd(3, Later(NEVER)))
                copies.append(states[-1].clone())
            state, _ = step(states[-1], None if rank == 1 and i == 3 else torch.full((2,), float(rank)))
            states.append(state)

    mesh = fjoin.mesh({"data": -1}, timeout_s=300)
    step = fjoin.train_step(loss_fn, tx.fuse(tx.mean("data"), tx.sgd(1.0)), mesh=mesh)
    states, copies = [step.init({"w": torch.zeros(2)})], list[Any]()
    with mock.patch.object(Unfinished, "end", end), mock.patch.object(_group_mesh, "_SETTLE_S", 0.2):
        first = end_of(train)
    return [first, *(end_of(lambda state=state: state.params["w"].tolist()) for state in (states[-1], *copies))]


def test_state_is_torn_if_its_messages_never_arrive() -> None:
    (lost, torn, copy, later_copy), (own, state) = (end.value for end in ends(2, fail_while_the_device_is_behind))
    assert (own.kind, state.value) == ("ValueError", [-1.5, -1.5])
    assert (lost.kind, copy.value) == ("PeerLost", [-1.5, -1.5])
    for one in (torn, later_copy):
        assert one.kind == "TornState", one
        assert "had not ended step 3 when a rank failed" in one.text and "load a checkpoint" in one.text


def test_each_step_and_flush_on_a_device_notes_its_end(monkeypatch: Any) -> None:
    monkeypatch.setattr(Unfinished, "end", lambda self, step, device: self.add(StepEnd(step, Later(NEVER))))
    step = fjoin.train_step(lambda p, batch: (p["w"] * batch).sum(), tx.local_sgd(tx.sgd(1.0), tx.mean("data"), 4))
    state, ended = step.init({"w": X}), []
    state._body.storage.on_accelerator = True
    for _ in range(2):
        state, _ = step(state, X)
        ended.append(state._body.ended)
    kept = state.clone()
    state = step.flush(state)
    ended.append(state._body.ended)
    assert [end.step for end in ended if end is not None] == [0, 1, 2]
    step.run.mesh.unfinished.settle(0.0, 2)  # of copies too
    assert all(end is not None and end.failed for end in ended) and kept._body.ended is ended[1]


def test_groups_of_nccl_are_aborted_at_the_same_time() -> None:
    """Each abort waits for the device, on which messages of the other group wait too."""
    both = threading.Barrier(2, timeout=30)

    class Group:
        def abort(self) -> None:
            both.wait()
            raise RuntimeError("it has failed already")

    _teardown._abort([Group(), Group()])
    _teardown._abort([])
    assert not both.broken
