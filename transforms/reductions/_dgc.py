"""Deep gradient compression: momentum and error feedback for sparse messages."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..base import (
    Averaged,
    AxisName,
    Call,
    Compression,
    Needs,
    Over,
    Reduction,
    Shares,
    Summed,
    Timing,
    Transform,
    Tree,
    all_finite,
    counts_steps,
    decay,
    device_of,
    factory,
    flag,
    global_norm,
    named_leaves,
    one_axis,
    positive,
    share_of,
    whole_number,
    zeros_at_least_f32,
)
from ..codecs import Codec, check_codec, top_k
from ..combinators import replace_leaves
from ._coded_sum import MeanState, init_mean
from ._error_feedback import ResidualMemory, WithoutInput, check_without_input, init_last
from ._mean import mean

_FIRST = 0.25  # the share that is sent at the beginning of the warm-up
_STAGES = 5


class DGCState(NamedTuple):
    reduced: MeanState
    step: int  # calls so far, on the host
    momentum: Averaged[dict[str, Tensor]]  # path -> momentum of this rank's gradients, at least float32
    error: Summed[dict[str, Tensor]]  # path -> residual, not sent yet, in units of weight * momentum
    last: Shares[dict[str, Tensor]]  # as in `ErrorState`


@factory
def dgc(
    axis: AxisName,
    k: float = 0.001,
    momentum: float = 0.9,
    nesterov: bool = False,
    clip: float | None = None,
    warmup_steps: int = 0,
    codec: Codec | None = None,
    over: Over = "weight",
    without_input: WithoutInput = "freeze",
) -> Transform:
    """The mean of the largest elements of accumulated momentum; the other elements keep accumulating.

        u <- m u + g,  v <- v + w u,  the largest k of v are sent; v <- v - sent,  u <- 0 where v was sent

    The transform contains the momentum, so the optimizer after it needs none: `fuse(dgc(axis), sgd(lr))`. An element
    that is sent in every call has no momentum; with k = 1.0 this is every element. v is scaled and sent like e in
    `error_feedback`. On an axis of one rank nothing is sent, and all elements have momentum. Where a sum is not finite,
    momentum and error do not change.

    Args:
        axis: One axis.
        k: The share of each message's elements that is sent, in (0, 1]. Sums are reduced to their largest k too; see
            `top_k`.
        momentum: m, in [0, 1).
        nesterov: Send g + m u in place of u.
        clip: The norm to which a rank first clips its gradients of each bucket; None: no clipping. The paper uses the
            norm for the whole gradient divided by the square root of the number of ranks.
        warmup_steps: Calls in which the share falls from a quarter to k, in five stages.
        codec: The codec of the values; None: `float32`.
        over: The divisor; see `mean`.
        without_input: The state of a rank of weight 0: "freeze" keeps its momentum and its error, "flush" sends the
            error.

    Returns:
        A `Transform` with state `DGCState(reduced, step, momentum, error, last)`; the last three differ between ranks.

    Raises:
        ValueError: an argument out of range.

    Source: Lin et al., Deep Gradient Compression, arXiv:1712.01887, sections 3.1 to 3.3.

    >>> from fjoin import transforms as tx
    >>> hook = dgc("data", k=0.5)
    >>> def one_rank(g):
    ...     state, outs = hook.init(g), []
    ...     for _ in range(2):
    ...         out, state = hook.update(g, state)
    ...         outs.append(out.tolist())
    ...     return outs
    >>> tx.simulate(one_rank, {"data": 2}, 2 * [torch.tensor([1.0, 0.75])])[0]
    [[1.0, 0.0], [0.0, 2.174999952316284]]
    """
    if not isinstance(k, float) or not 0 < k <= 1:
        raise ValueError(f"dgc: k must be a share in (0.0, 1.0], got {k!r}")
    decay("dgc: momentum", momentum)
    if clip is not None:
        positive("dgc: clip, if not None,", clip)
    axis = one_axis("dgc", axis)
    flag("dgc: nesterov", nesterov)
    check_without_input(without_input)
    if codec is not None:
        check_codec("dgc: codec", codec, allow_stochastic=False)
    inner, codecs = mean(axis, over), _codecs(k, codec, whole_number("dgc: warmup_steps", warmup_steps, 0))

    def init(params: Tree) -> DGCState:
        return DGCState(init_mean(params), 0, zeros_at_least_f32(params), zeros_at_least_f32(params), init_last(params))

    def gather(of: dict[str, Tensor], old: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """The momenta with these gradients, and the values to add to v."""
        u = {path: momentum * old[path] + g.to(old[path]) for path, g in of.items()}
        return u, {path: of[path].to(x) + momentum * x for path, x in u.items()} if nesterov else u

    @counts_steps
    def update(grads: Tree, state: DGCState, params: Tree, call: Call) -> tuple[Tree, DGCState]:
        share = share_of(call.weight, "live")
        of = {path: share.masked(torch.as_tensor(g)) for path, g in named_leaves(grads).items()}
        u, sends = gather(of if clip is None else _clipped(of, clip), state.momentum)
        memory = ResidualMemory(state.error, without_input == "flush", state.last, per_rank=True)
        codec = [codec for start, codec in codecs if start <= state.step][-1]
        out, reduced = inner.run(
            replace_leaves(grads, sends), state.reduced, params, call.inside(wire=codec, memory=memory)
        )
        effect = all_finite(out) & (share.to(device_of(of.values())).factor > 0)
        new = {
            path: torch.where(effect, _without(x, memory.coded.get(path)), state.momentum[path])
            for path, x in u.items()
        }
        back = {path: g.to(of[path].dtype) for path, g in named_leaves(out).items()}
        return replace_leaves(grads, back), DGCState(
            reduced, state.step + 1, {**state.momentum, **new}, {**state.error, **memory.new}, memory.last
        )

    return Transform(
        init,
        update,
        Needs.LAYOUT,
        Reduction(lambda state: state.reduced),
        Compression(None),
        timing=Timing() if warmup_steps else None,
    )


def _codecs(k: float, codec: Codec | None, warmup_steps: int) -> list[tuple[int, Codec]]:
    """Pairs (first step, codec). In the warm-up the share that is sent falls by a constant factor between stages."""
    shares = [_FIRST * (k / _FIRST) ** (i / _STAGES) for i in range(_STAGES)] if k < _FIRST else []
    return [(-(-i * warmup_steps // _STAGES), top_k(share, codec)) for i, share in enumerate([*shares, k])]


def _clipped(of: dict[str, Tensor], most: float) -> dict[str, Tensor]:
    factor = most / global_norm(of).clamp(min=most)
    return {path: g * factor.to(g) for path, g in of.items()}


def _without(momentum: Tensor, sent: Tensor | None) -> Tensor:
    """The momentum, 0 where an element was sent."""
    return momentum if sent is None else torch.where(sent != 0, torch.zeros_like(momentum), momentum)
