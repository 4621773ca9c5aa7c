"""A custom loop on uneven data: gradients by plain autograd, a pipeline in place, every sample counted once.

torchrun --nproc-per-node 2 examples/custom_loop.py
"""

import _small
import torch
from torch.func import functional_call

import fjoin
from fjoin import transforms as tx

rank, ranks = _small.start()
mesh = fjoin.mesh({"data": -1})
model = _small.make_model()
params = {path: p.detach().clone() for path, p in model.named_parameters()}
pipeline = tx.fuse(tx.chain(tx.mean("data"), tx.clip_by_global_norm(100.0)), tx.adamw(_small.LEARNING_RATE))
state = pipeline.init(params)


def loss_fn(params: dict[str, torch.Tensor], batch: _small.Batch) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(functional_call(model, params, batch[0]), batch[1])


grad = fjoin.value_and_grad(loss_fn)
# The body runs equally often on all ranks: with weight 0 on a rank that is out of input.
loop = fjoin.join(_small.make_batches(rank), mesh=mesh, weight=lambda batch: len(batch[1]))
with fjoin.bind(mesh):
    for batch in loop:
        loss, grads = grad(params, batch)
        params, state = pipeline.step(params, grads, state, weight=loop.weight, donate=True)

_small.finish(params, every_sample_counts=True)
