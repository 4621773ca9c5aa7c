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
        # A tensor made like one without gaps gets its strides.
        if g.stride() != p.stride() and torch.empty_like(p, device="meta").stride() == p.stride():
            g = g.as_strided(p.size(), p.stride(), g.storage_offset())
        views.append(g)
    return views
