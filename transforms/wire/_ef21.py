"""Error feedback by differences: each rank sends how its gradient has changed."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._base import Transform, keeps_all
from .._bucketwise import Carried, part_of
from .._by_path import replace_leaves
from .._combine import stages, widest
from .._spec import Spec, factory
from .._tree import State, Tree, all_finite, named_leaves
from ..sync._lane import Lane
from ..sync._weights import Over, check_weight, known_share, not_zero, share, silenced
from ._feedback import WithoutInput, check_lossy, zero_errors
from ._memory import Memory

_HELD = "weight that is held"


class EF21State(NamedTuple):
    inner: State
    own: dict[str, Tensor]  # by path what the others believe of this rank's weight * gradient, at least float32
    whole: dict[str, Tensor]  # by path the sum of all ranks' beliefs, equal on all ranks
    counts: Tensor  # what this rank counted when it last had input, 0-d float64


@factory
def ef21(hook: Transform, without_input: WithoutInput = "freeze") -> Transform:
    """Send only how far a rank's gradient is from what the others believe it to be.

        c <- what the others decode of w g - h,  h <- h + c,  H <- H + sum of all c,  the result: H / sum of w

    With H the sum of all ranks' h. So gradients that settle are sent ever more exactly. As for `error_feedback`, a code must lose less
    than it is given. Where the sum is not finite, so is the result, and beliefs stay as they were.

    Args:
        hook: A mean in which something is encoded, `quantized_mean` or `compress`, over one axis.
        without_input: What a rank of weight 0 does: "freeze" lets its last gradient, with the weight it had, count on;
            "flush" takes it back, encoded, so that the result nears the mean over those that have input.

    Returns:
        A `Transform` with state `EF21State(inner, own, whole, counts)`; `own` and `counts` differ between ranks.

    Raises:
        TypeError: nothing is encoded in `hook`, or it is a chain: stages behind the mean stand behind `ef21`, and `accumulate` around
            it; at `update`: `hierarchical_mean`, in which a rank keeps what its node has lost.
        ValueError: `without_input` is none of the two.

    Source: Richtarik, Sokolov and Fatkhullin, EF21, arXiv:2106.05203, algorithm 2.

    >>> from fjoin import transforms as tx
    >>> hook = ef21(tx.quantized_mean("data", tx.top_k(1)))
    >>> def one_rank(g):
    ...     state, outs = hook.init(g), []
    ...     for _ in range(3):
    ...         out, state = hook.update(g, state)
    ...         outs.append(out.tolist())
    ...     return outs
    >>> tx.simulate(one_rank, {"data": 2}, 2 * [torch.tensor([3.0, 1.0, 2.0])])[0]
    [[3.0, 0.0, 0.0], [3.0, 0.0, 2.0], [3.0, 1.0, 2.0]]
    """
    check_lossy(hook, without_input, "ef21")
    others = any(hook.spec.contains(name) for name in ("partition", "accumulate"))
    if len(stages(hook)) > 1 or hook.sums is None or others:
        raise TypeError(
            f"ef21 takes one mean, got {hook!r}; write chain(..., ef21(quantized_mean(axis, codec)), ...) and let partition and "
            f"accumulate hold ef21, not the other way round"
        )
    over, sums_of = _over(hook.spec), hook.sums

    def init(params: Tree) -> EF21State:
        return EF21State(
            hook.init(params),
            zero_errors(hook, params),
            zero_errors(hook, params),
            torch.zeros((), dtype=torch.float64),
        )

    def update(
        grads: Tree, state: EF21State, params: Tree = None, *, weight: Any = None, lane: Lane | None = None,
        carried: Carried | None = None, **extra: Any,
    ) -> tuple[Tree, EF21State]:  # fmt: skip
        factor, known = share(check_weight(weight), over or "weight"), known_share(weight, over or "weight")
        flush = without_input == "flush"
        counts = torch.where(factor > 0, factor, torch.zeros_like(factor) if flush else state.counts)
        held = (
            torch.where(factor > 0, torch.zeros_like(counts), counts) if over != "world" else torch.zeros_like(counts)
        )
        # What is owed is w g - h; what is left of it when c has been sent makes h + c = w g - left.
        memory = Memory({path: -h for path, h in state.own.items()}, flush, per_rank=True)
        told = {**(lane or {}), _HELD: held} if carried is None else None
        out, inner = hook.update(
            grads, state.inner, params, weight=weight, lane=told, carried=part_of(carried, "inner"),
            **{**extra, "memory": memory},
        )  # fmt: skip
        sums = sums_of(inner)
        of, results = named_leaves(grads), named_leaves(out)
        fine = all_finite(results)
        own, whole, new = dict(state.own), dict(state.whole), {}
        counted = sums.total + sums.lane.get(_HELD, 0.0)
        for path, left in memory.new.items():
            given, came = silenced(of[path].to(left.dtype), factor, known), results[path].to(left.dtype)
            belief = whole[path] + (came if over is None else came * sums.total.to(came))
            mean = torch.where(counted == 0, torch.zeros_like(belief), belief / not_zero(counted).to(belief))
            new[path] = (belief if over is None else mean).to(results[path].dtype)
            own[path] = torch.where(fine, given * factor.to(given) - left, own[path])
            whole[path] = torch.where(fine, belief, whole[path])
        return replace_leaves(out, new), EF21State(inner, own, whole, counts)

    def sums(state: EF21State) -> Any:
        inner = sums_of(state.inner)
        return inner._replace(lane={name: value for name, value in inner.lane.items() if name != _HELD})

    return Transform(init, update, scope=widest([hook], least="message"), sums=sums, loses=keeps_all)


def _over(spec: Spec) -> Over | None:
    """What the mean in a hook divides by; None for a sum."""
    if spec.name == "sum_over":
        return None
    given = dict(spec.args)
    if "over" in given:
        return given["over"]
    return next((_over(child.spec) for child in spec.children if isinstance(child, Transform)), "weight")
