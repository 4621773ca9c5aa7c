"""Modules, buckets and torch's own hooks, for the presets that have their names."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import (
    DDPCommHookType,
    debugging_hooks,
    default_hooks,
    powerSGD_hook,
    quantization_hooks,
)
from torch.nn.parallel import DistributedDataParallel

from tests.oracle import comm_hooks as oracle

SHAPES = [[(700,), (3, 200), ()], [(30, 20), (424,)]]  # of two buckets, the second of 2 x 512 elements
SIZES = [1301, 1024]
TYPES = [member.name for member in DDPCommHookType]

TORCHS: dict[str, Any] = {
    "ALLREDUCE": default_hooks.allreduce_hook, "FP16_COMPRESS": default_hooks.fp16_compress_hook,
    "BF16_COMPRESS": default_hooks.bf16_compress_hook,
    "QUANTIZE_PER_TENSOR": quantization_hooks.quantization_pertensor_hook,
    "QUANTIZE_PER_CHANNEL": quantization_hooks.quantization_perchannel_hook, "POWER_SGD": powerSGD_hook.powerSGD_hook,
    "POWER_SGD_RANK2": powerSGD_hook.powerSGD_hook, "BATCHED_POWER_SGD": powerSGD_hook.batched_powerSGD_hook,
    "BATCHED_POWER_SGD_RANK2": powerSGD_hook.batched_powerSGD_hook, "NOOP": debugging_hooks.noop_hook,
}  # fmt: skip
QUANTIZED = ("QUANTIZE_PER_TENSOR", "QUANTIZE_PER_CHANNEL")
HALF = {"FP16_COMPRESS": 2.0**-11, "BF16_COMPRESS": 2.0**-8}  # the largest relative error of rounding


def torchs_state(name: str) -> Any:
    """The state that torch's type makes when it gets no process group."""
    if "POWER" not in name:
        return None
    kept: list[Any] = []

    class Module:
        def register_comm_hook(self, state: Any, hook: Any) -> None:
            kept.append(state)

    DDPCommHookType[name].value(model=Module(), state=None)
    return kept[0]


def holder(dtype: torch.dtype = torch.float32) -> tuple[DistributedDataParallel, list[list[Tensor]]]:
    """A module that only has parameters, and they by bucket."""
    module = nn.ParameterList([torch.zeros(shape, dtype=dtype) for shapes in SHAPES for shape in shapes])
    params = list(module)
    return DistributedDataParallel(module), [params[:3], params[3:]]


def called(ddp: DistributedDataParallel, handle: Any, params: list[list[Tensor]], grads: list[Tensor]) -> list[Tensor]:
    """The results of a module's registered hook on buckets that belong to no module."""
    (hook, state), *_ = ddp._comm_hooks
    handle.weight(1.0)
    return oracle.run(hook, state, params, grads)


def own(kind: str, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return oracle.flats(dist.get_rank(), SIZES, kind, dtype)
