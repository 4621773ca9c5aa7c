"""torch's types of communication hooks as transforms."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch._C._distributed_c10d import BuiltinCommHookType
from torch.distributed.algorithms.ddp_comm_hooks import DDPCommHookType

from ...transforms._check import AxisName
from ...transforms.transform._transform import Transform
from ...transforms.transform._weights import Over, check_over
from ._comm_hooks import (
    allreduce_hook,
    bf16_compress_hook,
    fp16_compress_hook,
    noop_hook,
    quantization_perchannel_hook,
    quantization_pertensor_hook,
)
from ._power_sgd_hooks import batched_powerSGD_hook, powerSGD_hook

_OF_TYPE: dict[str, Callable[..., Transform]] = {
    "ALLREDUCE": allreduce_hook,
    "FP16_COMPRESS": fp16_compress_hook,
    "BF16_COMPRESS": bf16_compress_hook,
    "QUANTIZE_PER_TENSOR": quantization_pertensor_hook,
    "QUANTIZE_PER_CHANNEL": quantization_perchannel_hook,
    "POWER_SGD": powerSGD_hook,
    "POWER_SGD_RANK2": partial(powerSGD_hook, 2),
    "BATCHED_POWER_SGD": batched_powerSGD_hook,
    "BATCHED_POWER_SGD_RANK2": partial(batched_powerSGD_hook, 2),
    "NOOP": lambda axis, over: noop_hook(),
}


def comm_hook(comm_hook_type: DDPCommHookType | str, axis: AxisName = "data", over: Over = "world") -> Transform:
    """The transform equivalent to one of torch's `DDPCommHookType`, with torch's settings.

    Args:
        comm_hook_type: A member of torch's DDPCommHookType, its name, or torch's BuiltinCommHookType.
        axis: The axis, or a tuple of axes, to average over.
        over: The divisor, see `tx.mean`: by default all ranks count alike, as in torch.

    Returns:
        A `Transform`, for `fjoin.ddp.register`, `tx.fuse`, `tx.chain` and so on.

    Raises:
        TypeError: no such type.
        ValueError: `over` is none of the three.

    >>> fjoin.ddp.comm_hook("QUANTIZE_PER_CHANNEL", over="weight")
    compress(uint8(block=512), mean('data'))
    """
    check_over(over)
    given: Any = comm_hook_type
    name = given.name if isinstance(given, (DDPCommHookType, BuiltinCommHookType)) else given
    if not isinstance(name, str) or name not in _OF_TYPE:
        raise TypeError(
            f"a type of communication hook is a member of DDPCommHookType or its name, one of {', '.join(_OF_TYPE)}; "
            f"got {comm_hook_type!r}"
        )
    return _OF_TYPE[name](axis=axis, over=over)
