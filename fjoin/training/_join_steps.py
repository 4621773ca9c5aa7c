"""Uneven inputs: a loop that ends on all ranks together."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NoReturn, TypeVar

from .._errors import EarlyTermination, JoinError, NoBatch, NonFinite
from ..agreement._requests import Requests
from ..loading._joined import JoinedLoop, left_alone
from ..loading._look_ahead import LookAhead
from ..loading._position import END
from ._in_loop import InLoop
from .passes._iteration import Iteration

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
