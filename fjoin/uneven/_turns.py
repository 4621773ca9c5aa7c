"""The order in which an iteration of a Join communicates: modules, and optimizers whose steps send messages.

A rank without input sends the messages of an iteration in one order, which is that of the list of joinables. A rank with
input must use them in this order. Otherwise the ranks would wait for each other's messages, so it raises.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from .._errors import JoinError


def sends_in_step(stepper: Any) -> bool:
    """Whether an optimizer's steps send messages: those of a ZeroRedundancyOptimizer and a PostLocalSGDOptimizer do."""
    return hasattr(stepper, "join_process_group") or hasattr(stepper, "averager")


def turns_of(joinables: Sequence[Any], modules: dict[Any, Any], steppers: Sequence[Any]) -> list[Any]:
    """The order of an iteration on a rank without input: objects of `joinables`, schedulers last.

    An optimizer that sends messages has its turn where it stands in the list, but after the modules that it steps. The
    steps of others come after all of them.

    Args:
        joinables: All objects of the Join, in the order of its list.
        modules: DistributedDataParallel -> its parameters.
        steppers: The optimizers and schedulers among them.
    """
    turns: list[Any] = []
    waiting: list[Any] = []
    for one in joinables:
        if one in steppers:
            if not sends_in_step(one):
                continue
            waiting.append(one)
        else:
            turns.append(one)
        ready = [s for s in waiting if all(m in turns for m, params in modules.items() if _steps(s, params))]
        turns += ready
        waiting = [s for s in waiting if s not in ready]
    rest = [one for one in steppers if not sends_in_step(one)]
    return turns + sorted(rest, key=lambda one: isinstance(one, LRScheduler))


def _steps(optimizer: torch.optim.Optimizer, params: Sequence[Any]) -> bool:
    mine = {id(p) for p in params}
    return any(id(p) in mine for group in optimizer.param_groups for p in group["params"])


class Turns:
    """Compares the order in which this rank uses the joinables with the order of the list.

    Args:
        turns: The result of `turns_of`.
        modules: The modules among them.
        steppers: The optimizers and schedulers among them.
    """

    def __init__(self, turns: Sequence[Any], modules: Sequence[Any], steppers: Sequence[Any]) -> None:
        self._all, self._modules = list(turns), list(modules)
        self._senders = [one for one in steppers if sends_in_step(one)]
        self._others = [one for one in steppers if not sends_in_step(one) and not isinstance(one, LRScheduler)]
        self._due: list[Any] = []  # what is still to come in this iteration
        self._iterations = 0  # that synchronise gradients
        self._stepped: dict[int, int] = {}  # optimizer -> the iteration of its last step

    def begin(self, syncs: bool) -> None:
        """An iteration begins; raises as `end` does for the last one."""
        self.end()
        senders = self._senders if syncs else []
        self._due = [one for one in self._all if one in self._modules or one in senders]
        self._iterations += syncs

    def end(self) -> None:
        """An iteration has ended.

        Raises:
            JoinError: it was not complete.
        """
        if self._due:
            raise JoinError(
                f"{_named(self._due[0], self._all)} was not used in the last iteration, but ranks without input take part in its "
                f"messages in each one; use every module and optimizer of a Join once in each iteration, or loop over fjoin.join(loader)"
            )

    def use(self, one: Any) -> None:
        """A module runs, or an optimizer that sends messages steps.

        Raises:
            JoinError: it is not its turn.
        """
        if one not in self._modules and one not in self._senders:
            return
        if not self._due or self._due[0] is not one:
            now = f"but {_named(self._due[0], self._all)} is next" if self._due else "for which there is no turn left"
            raise JoinError(
                f"{_named(one, self._all)} communicates in this iteration, {now}; ranks without input would wait for other messages. "
                f"Pass Join the modules and the optimizers in the order in which the loop uses them, such as [d, optimizer_d, g, "
                f"optimizer_g], each once in an iteration"
            )
        del self._due[0]

    def stepped(self, optimizer: Any) -> None:
        """An optimizer has stepped.

        Raises:
            JoinError: not once since the last iteration that synchronised gradients.
        """
        if not any(optimizer is one for one in self._others):
            return
        passes = self._iterations - self._stepped.get(id(optimizer), 0)
        if passes != 1:
            raise JoinError(
                f"this {type(optimizer).__name__} has stepped once for {passes} iterations that synchronise gradients, but ranks without "
                f"input step once in each one, so their states would fall apart; accumulate under ddp.no_sync(), and step after "
                f"each other pass"
            )
        self._stepped[id(optimizer)] = self._iterations


def _named(one: Any, of: Sequence[Any]) -> str:
    alike = [other for other in of if type(other) is type(one)]
    number = f" number {next(i for i, other in enumerate(alike) if other is one) + 1}" if len(alike) > 1 else ""
    return f"the {type(one).__name__}{number} of this Join"
