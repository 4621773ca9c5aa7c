"""Buffers, batch normalization over ranks, and join hooks."""

from ._batch_norm import (
    BatchNormState as BatchNormState,
    SyncBatchNorm as SyncBatchNorm,
    convert_sync_batchnorm as convert_sync_batchnorm,
    sync_batch_norm as sync_batch_norm,
)
from ._buffers import average_buffers as average_buffers, broadcast_buffers as broadcast_buffers
from ._join_hook import JoinHook as JoinHook, broadcast_from_last as broadcast_from_last, last_joiner as last_joiner
