"""A loop of one's own with a pipeline, saved in the middle, and resumed to the bit.

torchrun --nproc-per-node 2 examples/resume_loop.py
"""

from typing import Any

import _resume
import _small
import torch
from torch.func import functional_call

import fjoin
from fjoin import transforms as tx

CUT = 4  # steps; each rank still has a batch then
rank, ranks = _small.start()
mesh = fjoin.mesh({"data": -1})
model, batches = _small.make_model(), _small.make_batches(rank)
pipeline = tx.fuse(tx.chain(tx.mean("data"), tx.clip_by_global_norm(100.0)), tx.adamw(_small.LEARNING_RATE))


def loss_fn(params: dict[str, torch.Tensor], batch: _small.Batch) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(functional_call(model, params, batch[0]), batch[1])


def train(params: Any, state: Any, batches: list[_small.Batch], folder: str | None = None) -> tuple[Any, Any]:
    grad = fjoin.value_and_grad(loss_fn)
    loop = fjoin.join(batches, mesh=mesh, weight=lambda batch: len(batch[1]))
    with fjoin.bind(mesh):
        for batch in loop:
            loss, grads = grad(params, batch)
            params, state = pipeline.step(params, grads, state, weight=loop.weight)
            if folder is not None and state.step == CUT:
                fjoin.save(folder, pipeline, (params, state), mesh=mesh, extra={"note": "in the middle"})
    return params, state


with _resume.common_folder() as folder:
    start = {path: p.detach().clone() for path, p in model.named_parameters()}
    uncut, state = train(start, pipeline.init(start), batches, folder)

    params, again = fjoin.load(folder, pipeline, mesh=mesh)  # nothing of the first run is needed
    assert again.step == CUT
    params, again = train(params, again, batches[CUT:])

_resume.assert_same_bits(uncut, params)
_resume.assert_same_bits(*(dict(tx.to_state_dict(each.optimizer)) for each in (state, again)))
_small.finish(params, every_sample_counts=True)
