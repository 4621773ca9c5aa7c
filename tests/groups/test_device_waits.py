"""A rank that waits for a device notices a failure of another rank, and does not wait forever."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ranks import Ranks

Report = Callable[[Any], None]


class Later:
    """A device event that is complete after a number of queries; `synchronize` would wait forever."""

    def __init__(self, times: float) -> None:
        self.left = times

    def query(self) -> bool:
        self.left -= 1
        return self.left < 0


def wait_for_a_device(rank: int, report: Report) -> None:
    import torch

    import fjoin
    from fjoin.reducer._step_check import StepCheck

    mesh = fjoin.mesh({"data": -1}, timeout_s=300)
    if rank == 1:
        mesh.report_failure(ValueError("bad batch"), 3)
        return
    step_check = StepCheck(2, mesh=mesh)
    step_check.reads.add((2, ()), torch.zeros(2), Later(3))
    step_check.synchronize()
    step_check.raise_pending(newest=True)
    step_check.reads.add((3, ()), torch.zeros(2), Later(float("inf")))
    for wait in (step_check.synchronize, lambda: step_check.raise_pending(newest=True)):
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
    assert "has not ended a step within 0.05 s" in texts[0] and texts[1:] == [True, False]


def wait_in_vain() -> Any:
    from unittest import mock

    import torch

    import fjoin
    from fjoin.groups import _group_mesh

    mesh = fjoin.mesh({"data": -1}, timeout_s=0.05)
    out: list[Any] = []
    try:
        mesh.await_event(Later(float("inf")))
    except fjoin.CollectiveTimeout as error:
        out.append(str(error))
    for times in (float("inf"), 3):  # at the end of a program messages under way are aborted only if they do not end
        event = Later(times)
        event.record = lambda: None  # type: ignore[attr-defined]
        with (
            mock.patch.object(torch.cuda, "is_initialized", lambda: True),
            mock.patch.object(torch.cuda, "Event", lambda event=event: event),
            mock.patch.object(_group_mesh, "_LAST_S", 0.05),
            mock.patch.object(mesh, "_take_down", out.append),
        ):
            mesh.close()
    return out
