"""All that a step does in streams of a device is ordered: kernels, messages, copies to the host, reuse of memory."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch

from fjoin import transforms as tx
from fjoin.buckets import GradBuffer, start_gather
from fjoin.records import DeviceReads, _device_reads
from fjoin.step._interleave import SideStreams, Started
from fjoin.step._reducer import SumReducer
from fjoin.training._flat_step import FlatStep
from fjoin.transforms.base import devices
from tests.devices.fake_device import MAIN, EchoAxis, EchoMesh, OrderedDevice, Stream
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
