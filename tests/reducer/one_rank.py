"""The program of one rank in many shell tests, simulated or real."""

from __future__ import annotations

from typing import Any

import optree
import torch

import fjoin
from fjoin import transforms as tx
from tests.oracle.whole_batch import make_model


def train_one_rank(
    batches: list[Any], pipeline: tx.Pipeline, dtype: torch.dtype = torch.float64, **settings: Any
) -> dict[str, Any]:
    """Train on this rank's batches; returns the results step by step."""
    apply, params, _ = fjoin.functional(make_model(dtype=dtype))

    def loss_fn(params: Any, batch: Any) -> Any:
        return torch.nn.functional.cross_entropy(apply(params, {}, batch[0]), batch[1])

    settings.setdefault("weight", lambda batch: len(batch[1]))
    mesh = fjoin.mesh({"data": -1}, timeout_s=60)
    step = fjoin.train_step(loss_fn, pipeline, mesh=mesh, **settings)
    state = step.init(params)
    losses, calls = [], 0
    for batch in step.join(batches):
        state, metrics = step(state, batch)
        calls += 1
        if metrics.stepped:
            losses.append(metrics.loss)
    out = {
        "params": {path: p.clone() for path, p in state.params.items()},
        "optimizer": optree.tree_map(torch.clone, state.pipeline.optimizer), "losses": losses, "calls": calls,
    }  # fmt: skip
    step.close()
    return out
