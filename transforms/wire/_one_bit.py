"""Adam and LAMB whose momentum, not gradient, travels encoded, once their variance has settled."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._base import Transform, keeps_all, sums_of_inner
from .._bucketwise import Carried, part_of
from .._by_path import replace_leaves
from .._check import positive, whole_number
from .._spec import factory
from .._tree import State, Tree, all_finite, named_leaves, wide_zeros
from .._when import phases_from, switch_after
from ..axes._primitive import AxisName
from ..sync._mean import mean
from ..sync._weights import Over, check_weight, known_share, silenced
from ._codec import Codec
from ._compress import quantized_mean
from ._feedback import WithoutInput, error_feedback
from ._signs import sign


class OneBitAdamState(NamedTuple):
    inner: State  # of switch_after(warmup, mean, error_feedback(quantized_mean))
    step: int  # calls so far, on the host
    momentum: dict[str, Tensor]  # by path, equal on all ranks, at least float32
    variance: dict[str, Tensor]  # the same; stays after the warm-up


@factory
def one_bit_adam(
    axis: AxisName,
    warmup: int,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    codec: Codec | None = None,
    over: Over = "weight",
    without_input: WithoutInput = "freeze",
) -> Transform:
    """Adam's direction; after `warmup` calls the variance stays and the ranks' momenta are averaged, encoded.

        at first  g <- mean of g,  m <- b1 m + (1 - b1) g,  v <- b2 v + (1 - b2) g^2
        then      m <- mean of b1 m + (1 - b1) g, by error_feedback(quantized_mean(axis, codec))
        result    m / (1 - b1^t) / (sqrt(v / (1 - b2^min(t, warmup))) + eps)

    The optimizer behind it only takes the step: `fuse(one_bit_adam(axis, warmup), sgd(lr))`.

    Args:
        axis: One axis.
        warmup: Calls in which gradients are averaged as they are, at least 1; the paper takes 15 to 20 % of all.
        b1, b2: Decay of momentum and variance, in [0, 1).
        eps: Added to the root of the variance.
        codec: What momenta travel as; None: `sign()`.
        over: What to divide by; see `mean`.
        without_input: What a rank of weight 0 does with its error; see `error_feedback`.

    Returns:
        A `Transform` with state `OneBitAdamState(inner, step, momentum, variance)`. Where what came is not finite, or from nobody, momentum
        and variance stay as they were.

    Raises:
        ValueError: an argument out of range.

    Source: Tang et al., 1-bit Adam, arXiv:2102.02888, algorithm 1, with Adam's bias corrections.

    >>> from fjoin import transforms as tx
    >>> hook = one_bit_adam("data", warmup=1)
    >>> def one_rank(g):
    ...     return hook.update(g, hook.init(g))[0]
    >>> tx.simulate(one_rank, {"data": 2}, [torch.tensor([2.0, -3.0]), torch.tensor([2.0, -1.0])])[0]
    tensor([ 1., -1.])
    """
    inner = _momenta(axis, warmup, b1, b2, codec, over, without_input)
    positive("eps", eps, zero=True)

    def init(params: Tree, step: int = 0) -> OneBitAdamState:
        begun = inner.init(params)._replace(step=step)
        return OneBitAdamState(begun, step, wide_zeros(params), wide_zeros(params))

    def update(
        grads: Tree, state: OneBitAdamState, params: Tree = None, *, carried: Carried | None = None, **extra: Any
    ) -> tuple[Tree, OneBitAdamState]:
        got, step = _moments(inner, grads, state, carried, warmup, b1, b2, over, extra), state.step + 1
        back = {
            path: _direction(got, path, step, warmup, b1, b2, eps).to(g.dtype)
            for path, g in named_leaves(grads).items()
        }
        return replace_leaves(grads, back), OneBitAdamState(
            got.inner, step, got.kept(state.momentum, got.momentum), got.kept(state.variance, got.variance)
        )

    phases = phases_from([(0, init), (warmup, functools.partial(init, step=warmup))])
    return Transform(
        init,
        update,
        scope=inner.scope,
        sums=sums_of_inner(inner),
        loses=keeps_all,
        named=inner.named,
        phases=phases,
    )


class OneBitLambState(NamedTuple):
    inner: State
    step: int  # calls so far, on the host
    momentum: dict[str, Tensor]  # as in OneBitAdamState
    variance: dict[str, Tensor]
    fresh: dict[str, Tensor]  # the variance that would be, from how the momentum changes
    ratio: dict[str, Tensor]  # 0-d by path, the moving average of LAMB's ratios, which stays after the warm-up
    change: dict[str, Tensor]  # 0-d by path, what the ratio was last multiplied with


@factory
def one_bit_lamb(
    axis: AxisName,
    warmup: int,
    b1: float = 0.9,
    b2: float = 0.999,
    b3: float = 0.9,
    eps: float = 1e-6,
    ratios: tuple[float, float] = (0.01, 10.0),
    changes: tuple[float, float] = (0.5, 4.0),
    threshold: float = 0.1,
    codec: Codec | None = None,
    over: Over = "weight",
    without_input: WithoutInput = "freeze",
) -> Transform:
    """LAMB's direction; after `warmup` calls as `one_bit_adam`, with each leaf's ratio from what has become of its variance.

        at first  c = clip(|x| / |u|, ratios),  a <- b3 a + (1 - b3) c,            the result: c u
        then      r = clip(max of (sqrt v + eps) / (sqrt f + eps), changes, last r (1 +- threshold)),  the result: r a u

    with u the direction of `one_bit_adam` and f the variance of (m - b1 m_before) / (1 - b1), which goes on.

    Args:
        axis: One axis.
        warmup: Calls in which gradients are averaged as they are, at least 1.
        b1, b2, b3: Decay of momentum, variance and ratio, in [0, 1).
        eps: Added to the roots of variances.
        ratios: The smallest and the largest |x| / |u|. Where either norm is 0 it is 1.
        changes: The smallest and the largest r.
        threshold: How far r may move in a call, as a share of itself.
        codec: What momenta travel as; None: `sign()`.
        over: What to divide by; see `mean`.
        without_input: What a rank of weight 0 does with its error; see `error_feedback`.

    Returns:
        A `Transform` with state `OneBitLambState`; its `update` needs the parameters.

    Raises:
        ValueError: an argument out of range; at `update`: no parameters are given.

    Source: Li et al., 1-bit LAMB, arXiv:2104.06069, algorithm 1, with LAMB's bias corrections.

    >>> from fjoin import transforms as tx
    >>> hook = one_bit_lamb("data", warmup=1)
    >>> def one_rank(g):
    ...     return hook.update(g, hook.init(g), 3.0 * g)[0]
    >>> tx.simulate(one_rank, {"data": 2}, [torch.tensor([2.0, -2.0]), torch.tensor([2.0, -2.0])])[0]
    tensor([ 6.0000, -6.0000])
    """
    inner = _momenta(axis, warmup, b1, b2, codec, over, without_input)
    _share("b3", b3)
    positive("eps", eps, zero=True)
    for name, pair in (("ratios", ratios), ("changes", changes)):
        if not (isinstance(pair, tuple) and len(pair) == 2 and 0 < positive(name, pair[0]) <= positive(name, pair[1])):
            raise ValueError(f"{name} must be (smallest, largest), both above 0, got {pair!r}")
    positive("threshold", threshold)

    def init(params: Tree, step: int = 0) -> OneBitLambState:
        def each(value: float) -> dict[str, Tensor]:
            return {path: z.new_full((), value) for path, z in wide_zeros(params).items()}

        begun, (m, v, fresh) = inner.init(params)._replace(step=step), [wide_zeros(params) for _ in range(3)]
        return OneBitLambState(begun, step, m, v, fresh, each(0.0), each(1.0))

    def update(
        grads: Tree, state: OneBitLambState, params: Tree = None, *, carried: Carried | None = None, **extra: Any
    ) -> tuple[Tree, OneBitLambState]:
        if params is None:
            raise ValueError("one_bit_lamb needs the parameters: call update(grads, state, params)")
        got, of = _moments(inner, grads, state, carried, warmup, b1, b2, over, extra), named_leaves(params)
        step = state.step + 1
        fresh, ratio, change, out = dict(state.fresh), dict(state.ratio), dict(state.change), {}
        for path, m in got.momentum.items():
            u = _direction(got, path, step, warmup, b1, b2, eps)
            if state.step < warmup:
                fresh[path] = got.variance[path]
                c = _ratio(of[path], u).clamp(*ratios)
                ratio[path] = b3 * ratio[path] + (1 - b3) * c
            else:
                g = (m - b1 * state.momentum[path]) / (1 - b1)
                fresh[path] = b2 * fresh[path] + (1 - b2) * g * g
                gone = (got.variance[path].sqrt() + eps) / (fresh[path].sqrt() + eps)
                r = gone.amax() if gone.numel() else torch.ones_like(change[path])
                r = torch.maximum(torch.minimum(r, change[path] * (1 + threshold)), change[path] * (1 - threshold))
                change[path] = r.clamp(*changes)
                c = change[path] * ratio[path] / (1 - b3**warmup)
            out[path] = c * u
        back = {path: out[path].to(g.dtype) for path, g in named_leaves(grads).items()}
        return replace_leaves(grads, back), OneBitLambState(
            got.inner, step, got.kept(state.momentum, got.momentum), got.kept(state.variance, got.variance),
            got.kept(state.fresh, fresh), got.kept(state.ratio, ratio), got.kept(state.change, change),
        )  # fmt: skip

    phases = phases_from([(0, init), (warmup, functools.partial(init, step=warmup))])
    return Transform(
        init, update, scope=inner.scope, sums=sums_of_inner(inner), loses=keeps_all, named=True, phases=phases
    )


def _ratio(param: Tensor, direction: Tensor) -> Tensor:
    size, step = (torch.linalg.vector_norm(x.to(direction.dtype)) for x in (param, direction))
    one = torch.ones_like(size)
    return torch.where((size > 0) & (step > 0), size / torch.where(step > 0, step, one), one)


def _momenta(
    axis: AxisName, warmup: int, b1: float, b2: float, codec: Codec | None, over: Over, without_input: WithoutInput
) -> Transform:
    whole_number("warmup", warmup, 1)  # there is no variance before
    _share("b1", b1)
    _share("b2", b2)
    encoded = quantized_mean(axis, sign() if codec is None else codec, over)
    return switch_after(warmup, mean(axis, over), error_feedback(encoded, without_input))


def _share(name: str, value: Any) -> None:
    if not (isinstance(value, (int, float)) and 0 <= value < 1):
        raise ValueError(f"{name} must be in [0, 1), got {value!r}")


class _Moments(NamedTuple):
    inner: State
    momentum: dict[str, Tensor]
    variance: dict[str, Tensor]
    counted: Tensor  # 0-d bool: some rank counts
    fine: Tensor  # 0-d bool: that, and what came is finite, so that it is remembered

    def kept(self, old: dict[str, Tensor], new: dict[str, Tensor]) -> dict[str, Tensor]:
        return {**old, **{path: torch.where(self.fine, value, old[path]) for path, value in new.items()}}


def _moments(
    inner: Transform, grads: Tree, state: Any, carried: Carried | None, warmup: int, b1: float, b2: float, over: Over,
    extra: dict[str, Any],
) -> _Moments:  # fmt: skip
    """The new momentum, and variance, of these leaves."""
    weight = extra.get("weight")
    live, known = check_weight(weight), known_share(weight, "live")
    wide = {
        path: silenced(torch.as_tensor(g), live, known).to(state.momentum[path])
        for path, g in named_leaves(grads).items()
    }
    first = state.step < warmup
    sends = wide if first else {path: b1 * state.momentum[path] + (1 - b1) * g for path, g in wide.items()}
    if over == "world":  # a rank without input has a gradient of 0, and everybody's momentum
        extra = {**extra, "weight": 1.0}
    out, new = inner.update(replace_leaves(grads, sends), state.inner, carried=part_of(carried, "inner"), **extra)
    came = {path: torch.as_tensor(g) for path, g in named_leaves(out).items()}
    assert inner.sums is not None
    counted = inner.sums(new).total != 0
    m, v = came, {path: state.variance[path] for path in came}
    if first:
        m = {path: b1 * state.momentum[path] + (1 - b1) * g for path, g in came.items()}
        v = {path: b2 * state.variance[path] + (1 - b2) * g * g for path, g in came.items()}
    return _Moments(new, m, v, counted, counted & all_finite(came))


def _direction(got: _Moments, path: str, step: int, warmup: int, b1: float, b2: float, eps: float) -> Tensor:
    """After so many steps; 0 where nobody counts."""
    m, v = got.momentum[path] / (1 - b1**step), got.variance[path] / (1 - b2 ** min(step, warmup))
    u = m / (v.sqrt() + eps)
    return torch.where(got.counted, u, torch.zeros_like(u))
