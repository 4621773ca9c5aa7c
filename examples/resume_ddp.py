"""DistributedDataParallel with a pipeline, saved in the middle, and resumed in a new module to the bit.

torchrun --nproc-per-node 2 examples/resume_ddp.py
"""

from typing import Any

import _resume
import _small
from torch.nn.parallel import DistributedDataParallel

import fjoin
from fjoin import transforms as tx

CUT = 4  # steps; each rank still has a batch then
rank, ranks = _small.start()
batches = _small.make_batches(rank)


def make() -> dict[str, Any]:
    """The module and the handle of its pipeline: together they are what a checkpoint holds."""
    # The argument keeps the buckets of the first pass. Otherwise the module cuts others for the second one, and a resumed module
    # begins with the first again: sums that are not in rank order, as over gloo on three ranks, then differ in their last bits.
    model = DistributedDataParallel(_small.make_model(), find_unused_parameters=True)
    hook = tx.chain(tx.mean("data"), tx.clip_by_global_norm(100.0))
    return {"model": model, "handle": fjoin.ddp.register(model, tx.fuse(hook, tx.adamw(_small.LEARNING_RATE)))}


def train(run: dict[str, Any], batches: list[_small.Batch], folder: str | None = None) -> None:
    loop = fjoin.join(batches, weight=lambda batch: len(batch[1]))  # the body runs equally often on all ranks
    for batch in loop:
        run["model"].zero_grad()
        run["handle"].weight(loop.weight)
        _small.loss(run["model"], batch).backward()  # sends the gradients and takes the step
        if folder is not None and run["handle"].step == CUT:
            fjoin.save(folder, run, CUT)


with _resume.common_folder() as folder:
    uncut = make()
    train(uncut, batches, folder)

    again = make()  # as in a new process
    steps = fjoin.load(folder, again)  # the module first, since the order is that of the dict
    train(again, batches[steps:])

params = [{path: p.detach() for path, p in run["model"].module.named_parameters()} for run in (uncut, again)]
_resume.assert_same_bits(*params)
assert steps == CUT and again["handle"].step == uncut["handle"].step > CUT
_small.finish(params[1], every_sample_counts=True)
