"""What ZeRO saves: the memory of the optimizer and of the process, and Muon's time, per rank.

    python benchmarks/zero.py

Its speed: `python benchmarks/run.py --only "zero" "zero 50m" "slow zero"`.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from typing import Any

from launch import join, launch

PEAKS = ("ddp", "ours", "ddp zero", "ours zero", "ddp our zero", "ddp our zero hook")
STEPS = 5
MATRICES = ("qkv", "out", "up", "down")


def main() -> None:
    print("Peak RSS in MB of a process that runs one variant alone, 50M MLP, AdamW, 2 ranks:\n")
    peaks = {variant: max(rank["peak"] for rank in launch("alone", "50m", STEPS, [variant])) for variant in PEAKS}
    for variant, peak in peaks.items():
        print(f"{variant:20s} {peak / 1e6:6.0f}   {peak / peaks['ddp zero']:.3f} of torch's ZeRO")
    print("\nBytes of the optimizer's state of the busiest rank, as a part of the whole state, 10M transformer:\n")
    for ranks in (1, 2, 3, 4):
        found = launch(
            "state", "10m", 1, ["adamw"], prefixes=((),) * ranks, interfaces=("lo",) * ranks, script="zero.py"
        )
        share = max(rank["bytes"] for rank in found) / found[0]["whole"]
        print(f"{ranks} ranks: {share:.4f}, 1/{ranks} times {share * ranks:.3f}")
    print("\nMuon on the matrices of the 10M transformer, 4 ranks: CPU seconds of Newton-Schulz per step\n")
    of = {"interfaces": ("lo",) * 4, "prefixes": ((),) * 4, "script": "zero.py"}
    whole, sharded = (
        [rank["seconds"] for rank in launch("muon", "10m", STEPS, [kind], **of)]
        for kind in ("whole", "sharded")  # type: ignore[arg-type]
    )
    print(f"replicated: {max(whole):.3f}; sharded: {', '.join(f'{s:.3f}' for s in sharded)}")
    print(f"the busiest rank / replicated: {max(sharded) / max(whole):.3f}")


def one_rank() -> dict[str, Any]:
    import models
    import torch

    import fjoin
    from fjoin import transforms as tx
    from fjoin.transforms.optimizers import _muon

    what, name, count, _, kind = sys.argv[1:]
    torch.set_num_threads(1)
    join()
    apply, params, _ = fjoin.functional(models.model(name))
    seconds = [0.0]
    if what == "muon":
        optimizer, whole = (
            tx.partition({**{f"blocks.*.{m}.weight": tx.muon(0.02) for m in MATRICES}, "*": tx.adamw(1e-3)}),
            tx.mean("data"),
        )
        pipeline = tx.fuse(whole, optimizer) if kind == "whole" else tx.zero(whole, optimizer, "data")
        right = _muon._orthogonal

        def timed(*args: Any) -> Any:
            start = time.thread_time()
            out = right(*args)
            seconds[-1] += time.thread_time() - start
            return out

        _muon._orthogonal = timed
    else:
        pipeline = tx.zero(tx.mean("data"), tx.adamw(1e-3), "data")

    def loss_fn(params: Any, batch: Any) -> Any:
        return torch.nn.functional.cross_entropy(apply(params, {}, batch[0]), batch[1])

    step = fjoin.train_step(loss_fn, pipeline)
    state = step.init(params)
    batch = models.batch(name, step.rank)
    for _ in range(int(count) + 1):
        seconds.append(0.0)
        state, _ = step(state, batch)
    held: list[Any] = [
        leaf for leaf in torch.utils._pytree.tree_leaves(state.pipeline.optimizer) if leaf is not None and leaf.dim()
    ]
    own = sum(leaf.numel() * leaf.element_size() for leaf in held)
    whole_bytes = 2 * sum(p.numel() * p.element_size() for p in params.values())  # AdamW has two moments
    return {"seconds": statistics.median(seconds[2:]), "bytes": own, "whole": whole_bytes}


if __name__ == "__main__":
    if len(sys.argv) == 1:
        main()
    else:
        with open(sys.argv[4], "w") as f:
            json.dump(one_rank(), f)
