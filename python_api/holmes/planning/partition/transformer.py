"""Layers of a partition problem from a transformer's sizes, where nothing was measured.

Sources: times and parameters as planning.model.gpt says; activations of Korthikanti et al. (arXiv 2205.05198), whose 34
bytes per token and hidden unit are, matrix by matrix, what `_activation_bytes` counts; bytes per parameter of
Megatron-core's distributed optimizer (bf16 parameters, fp32 gradients).
"""

from __future__ import annotations

import math

from holmes.planning.model.gpt import PartTimes, Transformer, check_recomputation, modelled_times
from holmes.planning.partition.problem import Layer
from holmes_comm.errors import UsageError

__all__ = ["Transformer", "layers_of_times", "transformer_layers"]

# Per parameter: bf16 value and fp32 gradient; fp32 value and two Adam moments.
_REPLICATED_BYTES, _SHARDED_BYTES = 6, 12


def transformer_layers(
    model: Transformer,
    *,
    micro_batch: int,
    flops_per_s: float,
    tensor: int = 1,
    context: int = 1,
    optimizer_shards: int = 1,
    recomputation: str = "full",
    embedding_s: tuple[float, float] = (0.0, 0.0),
) -> tuple[Layer, ...]:
    """The embedding, the model's layers and its head with the loss, as `PartitionProblem` takes them.

    Seconds as `holmes.gpt.modelled_times` gives them; bytes as `layers_of_times` does. Raises ValueError for sizes and
    rates that are not positive.
    """
    times = modelled_times(
        model,
        micro_batch=micro_batch,
        flops_per_s=flops_per_s,
        tensor=tensor * context,
        recomputation=recomputation,
        embedding_s=embedding_s,
    )
    return layers_of_times(
        model,
        times,
        micro_batch=micro_batch,
        tensor=tensor,
        context=context,
        optimizer_shards=optimizer_shards,
        recomputation=recomputation,
    )


def layers_of_times(
    model: Transformer,
    times: PartTimes,
    *,
    micro_batch: int,
    tensor: int = 1,
    context: int = 1,
    optimizer_shards: int = 1,
    recomputation: str = "full",
) -> tuple[Layer, ...]:
    """The embedding, the model's layers and its head, each with these times of one micro-batch.

    Bytes are of one GPU: parameters divided over `tensor` ranks, activations over `tensor` (sequence parallelism) and
    `context` (parts of the sequence) ranks, optimizer state over `optimizer_shards` data-parallel ranks.
    `recomputation`: "none", "selective" (attention's scores) or "full" (whole layers). The head keeps its own copy of
    the embedding's word matrix, as it does on every pipeline of two or more stages. Raises ValueError for sizes that
    are not positive.
    """
    for name, value in (
        ("micro_batch", micro_batch),
        ("tensor", tensor),
        ("context", context),
        ("optimizer_shards", optimizer_shards),
    ):
        if not value > 0:
            raise UsageError(f"{name}={value} must be positive")
    check_recomputation(recomputation)
    tokens = micro_batch * model.sequence
    boundary = 2 * tokens * model.hidden  # bf16, of which a tensor-parallel rank keeps and sends its share
    scores_bytes = 5 * micro_batch * model.heads * model.sequence**2
    linear_bytes = tokens * _activation_bytes_per_token(model)
    everything = linear_bytes + scores_bytes
    kept = {"none": everything, "selective": linear_bytes, "full": boundary}[recomputation]
    state = _REPLICATED_BYTES + _SHARDED_BYTES / optimizer_shards

    def states(count: float) -> int:
        return math.ceil(state * count / tensor)

    def activations(count: float) -> int:
        return math.ceil(count / (tensor * context))

    embedding = Layer(
        times.embedding.forward_s,
        times.embedding.backward_s,
        kind="embedding",
        state_bytes=states(model.embedding_parameters),
        activation_bytes=activations(tokens * model.hidden),  # the dropout mask
        output_bytes=activations(boundary),
    )
    layer = Layer(
        times.layer.forward_s,
        times.layer.backward_s,
        state_bytes=states(model.layer_parameters),
        activation_bytes=activations(kept),
        working_bytes=activations(everything - kept),
        output_bytes=activations(boundary),
    )
    head = Layer(
        times.head.forward_s,
        times.head.backward_s,
        kind="head",
        state_bytes=states(model.head_parameters),
        # inputs of norm and head, fp32 logits
        activation_bytes=activations(2 * boundary + 4 * tokens * model.vocabulary),
    )
    return (embedding, *[layer] * model.layers, head)


def _activation_bytes_per_token(model: Transformer) -> int:
    """Of one layer without attention's scores: 34 hidden for a GPT.

    In 2-byte values: the inputs of both norms, of query/key/value, query, keys and values themselves, the context, and
    the inputs of the MLP and of its matrices; in bytes: the masks of two dropouts. A gated MLP keeps gate, value and
    their product.
    """
    hidden, mlp = model.hidden, model.mlp_hidden or 4 * model.hidden
    kv = hidden * (model.kv_heads or model.heads) // model.heads
    attention = 2 * (hidden + hidden + hidden + 2 * kv + hidden) + hidden
    return attention + 2 * (hidden + hidden + (3 if model.gated else 2) * mlp) + hidden
