"""1-bit LAMB: after a warm-up, the variance is fixed and encoded momenta are averaged instead of gradients."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .._axis_env import AxisName
from .._check import decay, positive
from ..codecs._codec import Codec
from ..combinators._chain import LIVE
from ..combinators._partition import replace_leaves
from ..spec._spec import factory
from ..transform._call import Call
from ..transform._counter import counts_steps
from ..transform._inner import Inner
from ..transform._timing import Changes
from ..transform._transform import Compression, Needs, Transform
from ..transform._weights import Over, nonzero_or_one
from ..tree._tree import State, Tree, named_leaves, zeros_at_least_f32
from ._error_feedback import WithoutInput
from ._momenta import bias_correction, full_like_each, moments, momentum_compression


class OneBitLambState(NamedTuple):
    inner: State
    step: int  # calls so far, on the host
    momentum: dict[str, Tensor]  # as in OneBitAdamState
    variance: dict[str, Tensor]
    count_m: dict[str, Tensor]
    count_v: dict[str, Tensor]
    fresh: dict[str, Tensor]  # path -> the variance of the gradients implied by the changes of the momentum
    ratio: dict[str, Tensor]  # path -> the moving average of LAMB's ratios, 0-d, fixed after the warm-up
    change: dict[str, Tensor]  # path -> the last multiplier of the ratio, 0-d


@factory
def one_bit_lamb(
    axis: AxisName,
    warmup: int,
    betas: tuple[float, float] = (0.9, 0.999),
    b3: float = 0.9,
    eps: float = 1e-6,
    ratios: tuple[float, float] = (0.01, 10.0),
    changes: tuple[float, float] = (0.5, 4.0),
    threshold: float = 0.1,
    codec: Codec | None = None,
    over: Over = "weight",
    without_input: WithoutInput = "freeze",
) -> Transform:
    """LAMB's direction; after `warmup` calls as `one_bit_adam`, with a ratio from the change of each leaf's variance.

        at first  c = clip(|x| / |u|, ratios),  a <- b3 a + (1 - b3) c,            the result: c u
        then      r = clip(max of (sqrt v + eps) / (sqrt f + eps), changes, last r (1 +- threshold)),  the result: r a u

    with u the direction of `one_bit_adam` and f the variance of (m - b1 m_before) / (1 - b1), which is updated in every
    call; v and f are divided by their bias corrections, 1 - b2**calls.

    Args:
        axis: One axis.
        warmup: Calls in which gradients are averaged unencoded, at least 1.
        betas: (b1, b2), of momentum and variance, at least 0 and below 1.
        b3: Decay of the ratio, likewise.
        eps: Added to the roots of variances.
        ratios: The smallest and the largest |x| / |u|. Where either norm is 0 it is 1.
        changes: The smallest and the largest r.
        threshold: The largest change of r in a call, as a share of r.
        codec: The codec of the momenta; None: `sign()`.
        over: The divisor; see `mean`.
        without_input: The residual of a rank of weight 0; see `error_feedback`.

    Returns:
        A `Transform` with state `OneBitLambState`; its `update` needs the parameters.

    Raises:
        ValueError: an argument out of range; at `update`: no parameters are given.

    Source: Li et al., 1-bit LAMB, arXiv:2104.06069, algorithm 1, with LAMB's bias corrections, of f too.

    >>> from fjoin import transforms as tx
    >>> hook = one_bit_lamb("data", warmup=1)
    >>> def one_rank(g):
    ...     return hook.update(g, hook.init(g), 3.0 * g)[0]
    >>> tx.simulate(one_rank, {"data": 2}, [torch.tensor([2.0, -2.0]), torch.tensor([2.0, -2.0])])[0]
    tensor([ 6.0000, -6.0000])
    """
    inner = momentum_compression("one_bit_lamb", axis, warmup, betas, codec, over, without_input)
    b1, b2 = betas
    decay("b3", b3)
    positive("eps", eps, zero=True)
    for name, pair in (("ratios", ratios), ("changes", changes)):
        if not (isinstance(pair, tuple) and len(pair) == 2 and 0 < positive(name, pair[0]) <= positive(name, pair[1])):
            raise ValueError(f"{name} must be (smallest, largest), both above 0, got {pair!r}")
    positive("threshold", threshold)

    def init(params: Tree) -> OneBitLambState:
        begun, (m, v, fresh) = inner.init(params), [zeros_at_least_f32(params) for _ in range(3)]
        count_m, count_v, ratio, change = (full_like_each(params, value) for value in (0.0, 0.0, 0.0, 1.0))
        return OneBitLambState(begun, 0, m, v, count_m, count_v, fresh, ratio, change)

    @counts_steps
    def update(grads: Tree, state: OneBitLambState, params: Tree, call: Call) -> tuple[Tree, OneBitLambState]:
        if params is None:
            raise ValueError("one_bit_lamb needs the parameters: call update(grads, state, params)")
        got, of = moments(inner, grads, state, call, warmup, b1, b2, over), named_leaves(params)
        fresh, ratio, change, out = dict(state.fresh), dict(state.ratio), dict(state.change), {}
        for path, m in got.momentum.items():
            u = got.direction(path, b1, b2, eps)
            if state.step < warmup:
                fresh[path] = got.variance[path]
                c = _ratio(of[path], u).clamp(*ratios)
                ratio[path] = b3 * ratio[path] + (1 - b3) * c
            else:
                g = (m - b1 * state.momentum[path]) / (1 - b1)
                fresh[path] = b2 * fresh[path] + (1 - b2) * g * g
                v = got.variance[path] / nonzero_or_one(bias_correction(b2, got.count_v[path])).to(m)
                f = fresh[path] / nonzero_or_one(bias_correction(b2, got.count_m[path])).to(m)
                quotients = (v.sqrt() + eps) / (f.sqrt() + eps)
                r = quotients.amax() if quotients.numel() else torch.ones_like(change[path])
                r = torch.maximum(torch.minimum(r, change[path] * (1 + threshold)), change[path] * (1 - threshold))
                change[path] = r.clamp(*changes)
                c = change[path] * ratio[path] / nonzero_or_one(bias_correction(b3, got.count_v[path])).to(change[path])
            out[path] = c * u
        back = {path: out[path].to(g.dtype) for path, g in named_leaves(grads).items()}
        return replace_leaves(grads, back), OneBitLambState(
            got.inner,
            state.step + 1,
            *got.new_state(state),
            got.kept(state.fresh, fresh),
            got.kept(state.ratio, ratio),
            got.kept(state.change, change),
        )

    reduces = Inner(inner).reduction(LIVE)
    return Transform(init, update, inner.needs | Needs.PATHS, reduces, Compression(None), timing=Changes((warmup,)))


def _ratio(param: Tensor, direction: Tensor) -> Tensor:
    size, step = (torch.linalg.vector_norm(x.to(direction.dtype)) for x in (param, direction))
    one = torch.ones_like(size)
    return torch.where((size > 0) & (step > 0), size / torch.where(step > 0, step, one), one)
