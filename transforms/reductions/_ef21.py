"""Error feedback by differences: each rank sends the change of its gradient."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..axes import axis_index, axis_size, names
from ..base import (
    Call,
    Compression,
    Inner,
    Needs,
    Restarted,
    State,
    Transform,
    Tree,
    all_finite,
    device_of,
    factory,
    named_leaves,
    nonzero_or_one,
    share_in,
    to_device,
    unless_idle,
)
from ..combinators import replace_leaves
from ._error_feedback import ResidualMemory, WithoutInput, check_lossy, zero_errors

_HELD = "weight that is held"
_MOVED = "ranks with the state of another"


class EF21State(NamedTuple):
    inner: State
    own: Restarted[dict[str, Tensor]]  # path -> the others' estimate of this rank's weight * gradient, at least float32
    whole: dict[str, Tensor]  # path -> the sum of all ranks' estimates, equal on all ranks
    counts: Restarted[Tensor]  # this rank's factor when it last had input, 0-d float64
    place: Restarted[Tensor]  # (2,) int64, the rank and the number of ranks that `own` belongs to; -1 at first


@factory
def ef21(hook: Transform, without_input: WithoutInput = "freeze") -> Transform:
    """Sends the difference between a rank's gradient and the other ranks' estimate of it.

        c <- w g - h as the others decode it,  h <- h + c,  H <- H + sum of all c,  the result: H / sum of w

    h is the estimate of this rank's w g, and H the sum of all ranks' estimates. As gradients converge, the differences
    shrink and the estimates become more exact. A change of weight is a difference to send too. The part of it that a
    small batch does not send is divided by a small weight: if batch sizes differ much, use means `over="live"`, or
    `error_feedback`.

    As for `error_feedback`, the error of a codec must be smaller than its input. Where the sum is not finite, the
    result is not finite either, and the estimates do not change. If a rank has the state of another rank, or of another
    number of ranks, as after loading, all estimates restart in that call from its messages.

    Args:
        hook: An encoded mean over one axis, without other stages: `compress` of a `mean`
            or a `sum_over`, or `power_sgd`.
        without_input: The estimate of a rank of weight 0: "freeze" keeps its last gradient, with its last weight, in
            the result; "flush" subtracts it, encoded, so that the result approaches the mean over the ranks with input.

    Returns:
        A `Transform` with state `EF21State(inner, own, whole, counts, place)`; `own`, `counts` and `place` differ
        between ranks.

    Raises:
        TypeError: nothing is encoded in `hook`, or it is more than a mean: other stages, `switch_after`, `partition`
            and so on hold `ef21`, not the other way round; or it is `hierarchical_mean`, in which a rank keeps the
            residual of its node.
        ValueError: `without_input` is none of the two.

    Source: Richtarik, Sokolov and Fatkhullin, EF21, arXiv:2106.05203, algorithm 2.

    >>> from fjoin import transforms as tx
    >>> hook = ef21(tx.compress(tx.top_k(1), tx.mean("data")))
    >>> def one_rank(g):
    ...     state, outs = hook.init(g), []
    ...     for _ in range(3):
    ...         out, state = hook.update(g, state)
    ...         outs.append(out.tolist())
    ...     return outs
    >>> tx.simulate(one_rank, {"data": 2}, 2 * [torch.tensor([3.0, 1.0, 2.0])])[0]
    [[3.0, 0.0, 0.0], [3.0, 0.0, 2.0], [3.0, 1.0, 2.0]]
    """
    encoded, inside = check_lossy(hook, without_input, "ef21").encoded, Inner(hook)
    if hook.reduces is None or hook.reduces.axis is None or len(names(hook.reduces.axis)) > 1:
        raise TypeError(
            f"ef21 takes one mean, got {hook!r}; write chain(..., ef21(compress(codec, mean(axis))), ...) and let partition, "
            f"switch_after and the like hold ef21, not the other way round"
        )
    sums_of, over, axis = hook.reduces.sums, hook.reduces.over, hook.reduces.axis

    def init(params: Tree) -> EF21State:
        return EF21State(
            hook.init(params),
            zero_errors(hook, params),
            zero_errors(hook, params),
            torch.zeros((), dtype=torch.float64),
            torch.full((2,), -1),
        )

    def update(grads: Tree, state: EF21State, params: Tree, call: Call) -> tuple[Tree, EF21State]:
        of = {path: torch.as_tensor(g) for path, g in named_leaves(grads).items()}
        device = device_of(of.values())
        share = share_in(call, over or "weight").to(device)
        factor, nothing = share.factor, torch.zeros_like(share.factor)
        # The weight of a kept gradient is kept too, and counts in the divisor.
        counted_last = nothing if without_input == "flush" else to_device(device, state.counts)
        counts = torch.where(factor > 0, factor, counted_last)
        held = nothing if over == "world" else torch.where(factor > 0, nothing, counts)
        index = axis_index(axis)
        here = to_device(device, torch.stack([index, torch.full_like(index, axis_size(axis))]))
        before = to_device(device, state.place)
        moved = (here != before).any()
        estimates = {path: torch.where(moved, torch.zeros_like(h), h) for path, h in state.own.items()}
        # In the dtype of the estimates: rounding errors of narrower results would stay in the estimates.
        wide = {path: of[path].to(h.dtype) for path, h in state.own.items() if path in of}
        # With the residual -h the message is w g - h, and its remainder gives h + c = w g - remainder.
        memory = ResidualMemory({path: -h for path, h in estimates.items()}, without_input == "flush", per_rank=True)
        lane = {**(call.lane or {}), _HELD: held, _MOVED: moved.to(torch.float64)}
        out, inner = inside.run(
            replace_leaves(grads, wide),
            state,
            params,
            call.inside(lane=lane, memory=memory, persistent=False),
        )
        sums, results = sums_of(inner), named_leaves(out)
        fine = all_finite(results)
        own, whole, new = dict(state.own), dict(state.whole), {}
        anew = sums.lane.get(_MOVED, torch.zeros(())) > 0
        counted = sums.total + torch.where(anew, 0.0, sums.lane.get(_HELD, torch.zeros(())))
        counts = torch.where(anew & (factor == 0), nothing, counts)
        for path, result in results.items():
            if path not in memory.new:
                new[path] = result.to(of[path].dtype)
                continue
            remainder, given = memory.new[path], share.masked(wide[path])
            change = result if over is None else result * sums.total.to(result)
            total = torch.where(anew, change, whole[path] + change)
            mean = torch.where(counted == 0, torch.zeros_like(total), total / nonzero_or_one(counted).to(total))
            new[path] = (total if over is None else mean).to(of[path].dtype)
            mine = given * factor.to(given) - remainder
            mine = torch.where(anew, mine - estimates[path], mine)  # only the message of this call
            own[path] = torch.where(fine, mine, own[path])
            whole[path] = torch.where(fine, total, whole[path])
        new = unless_idle(counted, new, {path: of[path] for path in new}, call.persistent)
        return replace_leaves(out, new), EF21State(inner, own, whole, counts, torch.where(fine, here, before))

    reduces = inside.reduction(_HELD, _MOVED, same=True)
    return Transform(init, update, Needs.LAYOUT, reduces, Compression(None, encoded))
