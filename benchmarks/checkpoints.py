"""Measure checkpoints against torch.save and torch.distributed.checkpoint, and write RESULTS_CHECKPOINTS.md.

    python benchmarks/checkpoints.py                        everything
    python benchmarks/checkpoints.py --quick                tiny models, few rounds, to check that it runs; prints only
    python benchmarks/checkpoints.py --only loop small      some measures; prints only

The files are written to a new folder in --folder, which must be on a disk for the times to mean anything.
"""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from launch import HERE, launch
from report import table

import fjoin

NOTES = "## What this shows"
FORMATS = ("fjoin", "fjoin, ZeRO", "torch.save", "torch.save, sha256", "torch.distributed.checkpoint")
DAMAGED = (FORMATS[0], *FORMATS[2:])
CORES = [("taskset", "-c", str(core)) for core in sorted(os.sched_getaffinity(0))]
LOOPS: dict[str, tuple[list[tuple[str, ...]], int]] = {  # the words before each rank's command, and its threads
    "1 rank of 1 thread, 2 cores": ([()], 1),
    "1 rank of 2 threads, 2 cores": ([()], 2),
    "2 ranks of 1 thread, a core each": (CORES[:2], 1),
}
Lines = list[str]
Run = Callable[..., list[dict[str, Any]]]


def saves(run: Run, quick: bool) -> Lines:
    lines: Lines = []
    for ranks in (2,) if quick else (1, 4):
        variants = [variant for variant in FORMATS if ranks > 1 or "ZeRO" not in variant]
        found = run("saves", "85k" if quick else "50m", 1 if quick else 5, variants, ranks=ranks)
        rows = []
        for name in variants:
            wall, cpu = (
                {key: [how(t) for t in zip(*(one[key + what][name] for one in found), strict=True)] for key in KEYS}
                for how, what in ((max, ""), (sum, " CPU"))
            )
            times = [cell for key in KEYS for cell in (shown(wall[key]), shown(cpu[key], spread=False))]
            rows.append([name, *times, f"{max(one['bytes'][name] for one in found) / 1e6:.2f}"])
        head = [f"{ranks} rank{'s' * (ranks > 1)}", "save, s", "its CPU s", "load, s", "its CPU s", "MB"]
        lines += table(head, rows)
    return lines


KEYS = ("save", "load")


def parts(run: Run, quick: bool) -> Lines:
    rows: dict[str, list[str]] = {}
    counts = (1,) if quick else (1, 4)
    for ranks in counts:
        found = run("parts", "85k" if quick else "50m", 1 if quick else 5, [], ranks=ranks)[0]
        for key, derived in (("save", _of_save), ("load", _of_load)):
            for part in (rounds := [derived(one) for one in found[key]])[0]:
                rows.setdefault(f"{key}: {part}", []).append(shown([one[part] for one in rounds]))
    return table(["part, s", *(f"rank 0 of {n}" for n in counts)], [[part, *cells] for part, cells in rows.items()])


def _of_save(t: dict[str, float]) -> dict[str, float]:
    inside = sum(t[part] for part in ("checksums", "write", "fsync"))
    return {
        "comparison of replicas": t["comparison of replicas"],
        "checksums of blocks": t["checksums"],
        "write": t["write"],
        "fsync": t["fsync"],
        "the rest of the file and the commit: copies into blocks, header, manifest, waiting for ranks": t["file"]
        + t["commit"]
        - inside,
        "the rest": t["whole"] - t["comparison of replicas"] - t["file"] - t["commit"],
        "all": t["whole"],
    }


def _of_load(t: dict[str, float]) -> dict[str, float]:
    return {
        "check of this rank's share of the files": t["check"],
        "read with checks of the values": t["read"],
        "a state at the start": t["init"],
        "the rest: values into the state, waiting for ranks": t["whole"] - t["check"] - t["read"] - t["init"],
        "all": t["whole"],
    }


def loop(run: Run, quick: bool) -> Lines:
    rows = []
    for name, (prefixes, threads) in list(LOOPS.items())[: 1 if quick else None]:
        found = run("loop", "85k" if quick else "25m", 2 if quick else 9, [str(threads)], prefixes=prefixes)
        wall = {
            mode: [max(t) for t in zip(*(r["wall"][mode] for r in found), strict=True)] for mode in found[0]["wall"]
        }
        gigabytes, saved = max(r["bytes"] for r in found) / 1e9, found[0]["saves"]
        step = f"{statistics.median(wall['none']) / found[0]['steps'] * 1e3:.0f}"
        for mode in ("none again", "background", "foreground"):
            lost = [(t - base) / saved * 1e3 for t, base in zip(wall[mode], wall["none"], strict=True)]
            call = [t * 1e3 for r in found for t in r["call"].get(mode, [])]
            per_gb = shown([t / gigabytes for t in lost], "0f")
            cells = [shown(lost, "0f"), per_gb, shown(call, "0f") if call else ""]
            rows.append([name, step, f"{gigabytes:.3f}", "no save (control)" if mode == "none again" else mode, *cells])
    head = ["", "a step, ms", "GB per rank", "save", "lost per save, ms", "lost per GB of a rank, ms", "the call, ms"]
    return table(head, rows)


def small(run: Run, quick: bool) -> Lines:
    counts = ("200", "10") if quick else ("20000", "150")
    found = run("small", "none", 2 if quick else 10, counts)[0]
    rows = [
        [f"{int(count):,}", *(shown([t * 1e3 for t in found[key][count]], "1f") for key in SMALL)] for count in counts
    ]
    return table(["parameters", *SMALL.values()], rows)


SMALL = {
    "first": "the first call, ms",
    "call": "a call, ms",
    "durable": "until it is durable, ms",
    "step": "a step, ms",
}


def damage(run: Run, quick: bool) -> Lines:
    found, rows = run("damage", "85k", 8 if quick else 200, DAMAGED)[0], []
    for variant in DAMAGED:
        for kind, text in (("bit", "a bit flipped"), ("page", "4 KiB of zeros"), ("cut", "the end cut off")):
            rows.append([variant, text, *(str(found[variant][kind][key]) for key in ("refused", "wrong", "right"))])
    head = ["", "damage", "refused", "wrong values in silence", "the right values"]
    return table(head, rows)


def shown(values: Sequence[float], form: str = "2f", spread: bool = True) -> str:
    low, middle, high = (f"{x:.{form}}" for x in (min(values), statistics.median(values), max(values)))
    return f"{middle} ({low} to {high})" if spread else middle


MEASURES: dict[str, tuple[Callable[[Run, bool], Lines], str, str]] = {
    "saves": (
        saves,
        "Save and load",
        "A transformer of 50.4 million float32 parameters in 149 tensors with AdamW's moments, equal on all ranks. A save lasts until "
        "all bytes, and the folder, are on the disk; a load reads files that the system has in memory. Seconds of the slowest rank; CPU "
        "seconds are the sum over ranks. Five rounds of variants in shuffled order. `torch.save` is called by rank 0, with fsync of file "
        "and folder; `sha256`: of the file, beside it, computed again by each load. A load of fjoin checks every byte, and makes a new "
        "state; the others load into the module and the optimizer that are there.",
    ),
    "parts": (
        parts,
        "Where fjoin's time goes",
        "The same state, the first row of each table above, in other processes, so the sums are not those above.",
    ),
    "loop": (
        loop,
        "What training loses",
        "Blocks of 24 steps of an MLP with 25 million parameters, AdamW, a batch of 32, with 2 saves or none; a block ends when its last "
        "save is durable. Lost: the wall time of a block less that of the block without saves in the same round, per save. Nine rounds "
        "in shuffled order. GB are those of the rank's own file: two ranks write half of the state each.",
    ),
    "small": (
        small,
        "Many small parameters",
        "400,000 parameters in many or few tensors of equal size, AdamW, one rank, background=True: ten saves after the first, each "
        "after a step.",
    ),
    "damage": (
        damage,
        "Damage",
        "A model of 1 MB with its moments, saved by one rank; places drawn evenly over all bytes of all files, a new one for each load.",
    ),
}


def machine(folder: Path) -> str:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    kind = output("df", "--output=fstype", str(folder)).split()[-1]
    return f"{len(CORES)} cores ({platform.machine()}, {platform.system()}), {memory:.0f} GiB, files on {kind}"


def output(*command: str) -> str:
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout.strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="tiny models, few rounds")
    parser.add_argument("--only", nargs="+", choices=MEASURES, default=list(MEASURES), help="some measures")
    parser.add_argument("--out", type=Path, help="where to write the page; RESULTS_CHECKPOINTS.md after a whole run")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="where to write checkpoints")
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    if args.quick:
        os.environ["QUIET_S"] = "0"

    def run(what: str, model: str, count: int, rest: Sequence[str], ranks: int = 1, prefixes: Any = ()) -> Any:
        prefixes = prefixes or [()] * ranks
        folder = tempfile.mkdtemp(dir=args.folder)
        try:
            places: Any = {"prefixes": prefixes, "interfaces": ("lo",) * len(prefixes), "script": "checkpoint_rank.py"}
            return launch(what, model, count, [folder, *rest], timeout_s=7200, **places)
        finally:
            shutil.rmtree(folder)

    commit = output("git", "-C", str(Path(fjoin.__file__).parent), "rev-parse", "--short", "HEAD")
    command = " ".join(["python benchmarks/checkpoints.py", *sys.argv[1:]])
    versions = f"fjoin {version('fjoin')} at {commit}, torch {version('torch')}, Python {platform.python_version()}"
    lines = [
        "# Checkpoints: time, bytes, damage",
        "",
        f"{datetime.date.today().isoformat()}, `{command}`, {versions}, {machine(args.folder)}.",
        "",
        "One thread per rank where nothing else is said. Medians (least to largest). Other programs ran on the machine at times: a "
        "measurement begins when the cores are idle, or after ten seconds.",
        "",
    ]
    for name in args.only:
        start = time.monotonic()
        measure, title, about = MEASURES[name]
        lines += [f"## {title}", "", f"`--only {name}`. {about}", "", *measure(run, args.quick)]
        print(f"{name}: {time.monotonic() - start:.0f} s", file=sys.stderr, flush=True)
    whole = not args.quick and args.only == list(MEASURES)
    out = args.out or (HERE / "RESULTS_CHECKPOINTS.md" if whole else None)
    before = out.read_text() if out and out.exists() else ""
    text = "\n".join([*lines, NOTES, "", before.partition(NOTES)[2].strip() or "(to be written)", ""])
    print(text)
    if out:
        out.write_text(text)


if __name__ == "__main__":
    main()
