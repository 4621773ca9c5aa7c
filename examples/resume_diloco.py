"""DiLoCo on uneven data, saved between two averages, and resumed to the bit: each rank goes on from its own parameters.

torchrun --nproc-per-node 2 examples/resume_diloco.py
"""

import _resume
import _small
import torch

import fjoin
from fjoin import transforms as tx

EVERY, OUTER_LR, MOMENTUM = 3, 0.7, 0.9
CUT = 4  # steps: one after an average

rank, ranks = _small.start()
batches = _small.make_batches(rank)
apply, start, _ = fjoin.functional(_small.make_model())


def loss_fn(params, batch):
    return torch.nn.functional.cross_entropy(apply(params, {}, batch[0]), batch[1])


def make_step():
    outer = tx.sgd(OUTER_LR, momentum=MOMENTUM, nesterov=True)
    pipeline = tx.diloco(tx.adamw(_small.LEARNING_RATE), tx.mean("data"), every=EVERY, outer=outer)
    return fjoin.train_step(loss_fn, pipeline, weight=lambda batch: len(batch[1]))


def train(from_step=None):
    """Begin, or go on from a checkpoint."""
    step = make_step()
    with fjoin.Checkpoints(folder, step, every=CUT) as runs:
        state = runs.restore(start, step=from_step, data=False)
        for batch in step.join(batches[state.batches :]):
            state, metrics = step(state, batch)
            runs.save(state, metrics)
        state = step.flush(state)  # averages the last, unfinished window
    return dict(state.clone().params), state.step


with _resume.common_folder() as folder:
    uncut, steps = train()
    params, again = train(CUT)  # a new step; checkpoints after this one are set aside

_resume.assert_same_bits(uncut, params)
assert steps == again > CUT
_small.compare(params, _small.one_process_of_diloco(ranks, EVERY, OUTER_LR, MOMENTUM))
