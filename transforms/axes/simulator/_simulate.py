"""Run one rank's function on N simulated ranks in this process."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from ..._check import axis_sizes
from ._lockstep import lockstep

MOST = 4096  # a rank is a thread


def simulate(function: Callable[..., Any], axes: Mapping[str, int], *args: Sequence[Any]) -> list[Any]:
    """Runs `function` on every rank of the given axes, without processes.

    Ranks take turns, switching at collectives: any Python, in-place operations, a stream of random numbers per rank. The
    results equal those of gloo with ordered reductions to the bit. A collective that the other ranks do not call raises,
    it does not hang.

    Args:
        function: The function that every rank runs; it may call collectives over `axes`.
        axes: Axis name -> number of ranks, the slowest varying first; at most 4096 ranks in all.
        args: One sequence for each argument of `function`, with one value per rank.

    Returns:
        The results of `function`, in rank order.

    Raises:
        ValueError: no axis, a size that is no whole number from 1, too many ranks, or an argument without one value per
            rank.
        TypeError: no function, no mapping of axes, or an argument that is no sequence.
        CollectiveMismatch: the ranks' collectives do not fit together.

    >>> from fjoin import transforms as tx
    >>> simulate(lambda x: tx.pmean(x, "data"), {"data": 4}, [0.0, 1.0, 2.0, 3.0])
    [tensor(1.5000), tensor(1.5000), tensor(1.5000), tensor(1.5000)]
    """
    if not callable(function):
        raise TypeError(f"simulate runs a function, got {function!r}")
    n = math.prod(axis_sizes(axes, MOST).values())
    for i, arg in enumerate(args):
        if not hasattr(arg, "__len__") or (isinstance(arg, Tensor) and not arg.dim()):
            raise TypeError(f"argument {i} must be a sequence with one value per rank, got {arg!r}")
        if len(arg) != n:
            raise ValueError(f"argument {i} has {len(arg)} values for {n} ranks; pass one value per rank")
    rows = [tuple(arg[rank] for arg in args) for rank in range(n)]
    return lockstep(function, dict(axes), rows)
