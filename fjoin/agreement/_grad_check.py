"""Whether the gradients of a step are finite, and their norm."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..buckets._grad_buffer import GradBuffer
from ..transforms._axis_env import Axis
from ..transforms._devices import is_host
from ..transforms.plan._plan import Plan
from ..transforms.transform._lane import NONFINITE
from ..transforms.tree._tree import to_device
from ._step_record import StepRecord


class GradCheck:
    """Looks at the gradients of one rank, bucket by bucket, in one pass over them.

    Args:
        norm: Whether their norm is needed.

    Attributes:
        on_device: Decide on the device although the host could; for tests.
    """

    on_device: bool

    def __init__(self, norm: bool = False) -> None:
        self._norm, self.on_device = norm, False
        self._waiting: list[GradBuffer] = []  # buckets of a device that are still to be looked at
        # For each bucket 1 if this rank's own gradients are not finite, where the record does not tell whose are bad.
        self._own_bad: list[Any] | None = None
        self._of_pieces: Axis | None = None  # the axis of the ranks that hold pieces of the gradients
        self._bad_pieces: Any = 0.0  # the number of ranks whose pieces of sharded gradients are not finite

    def readable_without_sync(self, outgoing: Sequence[GradBuffer]) -> bool:
        """Whether the host may read these gradients without waiting for a device."""
        return not self.on_device and all([out.grads.is_cpu for out in outgoing])

    def readable(self, sums: dict[str, Tensor]) -> dict[str, Any]:
        """Sums as numbers where the host may read them without waiting; otherwise as they are."""
        if self.on_device or not all([v.is_cpu for v in sums.values()]):
            return dict(sums)
        return {name: v.item() for name, v in sums.items()}

    def observe(self, out: GradBuffer) -> None:
        """Record a statistic of a bucket's gradients after the hook, for the decision: one pass over them.

        It is not finite if any element is not finite:

        - their 2-norm where it is needed;
        - otherwise their sum on the CPU, the fastest pass. Where the sum overflows, `bad` checks each element;
        - otherwise their largest magnitude, on a device.
        """
        if self.on_device or not is_host(out.grads.device):
            self._waiting.append(out)  # one launch looks at all of them
        elif self._norm:
            wide = torch.float64 if out.scattered else torch.promote_types(out.grads.dtype, torch.float32)
            out.seen = torch.linalg.vector_norm(out.grads, dtype=wide).double()
        else:
            out.seen = out.grads.sum() if out.total is None else torch.tensor(out.total)

    def _look(self) -> None:
        """Look at the buckets of a device."""
        if not self._waiting:
            return
        groups: dict[torch.dtype, list[GradBuffer]] = {}
        for out in self._waiting:
            groups.setdefault(out.grads.dtype, []).append(out)
        # The squares of finite float32 gradients may overflow; the host looks again where they do, a device cannot.
        order, wide = (2, torch.float64) if self._norm else (math.inf, None)
        for some in groups.values():
            some = some if self._norm else [out for out in some if out.grads.numel()]
            found = torch._foreach_norm([out.grads for out in some], order, wide) if some else ()
            for out, seen in zip(some, torch.stack(found).double().unbind() if some else (), strict=True):
                out.seen = seen
        self._waiting = []

    def bad(self, outgoing: Sequence[GradBuffer]) -> Any:
        """1 if a gradient is not finite, otherwise 0: a number where the host may read them, otherwise a tensor."""
        self._look()
        if self.readable_without_sync(outgoing):
            return float(any(not math.isfinite(out.seen.item()) and has_nonfinite(out.grads) for out in outgoing))
        return 1.0 - torch.isfinite(torch.stack([out.seen.double() for out in outgoing])).all().double()

    def bad_anywhere(self, outgoing: Sequence[GradBuffer]) -> Any:
        """As `bad`, with the pieces of other ranks."""
        if isinstance(self._bad_pieces, Tensor):  # of this rank too
            return self._bad_pieces
        return self._bad_pieces or (self.bad(outgoing) if outgoing else 0.0)

    def begin(self, plan: Plan, step: int) -> None:
        """Begin a step. Where a hook leaves the ranks with different gradients, their own are looked at before it."""
        axes, equal = plan.reduced(step)
        self._own_bad = [] if axes and not equal else None

    def before_hook(self, out: GradBuffer) -> None:
        """Look at this rank's own gradients in a bucket, if need be."""
        if self._own_bad is not None:
            self.observe(out)
            self._own_bad.append(self.bad([out]))

    def verdict(self, outgoing: Sequence[GradBuffer], record: StepRecord, values: dict[str, Any]) -> dict[str, Any]:
        """The summed record, with a bit for each rank whose gradients are not finite.

        Those after a reduction hold values of other ranks too: they make the total NaN, and the rank's bit tells of its own
        gradients before.

        Args:
            values: This rank's record.
        """
        bad = self.bad(outgoing)
        if self._own_bad is not None:
            values = {**values, "total": _nan_if(bad, values["total"])}
            bad = functools.reduce(_either, self._own_bad, 0.0)
        return record.send(record.flagged(values, NONFINITE, bad)).read(self.on_device)

    def share(self, outgoing: Sequence[GradBuffer], axis: Axis) -> None:
        """Sum over the pieces of the gradients: whether one is not finite, and the squares of their norms.

        Where the messages have told a finite total of all pieces, and no norm is needed, nothing is sent.
        """
        self._of_pieces, self._bad_pieces = axis, 0.0
        told = all(out.total is not None and math.isfinite(out.total) for out in outgoing)  # the same on all ranks
        if told and outgoing and not self._norm:
            return
        self._look()
        bad = torch.as_tensor(self.bad(outgoing), dtype=torch.float64)
        squares = sum((out.seen.double() ** 2 for out in outgoing if self._norm), torch.zeros_like(bad))
        summed = axis.run_(torch.stack([bad, squares]))
        self._bad_pieces = summed[0].item() if self.readable_without_sync(outgoing) else summed[0]
        for i, out in enumerate(outgoing if self._norm else ()):
            out.seen = torch.zeros_like(summed[1]) if i else summed[1].sqrt()

    def norm_of(self, outgoing: Sequence[GradBuffer]) -> Tensor:
        """The 2-norm of all gradients together, 0-d float64, from the norms of the buckets."""
        self._look()
        if self.readable_without_sync(outgoing) and not all(math.isfinite(out.seen.item()) for out in outgoing):
            for out in outgoing:  # finite gradients whose squares overflow float32
                out.seen = torch.linalg.vector_norm(out.grads.double())
        norms = [out.seen for out in outgoing]
        return torch.linalg.vector_norm(torch.stack(norms)) if norms else torch.zeros((), dtype=torch.float64)

    def scale(
        self, outgoing: Sequence[GradBuffer], divisor: Any, clip: Callable[[Tensor], Tensor] | None
    ) -> tuple[Any, Tensor | None]:
        """The divisor of the kernels, and the norm of the gradients before they are clipped, where they are."""
        if clip is None:  # a plain number stays one: copying it to a device would wait for the device
            return divisor, None
        norm = self.norm_of(outgoing) / divisor
        return divisor / clip(norm), norm

    def nonfinite_paths(self, outgoing: Sequence[GradBuffer]) -> tuple[str, ...]:
        """The parameters whose gradients are not finite. The ranks that hold pieces exchange what they have found."""
        bad = {path: has_nonfinite(grad) for out in outgoing for path, grad in out.by_path().items()}
        if self._of_pieces is not None and bad:
            bits = torch.tensor(list(bad.values()), dtype=torch.float32, device=outgoing[0].grads.device)
            bad = dict(zip(bad, self._of_pieces.run_(bits).tolist(), strict=True))
        return tuple(path for path, found in bad.items() if found)


def has_nonfinite(grads: Tensor) -> bool:
    return not bool(torch.isfinite(grads).all())


def _nan_if(bad: Any, value: Any) -> Any:
    if isinstance(bad, Tensor):
        known = to_device(bad.device, torch.as_tensor(value), bad.dtype)
        return torch.where(bad > 0, torch.full_like(known, math.nan), known)
    return math.nan if bad else value


def _either(a: Any, b: Any) -> Any:
    return torch.clamp(a + b, max=1.0) if isinstance(b, Tensor) else max(a, b)
