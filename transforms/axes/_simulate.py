"""Run one rank's function on N simulated ranks in this process."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from ._lockstep import lockstep
from ._vmapped import vmapped


def simulate(
    function: Callable[..., Any],
    axes: Mapping[str, int],
    *args: Sequence[Any],
    engine: Literal["lockstep", "vmap"] = "lockstep",
) -> list[Any]:
    """Run `function` on every rank of some axes, without processes.

    Two engines run the same code:

        lockstep  ranks take turns, switching at collectives: any Python, in-place operations, a
                  stream of random numbers per rank; equal to gloo with ordered reductions to the
                  bit. A collective that the other ranks do not call raises, it does not hang.
        vmap      all ranks at once, for hundreds of them: no control flow on a rank's own values
                  (on results of psum it works), no in-place writes into unbatched tensors. Equal
                  to lockstep within 1e-6 relative in float32 and 1e-12 in float64.

    Args:
        function: What one rank runs; it may call collectives over `axes`.
        axes: Axis name -> number of ranks, the slowest varying first.
        args: For each argument of `function`, one value per rank.
        engine: "lockstep" or "vmap".

    Returns:
        What `function` returned on each rank, in rank order.

    Raises:
        ValueError: no axis, a size below 1, or an argument without one value per rank.
        CollectiveMismatch: the ranks' collectives do not fit together.
        NotVmappable: a transform that needs lockstep ran under vmap.

    >>> from fjoin import transforms as tx
    >>> simulate(lambda x: tx.pmean(x, "data"), {"data": 4}, [0.0, 1.0, 2.0, 3.0], engine="vmap")
    [tensor(1.5000), tensor(1.5000), tensor(1.5000), tensor(1.5000)]
    """
    if not axes:
        raise ValueError("axes is empty; pass at least one, for example {'data': 4}")
    for name, size in axes.items():
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ValueError(f"axis {name!r} must have a whole number of ranks, at least 1, got {size!r}")
    n = math.prod(axes.values())
    for i, arg in enumerate(args):
        if len(arg) != n:
            raise ValueError(f"argument {i} has {len(arg)} values for {n} ranks; pass one value per rank")
    rows = [tuple(arg[rank] for arg in args) for rank in range(n)]
    if engine == "lockstep":
        return lockstep(function, dict(axes), rows)
    if engine == "vmap":
        return vmapped(function, dict(axes), rows)
    raise ValueError(f"engine must be 'lockstep' or 'vmap', got {engine!r}")
