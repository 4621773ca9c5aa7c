"""The hooks of torch's DistributedDataParallel: its buckets' gradients, and which modules have a hook of ours."""

from __future__ import annotations

import weakref

import torch
from torch import Tensor
from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import DistributedDataParallel

# The modules that have a hook of ours, which divides by itself, with the paths of the parameters that it steps.
REGISTERED: weakref.WeakKeyDictionary[DistributedDataParallel, frozenset[str]] = weakref.WeakKeyDictionary()


def gradients(bucket: GradBucket) -> list[Tensor]:
    """The gradients in one of the module's buckets, as views with the parameters' strides.

    torch's own views are contiguous, but the memory is in the parameters' order.
    """
    views = []
    for p, g in zip(bucket.parameters(), bucket.gradients(), strict=True):
        dense = torch.empty_like(p, device="meta").stride() == p.stride()  # strides without gaps
        views.append(
            g.as_strided(p.size(), p.stride(), g.storage_offset()) if dense and g.stride() != p.stride() else g
        )
    return views
