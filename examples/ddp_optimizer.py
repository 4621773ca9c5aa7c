"""DistributedDataParallel and a torch optimizer on uneven data, with equal optimizer state on all ranks.

torchrun --nproc-per-node 2 examples/ddp_optimizer.py
"""

import _small
import torch
from torch.nn.parallel import DistributedDataParallel

import fjoin

rank, ranks = _small.start()
ddp = DistributedDataParallel(_small.make_model())
optimizer = torch.optim.AdamW(ddp.parameters(), _small.LEARNING_RATE)

# A rank that is out of input leaves the block, shadows the others' messages and takes every step with their gradients.
with fjoin.Join([ddp, optimizer]):
    for batch in _small.make_batches(rank):
        _small.loss(ddp, batch).backward()
        optimizer.step()
        optimizer.zero_grad()

_small.finish({path: p.detach() for path, p in ddp.module.named_parameters()}, every_sample_counts=False)
