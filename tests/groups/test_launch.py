"""Processes that several launchers start: each knows its place, or says why it does not; and how programs end."""

from __future__ import annotations

import os
import pathlib
import socket
import sys
import time
from typing import Any

import pytest
import torch

import fjoin
from fjoin.groups._launch import Launch, read_launch
from tests.helpers import raises_text
from tests.ranks import ends, programs

MEET = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
SRUN = {"SLURM_PROCID": "1", "SLURM_NTASKS": "4", "SLURM_STEP_NUM_TASKS": "2", "SLURM_LOCALID": "1"}
MPIRUN = {
    "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}  # fmt: skip
TORCHRUN = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
KNOWN: dict[str, tuple[dict[str, str], Launch | None]] = {
    "python": ({}, None), "torchrun": (TORCHRUN, Launch(3, 4, 1, 2)),
    "torchrun inside Slurm": ({**TORCHRUN, **SRUN}, Launch(3, 4, 1, 2)),
    "torchrun of one": ({"RANK": "0", "WORLD_SIZE": "1", **SRUN}, Launch(0, 1, 0, 1)),
    "a world of one without a rank": ({"WORLD_SIZE": "1"}, None),
    "srun": ({**SRUN, **MEET, "SLURM_STEP_TASKS_PER_NODE": "2(x2)"}, Launch(1, 2, 1, 2)),
    "srun of one": ({**SRUN, "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1", "SLURM_NTASKS": "1"}, None),
    "a batch script": ({"SLURM_PROCID": "0", "SLURM_NTASKS": "4"}, None),
    "an allocation without a task": ({"SLURM_NTASKS": "4", "SLURM_JOB_ID": "1"}, None),
    "mpirun": ({**MPIRUN, **MEET}, Launch(1, 2, 1, 2)),
    "mpirun inside Slurm": ({**MPIRUN, **MEET, **SRUN, "SLURM_PROCID": "0"}, Launch(1, 2, 1, 2)),
    "mpirun of one": ({**MPIRUN, "OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"}, None),
    "no local rank": ({"LOCAL_RANK": "-1"}, None), "a local rank of one": ({"LOCAL_RANK": "0"}, None),
}  # fmt: skip
REFUSED: dict[str, tuple[dict[str, str], tuple[str, ...]]] = {
    "a size without a rank": ({"WORLD_SIZE": "2"}, ("variable RANK must be", "got ''", "torchrun")),
    "a rank without a size": ({"RANK": "0"}, ("WORLD_SIZE must be", "got ''")),
    "srun without a place to meet": (SRUN, ("srun", "1 of 2", "MASTER_ADDR and MASTER_PORT")),
    "mpirun without a port": ({**MPIRUN, "MASTER_ADDR": "a"}, ("mpirun", "1 of 2", "MASTER_PORT are not")),
    "a rank of Open MPI alone": ({"OMPI_COMM_WORLD_RANK": "1"}, ("OMPI_COMM_WORLD_RANK=1", "not the number", "train alone")),
    "a size of Open MPI alone": ({"OMPI_COMM_WORLD_SIZE": "2"}, ("OMPI_COMM_WORLD_RANK must be", "got ''")),
    "mpiexec": ({"PMI_RANK": "1", **MEET}, ("PMI_RANK=1", "not the number")),
    "a rank of Slurm alone": ({"SLURM_PROCID": "1"}, ("SLURM_PROCID=1",)),
    "Flux": ({"FLUX_TASK_RANK": "1", "FLUX_JOB_SIZE": "2"}, ("FLUX_TASK_RANK=1", "torchrun")),
    "PMIx": ({"PMIX_RANK": "2"}, ("PMIX_RANK=2", "torchrun")),
    "a local rank alone": ({"LOCAL_RANK": "1", **MEET}, ("LOCAL_RANK=1", "not the number", "train alone")),
    "a size that is no number": ({**MPIRUN, "OMPI_COMM_WORLD_SIZE": "x"}, ("OMPI_COMM_WORLD_SIZE must be", "'x'")),
    "no number": ({"RANK": "a", "WORLD_SIZE": "2"}, ("RANK must be a whole number", "'a'")),
    "a rank beyond the size": ({"RANK": "2", "WORLD_SIZE": "2"}, ("RANK=2", "WORLD_SIZE=2")),
}  # fmt: skip


@pytest.mark.parametrize("name", KNOWN)
def test_rank_and_size_are_read_from_the_environment(name: str) -> None:
    environ, want = KNOWN[name]
    if name == "a batch script":
        with pytest.warns(UserWarning, match="4 tasks; start it by srun"):
            assert read_launch(environ) is want
    else:
        assert read_launch(environ) == want


@pytest.mark.parametrize("name", REFUSED)
def test_a_process_that_would_train_alone_raises(name: str) -> None:
    environ, parts = REFUSED[name]
    raises_text(ValueError, lambda: read_launch(environ), *parts)


def train(rank: int, launcher: str) -> tuple[int, int, list[float]]:
    for name in TORCHRUN.keys() & os.environ.keys():
        del os.environ[name]
    own = {"srun": {**SRUN, "SLURM_PROCID": str(rank)}, "mpirun": {**MPIRUN, "OMPI_COMM_WORLD_RANK": str(rank)}}
    os.environ.update(own[launcher])
    mesh = fjoin.mesh({"data": -1}, timeout_s=60)
    x = torch.ones(2) * (mesh.rank + 1)
    mesh.reduce_(x, ("data",)).wait()
    return mesh.rank, mesh.size, x.tolist()


@pytest.mark.parametrize("launcher", ["srun", "mpirun"])
def test_ranks_of_other_launchers_train_together(launcher: str) -> None:
    assert [end.value for end in ends(2, train, launcher)] == [(0, 2, [3.0, 3.0]), (1, 2, [3.0, 3.0])]


# -- programs that end without taking their process groups down, or while one is made: no thread of these aborts them --

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


# A program, its ranks, whether another one listens where they meet, its output and its exit status.
ENDS = [
    (TRAINED, "01", False, "initialized: False axis: None\n", 0),
    *(pytest.param(TIMED_OUT, rank, listens, "", 3, marks=pytest.mark.long) for rank, listens in ("00", "10", "11")),
    (TAKEN, "0", True, "the port of 127.0.0.1:{port}, where the ranks meet, is taken by another program", 4),
]


@pytest.mark.parametrize(("program", "ranks", "listens", "out", "status"), ENDS)
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
    for found, errors, ended in programs(
        [sys.executable, str(file)], [{**meet, "RANK": r, "LOCAL_RANK": r} for r in ranks]
    ):
        assert ended == status, errors
        assert found == out if program is not TAKEN else found.startswith(out.format(port=port))
    assert time.monotonic() - start < 25, "in some 5 s, on a machine that is not busy"
    other.close()
