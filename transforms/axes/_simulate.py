"""Ranks simulated in one process, in lockstep."""

from __future__ import annotations

import collections
import functools
import itertools
import math
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..base import CollectiveMismatch, checks, devices
from ._environment import Axis, bind_axes, bound


class Grid:
    """The places of ranks along axes, the last one varying fastest.

    Args:
        sizes: Axis name -> number of ranks.

    >>> grid = Grid({"node": 2, "local": 3})
    >>> grid.place(4), grid.members(4, ["node"])
    ({'node': 1, 'local': 1}, [1, 4])
    """

    def __init__(self, sizes: Mapping[str, int]) -> None:
        self.sizes = dict(sizes)
        self._places = list(itertools.product(*map(range, sizes.values())))
        self._ranks = {place: rank for rank, place in enumerate(self._places)}

    def place(self, rank: int, axes: Sequence[str] | None = None) -> dict[str, int]:
        """Axis name -> place of a rank; only along some axes, in their order."""
        here = dict(zip(self.sizes, self._places[rank], strict=True))
        return here if axes is None else {name: here[name] for name in axes}

    def members(self, rank: int, axes: Collection[str]) -> list[int]:
        """The ranks with this rank's place along all other axes, in rank order."""
        here = self.place(rank)
        moved = itertools.product(*(range(size) if name in axes else [here[name]] for name, size in self.sizes.items()))
        return [self._ranks[place] for place in moved]


class _AbandonSimulation(BaseException):
    """Unwinds the threads of a simulation that has failed elsewhere."""


class _AxisGroup:
    """The ranks along one axis that take part in its collectives."""

    def __init__(self, axis: str, members: tuple[int, ...]) -> None:
        self.axis, self.members = axis, members
        self.given: dict[int, Any] = {}
        self.call: tuple[str, int] | None = None  # the present call, and the first rank that made it


class SimulatedAxis(Axis):
    """The interpreter of one axis on one simulated rank."""

    simulated = True

    def __init__(self, world: _World, group: _AxisGroup, me: int) -> None:
        self._world, self._group, self._me = world, group, me
        self.name, self.size = group.axis, len(group.members)
        self.rank = group.members.index(me)
        self.world_rank = me

    @property
    def group(self) -> object:
        """The ranks along this axis."""
        return self._group

    def index(self) -> Tensor:
        return torch.tensor(self.rank)

    def check_rows(self, width: int, give: tuple[int, ...], take: tuple[int, ...]) -> None:
        """Raise CollectiveMismatch if a rank sends rows of another number or width than the receiver expects."""
        rows = torch.empty(sum(give), 0)
        self._world.meet(self._me, self._group, f"all_to_all_single(rows of {width})", (rows, (give, take)), _cross)

    def run(self, op: str, x: Tensor, arg: Any) -> Tensor:
        if op == "all_to_all_single":  # whose rows and sizes differ between ranks
            call = f"{op}({str(x.dtype).removeprefix('torch.')}[:, {str(list(x.shape[1:]))[1:]})"
            return self._world.meet(self._me, self._group, call, (x.detach(), arg), _cross)
        detail = "" if arg is None else f", {arg!r}"
        call = f"{op}({str(x.dtype).removeprefix('torch.')}{list(x.shape)}{detail})"
        return self._world.meet(self._me, self._group, call, x.detach(), lambda xs: _combine(op, xs, arg))

    def exchange(self, value: Any, occasion: str = "exchange") -> list[Any]:
        """Every rank's Python object, in rank order."""
        return self._world.meet(self._me, self._group, occasion, value, lambda xs: [xs] * len(xs))

    def joint(self, axes: tuple[str, ...]) -> SimulatedAxis | None:
        """One axis that covers several, if they cover the whole world in its own order."""
        if axes != tuple(self._world.shape):
            return None
        return SimulatedAxis(self._world, self._world.everyone, self._me)


def _combine(op: str, xs: list[Tensor], arg: Any) -> list[Tensor]:
    """The collective on all ranks' inputs, sums in rank order."""
    n = len(xs)
    if op in ("psum", "psum_scatter"):
        total = devices.sum_in_order(xs)
        return list(total.unbind(0)) if op == "psum_scatter" else _copies(total, n)
    if op in ("pmax", "pmin"):
        return _copies(functools.reduce(torch.maximum if op == "pmax" else torch.minimum, xs), n)
    if op == "pbroadcast":
        return _copies(xs[arg], n)
    if op == "all_gather":
        return _copies(torch.stack(xs), n)
    if op == "all_to_all":
        return list(torch.stack(xs).transpose(0, 1).contiguous().unbind(0))
    source = {target: s for s, target in arg}
    return [xs[source[r]].clone() if r in source else torch.zeros_like(xs[r]) for r in range(n)]


def _cross(given: list[Any]) -> list[Tensor]:
    """The rows that each rank receives, from all ranks' (rows, (rows to each, rows from each))."""
    pieces = [rows.split(give) for rows, (give, _) in given]
    for target, (_, (_, take)) in enumerate(given):
        for source, n in enumerate(take):
            if n != (sent := len(pieces[source][target])):
                raise CollectiveMismatch(
                    f"all_to_all_single: rank {source} sends {sent} rows to rank {target}, which takes {n}"
                )
    return [torch.cat([of[target] for of in pieces]) for target in range(len(given))]


def _copies(x: Tensor, n: int) -> list[Tensor]:
    return [x.clone() for _ in range(n)]


class _World:
    def __init__(self, shape: dict[str, int]) -> None:
        self.shape, grid = shape, Grid(shape)
        self.size = n = math.prod(shape.values())
        self.everyone = _AxisGroup(" x ".join(shape), tuple(range(n)))
        self.groups: list[dict[str, _AxisGroup]] = [{} for _ in range(n)]
        for axis, rank in itertools.product(shape, range(n)):
            if grid.place(rank)[axis] == 0:
                group = _AxisGroup(axis, tuple(grid.members(rank, [axis])))
                for member in group.members:
                    self.groups[member][axis] = group
        self.turn = [threading.Semaphore(0) for _ in range(n)]
        self.back = threading.Semaphore(0)
        self.ready = collections.deque(range(n))
        self.received: list[Any] = [None] * n
        self.results: list[Any] = [None] * n
        self.doing = ["has not started"] * n
        self.random = [torch.get_rng_state()] * n
        self.error: BaseException | None = None
        self.over = False

    def meet(self, me: int, group: _AxisGroup, call: str, value: Any, combine: Callable[[list[Any]], list[Any]]) -> Any:
        """Wait until every rank of the group has made the same call."""
        if self.over:
            raise RuntimeError(
                f"{call} over {group.axis!r} after the simulated ranks have ended, as in a backward pass outside of the simulated "
                f"function; differentiate inside it, where all ranks take part"
            )
        if group.call is None:
            group.call = (call, me)
        elif group.call[0] != call:
            raise CollectiveMismatch(
                f"on axis {group.axis!r} rank {group.call[1]} calls {group.call[0]}, but rank {me} calls {call}; "
                f"all ranks of an axis must call the same collectives on the same shapes in the same order"
            )
        group.given[me] = value
        self.doing[me] = f"waits in {call} over {group.axis!r}"
        if len(group.given) == len(group.members):
            outs = combine([group.given[rank] for rank in group.members])
            group.given, group.call = {}, None
            for rank, out in zip(group.members, outs, strict=True):
                self.received[rank] = out
            self.ready.extend(group.members)
        self.random[me] = torch.get_rng_state()
        self.back.release()
        self.turn[me].acquire()
        if self.error:
            raise _AbandonSimulation
        torch.set_rng_state(self.random[me])
        self.doing[me] = "runs"
        out, self.received[me] = self.received[me], None
        return out

    def _thread(self, me: int, run: Callable[[], Any]) -> None:
        self.turn[me].acquire()
        try:
            if self.error:
                return
            torch.set_rng_state(self.random[me])
            self.doing[me] = "runs"
            self.results[me] = run()
            self.doing[me] = "has returned"
        except _AbandonSimulation:
            pass
        except BaseException as error:
            self.doing[me] = f"raised {type(error).__name__}"
            if self.error is None:
                error.add_note(f"raised on simulated rank {me} of {self.shape}")
                self.error = error
        finally:
            self.random[me] = torch.get_rng_state()
            self.back.release()

    def run(self, function: Callable[..., Any], args: Sequence[tuple[Any, ...]]) -> list[Any]:
        outer, grad, random = bound(), torch.is_grad_enabled(), torch.get_rng_state()

        def start(me: int) -> Any:
            axes: dict[str, Axis] = {name: SimulatedAxis(self, g, me) for name, g in self.groups[me].items()}
            with bind_axes({**outer, **axes}), torch.set_grad_enabled(grad):
                return function(*args[me])

        threads = [
            threading.Thread(target=self._thread, args=(me, functools.partial(start, me)), daemon=True)
            for me in range(self.size)
        ]
        try:
            for thread in threads:
                thread.start()
            while self.ready and not self.error:
                self.turn[self.ready.popleft()].release()
                self.back.acquire()
            if not self.error and any(d != "has returned" for d in self.doing):
                self.error = CollectiveMismatch("; ".join(f"rank {r} {d}" for r, d in enumerate(self.doing)))
        except BaseException as interrupt:  # release the threads before it is raised again
            self.error = interrupt
            raise
        finally:
            if self.error:
                for turn in self.turn:
                    turn.release()
            for thread in threads:
                thread.join()
            self.over = True
            torch.set_rng_state(random)
        if self.error:
            error, self.error = self.error, None
            raise error
        return self.results


MOST = 4096  # a rank is a thread


def simulate(function: Callable[..., Any], axes: Mapping[str, int], *args: Sequence[Any]) -> list[Any]:
    """Runs `function` on every rank of the given axes, without processes.

    Ranks take turns, switching at collectives: any Python, in-place operations, a stream of random numbers per rank.
    The results equal those of gloo with ordered reductions to the bit. A collective that the other ranks do not call
    raises, it does not hang.

    Args:
        function: The function that every rank runs; it may call collectives over `axes`.
        axes: Axis name -> number of ranks, the slowest varying first; at most 4096 ranks in all.
        args: One sequence for each argument of `function`, with one value per rank.

    Returns:
        The results of `function`, in rank order.

    Raises:
        ValueError: no axis, a size that is no whole number from 1, too many ranks, or an argument without one value per
            rank.
        TypeError: no function, no mapping of axes, or an argument that is no sequence.
        CollectiveMismatch: the ranks' collectives do not fit together.

    >>> from fjoin import transforms as tx
    >>> simulate(lambda x: tx.pmean(x, "data"), {"data": 4}, [0.0, 1.0, 2.0, 3.0])
    [tensor(1.5000), tensor(1.5000), tensor(1.5000), tensor(1.5000)]
    """
    if not callable(function):
        raise TypeError(f"simulate runs a function, got {function!r}")
    n = math.prod(checks.axis_sizes(axes, MOST).values())
    for i, arg in enumerate(args):
        if not hasattr(arg, "__len__") or (isinstance(arg, Tensor) and not arg.dim()):
            raise TypeError(f"argument {i} must be a sequence with one value per rank, got {arg!r}")
        if len(arg) != n:
            raise ValueError(f"argument {i} has {len(arg)} values for {n} ranks; pass one value per rank")
    rows = [tuple(arg[rank] for arg in args) for rank in range(n)]
    return _World(dict(axes)).run(function, rows)
