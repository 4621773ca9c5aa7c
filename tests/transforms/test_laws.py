"""Every public transform, optimizer and codec obeys the laws."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import optax
import pytest
import torch
from optimizer_table import OPTIMIZERS
from torch import Tensor

import fjoin
from fjoin import transforms as tx
from fjoin.testing import CODEC_LAWS, FEEDBACK_LAWS, OPTIMIZER_LAWS, TRANSFORM_LAWS
from fjoin.transforms._spec import _FACTORIES


def _negate(g: Tensor) -> Tensor:
    return -g


def _to_norm_one(g: Tensor) -> Tensor:
    return g / g.norm().clamp(min=1e-6)


# One row or more for each public factory: the object that `make` returns is checked by all laws of its kind.
TRANSFORMS: dict[str, list[Callable[[], tx.Transform]]] = {
    "accumulate": [
        lambda: tx.accumulate(2, tx.mean("data")),
        lambda: tx.accumulate(1, tx.mean("data")),
        lambda: tx.accumulate(2, tx.error_feedback(tx.quantized_mean("data", tx.int8()))),
    ],
    "adasum": [lambda: tx.adasum("data")],
    "all_gather_mean": [
        lambda: tx.all_gather_mean("data"),
        lambda: tx.all_gather_mean("data", over="world"),
        lambda: tx.error_feedback(tx.compress(tx.top_k(0.5), tx.all_gather_mean("data", over="live"))),
    ],
    # With over="world" the parameters of a rank without input count too.
    "average_every": [lambda: tx.average_every(2, "data", 1), lambda: tx.average_every(1, "data", over="live")],
    "average_parameters": [
        lambda: tx.average_parameters("data"),
        lambda: tx.average_parameters("data", over="live"),
        lambda: tx.average_parameters(("node", "local")),
    ],
    "ema": [lambda: tx.ema(0.9), lambda: tx.chain(tx.average_parameters("data"), tx.ema(0.5))],
    "gossip": [lambda: tx.gossip("data"), lambda: tx.gossip("data", over="live")],
    "hierarchical_average": [lambda: tx.hierarchical_average({1: "local", 2: ("node", "local")})],
    "in_fragments": [
        lambda: tx.in_fragments(tx.identity(), tx.clip_by_value(0.1)),
        lambda: tx.in_fragments(tx.every(2, tx.average_parameters("data")), tx.average_parameters("data")),
    ],
    "outer_step": [
        lambda: tx.outer_step(tx.mean("data"), tx.sgd(0.7, momentum=0.9, nesterov=True)),
        lambda: tx.outer_step(tx.mean("data"), tx.sgd(0.7), steps=2, delay=1, mix=0.5),
        lambda: tx.outer_step(tx.error_feedback(tx.quantized_mean("data", tx.int8(block=4))), tx.adam(0.1), 2, first=0),
    ],
    "average_buffers": [lambda: tx.average_buffers("data")],
    "broadcast_buffers": [lambda: tx.broadcast_buffers("data")],
    "cast": [
        lambda: tx.cast(torch.bfloat16, tx.mean("data")),
        lambda: tx.cast(torch.float16, tx.chain(tx.clip_by_value(0.5), tx.mean("data", over="live"))),
        lambda: tx.cast(torch.float32, tx.sum_over("data")),
    ],
    "compress": [
        lambda: tx.compress(tx.int8(), tx.mean("data", over="world")),
        lambda: tx.compress(tx.bfloat16(), tx.partition({"layer.*": tx.mean("data"), "*": tx.sum_over("data")})),
        lambda: tx.compress(tx.qsgd(127), tx.chain(tx.mean("data"), tx.clip_by_value(0.5))),
        lambda: tx.compress(tx.bfloat16(stochastic=True), tx.mean("data"), seed=2),
    ],
    "hierarchical_mean": [
        lambda: tx.hierarchical_mean("local", "node"),
        lambda: tx.hierarchical_mean("local", "node", over="world"),
        lambda: tx.hierarchical_mean("node", "local", tx.int8(block=4), over="live"),
        lambda: tx.compress(tx.bfloat16(), tx.hierarchical_mean("local", "node")),
        lambda: tx.error_feedback(tx.compress(tx.int8(stochastic=True), tx.hierarchical_mean("node", "local"))),
        lambda: tx.error_feedback(tx.hierarchical_mean("local", "node", tx.int8(block=4))),
    ],
    "error_feedback": [
        lambda: tx.error_feedback(tx.quantized_mean("data", tx.random_k(0.5))),
        lambda: tx.error_feedback(tx.quantized_mean("data", tx.int8(block=4))),
        lambda: tx.error_feedback(tx.cast(torch.bfloat16, tx.mean("data", over="world")), without_input="flush"),
        lambda: tx.error_feedback(
            tx.partition({"layer.*": tx.quantized_mean("data", tx.int4()), "*": tx.mean("data")})
        ),
    ],
    "dgc": [lambda: tx.dgc("data", k=0.3, clip=1.0), lambda: tx.dgc("data", nesterov=True, warmup=2, over="live")],
    "ef21": [
        lambda: tx.ef21(tx.quantized_mean("data", tx.int8(block=4))),
        lambda: tx.ef21(tx.cast(torch.bfloat16, tx.mean("data", over="live")), without_input="flush"),
        lambda: tx.ef21(tx.compress(tx.top_k(0.5), tx.sum_over("data"))),
    ],
    "loco": [
        lambda: tx.loco(tx.quantized_mean("data", tx.int4(block=4))),
        lambda: tx.loco(tx.cast(torch.bfloat16, tx.mean("data")), beta=0.5, reset=2, memory=tx.bfloat16()),
    ],
    "quantized_mean": [
        lambda: tx.quantized_mean("data", tx.int8(block=4)),
        lambda: tx.quantized_mean("data", tx.int4(block=4), over="live"),
        lambda: tx.quantized_mean("data", tx.fp8()),
        lambda: tx.quantized_mean("data", tx.int8(stochastic=True), seed=3),
        lambda: tx.quantized_mean("data", tx.top_k(0.5)),
    ],
    "power_sgd": [
        lambda: tx.power_sgd("data", min_compression_rate=1.0),
        lambda: tx.power_sgd("data", 2, min_compression_rate=0.5, warm_start=False, over="live", seed=3),
        lambda: tx.power_sgd("data", 2, start=1, min_compression_rate=0.5, epsilon=1e-8, over="world"),
        lambda: tx.error_feedback(tx.power_sgd("data", min_compression_rate=1.0)),
        lambda: tx.error_feedback(tx.compress(tx.bfloat16(), tx.power_sgd("data", min_compression_rate=1.0)), "flush"),
        lambda: tx.compress(tx.int8(block=4), tx.power_sgd("data", min_compression_rate=1.0, over="world")),
        lambda: tx.partition({"layer.*": tx.power_sgd("data", min_compression_rate=1.0), "*": tx.mean("data")}),
    ],
    "batched_power_sgd": [
        lambda: tx.batched_power_sgd("data", min_compression_rate=1.0),
        lambda: tx.batched_power_sgd("data", min_compression_rate=1.0, warm_start=False, over="live"),
        lambda: tx.error_feedback(tx.batched_power_sgd("data", min_compression_rate=1.0, start=1), "flush"),
        lambda: tx.cast(torch.bfloat16, tx.batched_power_sgd("data", min_compression_rate=1.0, over="world")),
    ],
    "chain": [
        lambda: tx.chain(tx.mean("data"), tx.clip_by_global_norm(0.5)),
        lambda: tx.chain(tx.clip_by_value(0.5), tx.sum_over("data")),
        lambda: tx.chain(tx.mean("data"), tx.mean("data", over="live")),
        lambda: tx.chain(tx.stateless(_to_norm_one), tx.quantized_mean("data", tx.int8(block=4))),
        lambda: tx.chain(tx.adasum("local"), tx.quantized_mean("node", tx.int8(block=4))),
        lambda: tx.every(2, tx.chain(tx.stateless(_to_norm_one), tx.quantized_mean("data", tx.int8(block=4)))),
        lambda: tx.error_feedback(tx.chain(tx.stateless(_to_norm_one), tx.quantized_mean("data", tx.int8(block=4)))),
    ],
    "clip_by_global_norm": [
        lambda: tx.clip_by_global_norm(0.5),
        lambda: tx.clip_by_global_norm(0.5, mode="previous"),
    ],
    "clip_by_value": [lambda: tx.clip_by_value(0.5)],
    "every": [lambda: tx.every(2, tx.mean("data"))],
    "from_optax": [
        lambda: tx.from_optax(optax.clip(0.5)),
        lambda: tx.from_optax(optax.chain(optax.trace(0.9), optax.scale_by_adam())),
        lambda: tx.chain(tx.mean("data"), tx.from_optax(optax.clip_by_global_norm(0.5))),
    ],
    "identity": [tx.identity],
    "logged": [lambda: tx.logged(tx.mean("data")), lambda: tx.logged(tx.quantized_mean("data", tx.int8()), every=2)],
    "majority_vote": [lambda: tx.majority_vote("data"), lambda: tx.majority_vote("data", over="world")],
    "masked": [
        lambda: tx.masked(tx.mean("data"), "layer.*"),
        lambda: tx.masked(tx.clip_by_value(0.1), ["scale", "*bias"]),
        lambda: tx.masked(tx.every(2, tx.mean("data")), "layer.weight"),
    ],
    "mean": [lambda: tx.mean("data"), lambda: tx.mean("data", over="live"), lambda: tx.mean("data", over="world")],
    "noop": [tx.noop],
    "one_bit_adam": [lambda: tx.one_bit_adam("data", 1), lambda: tx.one_bit_adam("data", 2, over="live")],
    "one_bit_lamb": [lambda: tx.one_bit_lamb("data", 1), lambda: tx.one_bit_lamb("data", 2, codec=tx.int8(block=4))],
    "partition": [
        lambda: tx.partition({"layer.*": tx.mean("data"), "*": tx.sum_over("data")}),
        lambda: tx.partition({"*bias": tx.identity(), "*": tx.clip_by_value(0.2)}),
    ],
    "skip_if_nonfinite": [lambda: tx.skip_if_nonfinite(tx.mean("data"))],
    "stateless": [lambda: tx.stateless(_negate), lambda: tx.stateless(_negate, elementwise=True)],
    "sum_over": [lambda: tx.sum_over("data")],
    "tap": [lambda: tx.tap(len), lambda: tx.chain(tx.tap(len), tx.mean("data"))],
    "switch_after": [
        lambda: tx.switch_after(1, tx.mean("data"), tx.sum_over("data")),
        lambda: tx.switch_after(2, tx.identity(), tx.mean("data")),
        lambda: tx.switch_after(2, tx.stateless(_to_norm_one), tx.quantized_mean("data", tx.int8(block=4))),
    ],
}
SCHEDULES = {"constant", "cosine", "linear", "one_cycle", "piecewise", "tabulated", "warmup", "warmup_cosine"}
PIPELINES = {"fuse", "dynamic_loss_scale", "local_sgd", "post_local_sgd", "diloco", "slow_mo", "zero"}
OF_STATES = {"average_state", "reset_state"}  # these take the state of an optimizer
SHARDED = {"scatter_mean"}  # its result is slices; see tests/transforms/sharding


CODECS: dict[str, list[Callable[[], tx.Codec]]] = {
    "bfloat16": [tx.bfloat16, lambda: tx.bfloat16(stochastic=True)],
    "bfp16": [tx.bfp16],
    "float16": [tx.float16],
    "float32": [tx.float32],
    "fp8": [
        tx.fp8,
        lambda: tx.fp8(block=3, dtype=torch.float8_e5m2),
        lambda: tx.fp8(stochastic=True),
        lambda: tx.fp8(dtype=torch.float8_e5m2, stochastic=True),
    ],
    "int4": [tx.int4, lambda: tx.int4(block=3), lambda: tx.int4(stochastic=True)],
    "int8": [tx.int8, lambda: tx.int8(block=3), lambda: tx.int8(block=1), lambda: tx.int8(stochastic=True)],
    "natural": [tx.natural],
    "one_bit": [tx.one_bit, lambda: tx.one_bit(block=3), lambda: tx.one_bit(block=None)],
    "qsgd": [tx.qsgd, lambda: tx.qsgd(levels=127, block=3), lambda: tx.qsgd(levels=3, block=5)],
    "random_k": [
        lambda: tx.random_k(0.3),
        lambda: tx.random_k(1.0, values=tx.int8(stochastic=True)),
        lambda: tx.random_k(0.01, tx.bfloat16()),
    ],
    "sign": [tx.sign, lambda: tx.sign(block=3), lambda: tx.sign(block=None)],
    "terngrad": [tx.terngrad, lambda: tx.terngrad(block=3), lambda: tx.terngrad(clip=2.5)],
    "threshold": [lambda: tx.threshold(0.5, most=0.3), lambda: tx.threshold(0.0, most=1.0, values=tx.float16())],
    "top_k": [lambda: tx.top_k(0.3), lambda: tx.top_k(0.01, tx.int8(block=3)), lambda: tx.top_k(1.0, tx.qsgd())],
    "uint8": [tx.uint8, lambda: tx.uint8(block=3), lambda: tx.uint8(block=512)],
}


# Lossy means; and a row for each codec.
LOSSY: dict[str, list[Callable[[], tx.Transform]]] = {
    "live": [lambda: tx.quantized_mean("data", tx.int4(), over="live")],
    "world": [lambda: tx.quantized_mean("data", tx.int4(block=3), over="world")],
    "cast": [lambda: tx.cast(torch.bfloat16, tx.mean("data"))],
    "gathered": [lambda: tx.compress(tx.int4(), tx.all_gather_mean("data"))],
    "hierarchical": [
        lambda: tx.hierarchical_mean("local", "node", tx.int4(block=5)),
        lambda: tx.compress(tx.int4(), tx.hierarchical_mean("node", "local", over="world")),
    ],
    "power_sgd": [
        lambda: tx.power_sgd("data", min_compression_rate=1.0),
        lambda: tx.power_sgd("data", min_compression_rate=1.0, warm_start=False, over="world"),
        lambda: tx.compress(tx.int8(), tx.power_sgd("data", min_compression_rate=1.0)),
        lambda: tx.batched_power_sgd("data", min_compression_rate=1.0),
    ],
    "by path": [lambda: tx.partition({"layer.*": tx.quantized_mean("data", tx.int4()), "*": tx.mean("data")})],
    "later": [lambda: tx.switch_after(2, tx.mean("data"), tx.quantized_mean("data", tx.sign()))],
}


def test_every_public_factory_has_a_row() -> None:
    public = {name for name, value in vars(tx).items() if name in _FACTORIES and inspect.isfunction(value)}
    assert public == TRANSFORMS.keys() | OPTIMIZERS.keys() | SCHEDULES | PIPELINES | OF_STATES | SHARDED | CODECS.keys()


def _cases(table: dict[str, list[Any]], laws_: list[Any]) -> list[Any]:
    return [
        pytest.param(make, law, id=f"{name}{i}-{law.__name__}")
        for name, rows in table.items() for i, make in enumerate(rows) for law in laws_
    ]  # fmt: skip


@pytest.mark.parametrize(("make", "law"), _cases(TRANSFORMS, TRANSFORM_LAWS))
def test_transform(make: Any, law: Any) -> None:
    law(make)


CODED = {name: [lambda make=make: tx.quantized_mean("data", make()) for make in rows] for name, rows in CODECS.items()}


@pytest.mark.parametrize(("make", "law"), _cases({**LOSSY, **CODED}, FEEDBACK_LAWS))
def test_error_feedback(make: Any, law: Any) -> None:
    law(make)


@pytest.mark.parametrize(("make", "law"), _cases(OPTIMIZERS, OPTIMIZER_LAWS))
def test_optimizer(make: Any, law: Any) -> None:
    law(make)


@pytest.mark.parametrize(("make", "law"), _cases(CODECS, CODEC_LAWS))
def test_codec(make: Any, law: Any) -> None:
    law(make)


@pytest.mark.parametrize("default", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("make", "kind"), _cases(CODECS, [tx.Codec]))
def test_no_codec_asks_for_the_default_dtype(make: Any, kind: Any, default: torch.dtype) -> None:
    codec, x = make(), torch.randn(3, 100, generator=torch.Generator().manual_seed(0))
    key = torch.tensor(1, dtype=torch.int32)
    noise = (tx.Noise(torch.arange(300, dtype=torch.int32).view(3, 100), key, key),) if codec.stochastic else ()
    want = codec.encode(x, *noise)
    back = codec.decode(want, 100)
    torch.set_default_dtype(default)
    try:
        assert torch.equal(codec.encode(x, *noise), want) and torch.equal(codec.decode(want, 100), back)
    finally:
        torch.set_default_dtype(torch.float32)


def _times_ten(g: Tensor) -> Tensor:
    return 10 * g


def test_what_is_right_of_ones_own_passes() -> None:
    """Stages after a mean have no restrictions, and handwritten transforms need not be JSON."""

    def codec() -> tx.Codec:
        right = tx.bfloat16()
        return tx.Codec(right.encode, right.decode, right.width, elementwise=True)

    def transform() -> tx.Transform:
        right = tx.mean("data")
        return tx.Transform(
            right.init, right.update, needs=tx.Needs.NOTHING, reduces=right.reduces and tx.Reduction(right.reduces.sums)
        )

    fjoin.testing.check_transform(lambda: tx.chain(tx.mean("data"), tx.stateless(_times_ten)))
    fjoin.testing.check_transform(lambda: tx.chain(tx.mean("data"), tx.stateless(torch.neg)))
    fjoin.testing.check_transform(transform)
    fjoin.testing.check_codec(codec)


def test_all_laws_run_on_all_rows() -> None:
    """Always: only tables that multiply options are sampled."""
    for test in (test_transform, test_error_feedback, test_optimizer, test_codec):
        marks = getattr(test, "pytestmark", [])
        assert {mark.name for mark in marks} == {"parametrize"}
        (cases,) = (mark.args[1] for mark in marks)
        rows, laws = {id(case.values[0]) for case in cases}, {id(case.values[1]) for case in cases}
        assert len(cases) == len(rows) * len(laws)
