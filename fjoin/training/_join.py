"""The loop of a step over uneven inputs."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NoReturn, TypeVar

import torch

from .._errors import DesyncError, EarlyTermination, JoinError, NoBatch, NonFinite
from ..agreement import Record, Requests, same
from ..loading import END, JoinedLoop, LookAhead, left_alone
from ._failures import Failures
from ._passes import Iteration
from ._run import Run


class InLoop:
    """A step in a loop.

    Attributes:
        iteration: The iteration that runs; None outside a loop.
        device: The device of the parameters; None before `init`.
    """

    def __init__(self, run: Run, failures: Failures) -> None:
        self._run, self.failures = run, failures
        self.ranks, self.rank = run.ranks, run.mesh.rank
        self.iteration: Iteration | None = None
        self.device: torch.device | None = None
        self._compared = False  # whether the ranks have compared their loops
        self._looked = False  # whether they have looked for parameters without gradients

    @property
    def form(self) -> tuple[Any, ...]:
        """The steps of one loop are alike in this: the mesh, the axes and the length of windows."""
        return self._run.mesh.shape, self._run.axes, self._run.accumulate

    @property
    def requests(self) -> Requests:
        """The requests of the ranks beside this step."""
        return self._run.agreements.requests

    def compare(self, loop: str, begins: bool = True) -> None:
        """Compare the ranks' loops, before the first message.

        Args:
            begins: Whether the loop begins here, so that it is not compared again.
        """
        if not self._compared:
            same(
                self._run.mesh, "the first step", {"loop": loop}, "Run the same loop on all ranks", axes=self._run.axes
            )
            self._compared = begins

    def enter(self) -> None:
        """Check that a loop may begin."""
        self.failures.check()
        if self.iteration is not None:
            error = JoinError("a loop over this step's join is still running; finish it before starting another")
            if self.ranks > 1:  # the old loop may have been left with its iterator in a variable, so other ranks wait
                self.fail(error)
            raise error

    def count(self, has_batch: bool, throw: bool, replays: bool) -> float:
        """The number of ranks that have a batch: the only message outside steps.

        Raises:
            DesyncError: a rank has other settings of `join`.
        """
        settings = f"throw_on_early_termination={throw}, when_exhausted={'replay' if replays else 'shadow'!r}"
        own = 4.0 ** (throw + 2 * replays)  # no mean of different values equals one of them
        with self.failures.alone():
            self.compare(f"step.join(loader, {settings})")
            device = self.device or torch.device("cpu")
            record = Record(self._run.mesh, self._run.axes, ("batches", "settings"), small=True, device=device)
            sums = record.send({"batches": float(has_batch), "settings": own}).wait()
        if sums["settings"] != own * self.ranks:
            raise DesyncError(f"some rank differs from rank {self.rank} in the settings of step.join: here {settings}")
        return sums["batches"]

    def called(self, iteration: Iteration) -> None:
        """Note that the body has called the step in an iteration.

        Raises:
            JoinError: it may not call it now.
        """
        if iteration.number < 0:
            raise JoinError(
                "the loader of step.join called the step; only the loop's body may", step=self.failures.last_step
            )
        if iteration.called:
            raise JoinError(
                f"the loop body called the step twice in iteration {iteration.number}; call it exactly once in each, "
                f"and use fjoin.train_step(..., accumulate=k) for several batches in one step",
                step=self.failures.last_step,
            )
        iteration.called = True

    def end(self) -> None:
        """End a loop that has ended on all ranks.

        Warns:
            UserWarning: on rank 0, at the end of the first loop: some parameters have got no gradient on any rank.

        Raises:
            NonFinite: on all ranks: some ranks left the last step out, and others took it.
        """
        if self.failures.last_step is None:
            return
        with self.failures.alone():
            self._run.agreements.drain(self.failures.last_step + 1)
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
    first, *others = paths
    return [path for path in first if all(path in one for one in map(set, others))]


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

    It is not an iterator itself: a `for` loop frees its iterator when
    it ends, so a `break` is reported to the other ranks at once, even where this object is kept in a variable.

    Attributes:
        stopped: Whether the last loop ended because some rank had called `stop`; the same on all ranks.
    """

    stopped: bool

    def __init__(self, steps: Sequence[InLoop], loader: Iterable[B], **options: Any) -> None:
        if options["when_exhausted"] not in ("shadow", "replay"):
            raise ValueError(f"when_exhausted must be 'shadow' or 'replay', got {options['when_exhausted']!r}")
        super().__init__(loader, steps[0].rank, steps[0].ranks)
        self._steps, self._options = steps, options

    @property
    def _requests(self) -> Requests:
        return self._steps[0].requests

    def __iter__(self) -> Iterator[B]:
        return self._iterate(self._steps, **self._options)

    def _iterate(
        self, steps: Sequence[InLoop], empty: Any, throw_on_early_termination: bool, when_exhausted: str
    ) -> Iterator[B]:
        for step in steps:
            step.enter()
        first, name = steps[0], "step.join" if len(steps) == 1 else "fjoin.join"
        position, finished, replays = self._position, False, when_exhausted == "replay"
        self._running, self.stopped = True, False
        for step in steps:
            step.requests.begin()
        try:
            current, look_ahead = _load(steps, position.begin), LookAhead()
            number = position.steps
            given: Any = empty if position.last is END else position.last
            have = first.count(current is not END, throw_on_early_termination, replays)
            if throw_on_early_termination and 0 < have < first.ranks:
                _stop_early(first, have)
            if replays and have > 0 and current is END and given is NO_BATCH:
                raise NoBatch(
                    "when_exhausted='replay' runs the model on every rank, but this rank has no batch at all; pass "
                    "step.join(loader, when_exhausted='replay', empty=a_batch)"
                )
            more, iterations = have > 0, list[Iteration]()
            while more:
                following = END if current is END else look_ahead(current, partial(_load, steps, position.load))
                if current is not END:
                    given = current
                iterations = [Iteration(number, current is not END, following is not END, replays) for _ in steps]
                for step, iteration in zip(steps, iterations, strict=True):
                    step.iteration = iteration
                position.use(current is not END)
                yield given
                for i, (step, iteration) in enumerate(zip(steps, iterations, strict=True)):
                    if not iteration.called:
                        which = "the step" if len(steps) == 1 else f"step {i} of steps=[...]"
                        raise JoinError(
                            f"the loop body did not call {which} in iteration {number}; call it exactly once in each iteration "
                            f"(to leave a batch out, give it weight 0)",
                            step=step.failures.last_step,
                        )
                    step.iteration = None
                # Only a rank that is out of input has to wait for this number. Any step that has ended a window has it.
                others = next((iteration.others for iteration in iterations if iteration.others is not None), None)
                self.stopped = others is not None and any(step.requests.stop_agreed for step in steps)
                if others is not None and (throw_on_early_termination or following is END or self.stopped):
                    have = others()
                    if self.stopped:
                        break
                    if throw_on_early_termination and 0 < have < first.ranks:
                        _stop_early(first, have)
                    more = have > 0
                current, number = following, number + 1
            finished = True
            if not have:
                position.finish()
            for step in steps:
                step.end()
            self.stopped |= any(step.requests.stop_agreed for step in steps)
        except GeneratorExit:
            last = next((iteration.others for iteration in iterations if iteration.others is not None), None)
            finished = last is not None and last() == 0  # no rank has another batch
            raise
        except BaseException as error:
            finished = True
            if not isinstance(error, (EarlyTermination, NonFinite)):  # all ranks raise these at the same place
                _tell(steps, error)
            raise
        finally:
            self._running = False
            for step in steps:
                step.iteration = None
                step.requests.end()
            if not finished:
                for step in steps:
                    text = left_alone(step.rank, name, number)
                    step.failures.leave(JoinError(text, rank=step.rank, step=step.failures.last_step))


def _tell(steps: Sequence[InLoop], error: BaseException) -> NoReturn:
    """Reports an error to the ranks of all steps, and raises its root cause."""
    for step in steps[1:]:
        with contextlib.suppress(BaseException):
            step.fail(error)
    steps[0].fail(error)
    raise error


def _load(steps: Sequence[InLoop], load: Callable[[], Any]) -> Any:
    for step in steps:
        step.iteration = Iteration(
            -1, False, False
        )  # detects a loader that calls the step, which would take a step that no other rank takes
    try:
        return load()
    finally:
        for step in steps:
            step.iteration = None


def _stop_early(step: InLoop, have: float) -> NoReturn:
    after = "before the first step" if step.failures.last_step is None else f"after step {step.failures.last_step}"
    raise EarlyTermination(
        f"{step.ranks - int(have)} of {step.ranks} ranks are out of input {after} while the others have "
        f"more, and throw_on_early_termination is set",
        step=step.failures.last_step,
    )
