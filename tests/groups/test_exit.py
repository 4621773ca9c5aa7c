"""Programs that end without taking their process groups down, or while one is made: no thread of these aborts them."""

from __future__ import annotations

import os
import pathlib
import socket
import subprocess
import sys
import time
from typing import Any

import pytest

TRAINED = """
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
# A thread still connects.
TIMED_OUT = """
import sys
import fjoin
try:
    fjoin.mesh({"data": -1}, timeout_s=1.0)
except fjoin.CollectiveTimeout:
    sys.exit(3)
"""
TAKEN = """
import sys
import fjoin
try:
    fjoin.mesh({"data": -1}, timeout_s=30.0)
except fjoin.TransportError as error:
    print(error)
    sys.exit(4)
"""


@pytest.mark.parametrize(
    ("program", "ranks", "listens", "out", "status"),
    [
        (TRAINED, "01", False, "initialized: False axis: None\n", 0),
        *(
            pytest.param(TIMED_OUT, rank, listens, "", 3, marks=pytest.mark.long)
            for rank, listens in ("00", "10", "11")
        ),
        (TAKEN, "0", True, "the port of 127.0.0.1:{port}, where the ranks meet, is taken by another program", 4),
    ],
)
def test_programs_end(tmp_path: pathlib.Path, program: str, ranks: str, listens: Any, out: str, status: int) -> None:
    """Otherwise with "terminate called without an active exception", or after half a minute."""
    file = tmp_path / "program.py"
    file.write_text(program)
    other = socket.socket()
    other.bind(("0.0.0.0", 0))
    port = str(other.getsockname()[1])
    meet = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2"}
    other.listen() if int(listens) else other.close()
    start = time.monotonic()
    started = [
        subprocess.Popen(
            [sys.executable, str(file)], env={**os.environ, **meet, "RANK": rank, "LOCAL_RANK": rank}, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )
        for rank in ranks
    ]  # fmt: skip
    for process in started:
        found, errors = process.communicate(timeout=120)
        assert process.returncode == status, errors
        assert time.monotonic() - start < 25, "in some 5 s, on a machine that is not busy"
        assert found == out if program is not TAKEN else found.startswith(out.format(port=port))
    other.close()
