"""Faults as data, a seeded choice of them, and the program of each rank: training in which one rank has a fault."""

from __future__ import annotations

import dataclasses
import datetime
import functools
import hashlib
import os
import random
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import fjoin
from fjoin import transforms as tx
from tests.helpers import in_backward

Report = Callable[[Any], None]
STEPS = 5
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


class Injector:
    """Lets the fault happen on its rank, at its place and in its step."""

    def __init__(self, fault: Fault, rank: int, report: Report) -> None:
        self._fault, self._mine, self._report = fault, rank == fault.rank, report
        self.step = 0  # calls of the loop's body so far
        self.params: Callable[[], Any] = lambda: None  # reads the parameters as they are

    def at(self, place: str, step: int | None = None) -> str:
        """Inject the fault if this is its place; returns the kind of a fault that the caller has to make, otherwise ""."""
        fault, step = self._fault, self.step if step is None else step
        if not self._mine or place != fault.place or step != (0 if place == "before init" else fault.step):
            return ""
        self._mine = False  # it happens once
        if fault.child and os.fork() == 0:  # as a DataLoader's worker, it has all of this rank's sockets
            threading.Event().wait(30.0)
            os._exit(0)
        self._report("fault")
        if fault.kind == "exception":
            raise ValueError("injected")
        if fault.kind in ("kill", "interrupt", "stop", "stop and continue"):
            names = {"kill": signal.SIGKILL, "interrupt": signal.SIGINT}
            if fault.kind == "stop and continue":
                continue_later()
            os.kill(os.getpid(), names.get(fault.kind, signal.SIGSTOP))
        if fault.kind == "exit":
            os._exit(3)
        if fault.kind == "sys.exit":
            sys.exit(3)
        if fault.kind == "late":
            threading.Event().wait(0.7)
        return fault.kind


def continue_later() -> None:
    """Let a child of this process continue it after a moment."""
    me = os.getpid()
    if os.fork() == 0:
        threading.Event().wait(0.7)
        os.kill(me, signal.SIGCONT)
        os._exit(0)


def run(rank: int, report: Report, fault: Fault) -> None:
    """Train, and report the end: (kind of the error, its text, rank, step, digests after each step, digest of the state)."""
    programs = {
        "train_step": train_step, "pipeline.step": pure_step, "ddp.register": registered, "fjoin.Join": joined,
    }  # fmt: skip
    os.environ["FJOIN_TRANSPORT"] = fault.transport
    seen: list[str] = []
    inject = Injector(fault, rank, report)
    try:
        for _ in programs[fault.program](rank, fault, inject):
            if (params := inject.params()) is not None:
                seen.append(digest(params))
    except SystemExit:
        raise
    except BaseException as error:
        named = getattr(error, "rank", None), getattr(error, "step", None)
        report((type(error), str(error), *named, seen, readable(inject.params)))
        return
    report((None, "", None, None, seen, readable(inject.params)))


def digest(params: Any) -> str:
    flat = torch.cat([p.detach().reshape(-1) for p in params.values()])
    return hashlib.sha256(flat.numpy().tobytes()).hexdigest()[:16]


def readable(state: Callable[[], Any]) -> str:
    """The digest of the parameters as they are left, or the name of the error that reading them raises."""
    try:
        params = state()
    except Exception as error:
        return type(error).__name__
    return "" if params is None else digest(params)


def problem() -> tuple[dict[str, Any], Callable[[int, int], Any]]:
    chance = torch.Generator().manual_seed(0)
    params = {"w": torch.randn(6, 4, generator=chance), "b": torch.zeros(4), "u": torch.randn(40, 8, generator=chance)}

    def batch(rank: int, step: int) -> Any:
        return torch.randn(3, 6, generator=torch.Generator().manual_seed(100 * rank + step))

    return params, batch


def pipeline(fault: Fault, inject: Injector, lr: float = 0.01) -> Any:
    hooks = {
        "mean": lambda: tx.mean("data"),
        "clip": lambda: tx.chain(tx.mean("data"), tx.clip_by_global_norm(1.0)),
        "int8": lambda: tx.error_feedback(tx.compress(tx.int8(), tx.mean("data"))),
        "power_sgd": lambda: tx.error_feedback(tx.power_sgd("data", rank=1)),
        "switch": lambda: tx.switch_after(2, tx.mean("data"), tx.compress(tx.bfloat16(), tx.mean("data"))),
    }
    hook = hooks[fault.hook]()
    if fault.place == "stage":

        def stage(grads: Any, state: Any, params: Any = None, **extra: Any) -> Any:
            inject.at("stage")
            return grads, state

        hook = tx.chain(hook, tx.Transform(lambda params: (), stage, needs=tx.Needs.TREE))
    return tx.fuse(hook, tx.adamw(lr))


def loss_of(params: Any, x: Any) -> Any:
    return (torch.tanh(x @ params["w"] + params["b"])).square().mean() + params["u"].square().mean()


def loader(fault: Fault, rank: int, batch: Callable[[int, int], Any], inject: Injector) -> Iterator[Any]:
    """Ranks have different numbers of batches; the rank with the fault has them all."""
    own = STEPS * fault.accumulate - (0 if rank == fault.rank else rank % 2)
    for i in range(own):
        inject.at("loader", i // fault.accumulate)
        yield batch(rank, i)


def train_step(rank: int, fault: Fault, inject: Injector) -> Iterator[None]:
    params, batch = problem()
    mesh = fjoin.mesh({"data": -1}, timeout_s=fault.timeout_s)
    inject.at("before init")
    other = fault.kind == "other settings" and rank == fault.rank
    if other:
        inject._report("fault")

    def loss_fn(params: Any, x: Any) -> Any:
        made = inject.at("loss")
        loss = loss_of(params, in_backward(x, lambda: inject.at("backward")) if x.requires_grad else x)
        loss = in_backward(loss, lambda: inject.at("backward"))
        return loss * torch.nan if made == "nonfinite" else loss

    def weight(x: Any) -> float:
        inject.at("weight")
        return float(len(x))

    step = fjoin.train_step(
        loss_fn, pipeline(fault, inject, 0.02 if other else 0.01), mesh=mesh, weight=weight, donate=fault.donate,
        accumulate=fault.accumulate, bucket_bytes=700,
    )  # fmt: skip
    state = step.init(params)
    evaluates = fault.place == "evaluate"
    for i, x in enumerate(step.join(loader(fault, rank, batch, inject))):
        inject.step = i // fault.accumulate
        inject.at("body")
        if fault.kind in ("break", "step twice") and (rank, i) == (fault.rank, fault.step):
            inject._report("fault")
            if fault.kind == "break":
                return
            state, _ = step(state, x)
            inject.params = functools.partial(getattr, state, "params")
            yield
        state, metrics = step(state, x)
        inject.params = functools.partial(getattr, state, "params")
        if metrics.stepped:
            yield
    if evaluates:
        inject.step = fault.step
        fjoin.evaluate(lambda x: inject.at("evaluate") and {} or {"m": x.mean()}, [batch(rank, 0)], mesh=mesh)


def pure_step(rank: int, fault: Fault, inject: Injector) -> Iterator[None]:
    params, batch = problem()
    mesh = fjoin.mesh({"data": -1}, timeout_s=fault.timeout_s)
    pipe = pipeline(fault, inject)
    state = pipe.init(params)
    loop = fjoin.join(loader(fault, rank, batch, inject), mesh=mesh, weight=len)
    with fjoin.bind(mesh):
        for i, x in enumerate(loop):
            inject.step = i // fault.accumulate
            inject.at("body")
            inject.at("loss")
            grads = torch.func.grad(loss_of)(params, x)
            params, state = pipe.step(params, grads, state, weight=loop.weight)
            inject.params = functools.partial(dict, params)
            yield


def module(fault: Fault) -> Any:
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=fault.timeout_s))
    torch.manual_seed(0)
    return DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Linear(8, 4)))


def registered(rank: int, fault: Fault, inject: Injector) -> Iterator[None]:
    _, batch = problem()
    ddp = module(fault)
    fjoin.ddp.register(ddp, pipeline(fault, inject))
    for i in range(STEPS):
        inject.step = i
        inject.at("body")
        loss = ddp(batch(rank, i)).square().mean()
        inject.at("loss")
        loss.backward()
        ddp.zero_grad()
        inject.params = lambda: dict(ddp.module.named_parameters())
        yield


def joined(rank: int, fault: Fault, inject: Injector) -> Iterator[None]:
    _, batch = problem()
    ddp = module(fault)
    optimizer = torch.optim.AdamW(ddp.parameters(), 0.01)
    with fjoin.Join([ddp, optimizer]):
        for i, x in enumerate(loader(fault, rank, batch, inject)):
            inject.step = i // fault.accumulate
            inject.at("body")
            loss = ddp(x).square().mean()
            inject.at("loss")
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            yield
