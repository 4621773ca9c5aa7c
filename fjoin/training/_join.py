"""The loop of a step over uneven inputs."""

from __future__ import annotations

import contextlib
import logging
import signal
import warnings
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NoReturn, TypeVar

import torch

from .._errors import DesyncError, JoinError, NoBatch
from ..loading import END, JoinedLoop, LookAhead, Terminated
from ..records import Record, Requests, compare
from ._passes import Iteration
from ._run import Run
from ._step_failures import StepFailures


class InLoop:
    """A step in a loop.

    Attributes:
        iteration: The iteration that runs; None outside a loop.
        compared: Whether the ranks have compared their loops.
        device: The device of the parameters; None before `init`.
    """

    def __init__(self, run: Run, failures: StepFailures) -> None:
        self._run, self.failures = run, failures
        self.ranks, self.rank = run.ranks, run.mesh.rank
        self.iteration: Iteration | None = None
        self.device: torch.device | None = None
        self.compared: bool = False
        self._looked = False  # whether they have looked for parameters without gradients

    @property
    def form(self) -> tuple[Any, ...]:
        """The steps of one loop are alike in this: the mesh, the axes and the length of windows."""
        return self._run.mesh.shape, self._run.axes, self._run.accumulate

    @property
    def requests(self) -> Requests:
        """The requests of the ranks beside this step."""
        return self._run.records.requests

    def compare(self, loop: str, begins: bool = True) -> None:
        """Compare the ranks' loops, before the first message.

        Args:
            begins: Whether the loop begins here, so that it is not compared again.
        """
        if not self.compared:
            run, remedy = self._run, "Run the same loop on all ranks"
            compare(run.mesh, "the first step", {"loop": loop}, remedy, axes=run.axes)
            self.compared = begins

    def enter(self) -> None:
        """Begin a loop.

        Raises:
            JoinError: another one is still running.
        """
        self.failures.check()
        if self.iteration is not None:
            error = JoinError("a loop over this step's join is still running; finish it before starting another")
            if self.ranks > 1:  # the old loop may have been left with its iterator in a variable, so other ranks wait
                self.fail(error)
            raise error
        self.requests.begin()

    def exit(self) -> None:
        """Note that the loop has ended, in whatever way."""
        self.iteration = None
        self.requests.end()

    def count(self, has_batch: bool, throw: bool, replays: bool, order: str | None) -> float:
        """The number of ranks that have a batch: the only message outside steps.

        Raises:
            DesyncError: a rank has other settings of `join`.
            Terminated: a signal has ended the run. A loop over epochs would otherwise begin the next one, and lose the
                rest of this.
        """
        settings = f"throw_on_early_termination={throw}, when_exhausted={'replay' if replays else 'shadow'!r}"
        own = 4.0 ** (throw + 2 * replays)  # no mean of different values equals one of them
        self.compare(f"step.join({order or 'loader'}, {settings})")
        device = self.device or torch.device("cpu")
        record = Record(self._run.mesh, self._run.axes, ("batches", "settings"), small=True, device=device)
        over = (self.ranks + 1) * self.requests.over  # another digit, as in `Requests`
        sums = record.send({"batches": float(has_batch + over), "settings": own}).wait()
        if sums["settings"] != own * self.ranks:
            raise DesyncError(f"some rank differs from rank {self.rank} in the settings of step.join: here {settings}")
        if sums["batches"] > self.ranks:
            logging.getLogger("fjoin").warning("a signal has ended this run, which is saved: no other loop begins")
            raise Terminated(128 + signal.SIGTERM)
        return sums["batches"]

    def called(self, iteration: Iteration) -> None:
        """Note that the body has called the step in an iteration.

        Raises:
            JoinError: it has done so before.
        """
        if self in iteration.called:
            raise JoinError(
                f"the loop body called the step twice in iteration {iteration.number}; call it exactly once in each, "
                f"and use fjoin.train_step(..., accumulate=k) for several batches in one step",
                step=self.failures.last_step,
            )
        iteration.called.add(self)

    def end(self) -> None:
        """End a loop that has ended on all ranks.

        Warns:
            UserWarning: on rank 0, at the end of the first loop: some parameters have got no gradient on any rank.

        Raises:
            NonFinite: on all ranks: some ranks left the last step out, and others took it.
        """
        if self.failures.last_step is None:
            return
        self._run.records.drain(self.failures.last_step + 1)
        if self._looked:
            return
        self._looked, run = True, self._run
        unused = run.mesh.exchange("the end of the first loop", run.unused(), _of_all, run.axes)
        if unused and self.rank == 0:
            shown = ", ".join(map(repr, unused[:5])) + (f" and {len(unused) - 5} more" if len(unused) > 5 else "")
            warnings.warn(
                f"{len(unused)} parameters have got no gradient on any rank in this loop: {shown}. The loss does not depend on them, so "
                f"only weight decay and momentum change them; leave them out of params, or look for a part of the model that is not called",
                stacklevel=4,
            )

    def fail(self, error: BaseException) -> NoReturn:
        """Report an error to the other ranks, and raise its root cause."""
        self.iteration = None
        self.failures.raise_(error)


def _of_all(paths: list[list[str]]) -> list[str]:
    """The paths that are in the lists of all ranks."""
    return [path for path in paths[0] if all(path in one for one in paths)]


B = TypeVar("B")


class _NoBatch:
    """Stands for the batch of a rank that never had one; every use of it raises."""

    def _refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise NoBatch(
            "this rank has no batch at all, so the loop got fjoin.NO_BATCH; pass step.join(loader, empty=a_batch) with a "
            "batch of the right form, or touch the batch only inside loss_fn and weight, which are not called without one"
        )

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):  # tools look these up on any object
            raise AttributeError(name)
        self._refuse()

    __getitem__ = __iter__ = __len__ = __call__ = __bool__ = __float__ = __int__ = _refuse
    __add__ = __radd__ = __mul__ = __rmul__ = __sub__ = __rsub__ = __contains__ = _refuse  # type: ignore[assignment]

    def __repr__(self) -> str:
        return "fjoin.NO_BATCH"


NO_BATCH: Any = _NoBatch()


class JoinedLoader(JoinedLoop[B]):
    """A loader that ends on all ranks together; made by `TrainStep.join` and, with `steps`, by `join`.

    Attributes:
        stopped: Whether the last loop ended because some rank had called `stop`; the same on all ranks.
    """

    def __init__(
        self, steps: Sequence[InLoop], loader: Iterable[B], empty: Any, throw: bool, when_exhausted: str
    ) -> None:
        if when_exhausted not in ("shadow", "replay"):
            raise ValueError(f"when_exhausted must be 'shadow' or 'replay', got {when_exhausted!r}")
        name = "step.join" if len(steps) == 1 else "fjoin.join"
        first = steps[0]
        super().__init__(loader, name, first.rank, first.ranks, throw, first.requests)
        self._steps, self._empty, self._replays = steps, empty, when_exhausted == "replay"

    def _begin(self) -> None:
        for step in self._steps:
            step.enter()

    def _epoch(self) -> Iterator[B]:
        steps, position, look_ahead, replays = self._steps, self._position, LookAhead(), self._replays
        current: Any = position.begin()
        given: Any = self._empty if position.last is END else position.last
        have = steps[0].count(current is not END, self._throw, replays, position.order)
        self._throw_if_uneven(have)
        if replays and have > 0 and current is END and given is NO_BATCH:
            raise NoBatch(
                "when_exhausted='replay' runs the model on every rank, but this rank has no batch at all; pass "
                "step.join(loader, when_exhausted='replay', empty=a_batch)"
            )
        while have:
            following = look_ahead(current, position.load)
            if current is not END:
                given = current
            iteration = Iteration(position.steps, current is not END, following is not END, replays)
            for step in steps:
                step.iteration = iteration
            position.use(current is not END)
            yield given
            for i, step in enumerate(steps):
                if step not in iteration.called:
                    which = "the step" if len(steps) == 1 else f"step {i} of steps=[...]"
                    raise JoinError(
                        f"the loop body did not call {which} in iteration {iteration.number}; call it exactly once in each iteration "
                        f"(to leave a batch out, give it weight 0)",
                        step=step.failures.last_step,
                    )
                step.iteration = None
            others = iteration.others  # only a rank that is out of input has to wait for this number
            self.stopped = others is not None and any(step.requests.stop_due for step in steps)
            if others is not None and (self._throw or following is END or self.stopped):
                have = others()
                if self.stopped:
                    break
                self._throw_if_uneven(have)
            current = following
        if not have:
            position.finish()
        for step in steps:
            step.end()
        self.stopped |= any(step.requests.stop_due for step in steps)

    def _leave(self, text: str) -> None:
        for step in self._steps:
            step.failures.leave(text)

    def _fail(self, error: BaseException) -> NoReturn:
        for step in self._steps[1:]:
            with contextlib.suppress(BaseException):
                step.fail(error)
        self._steps[0].fail(error)

    def _end(self) -> None:
        for step in self._steps:
            step.exit()
