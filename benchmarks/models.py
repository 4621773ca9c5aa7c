"""The models of the measurements, each with one fixed batch per rank."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Case(NamedTuple):
    """A model, and the number of steps in a block long enough to be timed (>= 50 ms)."""

    build: Callable[[], nn.Module]
    batch: Callable[[], tuple[Tensor, Tensor]]
    steps: int


def mlp(*widths: int) -> nn.Module:
    layers: list[nn.Module] = []
    for a, b in itertools.pairwise(widths):
        layers += [nn.Linear(a, b), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


class Block(nn.Module):
    """A pre-LN transformer layer: 12 parameters, all of them small."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        b, t, d = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(b, t, d))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Transformer(nn.Module):
    def __init__(self, layers: int, width: int, heads: int, vocabulary: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.embed(tokens)))).flatten(0, 1)


class Residual(nn.Module):
    """Convolutions of a few channels with batch norms, each but the first added to its input: many small tensors, half of them buffers."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        inputs = [3] + [width] * (layers - 1)
        self.convolutions = nn.ModuleList(nn.Conv2d(n, width, 3, padding=1, bias=i < 3) for i, n in enumerate(inputs))
        self.norms = nn.ModuleList(nn.BatchNorm2d(width) for _ in inputs)
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        for convolution, norm in zip(self.convolutions, self.norms, strict=True):
            y = norm(convolution(x))
            x = F.relu(y + x if y.shape == x.shape else y)
        return self.head(x.mean((2, 3)))


def samples(n: int, inputs: int, classes: int) -> tuple[Tensor, Tensor]:
    return torch.randn(n, inputs), torch.randint(0, classes, (n,))


def tokens(n: int, vocabulary: int) -> tuple[Tensor, Tensor]:
    text = torch.randint(0, vocabulary, (n + 1,))
    return text[:-1].unsqueeze(0), text[1:]


CASES = {
    "tiny": Case(lambda: mlp(32, 96, 64, 10), lambda: samples(64, 32, 10), 42),
    "1m": Case(lambda: mlp(256, 640, 768, 512, 10), lambda: samples(64, 256, 10), 14),
    "10m": Case(lambda: Transformer(30, 160, 4, 256), lambda: tokens(128, 256), 1),
    "10m period": Case(lambda: Transformer(30, 160, 4, 256), lambda: tokens(128, 256), 4),
    "10m epoch": Case(lambda: Transformer(30, 160, 4, 256), lambda: tokens(128, 256), 14),
    "gpt149": Case(lambda: Transformer(12, 16, 2, 64), lambda: tokens(16, 64), 8),
    "res161": Case(lambda: Residual(4, 26), lambda: (torch.randn(2, 3, 4, 4), torch.randint(0, 10, (2,))), 6),
    "50m": Case(lambda: mlp(*[2048] * 13), lambda: samples(32, 2048, 2048), 1),
}


def model(name: str) -> nn.Module:
    """The model, with the same values on every rank and in every variant."""
    torch.manual_seed(0)
    return CASES[name].build()


def batch(name: str, rank: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1 + rank)
    return CASES[name].batch()
