"""Every law fails on something that breaks it; those of devices for its own reason, and not on code that does not wait."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import fjoin
from fjoin import transforms as tx
from fjoin.testing import LAWS
from tests.helpers import raises_text

Tree = dict[str, Tensor]
MEAN, SGD, BF16 = tx.mean("data"), tx.sgd(0.1, momentum=0.9), tx.bfloat16()
_MARK = torch.zeros(())
_SEEN: list[int] = []


def seen() -> int:
    """Another number in each call."""
    _SEEN.append(1)
    return len(_SEEN)


def of_tree(change: Callable[[Tree], Tree], **settings: Any) -> Callable[[], tx.Transform]:
    return lambda: tx.Transform(
        lambda params: (), lambda grads, state, params=None, **extra: (change(grads), state), **settings
    )


def leafwise(change: Callable[[Tensor], Tensor], **settings: Any) -> Callable[[], tx.Transform]:
    return of_tree(lambda grads: {path: change(g) for path, g in grads.items()}, **settings)


def normalises(grads: Tree) -> Tree:
    norm = sum(g.square().sum() for g in grads.values())
    return {path: g / norm for path, g in grads.items()}


def on_some_buckets() -> tx.Transform:
    """Reduces some of the leaves, and runs no reduction in a call without them."""

    def update(grads: Any, state: Any, params: Any = None, **extra: Any) -> Any:
        return MEAN.update(grads, state, params, **extra) if "scale" in grads else (grads, state)

    return tx.Transform(MEAN.init, update, needs=tx.Needs.LEAVES)


def begun_otherwise() -> tx.Transform:
    """A state counts the states before it."""
    calls: list[int] = []

    def update(grads: Any, state: Any, params: Any = None, **extra: Any) -> Any:
        return {path: g * (1 + len(calls)) for path, g in grads.items()}, state

    return tx.Transform(lambda params: calls.append(1) or (), update)


def mean_and(change: Callable[[Tree, Tree], Tree]) -> Callable[[], tx.Transform]:
    """A mean whose result is changed, given the gradients."""

    def update(grads: Any, state: Any, params: Any = None, **extra: Any) -> Any:
        out, state = MEAN.update(grads, state, params, **extra)
        return change(out, grads), state

    return lambda: tx.Transform(MEAN.init, update, facts=tx.Facts(reduces=MEAN.facts.reduces))


def momentum(inner: tx.Transform, **facts: Any) -> Callable[[], tx.Transform]:
    """A momentum of this rank's gradients, including those of weight 0, before another transform."""

    def update(grads: Any, state: Any, params: Any = None, **extra: Any) -> Any:
        new = {path: 0.9 * state[1][path] + g for path, g in grads.items()}
        out, other = inner.update(new, state[0], params, **extra)
        return out, (other, new)

    def init(params: Any) -> Any:
        return inner.init(params), {path: 0 * p for path, p in params.items()}

    return lambda: tx.Transform(init, update, facts=tx.Facts(**facts))


def known_by_identity(grads: Any, state: Any, params: Any = None, **extra: Any) -> Any:
    return {path: g * (3 if state[0] is _MARK else 1) for path, g in grads.items()}, (_MARK,)


def optimizer(**changed: Any) -> Callable[[], tx.Optimizer]:
    kept = {"init_param": SGD.init_param, "step_param": SGD.step_param, "step_param_": SGD.step_param_}
    return lambda: tx.Optimizer(**{**kept, **changed})


def in_place(change: Callable[[Tensor, Tensor], Any]) -> Callable[[], tx.Optimizer]:
    def step_param_(param: Tensor, grad: Tensor, state: Any, **guards: Any) -> None:
        change(param, grad)

    return optimizer(step_param_=step_param_)


def lossy(change: Callable[[Any, Any], Any]) -> Callable[[], tx.Transform]:
    """A mean whose residuals are changed."""
    right = tx.compress(tx.int4(), MEAN)

    def update(grads: Any, state: Any, params: Any = None, *, memory: Any, **extra: Any) -> Any:
        out, state = right.update(grads, state, params, memory=memory, **extra)
        memory.new.update({path: change(error, out[path]) for path, error in memory.new.items()})
        return out, state

    facts = tx.Facts(reduces=right.facts.reduces, compression=right.facts.compression)
    return lambda: tx.Transform(right.init, update, needs=tx.Needs.LAYOUT, facts=facts)


def codec(**changed: Any) -> Callable[[], tx.Codec]:
    kept = {"encode": BF16.encode, "decode": BF16.decode, "width": BF16.width, "elementwise": True}
    return lambda: tx.Codec(**{**kept, **changed})


def encodes(change: Callable[[Tensor], Tensor]) -> Callable[[], tx.Codec]:
    return codec(encode=lambda x: BF16.encode(change(x)))


def decodes(change: Callable[[Tensor], Tensor]) -> Callable[[], tx.Codec]:
    return codec(decode=lambda data, n: change(BF16.decode(data, n)))


BUCKETS: list[tuple[str, ...]] = [("layer.weight", "layer.bias"), ("scale", "none")]


def in_buckets(copied: slice) -> Callable[[], tx.Transform]:
    """An average in buckets, of which only some are copied back, as torchft's bucketized DiLoCo copies only the last."""

    def update(values: Any, state: Any, params: Any = None, *, weight: Any = None, **extra: Any) -> Any:
        new, mean = dict(values), tx.average_parameters("data")
        for paths in BUCKETS[copied]:
            some = {path: values[path] for path in paths}
            new.update(mean.update(some, mean.init(some), weight=weight)[0])
        return new, state

    return lambda: tx.Transform(lambda params: (), update)


def averaged(x: Tensor) -> Tensor:
    return tx.pmean(x, "data")  # type: ignore[no-any-return]


# Kind -> law -> what breaks it.
BROKEN: dict[str, dict[str, list[Callable[[], Any]]]] = {
    "transform": {
        "is_pure": [lambda: leafwise(lambda g, calls=[]: calls.append(1) or g * len(calls))(), leafwise(lambda g: g.mul_(2))],
        "keeps_to_its_needs": [
            leafwise(lambda g: g / g.norm().clamp(min=1e-6), needs=tx.Needs.LAYOUT),
            *(of_tree(normalises, needs=needs) for needs in (tx.Needs.NOTHING, tx.Needs.LEAVES)),
        ],
        "goes_bucket_by_bucket": [of_tree(normalises, needs=tx.Needs.LEAVES), on_some_buckets],
        "chains": [begun_otherwise],
        "ignores_weight_zero": [leafwise(averaged), momentum(MEAN, reduces=tx.Reduction("data", "weight"))],
        "is_itself_alone": [mean_and(lambda out, grads: {path: -g for path, g in out.items()})],
        "forgets_the_order_of_ranks": [
            mean_and(lambda out, grads: {path: g + tx.pbroadcast(grads[path], "data", 0) for path, g in out.items()})
        ],
        "forgets_what_is_not_finite": [momentum(tx.identity(), compression=tx.Compression(tuple))],
        "resumes": [lambda: tx.Transform(lambda params: (_MARK,), known_by_identity)],
        "is_data": [lambda: tx.clip_by_value(float(seen()))],
    },
    "optimizer": {
        "step_param_is_pure": [optimizer(step_param=lambda param, grad, state: (param.sub_(grad), state))],
        "in_place_agrees": [in_place(Tensor.sub_), in_place(lambda param, grad: param.mul_(float("nan")))],
        "found_inf_stops_it": [in_place(Tensor.sub_)],
        "tree_step_agrees": [in_place(Tensor.sub_), in_place(lambda param, grad: param.mul_(float("nan")))],
        "flat_is_leaves": [
            optimizer(step_param=lambda param, grad, state: (param - grad / grad.norm(), state), elementwise=True)
        ],
        "resumes": [in_place(lambda param, grad: param.sub_(grad * seen()))],
        "is_data": [lambda: tx.sgd(0.1 * seen())],
    },
    "feedback": {
        "pays_what_it_owes": [lossy(lambda error, out: 0.9 * error)],
        "forgets_what_is_not_finite": [lossy(lambda error, out: error + 0 * out)],
    },
    "codec": {
        "encodes_purely": [
            encodes(lambda x: x.mul_(1.0)), codec(decode=lambda data, n: BF16.decode(data.fill_(1), n)),
        ],
        "says_its_width": [codec(width=lambda n: 2 * n + 1)],
        "stays_near": [decodes(torch.neg), decodes(torch.zeros_like), decodes(lambda x: x + 1e-9)],
        "serves_large_and_small": [encodes(lambda x: x.half().float())],
        "tells_nonfinite": [encodes(lambda x: x.clamp(-1e9, 1e9))],
        "reads_rows_alone": [encodes(lambda x: x - x.nan_to_num().mean())],
        "keeps_to_elements": [encodes(lambda x: x.nan_to_num().cumsum(1))],
        "is_data": [lambda: tx.int8(block=seen())],
    },
    "average": {
        "makes_ranks_equal": [in_buckets(slice(-1, None))],
        "gives_the_average_to_ranks_without_input": [leafwise(averaged)],
        "keeps_parameters_without_input": [leafwise(lambda x: averaged(x) * 0.9)],
    },
}  # fmt: skip
# Those of devices, by kind, and a word of each reason.
ON_DEVICES: dict[str, list[tuple[Callable[[], Any], str]]] = {
    "transform": [(leafwise(change), text) for change, text in (
        (lambda g: g / tx.psum(torch.ones(1), "data").to(g), "message was made on the host"),
        (lambda g: g * torch.ones(g.shape), "mixes devices"),
        (lambda g: g.clone().add_(torch.ones(g.shape)), "mixes devices"),
        (lambda g: g.flatten()[torch.arange(g.numel())].view(g.shape), "mixes devices"),
        (lambda g: torch.where(tx.axis_index("data") < 9, g, 0.0), "mixes devices: where"),
        (lambda g: g * torch.stack([g.sum(), torch.ones((), dtype=g.dtype)])[0], "mixes devices"),
        (lambda g: -g if g.norm() > 1.0 else g, "reads a tensor's value"),
        (lambda g: torch.zeros(g.shape), "came back on the host"),
        (lambda g: g * torch.tensor(0.5, dtype=g.dtype, device=g.device), "waits for a copy: tensor"),
        (lambda g: g * g.new_tensor([0.5, 2.0]).prod(), "waits for a copy: new_tensor"),
        (lambda g: g * torch.tensor(0.5).to(g), "waits for a copy: to"),
        (lambda g: g + torch.rand((), generator=torch.Generator(device=g.device), device=g.device), "no generator"),
    )],
    "codec": [
        (codec(decode=lambda data, n: torch.zeros(len(data), n)), "floats were made on the host"),
        (codec(encode=lambda x: torch.zeros(len(x), 2 * x.shape[1], dtype=torch.uint8)), "codes were made"),
        (encodes(lambda x: x * torch.ones(x.shape[1])), "mixes devices"),
        (encodes(lambda x: x / x.abs().max().item()), "reads a tensor's value"),
    ],
    "optimizer": [
        (optimizer(step_param=lambda param, grad, state: (torch.zeros(param.shape), state)), "came back on the host")
    ],
}  # fmt: skip


def of_devices(law: Any) -> bool:
    return law.__name__.endswith("_on_its_device")  # type: ignore[no-any-return]


CASES = [
    pytest.param(kind, law, *broken, id=f"{kind} {law.__name__} {i}")
    for kind, laws in LAWS.items() for law in laws
    for i, broken in enumerate(ON_DEVICES[kind] if of_devices(law) else [(make, "") for make in BROKEN[kind][law.__name__]])
]  # fmt: skip


@pytest.mark.parametrize(("kind", "law", "broken", "text"), CASES)
def test_each_law_can_fail(kind: str, law: Any, broken: Any, text: str) -> None:
    kinds = AssertionError if text or kind != "transform" else (AssertionError, RuntimeError, TypeError)
    raises_text(kinds, lambda: law(broken), text)  # type: ignore[arg-type]


def test_what_an_average_lacks_is_named_and_all_buckets_are_right() -> None:
    last_bit = leafwise(lambda x: torch.lerp(averaged(x), x, 1e-12))
    for broken, *words in (
        (last_bit, "makes_ranks_equal: ", " differs between ranks"),
        (in_buckets(slice(-1, None)), "never averaged: ['layer.bias', 'layer.weight']"),
    ):
        raises_text(AssertionError, lambda broken=broken: fjoin.testing.check_average(broken), *words)  # type: ignore[misc]
    fjoin.testing.check_average(in_buckets(slice(None)))


# -- what does not wait for a device --------------------------------------------------------------------------------------

TABLES: dict[torch.device, Tensor] = {}


def keeps_a_table(g: Tensor) -> Tensor:
    if g.device not in TABLES:
        TABLES[g.device] = torch.tensor([0.5, 2.0], device=g.device)
    return g * TABLES[g.device].prod()


def moves_without_waiting(g: Tensor) -> Tensor:
    half = torch.tensor(data=0.5, dtype=torch.float64)
    return g * half.to(g.device, g.dtype, True) + g.clone().copy_(half, non_blocking=True)


def counts(grads: Any, state: Any, params: Any = None, **extra: Any) -> Any:
    calls = int(state[0])  # 0-d, on the host: reading it does not wait
    return {path: g if calls % 2 else -g for path, g in grads.items()}, (state[0] + 1,)


def test_code_that_does_not_wait_passes() -> None:
    laws = {kind: next(filter(of_devices, of_kind), None) for kind, of_kind in LAWS.items()}
    for change in (keeps_a_table, moves_without_waiting, lambda g: g * torch.tensor(0.5), torch.neg):
        laws["transform"](leafwise(change))
    laws["transform"](lambda: tx.Transform(lambda params: (torch.zeros((), dtype=torch.int64),), counts))
    laws["codec"](
        codec(
            encode=lambda x: x.bfloat16().view(torch.uint8).reshape(len(x), 2 * x.shape[1]),
            decode=lambda data, n: data.contiguous().view(torch.bfloat16).float(),
        )
    )
