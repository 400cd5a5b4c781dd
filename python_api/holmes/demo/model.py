"""Model: a small GPT, whole or the part of it that one pipeline stage holds."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from holmes.demo.settings import Settings


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


class Stage(nn.Module):
    """Some consecutive layers; the first stage begins with the embedding, the last one ends with the logits."""

    def __init__(self, settings: Settings, vocabulary: int, layers: range) -> None:
        super().__init__()
        # The whole model is drawn on every rank, in one order, so that any split starts from the same weights.
        torch.manual_seed(settings.seed)
        embed = nn.Embedding(vocabulary, settings.width)
        position = nn.Parameter(torch.randn(settings.sequence, settings.width) * 0.02)
        blocks = [Block(settings.width, settings.heads) for _ in range(settings.layers)]
        norm, head = nn.LayerNorm(settings.width), nn.Linear(settings.width, vocabulary, bias=False)
        self.blocks = nn.ModuleList(blocks[layer] for layer in layers)
        self.is_first, self.is_last = layers.start == 0, layers.stop == settings.layers
        if self.is_first:
            self.embed, self.position = embed, position
        if self.is_last:
            self.norm, self.head = norm, head

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Token ids [batch, sequence] or activations [batch, sequence, width] in; logits end in the vocabulary."""
        if self.is_first:
            x = self.embed(x) + self.position
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)) if self.is_last else x


def loss_of(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Mean cross entropy, a scalar."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def make_optimizer(module: nn.Module, settings: Settings) -> torch.optim.Optimizer:
    """AdamW on all parameters, fused."""
    return torch.optim.AdamW(module.parameters(), lr=settings.learning_rate, fused=True)
