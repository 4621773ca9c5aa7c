"""`Join`."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any, Literal, NoReturn

import torch.distributed.algorithms.join as torch_join
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import register_optimizer_step_pre_hook

from .._errors import EarlyTermination, JoinError
from ..groups import Communicator, mesh_over
from ..records import Record, Sums, compare
from ..transforms.axes import Work
from ._ddp_hook import DDPHook

# The flags of an iteration's record.
_LIVE, _SYNCS = "has input", "synchronises"


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
    list, such as `Join([d, zero_d, g, zero_g])`, but an optimizer's turn is after the modules that it steps. A
    torch.amp.GradScaler is not supported: its scale would be part of the gradients.

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
        ValueError: nothing that communicates, or joinables of different process groups.
        TypeError: an object that is no joinable, optimizer or scheduler; a DistributedDataParallel that notifies no
            Join; on a rank without input: an optimizer or scheduler whose step needs arguments.
        JoinError: at the start of the block: a joinable is already in another Join. Inside: a rank accumulates under
            no_sync where others synchronise; the loop uses modules in another order than the list; a module's second
            forward pass before its backward pass; an optimizer that does not step once in an iteration.
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

    last_joiner: int | None = None
    iterations: int = 0
    shadowing = False  # whether this rank is out of input

    def __init__(
        self, joinables: Sequence[Any], enable: bool = True, throw_on_early_termination: bool = False, **kwargs: Any
    ) -> None:
        self._all, self._enable, self._throw = list(joinables), enable, throw_on_early_termination
        self._before_step = kwargs.get("before_step")
        self._joinables = [one for one in self._all if hasattr(one, "join_process_group")]
        _check(self._all, self._joinables)
        self._first = next((one for one in self._joinables if not _steps(one)), self._joinables[0])
        self.mesh: Communicator = getattr(self._first, "mesh", None) or mesh_over(self._first.join_process_group)
        self._device = self._first.join_device if self.mesh.device.type != "cpu" else self.mesh.device
        axes, flags = tuple(self.mesh.shape), (_LIVE, _SYNCS)
        self._record = Record(self.mesh, axes, (), flags, small=True, device=self._device)
        self._now: Sums | None = None  # the message of this iteration, which may be under way
        hooks = {id(one): self._hook_of(one, kwargs) for one in self._joinables if not _steps(one)}
        self._hooks, self.ddps = list(hooks.values()), [hook for hook in hooks.values() if isinstance(hook, DDPHook)]
        in_turn = [self._all[at] for at in sorted(range(len(self._all)), key=self._place)]
        self._turns = [hooks.get(id(one), one) for one in in_turn]
        # The modules whose forward pass is still to come in this iteration, the next one last.
        self._due: list[DistributedDataParallel] = []
        self._synced = 0  # the iterations that synchronised gradients
        self._stepped: dict[int, int] = {}  # optimizer -> their number at its last step
        self._watch: Any = None
        listed = {id(p) for one in self._all if isinstance(one, Optimizer) for p in _params(one)}
        # Parameters that none of its optimizers steps.
        self._unlisted = {id(p) for hook in self.ddps for p in hook.params} - listed

    def _hook_of(self, joinable: Any, kwargs: dict[str, Any]) -> Any:
        if isinstance(joinable, DistributedDataParallel):
            return DDPHook(joinable, self, kwargs.get("divide_by_initial_world_size", True))
        return joinable.join_hook(**kwargs)

    def _place(self, at: int) -> tuple[int, bool, int]:
        """The turn of an object in an iteration: its place in the list, but after the modules that it steps.

        Optimizers that send no messages come after all others, and schedulers last.
        """
        one = self._all[at]
        if not _steps(one):
            return at, False, at
        if not _sends(one):
            return len(self._all), isinstance(one, LRScheduler), at
        mine = set(map(id, _params(one)))
        stepped = [hook.ddp for hook in self.ddps if not mine.isdisjoint(map(id, hook.params))]
        return max([at, *(i for i, other in enumerate(self._all) if other in stepped)]), True, at

    def __enter__(self) -> Join:
        if not self._enable:
            return self
        for one in self._joinables:
            if isinstance(one._join_config, _JoinConfig):
                raise JoinError(f"this {type(one).__name__} is inside another Join already; leave that one first")
        kinds = [f"{type(one).__module__}.{type(one).__qualname__}" for one in self._all]
        remedy = "All ranks must enter a Join with the same ones in the same order"
        compare(self.mesh, "fjoin.Join", {"joinables": kinds, "throw_on_early_termination": self._throw}, remedy)
        self._configs = [one._join_config for one in self._joinables]
        modules = {id(hook.ddp): hook for hook in self.ddps}
        for one in self._joinables:
            one._join_config = _JoinConfig(self, one is self._first, modules.get(id(one)))
        for hook in self.ddps:
            hook.enter()
        self._watch = register_optimizer_step_pre_hook(self._sees_step)
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> Literal[False]:
        if not self._enable:
            return False
        try:
            if error is None:
                self._shadow()
            elif not isinstance(error, EarlyTermination):  # all ranks raise that at the same place
                self._fail(error)
        finally:
            self._watch.remove()
            for one, config in zip(self._joinables, self._configs, strict=True):
                one._join_config = config
            for hook in self.ddps:
                hook.leave()
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
        return config.notify() if isinstance(config, _JoinConfig) else torch_join.Join.notify_join_context(joinable)

    def live(self) -> tuple[int, ...]:
        """The ranks that have input in this iteration."""
        return () if self._now is None else self._now.ranks(_LIVE)

    def syncing(self) -> tuple[int, ...]:
        """The ranks with input that synchronise gradients in this iteration."""
        return () if self._now is None else self._now.ranks(_SYNCS)

    def _send(self, live: bool, syncs: bool) -> Sums:
        return self._record.send(self._record.flagged(self._record.flagged({}, _LIVE, live), _SYNCS, syncs))

    # -- on a rank with input --------------------------------------------------------------------

    def begin(self, syncs: bool) -> Work | None:
        """Begin an iteration of this rank; returns its message under way."""
        if self._due:
            self._refuse_order()
        self._now = self._send(True, syncs)
        self._due = [turn.ddp for turn in reversed(self._turns) if isinstance(turn, DDPHook)]
        self.iterations, self._synced = self.iterations + 1, self._synced + syncs
        if self._throw and len(self.live()) < self.mesh.size:
            gone = [rank for rank in range(self.mesh.size) if rank not in self.live()]
            raise EarlyTermination(
                f"Detected at least one rank that exhausted inputs. Throwing across all ranks. In iteration "
                f"{self.iterations - 1} out of input: {', '.join(f'rank {rank}' for rank in gone)}",
                rank=gone[0],
                step=self.iterations - 1,
            )
        return self._now

    def check(self, hook: DDPHook | None) -> None:
        """Raise where modules are not used in the order of the list, or where ranks disagree on no_sync."""
        if self._now is None or (hook is not None and (not self._due or self._due.pop() is not hook.ddp)):
            self._refuse_order()
        if hook is not None and not hook.ddp.require_backward_grad_sync and (others := self.syncing()):
            raise JoinError(
                f"this rank is inside no_sync in an iteration in which rank {others[0]} synchronises gradients; all ranks "
                f"with input must accumulate in the same iterations",
                rank=others[0],
            )

    def _refuse_order(self) -> NoReturn:
        raise JoinError(
            "the loop does not use each module once in an iteration, in the order of the list, as ranks without input do; pass Join "
            "the order of the loop, such as [d, optimizer_d, g, optimizer_g]"
        )

    def _sees_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """Check that this rank steps as the ranks without input do; warn of an optimizer that steps only on ranks with
        input.
        """
        if self.shadowing:
            return
        if not any(optimizer is one for one in self._all):
            if self._unlisted and not self._unlisted.isdisjoint(map(id, _params(optimizer))):
                self._unlisted = set()
                warnings.warn(
                    f"this {type(optimizer).__name__} steps the parameters of a DistributedDataParallel in a Join that does not know "
                    f"it: on ranks that are out of input its state will fall behind. Pass it too: Join([ddp, optimizer])",
                    stacklevel=4,
                )
        else:
            passes, self._stepped[id(optimizer)] = self._synced - self._stepped.get(id(optimizer), 0), self._synced
            if passes != 1:
                raise JoinError(
                    f"this {type(optimizer).__name__} has stepped once for {passes} iterations that synchronise gradients, but ranks "
                    f"without input step once in each one, so their states would fall apart; accumulate under ddp.no_sync(), and step "
                    f"after each other pass"
                )

    # -- after this rank's own iterations ----------------------------------------------------------

    def _shadow(self) -> None:
        """Take part in the others' iterations until all are out of input, then run the post hooks."""
        last, is_last_joiner = self.live(), True
        try:
            self.shadowing = True
            while live := (sums := self._send(False, False)).ranks(_LIVE):
                if self._throw:
                    rank = self.mesh.rank
                    raise EarlyTermination(f"Rank {rank} exhausted all inputs.", rank=rank, step=self.iterations)
                self._now, last, is_last_joiner = sums, live, False
                self._take_turns(bool(self.syncing()))
                self.iterations += 1
            self.last_joiner = min(last, default=0)
            for hook in self._hooks:
                hook.post_hook(is_last_joiner)
        except EarlyTermination:
            raise
        except BaseException as error:
            self._fail(error)
        finally:
            self.shadowing = False

    def _take_turns(self, syncs: bool) -> None:
        """Do the work of an iteration in the order of a rank with input: modules, and where they synchronise also
        steps.
        """
        follows = False  # whether the last turn was a step
        for turn in self._turns:
            if not _steps(turn):
                turn.main_hook()
            elif syncs:
                if self._before_step is not None and not follows:
                    self._before_step()
                turn.step()
            follows = _steps(turn)
        for hook in self.ddps:
            hook.after_main()

    def _fail(self, error: BaseException) -> NoReturn:
        """Report the failure to the other ranks and raise its root cause.

        The process group's connections close, so that waiting peers are released.
        """
        self._now = None  # a message that was never awaited also holds connections
        try:
            self.mesh.raise_root_cause(error, self.iterations)
        finally:  # a frame that refers to its exception lives until a garbage collection, with connections in it
            del error


class _JoinConfig:
    """The `_join_config` of a joinable while it is inside a Join.

    torch's own `notify_join_context` reads these fields before it communicates; it reads `is_first_joinable`
    when one of torch's joinables notifies. This read triggers our notification, and its value False makes
    torch do nothing else.
    """

    enable = False
    throw_on_early_termination = False

    def __init__(self, join: Join, is_first: bool, hook: DDPHook | None) -> None:
        self._join, self._is_first, self._hook = join, is_first, hook

    def notify(self) -> Work | None:
        join, hook, work = self._join, self._hook, None
        if join.shadowing or (hook is not None and not hook.before_forward()):
            return None
        if self._is_first:
            work = join.begin(all(one.ddp.require_backward_grad_sync for one in join.ddps[:1]))
        join.check(hook)
        return work

    @property
    def is_first_joinable(self) -> bool:
        self.notify()
        return False


def _steps(one: Any) -> bool:
    """Whether it is an optimizer or a learning-rate scheduler, which step on all ranks alike."""
    return isinstance(one, (Optimizer, LRScheduler))


def _sends(one: Any) -> bool:
    """Whether it is an optimizer whose steps send messages: a ZeroRedundancyOptimizer or a PostLocalSGDOptimizer."""
    return isinstance(one, Optimizer) and (hasattr(one, "process_group") or hasattr(one, "averager"))


def _params(optimizer: Any) -> list[Any]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _check(given: Sequence[Any], joinables: Sequence[Any]) -> None:
    """Raise for objects that cannot be in a Join together."""
    if not joinables:
        raise ValueError(
            f"a Join needs at least one joinable that communicates, got {[type(one).__name__ for one in given]}; wrap a "
            f"module in DistributedDataParallel, or make a joinable of a function by fjoin.as_joinable; one under fully_shard "
            f"loops over fjoin.join(loader)"
        )
    for one in joinables:
        if one.join_process_group != joinables[0].join_process_group:
            raise ValueError(f"joinables of one Join must have the same process group; {one!r} has another one")
    for one in given:
        if not _steps(one) and one not in joinables:
            raise TypeError(f"a Join takes joinables, optimizers and learning-rate schedulers, got {one!r}")
