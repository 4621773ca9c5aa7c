"""The members of a Join: joinables, optimizers and schedulers, and what each does in an iteration."""

from __future__ import annotations

import difflib
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from .._errors import JoinError
from ..transforms._axis_env import Work
from ._ddp_hook import DDPHook, Iteration, check_notifies
from ._join_config import JoinConfig, silent
from ._steppers import check_steps_alone, is_stepper
from ._turns import Turns, turns_of

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
