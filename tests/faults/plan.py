"""Faults as data, and a seeded choice of them."""

from __future__ import annotations

import dataclasses
import random

# How a program trains -> the places in it where a fault can hit.
PLACES = {
    "train_step": ("before init", "loader", "weight", "loss", "backward", "stage", "body", "evaluate"),
    "pipeline.step": ("loader", "loss", "body"), "ddp.register": ("loss", "body"), "fjoin.Join": ("loss", "body"),
}  # fmt: skip
HOOKS = ("mean", "clip", "int8", "power_sgd", "switch")
# The time-out of runs that only a time-out ends.
SHORT_S = 2.0
# Faults that end a rank or its training, and those that every rank must survive.
ENDING = ("exception", "interrupt", "kill", "exit", "sys.exit", "stop")
SURVIVED = ("late", "stop and continue", "none")


@dataclasses.dataclass(frozen=True)
class Fault:
    """One run with one fault.

    Attributes:
        kind: One of `ENDING` or `SURVIVED`, or "nonfinite", "break", "other settings", "step twice".
        program: How the ranks train.
        place: Where in the program the fault hits.
        rank, step: On which rank, and in which step, counted from 0.
        ranks: How many there are.
        hook: One of `HOOKS`.
        accumulate, donate: Of the train_step.
        timeout_s: Of the mesh.
        transport: Shared memory ("auto") or gloo.
        child: Whether the rank has forked a child that outlives it.
    """

    kind: str
    program: str
    place: str
    rank: int
    step: int
    ranks: int
    hook: str
    accumulate: int
    donate: bool
    timeout_s: float
    transport: str
    child: bool = False


def plan(seed: int, faults: int) -> list[Fault]:
    """So many faults, of all kinds in turn; the rest is chosen by the seed."""
    chance = random.Random(seed)
    of_training = ("nonfinite", "break", "other settings", "step twice")
    kinds = [*ENDING, *SURVIVED, *of_training]
    chosen = []
    for i in range(faults):
        kind = kinds[(seed * faults + i) % len(kinds)]
        program = "train_step" if kind in of_training else chance.choice([*PLACES, "train_step", "train_step"])
        place = "loss" if kind in of_training else chance.choice(PLACES[program])
        ranks = chance.choice([2, 2, 3, 4])
        waits = kind == "stop" or (program == "ddp.register" and kind in ("exception", "interrupt"))
        # In its first two passes a module sends messages of its own, whose errors are torch's.
        step = chance.randrange(2 if program in ("ddp.register", "fjoin.Join") else 0, 4)
        chosen.append(
            Fault(
                kind, program, place, chance.randrange(ranks), step, ranks, chance.choice(HOOKS),
                chance.choice([1, 1, 2]), chance.random() < 0.7, SHORT_S if waits else 30.0,
                chance.choice(["auto", "gloo"]),
            )
        )  # fmt: skip
    return chosen
