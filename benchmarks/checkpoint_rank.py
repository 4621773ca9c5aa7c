"""One rank of a measurement of checkpoints; `checkpoints.py` starts them.

Usage:

    checkpoint_rank.py saves MODEL ROUNDS OUT FOLDER VARIANT ...    seconds of saves and loads, and bytes
    checkpoint_rank.py parts MODEL ROUNDS OUT FOLDER                seconds of the parts of a save
    checkpoint_rank.py loop MODEL ROUNDS OUT FOLDER THREADS         seconds of blocks of steps, with and without saves
    checkpoint_rank.py small MODEL ROUNDS OUT FOLDER TENSORS ...    seconds of a save's call, by the number of tensors
    checkpoint_rank.py damage MODEL COUNT OUT FOLDER VARIANT ...    what a load says to damaged files
"""

from __future__ import annotations

import json
import logging
import os
import random
import shutil
import sys
import threading
import time
import warnings
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from checkpoint_formats import MAKE, damage, train_step_of
from launch import join
from models import Transformer, mlp, samples
from torch import nn

import fjoin
from fjoin import transforms as tx
from fjoin.checkpoint import _save
from fjoin.checkpoint._leaves import SavedLeaves
from fjoin.checkpoint._load import Load
from fjoin.training import TrainStep

MODELS: dict[str, Callable[[], nn.Module]] = {
    "50m": lambda: Transformer(12, 584, 8, 1024),
    "25m": lambda: mlp(*[2048] * 7),
    "85k": lambda: mlp(64, 512, 100, 10),  # 1 MB with its moments
}
TOTAL = 400_000  # parameters of `small`
BLOCK, EVERY = 24, 12  # steps of a block of the loop, and steps from save to save


def model(name: str) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[name]()


def settled() -> None:
    """Start a measurement on all ranks together, once disk and cores have nothing else to do; waits ten seconds at most."""
    if not dist.get_rank():
        os.sync()
        end = time.monotonic() + float(os.environ.get("QUIET_S", 10))
        while _idle(0.3) < 0.9 and time.monotonic() < end:
            pass
    dist.barrier()


def _idle(s: float) -> float:
    """The part of the cores' time that is idle for so many seconds."""
    before = os.times().elapsed, _idle_s()
    time.sleep(s)
    return (_idle_s() - before[1]) / (os.times().elapsed - before[0]) / (os.cpu_count() or 1)


def _idle_s() -> float:
    with open("/proc/stat") as file:
        return sum(map(int, file.readline().split()[4:6])) / os.sysconf("SC_CLK_TCK")


def seconds(run: Callable[[], Any]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def saves(name: str, rounds: int, folder: Path, variants: list[str]) -> dict[str, Any]:
    """The seconds of saves and loads, and those of this rank's CPU time, by variant; the bytes on the disk."""
    start = model(name)
    formats = {variant: MAKE[variant](start) for variant in variants}
    keys = ("save", "save CPU", "load", "load CPU")
    found: dict[str, Any] = {key: {variant: [] for variant in variants} for key in keys} | {"bytes": {}}
    order, shuffle, path = list(variants), random.Random(0).shuffle, folder / "saved"
    for number in range(rounds + 1):  # the first one warms up
        shuffle(order)
        for variant in order:
            for key, run in (("save", formats[variant].save), ("load", formats[variant].load)):
                settled()
                cpu = time.process_time()
                wall = seconds(lambda run=run: run(path))
                if number:
                    found[key][variant].append(wall)
                    found[f"{key} CPU"][variant].append(time.process_time() - cpu)
            if "fjoin" in variant:
                formats[variant].forget()
            found["bytes"][variant] = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
            dist.barrier()
            if not dist.get_rank():
                shutil.rmtree(path)
    return found


def parts(name: str, rounds: int, folder: Path) -> dict[str, Any]:
    """The seconds of the parts of a save and a load of replicated state, on this rank."""
    spent: dict[str, float] = {}

    def clock(part: str, holder: Any, name: str, thread: bool = False) -> None:
        inner = getattr(holder, name)

        def timed(*args: Any, **options: Any) -> Any:
            start = time.perf_counter()
            try:
                return inner(*args, **options)
            finally:
                if not thread or threading.current_thread() is not threading.main_thread():
                    spent[part] = spent.get(part, 0.0) + time.perf_counter() - start

        setattr(holder, name, timed)

    clock("comparison of replicas", _save.Replicas, "apart")
    clock("checksums", zlib, "crc32", thread=True)
    clock("write", os, "write", thread=True)
    clock("fsync", os, "fsync", thread=True)
    clock("file", _save.Save, "_write")
    clock("commit", _save.Save, "_commit")
    clock("check", SavedLeaves, "verify")
    clock("read", Load, "_value")
    clock("init", TrainStep, "init")
    one, path = MAKE["fjoin"](model(name)), folder / "saved"
    found: dict[str, Any] = {"save": [], "load": []}
    for number in range(rounds + 1):
        for key, run in (("save", one.save), ("load", one.load)):
            settled()
            spent.clear()
            spent["whole"] = seconds(lambda run=run: run(path))
            if number:
                found[key].append(dict(spent))
        one.forget()
        dist.barrier()
        if not dist.get_rank():
            shutil.rmtree(path)
    return found


def loop(name: str, rounds: int, folder: Path, threads: int) -> dict[str, Any]:
    """The seconds of blocks of steps, and of the calls of save; a block ends when its last save does."""
    torch.set_num_threads(threads)
    apply, params, _ = fjoin.functional(model(name))
    first = next(iter(params.values()))
    batch = samples(32, first.shape[1], 10)

    def loss_fn(params: Any, batch: Any) -> Any:
        return torch.nn.functional.cross_entropy(apply(params, {}, batch[0]), batch[1])

    step = fjoin.train_step(loss_fn, tx.fuse(tx.mean("data"), tx.adamw(1e-4)))
    state = step.init(params)
    keep: Any = {"keep_last": 1}
    runs = {
        "background": fjoin.Checkpoints(folder / "background", step, background=True, **keep),
        "foreground": fjoin.Checkpoints(folder / "foreground", step, **keep),
    }
    modes = ["none", "none again", *runs]
    found: dict[str, Any] = {"wall": {mode: [] for mode in modes}, "call": {mode: [] for mode in runs}}
    shuffle = random.Random(0).shuffle
    for number in range(rounds + 1):
        shuffle(modes)
        for mode in modes:
            calls = []
            settled()
            start = time.perf_counter()
            for n in range(BLOCK):
                state, _ = step(state, batch)
                if mode in runs and n % EVERY == 0:
                    calls.append(seconds(lambda mode=mode, state=state: runs[mode].save(state)))
            if mode in runs:
                runs[mode].wait()
            wall = time.perf_counter() - start
            if number:
                found["wall"][mode].append(wall)
                if mode in runs:
                    found["call"][mode] += calls
    file = next((folder / "background").glob(f"step-*/rank-{dist.get_rank():05d}-*"))
    return found | {"bytes": file.stat().st_size, "saves": BLOCK // EVERY, "steps": BLOCK}


def small(rounds: int, folder: Path, counts: list[int]) -> dict[str, Any]:
    """The seconds of a save's call in the background, and those until it is durable, by the number of parameters."""
    runs, states, steps = {}, {}, {}
    for count in counts:
        torch.manual_seed(0)
        params = {f"layers.{n}.weight": torch.randn(TOTAL // count) for n in range(count)}
        steps[count] = train_step_of(tx.fuse(tx.mean("data"), tx.adamw(1e-3)))
        states[count] = steps[count].init(params)
        runs[count] = fjoin.Checkpoints(folder / str(count), steps[count], background=True, keep_last=1)
    found: dict[str, Any] = {key: {str(count): [] for count in counts} for key in ("first", "call", "durable", "step")}
    for number in range(rounds + 1):  # the first save makes the plan
        for count in counts:
            settled()
            start = time.perf_counter()
            states[count], _ = steps[count](states[count], 0)
            step = time.perf_counter() - start
            start = time.perf_counter()
            call = seconds(lambda count=count: runs[count].save(states[count]))
            runs[count].wait()
            durable = time.perf_counter() - start
            values = {"call": call, "durable": durable, "step": step} if number else {"first": call}
            for key, value in values.items():
                found[key][str(count)].append(value)
    return found


def main() -> None:
    what, name, count, out, folder, *rest = sys.argv[1:]
    warnings.filterwarnings("ignore")
    logging.disable()  # torch.distributed.checkpoint logs the errors that it raises
    torch.set_num_threads(1)
    join()
    at, times = Path(folder), int(count)
    measures: dict[str, Callable[[], Any]] = {
        "saves": lambda: saves(name, times, at, rest),
        "parts": lambda: parts(name, times, at),
        "loop": lambda: loop(name, times, at, int(rest[0])),
        "small": lambda: small(times, at, [int(one) for one in rest]),
        "damage": lambda: {variant: damage(model(name), times, at / variant, variant) for variant in rest},
    }
    result = measures[what]()
    Path(out).write_text(json.dumps(result))
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # as in step.py


if __name__ == "__main__":
    main()
