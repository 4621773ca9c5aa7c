"""Every public transform and optimizer obeys the laws, and every law can be broken."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import optax
import pytest
import torch
from optimizer_table import OPTIMIZERS
from torch import Tensor

from fjoin import transforms as tx
from fjoin.testing import CODEC_LAWS, OPTIMIZER_LAWS, TRANSFORM_LAWS
from fjoin.transforms._spec import _FACTORIES


def _negate(g: Tensor) -> Tensor:
    return -g


# One row or more for each public factory: what `make` returns is put under all laws of its kind.
TRANSFORMS: dict[str, list[Callable[[], tx.Transform]]] = {
    "accumulate": [lambda: tx.accumulate(2, tx.mean("data")), lambda: tx.accumulate(1, tx.mean("data"))],
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
    ],
    "hierarchical_mean": [
        lambda: tx.hierarchical_mean("local", "node"),
        lambda: tx.hierarchical_mean("local", "node", over="world"),
        lambda: tx.hierarchical_mean("node", "local", tx.int8(block=4), over="live"),
        lambda: tx.compress(tx.bfloat16(), tx.hierarchical_mean("local", "node")),
    ],
    "error_feedback": [
        lambda: tx.error_feedback(tx.quantized_mean("data", tx.int8(block=4))),
        lambda: tx.error_feedback(tx.cast(torch.bfloat16, tx.mean("data", over="world")), without_input="flush"),
        lambda: tx.error_feedback(
            tx.partition({"layer.*": tx.quantized_mean("data", tx.int4()), "*": tx.mean("data")})
        ),
    ],
    "quantized_mean": [
        lambda: tx.quantized_mean("data", tx.int8(block=4)),
        lambda: tx.quantized_mean("data", tx.int4(block=4), over="live"),
        lambda: tx.quantized_mean("data", tx.fp8()),
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
    "masked": [
        lambda: tx.masked(tx.mean("data"), "layer.*"),
        lambda: tx.masked(tx.clip_by_value(0.1), ["scale", "*bias"]),
        lambda: tx.masked(tx.every(2, tx.mean("data")), "layer.weight"),
    ],
    "mean": [lambda: tx.mean("data"), lambda: tx.mean("data", over="live"), lambda: tx.mean("data", over="world")],
    "noop": [tx.noop],
    "partition": [
        lambda: tx.partition({"layer.*": tx.mean("data"), "*": tx.sum_over("data")}),
        lambda: tx.partition({"*bias": tx.identity(), "*": tx.clip_by_value(0.2)}),
    ],
    "skip_if_nonfinite": [lambda: tx.skip_if_nonfinite(tx.mean("data"))],
    "stateless": [lambda: tx.stateless(_negate), lambda: tx.stateless(_negate, scope="element")],
    "sum_over": [lambda: tx.sum_over("data")],
    "switch_after": [
        lambda: tx.switch_after(1, tx.mean("data"), tx.sum_over("data")),
        lambda: tx.switch_after(2, tx.identity(), tx.mean("data")),
    ],
}
SCHEDULES = {"constant", "cosine", "linear", "one_cycle", "piecewise", "tabulated", "warmup", "warmup_cosine"}
PIPELINES = {"fuse", "dynamic_loss_scale"}


CODECS: dict[str, list[Callable[[], tx.Codec]]] = {
    "bfloat16": [tx.bfloat16],
    "float16": [tx.float16],
    "float32": [tx.float32],
    "fp8": [tx.fp8, lambda: tx.fp8(block=3, dtype=torch.float8_e5m2)],
    "int4": [tx.int4, lambda: tx.int4(block=3)],
    "int8": [tx.int8, lambda: tx.int8(block=3), lambda: tx.int8(block=1)],
}


def test_every_public_factory_has_a_row() -> None:
    public = {name for name, value in vars(tx).items() if name in _FACTORIES and inspect.isfunction(value)}
    assert public == TRANSFORMS.keys() | OPTIMIZERS.keys() | SCHEDULES | PIPELINES | CODECS.keys()


def _cases(table: dict[str, list[Any]], laws_: list[Any]) -> list[Any]:
    return [
        pytest.param(make, law, id=f"{name}{i}-{law.__name__}")
        for name, rows in table.items() for i, make in enumerate(rows) for law in laws_
    ]  # fmt: skip


@pytest.mark.parametrize(("make", "law"), _cases(TRANSFORMS, TRANSFORM_LAWS))
def test_transform(make: Any, law: Any) -> None:
    law(make)


@pytest.mark.parametrize(("make", "law"), _cases(OPTIMIZERS, OPTIMIZER_LAWS))
def test_optimizer(make: Any, law: Any) -> None:
    law(make)


@pytest.mark.parametrize(("make", "law"), _cases(CODECS, CODEC_LAWS))
def test_codec(make: Any, law: Any) -> None:
    law(make)


# -- every law fails on something that breaks it -----------------------------------------------------


def _plain(update: Any, **settings: Any) -> Callable[[], tx.Transform]:
    return lambda: tx.Transform(lambda params: (), update, **settings)


def _remembers() -> tx.Transform:
    calls = []

    def update(grads: Any, state: Any, params: Any = None, **extra: Any) -> Any:
        calls.append(1)
        return {k: g * len(calls) for k, g in grads.items()}, state

    return tx.Transform(lambda params: (), update)


def _writes(grads: Any, state: Any, params: Any = None, **extra: Any) -> Any:
    return {k: g.mul_(2) for k, g in grads.items()}, state


def _normalises(grads: Any, state: Any, params: Any = None, **extra: Any) -> Any:
    norm = sum(g.square().sum() for g in grads.values())
    return {k: g / norm for k, g in grads.items()}, state


def _hears_all(grads: Any, state: Any, params: Any = None, **extra: Any) -> Any:
    return tx.pmean(grads, "data"), state


def _norm_in_state() -> tx.Transform:
    def update(grads: Any, state: Any, params: Any = None, **extra: Any) -> Any:
        return grads, (sum(g.square().sum() for g in grads.values()),)

    return tx.Transform(lambda params: (torch.zeros(()),), update, scope="leaf")


def _not_told() -> tx.Transform:
    """Hands what it is told of its own state on to what it runs, as if that were the same."""
    inner = tx.mean("data")

    def update(grads: Any, state: Any, params: Any = None, **extra: Any) -> Any:
        out, state = inner.update(grads, state[0], params, **extra)
        return out, (state,)

    return tx.Transform(lambda params: (inner.init(params),), update, scope="leaf")


def _broken_chain() -> tx.Transform:
    def update(grads: Any, state: Any, params: Any = None, *, lane: Any = None, **extra: Any) -> Any:
        factor = 1.0 if "total" in extra else 2.0
        return {k: g * factor * (1 + len(calls)) for k, g in grads.items()}, state

    calls: list[int] = []
    made = tx.Transform(lambda params: calls.append(1) or (), update)
    return made


def _rank_first() -> tx.Transform:
    inner = tx.mean("data")

    def update(grads: Any, state: Any, params: Any = None, **extra: Any) -> Any:
        out, state = inner.update(grads, state, params, **extra)
        first = tx.pbroadcast(grads, "data", 0)
        return {k: out[k] + first[k] for k in out}, state

    return tx.Transform(inner.init, update, sums=inner.sums)


def _wrong_total() -> tx.Transform:
    inner = tx.mean("data")
    return tx.Transform(inner.init, inner.update, sums=lambda s: s._replace(total=s.total + 5))


_MARK = torch.zeros(())


def _known_by_identity(grads: Any, state: Any, params: Any = None, **extra: Any) -> Any:
    return {k: g * (3 if state[0] is _MARK else 1) for k, g in grads.items()}, (_MARK,)


def _looks_at_values(grads: Any, state: Any, params: Any = None, **extra: Any) -> Any:
    return {k: g * tx.axis_index("data").item() for k, g in grads.items()}, state


_SEEN: list[int] = []


def _never_equal() -> tx.Transform:
    _SEEN.append(1)
    return tx.clip_by_value(float(len(_SEEN)))


BROKEN_TRANSFORMS = {
    "is_pure": [_remembers, _plain(_writes)],
    "keeps_its_scope": [_plain(_normalises, scope="element"), _plain(_normalises, scope="leaf")],
    "goes_bucket_by_bucket": [_plain(_normalises, scope="leaf"), _norm_in_state, _not_told],
    "chains": [_broken_chain],
    "ignores_weight_zero": [_plain(_hears_all)],
    "is_itself_alone": [_wrong_total],
    "forgets_the_order_of_ranks": [_rank_first],
    "resumes": [lambda: tx.Transform(lambda params: (_MARK,), _known_by_identity)],
    "maps": [_plain(_looks_at_values)],
    "is_data": [_never_equal],
}


@pytest.mark.parametrize(
    ("law", "broken"),
    [
        pytest.param(law, broken, id=f"{law.__name__}{i}")
        for law in TRANSFORM_LAWS for i, broken in enumerate(BROKEN_TRANSFORMS[law.__name__])
    ],
)  # fmt: skip
def test_each_transform_law_can_fail(law: Any, broken: Any) -> None:
    with pytest.raises((AssertionError, RuntimeError, TypeError)):
        law(broken)


def _optimizer(**changed: Any) -> Callable[[], tx.Optimizer]:
    right = tx.sgd(0.1, momentum=0.9)
    kept = {"init_param": right.init_param, "step_param": right.step_param, "step_param_": right.step_param_}
    return lambda: tx.Optimizer(**{**kept, **changed})


def _step_writes(param: Tensor, grad: Tensor, state: Any) -> Any:
    return param.sub_(grad), state


def _step_other(param: Tensor, grad: Tensor, state: Any, **guards: Any) -> None:
    param.sub_(grad)


def _step_counts_calls(param: Tensor, grad: Tensor, state: Any, **guards: Any) -> None:
    _SEEN.append(1)
    param.sub_(grad * len(_SEEN))


def _step_row_norm(param: Tensor, grad: Tensor, state: Any) -> Any:
    return param - grad / grad.norm(), state


BROKEN_OPTIMIZERS = {
    "step_param_is_pure": _optimizer(step_param=_step_writes),
    "in_place_agrees": _optimizer(step_param_=_step_other),
    "found_inf_stops_it": _optimizer(step_param_=_step_other),
    "tree_step_agrees": _optimizer(step_param_=_step_other),
    "flat_is_leaves": _optimizer(step_param=_step_row_norm),
    "resumes": _optimizer(step_param_=_step_counts_calls),
    "is_data": lambda: tx.sgd(_SEEN.append(1) or 0.1 * len(_SEEN)),
}


@pytest.mark.parametrize("law", OPTIMIZER_LAWS, ids=lambda law: law.__name__)
def test_each_optimizer_law_can_fail(law: Any) -> None:
    with pytest.raises(AssertionError):
        law(BROKEN_OPTIMIZERS[law.__name__])


def _codec(**changed: Any) -> Callable[[], tx.Codec]:
    right = tx.bfloat16()
    kept = {"encode": right.encode, "decode": right.decode, "width": right.width, "elementwise": True}
    return lambda: tx.Codec(**{**kept, **changed})


def _encode_writes(x: Tensor) -> Tensor:
    return tx.bfloat16().encode(x.mul_(1.0))


def _decode(change: Callable[[Tensor], Tensor]) -> Any:
    return lambda data, n: change(tx.bfloat16().decode(data, n))


BROKEN_CODECS = {
    "encodes_purely": _codec(encode=_encode_writes),
    "says_its_width": _codec(width=lambda n: 2 * n + 1),
    "stays_near": _codec(decode=_decode(torch.neg)),
    "keeps_zero": _codec(decode=_decode(lambda x: x + 1e-9)),
    "serves_large_and_small": _codec(encode=lambda x: tx.bfloat16().encode(x.half().float())),
    "tells_nonfinite": _codec(encode=lambda x: tx.bfloat16().encode(x.clamp(-1e9, 1e9))),
    "reads_rows_alone": _codec(encode=lambda x: tx.bfloat16().encode(x - x.nan_to_num().mean())),
    "keeps_to_elements": _codec(encode=lambda x: tx.bfloat16().encode(x.nan_to_num().cumsum(1))),
    "is_data": lambda: tx.int8(block=_SEEN.append(1) or len(_SEEN)),
}


@pytest.mark.parametrize("law", CODEC_LAWS, ids=lambda law: law.__name__)
def test_each_codec_law_can_fail(law: Any) -> None:
    with pytest.raises(AssertionError):
        law(BROKEN_CODECS[law.__name__])
