"""The plain reduction: buckets are summed in place during backward, with the record at the end of one of them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..agreement._grad_check import GradCheck
from ..agreement._record import Sums
from ..agreement._step_check import Clip
from ..agreement._step_record import StepRecord
from ..buckets._aliases import copy_if_aliased
from ..buckets._flat_params import Storage
from ..buckets._grad_buffer import GradBuffer
from ..groups._mesh import Mesh
from ..transforms._axis_env import Work
from ..transforms.layout._buckets import lane_bucket
from ..transforms.plan._plan import Plan
from ..transforms.reductions._reduction import MeanState
from ..transforms.transform._call import Call
from ..transforms.transform._weights import divisor_of
from ._bucket_stages import BucketStages


class AllReduceHook:
    """Runs a hook that begins with `mean` or `sum_over` and contains no further reduction.

    Attributes:
        unit: The power of two that scales gradients in messages, which loses no bit. It is near 1 / ranks: with equal
            weights and a power of two of ranks the sum is already the mean, and no kernel has to divide. See `Units`
            for float16.
        by_weight: Whether a rank counts by its weight. Otherwise each rank with a batch counts 1.
        carries_record: Whether a bucket's message may carry the record.
    """

    carries_record = True

    def __init__(self, plan: Plan, mesh: Mesh, record: StepRecord, grads: GradCheck) -> None:
        assert plan.reduce is not None
        self._hook, self._plan, self._mesh, self._record, self._grads = plan.hook, plan, mesh, record, grads
        self._over, self.by_weight, self._axes = plan.over, plan.by_weight, record.axes
        self.unit = power_near(record.ranks)
        self._carrier: GradBuffer | None = None  # the bucket whose message carries the record
        self._stages = BucketStages(plan, mesh)  # those behind the reduction run on all buckets
        self._states: Any = None  # of this step, where stages run behind the reduction
        self._alone: Sums | None = None  # the record's own message, where no bucket carries it

    @property
    def clip(self) -> Clip | None:
        """The function from the norm of the gradients to their clip factor; None where nothing is clipped."""
        by_norm = None if self._plan.clip is None else self._plan.clip.by_norm
        return None if by_norm is None else by_norm.factor

    def init(self, storage: Storage) -> Any:
        """The initial state."""
        params = {path: leaf.detach() for path, leaf in storage.leaves.items()}
        return copy_if_aliased(self._hook.init(params), storage.flats)

    def loss_factor(self, share: Any) -> Any:
        """The factor of the loss: starting backward from the share applies the weight at no cost."""
        return share * self.unit

    def prepare(self, storage: Storage) -> list[GradBuffer]:
        """The buffers of the messages."""
        layout, words = storage.layout, self._record.n_words
        carrier, pieces = lane_bucket(layout) if self.carries_record else None, storage.pieces
        outgoing = []
        for i, bucket in enumerate(layout):
            own = words if i == carrier else 0
            memory = self._mesh.zeros(bucket.numel + own, bucket.dtype, bucket.device, self._axes)
            outgoing.append(GradBuffer(bucket, storage.shapes, own, pieces and pieces.only(i), memory))
        self._carrier = None if carrier is None else outgoing[carrier]
        return outgoing

    def start(self, state: Any, storage: Storage, record: StepRecord, values: dict[str, Any], step: int) -> None:
        """Prepare for the buckets of a step; see `StepHook`."""
        if self._plan.rest:
            call = Call(values["weight"], {name: v for name, v in values.items() if name != "total"}, step)
            self._stages.begin(call, record.dtype, storage.layout, sends=False)
        if self._carrier is None:
            self._alone = record.send(values)
        else:
            record.write(values, self._carrier.lane)

    def launch(self, index: int, out: GradBuffer) -> Work:
        return self._mesh.reduce_(out.buffer, self._axes)

    def stop(self) -> None:
        """Discard a step that has failed."""
        self._alone = self._states = None

    def close(self) -> None:
        """Free the buffers."""
        self._carrier = None

    def sums(self) -> dict[str, Any]:
        """The summed record; waits for its message."""
        if self._carrier is not None:
            self._carrier.wait()
            return self._record.read(self._carrier.lane, self._grads.on_device)
        assert self._alone is not None
        return self._alone.read(self._grads.on_device)

    def divisor(self, sums: dict[str, Any]) -> Any:
        """The remaining divisor of the summed gradients."""
        return self._total(sums) * self.unit

    def finish(
        self, old: Any, storage: Storage, outgoing: list[GradBuffer], values: dict[str, Any]
    ) -> tuple[dict[str, Any], Any]:
        """Complete the messages after backward; see `StepHook`."""
        rest = self._plan.rest
        for out in outgoing:
            out.wait()
            if not rest:
                self._grads.observe(out)  # while later messages are still under way
        sums = self.sums()
        divisor = self.divisor(sums)
        if not rest:
            return sums, divisor
        for out in outgoing:
            out.total = None  # the stages make other values of these
            out.grads.div_(torch.where(divisor == 0, 1.0, divisor) if isinstance(divisor, Tensor) else divisor or 1.0)
        first = self.state(sums, outgoing)()
        self._states = (first, *self._stages.finish(outgoing, old[1:], storage, first)[1])
        for out in outgoing:
            self._grads.observe(out)
        return sums, 1.0

    def new_state(self, sums: dict[str, Any], outgoing: list[GradBuffer]) -> Any:
        """The state after the step, or a function that makes it."""
        states, self._states = self._states, None
        return self.state(sums, outgoing) if states is None else states

    def state(self, sums: dict[str, Any], outgoing: list[GradBuffer]) -> Callable[[], Any]:
        """A function that makes the state that the pure hook would have after these messages."""
        clips, total = self.clip is not None, sums["total"] if self._over is None else self._total(sums)
        by_norm = None if self._plan.clip is None else self._plan.clip.by_norm
        keeps = None if by_norm is None else by_norm.keeps
        norm = None if keeps is None else self._grads.norm_of(outgoing) / self.divisor(sums)

        def make() -> Any:  # must not refer to this object: a state would keep it alive
            state = MeanState(_wide(total), {n: _wide(v) for n, v in sums.items() if n != "total"})
            return (state, () if keeps is None else keeps(norm)) if clips else state

        return make

    def _total(self, sums: dict[str, Any]) -> Any:
        return divisor_of(self._over, sums["total"], self._record.ranks)


def power_near(total: float) -> float:
    """The power of two near 1 / total."""
    return 2.0 ** -math.floor(math.log2(total))


def _wide(value: Any) -> Tensor:
    return torch.as_tensor(value, dtype=torch.float64)
