"""The proof on a machine with a GPU: five parts, each with a time limit, whose results go into a page.

    python benchmarks/gpu_report.py [--parts basics,tests,failures,speed,example] [--page docs/gpu_report.md] [--device cuda]
    python benchmarks/gpu_report.py --parts short         in eight minutes: what breaks first, then the speed

It takes at most 45 minutes, the sum of the limits. The section of a part is written anew when one of its checks ends, so a run that is
cut short leaves those before.
With `--device cpu` it runs as far as a machine without a GPU can, for a test of this script.
"""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
GPU = "python benchmarks/gpu.py"
# The mesh's time-out, and how long a rank lives on, end well before the ranks are killed; in `two` a rank that ends early ends messages.
FAILS = "--world 2 --timeout 15 --after 70 --limit 150"
PYTEST = "python -m pytest -q -m nccl --long -p no:cacheprovider"


ROWS = "--rows 'ddp views,fjoin 25 MiB,registered,donate,clip,int8 fed back'"


class Check(NamedTuple):
    command: str
    expected: str
    limit_s: float


SHORT = [
    Check(f"{GPU} alive --world 2 --limit 40", "two ranks on one card: collectives of all kinds and dtypes", 45),
    Check(f"{GPU} race --world 2 --steps 5 --limit 80", "the same bits under delays and overwritten memory", 85),
    Check(f"{GPU} sync --world 2 --limit 60", "no step waits for the device", 65),
    Check(f"{GPU} bench --steps 10 --limit 100 {ROWS}", "host time under DDP's: train_step and registered", 105),
    Check(
        f"{GPU} launches --limit 50 {ROWS}", "110M: at most 114 launches beyond those of DDP's forward and backward", 55
    ),
    Check("python -m pytest -q -x -m nccl -p no:cacheprovider tests/devices/test_steps_on_gpus.py", "all pass", 60),
    Check(
        f"{GPU} fail --world 2 --timeout 10 --after 5 --limit 30 & {GPU} two --world 2 --timeout 10 --after 5 --limit 30; "
        "two=$?; wait $! && exit $two",
        "typed errors; each state is right or torn; both end",
        35,
    ),
    Check(f"TORCH_CUDA_SANITIZER=1 {GPU} race --steps 2 --limit 25", "no report", 30),
]
PARTS: dict[str, tuple[str, list[Check]]] = {
    "basics": (
        "Collectives, waits and bits",
        [
            Check(f"{GPU} alive", "collectives of all kinds and dtypes", 60),
            Check(f"{GPU} alive --world 2", "the same on two ranks", 90),
            Check(f"{GPU} sync", "no step waits for the device", 90),
            Check(f"{GPU} sync --world 2", "the same on two ranks", 120),
            Check(f"{GPU} race --world 2", "the same bits under delays and overwritten memory", 120),
            Check(f"TORCH_CUDA_SANITIZER=1 {GPU} race --steps 3", "no report", 120),
        ],
    ),
    "tests": (
        "Tests",
        [
            Check(f"{PYTEST} tests/devices/test_steps_on_gpus.py", "all pass", 180),
            Check(f"{PYTEST} tests/devices/test_modules_on_gpus.py", "all pass", 150),
            Check(f"{PYTEST} tests/reducer tests/optim tests/checkpoint", "all pass", 180),
            Check(f"{PYTEST.replace('-m nccl ', '')} tests/transforms/remat/test_offload.py", "all pass", 90),
        ],
    ),
    "failures": (
        "Failures",
        [
            Check(f"{GPU} first {FAILS}", "a typed error on both", 160),
            Check(f"{GPU} fail {FAILS}", "a typed error; each state is right or torn", 160),
            Check(f"{GPU} late {FAILS}", "CollectiveTimeout; right or torn; the process lives", 160),
            Check(f"{GPU} two {FAILS}", "a mesh of two communicators is taken down", 160),
        ],
    ),
    "speed": (
        "Speed",
        [
            Check(f"{GPU} bench --limit 280", "a table", 300),
            Check(f"{GPU} launches --limit 100", "at most 200 launches beyond those of forward and backward", 120),
            Check(f"{GPU} graph --limit 80", "a step as a graph", 100),
        ],
    ),
    "short": ("Eight minutes", SHORT),
    "example": (
        "The demo",
        [
            Check(
                "python -m torch.distributed.run --standalone --nproc-per-node 1 examples/uneven_text.py",
                "all checks",
                200,
            )
        ],
    ),
}


def machine(device: str) -> str:
    """One line: the date, the commit, the device and the versions."""
    script = (
        "import torch; cuda = torch.cuda.is_available();"
        "print(torch.cuda.get_device_name() if cuda else 'no GPU', '| torch', torch.__version__, '| NCCL',"
        " '.'.join(map(str, torch.cuda.nccl.version())) if cuda else 'none')"
    )
    card = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True).stdout.strip()
    commit = subprocess.run("git rev-parse --short HEAD", shell=True, cwd=ROOT, capture_output=True, text=True).stdout
    today = datetime.date.today().isoformat()
    return f"{today} | commit {commit.strip() or 'unknown'} | {card} | Python {platform.python_version()} | device {device}"


def run(check: Check, device: str) -> tuple[str, float, str]:
    """How a check ends, its seconds, and the end of its output. What it has started ends with it."""
    command = check.command.replace("python ", f"{sys.executable} ")
    command = command.replace("benchmarks/gpu.py", f"benchmarks/gpu.py --device {device}")
    start, options = time.monotonic(), {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    process: Any = subprocess.Popen(command, shell=True, cwd=ROOT, start_new_session=True, **options)  # type: ignore[call-overload]
    try:
        text, _ = process.communicate(timeout=check.limit_s)
        ended = "passed" if process.returncode == 0 else f"**failed**, exit {process.returncode}"
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # its ranks too, which hold its output open
        text, _ = process.communicate()
        ended = f"**stopped** after {check.limit_s:g} s"
    lines = [line[:200] for line in text.splitlines() if line.strip() and "frame #" not in line]
    return ended, time.monotonic() - start, "\n".join(lines[-30:])


def section(name: str, device: str, page: Path) -> bool:
    """Run a part and write its section after each check; returns whether all passed."""
    title, checks = PARTS[name]
    rows, outputs, fine = [], [], True
    for check in checks:
        print(f"{name}: {check.command}", flush=True)
        ended, seconds, text = run(check, device)
        fine = fine and ended == "passed"
        print(f"    {ended} after {seconds:.0f} s", flush=True)
        rows.append(f"| `{check.command}` | {check.expected} | {ended} | {seconds:.0f} |")
        outputs.append(f"`{check.command}`\n\n```text\n{text}\n```\n")
        table = "| command | expected | seen | s |\n|---|---|---|---|\n" + "\n".join(rows)
        write(page, name, f"## {title}\n\n{machine(device)}\n\n{table}\n\n" + "\n".join(outputs))
    return fine


def write(page: Path, name: str, text: str) -> None:
    """Put a part into the page, in the place of its last run."""
    whole = (
        page.read_text() if page.exists() else "# What a machine with a GPU has shown\n\n`make gpu` writes this page.\n"
    )
    begin, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->\n"
    block = f"{begin}\n{text.rstrip()}\n\n{end}"
    found = re.search(re.escape(begin) + ".*?" + re.escape(end), whole, re.DOTALL)
    page.write_text(whole.replace(found[0], block) if found else f"{whole.rstrip()}\n\n{block}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--parts", default=",".join(name for name in PARTS if name != "short"))
    parser.add_argument("--page", type=Path, default=ROOT / "docs" / "gpu_report.md")
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args()
    unknown = set(args.parts.split(",")) - PARTS.keys()
    if unknown:
        parser.error(f"no such parts: {sorted(unknown)}; there are {list(PARTS)}")
    if (
        args.device == "cuda"
        and subprocess.run(
            [sys.executable, "-c", "import torch; raise SystemExit(not torch.cuda.is_available())"]
        ).returncode
    ):
        parser.error(
            "this machine has no CUDA device, and tests that need one would be skipped and pass; or pass --device cpu"
        )
    failed = []
    for name in args.parts.split(","):
        if not section(name, args.device, args.page):
            failed.append(name)
    sys.exit(f"something is wrong in: {', '.join(failed)}; see {args.page}" if failed else 0)


if __name__ == "__main__":
    main()
