"""The place of this process among those that a launcher has started: torchrun, Slurm's srun, or mpirun of Open MPI or MPICH."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import NamedTuple


class Launch(NamedTuple):
    """What a launcher says of this process."""

    rank: int
    size: int
    local_rank: int  # among the processes on this host
    local_size: int


class _Launcher(NamedTuple):
    """A launcher, and the names of its variables."""

    name: str
    rank: str
    size: str
    local_rank: str
    local_size: str


_TORCHRUN = _Launcher("torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
# In the order in which they are looked for: an mpirun inside a Slurm job sets both.
_LAUNCHERS = (
    _Launcher(
        "Open MPI's mpirun",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    _Launcher("mpiexec", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    _Launcher("Slurm's srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"),
)
# Numbers of a process in variables that do not say how many processes there are, or of launchers that nobody reads here.
_OTHERS = ("LOCAL_RANK", "MV2_COMM_WORLD_RANK", "FLUX_TASK_RANK", "JSM_NAMESPACE_RANK", "PALS_RANKID", "PMIX_RANK")
_REMEDY = "set RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT, or start the program by torchrun"


def read_launch(environ: Mapping[str, str]) -> Launch | None:
    """The place of this process, from the variables of its launcher; None for a process that runs alone.

    torchrun's variables come first, and a program may set them itself.

    Raises:
        ValueError: some of a launcher's variables are missing; a launcher has started several processes, and nothing says
            where they meet; a variable is no number, or out of range.
    """
    if "RANK" in environ or environ.get("WORLD_SIZE", "1") != "1":
        return _place(environ, _TORCHRUN)
    for of in _LAUNCHERS:
        if _number(environ, of.size, "1") <= 1:
            continue
        launch = _place(environ, of)
        lacks = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in environ]
        if lacks:
            raise ValueError(
                f"{of.name} has started this process as {launch.rank} of {launch.size}, but {' and '.join(lacks)} are not set, so "
                f"that the processes do not know where to meet; set MASTER_ADDR to the host of process 0 and MASTER_PORT to a free "
                f"port there, the same for all, or start the program by torchrun"
            )
        return launch
    if any(of.rank in environ and environ.get(of.size) == "1" for of in _LAUNCHERS):
        return None  # what else is set is of a launcher around that one
    for name in (*(of.rank for of in _LAUNCHERS), *_OTHERS):
        if (rank := _number(environ, name, "0")) > 0:
            raise ValueError(
                f"{name}={rank} is set, but not the number of all processes, so this process would train alone; {_REMEDY}"
            )
    if _number(environ, "SLURM_NTASKS", "1") > 1 and environ.get("SLURM_PROCID") == "0":
        warnings.warn(
            f"this process runs alone, though its Slurm job has {environ['SLURM_NTASKS']} tasks; start it by srun or torchrun to train "
            f"on all of them, or set RANK=0 and WORLD_SIZE=1 to say that it is meant to",
            stacklevel=4,
        )
    return None


def _number(environ: Mapping[str, str], name: str, default: str = "") -> int:
    text = environ.get(name) or default
    try:
        return int(text.split("(")[0].split(",")[0])  # Slurm writes 4(x2) for four on each of two hosts
    except ValueError:
        raise ValueError(f"the environment variable {name} must be a whole number, got {text!r}; {_REMEDY}") from None


def _place(environ: Mapping[str, str], of: _Launcher) -> Launch:
    rank, size = _number(environ, of.rank), _number(environ, of.size)
    if not 0 <= rank < size:
        raise ValueError(f"{of.rank}={rank} and {of.size}={size}: the rank must be from 0 to {size - 1}")
    return Launch(rank, size, _number(environ, of.local_rank, "0"), _number(environ, of.local_size, "1"))
