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


class _Variables(NamedTuple):
    """The names of a launcher's variables."""

    launcher: str
    rank: str
    size: str
    local_rank: str
    local_size: str


# In the order in which they are looked for: an mpirun inside a Slurm job sets both.
_LAUNCHERS = (
    _Variables(
        "Open MPI's mpirun",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    _Variables("mpiexec", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    _Variables("Slurm's srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"),
)

# How launchers whose other variables nobody reads here call the number of a process.
_OTHERS = ("MV2_COMM_WORLD_RANK", "FLUX_TASK_RANK", "JSM_NAMESPACE_RANK", "PALS_RANKID", "PMIX_RANK")

_ALONE = (
    "so this process would train alone; set RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT, or start the program by "
    "torchrun"
)


def read_launch(environ: Mapping[str, str]) -> Launch | None:
    """The place of this process, from the variables of its launcher; None for a process that runs alone.

    torchrun's variables come first, and a program may set them itself.

    Raises:
        ValueError: some of torchrun's variables are missing; a launcher has started several processes, and nothing says
            where they meet; a variable is no number, or out of range.
    """
    own = [name for name in ("RANK", "WORLD_SIZE") if name in environ]
    if len(own) == 2:
        return _checked(environ, "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    if own and not (own == ["WORLD_SIZE"] and environ["WORLD_SIZE"] == "1"):
        missing = "RANK" if own == ["WORLD_SIZE"] else "WORLD_SIZE"
        raise ValueError(f"{own[0]}={environ[own[0]]} is set, but {missing} is not, {_ALONE}")
    local = [environ.get(name, "") for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE")]
    if not own and any(text.isdecimal() and int(text) > k for k, text in enumerate(local)):
        raise ValueError(
            f"LOCAL_RANK={environ.get('LOCAL_RANK', '')} and LOCAL_WORLD_SIZE={environ.get('LOCAL_WORLD_SIZE', '')}, but RANK and "
            f"WORLD_SIZE are not set, {_ALONE}"
        )
    for of in _LAUNCHERS:
        size = _number(environ, of.size, "1")
        if size <= 1:
            continue
        if of.rank not in environ:
            raise ValueError(f"{of.size}={size} is set, but {of.rank} is not, {_ALONE}")
        lacks = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in environ]
        if lacks:
            raise ValueError(
                f"{of.launcher} has started this process as {environ[of.rank]} of {environ[of.size]}, but {' and '.join(lacks)} are not "
                f"set, so that the processes do not know where to meet; set MASTER_ADDR to the host of process 0 and MASTER_PORT to a free "
                f"port there, the same for all, or start the program by torchrun"
            )
        return _checked(environ, *of[1:])
    if any(of.rank in environ and environ.get(of.size) == "1" for of in _LAUNCHERS):
        return None  # what else is set is of a launcher around that one
    for name in (*(of.rank for of in _LAUNCHERS), *_OTHERS):
        if (rank := _number(environ, name, "0")) > 0:
            raise ValueError(f"{name}={rank} is set, but not the number of all processes, {_ALONE}")
    if _number(environ, "SLURM_NTASKS", "1") > 1 and environ.get("SLURM_PROCID") == "0":
        warnings.warn(
            f"this process runs alone, though its Slurm job has {environ['SLURM_NTASKS']} tasks; start it by srun or torchrun to train "
            f"on all of them, or set RANK=0 and WORLD_SIZE=1 to say that it is meant to",
            stacklevel=3,
        )
    return None


def _number(environ: Mapping[str, str], name: str, default: str) -> int:
    text = environ.get(name) or default
    try:
        return int(text.split("(")[0].split(",")[0])  # Slurm writes 4(x2) for four on each of two hosts
    except ValueError:
        raise ValueError(f"the environment variable {name} must be a whole number, got {text!r}") from None


def _checked(environ: Mapping[str, str], rank: str, size: str, local_rank: str, local_size: str) -> Launch:
    named = ((rank, "0"), (size, "1"), (local_rank, "0"), (local_size, "1"))
    launch = Launch(*(_number(environ, name, default) for name, default in named))
    if not 0 <= launch.rank < launch.size:
        raise ValueError(f"{rank}={launch.rank} and {size}={launch.size}: the rank must be from 0 to {launch.size - 1}")
    return launch
