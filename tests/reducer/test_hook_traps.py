"""Traps of hooks run per bucket: memory that is shared, padding, threads, axes; each once gave wrong numbers."""

from __future__ import annotations

import gc
import os
import platform
import subprocess
import sys
import threading
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor

import fjoin
from fjoin import transforms as tx
from fjoin.step._interleave import Coroutine, Interleaver
from tests.helpers import judged, max_diff, raises_text, stepped
from tests.training.small import net_batch, net_loss, net_params, step_of


def made(init: Any, function: Any, needs: Any = tx.Needs.NOTHING) -> tx.Transform:
    """A transform of `init(params)` and `function(values, state)`."""
    return tx.Transform(init, lambda g, state, params=None, **extra: function(g, state), needs=needs)


def smooth(grads: Any, state: Any) -> Any:
    """An average over steps, with a memory of each parameter, and a count of calls."""
    memory, calls = state
    new = {path: 0.5 * memory[path] + g for path, g in grads.items()}
    return new, (new, {path: n + 1 for path, n in calls.items()})


def empty(params: Any) -> Any:
    return {path: torch.zeros_like(p) for path, p in params.items()}, dict.fromkeys(params, 0)


SMOOTH, MEAN, SGD = made(empty, smooth), tx.mean("data"), tx.sgd(1.0)


def both_ways(pipeline: tx.Pipeline, batches: list[Tensor], on_device: bool = False) -> tuple[Any, Any, Any, Any]:
    """Parameters and state after a step on each batch, of a train_step and of the pure pipeline."""
    step = judged(fjoin.train_step(net_loss, pipeline, mesh=fjoin.mesh({"data": -1})), on_device)
    state, params = step.init(net_params()), net_params()
    pure = pipeline.init(params)
    with fjoin.bind(fjoin.mesh({"data": -1})):
        for batch in batches:
            state, _ = step(state, batch)
            params, pure = pipeline.step(params, torch.func.grad(net_loss)(params, batch), pure)
    return state.params, state.pipeline, params, pure


BATCHES = [net_batch(0, i) for i in range(3)]


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("parts", [(SMOOTH, MEAN), (MEAN, SMOOTH)], ids=["before", "behind"])
def test_nonfinite_first_step_does_not_change_the_hook_state(parts: Any, on_device: bool) -> None:
    """The hook's memory must stay unchanged."""
    pipeline = tx.skip_if_nonfinite(tx.fuse(tx.chain(*parts), tx.sgd(0.1)))
    got, state, want, pure = both_ways(pipeline, [BATCHES[0] * float("nan"), *BATCHES[1:]], on_device)
    assert state.skipped == pure.skipped == 1
    assert max_diff(got, want) < 1e-14 and max_diff(want, net_params()) > 0


def test_state_may_keep_the_parameters_it_was_given() -> None:
    """Parameters in the state of a parameter transform keep their values when the step overwrites the parameters."""

    def pull(new: Any, state: Any) -> Any:
        anchor, before = state
        return {path: 0.5 * new[path] + 0.25 * anchor[path] + 0.25 * before[path] for path in new}, (anchor, new)

    pipeline = tx.fuse(MEAN, tx.sgd(0.1), after=made(lambda params: (params, params), pull))
    got, state, want, pure = both_ways(pipeline, BATCHES)
    assert max_diff((got, state.after), (want, pure.after)) < 1e-14


def test_values_by_path_that_are_no_buffers() -> None:
    """Only values of the size of a flat bucket are split by path; other values belong to every leaf."""
    _, state, _, _ = both_ways(tx.fuse(tx.chain(SMOOTH, MEAN), tx.sgd(0.1)), BATCHES[:1])
    memory, calls = state.hook[0]
    assert calls == dict.fromkeys(net_params(), 1) and memory["a.weight"].shape == (5, 4)


def test_a_bare_tensor_keeps_its_shape() -> None:
    rows = tx.chain(tx.stateless(lambda g: g / g.norm(dim=-1, keepdim=True)), MEAN)
    batch = torch.tensor([[3.0, 4.0, 0.0], [0.0, 6.0, 8.0]])
    for start, of in ((torch.ones(2, 3), lambda p: p), ({"w": torch.ones(2, 3)}, lambda p: p["w"])):
        step = fjoin.train_step(lambda p, b, of=of: (of(p) * b).sum(), tx.fuse(rows, SGD))
        state, _ = step(step.init(start), batch)
        assert torch.allclose(of(state.params), 1 - batch / batch.norm(dim=-1, keepdim=True))


@pytest.mark.parametrize("function", [lambda g: g / g.abs(), lambda g: 1e30 * (g + 1)], ids=["unit", "grows"])
def test_padding_between_leaves_is_ignored(function: Any) -> None:
    """Leaves begin on 64 bytes; a hook may make NaN of the zeros between them, or more and more."""
    hook, batch = tx.chain(tx.stateless(function, elementwise=True), MEAN), torch.tensor([1.0, 2.0, 3.0])
    step = fjoin.train_step(lambda p, b: (p["w"] * b).sum() + p["v"].sum(), tx.fuse(hook, SGD))
    state = stepped(step, step.init({"w": torch.zeros(3), "v": torch.zeros(5)}), [batch] * 3)
    assert torch.allclose(state.params["w"], -3 * function(batch))


def test_a_state_that_was_kept_is_not_written_into() -> None:
    """A hook that gives the gradients of the step before: its output is a tensor of its old state."""
    late = made(
        lambda params: ({path: torch.full_like(p, 10.0) for path, p in params.items()},), lambda g, s: (s[0], (g,))
    )
    hook = tx.chain(late, tx.clip_by_global_norm(1.0))
    step, old = step_of(lambda p, b: (p["w"] * b).sum(), tx.fuse(hook, SGD), {"w": torch.zeros(3)}, donate=False)
    step(old, torch.ones(3))
    assert old.pipeline.hook[0][0]["w"].tolist() == [10.0] * 3


@pytest.mark.parametrize("needs", [tx.Needs.LEAVES, tx.Needs.TREE])
def test_a_hook_may_give_leaves_each_others_gradients(needs: Any) -> None:
    swap = made(lambda params: (), lambda g, state: ({"a": g["b"], "b": g["a"]}, ()), needs)
    start = {"a": torch.zeros(2), "b": torch.zeros(2)}
    for pipeline in (tx.fuse(swap, SGD), tx.fuse(MEAN, SGD, after=swap)):
        step = fjoin.train_step(lambda p, b: 3 * p["a"].sum() + p["b"].sum(), pipeline)
        state, _ = step(step.init(start), None)
        assert (state.params["a"].tolist(), state.params["b"].tolist()) == ([-1.0] * 2, [-3.0] * 2)
    square = torch.arange(4.0).view(2, 2)
    step = fjoin.train_step(lambda p, b: (p["w"] * square).sum(), tx.fuse(tx.stateless(torch.t), SGD))
    state, _ = step(step.init({"w": torch.zeros(2, 2)}), None)
    assert torch.equal(state.params["w"], -square.t())


def returning(given: Any, needs: Any) -> tx.Transform:
    return made(lambda params: (), lambda g, state: (given, state), needs)


TREES = (tx.Needs.LEAVES, tx.Needs.TREE)
# A hook that returns something else, the type of the error, and its words.
WRONG: list[tuple[Any, ...]] = [
    (tx.stateless(lambda g: g.mean()), ValueError, "'w'", "shape ()", "expected (2,)"),
    (returning(None, TREES[0]), ValueError, "returned None"),
    *((returning(given, needs), TypeError, "'w'", f"returned {text}, expected a tensor of shape (2,)") for needs in TREES
      for given, text in (({"w": 1.0}, "a value of type float"), ({"w": None}, "nothing"), ({}, "nothing"), (3, "a value of type int"))),
]  # fmt: skip


@pytest.mark.parametrize("row", range(len(WRONG)))
def test_hooks_that_return_something_else_are_refused(row: int) -> None:
    hook, kind, *texts = WRONG[row]
    step, state = step_of(lambda p, b: p["w"].sum(), tx.fuse(hook, SGD), {"w": torch.zeros(2)})
    raises_text(kind, lambda: step(state, None), *texts)


def states_alive() -> list[int]:
    """How many of a hook's old states live on after each step, without Python's search for cycles."""
    seen: list[Any] = []

    def update(grads: Any, state: Any) -> Any:
        out, new = smooth(grads, state)
        seen.extend(weakref.ref(m) for m in new[0].values())
        return out, new

    hook = tx.chain(made(empty, update), MEAN)
    step = fjoin.train_step(net_loss, tx.fuse(hook, tx.sgd(0.1)), mesh=fjoin.mesh({"data": -1}), bucket_bytes=100)
    state, counts = step.init(net_params()), []
    gc.collect()
    gc.disable()
    try:
        for i in range(4):
            state, _ = step(state, net_batch(0, i))
            counts.append(sum(ref() is not None for ref in seen))
    finally:
        gc.enable()
    return counts


def test_old_states_are_freed_at_once(pool: Any) -> None:
    for counts in pool.run(2, states_alive):
        assert counts == counts[:1] * 4, counts


class Interrupted:
    """A lock in whose call the main thread is interrupted: before it is taken, or after it was freed."""

    def __init__(self, lock: threading.Lock, where: str) -> None:
        self.lock, self.where, self.freed = lock, where, threading.Event()

    def acquire(self) -> None:
        if self.where == "acquire":
            assert self.freed.wait(10)
            raise KeyboardInterrupt
        self.lock.acquire()

    def release(self) -> None:
        self.lock.release()
        self.freed.set()
        if self.where == "release":
            raise KeyboardInterrupt

    def locked(self) -> bool:
        return self.lock.locked()


@pytest.mark.parametrize("where", ["acquire", "release"])
def test_interrupted_step_ends_its_threads_silently(monkeypatch: Any, where: str) -> None:
    """This holds at both places at which the main thread can be interrupted."""
    said: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", said.append)
    waves = Interleaver({})
    tasks = [Coroutine(waves, lambda i=i: tasks[i].pause()) for i in range(2)]
    waves._tasks.extend(tasks)
    tasks[1].go_on()
    if where == "acquire":
        tasks[0]._back = Interrupted(tasks[0]._back, where)  # type: ignore[assignment]
    else:
        tasks[0].go_on()
        tasks[0]._turn = Interrupted(tasks[0]._turn, where)  # type: ignore[assignment]
    raises_text(KeyboardInterrupt, lambda: tasks[0].go_on())
    waves.clear()
    for task in tasks:
        assert task._thread is not None
        task._thread.join(10)
        assert task.done and not task._thread.is_alive() and not said


GIVES_BACK = """
import sys, threading
import torch
from fjoin.groups._axis import keep_freed

def held():
    return int(open("/proc/self/statm").read().split()[1]) * 4096

def work():
    tensors = [torch.ones(2**20) for _ in range(6)]
    before = held()
    tensors.clear()
    print(before - held())

torch.ones(1)
if sys.argv[1] == "kept":
    keep_freed()
thread = threading.Thread(target=work)
thread.start()
thread.join()
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other libraries keep, or do not, by rules of their own")
@pytest.mark.long
def test_threads_keep_freed_memory() -> None:
    """The threads free 24 MB, which glibc returns to the kernel by default."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_", "LD_PRE"))}
    given_back = {}
    for how in ("kept", "as it is"):
        command = [sys.executable, "-c", GIVES_BACK, how]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, check=True)
        given_back[how] = int(done.stdout)
    assert given_back["kept"] < 4 * 2**20 and given_back["as it is"] > 20 * 2**20
