"""ZeRO: any pipeline with a sharded mean in the place of its mean."""

from __future__ import annotations

from typing import Any

from ..axes import names
from ..base import Transform, call_factory, check_transform, factory
from ..codecs import Codec
from ..combinators import chain
from ..optimizers import Optimizer
from ..reductions import mean, scatter_mean
from ._fuse import fuse
from ._pipeline import Pipeline


@factory
def zero(
    hook: Transform,
    optimizer: Optimizer,
    axis: str,
    *,
    after: Transform | None = None,
    on_state: Transform | None = None,
    gather_codec: Codec | None = None,
) -> Pipeline:
    """ZeRO, stage 1: the optimizer's state and its work are shared out among the ranks of an axis.

    `fuse` with a hook in which each `mean` over `axis` is a `scatter_mean`. A mean over several axes becomes a
    scatter_mean over `axis` and a mean over the others.

    Args:
        hook: A transform of the gradients that holds one `mean` over `axis`.
        optimizer: Any optimizer.
        axis: The axis over which to shard.
        after, on_state, gather_codec: As for `fuse`.

    Returns:
        A `Pipeline`: `fuse(scatter_mean(axis), optimizer)` for the hook `mean(axis)`, and so on.

    Raises:
        ValueError: `hook` holds no mean over `axis`; as `fuse`.
        TypeError: as `fuse`.

    Same as: torch's ZeroRedundancyOptimizer and DeepSpeed's stage 1.
    Source: Rajbhandari et al., ZeRO, arXiv:1910.02054.

    >>> from fjoin import transforms as tx
    >>> tx.zero(tx.chain(tx.mean("data"), tx.clip_by_global_norm(1.0)), tx.adamw(1e-3), "data").hook
    chain(scatter_mean('data'), clip_by_global_norm(1.0))
    """
    if not isinstance(axis, str):
        raise TypeError(f"zero takes the name of one axis, got {axis!r}")
    sharded = _sharded(check_transform(hook, "zero: hook"), axis)
    if not sharded.sharded_over:
        raise ValueError(f"zero: {hook!r} holds no mean over {axis!r}; write zero(mean({axis!r}), ...)")
    return fuse(sharded, optimizer, after, on_state, gather_codec)


def _sharded(part: Any, axis: str) -> Any:
    """The transform, with scatter_mean in the place of mean."""
    if isinstance(part, tuple):
        return tuple(_sharded(one, axis) for one in part)
    make = part.spec.factory if isinstance(part, Transform) else None
    if make is None:
        return part
    of = part.reduces
    if of is not None and of.fusable and not of.scatters and of.over is not None and axis in names(of.axis):
        rest = tuple(one for one in names(of.axis) if one != axis)
        found = scatter_mean(axis, of.over)
        return chain(found, mean(rest if len(rest) > 1 else rest[0], of.over)) if rest else found
    return call_factory(make, ((name, _sharded(value, axis)) for name, value in part.spec.args))
