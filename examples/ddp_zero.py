"""DistributedDataParallel and ZeroRedundancyOptimizer on uneven data: torch's documented example, with the right result.

torchrun --nproc-per-node 2 examples/ddp_zero.py
"""

import warnings

import _small
import torch
from torch.nn.parallel import DistributedDataParallel

import fjoin

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch's own warnings about torch.jit
    from torch.distributed.optim import ZeroRedundancyOptimizer

rank, ranks = _small.start()
ddp = DistributedDataParallel(_small.make_model())
zero = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.AdamW, lr=_small.LEARNING_RATE)

with fjoin.Join([ddp, zero]):
    for batch in _small.make_batches(rank):
        _small.loss(ddp, batch).backward()
        zero.step()
        zero.zero_grad()

_small.finish({path: p.detach() for path, p in ddp.module.named_parameters()}, every_sample_counts=False)
