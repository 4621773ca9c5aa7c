"""The number of launches of a step beside its model, for the tensors of a transformer of 12 layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from fjoin import transforms as tx
from tests.devices.kernels import Make, steps

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
MEAN, SCATTER = tx.mean("data"), tx.scatter_mean("data")
RATE = tx.warmup_cosine(3e-4, 100, 2000)
# Each with the most launches that it may have, messages included: what it has now.
LIMITS: dict[str, tuple[Make, int]] = {
    "AdamW": (lambda: tx.fuse(MEAN, tx.adamw(3e-4)), 114),
    "with a schedule": (lambda: tx.fuse(MEAN, tx.adamw(RATE)), 130),
    "with a clip of the norm": (lambda: tx.fuse(tx.chain(MEAN, tx.clip_by_global_norm(1.0)), tx.adamw(3e-4)), 121),
    "messages in bfloat16": (lambda: tx.fuse(tx.compress(torch.bfloat16, MEAN), tx.adamw(3e-4)), 189),
    "messages in int8": (lambda: tx.fuse(tx.compress(tx.int8(), tx.mean("data")), tx.adamw(3e-4)), 354),
    "in int8, with error feedback": (lambda: tx.fuse(tx.error_feedback(tx.compress(tx.int8(), tx.mean("data"))), tx.adamw(3e-4)), 519),
    "Lion": (lambda: tx.fuse(MEAN, tx.lion(3e-4)), 166),
    "scatter_mean": (lambda: tx.fuse(SCATTER, tx.adamw(3e-4)), 148),
}  # fmt: skip


def launches(make: Make) -> int:
    """Those of the third step."""
    return len(steps(make, SHAPES, [1.0, 1.0, 1.0])[-1])


@pytest.mark.parametrize("name", LIMITS)
def test_a_step_launches_no_more_than_this(name: str) -> None:
    make, limit = LIMITS[name]
    assert len(SHAPES) == 149 and launches(make) <= limit


def test_encoded_messages_carry_codes_only() -> None:
    """The record goes before them: 6 numbers of two words each."""
    make, _ = LIMITS["messages in bfloat16"]
    found = steps(make, SHAPES, [1.0, 1.0, 1.0])[-1]
    copies = [kernel.shapes[0] for kernel in found if kernel.op == "aten::_to_copy"]
    floats = [shape[1] for shape in copies if len(shape) == 2 and shape[0] == 1]  # as they are encoded
    record, *sent = [kernel.shapes[0][0] for kernel in found if kernel.op.startswith("message")]
    assert record == 12 and sent == [2 * n for n in floats] and len(floats) > 10


def test_a_kernel_for_each_tensor_is_found() -> None:
    def update(grads: Any, state: Any, params: Any = None, **extra: Any) -> Any:
        return {path: g * 0.5 for path, g in grads.items()}, state

    halved = tx.Transform(lambda params: (), update, needs=tx.Needs.PATHS)
    make: Callable[[], tx.Pipeline] = lambda: tx.fuse(tx.chain(MEAN, halved), tx.adamw(3e-4))  # noqa: E731
    assert launches(make) > LIMITS["AdamW"][1] + 140
