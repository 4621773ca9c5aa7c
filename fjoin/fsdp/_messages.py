"""The messages of fully_shard, in the form in which it takes them from others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..groups import is_backend_error
from ..records import compare
from ..step import raise_after_backward

if TYPE_CHECKING:
    from ._run import ShardedRun


REMEDY = (
    "Run the units of fully_shard in one order on all ranks; of parameters that only some ranks use, tell torch by "
    "model.set_reduce_scatter_unused_params(True)"
)
_STRAY = (
    "a backward pass of a module that fjoin.fsdp.register has registered; call handle.backward(loss, weight) in the place of "
    "loss.backward(), with one handle for all modules of a loss, or handle.close() first"
)


class UnitMessages:
    """The messages of one unit, a module for which fully_shard was called.

    Args:
        run: None after `close`: the messages are torch's own.
        unit: Its path.
    """

    def __init__(self, run: ShardedRun | None, unit: str) -> None:
        self.run, self._unit = run, unit or "the root"

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def _send(self, kind: str, call: Any, output: Tensor, given: Tensor, group: Any, **options: Any) -> Any:
        if (run := self.run) is None:
            return call(output, given, group=group, **options)
        try:
            if run.compares:
                message = f"it {kind} {self._unit!r}, {given.numel()} elements"
                compare(run.mesh, "a message of fully_shard", {"message": message}, REMEDY, axes=(run.pieces.axis,))
            return call(output, given, group=group, **options)
        except RuntimeError as error:
            if is_backend_error(error):
                run.mesh.raise_root_cause(error, None)
            raise


class UnitGather(UnitMessages):
    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False) -> Any:
        return self._send("gathers", dist.all_gather_single, output_tensor, input_tensor, group, async_op=async_op)


class UnitReduce(UnitMessages):
    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False) -> Any:
        if (run := self.run) is not None:
            if not run.in_backward:  # raised behind it: a module whose pass has been broken off is of no use any more
                raise_after_backward(RuntimeError(_STRAY))
                run.spoilt = True
            if input_tensor.dtype is torch.float16:
                raise TypeError(
                    "gradients are summed in float16, in which sums of weighted gradients overflow; give fully_shard a "
                    "MixedPrecisionPolicy whose reduce_dtype is torch.float32"
                )
            if not run.weight and run.in_backward:  # that of the whole window
                input_tensor.zero_()
        call = dist.reduce_scatter_single
        return self._send("reduces", call, output_tensor, input_tensor, group, op=op, async_op=async_op)
