"""The model and the data of `uneven_text.py`: a small transformer over bytes, and real text of uneven length."""

from __future__ import annotations

import pathlib
import sysconfig
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY = 256  # bytes
IGNORE = -100  # a target that does not count; cross_entropy's ignore_index


class Block(nn.Module):
    """Pre-norm attention and MLP."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        # No bias: a key's bias does not change the softmax, so its true gradient is zero, and Adam would
        # take steps of full size on the rounding noise in it.
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.transpose(1, 2) for t in self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).unbind(2))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Decoder(nn.Module):
    """A decoder-only transformer over bytes; the embedding is also the output layer."""

    def __init__(self, width: int, heads: int, layers: int, context: int) -> None:
        super().__init__()
        self.context = context
        self.embed = nn.Embedding(VOCABULARY, width)
        self.position = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        for path, param in self.named_parameters():
            if param.dim() == 2:
                # A block's contribution to the stream starts small, so the embedding passes through all blocks.
                adds = path.endswith(("out.weight", "down.weight"))
                nn.init.normal_(param, std=0.05 / (2 * layers) ** 0.5 if adds else 0.05)
            elif path.endswith("bias"):
                nn.init.zeros_(param)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.position.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return F.linear(self.norm(x), self.embed.weight)


class Batch(NamedTuple):
    inputs: Tensor  # int64 [sequences, context]
    targets: Tensor  # the inputs shifted by one byte; IGNORE where a file has ended

    @property
    def tokens(self) -> int:
        """The number of targets that count. It differs from batch to batch, since files have different lengths."""
        return int((self.targets != IGNORE).sum())


def cross_entropy(logits: Tensor, batch: Batch) -> Tensor:
    """The mean over the batch's own tokens."""
    return F.cross_entropy(logits.flatten(0, 1), batch.targets.flatten(), ignore_index=IGNORE)


def source_files(total_bytes: int, largest: int = 40_000) -> list[pathlib.Path]:
    """Source files of Python's standard library in order of name, with about this total size."""
    chosen, size = [], 0
    for path in sorted(pathlib.Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        if size < total_bytes and 1 < path.stat().st_size <= largest:
            chosen.append(path)
            size += path.stat().st_size
    if not chosen:
        raise SystemExit("this Python has no source files of its standard library to train on")
    return chosen


def batches_of(files: list[pathlib.Path], context: int, sequences: int) -> list[Batch]:
    """Cut each file into sequences, the last one padded; mix the sequences; put them into batches."""
    inputs, targets = [], []
    for path in files:
        text = torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8).long()
        for start in range(0, len(text) - 1, context):
            piece = text[start : start + context + 1]
            missing = context + 1 - len(piece)
            inputs.append(F.pad(piece[:-1], (0, missing)))
            targets.append(F.pad(piece[1:], (0, missing), value=IGNORE))
    mixed = torch.randperm(len(inputs), generator=torch.Generator().manual_seed(0)).split(sequences)
    return [Batch(torch.stack([inputs[i] for i in some]), torch.stack([targets[i] for i in some])) for some in mixed]
