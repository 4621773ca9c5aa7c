"""A rank that waits for a device notices a failure of another rank, and does not wait forever; no device is needed here."""

from __future__ import annotations

import contextlib
import threading
from typing import Any
from unittest import mock

import pytest
import torch

import fjoin
from fjoin import transforms as tx
from fjoin.groups import StepEnd, _connect, _group_mesh, _teardown
from fjoin.groups._message import Unfinished
from fjoin.step import StepCheck
from fjoin.transforms.base import devices
from tests.ranks import End, end_of, ends
from tests.traffic import watched

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
    step_check = StepCheck(2, mesh=mesh)
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
