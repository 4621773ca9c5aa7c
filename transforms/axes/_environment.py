"""The axes bound in each thread, with their interpreters; the call that runs; sums of pieces."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from ..base import Call, Tree, UnboundAxis, devices, trees


class PieceSum:
    """The sum of this rank's piece of a flat buffer, under way: each rank sends every other rank its piece.

    Attributes:
        total: After the wait: the sum of the elements of all pieces, where the transport has computed it.
    """

    total: float | None = None

    def __init__(self, axis: Axis, flat: Tensor, bounds: Sequence[int], rank: int) -> None:
        sizes = [stop - start for start, stop in zip(bounds, bounds[1:], strict=False)]
        (start, stop), ranks = bounds[rank : rank + 2], len(sizes)
        give, take = list(sizes), [stop - start] * ranks
        # The own part does not travel where the parts for the others are adjacent.
        stays = rank in (0, ranks - 1)
        self._own = flat[start:stop] if stays else None
        self._rank, self._length = rank, stop - start
        if stays:
            flat = flat[stop:] if rank == 0 else flat[:start]
            give[rank] = take[rank] = 0
        self._received: Any = axis.begin("all_to_all_single", flat, (tuple(give), tuple(take)))

    def arrived(self) -> bool:
        """Whether all pieces have arrived, so that `wait` would not wait."""
        arrived = getattr(self._received, "arrived", None)
        return arrived is not None and bool(arrived())

    def wait(self) -> Tensor:
        """The sum, once; no gradient of the buffer is needed after that."""
        received, own, self._received, self._own = self._received(), self._own, None, None
        return devices.sum_of_pieces(received, self._length, own, self._rank)


class Work(Protocol):
    """A collective under way."""

    def wait(self) -> Any: ...


class Done:
    """The work of a collective that has run already."""

    def wait(self) -> None:
        return None


class Axis:
    """An interpreter of collectives over one named set of ranks.

    There are two families. The pure one, `run(op, x, arg)`, takes and returns plain tensors, with n the size of the
    axis:

        psum, pmax, pmin, pbroadcast (arg: source), ppermute (arg: pairs)   (...) -> (...)
        all_gather                                                          (...) -> (n, ...)
        psum_scatter                                                        (n, ...) -> (...)
        all_to_all                                                          (n, ...) -> (n, ...)
        all_to_all_single (arg: rows to each rank, rows from each)          (rows, ...) -> (others, ...)

    The asynchronous one, `begin` and `begin_...`, starts a collective and returns at once; an axis that can only wait
    runs it before it returns.

    Attributes:
        name: Its name, or the names of several axes joined by " x ".
        size: The number of ranks.
        simulated: Whether the ranks are simulated in one process.
    """

    name = ""
    size: int
    simulated = False

    def index(self) -> Tensor:
        raise NotImplementedError

    def joint(self, axes: tuple[str, ...]) -> Axis | None:
        """One axis that covers several axes at once, this one included; None if there is none."""
        return None

    # -- pure ------------------------------------------------------------------------------------

    def run(self, op: str, x: Tensor, arg: Any) -> Tensor:
        raise NotImplementedError

    def run_(self, x: Tensor) -> Tensor:
        """psum of a tensor that may be overwritten."""
        return self.run("psum", x, None)

    def start_(self, x: Tensor) -> Callable[[], object]:
        """Start psum of a flat tensor in place; the returned function waits for the message."""
        return self.begin_reduce(x).wait

    def check_rows(self, width: int, give: tuple[int, ...], take: tuple[int, ...]) -> None:
        """Record the numbers of rows in the next all_to_all_single of bytes; the simulator compares them."""

    # -- asynchronous ----------------------------------------------------------------------------

    def begin(self, op: str, x: Tensor, arg: Any) -> Callable[[], Tensor]:
        """Start `run`; the returned function waits for the message and returns the result."""
        out = self.run(op, x, arg)
        return lambda: out

    def begin_reduce(self, buffer: Tensor) -> Work:
        """Start summing a contiguous buffer in place."""
        if self.size > 1:
            buffer.copy_(self.run("psum", buffer, None))
        return Done()

    def begin_scatter(self, flat: Tensor, bounds: Sequence[int], rank: int) -> PieceSum:
        """Start summing the pieces of a flat buffer, each on its rank; the buffer is given up.

        Args:
            bounds: The first element of each rank's piece, and the end of the last one.
            rank: This rank.
        """
        return PieceSum(self, flat, bounds, rank)

    def begin_gather(self, flat: Tensor, sizes: Sequence[int], rank: int) -> Work:
        """Start filling a flat buffer from all ranks' parts of it, of these sizes in rank order; each has its own."""
        start = sum(sizes[:rank])
        own = flat[start : start + sizes[rank]]
        give = (len(own),) * len(sizes)
        flat.copy_(self.run("all_to_all_single", own.repeat(len(sizes)), (give, tuple(sizes))))
        return Done()

    # -- memory ----------------------------------------------------------------------------------

    def empty(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A flat tensor for `start_`, whose values are arbitrary."""
        return torch.empty(numel, dtype=dtype, device=device)

    def zeros(self, numel: int, dtype: torch.dtype) -> Tensor | None:
        """A buffer on the CPU whose messages need no copy; None if any memory is as good."""
        return None


@dataclass
class BoundCall:
    """The call of a train_step in which something runs, or what runs in a thread outside of such calls.

    mixed: the axes over which a differentiable collective has run in it. A backward pass through it sums the
        derivatives of all ranks' losses, so each loss must have its weight before. Who has taken the gradients clears
        the set.
    """

    weight: Any = 1.0
    number: Any = None
    mixed: set[str] = field(default_factory=set)


class _ThreadBindings(threading.local):
    def __init__(self) -> None:
        self.axes: dict[str, Axis] = {}
        self.call: BoundCall | None = None
        self.outside = BoundCall()  # where no call is bound
        self.caller: _Bindings | None = None  # as autograd's threads see this one


class _Bindings:
    """The bindings of a thread in whose backward passes other threads compute something again."""

    axes: dict[str, Axis] = {}

    def __init__(self) -> None:
        self.call = THREADS.outside


THREADS = _ThreadBindings()
_KEY = "fjoin: the thread that has called backward"


class bind_axes:
    """Binds axis names, and a call, in this thread inside a with block; the outer bindings are restored after it.

    Args:
        call: None keeps the call that is bound.
        in_backward: Whether autograd's threads that run backward passes of the block see the bindings too. On a device
            these are other threads, and a function that is computed again there may communicate.
    """

    __slots__ = ("_axes", "_before", "_before_caller", "_call", "_in_backward")

    _before_caller: tuple[dict[str, Axis], BoundCall]

    def __init__(self, axes: dict[str, Axis], call: BoundCall | None = None, in_backward: bool = False) -> None:
        self._axes, self._call, self._in_backward = axes, call, in_backward

    def __enter__(self) -> None:
        here = THREADS
        self._before = here.axes, here.call
        if not here.axes:
            here.outside.mixed.clear()  # what ran before an outermost block is of another program
        here.axes = {**(here.axes or bindings_of_caller().axes), **self._axes}
        here.call = here.call if self._call is None else self._call
        if self._in_backward:
            caller = here.caller = here.caller or _stashed()
            self._before_caller = caller.axes, caller.call
            caller.axes, caller.call = here.axes, bound_call()

    def __exit__(self, *error: object) -> None:
        THREADS.axes, THREADS.call = self._before
        if self._in_backward and (caller := THREADS.caller) is not None:
            caller.axes, caller.call = self._before_caller


def _stashed() -> _Bindings:
    """Bindings of this thread that its backward passes can see."""
    caller = _Bindings()
    # The memory of a thread other than the main one is freed behind its end in Python. Where the interpreter ends at
    # that time, the process aborts. On the host backward passes of such threads run in them.
    if threading.current_thread() is threading.main_thread() or devices.in_use():
        # Once for each thread: torch hands it to autograd's threads, and to those of messages, which must not free it.
        torch._C._stash_obj_in_tls(_KEY, caller)
    return caller


def bindings_of_caller() -> _Bindings:
    """The bindings of the thread that has begun the backward pass that runs here."""
    # Compiled functions run in the caller's thread.
    seen = not torch.compiler.is_compiling() and torch._C._is_key_in_tls(_KEY)
    return torch._C._get_obj_in_tls(_KEY) if seen else _Bindings()


def bound() -> dict[str, Axis]:
    """The axes bound in this thread, by name."""
    return THREADS.axes or bindings_of_caller().axes


def lookup(name: str) -> Axis:
    """The interpreter of an axis.

    Raises:
        UnboundAxis: nothing binds `name` here.
    """
    if not isinstance(name, str):
        raise TypeError(f"an axis is named by a string, got {name!r}")
    axis = bound().get(name)
    if axis is None:
        raise UnboundAxis(
            f"unbound axis name {name!r}. Bound here: {sorted(bound())}. Run the function under "
            f"`with fjoin.bind(fjoin.mesh({{{name!r}: -1}})):` or `simulate(fn, {{{name!r}: 4}}, ...)`."
        )
    return axis


def note_mixed(axis: Axis, x: Tensor) -> None:
    """Note that a collective of x runs through whose derivative the ranks mix their losses."""
    # Not in a backward pass, in which a function is computed again. A compiler also traces what nothing differentiates.
    if axis.size > 1 and (x.requires_grad if torch.compiler.is_compiling() else torch._C._current_graph_task_id() < 0):
        bound_call().mixed.update(axis.name.split(" x "))


def check_late_weight(call: Call, grads: Tree, axes: Collection[str] | None = None) -> None:
    """Raise where a call weighs gradients of a loss that has communicated; forgets the collectives so far.

    Where something differentiates through the gradients or the weight, they are a part of an outer loss, and nothing is
    checked.

    Args:
        axes: The axes whose collectives count; None for all.

    Raises:
        ValueError: the weight is not known to be 1. A rank of weight 0 has mixed its loss, too.
    """
    mixed = THREADS.outside.mixed
    if torch.compiler.is_compiling() or not mixed or THREADS.call is not None:  # a call looks at its own loss
        return
    weight = call.weight
    if not trees.plain(grads, weight if isinstance(weight, Tensor) else ()):
        return
    over = sorted(mixed if axes is None else mixed.intersection(axes))
    mixed.clear()
    if over and not (weight is None or (not isinstance(weight, Tensor) and weight == 1)):
        raise ValueError(
            f"weight={weight!r} comes too late: the loss has communicated over {over}, and its backward pass has mixed the ranks' losses. "
            f"Multiply the loss by loop.scale of loop = fjoin.join(loader, weight=...), and call step and update without a weight; a "
            f"collective that only logs takes loss.detach()"
        )


class One(Axis):
    """An axis of one rank: every collective is its own identity."""

    size = 1

    def index(self) -> Tensor:
        return torch.tensor(0)

    def run(self, op: str, x: Tensor, arg: Any) -> Tensor:
        if op == "all_gather":
            return x.unsqueeze(0).clone()
        if op == "psum_scatter":
            return x.squeeze(0).clone()
        if op == "ppermute" and (0, 0) not in arg:
            return torch.zeros_like(x)
        return x.clone()


def bound_call() -> BoundCall:
    """The call that is bound in this thread."""
    return bindings_of_caller().call if THREADS.call is None else THREADS.call


def current_weight() -> Any:
    """This rank's weight in the current step: 0 where its batch is replayed only to match the other ranks' collectives.

    A train_step binds it around `loss_fn`, elsewhere it is 1.

    >>> from fjoin import transforms as tx
    >>> tx.current_weight()
    1.0
    """
    return bound_call().weight


def current_call() -> Any:
    """The number of this call of a train_step, from 0: of steps, or of micro-batches where a step has several.

    It is part of the saved state, so random numbers that are keyed by it go on as before in a run that is resumed:
    `tx.random.fold_in(key, tx.current_call())`.

    Raises:
        RuntimeError: no train_step runs here.

    >>> from fjoin import transforms as tx
    >>> def loss_fn(params, batch):
    ...     return (params["w"] * batch).sum(), tx.current_call()
    >>> step = fjoin.train_step(loss_fn, tx.fuse(tx.mean("data"), tx.sgd(0.1)))
    >>> state, first = step(step.init({"w": torch.tensor(1.0)}), torch.tensor(1.0))
    >>> state, second = step(state, torch.tensor(1.0))
    >>> first.aux, second.aux
    (0, 1)
    """
    number = bound_call().number
    if number is None:
        raise RuntimeError(
            "current_call() is known in the loss_fn of a train_step only; in a loop of your own pass the number of the step to loss_fn"
        )
    return number
