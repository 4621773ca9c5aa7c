"""Runs a program on real ranks, which may be killed, and says how each of them ends."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

import fjoin
from fjoin import transforms as tx
from tests.ranks import reports

LONG_S = 300.0  # a mesh's time-out, which no rank may need
KEPT: list[Any] = []  # what lives as long as its process


class End(NamedTuple):
    """How a function ends: the name of its error or "fine", the error's text, the rank that it names, the result."""

    kind: str = "fine"
    text: str = ""
    rank: Any = None
    value: Any = None


def end_of(run: Callable[[], Any]) -> End:
    try:
        return End(value=run())
    except BaseException as error:
        return End(type(error).__name__, str(error), getattr(error, "rank", None))


def _run(rank: int, report: Callable[[Any], None], program: Callable[..., Any], args: tuple[Any, ...]) -> None:
    report(end_of(lambda: program(rank, *args)))


def ends(n: int, program: Callable[..., Any], *args: Any, left: int | None = None) -> list[End]:
    """The ends of `program(rank, *args)` on n ranks, or on those of whom so many are left, by rank. None may take a minute."""
    return reports(n, _run, program, args, of=left)


def a_step(mesh: Any, loss: Callable[[Any, Any], Any] = lambda p, b: (p["w"] * b).sum()) -> Any:
    return fjoin.train_step(loss, tx.fuse(tx.mean("data"), tx.sgd(0.1)), mesh=mesh)


def params() -> dict[str, torch.Tensor]:
    return {"w": torch.ones(2)}
