"""Uneven inputs: a loop that ends on all ranks together."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any, Generic, NoReturn, TypeVar

from .._errors import EarlyTermination, JoinError, NoBatch, NonFinite
from ..transforms._check import iterable
from ._in_loop import InLoop
from ._leaving import left_by_code
from ._look_ahead import LookAhead
from .passes._iteration import Iteration

B = TypeVar("B")
_END: Any = object()


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


class JoinedLoader(Generic[B]):
    """A loader that ends on all ranks together; made by `TrainStep.join` and, with `steps`, by `join`.

    Each `for` loop over it is an epoch of its own. It is not an iterator itself: a `for` loop frees its iterator when
    it ends, so a `break` is reported to the other ranks at once, even where this object is kept in a variable.
    """

    def __init__(self, steps: Sequence[InLoop], loader: Iterable[B], **options: Any) -> None:
        if options["when_exhausted"] not in ("shadow", "replay"):
            raise ValueError(f"when_exhausted must be 'shadow' or 'replay', got {options['when_exhausted']!r}")
        self._steps, self._loader, self._options = steps, loader, options

    def __iter__(self) -> Iterator[B]:
        return _iterate(self._steps, self._loader, **self._options)


def _iterate(
    steps: Sequence[InLoop],
    loader: Iterable[B],
    *,
    empty: Any,
    throw_on_early_termination: bool,
    when_exhausted: str,
) -> Iterator[B]:
    """Iterate over a loader until all ranks are out of input; see `TrainStep.join`."""
    for step in steps:
        step.enter()
    first, name = steps[0], "step.join" if len(steps) == 1 else "fjoin.join"
    number, finished, replays, by_code = 0, False, when_exhausted == "replay", False
    try:
        iterable("loader", loader)
        batches, look_ahead = iter(loader), LookAhead()
        current = _load(steps, batches)
        have = first.count(current is not _END, throw_on_early_termination, replays)
        if throw_on_early_termination and 0 < have < first.ranks:
            _stop_early(first, have)
        if replays and have > 0 and current is _END and empty is NO_BATCH:
            raise NoBatch(
                "when_exhausted='replay' runs the model on every rank, but this rank has no batch at all; pass "
                "step.join(loader, when_exhausted='replay', empty=a_batch)"
            )
        given: Any = empty
        more, iterations = have > 0, list[Iteration]()
        while more:
            following = _END if current is _END else look_ahead(current, partial(_load, steps, batches))
            if current is not _END:
                given = current
            iterations = [Iteration(number, current is not _END, following is not _END, replays) for _ in steps]
            for step, iteration in zip(steps, iterations, strict=True):
                step.iteration = iteration
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
            if others is not None and (throw_on_early_termination or following is _END):
                left = others()
                if throw_on_early_termination and 0 < left < first.ranks:
                    _stop_early(first, left)
                more = left > 0
            current, number = following, number + 1
        finished = True
        for step in steps:
            step.end()
    except GeneratorExit:
        by_code = left_by_code()
        last = next((iteration.others for iteration in iterations if iteration.others is not None), None)
        finished = by_code and last is not None and last() == 0  # no rank has another batch
        raise
    except BaseException as error:
        finished = True
        if not isinstance(error, (EarlyTermination, NonFinite)):  # all ranks raise these at the same place
            _tell(steps, error)
        raise
    finally:
        for step in steps:
            step.iteration = None
        if not finished:
            for step in steps:
                step.failures.leave(
                    JoinError(
                        f"rank {step.rank} left the loop over {name} in iteration {number}, by break, return or an "
                        f"exception, and others have not; leave it on all ranks after the same step, or loop over "
                        f"{name}(itertools.islice(loader, n))",
                        rank=step.rank,
                        step=step.failures.last_step,
                    ),
                    by_code,
                )


def _tell(steps: Sequence[InLoop], error: BaseException) -> NoReturn:
    """Reports an error to the ranks of all steps, and raises its root cause."""
    for step in steps[1:]:
        with contextlib.suppress(BaseException):
            step.fail(error)
    steps[0].fail(error)
    raise error


def _load(steps: Sequence[InLoop], batches: Iterator[Any]) -> Any:
    for step in steps:
        step.iteration = Iteration(
            -1, False, False
        )  # detects a loader that calls the step, which would take a step that no other rank takes
    try:
        return next(batches, _END)
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
