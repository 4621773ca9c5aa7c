"""Join hooks: functions that ranks run when they are out of input, and after all ranks have ended."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor

from ..axes import axis_index, axis_size, from_one, pmin
from ..base import AxisName, State, checks, trees


class JoinHook(NamedTuple):
    """A pair of pure functions over named axes.

    Args:
        main: `state -> state`. A rank that is out of input runs it once for every iteration of the other ranks; it
            calls the same collectives as they do.
        post: `(state, is_last_joiner) -> state`. Every rank runs it once after all are out of input. `is_last_joiner`
            is True on the ranks that ended last.

    Same as: the join hook of torch's generic Join, without its object.

    >>> from fjoin import transforms as tx
    >>> hook = tx.JoinHook(main=lambda n: n + tx.psum(0, "data"))
    >>> tx.simulate(lambda n: hook.main(n), {"data": 2}, [1, 2])
    [tensor(1), tensor(2)]
    """

    main: Callable[[State], State] = lambda state: state
    post: Callable[[State, bool], State] = lambda state, is_last_joiner: state


def last_joiner(is_last_joiner: Any, axis: AxisName) -> Tensor:
    """The lowest of the ranks that ended last, the same on all ranks: 0-d int64.

    Args:
        is_last_joiner: Whether this rank is one of them: the argument of a post hook.
        axis: The axis along which ranks joined.

    Raises:
        UnboundAxis: nothing binds the axis.

    >>> from fjoin import transforms as tx
    >>> tx.simulate(lambda last: tx.last_joiner(last, "data"), {"data": 3}, [False, True, True])
    [tensor(1), tensor(1), tensor(1)]
    """
    flag = torch.as_tensor(is_last_joiner)
    return pmin(torch.where(flag, trees.to_device(flag.device, axis_index(axis)), axis_size(axis)), axis)


def broadcast_from_last(axis: AxisName) -> JoinHook:
    """A hook whose post copies the state of the lowest rank that ended last to every rank, to the bit.

    Args:
        axis: The axis along which ranks join.

    Returns:
        A `JoinHook` for a state of tensors of the same shapes and dtypes on all ranks. Its main does nothing.

    Raises:
        UnboundAxis: at post: nothing binds the axis.

    Same as: the broadcast at the end of torch's DDP join, where ties go to the highest rank.

    >>> from fjoin import transforms as tx
    >>> hook = tx.broadcast_from_last("data")
    >>> tx.simulate(lambda w, last: hook.post(w, last), {"data": 3}, [torch.tensor(v) for v in (1.0, 2.0, 3.0)], [False, True, True])
    [tensor(2.), tensor(2.), tensor(2.)]
    """

    checks.some_axes("broadcast_from_last", axis)

    def post(state: State, is_last_joiner: bool) -> State:
        last = last_joiner(
            trees.to_device(trees.device_of(optree.tree_leaves(state)), torch.as_tensor(is_last_joiner)), axis
        )
        return from_one(state, last == axis_index(axis), axis)

    return JoinHook(post=post)
