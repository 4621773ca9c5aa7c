"""The messages of fully_shard, in the form in which it takes them from others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from .._errors import DesyncError
from ..groups import is_backend_error
from ..records import read_now

if TYPE_CHECKING:
    from ._run import ShardedRun


class UnitMessages:
    """The messages of one unit, a module for which fully_shard was called.

    Args:
        run: None after `close`: the messages are torch's own.
        number: The number of the unit.
    """

    def __init__(self, run: ShardedRun | None, number: int) -> None:
        self.run, self._number = run, number

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def _send(self, kind: str, call: Any, output: Tensor, input: Tensor, group: Any, **options: Any) -> Any:
        try:
            if self.run is not None and self.run.compares:
                self._compare(self.run, kind, input, group)
            return call(output, input, group=group, **options)
        except RuntimeError as error:
            if self.run is None or not is_backend_error(error):
                raise
            self.run.mesh.raise_root_cause(error, None)

    def _compare(self, run: ShardedRun, kind: str, x: Tensor, group: Any) -> None:
        """Raise on all ranks unless they send the message of the same unit. They would use each other's parameters."""
        own = torch.tensor([len(kind), self._number, x.numel()], device=x.device)
        found = own.new_zeros(group.size() * len(own))
        dist.all_gather_single(found, own, group=group)
        numbers = read_now(run.mesh, found.view(-1, len(own)))
        for rank, there in enumerate(numbers):
            if there != numbers[0]:
                first, other = (
                    f"{'gathers' if size == len('gather') else 'reduces'} {[*run.units][number] or 'the root'!r}, {numel} elements"
                    for size, number, numel in (numbers[0], there)
                )
                raise DesyncError(
                    f"rank {rank} of the group that shards {other}, but rank 0 {first}: ranks must run the units of fully_shard in one "
                    f"order. For parameters that only some ranks use, model.set_reduce_scatter_unused_params(True)",
                    rank=rank,
                )


class UnitGather(UnitMessages):
    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False) -> Any:
        return self._send("gather", dist.all_gather_single, output_tensor, input_tensor, group, async_op=async_op)


class UnitReduce(UnitMessages):
    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False) -> Any:
        if (run := self.run) is not None:
            if not run.in_backward:
                raise RuntimeError(
                    "a backward pass of a module that fjoin.fsdp.register has registered; call handle.backward(loss, weight) in the "
                    "place of loss.backward(), or handle.close() first"
                )
            if input_tensor.dtype is torch.float16:
                raise TypeError(
                    "gradients are summed in float16, in which sums of weighted gradients overflow; give fully_shard a "
                    "MixedPrecisionPolicy whose reduce_dtype is torch.float32"
                )
            if not run.weight:  # that of the whole window
                input_tensor.zero_()
        return self._send(
            "reduce", dist.reduce_scatter_single, output_tensor, input_tensor, group, op=op, async_op=async_op
        )
