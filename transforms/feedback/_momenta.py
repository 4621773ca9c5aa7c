"""Averages of gradients in a warm-up, and of encoded momenta once the variance is fixed."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._check import AxisName, decay, one_axis, whole_number
from ..codecs._codec import Codec
from ..codecs._signs import sign
from ..combinators._chain import LIVE
from ..combinators._conditional import switch_after
from ..combinators._partition import replace_leaves
from ..reductions._compress import quantized_mean
from ..reductions._mean import mean
from ..transform._call import Call
from ..transform._transform import Transform
from ..transform._weights import Over, nonzero_or_one, share_of
from ..tree._tree import State, Tree, all_finite, named_leaves
from ._error_feedback import WithoutInput, error_feedback


def momentum_compression(
    name: str,
    axis: AxisName,
    warmup: int,
    betas: tuple[float, float],
    codec: Codec | None,
    over: Over,
    without_input: WithoutInput,
) -> Transform:
    """A mean of gradients in the warm-up, then an encoded mean of momenta, for the factory called `name`."""
    axis = one_axis(name, axis)
    whole_number("warmup", warmup, 1)  # without a warm-up there is no variance
    if not (isinstance(betas, tuple) and len(betas) == 2):
        raise ValueError(f"{name}: betas must be two numbers, got {betas!r}")
    for beta in betas:
        decay(f"{name}: betas", beta)
    encoded = quantized_mean(axis, sign() if codec is None else codec, over)
    return switch_after(warmup, mean(axis, over), error_feedback(encoded, without_input))


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
    inner: Transform, grads: Tree, state: Any, call: Call, warmup: int, b1: float, b2: float, over: Over
) -> Moments:
    """Averages gradients or momenta, and returns the new momentum and variance of these leaves."""
    share = share_of(call.weight, "live")
    wide = {path: share.masked(torch.as_tensor(g)).to(state.momentum[path]) for path, g in named_leaves(grads).items()}
    first = state.step < warmup
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
