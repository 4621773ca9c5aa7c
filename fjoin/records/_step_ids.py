"""Numbers that tell steps apart: of each step by its mesh, its index and its hyperparameters. They travel in the
record.

The sum over the ranks tells each of them whether all have called the same step with the same hyperparameters.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

from torch import Tensor

from .._errors import DesyncError
from ..groups import Communicator
from ..transforms.pipelines import Rates, number_of

_WEIGHT = "weight"
_KEPT = 1000  # steps, whose records may be read late


def step_of(step: int, late: int) -> int:
    """The number of the step that sent a record, given the step that reads it; see `CountsOfAll.late`."""
    return step - max(late - 1, 0)


class Calls(NamedTuple):
    """The calls of a run in words, for errors."""

    step: str  # a call that takes a step
    differ: str  # what ranks have done whose steps differ
    remedy: str
    flush: str  # the call that ends training
    even: str  # how to take the same number of steps on all ranks


class StepIds:
    """The numbers of the steps of one run on this rank: a train_step, or a registered module.

    Args:
        mesh: Where the ranks compare their steps, once they know that these differ. It is not kept alive.
        axes: The axes of the ranks that loop together.
        ranks: Their number.
        calls: The run's calls in words.
    """

    def __init__(self, mesh: Communicator, axes: tuple[str, ...], ranks: int, calls: Calls) -> None:
        self._mesh: Callable[[], Communicator | None] = weakref.ref(mesh)
        self._axes, self._ranks, self._calls = axes, ranks, calls
        self._remedy = "all losses need their weights in the same way"  # where the ranks' weights differ
        self._number = 0  # of the run, among those of its mesh
        self._rates: dict[int, Rates] = {}
        self._begun: tuple[int, float] = (-1, 0.0)  # the step that began last, and its number

    def number(self) -> None:
        """Take the next number among the runs of the mesh; once."""
        mesh = self._mesh()
        if not self._number and mesh is not None:
            mesh.steps += 1
            self._number = mesh.steps

    def begin(self, step: int, rates: Rates, weight: tuple[float, str] | None = None) -> float:
        """The number of a step that begins now with these hyperparameters.

        Args:
            weight: This rank's weight, where all ranks need the same one since their losses have mixed; and what to do
                otherwise.
        """
        if weight is not None:
            rates, self._remedy = [*rates, (_WEIGHT, weight[0])], weight[1]
        if rates or self._rates:
            self._rates[step] = tuple(rates)
            self._rates.pop(step - _KEPT, None)
        self._begun = step, number_of(self._number, step, self._rates.get(step, ()))
        return self._begun[1]

    def of(self, step: int) -> float:
        """The number of a step that this rank has begun."""
        if step == self._begun[0]:
            return self._begun[1]
        return number_of(self._number, step, self._rates.get(step, ()))

    @property
    def of_flush(self) -> float:
        """The number of a flush; it is no step's."""
        return 2 * number_of(self._number, -1, ())

    def check(self, step: int, sums: dict[str, Any], late: int) -> None:
        """Raise DesyncError unless all ranks have called the same step; sums on a device are not read.

        Args:
            step: The present step.
            late: See `CountsOfAll`.
        """
        of = step_of(step, late) if late else step
        mine = self._begun[1] if of == self._begun[0] else self.of(of)
        if self._number and not isinstance(sums["step_id"], Tensor) and sums["step_id"] != self._ranks * mine:
            effect, calls = "nothing has changed" if late < 2 else "each has taken its own step", self._calls
            text = f"step {of}: {calls.differ}, or only some of them {calls.flush}; {effect}. {calls.remedy}"
            self._refuse(of, calls.step, text, effect)

    def refuse_flush(self, step: int) -> NoReturn:
        """Raise DesyncError where only some ranks flush after this many steps."""
        calls = self._calls
        text = f"only some ranks have called {calls.flush} after step {step - 1}; others have called {calls.step}"
        text = f"{text}, or flush after another step. {calls.even}"
        self._refuse(step - 1, calls.flush, text, "nothing has changed")

    def _refuse(self, step: int, call: str, text: str, effect: str) -> NoReturn:
        """Find out with the other ranks where they differ, and raise DesyncError.

        Args:
            call: This rank's call, in words.
            text: The message where the calls differ, and not the hyperparameters.
            effect: The effect of the ranks' calls, in words.
        """
        mine: dict[str, Any] = {"call": [call, self._number, step], "rates": list(map(list, self._rates.get(step, ())))}
        mesh = self._mesh()
        ranks = [mine] if mesh is None else mesh.exchange("a comparison of different steps", mine, list, self._axes)
        first = ranks[0]
        odd = next((rank for rank, there in enumerate(ranks) if there["rates"] != first["rates"]), None)
        if odd is None or any(there["call"] != first["call"] for there in ranks):
            raise DesyncError(text, step=step)
        others, own = dict(ranks[odd]["rates"]), dict(first["rates"])
        name = next(name for name in (own | others) if own.get(name) != others.get(name))
        there, here = others.get(name), own.get(name)
        remedy = (
            "All ranks need the same hyperparameters: a schedule must not depend on the rank or its data, and with_hyperparameters(...) "
            "and handle.with_hyperparameters(...) take equal values, such as those computed from a mean of the loss over all ranks"
        )
        if name == _WEIGHT:
            mixed = "The forward pass has communicated, so the backward pass has mixed the ranks' losses"
            remedy = f"{mixed}: {self._remedy}"
        text = f"step {step}: rank {odd} steps with {name}={there!r}, but rank 0 with {name}={here!r}"
        raise DesyncError(f"{text}; {effect}. {remedy}", rank=odd, step=step)
