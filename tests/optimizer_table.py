"""One row or more for each public optimizer: the optimizer that `make` returns is checked by all laws and in the shell."""

from __future__ import annotations

from collections.abc import Callable

from fjoin import transforms as tx

OPTIMIZERS: dict[str, list[Callable[[], tx.Optimizer]]] = {
    "adadelta": [lambda: tx.adadelta(), lambda: tx.adadelta(0.5, rho=0.5, weight_decay=0.1, maximize=True)],
    "adafactor": [lambda: tx.adafactor(0.1), lambda: tx.adafactor(tx.linear(0.1, 0.0, 9), eps=(1e-2, 0.1), weight_decay=0.1)],
    "adagrad": [lambda: tx.adagrad(0.1), lambda: tx.adagrad(0.1, lr_decay=0.1, initial_accumulator_value=0.5)],
    "adam": [lambda: tx.adam(0.1), lambda: tx.adam(0.1, weight_decay=0.1, amsgrad=True, maximize=True)],
    "adamax": [lambda: tx.adamax(0.1), lambda: tx.adamax(tx.cosine(0.1, 9), betas=(0.5, 0.9), weight_decay=0.1)],
    "adamw": [lambda: tx.adamw(tx.warmup_cosine(0.1, 2, 10)), lambda: tx.adamw(0.1, betas=(0.5, 0.9), amsgrad=True)],
    "asgd": [lambda: tx.asgd(0.1), lambda: tx.asgd(0.1, lambd=0.1, t0=2.0, weight_decay=0.1, maximize=True)],
    "frozen": [tx.frozen],
    "inject_hyperparameters": [
        lambda: tx.inject_hyperparameters(tx.adamw(0.1, weight_decay=0.1)),
        lambda: tx.inject_hyperparameters(tx.sgd(tx.linear(0.1, 0.0, 9), momentum=0.9)),
        lambda: tx.inject_hyperparameters(tx.partition({"*.weight": tx.lamb(0.1), "*": tx.sgd(0.1)})),
    ],
    "lamb": [lambda: tx.lamb(0.1), lambda: tx.lamb(tx.linear(0.1, 0.0, 9), weight_decay=0.1, maximize=True)],
    "lion": [lambda: tx.lion(0.1), lambda: tx.lion(tx.linear(0.1, 0.0, 9), weight_decay=0.1, maximize=True)],
    "mixed_precision": [
        lambda: tx.mixed_precision(tx.adamw(0.1)),
        lambda: tx.mixed_precision(tx.partition({"*.weight": tx.sgd(0.1), "*": tx.frozen()})),
    ],
    "muon": [
        lambda: tx.partition({"*.weight": tx.muon(0.1), "*": tx.sgd(0.1)}),
        lambda: tx.partition(
            {"*.weight": tx.muon(0.1, nesterov=False, adjust_lr_fn="match_rms_adamw"), "*": tx.frozen()}
        ),
    ],
    "nadam": [lambda: tx.nadam(0.1), lambda: tx.nadam(0.1, weight_decay=0.1, decoupled_weight_decay=True)],
    "partition": [lambda: tx.partition({"*.weight": tx.sgd(0.1, momentum=0.9), "*": tx.adamw(0.1)})],
    "radam": [lambda: tx.radam(0.1), lambda: tx.radam(0.1, betas=(0.5, 0.6), weight_decay=0.1, decoupled_weight_decay=True)],
    "rmsprop": [lambda: tx.rmsprop(0.1), lambda: tx.rmsprop(0.1, momentum=0.9, centered=True, weight_decay=0.1)],
    "rprop": [lambda: tx.rprop(0.1), lambda: tx.rprop(0.1, etas=(0.1, 3.0), step_sizes=(0.01, 0.2), maximize=True)],
    "sgd": [
        lambda: tx.sgd(0.1),
        lambda: tx.sgd(tx.linear(0.1, 0.0, 5), momentum=0.9, dampening=0.5, weight_decay=0.1),
        lambda: tx.sgd(0.1, momentum=0.9, nesterov=True, maximize=True),
    ],
}  # fmt: skip
