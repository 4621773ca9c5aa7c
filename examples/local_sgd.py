"""DiLoCo on uneven data: ranks train alone, and an outer optimizer steps on their mean change every few steps.

torchrun --nproc-per-node 2 examples/local_sgd.py
"""

import _small
import torch

import fjoin
from fjoin import transforms as tx

EVERY = 3
OUTER_LR, MOMENTUM = 0.7, 0.9

rank, ranks = _small.start()
model = _small.make_model()
apply, params, _ = fjoin.functional(model)


def loss_fn(params, batch):
    return torch.nn.functional.cross_entropy(apply(params, {}, batch[0]), batch[1])


outer = tx.sgd(OUTER_LR, momentum=MOMENTUM, nesterov=True)
pipeline = tx.diloco(tx.adamw(_small.LEARNING_RATE), tx.mean("data"), every=EVERY, outer=outer)
step = fjoin.train_step(loss_fn, pipeline, weight=lambda batch: len(batch[1]))  # ranks count by their samples
state = step.init(params)
for batch in step.join(_small.make_batches(rank)):
    state, metrics = step(state, batch)
state = step.flush(state)  # averages the last, unfinished window

_small.compare(dict(state.params), _small.one_process_of_diloco(ranks, EVERY, OUTER_LR, MOMENTUM))
