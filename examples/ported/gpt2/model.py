"""A language model as GPT-2 in transformers, with its switch for gradient checkpointing, and its tokens.

The reference and the port use it as it is.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class GPT2Block(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU("tanh"), nn.Linear(4 * width, width), nn.Dropout(dropout)
        )
        self.resid_dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.shape
        q, k, v = (part.view(b, t, self.heads, -1).transpose(1, 2) for part in self.c_attn(self.ln_1(x)).split(c, 2))
        p = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=True)
        x = x + self.resid_dropout(self.c_proj(y.transpose(1, 2).reshape(b, t, c)))
        return x + self.mlp(self.ln_2(x))


class GPT2LMHeadModel(nn.Module):
    def __init__(
        self, vocab: int = 64, length: int = 32, width: int = 32, layers: int = 4, heads: int = 2, dropout: float = 0.1
    ) -> None:
        super().__init__()
        self.gradient_checkpointing = False
        self.wte, self.wpe = nn.Embedding(vocab, width), nn.Embedding(length, width)
        self.drop = nn.Dropout(dropout)
        self.h = nn.ModuleList(GPT2Block(width, heads, dropout) for _ in range(layers))
        self.ln_f = nn.LayerNorm(width)
        self.lm_head = nn.Linear(width, vocab, bias=False)
        for p in self.parameters():
            if p.dim() >= 2:
                nn.init.normal_(p, std=0.02)
        self.lm_head.weight = self.wte.weight

    def gradient_checkpointing_enable(self) -> None:
        self.gradient_checkpointing = True

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        """The loss of the next tokens."""
        x = self.drop(self.wte(input_ids) + self.wpe(torch.arange(input_ids.shape[1])))
        for block in self.h:
            if self.gradient_checkpointing and self.training:
                x = checkpoint(block, x, use_reentrant=False)
            else:
                x = block(x)
        logits = self.lm_head(self.ln_f(x))
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def batches(rank: int, steps: int) -> list[dict[str, Tensor]]:
    g = torch.Generator().manual_seed(rank)
    tokens = [torch.randint(0, 64, (8, 32), generator=g) for _ in range(steps)]
    return [{"input_ids": ids, "labels": ids} for ids in tokens]
