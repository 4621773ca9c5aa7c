"""Start one process per rank, on this machine or in network namespaces, and read their measurements."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


def launch(
    what: str,
    model: str,
    count: int,
    variants: Sequence[str],
    *,
    prefixes: Sequence[Sequence[str]] = ((), ()),
    interfaces: Sequence[str] = ("lo", "lo"),
    timeout_s: float = 1800,
    script: str = "step.py",
) -> list[dict[str, Any]]:
    """Run `step.py`, or another script, on as many ranks as there are prefixes.

    Args:
        what, model, count, variants: The arguments of the script; the path of its result comes before `variants`.
        prefixes: The words to put before each rank's command.
        interfaces: Each rank's network interface.
        timeout_s: The seconds after which the ranks are killed.
        script: A file in this folder.

    Returns:
        Each rank's result.
    """
    with tempfile.TemporaryDirectory() as folder:
        outs = [os.path.join(folder, str(rank)) for rank in range(len(prefixes))]
        ranks = []
        for rank in range(len(prefixes)):
            env = {
                **os.environ,
                "RANK": str(rank),
                "WORLD_SIZE": str(len(prefixes)),
                "STORE": os.path.join(folder, "store"),
                "GLOO_SOCKET_IFNAME": interfaces[rank],
                "OMP_NUM_THREADS": "1",
                "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false",  # one thread for jax too
                "TORCH_CPP_LOG_LEVEL": "ERROR",
            }
            command = [sys.executable, str(HERE / script), what, model, str(count), outs[rank], *variants]
            ranks.append(subprocess.Popen([*prefixes[rank], *command], env=env))
        wait(ranks, timeout_s)
        return [json.loads(Path(out).read_text()) for out in outs]


def wait(ranks: list[subprocess.Popen[bytes]], timeout_s: float) -> None:
    """Wait for all ranks; once one has failed the others would hang, so they are killed."""
    ended: queue.SimpleQueue[int] = queue.SimpleQueue()
    for rank in ranks:
        threading.Thread(target=lambda rank=rank: ended.put(rank.wait()), daemon=True).start()
    end = time.monotonic() + timeout_s
    try:
        for _ in ranks:
            if ended.get(timeout=max(0.0, end - time.monotonic())):
                break
    except queue.Empty:
        raise TimeoutError(f"the ranks did not end within {timeout_s:g} s") from None
    finally:
        codes = [rank.poll() for rank in ranks]
        for rank in ranks:
            if rank.poll() is None:
                rank.kill()
            rank.wait()
    if any(codes):
        raise RuntimeError(f"a rank failed; exit codes: {codes} (None: was killed after the other had failed)")


def join() -> None:
    """In a rank: the process group of all ranks."""
    import torch.distributed as dist

    store, rank, ranks = (os.environ[name] for name in ("STORE", "RANK", "WORLD_SIZE"))
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=int(rank), world_size=int(ranks))


def combine(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """A timed group as one result: the slower rank's wall time and the sum of all ranks' CPU times, per round."""
    first = ranks[0]
    return {
        **first,
        "ranks": len(ranks),
        "wall": {v: [max(t) for t in zip(*(r["wall"][v] for r in ranks), strict=True)] for v in first["wall"]},
        "cpu": {v: [sum(t) for t in zip(*(r["cpu"][v] for r in ranks), strict=True)] for v in first["cpu"]},
    }
