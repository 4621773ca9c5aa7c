"""What follows for a step from the record and the gradients."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from .._errors import NonFinite
from ..buckets import GradBuffer
from ..groups import Communicator
from ..records import DeviceReads, Requests, StepIds, StepRecord, numbers, step_of
from ..transforms.axes import Axis
from ..transforms.base import record_words, trees
from ..transforms.pipelines import Effect, Flag, Plan, inverse


def masks(sums: dict[str, Any]) -> list[Any]:
    """The words of the record that hold one bit per rank."""
    return [value for name, value in sums.items() if name.startswith(record_words.NONFINITE)]


def error_of_step(step: int, sums: dict[str, float], paths: tuple[str, ...]) -> NonFinite:
    """The error of a step that all ranks leave out."""
    ranks = record_words.ranks_in(masks(sums))
    parts = []
    if ranks:
        cause = "a gradient" if math.isfinite(sums["loss"]) else "the loss"
        parts.append(f"{cause} of rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))} is not finite")
    if paths:
        shown = ", ".join(map(repr, paths[:5])) + (f" and {len(paths) - 5} more" if len(paths) > 5 else "")
        parts.append(f"the {'' if ranks else 'summed '}gradient of {shown} is not finite")
    return NonFinite(
        f"step {step}: {'; '.join(parts) or 'a gradient or a weight is not finite'}. Parameters and state are unchanged; wrap the "
        f"pipeline in skip_if_nonfinite(...) to leave such steps out",
        step=step,
        ranks=ranks,
        paths=paths,
    )


def error_of_some(step: int, counts: dict[str, float], all_ranks: int) -> NonFinite:
    """The error of a step that some ranks left out and others may have taken."""
    ranks = record_words.ranks_in(masks(counts))
    which = f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
    others = ", which the others took, since the hook does not reduce over all of them"
    return NonFinite(
        f"step {step}: the loss or a gradient of {which} is not finite. {which.capitalize()} left step {step} out"
        f"{others if len(ranks) < all_ranks else ''}; wrap the pipeline in skip_if_nonfinite(...) to go on after such steps",
        step=step,
        ranks=ranks,
    )


class GradCheck:
    """Looks at the gradients of one rank, bucket by bucket, in one pass over them.

    Args:
        norm: Whether their norm is needed.

    Attributes:
        on_device: Decide on the device although the host could; for tests.
    """

    def __init__(self, norm: bool) -> None:
        self._norm, self.on_device = norm, False
        self._waiting: list[GradBuffer] = []  # buckets of a device that are still to be looked at
        # For each bucket 1 if this rank's own gradients are not finite, where the record does not tell whose are bad.
        self._own_bad: list[Any] | None = None
        self._of_pieces: Axis | None = None  # the axis of the ranks that hold pieces of the gradients
        self._bad_pieces: Any = 0.0  # the number of ranks whose pieces of sharded gradients are not finite

    def readable_without_sync(self, buckets: Sequence[GradBuffer]) -> bool:
        """Whether the host may read these gradients without waiting for a device."""
        for bucket in () if self.on_device else buckets:
            if not bucket.grads.is_cpu:
                return False
        return not self.on_device

    def observe(self, bucket: GradBuffer) -> None:
        """Record a statistic of a bucket's gradients after the hook, for the decision: one pass over them.

        It is not finite if any element is not finite:

        - their 2-norm where it is needed;
        - otherwise their sum on the CPU, the fastest pass. Where the sum overflows, `bad` checks each element;
        - otherwise their largest magnitude, on a device.
        """
        if self.on_device or bucket.on_device:
            self._waiting.append(bucket)  # one launch looks at all of them
        elif self._norm:
            wide = torch.float64 if bucket.scattered else torch.promote_types(bucket.grads.dtype, torch.float32)
            bucket.seen = torch.linalg.vector_norm(bucket.grads, dtype=wide).double()
        else:
            bucket.seen = bucket.grads.sum() if bucket.message_sum is None else torch.tensor(bucket.message_sum)

    def _look(self) -> None:
        """Look at the buckets of a device."""
        groups: dict[torch.dtype, list[GradBuffer]] = {}
        for bucket in self._waiting:
            groups.setdefault(bucket.grads.dtype, []).append(bucket)
        # The squares of finite float32 gradients may overflow; the host looks again where they do, a device cannot.
        order, wide = (2, torch.float64) if self._norm else (math.inf, None)
        for some in groups.values():
            some = some if self._norm else [bucket for bucket in some if bucket.grads.numel()]
            found = torch._foreach_norm([bucket.grads for bucket in some], order, wide) if some else ()
            for bucket, seen in zip(some, torch.stack(found).double().unbind() if some else (), strict=True):
                bucket.seen = seen
        self._waiting = []

    def bad(self, buckets: Sequence[GradBuffer]) -> Any:
        """1 if a gradient is not finite, otherwise 0: a number where the host may read them, otherwise a tensor."""
        if self._waiting:
            self._look()
        if self.readable_without_sync(buckets):
            for bucket in buckets:
                if not math.isfinite(bucket.seen.item()) and has_nonfinite(bucket.grads):
                    return 1.0
            return 0.0
        return 1.0 - torch.isfinite(torch.stack([bucket.seen.double() for bucket in buckets])).all().double()

    def bad_anywhere(self, buckets: Sequence[GradBuffer]) -> Any:
        """As `bad`, with the pieces of other ranks."""
        if isinstance(self._bad_pieces, Tensor):  # of this rank too
            return self._bad_pieces
        return self._bad_pieces or (self.bad(buckets) if buckets else 0.0)

    def begin(self, plan: Plan, step: int) -> None:
        """Begin a step. Where a hook leaves the ranks with different gradients, their own are looked at before it."""
        self._own_bad = [] if plan.reduced(step).is_partial else None

    def before_hook(self, bucket: GradBuffer) -> None:
        """Look at this rank's own gradients in a bucket, if need be."""
        if self._own_bad is not None:
            self.observe(bucket)
            self._own_bad.append(self.bad([bucket]))

    def verdict(self, buckets: Sequence[GradBuffer], record: StepRecord, values: dict[str, Any]) -> dict[str, Any]:
        """The summed record, with a bit for each rank whose gradients are not finite.

        Those after a reduction hold values of other ranks too: they make the number of live ranks NaN, and the rank's
        bit tells of its own gradients before.

        Args:
            values: This rank's record.
        """
        bad = self.bad(buckets)
        if self._own_bad is not None:
            values = {**values, "live": _nan_if(bad, values["live"])}
            bad = functools.reduce(_either, self._own_bad, 0.0)
        return record.send(record.flagged(values, record_words.NONFINITE, bad)).read(self.on_device)

    def share(self, buckets: Sequence[GradBuffer], axis: Axis) -> None:
        """Sum over the pieces of the gradients: whether one is not finite, and the squares of their norms.

        If the messages brought a finite sum of all pieces, and no norm is needed, nothing is sent.
        """
        self._of_pieces, self._bad_pieces = axis, 0.0
        # On all ranks alike.
        finite = all(bucket.message_sum is not None and math.isfinite(bucket.message_sum) for bucket in buckets)
        if finite and buckets and not self._norm:
            return
        bad = torch.as_tensor(self.bad(buckets), dtype=torch.float64)
        squares = sum((bucket.seen.double() ** 2 for bucket in buckets if self._norm), torch.zeros_like(bad))
        summed = axis.run_(torch.stack([bad, squares]))
        self._bad_pieces = summed[0].item() if self.readable_without_sync(buckets) else summed[0]
        for i, bucket in enumerate(buckets if self._norm else ()):
            bucket.seen = torch.zeros_like(summed[1]) if i else summed[1].sqrt()

    def norm_of(self, buckets: Sequence[GradBuffer]) -> Tensor:
        """The 2-norm of all gradients together, 0-d float64, from the norms of the buckets."""
        if self._waiting:
            self._look()
        if self.readable_without_sync(buckets) and not all(math.isfinite(bucket.seen.item()) for bucket in buckets):
            for bucket in buckets:  # finite gradients whose squares overflow float32
                bucket.seen = torch.linalg.vector_norm(bucket.grads.double())
        norms = [bucket.seen for bucket in buckets]
        return torch.linalg.vector_norm(torch.stack(norms)) if norms else torch.zeros((), dtype=torch.float64)

    def nonfinite_paths(self, buckets: Sequence[GradBuffer]) -> tuple[str, ...]:
        """The parameters whose gradients are not finite. The ranks that hold pieces exchange what they have found."""
        bad = {path: has_nonfinite(grad) for bucket in buckets for path, grad in bucket.by_path().items()}
        if self._of_pieces is not None and bad:
            bits = torch.tensor(list(bad.values()), dtype=torch.float32, device=buckets[0].grads.device)
            bad = dict(zip(bad, self._of_pieces.run_(bits).tolist(), strict=True))
        return tuple(path for path, found in bad.items() if found)


def has_nonfinite(grads: Tensor) -> bool:
    return not bool(torch.isfinite(grads).all())


def _nan_if(bad: Any, value: Any) -> Any:
    if isinstance(bad, Tensor):
        known = trees.to_device(bad.device, torch.as_tensor(value), bad.dtype)
        return torch.where(bad > 0, torch.full_like(known, math.nan), known)
    return math.nan if bad else value


def _either(a: Any, b: Any) -> Any:
    return torch.clamp(a + b, max=1.0) if isinstance(b, Tensor) else max(a, b)


# From the norm of the gradients to the factor to multiply them by.
Clip: TypeAlias = Callable[[Tensor], Tensor]


class Decision(NamedTuple):
    effect: Effect
    total: Tensor | None = None  # by which the kernels divide the gradients; None: by nothing
    found_inf: Tensor | None = None  # 1 if the kernels must change nothing; None if the host has decided
    error: Exception | None = None  # all ranks raise it
    norm: Any = None  # of the gradients after the division, before they are clipped, where it is needed: 0-d float64


class CountsOfAll(NamedTuple):
    """The record, summed over all ranks that loop together; it has a bit for each rank that left out a step.

    late: the bits are of this many steps back, mostly 0 or 2. Unless it is 0, the record was sent one step after that
        step.
    """

    late: int
    sums: dict[str, Any]


class StepCheck:
    """Decides on the steps of one rank.

    Args:
        ranks: The number of ranks that loop together.
        norm: Whether the norm of the gradients is needed.
        skips: Whether steps that are not finite are left out without an error.
        mesh: See `DeviceReads`.
        ids: The numbers of the steps that travel in the record.
        requests: Takes the requests in the records.

    Attributes:
        grads: Looks at the gradients.
        left_out: 1 if this rank skipped the last step. Other ranks may have taken it, so all raise in the next step.
        reads: The decisions on steps that the host has not read yet.
    """

    def __init__(
        self, ranks: int, norm: bool, skips: bool, mesh: Communicator, ids: StepIds, requests: Requests
    ) -> None:
        self.ranks: int = ranks
        self._skips, self._ids, self._requests = skips, ids, requests
        self.grads: GradCheck = GradCheck(norm)
        self.left_out: Any = 0.0
        self.reads: DeviceReads = DeviceReads(mesh)

    def decide(
        self,
        step: int,
        sums: dict[str, Any],
        buckets: Sequence[GradBuffer],
        total: Any,
        clip: Clip | None,
        counts: Sequence[CountsOfAll] | None = None,
    ) -> Decision:
        """Decide on a step.

        Args:
            step: Its number, for the error.
            sums: The record, summed over the ranks that share the gradients.
            buckets: The gradients after the hook, not yet divided.
            total: What to divide them by.
            clip: From their norm after the division to a further factor; or None.
            counts: The records of all ranks that loop together, where these are more than the ranks that share the
                gradients. A step that is not finite here then raises in a later step, on all these ranks.

        Raises:
            DesyncError: the ranks have called different steps.
        """
        records, together = [CountsOfAll(0, sums)] if counts is None else counts, counts is None
        on_device = isinstance(sums["weight"], Tensor)
        for _, of_all in records:
            on_device = on_device or isinstance(of_all["weight"], Tensor)
        live, asked = sums["weight"] != 0, []
        odd: Flag = False  # whether some rank has left out an earlier step, or on a device: the ranks have called different steps
        for late, of_all in records:
            if on_device:
                other = of_all["step_id"] != self.ranks * self._ids.of(step_of(step, late))
                live, odd = live & inverse(other), odd | other
            else:
                self._ids.check(step, of_all, late)
            if late:
                odd = odd | _any_set(masks(of_all))
            if "has_next" in of_all:
                asked.append(of_all["has_next"])
        fine: Flag = live is False or odd is True or self._is_fine(sums, buckets)
        bad = live & inverse(fine | odd)
        raises = odd | (bad & (together and not self._skips))
        self.left_out = 0.0 if together or self._skips else _number(bad)
        if on_device:
            self.reads.add((step, records), torch.stack([torch.as_tensor(raises, dtype=torch.float64), *asked]))
        else:
            self._requests.note(*asked)
            if raises:
                return Decision(Effect(True, False), error=self._error(step, records, sums, buckets))
        effect = Effect(live, fine if odd is False else fine & inverse(odd), raises)
        if effect.steps is False:
            return Decision(effect)
        found_inf = inverse(effect.steps).to(torch.float32) if on_device else None  # type: ignore[union-attr]
        norm = None
        if clip is not None:  # a plain number stays one: copying it to a device would wait for the device
            norm = self.grads.norm_of(buckets) / total  # before it is clipped
            total = total / clip(norm)
        return Decision(effect, _for_kernels(total, found_inf), found_inf, norm=norm)

    def _is_fine(self, sums: dict[str, Any], buckets: Sequence[GradBuffer]) -> Flag:
        """Whether the weights, the loss and the gradients are finite on all ranks that share gradients."""
        scalars = [sums["weight"], sums["live"], sums["loss"]]
        if isinstance(sums["weight"], Tensor):
            bad = torch.stack([*masks(sums), torch.as_tensor(self.grads.bad_anywhere(buckets), dtype=torch.float64)])
            return torch.isfinite(torch.stack(scalars)).all() & (bad == 0).all()
        return all(map(math.isfinite, scalars)) and not any(masks(sums)) and not self.grads.bad_anywhere(buckets)

    def _error(
        self, step: int, records: Sequence[CountsOfAll], sums: dict[str, Any], buckets: Sequence[GradBuffer]
    ) -> NonFinite:
        """The error of a step that all ranks leave out, or of an earlier one that some have left out."""
        for late, of_all in records:
            if late and any(masks(of_all)):
                return error_of_some(step - late, of_all, self.ranks)
        return error_of_step(step, sums, self.grads.nonfinite_paths(buckets))

    def synchronize(self) -> None:
        """Wait until the sums of the newest step are available."""
        self.reads.synchronize()

    def look(self) -> None:
        """Take the requests in the records of a device, except in that of the last step."""
        for _, (_, *asked) in self.reads.read(False, keep=True) if self.reads.under_way else ():
            self._requests.note(*asked)

    def raise_pending(self) -> None:
        """Raise for an earlier step that changed nothing.

        The start of a step reads all decisions except the last one, by then without waiting. Their age is
        fixed and does not depend on their arrival, so that all ranks raise in the same call.

        Raises:
            NonFinite: naming that step.
            DesyncError: the ranks had called different steps.
        """
        self._read(newest=False)

    def drain(self) -> None:
        """Raise for an earlier step that changed nothing, the last one included.

        Raises:
            NonFinite, DesyncError: as `raise_pending`.
        """
        self._read(newest=True)

    def clear(self) -> None:
        """Forget all earlier steps."""
        self.reads.clear()
        self.left_out = 0.0

    def _read(self, newest: bool) -> None:
        for (step, records), (raises, *asked) in self.reads.read(newest) if self.reads.under_way else ():
            self._requests.note(*asked)
            for late, of_all in records if raises else ():
                sums = numbers(of_all, self.reads.now)
                self._ids.check(step, sums, late)
                if not late:
                    raise error_of_step(step, sums, ())
                self.raise_left_out(step - late, sums)

    def raise_left_out(self, step: int, counts: dict[str, float]) -> None:
        """Raise NonFinite if some ranks left out a step, which others may have taken."""
        if any(masks(counts)):
            raise error_of_some(step, counts, self.ranks)


def _any_set(words: Sequence[Any]) -> Flag:
    """Whether a bit is set in the words of a flag."""
    return (torch.stack(list(words)) != 0).any() if isinstance(words[0], Tensor) else any(words)


def _number(flag: Flag) -> Any:
    return flag.to(torch.float64) if isinstance(flag, Tensor) else float(flag)


def _for_kernels(total: Any, found_inf: Tensor | None) -> Tensor | None:
    """The total as the kernels take it; None: they do not divide.

    In a step that they leave out it divides nothing by 0.
    """
    if isinstance(total, Tensor):
        return total if found_inf is None else torch.where(found_inf == 0, total, torch.ones_like(total))
    device = getattr(found_inf, "device", None)
    return None if total == 1.0 else torch.full((), total, dtype=torch.float64, device=device)
