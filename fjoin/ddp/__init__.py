"""torch's DistributedDataParallel with the hooks and pipelines of fjoin.transforms."""

from ..optim.zero._zero_step import hook_with_zero_step as hook_with_zero_step
from ..optim.zero._zero_step import hook_with_zero_step_interleaved as hook_with_zero_step_interleaved
from ._handle import Handle as Handle
from ._register import register as register
from ._register import register_comm_hook_type as register_comm_hook_type
from .comm_hooks._comm_hook_types import comm_hook as comm_hook
from .comm_hooks._comm_hooks import allreduce_hook as allreduce_hook
from .comm_hooks._comm_hooks import bf16_compress_hook as bf16_compress_hook
from .comm_hooks._comm_hooks import fp16_compress_hook as fp16_compress_hook
from .comm_hooks._comm_hooks import noop_hook as noop_hook
from .comm_hooks._comm_hooks import post_localSGD_hook as post_localSGD_hook
from .comm_hooks._comm_hooks import quantization_perchannel_hook as quantization_perchannel_hook
from .comm_hooks._comm_hooks import quantization_pertensor_hook as quantization_pertensor_hook
from .comm_hooks._post_local_sgd_state import PostLocalSGDState as PostLocalSGDState
from .comm_hooks._power_sgd_hooks import batched_powerSGD_hook as batched_powerSGD_hook
from .comm_hooks._power_sgd_hooks import powerSGD_hook as powerSGD_hook
