"""What a step launches beside its model, with which numbers of the host, and the bytes that it needs."""

from __future__ import annotations

import itertools
from typing import Any
from unittest import mock

import pytest
import torch

from fjoin import transforms as tx
from fjoin.buckets import GradBuffer
from tests.devices.fake_device import Kernel, Make, counted
from tests.devices.test_streams import PIPELINES
from tests.helpers import by_hand

MEAN, SCATTER, INT8 = tx.mean("data"), tx.scatter_mean("data"), tx.compress(tx.int8(), tx.mean("data"))

# -- launches, for the tensors of a transformer of 12 layers -----------------------------------------------------------

WIDTH, VOCABULARY, CONTEXT = 768, 16384, 512
_LAYER: dict[str, tuple[int, ...]] = {
    "norm_1.weight": (WIDTH,), "norm_1.bias": (WIDTH,), "qkv.weight": (3 * WIDTH, WIDTH), "qkv.bias": (3 * WIDTH,),
    "out.weight": (WIDTH, WIDTH), "out.bias": (WIDTH,), "norm_2.weight": (WIDTH,), "norm_2.bias": (WIDTH,),
    "up.weight": (4 * WIDTH, WIDTH), "up.bias": (4 * WIDTH,), "down.weight": (WIDTH, 4 * WIDTH), "down.bias": (WIDTH,),
}  # fmt: skip
SHAPES: dict[str, tuple[int, ...]] = {
    "words.weight": (VOCABULARY, WIDTH), "places.weight": (CONTEXT, WIDTH),
    **{f"layers.{i}.{name}": shape for i in range(12) for name, shape in _LAYER.items()}, "norm.weight": (WIDTH,),
    "norm.bias": (WIDTH,), "head.weight": (VOCABULARY, WIDTH),
}  # fmt: skip
RATE = tx.warmup_cosine(3e-4, 100, 2000)
# Each with the most launches that it may have, messages included: what it has now.
LIMITS: dict[str, tuple[Make, int]] = {
    "AdamW": (lambda: tx.fuse(MEAN, tx.adamw(3e-4)), 114),
    "with a schedule": (lambda: tx.fuse(MEAN, tx.adamw(RATE)), 130),
    "with a clip of the norm": (lambda: tx.fuse(tx.chain(MEAN, tx.clip_by_global_norm(1.0)), tx.adamw(3e-4)), 121),
    "messages in bfloat16": (lambda: tx.fuse(tx.compress(torch.bfloat16, MEAN), tx.adamw(3e-4)), 189),
    "messages in int8": (lambda: tx.fuse(INT8, tx.adamw(3e-4)), 354),
    "in int8, with error feedback": (lambda: tx.fuse(tx.error_feedback(INT8), tx.adamw(3e-4)), 519),
    "Lion": (lambda: tx.fuse(MEAN, tx.lion(3e-4)), 166),
    "scatter_mean": (lambda: tx.fuse(SCATTER, tx.adamw(3e-4)), 148),
}  # fmt: skip


def launches(make: Make) -> int:
    """Those of the third step."""
    return len(counted(make, SHAPES)[0][-1])


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", LIMITS)
def test_a_step_launches_no_more_than_this(name: str) -> None:
    make, limit = LIMITS[name]
    assert len(SHAPES) == 149 and launches(make) <= limit


def test_a_kernel_for_each_tensor_is_found() -> None:
    halved = by_hand(lambda grads, state: ({path: g * 0.5 for path, g in grads.items()}, state), tx.Needs.PATHS)
    assert launches(lambda: tx.fuse(tx.chain(MEAN, halved), tx.adamw(3e-4))) > LIMITS["AdamW"][1] + 140


# -- numbers of the host -----------------------------------------------------------------------------------------------

SMALL = {"a": (3, 4), "b": (4,), "c": (4, 3)}
MORE: dict[str, tuple[Make, dict[str, Any]]] = {
    "loss scale": (lambda: tx.dynamic_loss_scale(tx.fuse(MEAN, tx.sgd(0.1)), 8.0, growth_interval=3), {}),
    "ema": (lambda: tx.fuse(MEAN, tx.adamw(0.1), after=tx.ema(0.9)), {}),
    "injected schedule": (lambda: tx.fuse(MEAN, tx.inject_hyperparameters(tx.adamw(tx.warmup_cosine(0.1, 2, 9)))), {}),
    "norm": (lambda: tx.fuse(tx.chain(MEAN, tx.record_norm()), tx.lion(0.01)), {}),
    "muon": (lambda: tx.fuse(MEAN, tx.partition({"[bd]": tx.sgd(0.1, momentum=0.5), "*": tx.muon(0.1)})), {}),
}  # fmt: skip
ALL = {**PIPELINES, **MORE}
# Which kernels get them. Of any step: this rank's weight and the step's number go into the record by `full`, the weight
# into the start of backward by `full_like` and into the loss by `mul`, and the number is compared by `ne`.
RECORD = {"full", "mul.Tensor", "ne.Scalar"}
PLAIN, ENCODED, OTHER = RECORD | {"full_like"}, RECORD | {"div.Tensor"}, {"other kernels"}
VERDICTS: dict[str, set[str]] = {
    **dict.fromkeys(ALL, PLAIN),
    **dict.fromkeys(("bfloat16", "int8", "fed back", "power_sgd"), ENCODED),
    "loss scale": RECORD | {"nan_to_num_"},  # one of its numbers is NaN
    "local": OTHER,  # averages come in some steps only
    "accumulate": OTHER,  # within a window, and at its end
}


def last_steps(make: Make, **options: Any) -> list[list[Kernel]]:
    """The kernels of two steps of other weights."""
    return counted(make, SMALL, [1.0, 2.0, 3.0, 5.0], **options)[0][-2:]


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", ALL)
def test_kernels_get_no_more_numbers_of_the_host_and_no_copies_from_it(name: str) -> None:
    """Not even copies without a wait: from memory that is not pinned they go through a buffer of the driver's.

    A 0-d tensor of the host may be a number to other kernels.
    """
    make, options = ALL[name]
    first, second = last_steps(make, bucket_bytes=40, **options)
    assert second and not [kernel for kernel in second if "host" in kernel.shapes and "copy" in kernel.op]
    changed = {a.op.removeprefix("aten::") for a, b in zip(first, second, strict=False) if a != b}
    assert (changed if len(first) == len(second) else OTHER) == VERDICTS[name]


def _times(factor: Any) -> tx.Transform:
    """Gradients times a factor that changes in every step."""
    times = lambda grads, state: ({path: g * factor(state) for path, g in grads.items()}, state + 1)  # noqa: E731
    return by_hand(times, tx.Needs.PATHS, lambda params: torch.zeros((), device="meta"))


def test_a_number_of_the_host_is_found_and_one_of_the_device_is_not() -> None:
    calls = itertools.count(1.0)

    def found(factor: Any) -> bool:
        steps = last_steps(lambda: tx.fuse(tx.chain(MEAN, _times(factor)), tx.sgd(0.1)))
        return any(a != b and a.op == "aten::mul.Tensor" and (4,) in a.shapes for a, b in zip(*steps, strict=True))

    assert found(lambda state: next(calls)) and not found(lambda state: state)


# -- bytes, in units of the parameters: 16 of more than 25 MiB, so that gradients are sent directly --------------------

SIDE, COUNT = 2600, 16
LARGE = {f"p{i}": (SIDE, SIDE) for i in range(COUNT)}
UNIT = SIDE * SIDE * COUNT * 4
# Each with the bytes between steps, and the most within a step: parameters, states, gradients, and what is beside them.
BYTES: dict[str, tuple[Make, float, float]] = {
    "sgd": (lambda: tx.fuse(MEAN, tx.sgd(0.1)), 1, 2),
    "adamw": (lambda: tx.fuse(MEAN, tx.adamw(0.1)), 3, 4),
    # The codes of a bucket, and its decoded messages.
    "bfloat16": (lambda: tx.fuse(tx.compress(torch.bfloat16, MEAN), tx.sgd(0.1)), 1, 2.3),
    # Old errors and new ones, until the device has judged the step.
    "fed back": (lambda: tx.fuse(tx.error_feedback(INT8), tx.sgd(0.1)), 2, 4.4),
    # The formula's temporaries, of one parameter at a time.
    "adagrad": (lambda: tx.fuse(MEAN, tx.adagrad(0.1)), 2, 3.8),
    "muon": (lambda: tx.fuse(MEAN, tx.muon(0.1)), 2, 4),
    "lamb": (lambda: tx.fuse(MEAN, tx.lamb(0.1)), 3, 5.2),
    # Copies of the parameters and the states, since torch's kernel takes no `found_inf`, and its temporaries.
    "lion": (lambda: tx.fuse(MEAN, tx.lion(0.1)), 2, 6),
}


def bytes_of(make: Make) -> tuple[float, float]:
    """Those before the third step, and the most of it."""
    _, device = counted(make, LARGE)
    return device.start / UNIT, device.peak / UNIT


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", BYTES)
def test_a_step_needs_no_more_memory_than_this(name: str) -> None:
    make, between, most = BYTES[name]
    start, peak = bytes_of(make)
    assert start == pytest.approx(between, abs=0.01) and peak <= most + 0.01


def test_gradients_that_are_kept_are_found() -> None:
    with mock.patch.object(GradBuffer, "free", lambda out: None):
        assert bytes_of(BYTES["sgd"][0])[0] == pytest.approx(2, abs=0.01)
