"""Layer times and bytes of a GPT model from its sizes, where nothing was measured.

Sources: matmul FLOPs of Narayanan et al. (arXiv 2104.04473), which sum up to the Holmes paper's
96 s l h^2 (1 + s / (6h) + V / (16 l h)) per sample with full recomputation; activations of Korthikanti et al.
(arXiv 2205.05198); bytes per parameter of Megatron-core's distributed optimizer (bf16 parameters, fp32 gradients).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from holmes.gpt import GptParameters
from holmes.partition.problem import Layer

RECOMPUTATIONS = ("none", "selective", "full")
# Per parameter: bf16 value and fp32 gradient; fp32 value and two Adam moments.
_REPLICATED_BYTES, _SHARDED_BYTES = 6, 12


@dataclass(frozen=True)
class Transformer(GptParameters):
    """Sizes of a GPT model: layers, hidden size, attention heads, tokens of a sample, words of the vocabulary."""

    layers: int
    hidden: int
    heads: int
    sequence: int = 2048
    vocabulary: int = 51200

    def __post_init__(self) -> None:
        for name in ("layers", "hidden", "heads", "sequence", "vocabulary"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} of a transformer must be at least 1")
        if self.hidden % self.heads:
            raise ValueError(f"heads={self.heads} must divide hidden={self.hidden}")


def transformer_layers(
    model: Transformer,
    *,
    micro_batch: int,
    flops_per_s: float,
    tensor: int = 1,
    optimizer_shards: int = 1,
    recomputation: str = "full",
    embedding_s: tuple[float, float] = (0.0, 0.0),
) -> tuple[Layer, ...]:
    """The embedding, the model's layers and its head with the loss, as `PartitionProblem` takes them.

    Seconds for one micro-batch of `micro_batch` samples at `flops_per_s` reached by one GPU (peak times efficiency),
    bytes for one GPU, both divided over `tensor` ranks with sequence parallelism; optimizer state over
    `optimizer_shards` data-parallel ranks. `recomputation`: "none", "selective" (attention's scores) or "full" (whole
    layers). The embedding is a look-up without matmul: measure it and pass its forward and backward seconds in
    `embedding_s` where it matters. The head keeps its own copy of the embedding's word matrix, as it does on every
    pipeline of two or more stages. Raises ValueError for sizes and rates that are not positive.
    """
    for name, value in (
        ("micro_batch", micro_batch),
        ("flops_per_s", flops_per_s),
        ("tensor", tensor),
        ("optimizer_shards", optimizer_shards),
    ):
        if not (math.isfinite(value) and value > 0):
            raise ValueError(f"{name}={value} must be positive and finite")
    if recomputation not in RECOMPUTATIONS:
        raise ValueError(f"recomputation={recomputation!r} must be one of {list(RECOMPUTATIONS)}")
    hidden, sequence, vocabulary = model.hidden, model.sequence, model.vocabulary
    tokens = micro_batch * sequence
    scores_flops = 4 * tokens * sequence * hidden
    layer_flops = 24 * tokens * hidden**2 + scores_flops
    again_flops = {"none": 0, "selective": scores_flops, "full": layer_flops}[recomputation]
    head_flops = 2 * tokens * hidden * vocabulary
    second = 1 / (flops_per_s * tensor)

    boundary = 2 * tokens * hidden  # bf16, of which a tensor-parallel rank keeps and sends its share of the sequence
    scores_bytes = 5 * micro_batch * model.heads * sequence**2
    everything = 34 * tokens * hidden + scores_bytes
    kept = {"none": everything, "selective": 34 * tokens * hidden, "full": boundary}[recomputation]
    state = _REPLICATED_BYTES + _SHARDED_BYTES / optimizer_shards

    def share(count: float) -> int:
        return math.ceil(count / tensor)

    embedding = Layer(
        *embedding_s,
        kind="embedding",
        state_bytes=share(state * model.embedding_parameters),
        activation_bytes=share(tokens * hidden),  # the dropout mask
        output_bytes=share(boundary),
    )
    layer = Layer(
        forward_s=layer_flops * second,
        backward_s=(2 * layer_flops + again_flops) * second,
        state_bytes=share(state * model.layer_parameters),
        activation_bytes=share(kept),
        working_bytes=share(everything - kept),
        output_bytes=share(boundary),
    )
    head = Layer(
        forward_s=head_flops * second,
        backward_s=2 * head_flops * second,
        kind="head",
        state_bytes=share(state * model.head_parameters),
        activation_bytes=share(2 * boundary + 4 * tokens * vocabulary),  # inputs of norm and head, fp32 logits
    )
    return (embedding, *[layer] * model.layers, head)
