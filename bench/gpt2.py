"""GPT-2 in plain PyTorch: the 124M model of the paper, and one that is small enough for a CPU
thread."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn


@dataclass(frozen=True, slots=True)
class Size:
    """The size of a GPT-2 and of its batches."""

    layers: int
    heads: int
    width: int
    vocabulary: int
    sequence: int
    batch: int


class Attention(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.heads = size.heads
        self.c_attn = nn.Linear(size.width, 3 * size.width)
        self.c_proj = nn.Linear(size.width, size.width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, sequence, width = x.shape
        q, k, v = (
            self.c_attn(x)
            .view(batch, sequence, 3, self.heads, width // self.heads)
            .permute(2, 0, 3, 1, 4)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: torch.Tensor = self.c_proj(y.transpose(1, 2).reshape(batch, sequence, width))
        return out


class MLP(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.c_fc = nn.Linear(size.width, 4 * size.width)
        self.act = nn.GELU(approximate="tanh")
        self.c_proj = nn.Linear(4 * size.width, size.width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.c_proj(self.act(self.c_fc(x)))
        return out


class Block(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(size.width)
        self.attn = Attention(size)
        self.ln_2 = nn.LayerNorm(size.width)
        self.mlp = MLP(size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))  # type: ignore[no-any-return]


class GPT2(nn.Module):
    """Takes tokens, and returns the loss of predicting each next token."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.wte = nn.Embedding(size.vocabulary, size.width)
        self.wpe = nn.Embedding(size.sequence, size.width)
        self.h = nn.ModuleList(Block(size) for _ in range(size.layers))
        self.ln_f = nn.LayerNorm(size.width)
        self.lm_head = nn.Linear(size.width, size.vocabulary, bias=False)
        self.lm_head.weight = self.wte.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.h:
            x = block(x)
        logits = self.lm_head(self.ln_f(x))
        return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())
