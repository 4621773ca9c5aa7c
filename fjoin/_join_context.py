"""The generic Join: ranks that are out of input shadow the collectives of those that are not."""

from __future__ import annotations

import warnings
import zlib
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Literal

import torch
import torch.distributed.algorithms.join as torch_join
from torch import Tensor

from ._axis import Work
from ._errors import DesyncError, EarlyTermination, JoinError
from ._group_mesh import mesh_over
from ._mesh import Mesh
from .transforms.sync._lane import MASK_BITS, ranks_in_masks

WARN_AFTER = 1000


class _Roll:
    """One iteration's message: which ranks have input."""

    def __init__(self, mesh: Mesh, device: torch.device, live: bool) -> None:
        self._words = torch.zeros(-(-mesh.size // MASK_BITS), device=device)
        if live:
            self._words[mesh.rank // MASK_BITS] = float(2 ** (mesh.rank % MASK_BITS))
        self._work: Work | None = mesh.reduce_(self._words, tuple(mesh.shape))

    def wait(self) -> tuple[int, ...]:
        """The ranks that have input."""
        if self._work is not None:
            self._work.wait()
            self._work = None
        return ranks_in_masks({f"nonfinite{i}": word for i, word in enumerate(self._words.tolist())})


class _Config:
    """Stands on a joinable as its `_join_config` while it is inside a Join.

    torch's own `notify_join_context` asks for these fields before it communicates: for `is_first_joinable`
    where a joinable of torch's kind notifies. So this is where ours hears of it, and answers that there is
    nothing left to do.
    """

    enable = False
    throw_on_early_termination = False

    def __init__(self, join: Join, first: bool) -> None:
        self.join, self.first = join, first

    @property
    def is_first_joinable(self) -> bool:
        self.notify()
        return False

    def notify(self) -> Work | None:
        return self.join._notify() if self.first else None


class Join:
    """A context in which ranks may have different numbers of iterations.

    A rank that leaves the block runs the joinables' main hooks, in their order, once for each iteration of the
    ranks that are still in it, so that these find somebody to communicate with; when all have left, every
    rank runs the post hooks. Ranks learn of each other by one small message in each iteration, sent by the
    first joinable's notification.

    Args:
        joinables: Objects of `Joinable`, torch's or ours; one of each kind in the same order on all ranks.
        enable: False makes the context do nothing.
        throw_on_early_termination: Raise on all ranks once the first is out of input. Each notification then
            waits for its message.
        kwargs: Handed to every joinable's `join_hook`.

    Attributes:
        last_joiner: After the block: the lowest of the ranks that ended last; None before.
        iterations: How many this rank has taken part in, by its own input or not.

    Raises:
        ValueError: no joinable, or joinables of different process groups.
        JoinError: at the start of the block: a joinable is in another Join already.
        DesyncError: at the start of the block, on all ranks: other joinables on some rank.
        EarlyTermination: on all ranks, see above; a RuntimeError, as torch's.
        PeerLost: another rank left the block by an exception.

    Same as: torch.distributed.algorithms.join.Join, which sends two to four messages in each iteration and
        leaves its configuration on the joinables.

    >>> from fjoin import transforms as tx
    >>> weights = fjoin.as_joinable(tx.broadcast_from_last("data"), {"w": torch.ones(2)})
    >>> with fjoin.Join([weights]) as join:
    ...     _ = fjoin.Join.notify_join_context(weights)
    >>> join.last_joiner, join.iterations
    (0, 1)
    """

    def __init__(
        self,
        joinables: Sequence[torch_join.Joinable],
        enable: bool = True,
        throw_on_early_termination: bool = False,
        **kwargs: Any,
    ) -> None:
        if not joinables:
            raise ValueError("a Join needs at least one joinable")
        self._joinables = list(joinables)
        self._hooks = [joinable.join_hook(**kwargs) for joinable in self._joinables]
        self._enable, self._throw = enable, throw_on_early_termination
        groups = [joinable.join_process_group for joinable in self._joinables]
        for i, group in enumerate(groups):
            if group != groups[0]:
                raise ValueError(
                    f"joinables of one Join must have the same process group, but joinable {i}, a "
                    f"{type(self._joinables[i]).__name__}, has another one than joinable 0"
                )
        first = self._joinables[0]
        self._mesh: Mesh = getattr(first, "mesh", None) or mesh_over(groups[0])
        self._device = first.join_device
        self._roll: _Roll | None = None  # of the last iteration in which this rank had input
        self._kept: list[Any] = []
        self.last_joiner: int | None = None
        self.iterations = 0

    def __enter__(self) -> Join:
        if not self._enable:
            return self
        for joinable in self._joinables:
            if isinstance(joinable._join_config, _Config):
                raise JoinError(f"this {type(joinable).__name__} is inside another Join already; leave that one first")
        self._check_same()
        self._kept = [joinable._join_config for joinable in self._joinables]
        for i, joinable in enumerate(self._joinables):
            joinable._join_config = _Config(self, first=i == 0)  # type: ignore[assignment]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> Literal[False]:
        if not self._enable:
            return False
        try:
            if error is None:
                self._shadow()
            elif not isinstance(error, EarlyTermination):  # which all ranks raise at the same place
                self._fail(error)
        finally:
            for joinable, config in zip(self._joinables, self._kept, strict=True):
                joinable._join_config = config
        return False

    @staticmethod
    def notify_join_context(joinable: torch_join.Joinable) -> Work | None:
        """Say that this rank has input in this iteration; called by a joinable before its collectives.

        Returns:
            The message on its way, where `joinable` is the first of its Join; else None.

        Raises:
            EarlyTermination: with throw_on_early_termination: a rank is out of input.
        """
        config = joinable._join_config
        return config.notify() if isinstance(config, _Config) else torch_join.Join.notify_join_context(joinable)

    def _notify(self) -> Work:
        self._roll = _Roll(self._mesh, self._device, live=True)
        self.iterations += 1
        if self._throw:
            live = self._roll.wait()
            if len(live) < self._mesh.size:
                gone = [rank for rank in range(self._mesh.size) if rank not in live]
                raise EarlyTermination(
                    f"Detected at least one rank that exhausted inputs. Throwing across all ranks. In iteration "
                    f"{self.iterations - 1} out of input: {', '.join(f'rank {rank}' for rank in gone)}",
                    rank=gone[0],
                    step=self.iterations - 1,
                )
        return self._roll

    def _shadow(self) -> None:
        """Take part in the others' iterations until all are out of input, then run the post hooks."""
        try:
            last = self._roll.wait() if self._roll is not None else ()
            is_last_joiner = True
            shadowed = 0
            while live := _Roll(self._mesh, self._device, live=False).wait():
                if self._throw:
                    raise EarlyTermination(
                        f"Rank {self._mesh.rank} exhausted all inputs.", rank=self._mesh.rank, step=self.iterations
                    )
                for hook in self._hooks:
                    hook.main_hook()
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
            raise

    def _fail(self, error: BaseException) -> None:
        """Let the other ranks know; raises what really happened, where this error is only its echo."""
        told = self._mesh.account(error, self.iterations)
        self._mesh.failed(told, self.iterations)
        if told is not error:
            raise told from error

    def _check_same(self) -> None:
        """Raise on all ranks unless they enter with the same joinables."""
        what = [f"{type(j).__module__}.{type(j).__qualname__}" for j in self._joinables]
        mine = zlib.crc32(repr((what, self._throw)).encode())
        seen = _gather(self._mesh, torch.tensor([mine], dtype=torch.int64, device=self._device))
        odd = [rank for rank, value in enumerate(seen) if value != seen[0]]
        if odd:
            raise DesyncError(
                f"rank {odd[0]} enters this Join with other joinables, or another throw_on_early_termination, than rank 0; "
                f"here: {[type(j).__name__ for j in self._joinables]}. All ranks must enter with the same ones in the same order",
                rank=odd[0],
            )


def _gather(mesh: Mesh, value: Tensor) -> list[int]:
    axes = mesh.over(tuple(mesh.shape))
    for axis in reversed(axes):
        value = axis.run("all_gather", value, None)
    out: list[int] = value.flatten().tolist()
    return out
