"""Muon and AdamW with their states sharded over the ranks, saved in the middle, and resumed to the bit.

torchrun --nproc-per-node 2 examples/resume_zero.py
"""

import pathlib

import _resume
import _small
import torch

import fjoin
from fjoin import transforms as tx

CUT = 4  # steps; each rank still has a batch then

rank, ranks = _small.start()
batches = _small.make_batches(rank)
apply, start, _ = fjoin.functional(_small.make_model())
start = {path: p.detach() for path, p in start.items()}
optimizer = tx.partition({"*.weight": tx.muon(0.02), "*": tx.adamw(_small.LEARNING_RATE)})


def loss_fn(params, batch):
    return torch.nn.functional.cross_entropy(apply(params, {}, batch[0]), batch[1])


def train(from_step=None):
    """Begin, or go on from a checkpoint."""
    step = fjoin.train_step(loss_fn, tx.zero(tx.mean("data"), optimizer, "data"), weight=lambda batch: len(batch[1]))
    with fjoin.Checkpoints(folder, step, every=CUT, keep_last=None) as runs:
        state = runs.restore(start, step=from_step, data=False)
        for batch in step.join(batches[state.batches :]):
            state, metrics = step(state, batch)
            runs.save(state, metrics)
    last = state.clone()
    return dict(last.params), tx.to_state_dict(last.pipeline.optimizer), last.step


def one_process():
    """The same without sharding, on all ranks' batches."""
    whole, params, of = tx.fuse(tx.identity(), optimizer), start, [_small.make_batches(r) for r in range(ranks)]
    state = whole.init(params)
    for i in range(max(map(len, of))):
        live = [own[i] for own in of if i < len(own)]
        together = tuple(torch.cat(parts) for parts in zip(*live, strict=True))
        params, state = whole.step(params, torch.func.grad(loss_fn)(params, together), state)
    return params


with _resume.common_folder() as folder:
    params, slices, steps = train()
    again, slices_again, steps_again = train(CUT)
    files = [path.name for path in pathlib.Path(folder, f"step-{CUT:08d}").glob("*.safetensors")]

_resume.assert_same_bits(params, again)
_resume.assert_same_bits(slices, slices_again)
assert steps == steps_again > CUT and len(files) == ranks  # each rank has written its slices
_small.compare(again, one_process(), largest=5e-3)  # Muon iterates in bfloat16
