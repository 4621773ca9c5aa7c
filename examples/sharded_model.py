"""A model sharded by fully_shard (FSDP2) on uneven data, every sample counted once; torch has no join for it.

torchrun --nproc-per-node 2 examples/sharded_model.py
"""

import _small
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import fjoin

rank, ranks = _small.start()
model = _small.make_model()
fully_shard(model, mesh=init_device_mesh("cpu", (ranks,), mesh_dim_names=("data",)))
optimizer = torch.optim.AdamW(model.parameters(), _small.LEARNING_RATE)

# The model communicates in forward and backward, so every rank must run them equally often.
loop = fjoin.join(_small.make_batches(rank), weight=lambda batch: len(batch[1]))
for batch in loop:
    (_small.loss(model, batch) * loop.scale).backward()  # the scale is 0 on a rank that is out of input
    optimizer.step()
    optimizer.zero_grad()

_small.finish({path: p.full_tensor().detach() for path, p in model.named_parameters()}, every_sample_counts=True)
