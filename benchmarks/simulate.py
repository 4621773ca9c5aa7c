"""Time and memory of the simulator: three training steps of a small MLP on N ranks in one process.

`simulate.py RANKS` prints a JSON object. It runs in a process of its own, to measure only its own peak.
"""

from __future__ import annotations

import json
import os
import resource
import statistics
import sys
import time
from typing import Any

import models
import torch
import torch.nn.functional as F
from torch import Tensor

import fjoin
from fjoin import transforms as tx

STEPS, BATCH, RUNS = 3, 8, 3


def main() -> None:
    ranks = int(sys.argv[1])
    torch.set_num_threads(1)
    torch.manual_seed(0)
    apply, start, _ = fjoin.functional(models.mlp(32, 96, 64, 10))
    pipeline = tx.fuse(tx.mean("data"), tx.sgd(0.1))

    def loss_fn(params: Any, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(apply(params, {}, x), y)

    def one_rank(x: Tensor, y: Tensor) -> Tensor:
        params, state = start, pipeline.init(start)
        for i in range(STEPS):
            params, state = pipeline.step(params, torch.func.grad(loss_fn)(params, x[i], y[i]), state)
        return params["0.weight"].sum()

    def run(n: int) -> float:
        x = [torch.randn(STEPS, BATCH, 32) for _ in range(n)]
        y = [torch.randint(0, 10, (STEPS, BATCH)) for _ in range(n)]
        before = time.perf_counter()
        tx.simulate(one_rank, {"data": n}, x, y)
        return time.perf_counter() - before

    run(2)  # warm up
    with open("/proc/self/statm") as f:
        rss = int(f.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    seconds = statistics.median(run(ranks) for _ in range(RUNS))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(json.dumps({"ranks": ranks, "seconds": seconds, "peak": peak, "added": max(0, peak - rss)}))


if __name__ == "__main__":
    main()
