"""torch's DistributedDataParallel with the hooks and pipelines of fjoin.transforms."""

from ._comm_hooks import (
    PostLocalSGDState as PostLocalSGDState,
    allreduce_hook as allreduce_hook,
    batched_powerSGD_hook as batched_powerSGD_hook,
    bf16_compress_hook as bf16_compress_hook,
    comm_hook as comm_hook,
    fp16_compress_hook as fp16_compress_hook,
    noop_hook as noop_hook,
    post_localSGD_hook as post_localSGD_hook,
    powerSGD_hook as powerSGD_hook,
    quantization_perchannel_hook as quantization_perchannel_hook,
    quantization_pertensor_hook as quantization_pertensor_hook,
)
from ._register import Handle as Handle, register as register, register_ddp_comm_hook as register_ddp_comm_hook
from ._zero_step import (
    hook_with_zero_step as hook_with_zero_step,
    hook_with_zero_step_interleaved as hook_with_zero_step_interleaved,
)
