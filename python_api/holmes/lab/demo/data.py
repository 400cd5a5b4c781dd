"""Data: characters of the language reference that ships with Python."""

from __future__ import annotations

from pydoc_data.topics import topics

import torch

from holmes.lab.demo.settings import Settings


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
