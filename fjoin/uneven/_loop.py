"""`join(loader)`: a loop of one's own over uneven inputs."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal, NoReturn, TypeVar, overload

from .._errors import DesyncError, JoinError
from ..groups import Communicator, Mesh, mesh_or_world
from ..loading import END, JoinedLoop, LookAhead
from ..records import Record, Requests, Sums
from ..training import NO_BATCH, JoinedLoader, TrainStep, weigh
from ..transforms.base import checks

Weighed = tuple[Any, float]  # a batch and its weight


B = TypeVar("B")
# Ranks that leave a loop together do so within this time. Those that go on may wait in a module's messages, and see
# nothing.
_TOGETHER_S = 30.0


class Loop(JoinedLoop[B]):
    """An iteration over this rank's batches that ends on all ranks together; made by `join`.

    Attributes:
        live: Whether this rank has a batch in this iteration; without one, and for a batch of weight 0, the body gets
            the last batch that had weight, or `empty`.
        weight: This rank's weight in this iteration; 0 if it is not live.
        total: The sum of the weights over all ranks, and over the iterations of this accumulation window.
        sync_gradients: Whether this iteration ends an accumulation window, so that the optimizer steps; with
            accumulate=1 always.
        number: The number of iterations of this epoch before this one.
        batches: The number of iterations of this epoch so far, with this one, in which this rank had a batch.
        stopped: Whether the last loop ended because some rank had called `stop`; the same on all ranks.
    """

    sync_gradients: bool = False
    live: bool = False
    weight: float = 0.0
    total: float = 0.0
    number: int = 0
    batches: int = 0

    def __init__(
        self,
        loader: Iterable[B],
        mesh: Communicator,
        weight: Callable[[B], float] | None,
        empty: Any,
        throw: bool,
        accumulate: int = 1,
    ) -> None:
        super().__init__(loader, "fjoin.join", mesh.rank, mesh.size, throw, Requests(mesh.size))
        self._mesh, self._weigh, self._empty, self._accumulate = mesh, weight, empty, accumulate
        self._settings = f"accumulate={accumulate} and {self._position.order or 'no fjoin.Shuffled'}"
        self._number_of_settings = zlib.crc32(self._settings.encode())  # of which sums are exact
        self._record = Record(mesh, tuple(mesh.shape), ("weight", "batches", "settings"))

    @property
    def scale(self) -> float:
        """weight * ranks / total: the factor of a loss that is a local mean.

        With it, averaging the gradients over the ranks, as DistributedDataParallel and fully_shard do, gives the mean
        over all ranks' samples; with accumulate=k the sum of a window's gradients does, so that the loss is not divided
        by k.
        """
        return self.weight * self._mesh.size / self.total if self.total else 0.0

    def _begin(self) -> None:
        if self._running:
            raise JoinError("this loop is still running; finish it, or make another with fjoin.join(...)")
        self._asks.begin()
        self.number, self.batches = 0, 0

    def _epoch(self) -> Iterator[B]:
        position = self._position
        self._load, self._look_ahead = position.begin, LookAhead()
        window = list[Weighed]()
        self._fill(window, [], self._accumulate)
        self.number, self.batches = position.steps, position.batches
        given = self._empty if position.last is END else position.last
        total, have = self._sums(self._send(window))
        while have and not self.stopped:
            self._throw_if_uneven(have)
            following = list[Weighed]()
            for i in range(self._accumulate):
                self.sync_gradients = i == self._accumulate - 1
                self._fill(following, window[i:], self._accumulate if self.sync_gradients else i + 1)
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
        if not have:
            position.finish()

    def _fill(self, window: list[Weighed], held: list[Weighed], least: int) -> None:
        """Load batches into a window until it has at least `least` or the input has ended.

        Raises:
            JoinError: the loader has written into the memory of a batch of `held`, or of the window.
        """
        while len(window) < least:
            batch = self._look_ahead([one for one, _ in (*held, *window)], self._load)
            self._load = self._position.load
            if batch is END:
                return
            window.append((batch, weigh(self._weigh, batch)))

    def _leave(self, text: str) -> None:
        self._mesh.leave(text, self.number, _TOGETHER_S)

    def _fail(self, error: BaseException) -> NoReturn:
        self._mesh.raise_root_cause(error, self.number)

    def _end(self) -> None:
        self._asks.end()

    def state_dict(self) -> dict[str, Any]:
        """See `JoinedLoop.state_dict`; with accumulate=k in the last iteration of a window, where `sync_gradients` is
        True.

        Raises:
            JoinError: within an accumulation window, whose gradients belong to no position.
        """
        if self._running and not self.sync_gradients:
            raise JoinError("state_dict() within an accumulation window; call it where loop.sync_gradients is True")
        return super().state_dict()

    def _send(self, window: list[Weighed]) -> Sums:
        weight, batches = sum(w for _, w in window), self._asks.write(bool(window))
        return self._record.send({"weight": weight, "batches": batches, "settings": self._number_of_settings})

    def _sums(self, found: Sums) -> tuple[float, int]:
        """The sum of the weights, and the number of ranks that have a batch; notes whether a rank asks to stop."""
        if found["settings"] != self._number_of_settings * self._mesh.size:
            raise DesyncError(
                f"rank {self._mesh.rank} loops with {self._settings}, and some other rank does not; pass the same on all ranks"
            )
        self._asks.note(found["batches"])
        self.stopped = self._asks.stop_due
        return found["weight"], int(self._asks.with_next(found["batches"]))


@overload
def join(
    loader: Iterable[B],
    *,
    mesh: Mesh | None = None,
    weight: Callable[[B], float] | None = None,
    accumulate: int = 1,
    empty: Any = NO_BATCH,
    throw_on_early_termination: bool = False,
) -> Loop[B]: ...
@overload
def join(
    loader: Iterable[B],
    *,
    steps: Sequence[TrainStep],
    empty: Any = NO_BATCH,
    throw_on_early_termination: bool = False,
    when_exhausted: Literal["shadow", "replay"] = "shadow",
) -> JoinedLoader[B]: ...
def join(
    loader: Iterable[B],
    *,
    steps: Sequence[TrainStep] | None = None,
    mesh: Mesh | None = None,
    weight: Callable[[B], float] | None = None,
    accumulate: int = 1,
    empty: Any = NO_BATCH,
    throw_on_early_termination: bool = False,
    when_exhausted: Literal["shadow", "replay"] = "shadow",
) -> Any:
    """Iterate over this rank's loader until all ranks are out of input, in a custom loop.

    Every rank runs the body equally often, so all communication in it finds its peers: collectives of a custom loop,
    DistributedDataParallel, fully_shard and tensor-parallel models.

    - A rank that is out of input gets its last batch again, with weight 0.
    - To count every sample once, multiply the loss, the mean over the local batch, by `loop.scale`. The loss must be
      finite even where the scale is 0.
    - Iterations in which no rank has weight are left out.
    - Other changes by the body, such as to a module's buffers, happen on all ranks.
    - Each iteration, with accumulate=k each window, has one small message between the ranks, under way while the body
      runs.

    With `steps`, several `train_step`s share the loader, as a generator's and a discriminator's do, and no
    message is added. The body must call each of them exactly once in each iteration, in the same order on all ranks.

    Args:
        loader: Any iterable of batches, of any length on each rank, 0 included. The loop takes the next batch before
            the body has run on the current one, so the loader must not write it into the memory of the current one: a
            loader that reuses its buffer must yield copies. Writes by tensor operations are detected at once, writes by
            numpy one batch later.
        steps: Steps made by `train_step`, over the same axes and with the same `accumulate`.
        mesh: The ranks, without `steps`; by default all ranks.
        weight: `batch -> float`, without `steps`: the batch's weight, its samples or its tokens; by default 1.
        accumulate: Without `steps`: the iterations, k on all ranks, whose gradients the body sums before it steps,
            where `loop.sync_gradients`. `loop.scale` is exact over the window's samples. Up to 2 k batches are held at
            a time.
        empty: The batch for a rank that never has one; every use of the default raises `NoBatch`.
        throw_on_early_termination: Raise on all ranks where the first is out of input.
        when_exhausted: With `steps`, as in `TrainStep.join`.

    Returns:
        A `Loop`; with `steps` a `JoinedLoader`.

    Raises:
        EarlyTermination: on all ranks, see above.
        DesyncError: ranks have different values of `accumulate`, or samplers `Shuffled` of other arguments.
        JoinError: the loop is still running; the loader has written into the previous batch; with `steps`, the body did
            not call each exactly once.
        PeerLost: another rank left the loop, by break, return or an exception, and this one did not within 30 s:
            the mesh is taken down, by default the default process group. Ranks that wait in a module's own messages end
            with the backend's error: over groups of its own, such as those of `fully_shard`, at their time-out.
        TypeError, ValueError: an argument that cannot be used.

    >>> loop = fjoin.join([torch.ones(3), torch.ones(1)], weight=len)
    >>> [(batch.sum().item(), loop.live, loop.weight, loop.total, loop.scale) for batch in loop]
    [(3.0, True, 3.0, 3.0, 1.0), (1.0, True, 1.0, 1.0, 1.0)]
    """
    if steps is None:
        if when_exhausted != "shadow":
            raise TypeError("when_exhausted is for join(loader, steps=...); without steps all ranks run the body")
        checks.whole_number("accumulate", accumulate, 1)
        return Loop(loader, mesh_or_world("join", mesh), weight, empty, throw_on_early_termination, accumulate)
    if mesh is not None or weight is not None or accumulate != 1:
        raise TypeError("join(loader, steps=...) takes no mesh, no weight and no accumulate; the steps have their own")
    steps = list(steps)
    if not steps or not all(isinstance(step, TrainStep) for step in steps):
        raise TypeError(f"steps must be steps made by train_step, at least one, got {steps!r}")
    if len(set(map(id, steps))) < len(steps):
        raise ValueError("steps must be different ones; the body calls each once in each iteration")
    in_loop = [step._in_loop for step in steps]
    alike = [step.form for step in in_loop]
    if any(one != alike[0] for one in alike):
        raise ValueError(f"steps must have the same mesh, axes and accumulate, so that they end together; got {alike}")
    return JoinedLoader(in_loop, loader, empty, throw_on_early_termination, when_exhausted)
