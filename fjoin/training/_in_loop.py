"""The part of a train_step that a loop over uneven inputs uses."""

from __future__ import annotations

import warnings
from typing import Any, NoReturn

import torch

from .._errors import DesyncError, JoinError
from ..agreement._consistency import same_loops
from ..agreement._record import Record
from ..agreement._requests import Requests
from ._failures import Failures
from ._run import Run
from .passes._iteration import Iteration


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
            same_loops(self._run.mesh, self._run.axes, loop)
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
