"""The laws of devices fail on each violation, for its own reason, and admit code that does not wait."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fjoin import transforms as tx
from fjoin.testing._devices import encodes_on_its_device, stays_on_its_device, steps_on_its_device
from tests.helpers import raises_text


def leafwise(change: Callable[[Tensor], Tensor]) -> tx.Transform:
    def update(grads: Any, state: Any, params: Any = None, **extra: Any) -> Any:
        return {path: change(g) for path, g in grads.items()}, state

    return tx.Transform(lambda params: (), update)


BROKEN = {
    "counts on the host": (lambda g: g / tx.psum(torch.ones(1), "data").to(g), "message was made on the host"),
    "mixes devices": (lambda g: g * torch.ones(g.shape), "mixes devices"),
    "adds what lies on the host in place": (lambda g: g.clone().add_(torch.ones(g.shape)), "mixes devices"),
    "indexes with what lies on the host": (lambda g: g.flatten()[torch.arange(g.numel())].view(g.shape), "mixes devices"),
    "decides with what lies on the host": (lambda g: torch.where(tx.axis_index("data") < 9, g, 0.0), "mixes devices: where"),
    "puts both together": (lambda g: g * torch.stack([g.sum(), torch.ones((), dtype=g.dtype)])[0], "mixes devices"),
    "reads a norm": (lambda g: -g if g.norm() > 1.0 else g, "reads a tensor's value"),
    "comes back on the host": (lambda g: torch.zeros(g.shape), "came back on the host"),
    "copies a number": (lambda g: g * torch.tensor(0.5, dtype=g.dtype, device=g.device), "waits for a copy: tensor"),
    "copies a list": (lambda g: g * g.new_tensor([0.5, 2.0]).prod(), "waits for a copy: new_tensor"),
    "moves a tensor": (lambda g: g * torch.tensor(0.5).to(g), "waits for a copy: to"),
    "draws": (lambda g: g + torch.rand((), generator=torch.Generator(device=g.device), device=g.device), "no generator"),
}  # fmt: skip


@pytest.mark.parametrize("what", BROKEN)
def test_broken_transforms(what: str) -> None:
    change, text = BROKEN[what]
    raises_text(AssertionError, lambda: stays_on_its_device(lambda: leafwise(change)), text)


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


def test_correct_transforms_pass() -> None:
    for change in (keeps_a_table, moves_without_waiting, lambda g: g * torch.tensor(0.5), torch.neg):
        stays_on_its_device(lambda change=change: leafwise(change))
    stays_on_its_device(lambda: tx.Transform(lambda params: (torch.zeros((), dtype=torch.int64),), counts))


RIGHT = tx.bfloat16()


def codec(encode: Any = RIGHT.encode, decode: Any = RIGHT.decode) -> Callable[[], tx.Codec]:
    return lambda: tx.Codec(encode, decode, RIGHT.width)


BROKEN_CODECS = {
    "decodes on the host": (codec(decode=lambda data, n: torch.zeros(len(data), n)), "floats were made on the host"),
    "encodes on the host": (codec(encode=lambda x: torch.zeros(len(x), 2 * x.shape[1], dtype=torch.uint8)), "codes were made"),
    "mixes devices": (codec(encode=lambda x: RIGHT.encode(x * torch.ones(x.shape[1]))), "mixes devices"),
    "reads the largest": (codec(encode=lambda x: RIGHT.encode(x / x.abs().max().item())), "reads a tensor's value"),
}  # fmt: skip


@pytest.mark.parametrize("what", BROKEN_CODECS)
def test_broken_codecs(what: str) -> None:
    make, text = BROKEN_CODECS[what]
    raises_text(AssertionError, lambda: encodes_on_its_device(make), text)


def test_correct_codec_passes() -> None:
    encodes_on_its_device(
        codec(
            encode=lambda x: x.bfloat16().view(torch.uint8).reshape(len(x), 2 * x.shape[1]),
            decode=lambda data, n: data.contiguous().view(torch.bfloat16).float(),
        )
    )


def test_a_broken_optimizer() -> None:
    right = tx.sgd(0.1)

    def on_the_host(param: Tensor, grad: Tensor, state: Any) -> Any:
        return torch.zeros(param.shape), state

    raises_text(
        AssertionError,
        lambda: steps_on_its_device(lambda: tx.Optimizer(right.init_param, on_the_host, right.step_param_)),
        "came back on the host",
    )
