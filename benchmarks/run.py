"""Measure fjoin against torch's DDP, side by side, and write RESULTS.md.

    python benchmarks/run.py                        everything
    python benchmarks/run.py --quick                few rounds, to check that it runs; prints only
    python benchmarks/run.py --only tiny link       some groups; prints only

A missed target is a result, not an error: only a crash makes the exit code non-zero.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import report
from launch import HERE, combine, launch
from link import Unavailable, link


class Group(NamedTuple):
    """Variants that run interleaved in the same processes."""

    model: str
    rounds: int
    quick: int
    variants: tuple[str, ...]
    rate: str = ""  # of the link between the processes; "" for loopback
    delay: str = ""  # of a packet on it
    ranks: int = 2


DDP, PIECES, OPTIMIZERS = ("ddp", "ddp again"), ("C", "M", "O"), ("ddp foreach", "ddp sgd", "ours sgd")
STEPS = (
    *DDP,
    "O",
    "O foreach",
    "O loop",
    "O list",
    "O flat",
    "O optax",
    "O optax flat",
    "O sgd",
    "O sgd foreach",
    "O sgd loop",
    "O sgd list",
    "O sgd flat",
)
POWERS = ("ddp power", "ddp power batched", "ours power", "ours power 5", "ours power bf16")
WIRES = ("ours bf16", "ours int8", "ours int8 fed back", "ours int4")
LOCAL = (*DDP, "ours", "ddp local", "ours local", "ddp our local")
ZERO = (*DDP, "ours", "ours zero", "ddp zero", "ddp our zero", "ddp our zero hook")
SHARED = (
    *DDP,
    "ours",
    "shared",
    "shared zero",
    "ddp our hook",
    "shared our hook",
    "donate",
    "shared donate",
)
HAND = (
    *SHARED,
    "shared pure",
    "hand",
    "shared hand",
    "hand registered",
    "shared hand registered",
    "hand donate",
    "shared hand donate",
    "shared hand pure",
)
HOST = (
    *DDP,
    "hand",
    "ours",
    "ours join",
    "ddp our hook",
    "hand registered",
    "donate",
    "hand donate",
    "pure value_and_grad",
    "hand pure autograd",
    "pure",
    "ours zero",
    "ours int8 fed back",
)
GROUPS = {
    "host gpt149": Group("gpt149", 60, 2, HOST),
    "host res161": Group("res161", 40, 2, HOST),
    "shared tiny": Group("tiny", 80, 6, HAND),
    "shared 1m": Group("1m", 60, 3, HAND),
    "shared 10m": Group("10m", 30, 3, HAND),
    "shared 50m": Group("50m", 20, 2, SHARED),
    "four 1m": Group("1m", 40, 2, (*DDP, "ours", "shared", "shared zero"), ranks=4),
    "four 10m": Group("10m", 20, 2, (*DDP, "ours", "shared", "shared zero"), ranks=4),
    "tiny": Group("tiny", 80, 6, (*DDP, "ours", "ours join", "ours join uneven", "ddp join", "ddp our join", *PIECES)),
    "1m": Group("1m", 80, 4, (*DDP, "ours", "ours join", "pure", *OPTIMIZERS, *PIECES)),
    "10m": Group("10m", 40, 3, (*DDP, "ours", "ddp fused hook", "ddp our hook", "pure", *OPTIMIZERS, *PIECES)),
    "50m": Group("50m", 25, 2, (*DDP, "ours", *OPTIMIZERS, *PIECES)),
    "join": Group("10m epoch", 6, 1, (*DDP, "ddp join", "ddp our join", "ours join uneven")),
    "step 10m": Group("10m", 40, 3, STEPS),
    "step 1m": Group("1m", 60, 3, STEPS),
    "step 50m": Group("50m", 15, 2, tuple(s for s in STEPS if "optax" not in s)),  # they need too much memory
    "link": Group("10m", 30, 2, (*DDP, "ddp 5", "ddp 10", "ours", *PIECES), "1gbit"),
    "wire": Group("10m", 24, 2, (*DDP, "ddp bf16", "ddp bf16 5", "ours", *WIRES), "1gbit"),
    "two hosts": Group("10m period", 10, 1, (*DDP, "ours", "ours int8", "ours diloco"), "1gbit"),
    "two far hosts": Group("10m period", 10, 1, (*DDP, "ours", "ours int8", "ours diloco"), "1gbit", "5ms"),
    "slow wire": Group("10m", 6, 1, (*DDP, "ddp bf16", "ours", *WIRES), "100mbit"),
    "local": Group("10m period", 15, 2, LOCAL),
    "slow local": Group("10m period", 4, 1, LOCAL, "100mbit"),
    "zero": Group("10m", 24, 3, ZERO),
    "zero 50m": Group("50m", 16, 2, ZERO),
    "slow zero": Group("10m period", 7, 1, (*ZERO, "ours zero int8"), "1gbit"),
    "power": Group("10m", 24, 2, (*DDP, "ours", *POWERS, "C", "O"), "1gbit"),
    "slow power": Group("10m", 8, 1, (*DDP, *POWERS), "100mbit"),
}
MEMORY_OF = ("1m", "10m", "50m")
RANKS = (2, 8, 64, 512)


def timed(name: str, quick: bool) -> dict[str, Any]:
    group = GROUPS[name]
    rounds = group.quick if quick else group.rounds
    if not group.rate:
        places: dict[str, Any] = {"prefixes": ((),) * group.ranks, "interfaces": ("lo",) * group.ranks}
        return combine(launch("time", group.model, rounds, group.variants, **places))
    with link(group.rate, delay=group.delay) as where:
        return combine(launch("time", group.model, rounds, group.variants, **where))


def memory(quick: bool) -> dict[str, Any]:
    """By model: the memory of the rank that uses more, with each variant in a pair of processes of its own."""
    out: dict[str, Any] = {}
    for model in MEMORY_OF:
        out[model] = {}
        for variant in ("ddp", "ours", "shared", "shared zero", "donate", "shared donate"):
            ranks = launch("alone", model, 2 if quick else 5, [variant])
            out[model][variant] = {key: max(rank[key] for rank in ranks) for key in ranks[0]}
    return out


def simulator(quick: bool) -> list[dict[str, Any]]:
    out = []
    for ranks in RANKS[:2] if quick else RANKS:
        command = [sys.executable, str(HERE / "simulate.py"), str(ranks)]
        out.append(json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, timeout=600).stdout))
    return out


def main() -> int:
    parts: dict[str, Callable[[bool], Any]] = {
        **{name: lambda quick, name=name: timed(name, quick) for name in GROUPS},
        "memory": memory,
        "simulate": simulator,
    }
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few rounds")
    parser.add_argument("--only", nargs="+", choices=parts, metavar="NAME", help=f"some of: {' '.join(parts)}")
    parser.add_argument("--out", type=Path, help="where to write the page; RESULTS.md after a whole run, else nowhere")
    args = parser.parse_args()

    got: dict[str, Any] = {}
    skipped: list[str] = []
    crashed = False
    for name in args.only or parts:
        start = time.monotonic()
        try:
            got[name] = parts[name](args.quick)
        except Unavailable as reason:
            skipped.append(f"{name}: {reason}")
            print(f"skipped {name}: {reason}", file=sys.stderr)
        except (RuntimeError, ValueError, OSError, subprocess.SubprocessError):
            crashed = True
            skipped.append(f"{name}: crashed")
            traceback.print_exc()
        print(f"{name}: {time.monotonic() - start:.0f} s", file=sys.stderr, flush=True)

    groups = {name: got[name] for name in GROUPS if name in got}
    out = args.out or (None if args.quick or args.only else HERE / "RESULTS.md")
    before = out.read_text() if out and out.exists() else ""
    notes = before.partition(report.NOTES)[2]
    command = " ".join(["python benchmarks/run.py", *sys.argv[1:]])
    text = report.page(groups, got.get("memory", {}), got.get("simulate", []), skipped, command, notes)
    print(text)
    if out:
        out.write_text(text)
    return int(crashed)


if __name__ == "__main__":
    sys.exit(main())
