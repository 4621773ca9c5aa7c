"""PowerSGD: gradients that are matrices are sent as two thin factors."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import optree
import torch
from torch import Tensor

from .. import base
from ..axes import axis_size
from ..base import AxisName, Call, Count, Index, Needs, Over, Transform, Tree, checks, factory, record_words, trees
from ..codecs import refuse_derivative
from ..combinators import switch_after
from ._factors import draw, low_rank_mean
from ._mean import mean, ravel, split


class PowerSGDState(NamedTuple):
    q: dict[str, Tensor]  # path of a compressed leaf -> the Q that the next call starts from, (rank, columns)
    step: int  # calls so far, on the host


@factory
def power_sgd(
    axis: AxisName,
    rank: Count = 1,
    *,
    warmup_steps: Index = 0,
    min_compression_rate: float = 2.0,
    warm_start: bool = True,
    epsilon: float = 0.0,
    seed: int = 0,
    over: Over = "weight",
) -> Transform:
    """The weighted mean of all ranks' gradients, with matrices sent as two thin factors.

    With M_r = w_r g_r / sum of w, as a matrix of shape[0] x all other dimensions, and Q of `rank` columns, the same on
    all ranks:

        P = orthonormal(sum_r M_r Q),   Q = sum_r M_r^T P,   result = P Q^T

    The result is the mean projected onto the columns that M Q spans. The part orthogonal to them is lost, unless the
    transform is inside `error_feedback(power_sgd(...))`: there each rank keeps M_r - P Q_r^T and adds it to its next
    M_r, so that over all steps nothing is lost.

    One message carries P and the leaves that are not compressed; a second one carries Q. Without a compressed leaf
    there is no second message. All are sent in float32, or in float64 if a gradient is float64; inside `compress` they
    are encoded. On an axis of one rank nothing is sent and nothing is compressed.

    Args:
        axis: The axis, or a tuple of axes, to average over.
        rank: Columns of P and Q, at least 1; at most the rows and the columns of a matrix are used.
        warmup_steps: Calls at the beginning that run a plain `mean`; short for
            `switch_after(warmup_steps, mean(...), power_sgd(...))`.
        min_compression_rate: A matrix is compressed where (rows + columns) * rank * this < rows * columns. With at
            least 1, matrices with fewer rows or columns than `rank` are not compressed; below 1, such a matrix is sent
            with as many columns as it takes to lose nothing.
        warm_start: Start from the last call's Q; if False, from random numbers in every call.
        epsilon: Added to the norm by which each column of M Q is divided, in units of the mean.
        seed: Seed of the random numbers, which also depend on the path and, without warm start, on the step.
        over: The divisor; see `mean`.

    Returns:
        A `Transform` whose `update` returns a tree like `grads`, equal on all ranks with equal arithmetic.
        State: `PowerSGDState(q, step)`. A column of Q that has become 0 is drawn again. Where no rank
        has weight, or a matrix is not finite, its Q and its residual do not change.

    Raises:
        ValueError, TypeError: an argument is none of these; at `update` as `mean`.

    Same as: torch's powerSGD_hook, with use_error_feedback=False; inside `error_feedback`, with True.
    Source: Vogels et al., PowerSGD, arXiv:1905.13727, algorithms 1 and 2.

    >>> from fjoin import transforms as tx
    >>> hook = power_sgd("data", min_compression_rate=1.0)
    >>> def one_rank(v):
    ...     g = v * torch.ones(4, 3)
    ...     return hook.update(g, hook.init(g))[0].mean()
    >>> tx.simulate(one_rank, {"data": 2}, [1.0, 3.0])
    [tensor(2.), tensor(2.)]
    """
    return _power_sgd(False, axis, rank, warmup_steps, min_compression_rate, warm_start, epsilon, seed, over)


@factory
def batched_power_sgd(
    axis: AxisName,
    rank: Count = 1,
    *,
    warmup_steps: Index = 0,
    min_compression_rate: float = 2.0,
    warm_start: bool = True,
    epsilon: float = 0.0,
    seed: int = 0,
    over: Over = "weight",
) -> Transform:
    """`power_sgd` on one square matrix that concatenates all gradients of a call.

    The matrix has ceil(sqrt(elements)) rows and columns, padded with zeros at its end. This takes fewer and larger
    operations, and compresses vectors too. But gradients in this layout are seldom near a low rank, so much more is
    lost. A call whose matrix is too small to be compressed is a plain mean.

    Args, Raises: as `power_sgd`.

    Returns:
        A `Transform` whose `update` returns a tree like `grads`, equal on all ranks with equal arithmetic.
        State: `PowerSGDState`; in `q` all paths of a bucket have the bucket's Q. It fills the first columns of a matrix
        that is wide enough for all parameters, so the layout of buckets may change: each bucket starts from the Q of
        its first parameter.

    Same as: torch's batched_powerSGD_hook, which raises AssertionError in its first compressed pass.
    Source: Vogels et al., PowerSGD, arXiv:1905.13727.

    >>> from fjoin import transforms as tx
    >>> hook = batched_power_sgd("data", min_compression_rate=1.0)
    >>> def one_rank(v):
    ...     g = {"a": v * torch.ones(12), "b": v * torch.ones(4)}
    ...     return hook.update(g, hook.init(g))[0]["b"].round(decimals=3)
    >>> tx.simulate(one_rank, {"data": 2}, [1.0, 3.0])[0]
    tensor([2., 2., 2., 2.])
    """
    return _power_sgd(True, axis, rank, warmup_steps, min_compression_rate, warm_start, epsilon, seed, over)


def _power_sgd(
    batched: bool,
    axis: AxisName,
    rank: int,
    warmup_steps: int,
    min_compression_rate: float,
    warm_start: bool,
    epsilon: float,
    seed: int,
    over: Over,
) -> Transform:
    checks.whole_number("seed", seed)
    checks.positive("min_compression_rate", min_compression_rate)
    checks.positive("epsilon", epsilon, zero=True)
    if warmup_steps:
        make = batched_power_sgd if batched else power_sgd
        settings = dict(min_compression_rate=min_compression_rate, warm_start=warm_start, epsilon=epsilon, seed=seed)
        return switch_after(warmup_steps, mean(axis, over), make(axis, rank, **settings, over=over))  # type: ignore[arg-type]

    def shapes(leaves: Mapping[str, Tensor]) -> dict[str, tuple[int, int]]:
        """The shape of the Q of each matrix that is compressed, (rank, columns), by path; all leaves together are at
        "".
        """
        sizes = {p: (x.shape[0], x.numel() // x.shape[0]) for p, x in leaves.items() if x.dim() > 1 and x.numel()}
        if batched:
            count = sum(leaf.numel() for leaf in leaves.values())
            sizes = {"": (math.isqrt(count - 1) + 1,) * 2} if count else {}
        found = {}
        for path, (rows, columns) in sizes.items():
            own = min(rows, columns, rank)
            if (rows + columns) * own * min_compression_rate < rows * columns:
                found[path] = own, columns
        return found

    def drawn(path: str, shape: tuple[int, ...], step: int, leaves: Mapping[str, Tensor]) -> Tensor:
        like = leaves[path] if path in leaves else next(iter(leaves.values()))
        return draw(seed, path, step, shape[0], shape[1], like)

    def started(path: str, shape: tuple[int, int], state: PowerSGDState, leaves: Mapping[str, Tensor]) -> Tensor:
        """The Q of a matrix to start from."""
        q = state.q.get(next(iter(leaves)) if batched else path)
        if not warm_start or (batched and not _holds(q, shape)):
            return drawn(path, shape, state.step, leaves)
        if q is None or not (batched or q.shape == shape):
            raise ValueError(
                f"the gradient at {path!r} needs a Q of shape {shape}, but the state has "
                f"{'none' if q is None else tuple(q.shape)}; it is the state of other parameters or of another rank"
            )
        return q[: shape[0], : shape[1]]

    def init(params: Tree) -> PowerSGDState:
        leaves = trees.named_leaves(params)
        q = {path: drawn(path, shape, 0, leaves) for path, shape in shapes(leaves).items()} if warm_start else {}
        return PowerSGDState(dict.fromkeys(leaves, q[""]) if batched and q else q, 0)

    def update(grads: Tree, state: PowerSGDState, params: Tree, call: Call) -> tuple[Tree, PowerSGDState]:
        state = base.own_state(state, PowerSGDState, call)
        grads = optree.tree_map(torch.as_tensor, grads)
        leaves, memory = trees.named_leaves(grads), call.memory
        share = call.share(axis, over, trees.device_of(leaves.values()))
        if axis_size(axis) == 1:
            out = optree.tree_map(share.times, grads)
            return (share.where_any_live(out, grads) if call.persistent else out), state._replace(step=state.step + 1)
        checks.real(leaves, "power_sgd")
        if call.wire is not None:
            refuse_derivative(leaves.values(), "differentiate through the hook without its codec")
        errors = dict[str, Tensor]()
        if memory is not None:
            mine = {path: leaf for path, leaf in leaves.items() if path in memory.old}
            errors = dict(zip(mine, memory.of(mine), strict=True))
        q = {path: started(path, shape, state, leaves) for path, shape in shapes(leaves).items()}
        together = batched and bool(q)
        matrices, fed = leaves, errors
        if together:
            matrices, fed = _square(leaves), _square(errors) if errors.keys() >= leaves.keys() else {}
        made = low_rank_mean(matrices, q, axis, epsilon, share, call, fed, lambda p, x: drawn(p, x.shape, 0, {p: x}))
        means, new, kept = made.means, made.errors, made.q
        if together:
            means, new = _leaves_of(means, leaves), _leaves_of(new, errors) if fed else {}
            old = state.q.get(next(iter(leaves)))
            kept = dict.fromkeys(leaves, _with_corner(old, kept[""])) if _holds(old, kept[""].shape) else {}
        if memory is not None:
            memory.keep({path: error.to(errors[path].dtype) for path, error in new.items()})
        out = optree.tree_unflatten(optree.tree_structure(grads), [means[path] for path in leaves])
        out = share.where_any_live(out, grads) if call.persistent else out
        return out, PowerSGDState({path: kept.get(path, old) for path, old in state.q.items()}, state.step + 1)

    def loses(params: Tree) -> list[str]:
        leaves = trees.named_leaves(params)
        found = shapes(leaves)
        return list(leaves if batched and found else found)

    needs = (Needs.LAYOUT if batched else Needs.LEAVES) | Needs.PATHS
    reduces, compression = base.Reduction(axis, over), base.Compression(loses, encoded=False)
    facts = base.Facts(reduces=reduces, compression=compression, takes=("donated", "wire"))
    return Transform(init, update, needs, facts=facts)


def _square(leaves: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """All leaves, concatenated and padded, as a square matrix."""
    flat = ravel(leaves.values(), None, record_words.words_dtype(leaf.dtype for leaf in leaves.values()))
    side = math.isqrt(len(flat) - 1) + 1
    gap = side * side - len(flat)
    return {"": (torch.nn.functional.pad(flat, (0, gap)) if gap else flat).view(side, side)}


def _leaves_of(square: Mapping[str, Tensor], like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The leaves of a square matrix, in the shapes and dtypes of `like`."""
    leaves, count = list(like.values()), sum(leaf.numel() for leaf in like.values())
    return dict(zip(like, split(square[""].view(-1)[:count], leaves), strict=True))


def _holds(q: Tensor | None, shape: tuple[int, ...]) -> bool:
    return q is not None and q.shape[0] >= shape[0] and q.shape[1] >= shape[1]


def _with_corner(whole: Tensor | None, corner: Tensor) -> Tensor:
    """The matrix `whole` with `corner` in its first rows and columns."""
    assert whole is not None
    rows, columns = corner.shape
    return torch.cat([torch.cat([corner, whole[:rows, columns:]], dim=1), whole[rows:]])
