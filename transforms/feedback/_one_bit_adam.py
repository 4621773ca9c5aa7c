"""1-bit Adam: after a warm-up, the variance is fixed and encoded momenta are averaged instead of gradients."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from .._check import AxisName, positive
from ..codecs._codec import Codec
from ..combinators._chain import LIVE
from ..combinators._partition import replace_leaves
from ..spec._spec import factory
from ..transform._call import Call
from ..transform._counter import counts_steps
from ..transform._inner import Inner
from ..transform._timing import Changes
from ..transform._transform import Compression, Needs, Transform
from ..transform._weights import Over
from ..tree._tree import State, Tree, named_leaves, zeros_at_least_f32
from ._error_feedback import WithoutInput
from ._momenta import full_like_each, moments, momentum_compression


class OneBitAdamState(NamedTuple):
    inner: State  # of switch_after(warmup, mean, error_feedback(quantized_mean))
    step: int  # calls so far, on the host
    momentum: dict[str, Tensor]  # path -> momentum, equal on all ranks, at least float32
    variance: dict[str, Tensor]  # path -> variance, likewise; fixed after the warm-up
    count_m: dict[str, Tensor]  # path -> number of calls in the momentum, 0-d
    count_v: dict[str, Tensor]  # path -> number of calls in the variance, 0-d


@factory
def one_bit_adam(
    axis: AxisName,
    warmup: int,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    codec: Codec | None = None,
    over: Over = "weight",
    without_input: WithoutInput = "freeze",
) -> Transform:
    """Adam's direction; after `warmup` calls the variance is fixed and encoded momenta are averaged.

        at first  g <- mean of g,  m <- b1 m + (1 - b1) g,  v <- b2 v + (1 - b2) g^2
        then      m <- mean of b1 m + (1 - b1) g, by error_feedback(quantized_mean(axis, codec))
        result    m / (1 - b1^t) / (sqrt(v / (1 - b2^s)) + eps),  0 where v = 0

    with t and s the numbers of calls in m and v. An element without a gradient in the warm-up is not updated
    afterwards. The optimizer after this transform only takes the step: `fuse(one_bit_adam(axis, warmup), sgd(lr))`.

    Args:
        axis: One axis.
        warmup: Calls in which gradients are averaged unencoded, at least 1; the paper takes 15 to 20 % of all calls.
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
    >>> hook = one_bit_adam("data", warmup=1)
    >>> def one_rank(g):
    ...     return hook.update(g, hook.init(g))[0]
    >>> tx.simulate(one_rank, {"data": 2}, [torch.tensor([2.0, -3.0]), torch.tensor([2.0, -1.0])])[0]
    tensor([ 1., -1.])
    """
    inner = momentum_compression("one_bit_adam", axis, warmup, betas, codec, over, without_input)
    b1, b2 = betas
    positive("eps", eps, zero=True)

    def init(params: Tree) -> OneBitAdamState:
        begun = inner.init(params)
        counts = (full_like_each(params, 0.0) for _ in range(2))
        return OneBitAdamState(begun, 0, zeros_at_least_f32(params), zeros_at_least_f32(params), *counts)

    @counts_steps
    def update(grads: Tree, state: OneBitAdamState, params: Tree, call: Call) -> tuple[Tree, OneBitAdamState]:
        got = moments(inner, grads, state, call, warmup, b1, b2, over)
        back = {path: got.direction(path, b1, b2, eps).to(g.dtype) for path, g in named_leaves(grads).items()}
        return replace_leaves(grads, back), OneBitAdamState(got.inner, state.step + 1, *got.new_state(state))

    reduces = Inner(inner).reduction(LIVE)
    return Transform(init, update, inner.needs | Needs.PATHS, reduces, Compression(None), timing=Changes((warmup,)))
