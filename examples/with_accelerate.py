"""Accelerate on uneven data, every sample counted once.

pip install accelerate
torchrun --nproc-per-node 2 examples/with_accelerate.py
"""

import os

import _small
import torch
from accelerate import Accelerator

import fjoin

os.environ["ACCELERATE_USE_CPU"] = "true"
torch.set_num_threads(1)
accelerator = Accelerator(cpu=True)
model = _small.make_model()
optimizer = torch.optim.AdamW(model.parameters(), _small.LEARNING_RATE)
model, optimizer = accelerator.prepare(model, optimizer)

loop = fjoin.join(_small.make_batches(accelerator.process_index), weight=lambda batch: len(batch[1]))
for batch in loop:
    accelerator.backward(_small.loss(model, batch) * loop.scale)  # the scale is 0 on a rank that is out of input
    optimizer.step()
    optimizer.zero_grad()

model = accelerator.unwrap_model(model)
_small.finish({path: p.detach() for path, p in model.named_parameters()}, every_sample_counts=True)
