"""A GPT's parts as torch modules: what `holmes demo` trains and `holmes bench compute` times."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F


class Block(nn.Module):
    """Pre-norm transformer block; [batch, sequence, width] in and out."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)
        self.norm_2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Causal self-attention and MLP, each with its residual."""
        batch, sequence, width = x.shape
        qkv = self.qkv(self.norm_1(x)).view(batch, sequence, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.project(attended.transpose(1, 2).reshape(batch, sequence, width))
        mixed: torch.Tensor = x + self.mlp(self.norm_2(x))
        return mixed


class Embedding(nn.Module):
    """Word and position embedding: token ids [batch, sequence] to [batch, sequence, width]."""

    def __init__(self, vocabulary: int, sequence: int, width: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.position = nn.Parameter(torch.randn(sequence, width) * 0.02)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of both."""
        summed: torch.Tensor = self.embed(x) + self.position
        return summed


class Head(nn.Module):
    """Norm and output layer: [batch, sequence, width] to logits over the vocabulary."""

    def __init__(self, vocabulary: int, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.output = nn.Linear(width, vocabulary, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Logits."""
        logits: torch.Tensor = self.output(self.norm(x))
        return logits


def loss_of(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Mean cross entropy, a scalar."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())
