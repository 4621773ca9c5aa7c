"""Every optimizer that torch.optim has too, with every combination of its options."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from fjoin import transforms as tx

BETAS = [(0.9, 0.999), (0.5, 0.9)]
NO_YES = [False, True]


def combinations(**values: list[Any]) -> Iterator[dict[str, Any]]:
    """Every combination of options."""
    for chosen in itertools.product(*values.values()):
        yield dict(zip(values, chosen, strict=True))


class Kind(NamedTuple):
    ours: Any
    torchs: Any
    options: list[dict[str, Any]]
    kernel: dict[str, Any] | None  # settings that make torch use the same kernel as ours; None where torch has none
    matrices: bool = False


ADAM = list(
    combinations(lr=[0.01], betas=BETAS, eps=[1e-8, 1e-3], weight_decay=[0.0, 0.1], amsgrad=NO_YES, maximize=NO_YES)
)
SGD = combinations(
    lr=[0.1], momentum=[0.0, 0.9], dampening=[0.0, 0.5], weight_decay=[0.0, 0.1], nesterov=NO_YES, maximize=NO_YES
)
FUSED, FOREACH = {"fused": True}, {"foreach": True}
KINDS = {
    "sgd": Kind(tx.sgd, torch.optim.SGD, [o for o in SGD if not (o["nesterov"] and (o["momentum"] == 0 or o["dampening"] != 0))], FUSED),
    "adam": Kind(tx.adam, torch.optim.Adam, ADAM, FUSED), "adamw": Kind(tx.adamw, torch.optim.AdamW, ADAM, FUSED),
    "adagrad": Kind(
        tx.adagrad, torch.optim.Adagrad,
        list(combinations(lr=[0.1], lr_decay=[0.0, 0.1], weight_decay=[0.0, 0.1], initial_accumulator_value=[0.0, 0.5],
                  eps=[1e-10, 1e-3], maximize=NO_YES)), FOREACH,
    ),
    "adadelta": Kind(
        tx.adadelta, torch.optim.Adadelta,
        list(combinations(lr=[1.0, 0.1], rho=[0.9, 0.5], eps=[1e-6, 1e-3], weight_decay=[0.0, 0.1], maximize=NO_YES)), FOREACH,
    ),
    "adamax": Kind(
        tx.adamax, torch.optim.Adamax,
        list(combinations(lr=[0.01], betas=BETAS, eps=[1e-8, 1e-3], weight_decay=[0.0, 0.1], maximize=NO_YES)), FOREACH,
    ),
    "rmsprop": Kind(
        tx.rmsprop, torch.optim.RMSprop,
        list(combinations(lr=[0.01], alpha=[0.99, 0.5], eps=[1e-8, 1e-3], weight_decay=[0.0, 0.1], momentum=[0.0, 0.9],
                  centered=NO_YES, maximize=NO_YES)), FOREACH,
    ),
    "rprop": Kind(
        tx.rprop, torch.optim.Rprop,
        list(combinations(lr=[0.01], etas=[(0.5, 1.2), (0.1, 3.0)], step_sizes=[(1e-6, 50), (0.005, 0.02)], maximize=NO_YES)),
        FOREACH,
    ),
    "nadam": Kind(
        tx.nadam, torch.optim.NAdam,
        list(combinations(lr=[0.01], betas=BETAS, eps=[1e-8, 1e-3], weight_decay=[0.0, 0.1], momentum_decay=[4e-3, 0.1],
                  decoupled_weight_decay=NO_YES, maximize=NO_YES)), FOREACH,
    ),
    "radam": Kind(
        tx.radam, torch.optim.RAdam,
        list(combinations(lr=[0.01], betas=[*BETAS, (0.5, 0.6)], eps=[1e-8, 1e-3], weight_decay=[0.0, 0.1], decoupled_weight_decay=NO_YES,
                  maximize=NO_YES)), {"foreach": None},
    ),
    "asgd": Kind(
        tx.asgd, torch.optim.ASGD,
        list(combinations(lr=[0.1], lambd=[1e-4, 0.1], alpha=[0.75, 0.5], t0=[1e6, 10.0], weight_decay=[0.0, 0.1],
                  maximize=NO_YES)), {"foreach": False},
    ),
    "adafactor": Kind(
        tx.adafactor, torch.optim.Adafactor,
        list(combinations(lr=[0.05], beta2_decay=[-0.8, -0.5], eps=[(None, 1e-3), (1e-2, 0.5)], d=[1.0, 2.0],
                  weight_decay=[0.0, 0.1], maximize=NO_YES)), None,
    ),
    "muon": Kind(
        tx.muon, torch.optim.Muon,
        list(combinations(lr=[0.05], weight_decay=[0.0, 0.1], momentum=[0.95, 0.5], nesterov=NO_YES, ns_steps=[5, 3],
                  adjust_lr_fn=[None, "original", "match_rms_adamw"])), None, matrices=True,
    ),
}  # fmt: skip
