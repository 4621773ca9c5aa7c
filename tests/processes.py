"""New processes for real ranks, forked from one that has imported torch and fjoin and done nothing else."""

from __future__ import annotations

import multiprocessing as mp

context = mp.get_context("forkserver")
# What optimizers and modules of torch import when they are first used takes longest.
context.set_forkserver_preload(["fjoin", "torch._dynamo", "torch.distributed.optim"])
