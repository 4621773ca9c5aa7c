"""The generic Join: ranks that are out of input shadow the collectives of the ranks with input."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Literal, NoReturn

import torch.distributed as dist
import torch.distributed.algorithms.join as torch_join
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from .._errors import EarlyTermination, JoinError
from ..groups._consistency import same_joinables
from ..groups._from_group import mesh_from_group
from ..groups._mesh import Mesh
from ..groups._record import Record, Sums
from ..transforms._axis_env import Work
from ._torch_joinables import DDPHook, check_notifies, check_steps_alone, is_stepper
from ._turns import Turns, turns_of

WARN_AFTER = 1000


# The flags of an iteration's record.
_LIVE, _SYNCS = "has input", "synchronises"


class _Config:
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


class Join:
    """A context in which ranks may have different numbers of iterations.

    A rank that leaves the block runs the joinables' main hooks, in their order, once for each iteration of the
    ranks that are still in it, to match their collectives; when all have left, every rank runs the post hooks.
    Each iteration has one small message with the ranks that have input. The first joinable's notification sends
    it; with a DistributedDataParallel, its forward passes under grad mode do.

    Pass the optimizers too: `Join([ddp, optimizer])`. Then a rank without input takes every step with the gradients
    of the others, and parameters and optimizer state stay equal on all ranks. A ZeroRedundancyOptimizer is both
    optimizer and joinable. Pass learning-rate schedulers that step in every iteration as well. The loop must then
    step once in each iteration that synchronises gradients, and run one forward pass for each backward pass; to
    accumulate, use `ddp.no_sync()`. Modules, and optimizers whose steps send messages, must be used in the order of the
    list: `Join([d, zero_d, g, zero_g])`. A torch.amp.GradScaler is not supported: its scale would be part of the gradients.

    Args:
        joinables: Objects of `Joinable`, torch's or ours, DistributedDataParallel and
            ZeroRedundancyOptimizer among them, optimizers and learning-rate schedulers; the same kinds
            in the same order on all ranks.
        enable: False makes the context do nothing.
        throw_on_early_termination: Raise on all ranks once the first is out of input. Each notification then
            waits for its message.
        kwargs: Passed to every joinable's `join_hook`. `divide_by_initial_world_size` (default True) is whether
            DistributedDataParallel's gradients are divided by the number of all ranks; otherwise they are divided
            by the number of ranks with input. `before_step` is a function that is called before optimizers step
            on a rank without input: it repeats the loop's own work before a step, such as clipping.

    Attributes:
        last_joiner: After the block: the lowest of the ranks that ended last; None before.
        iterations: The number of iterations that this rank has taken part in, with or without its own input.

    Raises:
        ValueError: no joinable, or joinables of different process groups.
        TypeError: an object that is no joinable, optimizer or scheduler; one whose step needs arguments; a
            DistributedDataParallel that notifies no Join.
        JoinError: at the start of the block: a joinable is already in another Join. Inside: a rank accumulates under
            no_sync where others synchronise; another order than that of the list; a module's second forward pass before
            its backward pass; an optimizer that does not step once in an iteration. At its end: this rank has
            communicated and never notified the Join.
        DesyncError: at the start of the block, on all ranks: other joinables on some rank.
        EarlyTermination: on all ranks, see above; a RuntimeError, as torch's.
        PeerLost: another rank left the block by an exception. Its process group is destroyed.

    Same as: torch.distributed.algorithms.join.Join, which sends two to four messages in each iteration,
        lets optimizer state drift apart and leaves its configuration on the joinables.

    >>> from fjoin import transforms as tx
    >>> weights = fjoin.as_joinable(tx.broadcast_from_last("data"), {"w": torch.ones(2)})
    >>> with fjoin.Join([weights]) as join:
    ...     _ = fjoin.Join.notify_join_context(weights)
    >>> join.last_joiner, join.iterations
    (0, 1)
    """

    def __init__(
        self,
        joinables: Sequence[Any],
        enable: bool = True,
        throw_on_early_termination: bool = False,
        **kwargs: Any,
    ) -> None:
        self._all = list(joinables)
        self._joinables = [joinable for joinable in self._all if hasattr(joinable, "join_process_group")]
        if not self._joinables:
            raise ValueError("a Join needs at least one joinable that communicates")
        groups = [joinable.join_process_group for joinable in self._joinables]
        for i, group in enumerate(groups):
            if group != groups[0]:
                raise ValueError(
                    f"joinables of one Join must have the same process group, but joinable {i}, a "
                    f"{type(self._joinables[i]).__name__}, has another one than joinable 0"
                )
        self._notifier = ([j for j in self._joinables if not is_stepper(j)] or self._joinables)[0]
        self._before_step = kwargs.get("before_step")
        self._ddps: list[DDPHook] = []
        hooks = {id(one): self._hook_of(one, kwargs) for one in self._all if not is_stepper(one)}
        self._hooks = list(hooks.values())
        self._steppers = list(filter(is_stepper, self._all))
        for stepper in self._steppers:
            check_steps_alone(stepper)
        modules = {hook.ddp: hook.params for hook in self._ddps}
        turns = turns_of(self._all, modules, self._steppers)
        self._shadow_turns = [hooks.get(id(one), one) for one in turns]
        self._turns = Turns(turns, list(modules), self._steppers)
        self._enable, self._throw = enable, throw_on_early_termination
        self._mesh: Mesh = getattr(self._joinables[0], "mesh", None) or mesh_from_group(groups[0])
        self._device = self._mesh.device
        if self._device.type != "cpu":
            self._device = self._notifier.join_device
        axes, flags = tuple(self._mesh.shape), (_LIVE, _SYNCS)
        self._record = Record(self._mesh, axes, (), flags, small=True, device=self._device)
        self._roll: Sums | None = None  # of the last iteration
        self._shadowing = False
        self._kept: list[Any] = []
        self._watches: list[Any] = []
        self._warned = False
        self._sent_before = 0
        self.last_joiner: int | None = None
        self.iterations = 0

    def _hook_of(self, joinable: Any, kwargs: dict[str, Any]) -> Any:
        if isinstance(joinable, DistributedDataParallel):
            check_notifies(joinable)
            by_world = kwargs.get("divide_by_initial_world_size", True)
            hook = DDPHook(joinable, self, joinable is self._notifier, by_world)
            self._ddps.append(hook)
            return hook
        if joinable not in self._joinables:
            raise TypeError(f"a Join takes joinables, optimizers and learning-rate schedulers, got {joinable!r}")
        return joinable.join_hook(**kwargs)

    def __enter__(self) -> Join:
        if not self._enable:
            return self
        for joinable in self._joinables:
            if isinstance(joinable._join_config, _Config):
                raise JoinError(f"this {type(joinable).__name__} is inside another Join already; leave that one first")
        same_joinables(self._mesh, self._device, self._all, self._throw)
        self._sent_before = self._mesh.sent()
        self._kept = [joinable._join_config for joinable in self._joinables]
        for joinable in self._joinables:
            joinable._join_config = _Config(self._notify if joinable is self._notifier else _silent)
        for hook in self._ddps:
            hook.ddp._join_config = _Config(hook.before_forward)
            hook.enter()
        if self._ddps:
            self._watches = [
                register_optimizer_step_pre_hook(self._sees_step),
                register_optimizer_step_post_hook(self._saw_step),
            ]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> Literal[False]:
        if not self._enable:
            return False
        try:
            if error is None:
                self._shadow()
            elif not isinstance(error, EarlyTermination):  # all ranks raise that at the same place
                self._fail(error)
        finally:
            for joinable, config in zip(self._joinables, self._kept, strict=True):
                joinable._join_config = config
            for hook in self._ddps:
                hook.leave()
            for watch in self._watches:
                watch.remove()
        return False

    @staticmethod
    def notify_join_context(joinable: torch_join.Joinable) -> Work | None:
        """Notify the other ranks that this rank has input; called by a joinable before an iteration's collectives.

        Returns:
            The message under way, where `joinable` is the first of its Join; otherwise None.

        Raises:
            EarlyTermination: with throw_on_early_termination: a rank is out of input.
        """
        config = joinable._join_config
        return config.notify() if isinstance(config, _Config) else torch_join.Join.notify_join_context(joinable)

    # -- called by the hooks ---------------------------------------------------------------------

    def notify(self, syncs: bool) -> None:
        """Begin an iteration of this rank."""
        self._turns.begin(syncs)
        self._roll = self._call_roll(live=True, syncs=syncs)
        self.iterations += 1
        if self._throw:
            live = self._roll.ranks(_LIVE)
            if len(live) < self._mesh.size:
                gone = [rank for rank in range(self._mesh.size) if rank not in live]
                raise EarlyTermination(
                    f"Detected at least one rank that exhausted inputs. Throwing across all ranks. In iteration "
                    f"{self.iterations - 1} out of input: {', '.join(f'rank {rank}' for rank in gone)}",
                    rank=gone[0],
                    step=self.iterations - 1,
                )

    def _call_roll(self, live: bool = False, syncs: bool = False) -> Sums:
        """Start an iteration's message: the ranks that have input, and those that synchronise gradients in it."""
        return self._record.send(self._record.flagged(self._record.flagged({}, _LIVE, live), _SYNCS, syncs))

    def live(self) -> tuple[int, ...]:
        """The ranks that have input in this iteration."""
        return self._roll.ranks(_LIVE) if self._roll is not None else ()

    def syncing(self) -> tuple[int, ...]:
        """The ranks with input that synchronise gradients in this iteration."""
        return self._roll.ranks(_SYNCS) if self._roll is not None else ()

    def _notify(self) -> Work | None:
        if self._shadowing:
            return None
        self.notify(syncs=all(hook.ddp.require_backward_grad_sync for hook in self._ddps[:1]))
        return self._roll

    def use(self, one: Any) -> None:
        """A module of this rank begins a pass that synchronises gradients, or an optimizer steps."""
        if not self._shadowing:
            self._turns.use(one)

    def _sees_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self.use(optimizer)

    def _saw_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """Inspect a step of this rank's own; warn of an optimizer that steps only on ranks with input."""
        if self._shadowing:
            return
        self._turns.stepped(optimizer)
        for hook in self._ddps:
            hook.saw_step(optimizer)
        inner = ("optim", "optimizer")  # ZeroRedundancyOptimizer and others step an inner optimizer
        known = [*self._steppers, *(getattr(stepper, name, None) for stepper in self._steppers for name in inner)]
        if self._warned or any(optimizer is one for one in known):
            return
        mine = {id(p) for hook in self._ddps for p in hook.params}
        if any(id(p) in mine for group in optimizer.param_groups for p in group["params"]):
            self._warned = True
            warnings.warn(
                f"this {type(optimizer).__name__} steps the parameters of a DistributedDataParallel in a Join that does not know "
                f"it: on ranks that are out of input its state will fall behind. Pass it too: Join([ddp, optimizer])",
                stacklevel=4,
            )

    # -- after this rank's own iterations ----------------------------------------------------------

    def _shadow(self) -> None:
        """Take part in the others' iterations until all are out of input, then run the post hooks."""
        self._shadowing = True
        if not self.iterations and self._mesh.sent() > self._sent_before:
            self._fail(
                JoinError(
                    f"rank {self._mesh.rank} has communicated inside a Join that was never notified; call "
                    f"Join.notify_join_context(joinable) before the collectives of each iteration, and move collectives "
                    f"outside of iterations before the block",
                    rank=self._mesh.rank,
                )
            )
        last, is_last_joiner, shadowed = self.live(), True, 0
        try:
            self._turns.end()
            while live := (roll := self._call_roll()).ranks(_LIVE):
                if self._throw:
                    raise EarlyTermination(
                        f"Rank {self._mesh.rank} exhausted all inputs.", rank=self._mesh.rank, step=self.iterations
                    )
                self._roll = roll
                self._take_turns(bool(roll.ranks(_SYNCS)))
                for hook in self._ddps:
                    hook.after_main()
                last, is_last_joiner = live, False
                self.iterations += 1
                shadowed += 1
                if shadowed == WARN_AFTER:
                    warnings.warn(
                        f"rank {self._mesh.rank} has been out of input for {WARN_AFTER} iterations of other ranks; "
                        f"such uneven inputs slow training down",
                        stacklevel=3,
                    )
            self.last_joiner = min(last, default=0)
            for hook in self._hooks:
                hook.post_hook(is_last_joiner)
        except EarlyTermination:
            raise
        except BaseException as error:
            self._fail(error)
        finally:
            self._shadowing = False

    def _take_turns(self, syncs: bool) -> None:
        """Do the work of an iteration in the order of a rank with input: modules, and where they synchronise also steps."""
        follows = False  # whether the last turn was a step
        for turn in self._shadow_turns:
            steps = is_stepper(turn)
            if not steps:
                turn.main_hook()
            elif syncs:
                if self._before_step is not None and not follows:
                    self._before_step()
                turn.step()
            follows = steps

    def _fail(self, error: BaseException) -> NoReturn:
        """Reports the failure to the other ranks and raises its root cause."""
        self._roll = None  # a message that was never awaited also holds connections
        for hook in self._ddps:
            hook.release()
        for joinable in self._joinables:  # connections close once their group is no longer referenced
            for name, value in list(vars(joinable).items()):
                if isinstance(value, dist.ProcessGroup):
                    joinable.__dict__[name] = None
        self._mesh.raise_root_cause(error, self.iterations)


def _silent() -> None:
    """The notification of a joinable that is not the first."""
