"""How many parameters a GPT-like transformer has, by part: for the partition and the simulator alike."""

from __future__ import annotations


class GptParameters:
    """For classes that have these sizes: 12 l h^2 (1 + 13 / (12h) + (V + s) / (12 l h)) parameters in all."""

    layers: int
    hidden: int
    sequence: int
    vocabulary: int

    @property
    def parameters(self) -> int:
        """Of the whole model; the output layer shares the word embedding."""
        return self.layers * self.layer_parameters + self.embedding_parameters

    @property
    def layer_parameters(self) -> int:
        """Of one layer, biases and norms included."""
        return 12 * self.hidden**2 + 13 * self.hidden

    @property
    def embedding_parameters(self) -> int:
        """Of the word and position embeddings, which the first stage holds."""
        return (self.vocabulary + self.sequence) * self.hidden

    @property
    def head_parameters(self) -> int:
        """Of the word embedding alone: the copy that the last of several stages holds."""
        return self.vocabulary * self.hidden
