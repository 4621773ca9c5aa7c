"""The end of an epoch of uneven inputs on all ranks: a barrier, work done once, a callback in each epoch.

torchrun --nproc-per-node 2 examples/end_of_epoch.py
"""

import pathlib
import shutil
import tempfile

import _small
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import fjoin
from fjoin import transforms as tx

rank, ranks = _small.start()
ddp = DistributedDataParallel(_small.make_model())
optimizer = torch.optim.AdamW(ddp.parameters(), _small.LEARNING_RATE)
batches = _small.make_batches(rank)
folder = [tempfile.mkdtemp() if rank == 0 else None]
dist.broadcast_object_list(folder)
log = pathlib.Path(str(folder[0])) / f"rank{rank}"

# 1. A loop over fjoin.join, or step.join, ends on all ranks together. The code after it runs once per epoch, after the
#    last batch of any rank: no hook is needed.
for epoch in range(2):
    for _ in fjoin.join(batches):
        pass
    with log.open("a") as file:
        file.write(f"epoch {epoch} ended\n")
    if rank == 0:
        torch.save(ddp.module.state_dict(), log.with_suffix(f".{epoch}.pt"))


# 2. A rank also leaves fjoin.Join only when all ranks have ended. Code that must communicate at the end, in the same
#    order on all ranks, is a post hook. This one counts the samples of all ranks.
def count(samples: int, is_last_joiner: bool) -> int:
    with log.open("a") as file:
        file.write(f"post hook, {'' if is_last_joiner else 'not '}among the last\n")
    return int(tx.psum(samples, "data"))


samples = fjoin.as_joinable(tx.JoinHook(post=count), 0)
with fjoin.Join([ddp, optimizer, samples]):
    for batch in batches:
        samples.state += len(batch[1])
        _small.loss(ddp, batch).backward()
        optimizer.step()
        optimizer.zero_grad()

# 3. A barrier is a Join whose joinable does nothing.
with fjoin.Join([fjoin.as_joinable(tx.JoinHook())]):
    with log.open("a") as file:
        file.write("before the barrier\n")
others = [log.with_name(f"rank{r}").read_text().splitlines() for r in range(ranks)]

last = "" if rank == ranks - 1 else "not "  # the highest rank has the most batches
assert log.read_text().splitlines() == [
    "epoch 0 ended", "epoch 1 ended", f"post hook, {last}among the last", "before the barrier",
]  # fmt: skip
assert all(lines[-1] == "before the barrier" for lines in others), "the barrier waits for all ranks"
assert samples.state == sum(len(batch[1]) for r in range(ranks) for batch in _small.make_batches(r))
dist.barrier()
if rank == 0:
    shutil.rmtree(log.parent)
_small.finish({path: p.detach() for path, p in ddp.module.named_parameters()}, every_sample_counts=False)
