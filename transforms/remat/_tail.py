"""The end of a run, whose results no backward pass reads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ._kept import memory_of, tensors_in
from ._modes import is_held, run_op

_aten = torch.ops.aten
# Operation -> the same with a given result, and the positions of the arguments that its gradient reads.
_DELAYED: dict[Any, tuple[Any, tuple[int, ...]]] = {
    _aten.mm.default: (_aten.mm.out, (0, 1)),
    _aten.addmm.default: (_aten.addmm.out, (1, 2)),
    _aten.bmm.default: (_aten.bmm.out, (0, 1)),
    _aten.add.Tensor: (_aten.add.out, ()),
}


class _Late(NamedTuple):
    result: Tensor  # without values yet
    op: Any
    args: Any
    kwargs: Any


class Tail(TorchDispatchMode):
    """Delays products of matrices and sums until an operation reads their results, or a gradient will.

    Those that are left at the end of the run need not run: so the last layer of a block is not computed again.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._late: dict[int, _Late] = {}  # by memory

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        delayed = _DELAYED.get(func)
        if delayed is not None and not types:
            for i in delayed[1]:
                self._run(memory_of(args[i]))
            result = _result(func, args)
            if result is not None:
                self._late[memory_of(result)] = _Late(result, delayed[0], args, kwargs)
                return result
        if self._late:
            if func._schema.is_mutable:  # it may write into what they are to read
                for memory in list(self._late):
                    self._run(memory)
            elif not func.is_view:
                for x in tensors_in(args, kwargs):
                    self._run(memory_of(x))
        return run_op(func, types, args, kwargs)

    def _run(self, memory: int) -> None:
        late = self._late.pop(memory, None)
        if late is not None:
            for x in tensors_in(late.args, late.kwargs):
                self._run(memory_of(x))
            late.op(*late.args, **late.kwargs, out=late.result)

    def finish(self, results: Sequence[Tensor]) -> bool:
        """The run has ended: what somebody else than its results holds is computed. Always true."""
        with torch.no_grad():
            for memory in reversed(list(self._late)):  # the last first: they hold what they are to read
                late = self._late.get(memory)
                if late is not None and is_held(late.result.untyped_storage(), [late.result, *results]):
                    self._run(memory)
                self._late.pop(memory, None)
        return True


def _result(func: Any, args: Any) -> Tensor | None:
    """A tensor for the result of a delayed operation; None if its form is not a plain one."""
    if func is _aten.add.Tensor:
        a, b = args[:2]
        same = isinstance(b, Tensor) and a.shape == b.shape and a.dtype is b.dtype and a.device == b.device
        return torch.empty_like(a) if same and a.is_contiguous() and b.is_contiguous() else None
    first, second = args[-2:] if func is not _aten.addmm.default else args[1:3]
    if first.layout is not torch.strided or second.layout is not torch.strided:
        return None
    return first.new_empty((*first.shape[:-1], second.shape[-1]))
