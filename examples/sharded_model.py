"""A GPT under torch's fully_shard (FSDP2), on uneven data: every token counts once, in one pipeline, saved and resumed.

torchrun --nproc-per-node 2 examples/sharded_model.py
"""

import itertools

import _resume
import _small
import torch
from _text_model import Decoder, batches_of, cross_entropy, source_files
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import fjoin
from fjoin import transforms as tx

STEPS, CUT, CONTEXT, RATE = 8, 4, 32, 3e-3
rank, ranks = _small.start()


def make_model():
    torch.manual_seed(0)
    return Decoder(width=32, heads=4, layers=2, context=CONTEXT).double()


def make_batches(rank):
    """Batches of uneven length; each rank has one batch less than the one before it."""
    own = batches_of(source_files(120_000)[rank::ranks], CONTEXT, 2)
    return list(itertools.islice(own, max(CUT, STEPS - rank)))


def make_handle():
    model, mesh = make_model(), init_device_mesh("cpu", (ranks,), mesh_dim_names=("data",))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    clipped = tx.chain(tx.mean("data"), tx.clip_by_global_norm(1.0))
    return model, fjoin.fsdp.register(model, tx.fuse(clipped, tx.adamw(RATE), after=tx.ema(0.9)))


def tokens(batch):
    return batch.tokens


def train(model, handle, batches):
    for batch in (loop := fjoin.join(batches, weight=tokens)):
        loss = cross_entropy(model(batch.inputs), batch)
        handle.backward(loss, loop.weight)  # 0 on a rank that is out of input
        handle.step()
        if rank == 0:
            print(f"step {handle.steps}: loss {loss:.3f}, {handle.total:.0f} tokens", flush=True)


batches = make_batches(rank)
with _resume.common_folder() as folder:
    model, handle = make_handle()
    train(model, handle, batches[:CUT])
    fjoin.save(folder, {"model": handle}, handle.steps)
    model, handle = make_handle()  # as a new program would, on any number of ranks
    fjoin.load(folder, {"model": handle})
    train(model, handle, batches[CUT:])
if rank == 0:
    print(handle.explain(), handle, sep="\n", flush=True)
averages = handle.whole(tx.ema_params(handle.params(), handle.pipeline))


def one_process():
    """The parameters and their averages in plain torch, on all ranks' batches."""
    model, batches = make_model(), [make_batches(rank) for rank in range(ranks)]
    optimizer, found = torch.optim.AdamW(model.parameters(), RATE), {}
    for i in range(max(map(len, batches))):
        live = [own[i] for own in batches if i < len(own)]
        optimizer.zero_grad()
        for batch in live:
            (cross_entropy(model(batch.inputs), batch) * (batch.tokens / sum(map(tokens, live)))).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        for path, p in model.named_parameters():
            found[path] = p.detach().clone() if path not in found else found[path] * 0.9 + 0.1 * p.detach()
    return dict(model.named_parameters()), found


want, want_averages = one_process()
whole = handle.whole(handle.params())
_small.compare(
    {**whole, **{f"average of {path}": x for path, x in averages.items()}},
    {
        **{path: p.detach() for path, p in want.items()},
        **{f"average of {path}": x for path, x in want_averages.items()},
    },
    1e-9,  # AdamW enlarges rounding
)
