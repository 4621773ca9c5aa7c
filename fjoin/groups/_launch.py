"""The place of this process among those that a launcher has started: torchrun, Slurm's srun, or Open MPI's mpirun."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import NamedTuple


class Launch(NamedTuple):
    """What a launcher says of this process."""

    rank: int
    size: int
    local_rank: int  # among the processes on this host
    local_size: int


_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
# The same four numbers of other launchers, in the order in which they are looked for: an mpirun inside a Slurm job sets
# both.
_LAUNCHERS = {
    "Open MPI's mpirun": tuple(f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")),
    "Slurm's srun": ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"),
}
# Numbers of a process in variables that do not say how many processes there are, or of launchers that nobody reads
# here.
_OTHERS = ("LOCAL_RANK", "PMI_RANK", "FLUX_TASK_RANK", "PMIX_RANK")
_REMEDY = "set RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT, or start the program by torchrun"


def read_launch(environ: Mapping[str, str]) -> Launch | None:
    """The place of this process, from the variables of its launcher; None for a process that runs alone.

    torchrun's variables come first, and a program may set them itself.

    Raises:
        ValueError: some of a launcher's variables are missing; a launcher has started several processes, and nothing
            says where they meet; a variable is no number, or out of range.
    """
    if "RANK" in environ or environ.get("WORLD_SIZE", "1") != "1":
        return _place(environ, _TORCHRUN)
    for launcher, names in _LAUNCHERS.items():
        if _number(environ, names[1], "1") <= 1:
            continue
        launch = _place(environ, names)
        lacks = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in environ]
        if lacks:
            started = f"{launcher} has started this process as {launch.rank} of {launch.size}"
            unset = f"{' and '.join(lacks)} are not set, so that the processes do not know where to meet"
            remedy = "set MASTER_ADDR to the host of process 0 and MASTER_PORT to a free port there, the same for all"
            raise ValueError(f"{started}, but {unset}; {remedy}, or start the program by torchrun")
        return launch
    if any(rank in environ and environ.get(size) == "1" for rank, size, *_ in _LAUNCHERS.values()):
        return None  # what else is set is of a launcher around that one
    for name in (*(names[0] for names in _LAUNCHERS.values()), *_OTHERS):
        if (rank := _number(environ, name, "0")) > 0:
            alone = "but not the number of all processes, so this process would train alone"
            raise ValueError(f"{name}={rank} is set, {alone}; {_REMEDY}")
    if _number(environ, "SLURM_NTASKS", "1") > 1 and environ.get("SLURM_PROCID") == "0":
        alone = f"this process runs alone, though its Slurm job has {environ['SLURM_NTASKS']} tasks"
        remedy = "start it by srun or torchrun to train on all of them"
        warnings.warn(f"{alone}; {remedy}, or set RANK=0 and WORLD_SIZE=1 to say that it is meant to", stacklevel=4)
    return None


def _number(environ: Mapping[str, str], name: str, default: str = "") -> int:
    text = environ.get(name) or default
    try:
        return int(text.split("(")[0].split(",")[0])  # Slurm writes 4(x2) for four on each of two hosts
    except ValueError:
        raise ValueError(f"the environment variable {name} must be a whole number, got {text!r}; {_REMEDY}") from None


def _place(environ: Mapping[str, str], names: Sequence[str]) -> Launch:
    rank, size = (_number(environ, name) for name in names[:2])
    if not 0 <= rank < size:
        raise ValueError(f"{names[0]}={rank} and {names[1]}={size}: the rank must be from 0 to {size - 1}")
    return Launch(rank, size, _number(environ, names[2], "0"), _number(environ, names[3], "1"))
