"""All that a step does in streams of a device is ordered: kernels, messages, copies to the host, reuse of memory. Other threads."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import fjoin
from fjoin import transforms as tx
from fjoin.buckets import GradBuffer, start_gather
from fjoin.records import DeviceReads, _device_reads
from fjoin.step._interleave import SideStreams, Started
from fjoin.step._reducer import SumReducer
from fjoin.training._flat_step import FlatStep
from fjoin.training._passes import GradOutput
from fjoin.transforms.axes import _environment as _axis_env
from fjoin.transforms.base import devices
from fjoin.transforms.sync import BatchNormState
from tests.devices.fake_device import MAIN, EchoAxis, EchoMesh, OrderedDevice, Stream
from tests.helpers import raises_text, stepped
from tests.pool import JobFailed
from tests.training.small import step_of

MEAN, SCATTER, INT8 = tx.mean("data"), tx.scatter_mean("data"), tx.int8(block=4)
PIPELINES: dict[str, tuple[Callable[[], tx.Pipeline], dict[str, Any]]] = {
    "mean": (lambda: tx.fuse(MEAN, tx.adamw(0.1)), {}),
    "mean, float64 rates": (lambda: tx.fuse(MEAN, tx.sgd(tx.warmup_cosine(0.1, 2, 9), momentum=0.5)), {}),
    "bfloat16": (lambda: tx.fuse(tx.compress(torch.bfloat16, MEAN), tx.adamw(0.1)), {}),
    "clipped": (lambda: tx.fuse(tx.chain(MEAN, tx.clip_by_global_norm(0.5)), tx.adamw(0.1)), {}),
    "int8": (lambda: tx.fuse(tx.compress(INT8, tx.mean("data")), tx.adamw(0.1)), {}),
    "fed back": (lambda: tx.fuse(tx.error_feedback(tx.compress(INT8, tx.mean("data"))), tx.adamw(0.1)), {}),
    "power_sgd": (lambda: tx.fuse(tx.error_feedback(tx.power_sgd("data", min_compression_rate=0.5)), tx.adamw(0.1)), {}),
    "zero": (lambda: tx.fuse(SCATTER, tx.adamw(0.1)), {}),
    "zero, int8 gather": (lambda: tx.fuse(SCATTER, tx.adamw(0.1), gather_codec=INT8), {}),
    "local": (lambda: tx.local_sgd(tx.sgd(0.1), tx.mean("data"), 2), {}),
    "skip": (lambda: tx.skip_if_nonfinite(tx.fuse(MEAN, tx.adamw(0.1))), {}),
    "accumulate": (lambda: tx.fuse(MEAN, tx.adamw(0.1)), {"accumulate": 2}),
    "state kept": (lambda: tx.fuse(MEAN, tx.adamw(0.1)), {"donate": False}),
}  # fmt: skip


# Of this file alone.
MORE: dict[str, tuple[Callable[[], tx.Pipeline], dict[str, Any]]] = {
    "loss scale": (lambda: tx.dynamic_loss_scale(tx.fuse(MEAN, tx.sgd(0.1)), 8.0, growth_interval=3), {}),
    "by path": (lambda: tx.fuse(tx.partition({"[ab]": MEAN, "*": tx.compress(INT8, MEAN)}), tx.adamw(0.1)), {}),
    "first whole, then int8": (lambda: tx.fuse(tx.switch_after(2, MEAN, tx.compress(INT8, MEAN)), tx.sgd(0.1)), {}),
    "zero, accumulate": (lambda: tx.fuse(SCATTER, tx.adamw(0.1)), {"accumulate": 2}),
    "local, late": (lambda: tx.diloco(tx.sgd(0.1), MEAN, 3, tx.sgd(0.7), delay=1), {}),
    "local, average of states": (lambda: tx.local_sgd(tx.adamw(0.1), MEAN, 2, state="average"), {}),
}  # fmt: skip


def loss_fn(p: Any, batch: torch.Tensor) -> torch.Tensor:
    hidden = torch.tanh(batch @ p["a"] + p["b"])
    return ((hidden @ p["c"] + p["d"]) ** 2).mean()


def params() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {"a": torch.randn(3, 4), "b": torch.zeros(4), "c": torch.randn(4, 3), "d": torch.zeros(3)}


def reports(name: str, *faults: tuple[Any, str, Any], leaf: Any = None, other: bool = False) -> list[str]:
    """What is not ordered in some steps.

    Args:
        faults: Parts of fjoin that are replaced.
        leaf: The stream of a leaf's gradient, given its bucket and place.
        other: Whether the steps are in another stream than `init`, which waits for that of `init`.
    """
    make, options = (PIPELINES | MORE)[name]
    own = params()
    with OrderedDevice().used(*faults) as device, contextlib.ExitStack() as stack:
        device.leaf_stream = leaf or device.leaf_stream
        mesh = EchoMesh(EchoAxis(device.message))
        step, state = step_of(loss_fn, make(), own, mesh=mesh, weight=len, bucket_bytes=40, **options)
        if other:
            device.leaf_stream = lambda bucket, i: MAIN  # gradients arrive in the stream of `init`
            stream = Stream(device, "other")
            stream.wait_stream(Stream(device, MAIN))
            stack.enter_context(stream)
        for i in range(6):
            state, metrics = step(state, torch.randn(2 + i % 3, 3))
        _ = metrics.loss
        state.params["a"].sum()
        step.close() if "local" not in name else None
    return device.reports


@pytest.mark.parametrize("name", [*PIPELINES, *MORE])
def test_no_step_leaves_anything_to_chance(name: str) -> None:
    assert "\n".join(reports(name)[:5]) == ""


@pytest.mark.parametrize("name", ["mean", "fed back", "zero"])
def test_steps_may_be_in_another_stream_than_init(name: str) -> None:
    assert "\n".join(reports(name, other=True)[:5]) == ""


# -- taken out, one at a time -----------------------------------------------------------------------------------------


def _does_not_wait_for_the_caller(side: Any, function: Any) -> Any:
    with side._streams[0]:
        function()
        return Started(torch.device("cpu"), devices.here(torch.device("cpu")))


def _does_not_wait_for_the_first(side: Any, function: Any) -> Any:
    side.begin()
    return _START(side, function)


_START, _LAUNCH, _STEP = SideStreams.start, SumReducer.launch, FlatStep._step_params


def _with_memory_of_the_caller(side: Any, function: Any) -> Any:
    given = [torch.ones(8)]

    def reads() -> None:
        given[0].sum()
        function()

    work = _START(side, reads)
    given.clear()
    torch.zeros(8)
    return work


def _writes_the_record_after(hook: Any, index: int, out: Any) -> Any:
    work = _LAUNCH(hook, index, out)
    out.words.copy_(out.words.clone())
    return work


def _gathers_first(step: Any, outgoing: Any) -> None:
    for index in range(len(outgoing)):
        start_gather(step._body.storage, index, step._run.mesh)
    _STEP(step, outgoing)


def _reads_at_once(reads: Any, newest: bool, keep: bool = False) -> Any:
    for what, words, _ in reads.under_way:
        yield what, words.tolist()
    reads.under_way = []


# What is taken out -> the pipeline, the part of fjoin that is replaced, what replaces it, and words of a report.
FAULTS: dict[str, tuple[str, Any, str, Any, str]] = {
    "the side stream does not wait for the caller":
        ("fed back", SideStreams, "start", _does_not_wait_for_the_caller, "in 'side"),
    "the caller does not wait for the side stream":
        ("fed back", Started, "wait", lambda end: None, "in 'main', after the write to it by"),
    "a message is not awaited": ("mean", GradBuffer, "wait", lambda out: setattr(out, "work", None), "by psum in 'message"),
    "the record is written after the message has begun":
        ("mean", SumReducer, "launch", _writes_the_record_after, "aten::copy_ in 'leaf', after the write to it by psum"),
    "parameters are stepped while a gather reads them":
        ("zero", FlatStep, "_step_params", _gathers_first, "after the read of it by gather"),
    "the next forward does not wait for a gather":
        ("zero", FlatStep, "_gather", lambda self, sharding, effect: None, "after the write to it by gather"),
    "the host reads a copy before its event": ("mean", _device_reads, "_await", lambda mesh, event: None, "a read in 'host'"),
    "the host reads a copy before its step": ("mean", DeviceReads, "read", _reads_at_once, "a read in 'host'"),
    "memory is freed in one stream and reused in another":
        ("fed back", SideStreams, "start", _with_memory_of_the_caller, "free memory is reused by"),
    "a bucket does not wait for the sums of the first":
        ("power_sgd", SideStreams, "start", _does_not_wait_for_the_first, "in 'side"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_what_is_taken_out_is_found(fault: str) -> None:
    name, owner, attribute, new, says = FAULTS[fault]
    found = reports(name, (owner, attribute, new))
    assert any(says in line for line in found), found[:5]


def test_gradients_of_one_bucket_in_different_streams_are_found() -> None:
    found = reports("mean", leaf=lambda bucket, i: f"leaf {i}")
    assert any("_foreach_copy_ in 'leaf" in line for line in found), found[:5]


# -- on a device autograd runs backward in a thread of its own: steps give the same numbers there --

# Autograd runs a backward pass that is nested deeper than this in a thread of its own.
_DEPTH = 70


class _Nested(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, depth: int, run: Callable[[], None]) -> Tensor:
        ctx.depth, ctx.run = depth, run
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        with torch.enable_grad():
            nested(ctx.run, ctx.depth - 1)
        return grad, None, None


def nested(run: Callable[[], None], depth: int = _DEPTH) -> None:
    """Call a function within so many backward passes."""
    if depth:
        _Nested.apply(torch.ones((), requires_grad=True), depth, run).backward()
    else:
        run()


def in_engine_thread(run: Callable[[], Any]) -> Any:
    """The result of a function that runs in a thread of autograd's."""
    out: list[Any] = []
    here = threading.get_ident()

    def inside() -> None:
        assert threading.get_ident() != here
        out.append(run())

    nested(inside)
    return out[0]


def elsewhere(threaded: bool = True) -> Any:
    """Backward passes of steps run in a thread of autograd's."""
    backward = GradOutput.backward
    moved = mock.patch.object(GradOutput, "backward", lambda *given: in_engine_thread(lambda: backward(*given)))
    return moved if threaded else contextlib.nullcontext()


def trained(name: str, threaded: bool) -> list[Tensor]:
    make, options = PIPELINES[name]
    own = params()
    with elsewhere(threaded):
        step = fjoin.train_step(loss_fn, make(), mesh=EchoMesh(), weight=len, bucket_bytes=40, **options)
        state = stepped(step, step.init(own), (torch.randn(2 + i % 3, 3) for i in range(4)))
    return [p.detach().clone() for p in state.params.values()]


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", PIPELINES)
def test_a_pipeline_runs_in_another_thread(name: str) -> None:
    assert all(map(torch.equal, trained(name, True), trained(name, False)))


# -- models that communicate, and again where a backward pass computes parts of them once more -------------------------

HOW: dict[str, Callable[..., Any]] = {
    "plain": lambda fn, *args: fn(*args),
    "checkpoint": lambda fn, *args: checkpoint(fn, *args, use_reentrant=False),
    "remat": lambda fn, *args: tx.remat(fn)(*args),
}


def _summed(p: Any, x: Tensor) -> Tensor:
    hidden = torch.tanh(x @ p["a"])
    return hidden * (1.0 + tx.psum(hidden.mean(), "data").tanh())


def _normed(p: Any, x: Tensor) -> Tensor:
    start = BatchNormState(torch.zeros(4), torch.ones(4))
    return torch.tanh(tx.sync_batch_norm(x @ p["a"], start, axis="data")[0])


BODIES = {"psum": _summed, "sync_batch_norm": _normed}


def looped(mesh: fjoin.Mesh, body: str, how: str, threaded: bool) -> Tensor:
    """This rank's parameters after a loop in which rank 1 has fewer batches, and then replays some with weight 0."""
    torch.manual_seed(7)
    start = {"a": torch.randn(3, 4)}
    batches = [torch.randn(5, 3) for _ in range(8)][mesh.rank :: 2][: 4 - 2 * mesh.rank]
    step = fjoin.train_step(
        lambda p, x: HOW[how](BODIES[body], p, x).square().mean(), tx.fuse(tx.mean("data"), tx.sgd(0.1)),
        mesh=mesh, weight=len,
    )  # fmt: skip
    state = step.init(start)
    with elsewhere(threaded):
        state = stepped(step, state, step.join(batches, when_exhausted="replay"))
    return state.params["a"]


def by_hand(mesh: fjoin.Mesh, body: str, how: str, threaded: bool) -> Tensor:
    """The gradient of a loop of one's own, in a `bind`."""
    with fjoin.bind(mesh):
        torch.manual_seed(7)
        p = {"a": torch.randn(3, 4, requires_grad=True)}
        loss = HOW[how](BODIES[body], p, torch.randn(5, 3) + mesh.rank).square().mean()
        in_engine_thread(loss.backward) if threaded else loss.backward()
    assert p["a"].grad is not None
    return p["a"].grad


def threaded_models() -> dict[tuple[Any, ...], list[float]]:
    """Numbers of each model in each way, by the model and the way."""
    mesh = fjoin.mesh({"data": -1})
    return {
        (make.__name__, body, how, threaded): make(mesh, body, how, threaded).flatten().tolist()
        for make, body in ((looped, "psum"), (looped, "sync_batch_norm"), (by_hand, "psum"))
        for how in HOW
        for threaded in (False, True)
    }


def without_bindings() -> None:
    with mock.patch.object(_axis_env, "bindings_of_caller", _axis_env._Bindings):
        looped(fjoin.mesh({"data": -1}), "psum", "checkpoint", True)


def test_what_is_computed_again_there_communicates(pool: Any) -> None:
    for found in pool.run(2, threaded_models):
        for name, values in found.items():
            assert values == pytest.approx(found[*name[:2], "plain", False], rel=1e-6, abs=1e-7), name


def test_a_thread_without_bindings_is_found(pool: Any) -> None:
    raises_text(JobFailed, lambda: pool.run(2, without_bindings), "UnboundAxis")


def test_torch_keeps_nothing_in_threads_that_end_on_the_host() -> None:
    """It would be freed behind the thread's end in Python, and abort the process where that ends at the same time."""

    def stashed() -> bool:
        step = fjoin.train_step(loss_fn, tx.fuse(tx.mean("data"), tx.sgd(0.1)))
        step(step.init(params()), torch.ones(2, 3))
        return torch._C._is_key_in_tls(_axis_env._KEY)

    assert tx.simulate(stashed, {"data": 2}) == [False, False]
    with mock.patch.object(devices, "in_use", lambda: True):
        assert tx.simulate(stashed, {"data": 2}) == [True, True]
