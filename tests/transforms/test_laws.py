"""Every public transform, optimizer and codec obeys the laws."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Callable
from typing import Any

import pytest
import torch

import fjoin
from examples.papers import dgc, ef21, one_bit_adam
from fjoin import transforms as tx
from fjoin.testing import LAWS
from fjoin.transforms.base.specs import _FACTORIES
from tests.optimizer_table import OPTIMIZERS
from tests.transform_table import TRANSFORMS

SCHEDULES = {"cosine", "linear", "warmup", "warmup_cosine"}
PIPELINES = {"fuse", "dynamic_loss_scale", "local_sgd", "post_local_sgd", "diloco", "zero"}
OF_STATES = {"average_state"}  # these take the state of an optimizer
SHARDED = {"scatter_mean"}  # its result is slices; see tests/transforms/sharding


CODECS: dict[str, list[Callable[[], tx.Codec]]] = {
    "bfloat16": [tx.bfloat16, lambda: tx.bfloat16(stochastic=True)],
    "bfp16": [tx.bfp16],
    "float16": [tx.float16],
    "float32": [tx.float32],
    "fp8": [
        tx.fp8, lambda: tx.fp8(block=3, dtype=torch.float8_e5m2), lambda: tx.fp8(stochastic=True),
        lambda: tx.fp8(dtype=torch.float8_e5m2, stochastic=True),
    ],
    "int4": [tx.int4, lambda: tx.int4(block=3), lambda: tx.int4(stochastic=True)],
    "int8": [tx.int8, lambda: tx.int8(block=3), lambda: tx.int8(block=1), lambda: tx.int8(stochastic=True)],
    "qsgd": [tx.qsgd, lambda: tx.qsgd(levels=127, block=3), lambda: tx.qsgd(levels=3, block=5)],
    "sign": [tx.sign, lambda: tx.sign(block=3), lambda: tx.sign(block=None)],
    "top_k": [lambda: tx.top_k(0.3), lambda: tx.top_k(0.01, tx.int8(block=3)), lambda: tx.top_k(1.0, tx.qsgd())],
    "uint8": [tx.uint8, lambda: tx.uint8(block=3), lambda: tx.uint8(block=512)],
}  # fmt: skip


# Lossy means; and a row for each codec.
LOSSY: dict[str, list[Callable[[], tx.Transform]]] = {
    "live": [lambda: tx.compress(tx.int4(), tx.mean("data", over="live"))],
    "world": [lambda: tx.compress(tx.int4(block=3), tx.mean("data", over="world"))],
    "cast": [lambda: tx.compress(torch.bfloat16, tx.mean("data"))],
    "hierarchical": [
        lambda: tx.compress(tx.int4(block=5), tx.hierarchical_mean("local", "node")),
        lambda: tx.compress(tx.int4(), tx.hierarchical_mean("node", "local", over="world")),
        lambda: tx.compress(tx.qsgd(3, block=4), tx.hierarchical_mean("local", "node", over="live")),
    ],
    "power_sgd": [
        lambda: tx.power_sgd("data", min_compression_rate=1.0),
        lambda: tx.power_sgd("data", min_compression_rate=1.0, warm_start=False, over="world"),
        lambda: tx.compress(tx.int8(), tx.power_sgd("data", min_compression_rate=1.0)),
        lambda: tx.power_sgd("data", 2, min_compression_rate=1.0, warmup_steps=2, over="live"),
        lambda: tx.compress(tx.bfloat16(), tx.power_sgd("data", 2, min_compression_rate=1.0)),
        *(
            lambda over=over: tx.batched_power_sgd("data", min_compression_rate=1.0, over=over)
            for over in ("weight", "live", "world")
        ),
    ],
    "by path": [lambda: tx.partition({"layer.*": tx.compress(tx.int4(), tx.mean("data")), "*": tx.mean("data")})],
    "later": [lambda: tx.switch_after(2, tx.mean("data"), tx.compress(tx.sign(), tx.mean("data")))],
}


def test_every_public_factory_has_a_row() -> None:
    public = {name for name, value in vars(tx).items() if name in _FACTORIES and inspect.isfunction(value)}
    public.add("from_optax")  # of fjoin.jax
    assert public == TRANSFORMS.keys() | OPTIMIZERS.keys() | SCHEDULES | PIPELINES | OF_STATES | SHARDED | CODECS.keys()


PAPERS: dict[str, list[Callable[[], tx.Transform]]] = {  # examples/papers.py compares them with plain torch
    "ef21": [lambda: ef21("data", tx.top_k(0.2))], "dgc": [lambda: dgc("data", 0.1, 0.8)],
    "one_bit_adam": [lambda: one_bit_adam("data", 3, (0.8, 0.95))],
}  # fmt: skip
OUTER = tx.sgd(0.7, momentum=0.9, nesterov=True)
AVERAGES: dict[str, list[Callable[[], tx.Transform]]] = {
    "every call": [lambda: tx.average_parameters("data"), lambda: tx.average_parameters("data", over="live")],
    "periodic": [
        lambda: tx.every(3, tx.average_parameters("data"), first=1), lambda: tx.every(2, tx.mean("data")),
        lambda: tx.every(2, tx.average_parameters(("local", "node"))),
    ],
    "outer": [
        lambda: tx.outer_step(tx.mean("data"), OUTER, 3), lambda: tx.outer_step(tx.mean("data"), tx.adam(0.1), 3, delay=2),
        lambda: tx.outer_step(tx.error_feedback(tx.compress(tx.int8(), tx.mean("data"))), OUTER, 2),
    ],
}  # fmt: skip
CODED = {
    name: [lambda make=make: tx.compress(make(), tx.mean("data")) for make in rows] for name, rows in CODECS.items()
}
TABLES: dict[str, dict[str, list[Any]]] = {
    "transform": {**TRANSFORMS, **PAPERS}, "feedback": {**LOSSY, **CODED}, "optimizer": OPTIMIZERS, "codec": CODECS,
    "average": AVERAGES,
}  # fmt: skip


@pytest.mark.parametrize(
    ("make", "law"),
    [
        pytest.param(make, law, id=f"{kind}-{name}{i}-{law.__name__}")
        for kind, table in TABLES.items() for name, rows in table.items() for i, make in enumerate(rows) for law in LAWS[kind]
        if (name, law.__name__) != ("one_bit_adam", "is_itself_alone")  # it gives a direction, not a mean
    ],
)  # fmt: skip
def test_law(make: Any, law: Any) -> None:
    law(make)


def test_no_codec_asks_for_the_default_dtype() -> None:
    x, key = torch.randn(3, 100, generator=torch.Generator().manual_seed(0)), torch.tensor(1, dtype=torch.int32)
    for codec in (make() for rows in CODECS.values() for make in rows):
        noise = (tx.Noise(torch.arange(300, dtype=torch.int32).view(3, 100), key, key),) if codec.stochastic else ()
        want = codec.encode(x, *noise)
        back = codec.decode(want, 100)
        try:
            for default in (torch.float64, torch.bfloat16):
                torch.set_default_dtype(default)
                assert torch.equal(codec.encode(x, *noise), want) and torch.equal(codec.decode(want, 100), back), codec
        finally:
            torch.set_default_dtype(torch.float32)


def test_correct_custom_transforms_and_codecs_pass() -> None:
    """Stages after a mean have no restrictions, and handwritten transforms need not be JSON."""

    def codec() -> tx.Codec:
        right = tx.bfloat16()
        return tx.Codec(right.encode, right.decode, right.width, elementwise=True)

    def transform() -> tx.Transform:
        right = tx.mean("data")
        return tx.Transform(
            right.init, right.update, needs=tx.Needs.NOTHING, facts=tx.Facts(reduces=right.facts.reduces)
        )

    fjoin.testing.check_transform(lambda: tx.chain(tx.mean("data"), tx.stateless(lambda g: 10 * g)))
    fjoin.testing.check_transform(lambda: tx.chain(tx.mean("data"), tx.stateless(torch.neg)))
    fjoin.testing.check_transform(transform)
    fjoin.testing.check_codec(codec)


def test_no_law_is_missing_from_its_list() -> None:
    """A law is a function with one argument, `make`, in the modules of fjoin.testing."""
    listed = {law.__name__ for laws in LAWS.values() for law in laws}
    found = set[str]()
    for module in pkgutil.iter_modules(fjoin.testing.__path__):
        if module.name not in ("_check", "_compare"):
            of = importlib.import_module(f"fjoin.testing.{module.name}")
            own = (f for f in vars(of).values() if inspect.isfunction(f) and f.__module__ == of.__name__)
            found |= {f.__name__ for f in own if takes_make(f)}
    assert len(found) > 20 and found <= listed, found - listed


def takes_make(function: Any) -> bool:
    return [*inspect.signature(function).parameters] == ["make"] and not function.__name__.startswith("_")
