"""What a GPT-like transformer costs: floating-point operations, parameters, bytes at a stage boundary.

The sums are the paper's (and Megatron-LM's) formulas, taken apart so that each pipeline stage gets its own share.
"""

from __future__ import annotations

from dataclasses import dataclass

from holmes.gpt import GptParameters


@dataclass(frozen=True)
class ModelShape(GptParameters):
    """Shape of the model: layers, hidden size, tokens of a sample, words of the vocabulary."""

    layers: int
    hidden: int
    sequence: int
    vocabulary: int

    def __post_init__(self) -> None:
        for name in ("layers", "hidden", "sequence", "vocabulary"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} of the model must be at least 1")

    @property
    def layer_forward_flops(self) -> float:
        """Of one layer and one sample: four matrices of attention, two of the MLP, scores and context."""
        return 24.0 * self.sequence * self.hidden**2 * (1 + self.sequence / (6 * self.hidden))

    @property
    def head_forward_flops(self) -> float:
        """Of the output layer and one sample."""
        return 2.0 * self.sequence * self.hidden * self.vocabulary

    def flops_per_sample(self, recompute: bool = True) -> float:
        """Forward and backward (twice the forward) of one sample; `recompute`: the layers' forward a second time."""
        return self.layers * self.layer_forward_flops * (4 if recompute else 3) + 3 * self.head_forward_flops

    def stage_parameters(self, layers_per_stage: tuple[int, ...], stage: int) -> float:
        """Of one stage. The last of several stages has its own copy of the word embedding."""
        count = float(layers_per_stage[stage] * self.layer_parameters)
        if stage == 0:
            count += self.embedding_parameters
        elif stage == len(layers_per_stage) - 1:
            count += self.head_parameters
        return count

    def stage_forward_flops(self, layers_per_stage: tuple[int, ...], stage: int) -> float:
        """Forward of one sample through one stage."""
        head = self.head_forward_flops if stage == len(layers_per_stage) - 1 else 0.0
        return layers_per_stage[stage] * self.layer_forward_flops + head

    def stage_backward_flops(self, layers_per_stage: tuple[int, ...], stage: int, recompute: bool = True) -> float:
        """Backward of one sample through one stage; `recompute`: the layers' forward before it, not the head's."""
        layers = layers_per_stage[stage] * self.layer_forward_flops
        return 2 * self.stage_forward_flops(layers_per_stage, stage) + (layers if recompute else 0.0)
