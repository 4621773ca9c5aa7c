"""1-bit Adam: after a warm-up the variance is fixed, and encoded momenta are averaged."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..base import (
    AxisName,
    Call,
    Compression,
    Inner,
    Needs,
    Over,
    State,
    Timing,
    Transform,
    Tree,
    all_finite,
    counts_steps,
    decay,
    factory,
    named_leaves,
    nonzero_or_one,
    one_axis,
    positive,
    share_of,
    whole_number,
    zeros_at_least_f32,
)
from ..codecs import Codec, sign
from ..combinators import LIVE, replace_leaves, switch_after
from ._compress import compress
from ._error_feedback import WithoutInput, error_feedback
from ._mean import mean


def momentum_compression(
    name: str,
    axis: AxisName,
    warmup_steps: int,
    betas: tuple[float, float],
    codec: Codec | None,
    over: Over,
    without_input: WithoutInput,
) -> Transform:
    """A mean of gradients in the warm-up, then an encoded mean of momenta, for the factory called `name`."""
    axis = one_axis(name, axis)
    whole_number("warmup_steps", warmup_steps, 1)  # without a warm-up there is no variance
    if not (isinstance(betas, tuple) and len(betas) == 2):
        raise ValueError(f"{name}: betas must be two numbers, got {betas!r}")
    for beta in betas:
        decay(f"{name}: betas", beta)
    encoded = compress(sign() if codec is None else codec, mean(axis, over))
    return switch_after(warmup_steps, mean(axis, over), error_feedback(encoded, without_input))


class Moments(NamedTuple):
    """Result of one update, by path; see `OneBitAdamState`."""

    inner: State
    momentum: dict[str, Tensor]
    variance: dict[str, Tensor]
    count_m: dict[str, Tensor]
    count_v: dict[str, Tensor]
    counted: Tensor  # 0-d bool: some rank has weight
    fine: Tensor  # 0-d bool: `counted`, and the received values are finite; the state is updated only then

    def kept(self, old: dict[str, Tensor], new: dict[str, Tensor]) -> dict[str, Tensor]:
        return {**old, **{path: torch.where(self.fine, value, old[path]) for path, value in new.items()}}

    def new_state(self, old: Any) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]:
        """Momentum, variance, and the number of calls in each."""
        m, v = self.kept(old.momentum, self.momentum), self.kept(old.variance, self.variance)
        return m, v, self.kept(old.count_m, self.count_m), self.kept(old.count_v, self.count_v)

    def direction(self, path: str, b1: float, b2: float, eps: float) -> Tensor:
        """Adam's direction; 0 where no rank has weight, or v = 0: sign codecs encode a momentum of 0 as +/-scale."""
        m, v, zero = self.momentum[path], self.variance[path], torch.zeros_like(self.momentum[path])
        m, root = (
            m / bias_correction(b1, self.count_m[path]).to(m),
            (v / nonzero_or_one(bias_correction(b2, self.count_v[path])).to(v)).sqrt(),
        )
        return torch.where(self.counted & (v != 0), m / (root + eps), zero)


def moments(
    inner: Transform, grads: Tree, state: Any, call: Call, warmup_steps: int, b1: float, b2: float, over: Over
) -> Moments:
    """Averages gradients or momenta, and returns the new momentum and variance of these leaves."""
    share = share_of(call.weight, "live")
    wide = {path: share.masked(torch.as_tensor(g)).to(state.momentum[path]) for path, g in named_leaves(grads).items()}
    first = state.step < warmup_steps
    sends = wide if first else {path: b1 * state.momentum[path] + (1 - b1) * g for path, g in wide.items()}
    if over == "world":  # a rank without input has a gradient of 0, and the same momentum as all ranks
        call = call.inside(weight=1.0, lane={**(call.lane or {}), LIVE: share.factor})
    out, new = inner.run(replace_leaves(grads, sends), state.inner, None, call)
    means = {path: torch.as_tensor(g) for path, g in named_leaves(out).items()}
    assert inner.sums is not None
    sums = inner.sums(new)
    counted = sums.lane.get(LIVE, sums.total) != 0
    m, v = means, {path: state.variance[path] for path in means}
    if first:
        m = {path: b1 * state.momentum[path] + (1 - b1) * g for path, g in means.items()}
        v = {path: b2 * state.variance[path] + (1 - b2) * g * g for path, g in means.items()}
    count_m = {path: state.count_m[path] + 1 for path in means}
    count_v = {path: state.count_v[path] + first for path in means}
    return Moments(new, m, v, count_m, count_v, counted, counted & all_finite(means))


def bias_correction(decay: float, calls: Tensor) -> Tensor:
    """The sum of the weights in a moving average that starts at 0, 0-d float64."""
    return 1 - decay ** calls.to(torch.float64)


def full_like_each(params: Tree, value: float) -> dict[str, Tensor]:
    """Path -> the value, 0-d, in at least float32."""
    return {
        path: torch.full((), value, dtype=torch.promote_types(p.dtype, torch.float32), device=p.device)
        for path, p in named_leaves(params).items()
    }


class OneBitAdamState(NamedTuple):
    inner: State  # of switch_after(warmup_steps, mean, error_feedback(compress))
    step: int  # calls so far, on the host
    momentum: dict[str, Tensor]  # path -> momentum, equal on all ranks, at least float32
    variance: dict[str, Tensor]  # path -> variance, likewise; fixed after the warm-up
    count_m: dict[str, Tensor]  # path -> number of calls in the momentum, 0-d
    count_v: dict[str, Tensor]  # path -> number of calls in the variance, 0-d


@factory
def one_bit_adam(
    axis: AxisName,
    warmup_steps: int,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    codec: Codec | None = None,
    over: Over = "weight",
    without_input: WithoutInput = "freeze",
) -> Transform:
    """Adam's direction; after `warmup_steps` calls the variance is fixed and encoded momenta are averaged.

        at first  g <- mean of g,  m <- b1 m + (1 - b1) g,  v <- b2 v + (1 - b2) g^2
        then      m <- mean of b1 m + (1 - b1) g, by error_feedback(compress(codec, mean(axis)))
        result    m / (1 - b1^t) / (sqrt(v / (1 - b2^s)) + eps),  0 where v = 0

    with t and s the numbers of calls in m and v. An element without a gradient in the warm-up is not updated
    afterwards. The optimizer after this transform only takes the step: `fuse(one_bit_adam(axis, warmup_steps), sgd(lr))`.

    Args:
        axis: One axis.
        warmup_steps: Calls in which gradients are averaged unencoded, at least 1; the paper takes 15 to 20 % of all calls.
        betas: (b1, b2), of momentum and variance, at least 0 and below 1.
        eps: Added to the root of the variance.
        codec: The codec of the momenta; None: `sign()`.
        over: The divisor; see `mean`.
        without_input: The residual of a rank of weight 0; see `error_feedback`.

    Returns:
        A `Transform` with state `OneBitAdamState(inner, step, momentum, variance, count_m, count_v)`. Where the sum is
        not finite, or no rank has weight, momentum and variance do not change.

    Raises:
        ValueError: an argument out of range.

    Source: Tang et al., 1-bit Adam, arXiv:2102.02888, algorithm 1, with Adam's bias corrections.

    >>> from fjoin import transforms as tx
    >>> hook = one_bit_adam("data", warmup_steps=1)
    >>> def one_rank(g):
    ...     return hook.update(g, hook.init(g))[0]
    >>> tx.simulate(one_rank, {"data": 2}, [torch.tensor([2.0, -3.0]), torch.tensor([2.0, -1.0])])[0]
    tensor([ 1., -1.])
    """
    inner = momentum_compression("one_bit_adam", axis, warmup_steps, betas, codec, over, without_input)
    b1, b2 = betas
    positive("eps", eps, zero=True)

    def init(params: Tree) -> OneBitAdamState:
        begun = inner.init(params)
        counts = (full_like_each(params, 0.0) for _ in range(2))
        return OneBitAdamState(begun, 0, zeros_at_least_f32(params), zeros_at_least_f32(params), *counts)

    @counts_steps
    def update(grads: Tree, state: OneBitAdamState, params: Tree, call: Call) -> tuple[Tree, OneBitAdamState]:
        got = moments(inner, grads, state, call, warmup_steps, b1, b2, over)
        back = {path: got.direction(path, b1, b2, eps).to(g.dtype) for path, g in named_leaves(grads).items()}
        return replace_leaves(grads, back), OneBitAdamState(got.inner, state.step + 1, *got.new_state(state))

    reduces = Inner(inner).reduction(LIVE)
    return Transform(init, update, inner.needs | Needs.PATHS, reduces, Compression(None), timing=Timing())
