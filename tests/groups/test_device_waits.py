"""A rank that waits for a device notices a failure of another rank, and does not wait forever."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch

import fjoin
from fjoin import transforms as tx
from fjoin.groups import StepEnd, _group_mesh, _teardown
from fjoin.groups._message import Unfinished
from fjoin.step import StepCheck
from fjoin.transforms.base import devices
from tests.helpers import judged
from tests.ranks import Ranks

Report = Callable[[Any], None]


class Later:
    """A device event that is complete after a number of queries; `synchronize` would wait forever."""

    def __init__(self, times: float) -> None:
        self.left = times

    def query(self) -> bool:
        self.left -= 1
        return self.left < 0


def wait_for_a_device(rank: int, report: Report) -> None:
    mesh = fjoin.mesh({"data": -1}, timeout_s=300)
    if rank == 1:
        mesh.report_failure(ValueError("bad batch"), 3)
        return
    step_check = StepCheck(2, mesh=mesh)
    step_check.reads.add((2, ()), torch.zeros(2), Later(3))
    step_check.synchronize()
    step_check.drain()
    step_check.reads.add((3, ()), torch.zeros(2), Later(float("inf")))
    for wait in (step_check.synchronize, step_check.drain):
        try:
            wait()
        except fjoin.PeerLost as error:
            report((str(error), error.rank, error.step))


def test_a_wait_for_a_device_ends_with_a_failure() -> None:
    """A kernel of NCCL's that waits for a rank that has failed does not end."""
    with Ranks(2, wait_for_a_device) as run:
        for _ in range(2):
            rank, _, (text, who, step) = run.next(30)
            assert (rank, who, step) == (0, 1, 3) and "bad batch" in text


def test_no_wait_for_a_device_is_endless(pool: Any) -> None:
    (texts,) = pool.run(1, wait_in_vain)
    assert "has not ended a step within 0.05 s" in texts[0] and "was under way" in texts[1] and texts[2:] == [""]


def wait_in_vain() -> Any:
    mesh = fjoin.mesh({"data": -1}, timeout_s=0.05)
    out: list[Any] = []
    try:
        mesh.await_event(Later(float("inf")))
    except fjoin.CollectiveTimeout as error:
        out.append(str(error))
    for times in (float("inf"), 3):  # at the end of a program messages under way are aborted only if they do not end
        event = Later(times)
        with (
            mock.patch.object(devices, "in_use", lambda: True),
            mock.patch.object(devices, "current", lambda: torch.device("cpu")),
            mock.patch.object(devices, "here", lambda device, event=event: event),
            mock.patch.object(_group_mesh, "_LAST_S", 0.05),
            mock.patch.object(mesh, "_take_down", out.append),
        ):
            mesh.close()
    return out


# -- steps that a device has not ended ----------------------------------------------------------------------------------


def test_before_an_abort_a_rank_waits_for_steps_that_all_have_begun() -> None:
    for failed_in, want in ((3, ["", "", "step 3"]), (None, ["", "", "step 3"]), (2, ["", "step 2", "step 3"])):
        steps = Unfinished()
        ends = [steps.add(StepEnd(step, Later(times))) for step, times in ((1, 8), (2, 8), (3, float("inf")))]
        steps.settle(0.1, failed_in)
        assert [
            text in end.failed and bool(text) == bool(end.failed) for text, end in zip(want, ends, strict=True)
        ] == [True] * 3
        steps.settle(0.1, None)  # they are judged once
        assert [bool(text) for text in want] == [bool(end.failed) for end in ends]


def fail_while_the_device_is_behind(rank: int, report: Report) -> None:
    """Rank 1 fails in step 3. The device of rank 0 has not ended step 2, to which rank 1 has contributed, nor step 3."""

    def end(self: Unfinished, step: int, device: Any) -> StepEnd:
        return self.add(StepEnd(step, Later(float("inf") if step > 2 else 20)))

    def loss_fn(params: Any, batch: Any) -> torch.Tensor:
        if batch is None:
            raise ValueError("bad batch")
        return (params["w"] * batch).sum()

    mesh = fjoin.mesh({"data": -1}, timeout_s=300)
    step = fjoin.train_step(loss_fn, tx.fuse(tx.mean("data"), tx.sgd(1.0)), mesh=mesh)
    states = [step.init({"w": torch.zeros(2)})]
    copies = []
    with mock.patch.object(Unfinished, "end", end), mock.patch.object(_group_mesh, "_SETTLE_S", 0.2):
        try:
            for i in range(6):
                if i == 3 and rank == 0:  # what its host has taken and its device never ends
                    body = states[-1]._body
                    copies.append(states[-1].clone())
                    body.ended = mesh.unfinished.add(StepEnd(3, Later(float("inf"))))
                    copies.append(states[-1].clone())
                state, _ = step(states[-1], None if rank == 1 and i == 3 else torch.full((2,), float(rank)))
                states.append(state)
        except (ValueError, fjoin.PeerLost) as error:
            report(type(error).__name__)
    for state in (states[-1], *copies):
        try:
            report(state.params["w"].tolist())
        except fjoin.TornState as error:
            report(str(error))


def test_state_is_torn_if_its_messages_never_arrive() -> None:
    with Ranks(2, fail_while_the_device_is_behind) as run:
        said: dict[int, list[Any]] = {0: [], 1: []}
        for _ in range(6):
            rank, _, what = run.next(60)
            said[rank].append(what)
    assert said[1] == ["ValueError", [-1.5, -1.5]]
    assert said[0][0] == "PeerLost" and said[0][2] == [-1.5, -1.5]
    for text in (said[0][1], said[0][3]):
        assert "had not ended step 3 when a rank failed" in text and "load a checkpoint" in text


def test_each_step_and_flush_on_a_device_notes_its_end(monkeypatch: Any) -> None:
    monkeypatch.setattr(Unfinished, "end", lambda self, step, device: self.add(StepEnd(step, Later(float("inf")))))
    step = fjoin.train_step(lambda p, batch: (p["w"] * batch).sum(), tx.local_sgd(tx.sgd(1.0), tx.mean("data"), 4))
    state, ended = step.init({"w": torch.zeros(2)}), []
    for _ in range(2):
        state, _ = step(state, torch.ones(2))
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


def test_loop_end_raises_for_a_nonfinite_step_on_a_device() -> None:
    step = judged(
        fjoin.train_step(lambda p, batch: (p["w"] * batch).sum(), tx.fuse(tx.mean("data"), tx.sgd(1.0))), True
    )
    for bad in (0, 1, 2):  # the last one and the one before are not read by a later step
        state = step.init({"w": torch.zeros(2)})
        with pytest.raises(fjoin.NonFinite, match=f"step {bad}"):
            for batch in step.join([torch.full((2,), float("nan") if i == bad else 1.0) for i in range(3)]):
                state, _ = step(state, batch)
