"""Error feedback: the encoding error of one step is sent in the next."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, TypeAlias

from torch import Tensor

from ..reductions._residuals import ResidualMemory, init_last
from ..spec._spec import factory
from ..transform._call import Call
from ..transform._inner import Inner
from ..transform._transform import Compression, Needs, Transform, check_transform
from ..tree._placement import Shares, Summed
from ..tree._tree import State, Tree, zeros_at_least_f32

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
    smaller than its input, as for casts, `int8`, `sign`, `top_k` and `power_sgd`. `qsgd` with few levels is unbiased,
    but its error may be larger.

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
