"""A program that ends without taking its process groups down."""

from __future__ import annotations

import os
import pathlib
import socket
import subprocess
import sys

PROGRAM = """
import atexit, os
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
import torch
import torch.distributed as dist
import fjoin
from fjoin import transforms as tx


@atexit.register  # before fjoin's own, so that it runs after it
def look() -> None:
    line = f"initialized: {dist.is_initialized()} axis: {step.run.mesh.axes['data'].group}\\n"
    os.write(1, line.encode())


step = fjoin.train_step(lambda p, b: (p["w"] * b).sum(), tx.fuse(tx.mean("data"), tx.adamw(0.1)))
state = step.init({"w": torch.ones(1000)})
for batch in step.join([torch.ones(1000)] * 3):
    state, _ = step(state, batch)
assert dist.is_initialized()
"""


def test_groups_are_taken_down_when_the_program_ends(tmp_path: pathlib.Path) -> None:
    """Otherwise their threads can abort the process: "terminate called without an active exception"."""
    file = tmp_path / "program.py"
    file.write_text(PROGRAM)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        meet = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1]), "WORLD_SIZE": "2"}
    started = [
        subprocess.Popen(
            [sys.executable, str(file)], env={**os.environ, **meet, "RANK": rank, "LOCAL_RANK": rank}, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )
        for rank in ("0", "1")
    ]  # fmt: skip
    for process in started:
        out, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors
        assert out == "initialized: False axis: None\n"
