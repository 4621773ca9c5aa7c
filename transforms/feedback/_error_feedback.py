"""Error feedback: the encoding error of one step is sent in the next."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from .._check import whole_number
from ..codecs._blocks import int8
from ..codecs._codec import Codec, check_codec
from ..reductions._residuals import ResidualMemory, init_last
from ..spec._spec import factory
from ..transform._call import Call
from ..transform._counter import counts_steps
from ..transform._inner import Inner
from ..transform._transform import Compression, Needs, Transform, check_transform
from ..tree._placement import Refused, Shares, Summed
from ..tree._tree import State, Tree, named_leaves, zeros_at_least_f32

WithoutInput: TypeAlias = Literal["freeze", "flush"]


class ErrorState(NamedTuple):
    inner: State
    error: Summed[dict[str, Tensor]]  # path -> residual, not sent yet, in units of weight * gradient, at least float32
    # path -> (weight of the residual, its divisor), (1, 2), float64; 0 before the first call
    last: Shares[dict[str, Tensor]]


@factory
def error_feedback(hook: Transform, without_input: WithoutInput = "freeze") -> Transform:
    """Adds to each message the residual of this rank's earlier messages.

        u <- w g + e,  u' = u as the others decode it,  e <- u - u'

    On three and more ranks the mean is encoded again for its way back; the rank that summed it keeps that error. So
    nothing is lost forever: over all steps, the sum of the hook's results, plus the sum of the ranks' residuals divided
    by the last divisor, equals the sum of all means, rounded to float32 where something is encoded.

    Residuals are in units of weight * gradient and are scaled when the divisor of these sums changes. The residual sent
    in one step is scaled by min(1, w / residual_weight), with residual_weight from `last`, so a small batch does not
    amplify the residual of large ones. If too little of it was sent, or too much because other ranks have ended, the
    difference stays in the residual.

    A step in which no rank has input, or whose result is not finite, uses up no residual (`power_sgd` decides this for
    each matrix, `hierarchical_mean` for each rank's part). Residuals stay bounded only if the error of a codec is
    smaller than its input, as for casts, `int8`, `sign`, `top_k`, `random_k` and `power_sgd`. `terngrad`, `qsgd` with
    few levels and `random_k(scaled=True)` are unbiased, but their errors may be larger.

    Args:
        hook: A hook that encodes or projects over one axis: `quantized_mean`, `compress`, `cast`, `power_sgd`, alone or
            in `partition`, or in a `chain` with stages that send nothing.
        without_input: The residual of a rank of weight 0: "freeze" keeps it until the rank has input again; "flush"
            sends all of it, whatever the weights of the other ranks, so that they get the rest of the rank's gradients.

    Returns:
        A `Transform` with state `ErrorState(inner, error, last)`; `error` and `last` differ between ranks.

    Raises:
        TypeError: nothing is encoded in `hook`.
        ValueError: `without_input` is none of the two; at `update`: encoded over several axes at once, or twice.

    Source: Seide et al., 1-Bit Stochastic Gradient Descent, Interspeech 2014; Karimireddy et al., Error Feedback Fixes
        SignSGD, arXiv:1901.09847; the second error: Tang et al., DoubleSqueeze, arXiv:1905.05957.

    >>> from fjoin import transforms as tx
    >>> hook = error_feedback(tx.quantized_mean("data", tx.int8()))
    >>> def one_rank(g):
    ...     state, sums = hook.init(g), 0.0
    ...     for _ in range(100):
    ...         mean, state = hook.update(g, state)
    ...         sums = sums + mean
    ...     return sums
    >>> tx.simulate(one_rank, {"data": 2}, [torch.tensor([127.0, 0.3]), torch.tensor([127.0, 0.1])])[0]
    tensor([12700.,    20.])
    """
    encoded, inner = check_lossy(hook, without_input, "error_feedback").encoded, Inner(hook)

    def init(params: Tree) -> ErrorState:
        errors = zero_errors(hook, params)
        return ErrorState(hook.init(params), errors, init_last(errors))

    def update(grads: Tree, state: ErrorState, params: Tree, call: Call) -> tuple[Tree, ErrorState]:
        memory = ResidualMemory(state.error, without_input == "flush", state.last)
        out, new = inner.run(grads, state, params, call.inside(memory=memory))
        return out, ErrorState(new, {**state.error, **memory.new}, memory.last)

    # Chunk ownership, and so the second residual, depends on the bucket layout.
    needs = Needs.LAYOUT if encoded else Needs.NOTHING
    return Transform(
        init, update, needs, inner.reduction(same=True), Compression(None, encoded), takes=("donated",), wraps="whole"
    )


class LocoState(NamedTuple):
    inner: State
    step: int  # calls so far, on the host
    error: Refused[dict[str, Tensor]]  # path -> encoded residual, uint8
    last: Shares[dict[str, Tensor]]  # as in `ErrorState`


@factory
def loco(
    hook: Transform,
    beta: float = 0.95,
    reset: int = 1024,
    memory: Codec | None = None,
    without_input: WithoutInput = "freeze",
) -> Transform:
    """Error feedback with a moving average of the residuals, stored in one byte per element.

        e <- (1 - beta) e + beta (u - u'),  stored encoded; 0 in every `reset`-th call

    with u = w g + e, u' = u as the others decode it, and e scaled and sent as in `error_feedback`. The part that the
    average leaves out and the encoding error of e are lost.

    Args:
        hook: As for `error_feedback`.
        beta: The share of the newest error, in (0, 1].
        reset: Calls after which the residuals are reset to 0, at least 1.
        memory: The codec of the stored residuals, one leaf at a time, not stochastic; None: `int8()`.
        without_input: As for `error_feedback`.

    Returns:
        A `Transform` with state `LocoState(inner, step, error, last)`; `error` and `last` differ between ranks.

    Raises:
        TypeError: nothing is encoded in `hook`; `memory` is no codec.
        ValueError: `beta` or `reset` out of range, `without_input` none of the two, or `memory` is stochastic.

    Source: Xie et al., LoCo: Low-Bit Communication Adaptor for Large-scale Model Training, arXiv:2407.04480,
        algorithm 1.

    >>> from fjoin import transforms as tx
    >>> hook = loco(tx.quantized_mean("data", tx.int4()))
    >>> hook.init({"w": torch.zeros(100)}).error["w"].shape
    torch.Size([104])
    """
    encoded, inner = check_lossy(hook, without_input, "loco").encoded, Inner(hook)
    if not (isinstance(beta, (int, float)) and not isinstance(beta, bool) and 0 < beta <= 1):
        raise ValueError(f"loco: beta must be in (0, 1], got {beta!r}")
    whole_number("loco: reset", reset, 1)
    codec = check_codec("loco: memory", int8() if memory is None else memory, allow_stochastic=False)

    def stored(error: dict[str, Tensor]) -> dict[str, Tensor]:
        return {path: codec.encode(e.reshape(1, -1).to(torch.float32))[0] for path, e in error.items()}

    def init(params: Tree) -> LocoState:
        errors = zero_errors(hook, params)
        return LocoState(hook.init(params), 0, stored(errors), init_last(errors))

    @counts_steps
    def update(grads: Tree, state: LocoState, params: Tree, call: Call) -> tuple[Tree, LocoState]:
        of = {path: g for path, g in named_leaves(grads).items() if path in state.error}
        old = {path: codec.decode(state.error[path].unsqueeze(0), g.numel()).view(g.shape) for path, g in of.items()}
        errors = ResidualMemory(old, without_input == "flush", {path: state.last[path] for path in old})
        out, kept = inner.run(grads, state, params, call.inside(memory=errors))
        last = (state.step + 1) % reset == 0
        new = {
            path: torch.zeros_like(e) if last else torch.lerp(errors.before(path), e, beta)
            for path, e in errors.new.items()
        }
        return out, LocoState(kept, state.step + 1, {**state.error, **stored(new)}, {**state.last, **errors.last})

    # Residuals are encoded leaf by leaf.
    needs = Needs.LAYOUT | Needs.PATHS
    return Transform(init, update, needs, inner.reduction(same=True), Compression(None, encoded))


def zero_errors(hook: Transform, params: Tree) -> dict[str, Tensor]:
    lost = set(hook.compression.paths(params)) if hook.compression and hook.compression.paths else set()
    return {path: zero for path, zero in zeros_at_least_f32(params).items() if path in lost}


def check_lossy(hook: Transform, without_input: Any, name: str) -> Compression:
    check_transform(hook, f"{name}: hook")
    if hook.compression is None or hook.compression.paths is None:
        raise TypeError(
            f"nothing in {hook!r} is {'lost' if hook.compression else 'encoded'}, so there is no error to feed back; write "
            f"{name}(quantized_mean(axis, codec))"
        )
    check_without_input(without_input)
    return hook.compression


def check_without_input(given: Any) -> None:
    if given not in ("freeze", "flush"):
        raise ValueError(f"without_input must be 'freeze' or 'flush', got {given!r}")
