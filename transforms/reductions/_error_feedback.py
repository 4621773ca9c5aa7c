"""Error feedback: the encoding error of one step is sent in the next."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from ..base import (
    Call,
    Compression,
    Needs,
    State,
    Summed,
    Transform,
    Tree,
    check_transform,
    factory,
    own_state,
    zeros_at_least_f32,
)
from ._coded_sum import Residuals


class ErrorState(NamedTuple):
    inner: State
    error: Summed[dict[str, Tensor]]  # path -> residual, not sent yet, in units of the mean, at least float32


@factory
def error_feedback(hook: Transform) -> Transform:
    """Adds to each message the residual of this rank's earlier messages.

        u <- w g / W + e,  u' = u as the others decode it,  e <- u - u'

    with w the rank's weight and W that of all ranks. On three and more ranks the mean is encoded again for its way back; the
    rank that summed it keeps that error. So nothing is lost forever: over all steps, the sum of the hook's results, plus the
    sum of the ranks' residuals, equals the sum of all means, rounded to float32 where something is encoded. A rank without
    input sends its residual.

    A step in which no rank has input, or whose result is not finite, uses up no residual (`power_sgd` decides this for
    each matrix, `hierarchical_mean` for each rank's part). Residuals stay bounded only if the error of a codec is
    smaller than its input, as for casts, `int8`, `sign`, `top_k` and `power_sgd`. `qsgd` with few levels is unbiased,
    but its error may be larger.

    Args:
        hook: A hook that encodes or projects over one axis: `compress`, `power_sgd`, alone or
            in `partition`, or in a `chain` with stages that send nothing.

    Returns:
        A `Transform` with state `ErrorState(inner, error)`; `error` differs between ranks.

    Raises:
        TypeError: nothing is encoded in `hook`.
        ValueError: at `update`: encoded over several axes at once, or twice.

    Source: Seide et al., 1-Bit Stochastic Gradient Descent, Interspeech 2014; Karimireddy et al., Error Feedback Fixes
        SignSGD, arXiv:1901.09847; the second error: Tang et al., DoubleSqueeze, arXiv:1905.05957.

    >>> from fjoin import transforms as tx
    >>> hook = error_feedback(tx.compress(tx.int8(), tx.mean("data")))
    >>> def one_rank(g):
    ...     state, sums = hook.init(g), 0.0
    ...     for _ in range(100):
    ...         mean, state = hook.update(g, state)
    ...         sums = sums + mean
    ...     return sums
    >>> tx.simulate(one_rank, {"data": 2}, [torch.tensor([127.0, 0.3]), torch.tensor([127.0, 0.1])])[0]
    tensor([12700.,    20.])
    """
    check_transform(hook, "error_feedback: hook")
    lossy = hook.compression
    if lossy is None or lossy.paths is None:
        raise TypeError(
            f"nothing in {hook!r} is {'lost' if lossy else 'encoded'}, so there is no error to feed back; write "
            f"error_feedback(compress(codec, mean(axis)))"
        )
    paths = lossy.paths

    def init(params: Tree) -> ErrorState:
        lost = set(paths(params))
        errors = {path: zero for path, zero in zeros_at_least_f32(params).items() if path in lost}
        return ErrorState(hook.init(params), errors)

    def update(grads: Tree, state: ErrorState, params: Tree, call: Call) -> tuple[Tree, ErrorState]:
        memory = Residuals(own_state(state, ErrorState).error)
        out, new = hook.run(grads, state.inner, params, call.inside(memory=memory))
        return out, ErrorState(new, {**state.error, **memory.new})

    # Chunk ownership, and so the second residual, depends on the bucket layout.
    needs = Needs.LAYOUT if lossy.encoded else Needs.NOTHING
    compression = Compression(None, lossy.encoded)
    return Transform(init, update, needs, compression=compression, takes=("donated",), wraps="whole")
