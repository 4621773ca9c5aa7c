"""The decision whether a step may change anything: the same on all ranks, from the summed gradients and lane.

On a CPU the host decides. On an accelerator the decision is a tensor on the device that the kernels
read, and the host reads a copy of it later, without waiting.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from .._errors import NonFinite
from ..groups._mesh import Mesh
from ..transforms._axis_env import Axis
from ..transforms._lane import decode_lane, host_lane
from ..transforms.program._effect import Effect
from ._buckets import GradBuffer
from ._lane import StepLane
from ._nonfinite import error_of_some, error_of_step, has_nonfinite, masks, nonfinite_paths
from ._step_ids import StepIds, step_of

# From the norm of the gradients to the factor to multiply them by.
Clip: TypeAlias = Callable[[Tensor], Tensor]


class Decision(NamedTuple):
    effect: Effect
    scale: Tensor | None = None  # the divisor that the kernels apply to the gradients
    found_inf: Tensor | None = None  # 1 where the kernels must change nothing; None where the host has decided
    error: NonFinite | None = None

    @property
    def changes(self) -> bool:
        """Whether to run the kernels."""
        return self.effect.steps is not False


class CountsOfAll(NamedTuple):
    """The lane, summed over all ranks that loop together; it has a bit for each rank that left out a step."""

    late: int  # that step was so many steps before: 1 for the lane of the present step, 2 for that of the step before
    sums: dict[str, Any]


class StepCheck:
    """Decides on the steps of one rank.

    Args:
        ranks: The number of ranks that loop together.
        norm: Whether the norm of the gradients is needed.
        skips: Whether steps that are not finite are left out without an error.
        on_device: Decide on the device although the host could; for tests.
        mesh: Detects failed ranks while the host waits for a device. It is not kept alive.
        ids: The numbers of the steps that travel in the lane; None where none do.
    """

    def __init__(
        self, ranks: int, norm: bool = False, skips: bool = False, on_device: bool = False, mesh: Mesh | None = None,
        ids: StepIds | None = None,
    ) -> None:  # fmt: skip
        self.ranks, self.norm, self.skips, self.on_device = ranks, norm, skips, on_device
        # 1 where this rank left out the last step, which others may have taken: all raise in the next one.
        self.left_out: Any = 0.0
        self.ids = ids
        self._mesh: Callable[[], Mesh | None] = (lambda: None) if mesh is None else weakref.ref(mesh)
        self._pending: list[tuple[int, Sequence[CountsOfAll], Tensor, Any]] = []
        self.weight: float | None = None  # the sum of the weights in the newest step for which the host knows it
        self._of_pieces: Axis | None = None  # the axis of the ranks that hold pieces of the gradients
        self._bad_pieces: Any = 0.0  # the number of ranks whose pieces of sharded gradients are not finite

    def readable_without_sync(self, outgoing: Sequence[GradBuffer]) -> bool:
        """Whether the host may read these gradients without waiting for a device."""
        return not self.on_device and all(out.grads.device.type == "cpu" for out in outgoing)

    def read_lane(self, lane: StepLane, words: Tensor | None = None) -> dict[str, Any]:
        """The summed lane: numbers where the host may read it without waiting, otherwise tensors on the device.

        Args:
            words: Its buffer, where that is no longer the lane's.
        """
        words = lane.sent if words is None else words
        if words.device.type == "cpu" and not self.on_device:
            return dict(host_lane(words.tolist(), lane.names, words.dtype, lane.ranks))
        return dict(decode_lane(words.clone(), lane.names, lane.ranks))

    def from_tensors(self, sums: dict[str, Tensor]) -> dict[str, Any]:
        if self.on_device or any(v.device.type != "cpu" for v in sums.values()):
            return dict(sums)
        return {name: v.item() for name, v in sums.items()}

    @staticmethod
    def host(sums: dict[str, Any]) -> dict[str, float]:
        return {name: float(v) for name, v in sums.items()}

    def observe(self, out: GradBuffer) -> None:
        """Record a statistic of a bucket's gradients after the hook, for the decision: one pass over them.

        It is not finite if any element is not finite:

        - their 2-norm where it is needed;
        - otherwise their sum on the CPU, the fastest pass. Where the sum overflows, `bad` checks each element;
        - otherwise their largest magnitude, on a device.
        """
        if self.norm:
            wide = torch.float64 if out.scattered else torch.promote_types(out.grads.dtype, torch.float32)
            out.seen = torch.linalg.vector_norm(out.grads, dtype=wide).double()
        elif out.grads.device.type == "cpu" and not self.on_device:
            out.seen = out.grads.sum() if out.total is None else torch.tensor(out.total)
        elif out.grads.numel():
            out.seen = torch.linalg.vector_norm(out.grads, math.inf)

    def pieces_are_finite(self, axis: Axis) -> None:
        """Note that the pieces of the gradients are finite on all ranks of the axis."""
        self._of_pieces, self._bad_pieces = axis, 0.0

    def share(self, outgoing: Sequence[GradBuffer], axis: Axis) -> None:
        """Sum over the pieces of the gradients: whether one is not finite, and the squares of their norms."""
        self._of_pieces = axis
        bad = torch.as_tensor(self.bad(outgoing), dtype=torch.float64)
        squares = sum((out.seen.double() ** 2 for out in outgoing if self.norm), torch.zeros_like(bad))
        summed = axis.run_(torch.stack([bad, squares]))
        self._bad_pieces = summed[0].item() if self.readable_without_sync(outgoing) else summed[0]
        for i, out in enumerate(outgoing if self.norm else ()):
            out.seen = torch.zeros_like(summed[1]) if i else summed[1].sqrt()

    def bad(self, outgoing: Sequence[GradBuffer]) -> Any:
        """1 if a gradient is not finite, otherwise 0: a number where the host may read them, otherwise a tensor."""
        if self.readable_without_sync(outgoing):
            return float(any(not math.isfinite(out.seen.item()) and has_nonfinite(out.grads) for out in outgoing))
        return 1.0 - torch.isfinite(torch.stack([out.seen.double() for out in outgoing])).all().double()

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
            sums: The lane, summed over the ranks that share the gradients.
            outgoing: The gradients after the hook, not yet divided.
            divisor: Their divisor.
            clip: From their norm after the division to a further factor; or None.
            counts: The lanes of all ranks that loop together, where these are more than the ranks that share the
                gradients. A step that is not finite here then raises in a later step, on all these ranks.

        Raises:
            DesyncError: the ranks have called different steps.
        """
        if isinstance(sums["weight"], Tensor):
            return self._judge_on_device(step, sums, outgoing, divisor, clip, counts)
        lanes = [CountsOfAll(0, sums)] if counts is None else counts
        for late, of_all in lanes:
            self.check_step(step, of_all, late)
        self.left_out = 0.0
        for late, of_all in lanes:
            if late and any(masks(of_all)):
                return Decision(Effect(True, False), error=error_of_some(step - late, of_all, self.ranks))
        if sums["weight"] == 0:
            return Decision(Effect(False))
        self.weight = sums["weight"]
        fine = all(map(math.isfinite, (sums["weight"], sums["total"], sums["loss"])))
        fine = fine and not any(masks(sums)) and not self._bad_pieces and not self.bad(outgoing)
        if clip is not None and fine and not math.isfinite(norm_of(outgoing).item()):
            for out in outgoing:  # finite gradients whose squares overflow float32
                out.seen = torch.linalg.vector_norm(out.grads.double())
        if not fine and counts is not None:
            self.left_out = 0.0 if self.skips else 1.0
            return Decision(Effect(True, False))
        if not fine:
            paths = () if self.skips else nonfinite_paths(outgoing, self._of_pieces)
            return Decision(Effect(True, False), error=error_of_step(step, sums, paths))
        scale = divisor
        if clip is not None:
            scale = divisor / clip(norm_of(outgoing) / divisor).item()
        return Decision(Effect(True), None if scale == 1.0 else torch.tensor(scale, dtype=torch.float64))

    def _judge_on_device(
        self,
        step: int,
        sums: dict[str, Any],
        outgoing: Sequence[GradBuffer],
        divisor: Any,
        clip: Clip | None,
        counts: Sequence[CountsOfAll] | None,
    ) -> Decision:
        scalars = torch.stack([sums["weight"], sums["total"], sums["loss"]])
        fine = torch.isfinite(scalars).all() & (torch.stack(masks(sums)) == 0).all()
        if outgoing:
            fine = fine & torch.isfinite(torch.stack([out.seen.double() for out in outgoing])).all()
        if isinstance(self._bad_pieces, Tensor):
            fine = fine & (self._bad_pieces == 0)
        live, lanes = sums["weight"] != 0, [CountsOfAll(0, sums)] if counts is None else counts
        other = torch.zeros_like(fine)
        if self.ids is not None:
            for late, of_all in lanes:
                own = self.ranks * self.ids.of(step_of(step, late))
                other = other | (torch.remainder(of_all["step_id"], own) != 0)
        if counts is None:
            raises = other if self.skips else (~fine & live) | other
        else:
            raises = other
            for _, of_all in counts:
                raises = raises | (torch.stack(masks(of_all)) != 0).any()
            self.left_out = 0.0 if self.skips else (~fine & live & ~raises).double()
            fine = fine & ~raises
        self._remember(step, lanes, torch.stack([raises.double(), sums["weight"]]))
        live = live & ~other
        found_inf = (~(live & fine)).to(torch.float32)
        scale = divisor  # may be a plain number: copying one to the device would wait for the device
        if clip is not None:
            scale = divisor / clip(norm_of(outgoing) / divisor)
        if isinstance(scale, Tensor):  # a NaN would stay in the padding of the buckets
            scale = torch.where(found_inf == 0, scale, torch.ones_like(scale))
        else:
            scale = None if scale == 1.0 else found_inf.new_full((), scale, dtype=torch.float64)
        return Decision(Effect(live, fine, raises), scale, found_inf)

    def check_step(self, step: int, sums: dict[str, Any], late: int) -> None:
        """Raise DesyncError unless all ranks have called the same step of the mesh; see `StepIds.check`."""
        if self.ids is not None:
            self.ids.check(step, sums, late)

    def _remember(self, step: int, lanes: Sequence[CountsOfAll], words: Tensor) -> None:
        """Keep a step's decision for the host to read later: whether to raise, and the sum of the weights."""
        event = None
        if words.device.type == "cuda":
            stream = torch.cuda.current_stream(words.device)  # `words` need not be on the current device
            words = torch.empty(words.shape, dtype=words.dtype, pin_memory=True).copy_(words, non_blocking=True)
            event = torch.cuda.Event()
            event.record(stream)
        self._pending.append((step, lanes, words, event))

    def synchronize(self) -> None:
        """Wait until the sums of the newest step are available."""
        if self._pending:
            self._await(self._pending[-1][3])

    def _await(self, event: Any) -> None:
        if event is None:
            return
        if (mesh := self._mesh()) is not None:
            mesh.await_event(event)
        else:
            event.synchronize()

    def raise_pending(self, newest: bool = False) -> None:
        """Raise for an earlier step that changed nothing.

        The start of a step reads all decisions except the last one, by then without waiting. Their age is
        fixed and does not depend on their arrival, so that all ranks raise in the same call.

        Args:
            newest: Also read the last decision, and keep all of them to be raised again: for reading the metrics.

        Raises:
            NonFinite: naming that step.
            DesyncError: the ranks had called different steps.
        """
        for pending in list(self._pending if newest else self._pending[:-1]):
            if not newest:
                self._pending.pop(0)
            self._raise_for(*pending, keeps=newest)

    def drain(self) -> None:
        """Raise for an earlier step that changed nothing, the last one included.

        Raises:
            NonFinite, DesyncError: as `raise_pending`.
        """
        while self._pending:
            self._raise_for(*self._pending.pop(0))

    def clear(self) -> None:
        """Forget all earlier steps."""
        self._pending, self.left_out = [], 0.0

    def _raise_for(
        self, step: int, lanes: Sequence[CountsOfAll], words: Tensor, event: Any, keeps: bool = False
    ) -> None:
        self._await(event)
        raises, weight = words.tolist()
        if not keeps and weight:
            self.weight = weight
        for late, sums in lanes if raises else ():
            self.check_step(step, self.host(sums), late)
            if not late:
                raise error_of_step(step, self.host(sums), ())
            self.raise_left_out(step - late, self.host(sums))

    def raise_left_out(self, step: int, counts: dict[str, float]) -> None:
        """Raise NonFinite if some ranks left out a step, which others may have taken."""
        if any(masks(counts)):
            raise error_of_some(step, counts, self.ranks)


def norm_of(outgoing: Sequence[GradBuffer]) -> Tensor:
    """The 2-norm of all gradients together, 0-d float64, from the norms of the buckets."""
    norms = [out.seen for out in outgoing]
    return torch.linalg.vector_norm(torch.stack(norms)) if norms else torch.zeros((), dtype=torch.float64)
