"""Error feedback: what an encoding loses in one step is sent in the next."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from .._base import Scope, Transform, check_transform
from .._bucketwise import Carried, part_of
from .._combine import widest
from .._spec import Spec, factory
from .._tree import State, Tree, named_leaves
from ._codec import Codec
from ._memory import Memory


class ErrorState(NamedTuple):
    inner: State
    error: dict[str, Tensor]  # by path what has not been sent yet, in sums of weight * gradient, at least float32


@factory
def error_feedback(hook: Transform, without_input: Literal["freeze", "flush"] = "freeze") -> Transform:
    """Add to what this rank sends what earlier messages have lost of it.

        u <- w g + e,  u' is what the others decode of u,  e <- u - u'

    On three ranks and more the mean is encoded on its way back too; what is lost there is kept by the rank that summed.
    So nothing is lost for ever: over all steps, the sum of what the hook gave times the total weights, plus the ranks' errors,
    is the sum of all weighted gradients.

    Args:
        hook: One in which something is encoded over one axis, or projected: `quantized_mean`, `compress`, `cast`,
            `power_sgd`, alone or in `chain`, `partition` and so on.
        without_input: What a rank of weight 0 does with its error: "freeze" keeps it until it has input again, "flush"
            sends it, so that the others learn with it what it has learned before.

    Returns:
        A `Transform` with state `ErrorState(inner, error)`; `error` differs between ranks.

    Raises:
        TypeError: nothing is encoded in `hook`.
        ValueError: `without_input` is none of the two; at `update`: encoded over several axes at once.

    Source: Seide et al., 1-Bit Stochastic Gradient Descent, Interspeech 2014; Karimireddy et al., Error Feedback Fixes SignSGD,
        arXiv:1901.09847; the second error: Tang et al., DoubleSqueeze, arXiv:1905.05957.

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
    check_transform(hook, "error_feedback: hook")
    if hook.loses is None:
        raise TypeError(
            f"nothing in {hook!r} is encoded, so there is no error to feed back; write error_feedback(quantized_mean(axis, codec))"
        )
    if without_input not in ("freeze", "flush"):
        raise ValueError(f"without_input must be 'freeze' or 'flush', got {without_input!r}")

    def init(params: Tree) -> ErrorState:
        def zeros(p: Tensor) -> Tensor:
            return torch.zeros_like(p, dtype=torch.promote_types(p.dtype, torch.float32))

        of, lost = named_leaves(params), set(hook.loses(params))  # type: ignore[misc]
        return ErrorState(hook.init(params), {path: zeros(p) for path, p in of.items() if path in lost})

    def update(
        grads: Tree, state: ErrorState, params: Tree = None, *, carried: Carried | None = None, **extra: Any
    ) -> tuple[Tree, ErrorState]:
        memory = Memory(state.error, without_input == "flush")
        out, inner = hook.update(
            grads, state.inner, params, carried=part_of(carried, "inner"), **{**extra, "memory": memory}
        )
        return out, ErrorState(inner, {**state.error, **memory.new})

    sums = None if hook.sums is None else lambda state: hook.sums(state.inner)  # type: ignore[misc]
    # On three ranks and more the rank that keeps what is lost on the way back depends on a message's layout.
    scope: Scope = "message" if _encodes(hook.spec) and hook.scope != "tree" else widest([hook])
    return Transform(init, update, scope=scope, sums=sums)


def _encodes(spec: Spec) -> bool:
    return any(isinstance(child, Codec) or _encodes(child.spec) for child in spec.children)
