"""A small GPT whose matrices are stepped by Muon and the rest by AdamW, sharded over the ranks as in ZeRO, and resumed.

torchrun --nproc-per-node 2 examples/muon_zero.py
"""

import itertools
import pathlib
import sys
import tempfile

import _small
import torch
import torch.distributed as dist
from _text_model import Decoder, batches_of, cross_entropy, source_files

import fjoin
from fjoin import transforms as tx

STEPS, CONTEXT = 6, 32
MATRICES = tuple(f"blocks.*.{name}.weight" for name in ("qkv", "out", "up", "down"))

rank, ranks = _small.start()
torch.manual_seed(0)
apply, start, _ = fjoin.functional(Decoder(width=32, heads=4, layers=2, context=CONTEXT))
start = {path: p.detach() for path, p in start.items()}
files = source_files(120_000)
batches = [list(itertools.islice(batches_of(files[r::ranks], CONTEXT, 2), STEPS)) for r in range(ranks)]


def loss_fn(params, batch):
    return cross_entropy(apply(params, {}, batch.inputs), batch)


optimizer = tx.partition({MATRICES: tx.muon(0.02), "*": tx.adamw(tx.warmup_cosine(3e-3, 2, 20))})
pipeline = tx.zero(tx.chain(tx.mean("data"), tx.clip_by_global_norm(1.0)), optimizer, "data")
print(tx.explain(pipeline, start, {"data": ranks}) if rank == 0 else "", end="\n" * (rank == 0))

mesh = fjoin.mesh({"data": -1})
saved = pathlib.Path(tempfile.gettempdir()) / f"muon_zero_{rank}_of_{ranks}.pt"


def train(params, state, steps):
    for i in steps:
        grads, loss = torch.func.grad_and_value(loss_fn)(params, batches[rank][i])
        params, state = pipeline.step(params, grads, state, weight=batches[rank][i].tokens)
        if rank == 0:
            print(f"step {i}: loss {loss:.3f}")
    return params, state


with fjoin.bind(mesh):
    params, state = train(start, pipeline.init(start), range(STEPS // 2))
    torch.save({"params": params, "state": tx.to_state_dict(state)}, saved)  # each rank saves its own slices
    loaded = torch.load(saved, weights_only=True)
    state = tx.from_state_dict(pipeline.init(start), loaded["state"])
    params, state = train(loaded["params"], state, range(STEPS // 2, STEPS))
saved.unlink()


def one_process():
    """The same without sharding, on all ranks' batches."""
    whole, p = tx.fuse(tx.clip_by_global_norm(1.0), optimizer), start
    s = whole.init(p)
    for i in range(STEPS):
        own = [torch.func.grad(loss_fn)(p, of[i]) for of in batches]
        n = [of[i].tokens for of in batches]
        mean = {path: sum(w * g[path] for w, g in zip(n, own, strict=True)) / sum(n) for path in p}
        p, s = whole.step(p, mean, s)
    return p


worst = max(float((params[path] - p).abs().max()) for path, p in one_process().items())
print(f"rank {rank}: {worst:.1e} from one process on all data", flush=True)
dist.destroy_process_group()
sys.exit(worst > 5e-3)  # Muon iterates in bfloat16
