"""The time of operations, estimated from their shapes."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from ..record._modes import run_op


class Rates(NamedTuple):
    """What a device does in a second: floating-point operations, and bytes of its memory and of what is beyond it."""

    flops: float
    memory: float
    away: float


# Round figures, not measured ones: all ranks must choose alike, for a block may hold collectives.
_CPU = Rates(flops=5e10, memory=1e10, away=1e9)
_ACCELERATOR = Rates(flops=2e14, memory=2e12, away=2e10)


def rates_of(x: Tensor) -> Rates:
    """The rates of a tensor's device."""
    return _CPU if x.device.type in ("cpu", "meta") else _ACCELERATOR


class Clock(TorchDispatchMode):
    """Adds up the seconds of operations."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seconds = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = run_op(func, types, args, kwargs)
        tensors = [x for x in tree_leaves((args, kwargs, out)) if isinstance(x, Tensor)]
        if tensors and not func.is_view:
            rates = rates_of(tensors[-1])
            count = flop_registry.get(func.overloadpacket)
            flops = count(*args, **kwargs, out_val=out) if count is not None else 0
            self.seconds += flops / rates.flops + sum(x.nbytes for x in tensors) / rates.memory
        return out
