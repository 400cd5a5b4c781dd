"""Model: a small GPT, whole or the part of it that one pipeline stage holds."""

from __future__ import annotations

import torch
from torch import nn

from holmes.lab.demo.settings import Settings
from holmes.planning.model.gpt_torch import Block, loss_of

__all__ = ["Block", "Stage", "loss_of", "make_optimizer"]


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


def make_optimizer(module: nn.Module, settings: Settings) -> torch.optim.Optimizer:
    """AdamW on all parameters, fused."""
    return torch.optim.AdamW(module.parameters(), lr=settings.learning_rate, fused=True)
