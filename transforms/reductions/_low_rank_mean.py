"""A weighted mean in which some leaves are sent as two thin factors: the common part of the PowerSGD transforms."""

from __future__ import annotations

from collections.abc import Callable, Mapping
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
    RankWeight,
    Reduction,
    Rider,
    Transform,
    Tree,
    check_over,
    counts_steps,
    decode_words,
    device_of,
    divisor_of,
    first_of,
    flag,
    lane_dtype,
    named_leaves,
    no_words,
    plain,
    positive,
    real,
    share_in,
    some_axes,
    unless_idle,
    whole_number,
)
from ..codecs import Codec, refuse_derivative
from ._coded_sum import MeanState, init_mean
from ._factors import (
    Exchange,
    FeedbackWeight,
    as_dtype,
    blocks_of,
    check_finite,
    compute_q,
    cut,
    matrix_residuals,
    next_start,
    orthonormal,
    products,
    shaped,
    uncompressed_residuals,
)
from ._mean import mean


class PowerSGDState(NamedTuple):
    reduced: MeanState
    counted: Tensor  # the sum of the ranks' factors in the last call, 0-d float64
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


def check_settings(given: Settings) -> None:
    some_axes("power_sgd", given.axis)
    check_over(given.over)
    whole_number("rank", given.rank, 1)
    whole_number("seed", given.seed)
    positive("min_compression_rate", given.min_compression_rate)
    positive("epsilon", given.epsilon, zero=True)
    flag("warm_start", given.warm_start)


class CallArgs(NamedTuple):
    """The arguments of a reduction, except the gradients."""

    share: RankWeight
    rider: Rider
    wire: Codec | None
    errors: dict[str, Tensor]  # path -> residual
    flush: bool
    donated: bool  # whether the means may take the gradients' memory


class Result(NamedTuple):
    """Result of one update."""

    means: dict[str, Tensor]  # path -> mean, in the leaf's shape and dtype
    errors: dict[str, Tensor]  # path -> new residual, for the paths of the given residuals
    q: dict[str, Tensor]
    counted: Tensor  # the sum of the factors, 0-d float64
    rider: Tensor  # see `Sums`


Reduce: TypeAlias = Callable[[dict[str, Tensor], PowerSGDState, CallArgs], Result]


def make_transform(
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
    alone = mean(axis, over)

    def init(params: Tree) -> PowerSGDState:
        reduced = init_mean(params)
        return PowerSGDState(reduced, reduced.total.clone(), start(params) if settings.warm_start else {}, 0)

    @counts_steps
    def update(grads: Tree, state: PowerSGDState, params: Tree, call: Call) -> tuple[Tree, PowerSGDState]:
        del params
        grads, step = optree.tree_map(torch.as_tensor, grads), state.step + 1
        if axis_size(axis) == 1:
            out, reduced = alone.run(grads, state.reduced, None, call.inside(wire=None, memory=None, donated=False))
            return out, state._replace(reduced=reduced, counted=share_in(call, over).factor, step=step)
        leaves = named_leaves(grads)
        real(leaves, "power_sgd")
        if call.wire is not None:
            refuse_derivative(leaves.values(), "differentiate through the hook without its codec")
        share, memory, rider = share_in(call, over).to(device_of(leaves.values())), call.memory, Rider(call)
        known = dict[str, Tensor]()
        if memory is not None:
            mine = {path: leaf for path, leaf in leaves.items() if path in memory}
            known = dict(zip(mine, memory.residuals(mine, share), strict=True))
        flush = memory is not None and memory.flush
        made = reduce(leaves, state, CallArgs(share, rider, call.wire, known, flush, call.donated))
        counted, lane = rider.settle(made.counted, made.rider)
        reduced = MeanState(divisor_of(over, counted, axis_size(axis)), lane)
        if memory is not None:
            memory.keep(made.errors, made.errors.values(), share, reduced.total)
        out = optree.tree_unflatten(optree.tree_structure(grads), [made.means[path] for path in leaves])
        out = unless_idle(counted, out, grads, call.persistent)
        q = {path: made.q.get(path, old) for path, old in state.q.items()}
        return out, PowerSGDState(reduced, counted, q, step)

    return Transform(
        init,
        update,
        needs | Needs.PATHS,
        Reduction(lambda state: state.reduced, axis, over),
        Compression(loses, encoded=False),
        takes=("donated", "wire"),
    )


def low_rank_mean(
    leaves: Mapping[str, Tensor],
    q: Mapping[str, Tensor],
    fresh: Callable[[str, Tensor], Tensor],
    settings: Settings,
    given: CallArgs,
) -> Result:
    """The mean of leaves; the leaves with a factor in `q` are sent as two factors."""
    axis, over, ranks = settings.axis, settings.over, axis_size(settings.axis)
    device = device_of(leaves.values())
    mine, rider = FeedbackWeight(*given.share, given.flush), given.rider
    coded = given.wire is not None
    dtype = torch.float32 if coded else lane_dtype(leaf.dtype for leaf in leaves.values())
    factor, sums_of = (mine.factor if rider.goes_along else None), (1 if coded else ranks)
    words = rider.words(torch.float64 if coded else dtype, sums_of, device, factor)
    exchange = Exchange(axis, given.wire, coded and bool(given.errors), next(iter(leaves), ""))
    # Leaves that are summed uncompressed and unencoded have no residual.
    errors = {path: e for path, e in given.errors.items() if coded or path in q}

    def message(path: str) -> Tensor | None:
        return mine.message(leaves[path], errors.get(path), dtype)

    blocks = blocks_of(leaves, q, message, dtype)
    uncompressed = [path for path, leaf in leaves.items() if path not in q and leaf.numel()]
    parts = [
        s if (s := message(path)) is not None else torch.zeros_like(leaves[path], dtype=dtype) for path in uncompressed
    ]
    flat, lane_words, lost = exchange("P", [*(part for block in blocks for part in block.parts), *parts], words)
    left_sizes, right_sizes = [block.sizes[0] for block in blocks], [block.sizes[1] for block in blocks]
    size = sum(shape.numel() for shape in left_sizes)
    p_t = [orthonormal(p, settings.epsilon) for p in cut(flat[:size], left_sizes)]

    own: list[Tensor] = []
    residuals: dict[str, Tensor] = {}
    for block, p in zip(blocks, p_t, strict=True):
        some, residuals_of_some = compute_q(block, p, mine, errors)
        own += some
        residuals.update(residuals_of_some)
    second, _, q_residual = exchange("Q", own, words[:0])
    totals = cut(second, right_sizes)

    if rider.goes_along:
        counted, sums = first_of(decode_words(lane_words, sums_of))
    else:
        counted, sums = rider.total, no_words()
    divided_by = torch.full_like(counted, ranks) if over == "world" else counted
    finite = check_finite(totals, counted)
    divisor = divided_by if finite.whole else torch.where(finite.live, divided_by, torch.ones_like(counted))

    def divided(x: Tensor) -> Tensor:
        return x / divisor if finite.whole else torch.where(finite.live, x / divisor.to(x.dtype), torch.zeros_like(x))

    outputs: dict[str, Tensor] = {}
    if given.donated and plain(list(leaves.values())):
        matrices = {path: leaves[path] for path in q}
        outputs = {path: m.view(len(m), -1) for path, m in matrices.items() if m.dtype is dtype and m.is_contiguous()}
    means = products(blocks, p_t, cut(divided(second), right_sizes), outputs)
    shapes = {path: leaves[path].shape for path in uncompressed}
    means.update(zip(uncompressed, cut(divided(flat[size:]), list(shapes.values())), strict=True))
    new_q: dict[str, Tensor] = {}
    if settings.warm_start:
        for i, (block, total) in enumerate(zip(blocks, totals, strict=True)):
            new_q.update(zip(block.paths, next_start(block, total, i, finite, fresh).unbind(0), strict=True))
    missed = None if q_residual is None else cut(q_residual, right_sizes)
    new_errors = matrix_residuals(blocks, p_t, residuals, missed, errors, finite)
    if lost is not None:
        new_errors.update(uncompressed_residuals(shapes, lost[size:], flat[size:], errors, mine, finite))
    return Result(
        {
            path: as_dtype(shaped(means[path], leaf), leaf.dtype) if path in means else leaf
            for path, leaf in leaves.items()
        },
        {path: as_dtype(shaped(new, leaves[path]), errors[path].dtype) for path, new in new_errors.items()},
        {path: as_dtype(new, q[path].dtype) for path, new in new_q.items()},
        counted,
        sums,
    )
