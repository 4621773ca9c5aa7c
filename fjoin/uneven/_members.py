"""The members of a Join, their order and their turns."""

from __future__ import annotations

import difflib
import inspect
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LRScheduler

from .._errors import JoinError
from ..transforms.axes import Work
from ._ddp_hook import DDPHook, Iteration, check_notifies


class JoinConfig:
    """The `_join_config` of a joinable while it is inside a Join.

    torch's own `notify_join_context` reads these fields before it communicates; it reads `is_first_joinable`
    when one of torch's joinables notifies. This read triggers our notification, and its value False makes
    torch do nothing else.
    """

    enable = False
    throw_on_early_termination = False

    def __init__(self, notify: Callable[[], Work | None]) -> None:
        self.notify = notify

    @property
    def is_first_joinable(self) -> bool:
        self.notify()
        return False


def silent() -> None:
    """The notification of a joinable that is not the first."""


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


def check_steps_alone(stepper: Any) -> None:
    """Raise TypeError for an object that cannot step on a rank without input, since its step needs arguments."""
    _, *arguments = inspect.signature(type(stepper).step).parameters.values()
    needs = [p.name for p in arguments if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD]
    if needs:
        raise TypeError(
            f"a {type(stepper).__name__} cannot be in a Join: its step needs {', '.join(needs)}, which a rank that is out of input "
            f"does not have"
        )


def is_stepper(value: Any) -> bool:
    """Whether `value` is an optimizer or a learning-rate scheduler, which step on all ranks alike."""
    return isinstance(value, (torch.optim.Optimizer, LRScheduler))


# The keyword arguments of a Join that modules and optimizers know.
_KNOWN = ("divide_by_initial_world_size", "before_step")


def _warn_of_typos(names: Iterable[str]) -> None:
    """Warn of a name that is nearly a known one: hooks of one's own take any keyword argument, so none is an error."""
    for name in names:
        near = difflib.get_close_matches(name, _KNOWN, 1, 0.8)
        if near and name not in _KNOWN:
            warnings.warn(f"a Join passes {name} on to its joinables; do you mean {near[0]}?", stacklevel=5)


class Members:
    """What a Join is entered with.

    Args:
        given: The objects in the order of their list.
        join: The Join.
        kwargs: Those for the joinables' hooks.

    Attributes:
        all: All objects.
        joinables: Those that communicate.
        notifier: The joinable that begins the iterations.
        hooks: The hooks of the joinables that are no optimizers.
        ddps: Those of them that are of a DistributedDataParallel.
        turns: Compares the order in which this rank uses the objects with that of the list.
    """

    def __init__(self, given: Sequence[Any], join: Iteration, kwargs: dict[str, Any]) -> None:
        self.all = list(given)
        self.joinables = [joinable for joinable in self.all if hasattr(joinable, "join_process_group")]
        if not self.joinables:
            raise ValueError(
                f"a Join needs at least one joinable that communicates, got {[type(one).__name__ for one in self.all]}; wrap a "
                f"module in DistributedDataParallel, or make a joinable of a function by fjoin.as_joinable"
            )
        for joinable in self.joinables:
            if not hasattr(joinable, "_join_config"):
                raise TypeError(
                    f"{type(joinable).__name__} is no complete Joinable; call super().__init__() at the beginning of its __init__"
                )
        _warn_of_typos(kwargs)
        groups = [joinable.join_process_group for joinable in self.joinables]
        for i, group in enumerate(groups):
            if group != groups[0]:
                raise ValueError(
                    f"joinables of one Join must have the same process group, but joinable {i}, a "
                    f"{type(self.joinables[i]).__name__}, has another one than joinable 0"
                )
        self.notifier = ([j for j in self.joinables if not is_stepper(j)] or self.joinables)[0]
        self.ddps: list[DDPHook] = []
        hooks = {id(one): self._hook_of(one, join, kwargs) for one in self.all if not is_stepper(one)}
        self.hooks = list(hooks.values())
        self._steppers = list(filter(is_stepper, self.all))
        for stepper in self._steppers:
            check_steps_alone(stepper)
        modules = {hook.ddp: hook.params for hook in self.ddps}
        turns = turns_of(self.all, modules, self._steppers)
        self._shadow_turns = [hooks.get(id(one), one) for one in turns]
        self.turns = Turns(turns, list(modules), self._steppers)
        self._kept: list[Any] = []

    def _hook_of(self, joinable: Any, join: Iteration, kwargs: dict[str, Any]) -> Any:
        if isinstance(joinable, DistributedDataParallel):
            check_notifies(joinable)
            by_world = kwargs.get("divide_by_initial_world_size", True)
            hook = DDPHook(joinable, join, joinable is self.notifier, by_world)
            self.ddps.append(hook)
            return hook
        if joinable not in self.joinables:
            raise TypeError(f"a Join takes joinables, optimizers and learning-rate schedulers, got {joinable!r}")
        return joinable.join_hook(**kwargs)

    def check_free(self) -> None:
        """Raise JoinError where a joinable is inside another Join."""
        for joinable in self.joinables:
            if isinstance(joinable._join_config, JoinConfig):
                raise JoinError(f"this {type(joinable).__name__} is inside another Join already; leave that one first")

    def enter(self, notify: Callable[[], Work | None]) -> None:
        """Let the notifications of the joinables call `notify`, or a module's hook."""
        self._kept = [joinable._join_config for joinable in self.joinables]
        for joinable in self.joinables:
            joinable._join_config = JoinConfig(notify if joinable is self.notifier else silent)
        for hook in self.ddps:
            hook.ddp._join_config = JoinConfig(hook.before_forward)
            hook.enter()

    def leave(self) -> None:
        """Undo `enter`."""
        for joinable, config in zip(self.joinables, self._kept, strict=True):
            joinable._join_config = config
        for hook in self.ddps:
            hook.leave()

    def lacks(self, optimizer: Any) -> bool:
        """Whether an optimizer steps the parameters of the modules, and is none of the members."""
        inner = ("optim", "optimizer")  # ZeroRedundancyOptimizer and others step an inner optimizer
        known = [*self._steppers, *(getattr(stepper, name, None) for stepper in self._steppers for name in inner)]
        if any(optimizer is one for one in known):
            return False
        mine = {id(p) for hook in self.ddps for p in hook.params}
        return any(id(p) in mine for group in optimizer.param_groups for p in group["params"])

    def take_turns(self, syncs: bool, before_step: Callable[[], Any] | None) -> None:
        """Do the work of an iteration in the order of a rank with input: modules, and where they synchronise also steps."""
        follows = False  # whether the last turn was a step
        for turn in self._shadow_turns:
            steps = is_stepper(turn)
            if not steps:
                turn.main_hook()
            elif syncs:
                if before_step is not None and not follows:
                    before_step()
                turn.step()
            follows = steps
        for hook in self.ddps:
            hook.after_main()

    def release(self) -> None:
        """Let go of the process group: its connections close once it is no longer referenced."""
        for hook in self.ddps:
            hook.release()
        for joinable in self.joinables:
            for name, value in list(vars(joinable).items()):
                if isinstance(value, dist.ProcessGroup):
                    joinable.__dict__[name] = None
