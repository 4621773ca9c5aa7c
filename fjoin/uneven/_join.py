"""`Join`."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Literal, NoReturn

import torch
import torch.distributed.algorithms.join as torch_join
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from .._errors import EarlyTermination, JoinError
from ..agreement import Record, Sums, same_joinables
from ..groups import Communicator, mesh_from_group
from ..transforms.axes import Work
from ._members import JoinConfig, Members

# The flags of an iteration's record.
_LIVE, _SYNCS = "has input", "synchronises"


class Roll:
    """The ranks that have input, and those that synchronise gradients, in the last iteration of this rank.

    Attributes:
        now: The message of that iteration, which may be under way.
    """

    def __init__(self, mesh: Communicator, device: torch.device) -> None:
        axes, flags = tuple(mesh.shape), (_LIVE, _SYNCS)
        self._record = Record(mesh, axes, (), flags, small=True, device=device)
        self.now: Sums | None = None

    def _send(self, live: bool = False, syncs: bool = False) -> Sums:
        """Start an iteration's message: the ranks that have input, and those that synchronise gradients in it."""
        return self._record.send(self._record.flagged(self._record.flagged({}, _LIVE, live), _SYNCS, syncs))

    def call(self, syncs: bool) -> None:
        """Begin an iteration with input."""
        self.now = self._send(live=True, syncs=syncs)

    def call_without_input(self) -> tuple[int, ...]:
        """Begin an iteration without input: the ranks that have some. Where none has, there is no iteration."""
        sums = self._send()
        live = sums.ranks(_LIVE)
        if live:
            self.now = sums
        return live

    def live(self) -> tuple[int, ...]:
        return self.now.ranks(_LIVE) if self.now is not None else ()

    def syncing(self) -> tuple[int, ...]:
        return self.now.ranks(_SYNCS) if self.now is not None else ()


WARN_AFTER = 1000


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
        self._members = members = Members(joinables, self, kwargs)
        self._before_step = kwargs.get("before_step")
        self._enable, self._throw = enable, throw_on_early_termination
        first = members.joinables[0]
        self.mesh: Communicator = getattr(first, "mesh", None) or mesh_from_group(first.join_process_group)
        self._device = self.mesh.device
        if self._device.type != "cpu":
            self._device = members.notifier.join_device
        self._roll = Roll(self.mesh, self._device)
        self._shadowing = False
        self._watches: list[Any] = []
        self._warned = False
        self._sent_before = 0
        self.last_joiner: int | None = None
        self.iterations: int = 0

    def __enter__(self) -> Join:
        if not self._enable:
            return self
        self._members.check_free()
        same_joinables(self.mesh, self._device, self._members.all, self._throw)
        self._sent_before = self.mesh.sent()
        self._members.enter(self._notify)
        if self._members.ddps:
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
            self._members.leave()
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
        return config.notify() if isinstance(config, JoinConfig) else torch_join.Join.notify_join_context(joinable)

    # -- called by the hooks ---------------------------------------------------------------------

    def notify(self, syncs: bool) -> None:
        """Begin an iteration of this rank."""
        self._members.turns.begin(syncs)
        self._roll.call(syncs)
        self.iterations += 1
        if self._throw:
            live = self._roll.live()
            if len(live) < self.mesh.size:
                gone = [rank for rank in range(self.mesh.size) if rank not in live]
                raise EarlyTermination(
                    f"Detected at least one rank that exhausted inputs. Throwing across all ranks. In iteration "
                    f"{self.iterations - 1} out of input: {', '.join(f'rank {rank}' for rank in gone)}",
                    rank=gone[0],
                    step=self.iterations - 1,
                )

    def live(self) -> tuple[int, ...]:
        """The ranks that have input in this iteration."""
        return self._roll.live()

    def syncing(self) -> tuple[int, ...]:
        """The ranks with input that synchronise gradients in this iteration."""
        return self._roll.syncing()

    def _notify(self) -> Work | None:
        if self._shadowing:
            return None
        self.notify(syncs=all(hook.ddp.require_backward_grad_sync for hook in self._members.ddps[:1]))
        return self._roll.now

    def use(self, one: Any) -> None:
        """A module of this rank begins a pass that synchronises gradients, or an optimizer steps."""
        if not self._shadowing:
            self._members.turns.use(one)

    def _sees_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self.use(optimizer)

    def _saw_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """Inspect a step of this rank's own; warn of an optimizer that steps only on ranks with input."""
        if self._shadowing:
            return
        self._members.turns.stepped(optimizer)
        for hook in self._members.ddps:
            hook.saw_step(optimizer)
        if not self._warned and self._members.lacks(optimizer):
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
        if not self.iterations and self.mesh.sent() > self._sent_before:
            self._fail(
                JoinError(
                    f"rank {self.mesh.rank} has communicated inside a Join that was never notified; call "
                    f"Join.notify_join_context(joinable) before the collectives of each iteration, and move collectives "
                    f"outside of iterations before the block",
                    rank=self.mesh.rank,
                )
            )
        last, is_last_joiner, shadowed = self.live(), True, 0
        try:
            self._members.turns.end()
            while live := self._roll.call_without_input():
                if self._throw:
                    raise EarlyTermination(
                        f"Rank {self.mesh.rank} exhausted all inputs.", rank=self.mesh.rank, step=self.iterations
                    )
                self._members.take_turns(bool(self._roll.syncing()), self._before_step)
                last, is_last_joiner = live, False
                self.iterations += 1
                shadowed += 1
                if shadowed == WARN_AFTER:
                    warnings.warn(
                        f"rank {self.mesh.rank} has been out of input for {WARN_AFTER} iterations of other ranks; "
                        f"such uneven inputs slow training down",
                        stacklevel=3,
                    )
            self.last_joiner = min(last, default=0)
            for hook in self._members.hooks:
                hook.post_hook(is_last_joiner)
        except EarlyTermination:
            raise
        except BaseException as error:
            self._fail(error)
        finally:
            self._shadowing = False

    def _fail(self, error: BaseException) -> NoReturn:
        """Reports the failure to the other ranks and raises its root cause."""
        self._roll.now = None  # a message that was never awaited also holds connections
        self._members.release()
        self.mesh.raise_root_cause(error, self.iterations)
