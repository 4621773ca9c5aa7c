"""Which blocks of a function to keep, to compute again or to keep elsewhere, within a number of bytes."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, Protocol

import optree
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from .._uncompiled import uncompiled
from ._abstract import abstract, batches
from ._again import How, call
from ._form import remembered
from .costs._cost import Clock, rates_of
from .costs._knapsack import Choice, Cost, least, plan
from .record._kept import listening
from .surroundings._reach import captured
from .surroundings._result import tensors_of
from .values._memory import memory_of
from .values._policies import everything_saveable
from .values._store import Handle, Store


class _Walk(Protocol):
    def block(self, fn: Callable[..., Any], how: How, args: Any, kwargs: Any) -> Any: ...


class _Threads(threading.local):
    def __init__(self) -> None:
        self.walk: _Walk | None = None


_THREADS = _Threads()


@contextlib.contextmanager
def _walking(walk: _Walk | None) -> Iterator[None]:
    outer, _THREADS.walk = _THREADS.walk, walk
    try:
        yield
    finally:
        _THREADS.walk = outer


def run_block(fn: Callable[..., Any], how: How, args: Any, kwargs: Any) -> Any:
    """Call a function as its `remat` says, or as the budget around it says."""
    walk = _THREADS.walk
    if walk is None:
        return call(fn, how, args, kwargs)
    with _walking(None):
        return walk.block(fn, how, args, kwargs)


class _Planned:
    def __init__(self, choices: Sequence[Choice], store: Store | None) -> None:
        self._choices, self._store = iter(choices), store

    def block(self, fn: Callable[..., Any], how: How, args: Any, kwargs: Any) -> Any:
        choice = next(self._choices, None)
        if choice is None:
            raise RuntimeError(
                "remat: the function has called more blocks than when its budget was planned, for arguments of the same form; make "
                "tx.remat(fn, budget_bytes=...) anew where the number of blocks has changed"
            )
        if choice is Choice.KEEP:
            return fn(*args, **kwargs)
        return call(fn, how if choice is Choice.RECOMPUTE else _away(how, self._store), args, kwargs)


def _away(how: How, store: Store | None) -> How:
    return how._replace(policy=everything_saveable, store=store)


class _Measured:
    """Finds what each block costs, in a run without values.

    Args:
        store: Where blocks may wait.
        outside: The memory of arguments and parameters, which does not count.
        times: The number of times that all runs.
    """

    def __init__(self, store: Store | None, outside: Collection[int], times: int) -> None:
        self._store, self._outside, self._times = store, outside, times
        self.blocks: list[dict[Choice, Cost]] = []

    def block(self, fn: Callable[..., Any], how: How, args: Any, kwargs: Any) -> Any:
        runs: dict[Choice, Callable[..., Any]] = {
            Choice.KEEP: fn,
            Choice.RECOMPUTE: lambda *a, **k: call(fn, how, a, k),
        }
        if self._store is not None:
            runs[Choice.OFFLOAD] = lambda *a, **k: call(fn, _away(how, self._store), a, k)
        costs = {choice: self._cost(fn, run, args, kwargs) for choice, run in runs.items()}
        kept = costs[Choice.KEEP].seconds
        self.blocks.append({choice: cost._replace(seconds=cost.seconds - kept) for choice, cost in costs.items()})
        with saved_tensors_hooks(lambda x: x, lambda x: x):
            return fn(*args, **kwargs)

    def _cost(self, fn: Any, run: Callable[..., Any], args: Any, kwargs: Any) -> Cost:
        """Run a block and its backward pass."""
        given: Any = (args, kwargs)
        leaves, form = optree.tree_flatten(given, none_is_leaf=True)
        sources = [x.detach().requires_grad_() for x in leaves if isinstance(x, Tensor) and x.requires_grad]
        own = iter(sources)
        for i, x in enumerate(leaves):
            if isinstance(x, Tensor) and x.requires_grad:
                leaf = next(own)
                leaves[i] = (
                    leaf if memory_of(x) in self._outside else leaf.clone()
                )  # a result of an operation, as in a run
        again: Any = optree.tree_unflatten(form, leaves)
        sources += (x for x in captured(fn).tracked.values() if x.requires_grad)
        found: dict[int, int] = {}
        holds: list[Any] = []
        clock = Clock()

        def add(x: Tensor, handle: Handle | None = None) -> Tensor:
            memory = memory_of(x)
            if memory not in self._outside:
                found[memory] = x.untyped_storage().nbytes() if handle is None else handle.held
                holds.append(x)
            return x

        def moved(x: Tensor, handle: Handle) -> None:
            add(x, handle)
            rates = rates_of(x)
            clock.seconds += 2 * handle.size / (rates.memory / 4 if handle.held else rates.away)

        with clock, listening(lambda x, name: None, moved), saved_tensors_hooks(add, lambda x: x):
            out = tensors_of(run(*again[0], **again[1]))
            held = sum(found.values())
            ends = [x for x in out if x.requires_grad]
            if ends and sources:
                torch.autograd.grad(ends, sources, [torch.ones_like(x) for x in ends], allow_unused=True)
        return Cost(held * self._times, (sum(found.values()) - held) * self._times, clock.seconds * self._times)


def measured(
    fn: Callable[..., Any], store: Store | None, args: Any, kwargs: Any
) -> tuple[int, list[dict[Choice, Cost]]]:
    """The bytes that a function keeps outside of its blocks, and what each choice for a block costs."""
    times, fixed, holds = batches(), {}, []
    with abstract(fn, args, kwargs) as of:
        walk = _Measured(store, of.given, times)

        def add(x: Tensor) -> Tensor:
            if memory_of(x) not in of.given:
                fixed[memory_of(x)] = x.untyped_storage().nbytes()
            holds.append(x)
            return x

        with saved_tensors_hooks(add, lambda x: x), _walking(walk):
            holds.append(fn(*of.args, **of.kwargs))
    return sum(fixed.values()) * times, walk.blocks


def within_budget(budget: int, store: Store | None) -> Callable[[Callable[..., Any], Any, Any], Any]:
    """What calls a function with a plan for each form of its arguments."""

    @uncompiled
    def run(fn: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if not torch.is_grad_enabled() or _THREADS.walk is not None:
            return fn(*args, **kwargs)

        def choose() -> list[Choice]:
            fixed, blocks = measured(fn, store, args, kwargs)
            found = plan(blocks, budget - fixed)
            if found is None:
                raise ValueError(
                    f"remat: budget_bytes={budget} is too small: {len(blocks)} blocks keep at least {least(blocks)} bytes, and "
                    f"what is in no block keeps {fixed}; allow more, put more of the function into blocks, or give offload"
                )
            return found

        choices = remembered(fn, (budget, store), args, kwargs, choose)
        with _walking(_Planned(choices, store)):
            return fn(*args, **kwargs)

    return run
