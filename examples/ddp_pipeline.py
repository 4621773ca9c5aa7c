"""DistributedDataParallel with a whole pipeline as its communication hook: every sample counted once, on uneven data.

torchrun --nproc-per-node 2 examples/ddp_pipeline.py
"""

import _small
from torch.nn.parallel import DistributedDataParallel

import fjoin
from fjoin import transforms as tx

rank, ranks = _small.start()
model = DistributedDataParallel(_small.make_model())
hook = tx.chain(tx.mean("data"), tx.clip_by_global_norm(100.0))
handle = fjoin.ddp.register(model, tx.fuse(hook, tx.adamw(_small.LEARNING_RATE)))

with fjoin.Join([model]):
    for batch in _small.make_batches(rank):
        model.zero_grad()
        handle.weight(len(batch[1]))
        _small.loss(model, batch).backward()  # sends the gradients and takes the step

_small.finish({path: p.detach() for path, p in model.module.named_parameters()}, every_sample_counts=True)
