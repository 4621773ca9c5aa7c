"""The program of one rank in many shell tests, simulated or real."""

from __future__ import annotations

from typing import Any

import optree
import torch
from torch import Tensor

import fjoin
from fjoin import transforms as tx
from tests.oracle.whole_batch import make_model


def train_one_rank(
    batches: list[Any], pipeline: tx.Pipeline, epochs: int = 1, ordered: bool = False, check: bool = False,
    dtype: torch.dtype = torch.float64, **settings: Any,
) -> dict[str, Any]:  # fmt: skip
    """Train on this rank's batches; returns the results step by step."""
    apply, params, _ = fjoin.functional(make_model(dtype=dtype))

    def loss_fn(params: Any, batch: Any) -> Any:
        return torch.nn.functional.cross_entropy(apply(params, {}, batch[0]), batch[1])

    settings.setdefault("weight", lambda batch: len(batch[1]))
    mesh = fjoin.mesh({"data": -1}, ordered=ordered, timeout_s=60)
    step = fjoin.train_step(loss_fn, pipeline, mesh=mesh, **settings)
    state = step.init(params)
    losses, calls, digests = [], 0, []
    for _ in range(epochs):
        for batch in step.join(batches):
            state, metrics = step(state, batch)
            calls += 1
            if metrics.stepped:
                losses.append(metrics.loss)
                if check:
                    digests.append(digest(state))
    out = {
        "params": {path: p.clone() for path, p in state.params.items()},
        "optimizer": optree.tree_map(torch.clone, state.pipeline.optimizer), "losses": losses, "calls": calls,
        "digests": digests,
    }  # fmt: skip
    step.close()
    return out


def unfused_one_rank(batches: list[Any], pipeline: tx.Pipeline) -> Any:
    """The same training with torch.func.grad and pipeline.step, one call after the other."""
    apply, params, _ = fjoin.functional(make_model())

    def loss_fn(params: Any, batch: Any) -> Tensor:
        return torch.nn.functional.cross_entropy(apply(params, {}, batch[0]), batch[1])

    state = pipeline.init(params)
    steps = int(tx.pmax(torch.tensor(len(batches)), "data"))
    for i in range(steps):
        if i < len(batches):
            grads, weight = torch.func.grad(loss_fn)(params, batches[i]), float(len(batches[i][1]))
        else:
            grads, weight = {path: torch.zeros_like(p) for path, p in params.items()}, 0.0
        params, state = pipeline.step(params, grads, state, weight=weight)
    return params, state.optimizer


def digest(state: fjoin.TrainState) -> list[float]:
    """A few numbers that differ where anything in parameters or optimizer state does, to the bit."""
    out = []
    for path, p in state.params.items():
        fields = [p, *optree.tree_leaves(state.pipeline.optimizer[path])]
        for f in fields:
            flat = f.detach().to(torch.float64).reshape(-1)
            out.append(float((flat * torch.arange(1, flat.numel() + 1, dtype=torch.float64)).sum()))
    return out
