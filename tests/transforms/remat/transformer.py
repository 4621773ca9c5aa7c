"""A small transformer; what its backward pass keeps, counted by saved-tensor hooks; and pinned memory of the host, for
values on the CPU: they wait there and come back to the bit."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from fjoin import transforms as tx
from fjoin.transforms.rematerialization._offload import Host, Stashed


class Block(nn.Module):
    def __init__(self, width: int, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        rows, n, width = x.shape
        qkv = self.qkv(self.norms[0](x)).view(rows, n, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        heads = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(x.shape)
        x = x + tx.checkpoint_name(self.out(heads), "h")
        return x + self.down(F.gelu(tx.checkpoint_name(self.up(self.norms[1](x)), "out")))


class Transformer(nn.Module):
    """Blocks, each run by `wrap`."""

    def __init__(self, layers: int = 12, width: int = 16) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(11, width), nn.Linear(width, 11)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))

    def forward(self, tokens: Tensor, wrap: Callable[[Any], Any]) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = wrap(block)(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten())


def tokens(rows: int = 2, n: int = 8) -> Tensor:
    return torch.randint(0, 11, (rows, n), generator=torch.Generator().manual_seed(0))


class Held:
    """What a graph holds in place of a tensor."""

    def __init__(self, x: Tensor) -> None:
        self.x = x


class Counted:
    """Counts the bytes that the graph keeps, each memory once."""

    def __init__(self, outside: list[Tensor]) -> None:
        self._outside = {x.untyped_storage()._cdata for x in outside}
        self._uses: dict[int, int] = {}
        self.now = 0

    def context(self) -> Any:
        return torch.autograd.graph.saved_tensors_hooks(self._pack, lambda held: held.x)

    def _pack(self, x: Tensor) -> Held:
        held, memory, size = Held(x), x.untyped_storage()._cdata, x.untyped_storage().nbytes()
        if memory not in self._outside:
            self._uses[memory] = self._uses.get(memory, 0) + 1
            if self._uses[memory] == 1:
                self.now += size
            weakref.finalize(held, self._drop, memory, size)
        return held

    def _drop(self, memory: int, size: int) -> None:
        self._uses[memory] -= 1
        if not self._uses[memory]:
            self.now -= size


class Count(TorchDispatchMode):
    """Counts operations by name."""

    def __init__(self) -> None:
        super().__init__()
        self.of: dict[str, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        self.of[name] = self.of.get(name, 0) + 1
        return func(*args, **(kwargs or {}))


def _put(host: Host, values: Sequence[Tensor]) -> list[Any]:
    with torch._C.DisableTorchFunction():
        return [Stashed(x.detach().clone()) for x in values]


@contextlib.contextmanager
def exact_host() -> Iterator[None]:
    """A context in which `offload="cpu"` takes values on the CPU too."""
    with mock.patch.object(Host, "put", _put):
        yield


@pytest.fixture
def host() -> Iterator[None]:
    with exact_host():
        yield
