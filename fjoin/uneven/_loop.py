"""Uneven inputs in a custom loop: every rank runs it as often as the rank with the most batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, TypeVar

from .._errors import DesyncError, EarlyTermination, JoinError
from ..agreement._record import Record, Sums
from ..agreement._requests import Requests
from ..groups._mesh import Mesh
from ..loading._joined import JoinedLoop, left_alone
from ..loading._position import END
from ..training._join_steps import NO_BATCH
from ..training.passes._loss import weigh
from ._windows import Weighed, Windows

B = TypeVar("B")
# Ranks that leave a loop together do so within this time. Those that go on may wait in a module's messages, and see nothing.
_TOGETHER_S = 30.0


class Loop(JoinedLoop[B]):
    """An iteration over this rank's batches that ends on all ranks together; made by `join`.

    Attributes:
        live: Whether this rank has a batch in this iteration; without one, and for a batch of weight 0, the body gets the
            last batch that had weight, or `empty`.
        weight: This rank's weight in this iteration; 0 where it is not live.
        total: The sum of the weights over all ranks, and over the iterations of this accumulation window.
        sync_gradients: Whether this iteration ends an accumulation window, so that the optimizer steps; with accumulate=1 always.
        number: The number of iterations of this epoch before this one.
        batches: The number of iterations of this epoch so far, with this one, in which this rank had a batch.
        stopped: Whether the last loop ended because some rank had called `stop`; the same on all ranks.
    """

    sync_gradients: bool
    stopped: bool
    live: bool
    weight: float
    total: float
    number: int
    batches: int

    def __init__(
        self,
        loader: Iterable[B],
        mesh: Mesh,
        weight: Callable[[B], float] | None,
        empty: Any,
        throw: bool,
        accumulate: int = 1,
    ) -> None:
        super().__init__(loader, mesh.rank, mesh.size)
        self._mesh, self._weigh, self._empty, self._throw, self._accumulate = mesh, weight, empty, throw, accumulate
        self._record = Record(mesh, tuple(mesh.shape), ("weight", "batches", "accumulate"))
        self._asks = Requests(mesh.size)
        self.live = self.sync_gradients = False
        self.weight, self.total, self.number, self.batches = 0.0, 0.0, 0, 0

    @property
    def _requests(self) -> Requests:
        return self._asks

    @property
    def scale(self) -> float:
        """weight * ranks / total: the factor of a loss that is a local mean.

        With it, averaging the gradients over the ranks, as DistributedDataParallel and fully_shard do, gives the mean
        over all ranks' samples; with accumulate=k the sum of a window's gradients does, so that the loss is not divided by k.
        """
        return self.weight * self._mesh.size / self.total if self.total else 0.0

    def __iter__(self) -> Iterator[B]:
        if self._running:
            raise JoinError("this loop is still running; finish it, or make another with fjoin.join(...)")
        self._running, finished = True, False
        self._asks.begin()
        self.number, self.batches, self.stopped, position = 0, 0, False, self._position
        try:
            windows = Windows(position, partial(weigh, self._weigh), self._accumulate)
            window = windows.first()
            self.number, self.batches = position.steps, position.batches
            given = self._empty if position.last is END else position.last
            total, have = self._sums(self._send(window))
            while have and not self.stopped:
                if self._throw and have < self._mesh.size:
                    raise EarlyTermination(
                        f"{self._mesh.size - have} of {self._mesh.size} ranks are out of input in iteration {self.number} while "
                        f"the others have more, and throw_on_early_termination is set",
                        step=self.number,
                    )
                following = list[Weighed]()
                for i in range(self._accumulate):
                    self.sync_gradients = i == self._accumulate - 1
                    windows.fill(following, window[i:], self._accumulate if self.sync_gradients else i + 1)
                    if self.sync_gradients:
                        answer = self._send(following)  # under way while the body runs
                    self.live, self.total = i < len(window), total
                    current, self.weight = window[i] if self.live else (END, 0.0)
                    position.use(self.live)
                    self.batches += self.live
                    if self.live and (self.weight or given is NO_BATCH):
                        given = current
                    if total:
                        yield given
                    self.number += 1
                total, have = self._sums(answer)
                window = following
            finished = True
            if not have:
                position.finish()
        except GeneratorExit:
            raise
        except BaseException as error:
            finished = True
            if not isinstance(error, EarlyTermination):  # all ranks raise that at the same place
                self._mesh.raise_root_cause(error, self.number)
            raise
        finally:
            self._running = False
            self._asks.end()
            if not finished and self._mesh.size > 1:
                # A body that ended because a peer was lost is not the first to have left.
                text = left_alone(self._mesh.rank, "fjoin.join", self.number)
                if not self._mesh.leave_together(text, _TOGETHER_S):
                    self._mesh.report_failure(self._mesh.lost() or JoinError(text), self.number)

    def state_dict(self) -> dict[str, Any]:
        """See `JoinedLoop.state_dict`; with accumulate=k in the last iteration of a window, where `sync_gradients` is True.

        Raises:
            JoinError: within an accumulation window, whose gradients belong to no position.
        """
        if self._running and not self.sync_gradients:
            raise JoinError(
                "state_dict() was called within an accumulation window; call it where loop.sync_gradients is True"
            )
        return super().state_dict()

    def _send(self, window: list[Weighed]) -> Sums:
        weight, batches = sum(w for _, w in window), self._asks.write(bool(window))
        return self._record.send({"weight": weight, "batches": batches, "accumulate": self._accumulate})

    def _sums(self, found: Sums) -> tuple[float, int]:
        """The sum of the weights, and the number of ranks that have a batch; notes whether a rank asks to stop."""
        if found["accumulate"] != self._accumulate * self._mesh.size:
            raise DesyncError(
                f"rank {self._mesh.rank} loops with accumulate={self._accumulate}, but the ranks have "
                f"{found['accumulate'] / self._mesh.size:g} on average; pass the same one on all ranks"
            )
        self._asks.note(found["batches"])
        self.stopped = self._asks.stop_agreed
        return found["weight"], int(self._asks.with_next(found["batches"]))
