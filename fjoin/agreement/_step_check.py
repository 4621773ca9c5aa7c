"""The decision whether a step may change anything: the same on all ranks, from the summed gradients and record.

On a CPU the host decides. On an accelerator the decision is a tensor on the device that the kernels
read, and the host reads a copy of it later, without waiting. Both are one computation, on numbers or on tensors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from .._errors import NonFinite
from ..buckets._grad_buffer import GradBuffer
from ..groups._mesh import Mesh
from ..transforms.program._effect import Effect, Flag, inverse
from ._device_reads import DeviceReads, numbers
from ._grad_check import GradCheck
from ._nonfinite import error_of_some, error_of_step, masks
from ._requests import Requests
from ._step_ids import StepIds, step_of

# From the norm of the gradients to the factor to multiply them by.
Clip: TypeAlias = Callable[[Tensor], Tensor]


class Decision(NamedTuple):
    effect: Effect
    scale: Tensor | None = None  # the divisor that the kernels apply to the gradients
    found_inf: Tensor | None = None  # 1 where the kernels must change nothing; None where the host has decided
    error: NonFinite | None = None
    norm: Any = None  # of the gradients after the division, before they are clipped, where it is needed: 0-d float64

    @property
    def changes(self) -> bool:
        """Whether to run the kernels."""
        return self.effect.steps is not False


class CountsOfAll(NamedTuple):
    """The record, summed over all ranks that loop together; it has a bit for each rank that left out a step.

    late: how many steps before the one that reads the record that step was: 0 to 2. Late records are of the step before, and
        tell of the one before that.
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
        ids: The numbers of the steps that travel in the record; None where none do.
        requests: Takes the requests in the records.

    Attributes:
        grads: Looks at the gradients.
        left_out: 1 where this rank left out the last step, which others may have taken: all raise in the next one.
        reads: The decisions on steps, with the sums of their weights, that the host has not read yet.
        weight: The sum of the weights in the newest step for which the host knows it.
    """

    def __init__(
        self,
        ranks: int,
        norm: bool = False,
        skips: bool = False,
        mesh: Mesh | None = None,
        ids: StepIds | None = None,
        requests: Requests | None = None,
    ) -> None:
        self.ranks: int = ranks
        self._skips, self._ids, self._requests = skips, ids, requests or Requests(ranks)
        self.grads: GradCheck = GradCheck(norm)
        self.left_out: Any = 0.0
        self.weight: float | None = None
        self.reads: DeviceReads = DeviceReads(mesh)

    def decide(
        self,
        step: int,
        sums: dict[str, Any],
        outgoing: Sequence[GradBuffer],
        divisor: Any,
        clip: Clip | None,
        counts: Sequence[CountsOfAll] | None = None,
    ) -> Decision:
        """Decide on a step.

        Args:
            step: Its number, for the error.
            sums: The record, summed over the ranks that share the gradients.
            outgoing: The gradients after the hook, not yet divided.
            divisor: Their divisor.
            clip: From their norm after the division to a further factor; or None.
            counts: The records of all ranks that loop together, where these are more than the ranks that share the
                gradients. A step that is not finite here then raises in a later step, on all these ranks.

        Raises:
            DesyncError: the ranks have called different steps.
        """
        records = [CountsOfAll(0, sums)] if counts is None else counts
        other = self._is_other(step, records)
        left: Flag = False  # whether some rank has left out an earlier step
        for late, of_all in records:
            left = left | _any_set(masks(of_all)) if late else left
        live = (sums["weight"] != 0) & inverse(other)
        fine: Flag = live is False or left is True or self._is_fine(sums, outgoing)
        left_out = inverse(fine) & live & inverse(left | other)
        raises = left | other | (left_out & (counts is None and not self._skips))
        self.left_out = 0.0
        if counts is not None and not self._skips:
            self.left_out = left_out.double() if isinstance(left_out, Tensor) else float(left_out)
        asked = [of_all["has_next"] for _, of_all in records if "has_next" in of_all]
        if isinstance(raises, Tensor):
            self.reads.add((step, records), torch.stack([raises.double(), sums["weight"], *asked]))
            effect = Effect(live, fine & inverse(left | other), raises)
            return self._on_device(effect, outgoing, divisor, clip)
        self._requests.note(*asked)
        if live:
            self.weight = sums["weight"]
        effect = Effect(live, fine & inverse(left))
        if raises:
            return Decision(effect._replace(live=True, fine=False), error=self._error(step, records, sums, outgoing))
        if not effect.steps:
            return Decision(effect)
        scale, norm = self.grads.scale(outgoing, divisor, clip)
        return Decision(effect, None if scale == 1.0 else torch.tensor(float(scale), dtype=torch.float64), norm=norm)

    def _on_device(self, effect: Effect, outgoing: Sequence[GradBuffer], divisor: Any, clip: Clip | None) -> Decision:
        """The decision where only the device knows the effect."""
        found_inf = inverse(effect.steps).to(torch.float32)  # type: ignore[union-attr]
        scale, norm = self.grads.scale(outgoing, divisor, clip)
        if isinstance(scale, Tensor):  # a NaN would stay in the padding of the buckets
            scale = torch.where(found_inf == 0, scale, torch.ones_like(scale))
        else:
            scale = None if scale == 1.0 else found_inf.new_full((), scale, dtype=torch.float64)
        return Decision(effect, scale, found_inf, norm=norm)

    def _is_fine(self, sums: dict[str, Any], outgoing: Sequence[GradBuffer]) -> Flag:
        """Whether the weights, the loss and the gradients are finite on all ranks that share gradients."""
        scalars = [sums["weight"], sums["total"], sums["loss"]]
        if isinstance(sums["weight"], Tensor):
            bad = torch.stack([*masks(sums), torch.as_tensor(self.grads.bad_anywhere(outgoing), dtype=torch.float64)])
            return torch.isfinite(torch.stack(scalars)).all() & (bad == 0).all()
        return all(map(math.isfinite, scalars)) and not any(masks(sums)) and not self.grads.bad_anywhere(outgoing)

    def _is_other(self, step: int, records: Sequence[CountsOfAll]) -> Flag:
        """Whether the ranks have called different steps.

        Raises:
            DesyncError: the host knows that they have.
        """
        other: Flag = False
        for late, of_all in records if self._ids is not None else ():
            assert self._ids is not None
            if isinstance(of_all["step_id"], Tensor):
                own = self.ranks * self._ids.of(step_of(step, late))
                other = other | (torch.remainder(of_all["step_id"], own) != 0)
            else:
                self._ids.check(step, of_all, late)
        return other

    def _error(
        self, step: int, records: Sequence[CountsOfAll], sums: dict[str, Any], outgoing: Sequence[GradBuffer]
    ) -> NonFinite:
        """The error of a step that all ranks leave out, or of an earlier one that some have left out."""
        for late, of_all in records:
            if late and any(masks(of_all)):
                return error_of_some(step - late, of_all, self.ranks)
        return error_of_step(step, sums, self.grads.nonfinite_paths(outgoing))

    def synchronize(self) -> None:
        """Wait until the sums of the newest step are available."""
        self.reads.synchronize()

    def look(self) -> None:
        """Take the requests in the records of a device, except in that of the last step."""
        for _, (_, _, *asked) in self.reads.read(False, keep=True):
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
        for (step, records), (raises, weight, *asked) in self.reads.read(newest):
            self._requests.note(*asked)
            if weight:
                self.weight = weight
            if raises:
                self._raise_for(step, records)

    def _raise_for(self, step: int, records: Sequence[CountsOfAll]) -> None:
        for late, of_all in records:
            sums = numbers(of_all, self.reads.now)
            if self._ids is not None:
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
