"""Lightning on uneven data, every sample counted once: the dataset is the loop, and passes its scale to the step.

pip install lightning
torchrun --nproc-per-node 2 examples/with_lightning.py
"""

import os
from collections.abc import Iterator
from typing import Any

import _small
import lightning
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset

import fjoin


class UnevenDataset(IterableDataset[Any]):
    """This rank's batches, equally many on all ranks; Lightning runs the training step on each."""

    def __iter__(self) -> Iterator[Any]:
        loop = fjoin.join(_small.make_batches(dist.get_rank()), weight=lambda batch: len(batch[1]))
        for batch in loop:
            yield batch, loop.scale  # 0 on a rank that is out of input


class Model(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = _small.make_model()

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        batch, scale = batch
        return _small.loss(self.net, batch) * scale

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.net.parameters(), _small.LEARNING_RATE)


torch.set_num_threads(1)
model = Model()
trainer = lightning.Trainer(
    accelerator="cpu", devices=int(os.environ.get("WORLD_SIZE", "1")), strategy="ddp", max_epochs=1, use_distributed_sampler=False,
    logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
)  # fmt: skip
# No workers: the loop communicates with the other ranks, and only this process can.
trainer.fit(model, DataLoader(UnevenDataset(), batch_size=None))
_small.finish({path: p.detach() for path, p in model.net.named_parameters()}, every_sample_counts=True)
