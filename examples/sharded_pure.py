"""Fully sharded training in pure functions, as in JAX: each rank holds a piece of each block's parameters, which the loss
gathers where it needs them, and again in the backward pass.

torchrun --nproc-per-node 2 examples/sharded_pure.py
"""

import itertools

import _small
import torch
import torch.nn.functional as F
from _text_model import Decoder, batches_of, cross_entropy, source_files
from torch.func import functional_call

import fjoin
from fjoin import transforms as tx

STEPS, CONTEXT, RATE = 8, 32, 3e-3
rank, ranks = _small.start()
mesh = fjoin.mesh({"data": -1})


def make_model():
    torch.manual_seed(0)
    return Decoder(width=32, heads=4, layers=4, context=CONTEXT).double()


def make_batches(rank):
    own = batches_of(source_files(120_000)[rank::ranks], CONTEXT, 2)
    return list(itertools.islice(own, max(1, STEPS - rank)))


def unit_of(path):
    """The unit whose parameters are gathered together: a block, or the rest."""
    return ".".join(path.split(".")[:2]) if path.startswith("blocks.") else "rest"


# One flat vector for each unit, cut into as many pieces as there are ranks.
model = make_model()
start = {path: p.detach() for path, p in model.named_parameters()}
units = {unit: [path for path in start if unit_of(path) == unit] for unit in map(unit_of, start)}
size = {unit: -(-sum(start[path].numel() for path in paths) // ranks) for unit, paths in units.items()}


def cut(unit):
    flat = torch.cat([start[path].reshape(-1) for path in units[unit]])
    flat = F.pad(flat, (0, ranks * size[unit] - flat.numel()))
    return flat[rank * size[unit] : (rank + 1) * size[unit]].clone()


def whole(unit, piece):
    """Path -> parameter, of all ranks' pieces of a unit."""
    flat, found, at = tx.all_gather(piece, "data").reshape(-1), {}, 0
    for path in units[unit]:
        found[path] = flat[at : at + start[path].numel()].view(start[path].shape)
        at += start[path].numel()
    return found


def keep_the_rest(op, *args, **kwargs):
    """A policy that keeps all results. `all_gather` is not asked for: what is gathered is never kept."""
    return True


def run_block(unit):
    block = model.get_submodule(unit)

    def run(piece, x):
        weights = {path.removeprefix(f"{unit}."): p for path, p in whole(unit, piece).items()}
        return functional_call(block, weights, (x,))

    return run


def embed(piece, tokens):
    p = whole("rest", piece)
    return F.embedding(tokens, p["embed.weight"]) + p["position.weight"][: tokens.shape[1]]


def logits_of(piece, x):
    p = whole("rest", piece)
    return F.linear(F.layer_norm(x, x.shape[-1:], p["norm.weight"], p["norm.bias"]), p["embed.weight"])


def make_loss(wrap):
    first, last = wrap(embed), wrap(logits_of)
    blocks = {unit: wrap(run_block(unit)) for unit in units if unit != "rest"}

    def loss_fn(pieces, batch, weight):
        x = first(pieces["rest"], batch.inputs)
        for unit, block in blocks.items():
            x = block(pieces[unit], x)
        return (
            cross_entropy(last(pieces["rest"], x), batch) * weight
        )  # the backward pass of a gather adds the ranks' gradients

    return loss_fn


def kept_bytes(loss_fn, pieces, batch):
    """The bytes that the graph of a loss keeps for its backward pass."""
    seen = {}

    def pack(x):
        seen[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    leaves = {unit: piece.clone().requires_grad_() for unit, piece in pieces.items()}
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        loss = loss_fn(leaves, batch, 1.0)
    return sum(seen.values()), loss


pieces, batches = {unit: cut(unit) for unit in units}, make_batches(rank)
clipped = tx.chain(tx.mean("data"), tx.clip_by_global_norm(1.0))  # the mean divides sums of weight * gradient
pipeline = tx.fuse(clipped, tx.adamw(RATE), sharded_over="data")
loss_fn = make_loss(lambda f: tx.remat(f, keep_the_rest))
grad = fjoin.value_and_grad(loss_fn)
with fjoin.bind(mesh):
    plain, sharded = (kept_bytes(f, pieces, batches[0])[0] for f in (make_loss(lambda f: f), loss_fn))
    if rank == 0:
        parameters = sum(p.nbytes for p in start.values())
        print(
            f"parameters: {parameters / 1e3:.0f} kB; of this rank: {sum(p.nbytes for p in pieces.values()) / 1e3:.0f} kB"
        )
        print(
            f"kept for the backward pass: {plain / 1e3:.0f} kB; without what was gathered: {sharded / 1e3:.0f} kB",
            flush=True,
        )
    state = pipeline.init(pieces)
    for batch in (loop := fjoin.join(batches, mesh=mesh, weight=lambda batch: batch.tokens)):
        loss, grads = grad(pieces, batch, loop.weight)
        pieces, state = pipeline.step(pieces, grads, state, weight=loop.weight, donate=True)
        if rank == 0:
            print(f"step {state.step}: loss {loss / max(loop.weight, 1):.3f}", flush=True)
    params = {path: p for unit, piece in pieces.items() for path, p in whole(unit, piece).items()}


def one_process():
    model, batches = make_model(), [make_batches(rank) for rank in range(ranks)]
    optimizer = torch.optim.AdamW(model.parameters(), RATE)
    for i in range(max(map(len, batches))):
        live = [own[i] for own in batches if i < len(own)]
        optimizer.zero_grad()
        for batch in live:
            part = batch.tokens / sum(batch.tokens for batch in live)
            (cross_entropy(model(batch.inputs), batch) * part).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return {path: p.detach() for path, p in model.named_parameters()}


_small.compare(params, one_process(), 1e-9)  # AdamW enlarges rounding
