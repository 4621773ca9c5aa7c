"""DiLoCo on uneven data: ranks train alone, and an outer optimizer steps on their mean change every few steps.

torchrun --nproc-per-node 2 examples/local_sgd.py
"""

import sys

import _small
import torch
import torch.distributed as dist

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
pipeline = tx.diloco(tx.adamw(_small.LEARNING_RATE), "data", every=EVERY, outer=outer)
step = fjoin.train_step(loss_fn, pipeline, weight=lambda batch: len(batch[1]))  # ranks count by their samples
state = step.init(params)
for batch in step.join(_small.make_batches(rank)):
    state, metrics = step(state, batch)
state = step.flush(state)  # averages the last, unfinished window


def one_process() -> dict[str, torch.Tensor]:
    """The same in plain torch, with all ranks' models in one process."""
    models, batches = [_small.make_model() for _ in range(ranks)], [_small.make_batches(r) for r in range(ranks)]
    optimizers = [torch.optim.AdamW(m.parameters(), _small.LEARNING_RATE) for m in models]
    shared = _small.make_model()
    sgd = torch.optim.SGD(shared.parameters(), OUTER_LR, momentum=MOMENTUM, nesterov=True)
    samples, last = [0] * ranks, max(map(len, batches)) - 1
    for i in range(last + 1):
        for r, own in enumerate(batches):
            if i < len(own):
                optimizers[r].zero_grad()
                _small.loss(models[r], own[i]).backward()
                optimizers[r].step()
                samples[r] += len(own[i][1])
        if (i + 1) % EVERY == 0 or i == last:
            for p, *copies in zip(shared.parameters(), *(m.parameters() for m in models), strict=True):
                p.grad = sum(n * (p.detach() - c.detach()) for n, c in zip(samples, copies, strict=True)) / sum(samples)
            sgd.step()
            for m in models:
                m.load_state_dict(shared.state_dict())
            samples = [0] * ranks
    return {path: p.detach() for path, p in shared.named_parameters()}


worst = max(float((state.params[path] - p).abs().max()) for path, p in one_process().items())
print(f"rank {rank}: {worst:.1e} from one process on all data", flush=True)
dist.destroy_process_group()
sys.exit(worst > 1e-12)
