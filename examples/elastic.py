"""Training on ranks that die and come; examples/elastic.sh starts it, and one of its ranks kills itself on the way.

The others finish the step, the launcher starts the rank again, and it takes its place: no step is lost. At the end each
rank compares the parameters with those of one process of plain torch on all data.
"""

import os
import signal
import sys
import time

import torch
from torch.utils.data import DataLoader, TensorDataset

import fjoin
from fjoin import transforms as tx

RANKS, EPOCHS, BATCH, DIES_IN_STEP = int(os.environ.get("RANKS", "3")), 10, 32, 20
FIRST_START = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1)).double()
inputs = torch.randn(500, 8).double()
data = TensorDataset(inputs, inputs[:, :1].sin())
apply, params, _ = fjoin.functional(model)


def loss_fn(params, batch):  # the mean over this rank's samples
    return torch.nn.functional.mse_loss(apply(params, {}, batch[0]), batch[1])


def train(members):  # called again when ranks are lost or come
    pipeline = tx.fuse(tx.chain(tx.mean("data"), tx.clip_by_global_norm(1.0)), tx.adamw(1e-2))
    step = fjoin.train_step(loss_fn, pipeline, mesh=members.mesh, weight=lambda batch: len(batch[0]))
    state = members.resume(step, params)
    print(f"generation {members.generation}: rank {step.rank} of {step.ranks} from step {state.step}", flush=True)
    loader = DataLoader(data, batch_sampler=fjoin.Shuffled(len(data), BATCH, mesh=members.mesh))
    show = fjoin.show(every=16)
    for batch in members.join(step, loader, epochs=EPOCHS):
        if FIRST_START and (step.rank, step.ranks, state.step) == (1, RANKS, DIES_IN_STEP):
            os.kill(os.getpid(), signal.SIGKILL)
        state, metrics = step(state, batch)
        show(metrics)
        time.sleep(0.05)  # so that the rank which has died has time to come back
    return state


def of_one_process():
    """Plain torch on the same batches, whole."""
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    for epoch in range(EPOCHS):
        order = torch.randperm(len(data), generator=torch.Generator().manual_seed(epoch))
        for part in order.split(BATCH):
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(data.tensors[0][part]), data.tensors[1][part]).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
    return dict(model.named_parameters())


if __name__ == "__main__":
    state = fjoin.elastic(train, ranks=RANKS)
    if state is None:
        sys.exit("the others had ended the training before this process came")
    start = {path: value.clone() for path, value in params.items()}
    other = of_one_process()
    moved = max((other[path] - start[path]).abs().max().item() for path in start)
    apart = max((other[path] - state.params[path]).abs().max().item() for path in start)
    print(
        f"{state.step} steps: differs from one process on all data by {apart / moved:.0e} of the way that was trained",
        flush=True,
    )
    sys.exit(apart > 1e-6 * moved)
