"""Where a reduction that encodes finds, and leaves, what messages have lost."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from .._tree import Tree, named_leaves, on, on_host
from ..sync._weights import Share, not_zero


class Memory:
    """The errors of one call: the reduction that encodes asks what is `owed`, and says what it is to `keep`.

    It remembers those of the paths in `error`. Of others, such as of a mean that is encoded only by a codec around the whole,
    nothing is owed, and nothing kept.

    Errors are sums of weight * gradient, which count by what these are divided by: as that changes, they are scaled with it. A
    rank does not know the divisor when it sends. It sends of what it owes as much as it did when that was lost, or less by as
    much as its own weight is less: a small batch would else pay, divided by little, what large ones owe. What was too little or
    too much stays owed.

    Attributes:
        flush: Whether a rank of weight 0 sends what it owes.
        per_rank: Whether each rank must keep what it has lost itself, and say what the others decode of it.
        new: By path what it owes afterwards.
        last: By path this rank's factor when it last had input, and the divisor then: (1, 2), float64; 0 at first. Empty
            where errors are not to be scaled.
        coded: Where `per_rank`, by path what the others decode of this rank's message.
    """

    def __init__(
        self, error: Mapping[str, Tensor], flush: bool, last: Mapping[str, Tensor] | None = None, per_rank: bool = False
    ) -> None:
        self._error, self.flush, self.per_rank = error, flush, per_rank
        self.new: dict[str, Tensor] = {}
        self.last = dict(last or {})
        self.coded: dict[str, Tensor] = {}
        self._grown: dict[str, Any] = {}

    def __contains__(self, path: str) -> bool:
        return path in self._error

    def owed(self, of: Mapping[str, Tensor], share: Share) -> list[Tensor]:
        """What is to be sent of what is owed, of leaves in their order."""
        found, parts = [], dict[int, Any]()
        for path, leaf in of.items():
            error = self._error.get(path)
            if error is None:
                error = torch.zeros_like(leaf, dtype=torch.float32)
            elif path in self.last:
                last = self.last[path]
                if id(last) not in parts:
                    parts[id(last)] = _sent(last, share)
                error = _times(error, parts[id(last)])
            found.append(error)
        return found

    def keep(self, paths: Iterable[str], left: Iterable[Tensor], share: Share, divisor: Tensor) -> None:
        """Raises ValueError where something has been kept of a path already.

        Args:
            left: What is left of what was `owed` to that share.
            divisor: Of the sums of this call, 0-d.
        """
        changes = dict[int, Any]()
        for path, value in zip(paths, left, strict=True):
            if path not in self._error:
                continue
            if path in self.new:
                raise ValueError(
                    f"the gradient at {path!r} is encoded twice inside one error feedback, which has one memory; write "
                    f"chain(error_feedback(a), error_feedback(b))"
                )
            self.new[path] = value
            if path in self.last:
                last = self.last[path]
                if id(last) not in changes:
                    changes[id(last)] = (last, *_change(last, share, divisor))
                _, sent, self._grown[path], self.last[path] = changes[id(last)]
                self.new[path] = _plus(value, self._error[path], self._grown[path] - sent)

    def before(self, path: str) -> Tensor:
        """What was owed before this call, in sums as they are divided now."""
        return _times(self._error[path], self._grown[path])


def init_last(tree: Tree) -> dict[str, Tensor]:
    """`Memory.last` before the first call."""
    found: dict[torch.device, Tensor] = {}
    return {
        path: found.setdefault(leaf.device, torch.zeros(1, 2, dtype=torch.float64, device=leaf.device))
        for path, leaf in named_leaves(tree).items()
    }


def _sent(last: Tensor, share: Share) -> float | Tensor:
    """The part of what is owed that is sent: a number where the host may look."""
    if share.known is not None and on_host(last):
        before = float(last[0, 0])
        return min(1.0, share.known / before) if share.known and before else 1.0
    factor, factors = on(last.device, share.factor), last[0, 0]
    return torch.where((factor > 0) & (factors > 0), (factor / not_zero(factors)).clamp(max=1.0), 1.0)


def _change(last: Tensor, share: Share, divisor: Tensor) -> tuple[float | Tensor, float | Tensor, Tensor]:
    """What has been sent, as `_sent` says; by how much the divisor has grown; and what is last now."""
    sent = _sent(last, share)
    if isinstance(sent, float) and on_host(divisor):
        ((own, before),), total = last.tolist(), float(divisor)
        if not (total > 0 and math.isfinite(total)):
            return sent, 1.0, last
        return sent, total / before if before else 1.0, last.new_tensor([[share.known or own, total]])
    now, factor = on(last.device, divisor, last.dtype), on(last.device, share.factor)
    factors, divisors = last.unbind(1)
    counts = torch.isfinite(now) & (now > 0)
    grown = torch.where(counts & (divisors[0] > 0), now / not_zero(divisors[0]), 1.0)
    new = torch.stack([torch.where(factor > 0, factor, factors[0]), now]).unsqueeze(0)
    return sent, grown, torch.where(counts, new, last)


def _times(x: Tensor, factor: float | Tensor) -> Tensor:
    return x if isinstance(factor, float) and factor == 1.0 else x * factor


def _plus(x: Tensor, y: Tensor, factor: float | Tensor) -> Tensor:
    """x + factor y."""
    return x if isinstance(factor, float) and factor == 0.0 else x + factor * y
