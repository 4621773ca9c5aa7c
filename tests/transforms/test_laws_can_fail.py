"""Every law fails on something that breaks it; those of devices in test_device_laws.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fjoin import transforms as tx
from fjoin.testing import LAWS


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


def _normalises_each(grads: Any, state: Any, params: Any = None, **extra: Any) -> Any:
    return {k: g / g.norm().clamp(min=1e-6) for k, g in grads.items()}, state


def _needs_all(grads: Any, state: Any, params: Any = None, **extra: Any) -> Any:
    return tx.pmean(grads, "data"), state


def _on_some_buckets() -> tx.Transform:
    """Reduces some of the leaves, and runs no reduction in a call without them."""
    inner = tx.mean("data")

    def update(grads: Any, state: Any, params: Any = None, **extra: Any) -> Any:
        return inner.update(grads, state, params, **extra) if "scale" in grads else (grads, state)

    return tx.Transform(inner.init, update, needs=tx.Needs.LEAVES)


def _broken_chain() -> tx.Transform:
    def update(grads: Any, state: Any, params: Any = None, **extra: Any) -> Any:
        return {k: g * (1 + len(calls)) for k, g in grads.items()}, state

    calls: list[int] = []
    made = tx.Transform(lambda params: calls.append(1) or (), update)
    return made


def _rank_first() -> tx.Transform:
    inner = tx.mean("data")

    def update(grads: Any, state: Any, params: Any = None, **extra: Any) -> Any:
        out, state = inner.update(grads, state, params, **extra)
        first = tx.pbroadcast(grads, "data", 0)
        return {k: out[k] + first[k] for k in out}, state

    return tx.Transform(inner.init, update, facts=tx.Facts(reduces=inner.facts.reduces))


def _another_way() -> tx.Transform:
    inner = tx.mean("data")

    def update(grads: Any, state: Any, params: Any = None, **extra: Any) -> Any:
        out, state = inner.update(grads, state, params, **extra)
        return {k: -g for k, g in out.items()}, state

    return tx.Transform(inner.init, update, facts=tx.Facts(reduces=inner.facts.reduces))


def _sums_later() -> tx.Transform:
    """A momentum of this rank's gradients, including those of weight 0."""
    inner = tx.mean("data")

    def update(grads: Any, state: Any, params: Any = None, **extra: Any) -> Any:
        new = {k: 0.9 * state[1][k] + g for k, g in grads.items()}
        out, reduced = inner.update(new, state[0], params, **extra)
        return out, (reduced, new)

    return tx.Transform(
        lambda params: (inner.init(params), {k: 0 * p for k, p in params.items()}),
        update,
        facts=tx.Facts(reduces=tx.Reduction("data", "weight")),
    )


def _momentum() -> tx.Transform:
    def update(grads: Any, state: Any, params: Any = None, **extra: Any) -> Any:
        new = {k: 0.9 * state[k] + g for k, g in grads.items()}
        return new, new

    return tx.Transform(
        lambda params: {k: 0 * p for k, p in params.items()}, update, facts=tx.Facts(compression=tx.Compression(tuple))
    )


_MARK = torch.zeros(())


def _known_by_identity(grads: Any, state: Any, params: Any = None, **extra: Any) -> Any:
    return {k: g * (3 if state[0] is _MARK else 1) for k, g in grads.items()}, (_MARK,)


_SEEN: list[int] = []


def _never_equal() -> tx.Transform:
    _SEEN.append(1)
    return tx.clip_by_value(float(len(_SEEN)))


def _laws(kind: str) -> list[Any]:
    """Those of a kind, except the law of devices, which has a file of its own."""
    return [law for law in LAWS[kind] if not law.__name__.endswith("_on_its_device")]


BROKEN_TRANSFORMS = {
    "is_pure": [_remembers, _plain(_writes)],
    "keeps_to_its_needs": [
        _plain(_normalises_each, needs=tx.Needs.LAYOUT),
        *(_plain(_normalises, needs=needs) for needs in (tx.Needs.NOTHING, tx.Needs.LEAVES)),
    ],
    "goes_bucket_by_bucket": [_plain(_normalises, needs=tx.Needs.LEAVES), _on_some_buckets],
    "chains": [_broken_chain],
    "ignores_weight_zero": [_plain(_needs_all), _sums_later],
    "is_itself_alone": [_another_way],
    "forgets_the_order_of_ranks": [_rank_first],
    "forgets_what_is_not_finite": [_momentum],
    "resumes": [lambda: tx.Transform(lambda params: (_MARK,), _known_by_identity)],
    "is_data": [_never_equal],
}


@pytest.mark.parametrize(
    ("law", "broken"),
    [
        pytest.param(law, broken, id=f"{law.__name__}{i}")
        for law in _laws("transform") for i, broken in enumerate(BROKEN_TRANSFORMS[law.__name__])
    ],
)  # fmt: skip
def test_each_transform_law_can_fail(law: Any, broken: Any) -> None:
    with pytest.raises((AssertionError, RuntimeError, TypeError)):
        law(broken)


def _optimizer(**changed: Any) -> Callable[[], tx.Optimizer]:
    right = tx.sgd(0.1, momentum=0.9)
    kept = {"init_param": right.init_param, "step_param": right.step_param, "step_param_": right.step_param_}
    return lambda: tx.Optimizer(**{**kept, **changed})


def _step_other(param: Tensor, grad: Tensor, state: Any, **guards: Any) -> None:
    param.sub_(grad)


def _step_counts_calls(param: Tensor, grad: Tensor, state: Any, **guards: Any) -> None:
    _SEEN.append(1)
    param.sub_(grad * len(_SEEN))


BROKEN_OPTIMIZERS = {
    "step_param_is_pure": _optimizer(step_param=lambda param, grad, state: (param.sub_(grad), state)),
    "in_place_agrees": _optimizer(step_param_=_step_other),
    "found_inf_stops_it": _optimizer(step_param_=_step_other),
    "tree_step_agrees": _optimizer(step_param_=_step_other),
    "flat_is_leaves": _optimizer(
        step_param=lambda param, grad, state: (param - grad / grad.norm(), state), elementwise=True
    ),
    "resumes": _optimizer(step_param_=_step_counts_calls),
    "is_data": lambda: tx.sgd(_SEEN.append(1) or 0.1 * len(_SEEN)),
}


@pytest.mark.parametrize("law", _laws("optimizer"), ids=lambda law: law.__name__)
def test_each_optimizer_law_can_fail(law: Any) -> None:
    with pytest.raises(AssertionError):
        law(BROKEN_OPTIMIZERS[law.__name__])


def _lossy(change: Callable[[Any, Any], Any]) -> Callable[[], tx.Transform]:
    """A mean whose residuals are changed."""
    right = tx.compress(tx.int4(), tx.mean("data"))

    def update(grads: Any, state: Any, params: Any = None, *, memory: Any, **extra: Any) -> Any:
        out, state = right.update(grads, state, params, memory=memory, **extra)
        memory.new.update({path: change(error, out[path]) for path, error in memory.new.items()})
        return out, state

    return lambda: tx.Transform(
        right.init,
        update,
        needs=tx.Needs.LAYOUT,
        facts=tx.Facts(reduces=right.facts.reduces, compression=right.facts.compression),
    )


BROKEN_FEEDBACK = {
    "pays_what_it_owes": _lossy(lambda error, out: 0.9 * error),
    "forgets_what_is_not_finite": _lossy(lambda error, out: error + 0 * out),
}


@pytest.mark.parametrize("law", _laws("feedback"), ids=lambda law: law.__name__)
def test_each_law_of_feedback_can_fail(law: Any) -> None:
    with pytest.raises(AssertionError):
        law(BROKEN_FEEDBACK[law.__name__])


def _codec(**changed: Any) -> Callable[[], tx.Codec]:
    right = tx.bfloat16()
    kept = {"encode": right.encode, "decode": right.decode, "width": right.width, "elementwise": True}
    return lambda: tx.Codec(**{**kept, **changed})


def _decode(change: Callable[[Tensor], Tensor]) -> Any:
    return lambda data, n: change(tx.bfloat16().decode(data, n))


BROKEN_CODECS = {
    "encodes_purely": _codec(encode=lambda x: tx.bfloat16().encode(x.mul_(1.0))),
    "says_its_width": _codec(width=lambda n: 2 * n + 1),
    "stays_near": [_codec(decode=_decode(torch.neg)), _codec(decode=_decode(lambda x: 0 * x)), _codec(decode=_decode(lambda x: x + 1e-9))],
    "serves_large_and_small": _codec(encode=lambda x: tx.bfloat16().encode(x.half().float())),
    "tells_nonfinite": _codec(encode=lambda x: tx.bfloat16().encode(x.clamp(-1e9, 1e9))),
    "reads_rows_alone": _codec(encode=lambda x: tx.bfloat16().encode(x - x.nan_to_num().mean())),
    "keeps_to_elements": _codec(encode=lambda x: tx.bfloat16().encode(x.nan_to_num().cumsum(1))),
    "is_data": lambda: tx.int8(block=_SEEN.append(1) or len(_SEEN)),
}  # fmt: skip


@pytest.mark.parametrize("law", _laws("codec"), ids=lambda law: law.__name__)
def test_each_codec_law_can_fail(law: Any) -> None:
    broken = BROKEN_CODECS[law.__name__]
    for make in broken if isinstance(broken, list) else [broken]:
        with pytest.raises(AssertionError):
            law(make)


def _nan_at_once(param: Tensor, grad: Tensor, state: Any, **guards: Any) -> None:
    param.mul_(float("nan"))


def test_nan_is_no_right_answer() -> None:
    for law in _laws("optimizer"):
        if law.__name__ in ("in_place_agrees", "tree_step_agrees"):
            with pytest.raises(AssertionError):
                law(_optimizer(step_param_=_nan_at_once))
