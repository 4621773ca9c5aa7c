"""One rank of a measurement; `run.py` starts two of them for each group.

Usage:

    step.py time MODEL ROUNDS OUT VARIANT ...      wall and CPU seconds of a step, per round and variant
    step.py alone MODEL STEPS OUT VARIANT          memory, page faults and CPU time of one variant, alone
    step.py count MODEL STEPS OUT VARIANT ...      what a step of each variant calls, copies and sends
"""

from __future__ import annotations

import gc
import json
import os
import random
import resource
import sys
import time
import warnings
from typing import Any

import floors
import models
import torch
import torch.distributed as dist
import variants
from launch import join

import fjoin

WARM_UP_STEPS = 3


def measure(name: str, rounds: int, names: list[str], mesh: Any) -> dict[str, Any]:
    """Time all variants interleaved, so that a temporary disturbance of the machine affects them equally."""
    steps = models.CASES[name].steps
    batch = models.batch(name, dist.get_rank())
    start = flat(list(models.model(name).parameters()))
    run, reached = {}, {}
    for variant in names:
        run[variant], params = variants.MAKE[variant](name, batch, mesh)
        run[variant](WARM_UP_STEPS)
        if params is not None:
            reached[variant] = flat(params())
    check_equal(reached, start)
    del reached
    for variant in names:
        run[variant](steps)

    wall: dict[str, list[float]] = {variant: [] for variant in names}
    cpu: dict[str, list[float]] = {variant: [] for variant in names}
    order, shuffle = list(names), random.Random(0).shuffle
    gc.collect()
    for _ in range(rounds):
        shuffle(order)
        for variant in order:
            dist.barrier()
            wall0, cpu0 = time.perf_counter(), time.process_time()
            run[variant](steps)
            wall[variant].append((time.perf_counter() - wall0) / steps)
            cpu[variant].append((time.process_time() - cpu0) / steps)
    return {"steps": steps, "parameters": start.numel(), "wall": wall, "cpu": cpu}


def count_all(name: str, steps: int, names: list[str], mesh: Any) -> dict[str, dict[str, float]]:
    """What a step of each variant does, how far four steps end from those of the first one, and the ranks from each other."""
    batch, result = models.batch(name, dist.get_rank()), {}
    want = None
    for variant in names:
        run, params = variants.MAKE[variant](name, batch, mesh)
        run(4)
        most = flat(params())
        want = most.clone() if want is None else want
        off, least = (most - want).abs().max().item(), most.clone()
        dist.all_reduce(most, dist.ReduceOp.MAX)
        dist.all_reduce(least, dist.ReduceOp.MIN)
        result[variant] = {**floors.counts(run, steps), "off": off, "apart": (most - least).max().item()}
    return result


def flat(params: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat([p.detach().reshape(-1) for p in params])


def check_equal(reached: dict[str, torch.Tensor], start: torch.Tensor) -> None:
    """Refuse to compare the speed of variants that do not compute the same result.

    The bound is loose because Adam takes full steps on the rounding noise of gradients whose true value is
    zero, such as that of an attention's key bias. Variants with uneven inputs or lossy messages are not
    checked, since they compute something else.
    """
    for variant, got in reached.items():
        if variant.endswith(("uneven", "ddp join", "our join")) or any(
            w in variant for w in ("bf16", "int8", "int4", "power", "diloco")
        ):
            continue
        want = reached["ddp local" if variant.endswith("local") else "ddp sgd" if variant.endswith("sgd") else "ddp"]
        off = ((got - want).norm() / (want - start).norm()).item()
        if not off < 0.05:
            raise RuntimeError(f"{variant!r} does not compute what 'ddp' does: its parameters are off by {off:.2g}")


def alone(name: str, steps: int, variant: str, mesh: Any) -> dict[str, Any]:
    """The memory of this process and the cost of a step.

    Returns:
        "peak" and "steady": the peak RSS, and the RSS after some steps, in bytes, where memory that ranks share counts for
        each in part. "faults", "user" and "system": the
        page faults and the CPU seconds outside and inside the kernel, per step.
    """
    run, _ = variants.MAKE[variant](name, models.batch(name, dist.get_rank()), mesh)
    run(WARM_UP_STEPS)
    before = resource.getrusage(resource.RUSAGE_SELF)
    run(steps)
    after = resource.getrusage(resource.RUSAGE_SELF)
    with open("/proc/self/statm") as f:
        steady = int(f.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    others = of_others()
    return {
        "peak": after.ru_maxrss * 1024 - others,
        "steady": steady - others,
        "faults": (after.ru_minflt - before.ru_minflt) / steps,
        "user": (after.ru_utime - before.ru_utime) / steps,
        "system": (after.ru_stime - before.ru_stime) / steps,
    }


def of_others() -> int:
    """The bytes of shared memory in this process's RSS that count for other processes: resident less proportional."""
    counts, inside = {"Rss:": 0, "Pss:": 0}, False
    with open("/proc/self/smaps") as file:
        for line in file:
            key, *rest = line.split()
            if key in counts and inside:
                counts[key] += int(rest[0]) * 1024
            elif "-" in key:
                inside = "memfd:fjoin" in line
    return counts["Rss:"] - counts["Pss:"]


def main() -> None:
    what, name, count, out, *names = sys.argv[1:]
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    join()
    mesh = fjoin.mesh({"data": -1}, transport="gloo")
    if what == "time":
        result = measure(name, int(count), names, mesh)
    elif what == "count":
        result = count_all(name, int(count), names, mesh)
    else:
        result = alone(name, int(count), names[0], mesh)
    with open(out, "w") as f:
        json.dump(result, f)
    dist.barrier()
    # No tear-down: the hooks of torch's DDP hold groups that may be destroyed before the interpreter ends.
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
