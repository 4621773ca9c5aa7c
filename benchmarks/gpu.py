"""Checks and timings on one GPU: ranks that share it pass for ranks of several hosts.

    python benchmarks/gpu.py CHECK [--world N] [--device cuda] [--steps N] [--out FILE]

CHECK is one of alive, sync, race (gpu_checks.py),
fail, first, late, two (gpu_failures.py), bench, launches, graph (gpu_speed.py).
Each ends by itself within --limit seconds, with an error if it has found something wrong. `docs/gpu.md` has what was seen.
"""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import sys
import time

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:0] = [os.path.dirname(HERE), HERE]
FILES = {
    "gpu_checks": ("alive", "sync", "race"),
    "gpu_failures": ("fail", "first", "late", "two"),
    "gpu_speed": ("bench", "launches", "graph"),
}


def run_ranks(args: argparse.Namespace) -> int:
    """Start the ranks, print when each ends, and kill those that outlast the limit."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    start, ranks = time.monotonic(), []
    for rank in range(args.world):
        env = {
            **os.environ,
            "RANK": str(rank),
            "WORLD_SIZE": str(args.world),
            "LOCAL_RANK": "0",
            "LOCAL_WORLD_SIZE": "1",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "NCCL_HOSTID": f"host{rank}",  # NCCL refuses two ranks of one host on one GPU
            "NCCL_SOCKET_IFNAME": "lo",
            "GLOO_SOCKET_IFNAME": "lo",
            "NCCL_NVLS_ENABLE": "0",
            "GPU_CHECK_RANK": "1",
        }
        ranks.append(subprocess.Popen([sys.executable, os.path.abspath(__file__), *sys.argv[1:]], env=env))
    codes: list[int | None] = [None] * args.world
    while None in codes and time.monotonic() - start < args.limit:
        for rank, process in enumerate(ranks):
            if codes[rank] is None and (code := process.poll()) is not None:
                codes[rank] = code
                print(
                    f"== {args.check}: rank {rank} ended with {code} after {time.monotonic() - start:.1f} s", flush=True
                )
        if args.check == "late" and codes[0] is not None and codes[1] is None:  # this rank sleeps, as planned
            ranks[1].kill()
            ranks[1].wait()
            codes[1] = 0
        time.sleep(0.05)
    for rank, process in enumerate(ranks):
        if codes[rank] is None:
            print(f"== {args.check}: rank {rank} still ran after {args.limit} s and was killed: a HANG", flush=True)
            process.kill()
    return 0 if all(code == 0 for code in codes) else 1


def run_rank(args: argparse.Namespace) -> None:
    import importlib

    import torch

    import fjoin

    torch.manual_seed(0)
    mesh = fjoin.mesh({"data": -1}, timeout_s=args.timeout)
    if mesh.rank == 0:
        cuda = torch.cuda.is_available()
        card = [torch.cuda.get_device_name(), "nccl", torch.cuda.nccl.version()] if cuda else []
        print(args.check, "torch", torch.__version__, "ranks", mesh.size, *card, flush=True)
    file = next(file for file, checks in FILES.items() if args.check in checks)
    getattr(importlib.import_module(file), args.check)(args, mesh)
    if found := importlib.import_module("gpu_checks").WRONG:
        sys.exit(f"{args.check}: {found[0].strip()}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("check", choices=[check for checks in FILES.values() for check in checks])
    parser.add_argument("--world", type=int, default=1)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--timeout", type=float, default=60.0, help="of the mesh, in seconds")
    parser.add_argument("--limit", type=float, default=120.0, help="after which ranks are killed, in seconds")
    parser.add_argument("--after", type=float, default=0.0, help="how long a rank lives on after a failure, in seconds")
    parser.add_argument(
        "--rows", default="", help="of bench and launches, without the commas in their names: 'ddp views,donate'"
    )
    parser.add_argument("--out")
    args = parser.parse_args()
    if "GPU_CHECK_RANK" in os.environ:
        run_rank(args)
    else:
        sys.exit(run_ranks(args))
