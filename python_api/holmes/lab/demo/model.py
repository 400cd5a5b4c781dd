"""Model: a small GPT, whole or the part of it that one pipeline stage holds, and its data: characters of the language
reference that ships with Python."""

from __future__ import annotations

from pydoc_data.topics import topics

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


class Batches:
    """Global batches, equal on every rank: `batch(step)` depends on the seed and the step only."""

    def __init__(self, settings: Settings) -> None:
        text = "".join(topics[name] for name in sorted(topics))
        characters = sorted(set(text))
        index = {character: i for i, character in enumerate(characters)}
        self.vocabulary = len(characters)
        self._settings = settings
        self._text = torch.tensor([index[character] for character in text])

    def batch(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs and targets (the next characters), both int64 [global_batch, sequence]."""
        generator = torch.Generator().manual_seed(self._settings.seed + step)
        length = self._settings.sequence
        starts = torch.randint(len(self._text) - length - 1, (self._settings.global_batch,), generator=generator)
        windows = torch.stack([self._text[start : start + length + 1] for start in starts.tolist()])
        return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()
