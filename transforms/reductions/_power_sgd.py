"""PowerSGD: gradients that are matrices are sent as two thin factors."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple, TypeAlias

import optree
import torch
from torch import Tensor

from ..axes import axis_size
from ..base import (
    AxisName,
    Call,
    Compression,
    Needs,
    Over,
    Reduction,
    Share,
    Transform,
    Tree,
    check_over,
    device_of,
    factory,
    flag,
    named_leaves,
    own_state,
    positive,
    real,
    some_axes,
    whole_number,
)
from ..codecs import refuse_derivative
from ..combinators import switch_after
from ._factors import Reduced, draw, low_rank_mean
from ._mean import mean


class PowerSGDState(NamedTuple):
    q: dict[str, Tensor]  # path of a compressed leaf -> the Q that the next call starts from, (rank, columns)
    step: int  # calls so far, on the host


class Settings(NamedTuple):
    axis: AxisName
    rank: int
    min_compression_rate: float
    warm_start: bool
    epsilon: float
    seed: int
    over: Over

    def rank_of(self, rows: int, columns: int) -> int:
        """The rank of the factors of a matrix of this shape; 0 where it is not compressed."""
        rank = min(rows, columns, self.rank)
        return rank if (rows + columns) * rank * self.min_compression_rate < rows * columns else 0


def _check(given: Settings) -> None:
    some_axes("power_sgd", given.axis)
    check_over(given.over)
    whole_number("rank", given.rank, 1)
    whole_number("seed", given.seed)
    positive("min_compression_rate", given.min_compression_rate)
    positive("epsilon", given.epsilon, zero=True)
    flag("warm_start", given.warm_start)


# (leaves, state, this rank's share, the call, path -> residual) -> the means, the new residuals and the next Q
Reduce: TypeAlias = Callable[[dict[str, Tensor], PowerSGDState, Share, Call, dict[str, Tensor]], Reduced]


def _transform(
    settings: Settings,
    needs: Needs,
    start: Callable[[Tree], dict[str, Tensor]],
    reduce: Reduce,
    loses: Callable[[Tree], list[str]],
) -> Transform:
    """A transform around `reduce`, which runs on several ranks.

    Args:
        start: Parameters -> the first Q.
        loses: Parameters -> the paths of the leaves that are compressed.
    """
    axis, over = settings.axis, settings.over

    def init(params: Tree) -> PowerSGDState:
        return PowerSGDState(start(params) if settings.warm_start else {}, 0)

    def update(grads: Tree, state: PowerSGDState, params: Tree, call: Call) -> tuple[Tree, PowerSGDState]:
        del params
        state = own_state(state, PowerSGDState, call)
        grads, step = optree.tree_map(torch.as_tensor, grads), state.step + 1
        leaves, memory = named_leaves(grads), call.memory
        share = call.share(axis, over, device_of(leaves.values()))
        if axis_size(axis) == 1:
            out = optree.tree_map(share.times, grads)
            return (share.unless_idle(out, grads) if call.persistent else out), state._replace(step=step)
        real(leaves, "power_sgd")
        if call.wire is not None:
            refuse_derivative(leaves.values(), "differentiate through the hook without its codec")
        known = dict[str, Tensor]()
        if memory is not None:
            mine = {path: leaf for path, leaf in leaves.items() if path in memory.old}
            known = dict(zip(mine, memory.of(mine), strict=True))
        made = reduce(leaves, state, share, call, known)
        if memory is not None:
            memory.keep({path: new.to(known[path].dtype) for path, new in made.errors.items()})
        out = optree.tree_unflatten(optree.tree_structure(grads), [made.means[path] for path in leaves])
        out = share.unless_idle(out, grads) if call.persistent else out
        return out, PowerSGDState({path: made.q.get(path, old) for path, old in state.q.items()}, step)

    reduces, compression = Reduction(axis, over), Compression(loses, encoded=False)
    return Transform(init, update, needs | Needs.PATHS, reduces, compression, takes=("donated", "wire"))


@factory
def power_sgd(
    axis: AxisName,
    rank: int = 1,
    *,
    warmup_steps: int = 0,
    min_compression_rate: float = 2.0,
    warm_start: bool = True,
    epsilon: float = 0.0,
    seed: int = 0,
    over: Over = "weight",
) -> Transform:
    """The weighted mean of all ranks' gradients, with matrices sent as two thin factors.

    With M_r = w_r g_r / sum of w, as a matrix of shape[0] x all other dimensions, and Q of `rank` columns, the same on all
    ranks:

        P = orthonormal(sum_r M_r Q),   Q = sum_r M_r^T P,   result = P Q^T

    The result is the mean projected onto the columns that M Q spans. The part orthogonal to them is lost, unless the
    transform is inside `error_feedback(power_sgd(...))`: there each rank keeps M_r - P Q_r^T and adds it to its next
    M_r, so that over all steps nothing is lost.

    One message carries P and the leaves that are not compressed; a second one carries Q. Without a compressed leaf there is
    no second message. All are sent in float32, or in float64 if a gradient is float64; inside `compress` they are encoded.
    On an axis of one rank nothing is sent and nothing is compressed.

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
    settings = Settings(axis, rank, min_compression_rate, warm_start, epsilon, seed, over)
    _check(settings)
    if whole_number("warmup_steps", warmup_steps, 0):
        return switch_after(warmup_steps, mean(axis, over), power_sgd(**settings._asdict()))

    def shapes(leaves: Mapping[str, Tensor]) -> dict[str, tuple[int, int]]:
        """Path -> (rank, columns) of each compressed leaf."""
        found = {}
        for path, leaf in leaves.items():
            if leaf.dim() > 1 and leaf.numel():
                columns = leaf.numel() // leaf.shape[0]
                if rank := settings.rank_of(leaf.shape[0], columns):
                    found[path] = rank, columns
        return found

    def drawn(leaves: Mapping[str, Tensor], step: int) -> dict[str, Tensor]:
        return {path: draw(seed, path, step, *shape, leaves[path]) for path, shape in shapes(leaves).items()}

    def kept(leaves: Mapping[str, Tensor], state: PowerSGDState) -> dict[str, Tensor]:
        found = {}
        for path, shape in shapes(leaves).items():
            q = state.q.get(path)
            if q is None or q.shape != shape:
                raise ValueError(
                    f"the gradient at {path!r} needs a Q of shape {shape}, but the state has "
                    f"{'none' if q is None else tuple(q.shape)}; it is the state of other parameters or of another rank"
                )
            found[path] = q
        return found

    def again(path: str, like: Tensor) -> Tensor:
        return draw(seed, path, 0, like.shape[0], like.shape[1], like)

    def reduce(
        leaves: dict[str, Tensor], state: PowerSGDState, share: Share, call: Call, errors: dict[str, Tensor]
    ) -> Reduced:
        q = kept(leaves, state) if warm_start else drawn(leaves, state.step)
        made = low_rank_mean(leaves, q, axis, epsilon, share, call, errors, again)
        return made if warm_start else made._replace(q={})

    def first(params: Tree) -> dict[str, Tensor]:
        return drawn(named_leaves(params), 0)

    return _transform(settings, Needs.LEAVES, first, reduce, lambda params: list(shapes(named_leaves(params))))


@factory
def batched_power_sgd(
    axis: AxisName,
    rank: int = 1,
    *,
    warmup_steps: int = 0,
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
    settings = Settings(axis, rank, min_compression_rate, warm_start, epsilon, seed, over)
    _check(settings)
    if whole_number("warmup_steps", warmup_steps, 0):
        return switch_after(warmup_steps, mean(axis, over), batched_power_sgd(**settings._asdict()))

    def size(leaves: Mapping[str, Tensor]) -> tuple[int, int]:
        """The rows of the square matrix of these leaves, and the rank of its factors."""
        elements = sum(leaf.numel() for leaf in leaves.values())
        side = math.isqrt(elements - 1) + 1 if elements else 0
        return side, settings.rank_of(side, side)

    def drawn(leaves: Mapping[str, Tensor], step: int) -> Tensor:
        side, rank = size(leaves)
        return draw(seed, "", step, rank, side, next(iter(leaves.values())))

    def first(params: Tree) -> dict[str, Tensor]:
        leaves = named_leaves(params)
        return dict.fromkeys(leaves, drawn(leaves, 0)) if size(leaves)[1] else {}

    def reduce(
        leaves: dict[str, Tensor], state: PowerSGDState, share: Share, call: Call, errors: dict[str, Tensor]
    ) -> Reduced:
        side, rank = size(leaves)
        if not rank:
            return low_rank_mean(leaves, {}, axis, epsilon, share, call, errors, lambda _, like: like)
        kept = state.q.get(next(iter(leaves)), torch.empty(0, 0))
        fits = kept.shape[0] >= rank and kept.shape[1] >= side
        start = kept[:rank, :side] if fits else drawn(leaves, state.step)
        squares = {"": _square(errors, leaves, side)} if errors.keys() >= leaves.keys() else {}

        def again(_: str, like: Tensor) -> Tensor:
            return draw(seed, "", 0, rank, side, like)

        made = low_rank_mean(
            {"": _square(leaves, leaves, side)}, {"": start}, axis, epsilon, share, call, squares, again
        )
        return Reduced(
            _pieces(made.means[""], leaves),
            _pieces(made.errors[""], errors, leaves) if squares else {},
            dict.fromkeys(leaves, _inside(kept, made.q[""])) if warm_start and fits else {},
        )

    def loses(params: Tree) -> list[str]:
        leaves = named_leaves(params)
        return list(leaves) if size(leaves)[1] else []

    return _transform(settings, Needs.LAYOUT, first, reduce, loses)


def _inside(whole: Tensor, corner: Tensor) -> Tensor:
    """The matrix `whole` with `corner` in its first rows and columns."""
    rows, columns = corner.shape
    return torch.cat([torch.cat([corner, whole[:rows, columns:]], dim=1), whole[rows:]])


def _square(values: Mapping[str, Tensor], paths: Iterable[str], side: int) -> Tensor:
    """The leaves, concatenated and padded, as a square matrix."""
    parts = [values[path].reshape(-1) for path in paths]
    dtype = torch.float64 if any(part.dtype is torch.float64 for part in parts) else torch.float32
    parts = [part.to(dtype) for part in parts]
    flat = parts[0] if len(parts) == 1 else torch.cat(parts)
    return (
        flat if flat.numel() == side * side else torch.nn.functional.pad(flat, (0, side * side - flat.numel()))
    ).view(side, side)


def _pieces(square: Tensor, like: Mapping[str, Tensor], paths: Iterable[str] = ()) -> dict[str, Tensor]:
    """The leaves of a square matrix, in the shapes and dtypes of `like`."""
    chosen = list(paths or like)
    sizes = [like[path].numel() for path in chosen]
    pieces = square.view(-1)[: sum(sizes)].split(sizes)
    return {path: piece.view(like[path].shape).to(like[path].dtype) for path, piece in zip(chosen, pieces, strict=True)}
