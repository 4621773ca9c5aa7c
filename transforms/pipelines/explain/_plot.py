"""A picture of the bytes that a pipeline sends on more and more ranks."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

RANKS = (2, 4, 8, 16, 32, 64, 128, 256, 512)


def plot(
    explained: Callable[[Mapping[str, int]], Any],
    axes: Mapping[str, int],
    path: str | os.PathLike[str],
    ranks: Sequence[int],
    axis: str | None,
) -> None:
    """Save the picture; see `Explanation.plot`.

    Args:
        explained: The explanation on other axes.
        axes: Axis name -> number of ranks.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("plot needs matplotlib: pip install matplotlib") from error
    axis = next(iter(axes)) if axis is None else axis
    if axis not in axes:
        raise ValueError(f"plot: axis={axis!r} is none of {list(axes)}")
    found = [explained({**axes, axis: count}) for count in ranks]
    stages = list(dict.fromkeys(row.stage for one in found for row in one.settled if row.messages))
    figure = Figure(figsize=(7.0, 4.0), layout="constrained")
    drawing = figure.add_subplot()
    bottom = [0.0] * len(found)
    for stage in stages:
        sent = [
            sum(m.sent_bytes for row in one.settled if row.stage == stage for m in row.messages) / 1e6 for one in found
        ]
        drawing.bar(
            [str(count) for count in ranks], sent, bottom=bottom, label=stage if len(stage) < 60 else f"{stage[:57]}..."
        )
        bottom = [a + b for a, b in zip(bottom, sent, strict=True)]
    others = ", ".join(f"{size} of {name}" for name, size in axes.items() if name != axis)
    drawing.set(
        xlabel=f"ranks of {axis}" + (f", with {others}" if others else ""), ylabel="MB that a rank sends in a step"
    )
    figure.legend(loc="outside lower center", fontsize="small")
    figure.savefig(path, dpi=150)
