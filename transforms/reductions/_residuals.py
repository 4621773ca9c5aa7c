"""Where a reduction that encodes finds, and leaves, what messages have lost."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from .._tree import Tree, named_leaves, readable_without_sync, to_device
from .._weights import RankWeight, nonzero_or_one


class Memory:
    """The errors of one call: the reduction that encodes asks what is `owed`, and says what it is to `keep`.

    It remembers those of the paths in `error`. Of others, such as of a mean that is encoded only by a codec around the whole,
    nothing is owed, and nothing kept.

    Errors are sums of weight * gradient, which count by what these are divided by: as that changes, they are scaled with it. A
    rank does not know the divisor when it sends. It sends no more of what it owes than its own weight bears, that is min(1, w / the
    weight that the errors are worth): a small batch would else pay, divided by little, what large ones owe. What was too little
    or too much stays owed.

    Attributes:
        flush: Whether a rank of weight 0 sends what it owes.
        per_rank: Whether each rank must keep what it has lost itself, and say what the others decode of it.
        new: By path what it owes afterwards.
        last: By path the weight that this rank's errors are worth, and what they are divided by: (1, 2), float64; 0 at first.
            Empty where errors are not to be scaled.
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

    def owed(self, of: Mapping[str, Tensor], share: RankWeight) -> list[Tensor]:
        """What is to be sent of what is owed, of leaves in their order."""
        rows, table = self._rows(of)
        sent = _scalars(_sent(table, share)) if rows else []
        found = []
        for path, leaf in of.items():
            error = self._error[path] if path in self._error else torch.zeros_like(leaf, dtype=torch.float32)
            found.append(_times(error, sent[rows[path]]) if path in rows else error)
        return found

    def keep(self, paths: Iterable[str], left: Iterable[Tensor], share: RankWeight, divisor: Tensor) -> None:
        """Raises ValueError where something has been kept of a path already.

        Args:
            left: What is left of what was `owed` to that share.
            divisor: Of the sums of this call, 0-d.
        """
        values = {path: value for path, value in zip(paths, left, strict=True) if path in self._error}
        rows, table = self._rows(values)
        if rows:
            grown, rest, new = _change(table, share, divisor, self.flush)
            last, left_of, ratios = new.split(1), _scalars(rest), _scalars(grown)
        for path, value in values.items():
            if path in self.new:
                raise ValueError(
                    f"the gradient at {path!r} is encoded twice inside one error feedback, which has one memory; write "
                    f"chain(error_feedback(a), error_feedback(b))"
                )
            self.new[path] = value
            if path in rows:
                row = rows[path]
                self.new[path] = _plus(value, self._error[path], left_of[row])
                self.last[path], self._grown[path] = last[row], ratios[row]

    def _rows(self, paths: Iterable[str]) -> tuple[dict[str, int], Tensor]:
        """What is in `last` of paths, (rows, 2), each tensor once; and path -> row."""
        rows: dict[str, int] = {}
        distinct: dict[int, tuple[int, Tensor]] = {}
        for path in paths:
            if path in self._error and path in self.last:
                last = self.last[path]
                rows[path] = distinct.setdefault(id(last), (len(distinct), last))[0]
        found = [last for _, last in distinct.values()]
        return rows, torch.cat(found) if found else torch.empty(0)

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


def _sent(last: Tensor, share: RankWeight) -> Tensor:
    """The parts of what is owed that are sent, (rows,)."""
    factor, worth = to_device(last.device, share.factor), last[:, 0]
    return torch.where((factor > 0) & (worth > 0), (factor / nonzero_or_one(worth)).clamp(max=1.0), 1.0)


def _change(last: Tensor, share: RankWeight, divisor: Tensor, flush: bool) -> tuple[Tensor, Tensor, Tensor]:
    """How many times the divisors of before the new one is, (rows,); what stays of the errors beside what is left of those
    sent, (rows,); and what is last now."""
    factor, now = to_device(last.device, share.factor), to_device(last.device, divisor, last.dtype)
    (worth, before), counts = last.unbind(1), torch.isfinite(now) & (now > 0)
    grown = torch.where(counts & (before > 0), now / nonzero_or_one(before), 1.0)
    stays = grown - _sent(last, share)
    # What a rank without input keeps is worth what it was, of a larger or smaller divisor.
    new = torch.where((factor > 0) | flush, torch.maximum(stays.abs() * worth, factor), grown * worth)
    return grown, stays, torch.where(counts, torch.stack([new, now.expand_as(new)], 1), last)


def _scalars(x: Tensor) -> list[Any]:
    """Numbers where the host may look, else 0-d tensors."""
    return x.tolist() if readable_without_sync(x) else list(x.unbind(0))


def _times(x: Tensor, factor: float | Tensor) -> Tensor:
    return x if isinstance(factor, float) and factor == 1.0 else x * factor


def _plus(x: Tensor, y: Tensor, factor: float | Tensor) -> Tensor:
    """x + factor y."""
    return x if isinstance(factor, float) and factor == 0.0 else x + factor * y
