"""Pairs of pipelines: one that shards over "data" or "local", and one that does not and has the same result."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from fjoin import transforms as tx

ADAM = tx.adamw(tx.linear(0.1, 0.01, 9))
MUON = tx.partition({"*.weight": tx.muon(0.1), "*": tx.adamw(0.1)})
MEAN, SCATTER = tx.mean("data"), tx.scatter_mean("data")
CLIP = tx.clip_by_global_norm(0.5)
NODES = {"node": 2, "local": 2}


class Pair(NamedTuple):
    sharded: tx.Pipeline
    whole: tx.Pipeline
    axes: dict[str, int] = {}
    tolerance: float = 0.0  # relative; 0: equal to the bit
    options: dict[str, Any] = {}  # of train_step


INNER = tx.chain(tx.mean("local"), tx.mean("node"))
PAIRS = {
    "live": Pair(tx.zero(tx.mean("data", over="live"), ADAM, "data"), tx.fuse(tx.mean("data", over="live"), ADAM)),
    "world": Pair(tx.zero(tx.mean("data", over="world"), ADAM, "data"), tx.fuse(tx.mean("data", over="world"), ADAM)),
    "clip": Pair(tx.fuse(tx.chain(SCATTER, CLIP), ADAM), tx.fuse(tx.chain(MEAN, CLIP), ADAM), tolerance=1e-5),
    "clip, Muon": Pair(tx.fuse(tx.chain(SCATTER, CLIP), MUON), tx.fuse(tx.chain(MEAN, CLIP), MUON), tolerance=2e-2),
    "values": Pair(tx.fuse(tx.chain(SCATTER, tx.clip_by_value(0.5)), ADAM), tx.fuse(tx.chain(MEAN, tx.clip_by_value(0.5)), ADAM)),
    "before": Pair(tx.fuse(tx.chain(tx.clip_by_value(0.5), SCATTER), ADAM), tx.fuse(tx.chain(tx.clip_by_value(0.5), MEAN), ADAM)),
    "skip": Pair(tx.skip_if_nonfinite(tx.fuse(SCATTER, MUON)), tx.skip_if_nonfinite(tx.fuse(MEAN, MUON))),
    "scale": Pair(
        tx.dynamic_loss_scale(tx.fuse(SCATTER, ADAM), 8.0, growth_interval=3),
        tx.dynamic_loss_scale(tx.fuse(MEAN, ADAM), 8.0, growth_interval=3),
    ),
    "masters": Pair(tx.fuse(SCATTER, tx.mixed_precision(ADAM)), tx.fuse(MEAN, tx.mixed_precision(ADAM)), options={"dtype": torch.bfloat16}),
    "nodes": Pair(tx.fuse(tx.chain(tx.scatter_mean("local"), tx.mean("node")), MUON), tx.fuse(INNER, MUON), NODES),
    "nodes, by zero": Pair(tx.zero(tx.mean(("node", "local")), ADAM, "local"), tx.fuse(tx.mean(("node", "local")), ADAM), NODES, 1e-5),
    "nodes apart": Pair(
        tx.fuse(tx.scatter_mean("local"), ADAM, tx.every(2, tx.average_parameters("node"))),
        tx.fuse(tx.mean("local"), ADAM, tx.every(2, tx.average_parameters("node"))),
        NODES,
    ),
    "nodes apart, masters": Pair(
        tx.fuse(tx.scatter_mean("local"), tx.mixed_precision(ADAM), tx.outer_step(tx.mean("node"), tx.sgd(0.7), 2)),
        tx.fuse(tx.mean("local"), tx.mixed_precision(ADAM), tx.outer_step(tx.mean("node"), tx.sgd(0.7), 2)),
        NODES,
        options={"dtype": torch.bfloat16},
    ),
}  # fmt: skip
