"""New processes for real ranks, forked from one that has imported torch and fjoin and done nothing else."""

from __future__ import annotations

import multiprocessing as mp

context = mp.get_context("forkserver")
# Optimizers and modules of torch import other modules when they are first used; these imports take longest.
context.set_forkserver_preload(["fjoin", "torch._dynamo", "torch.distributed.optim"])
