"""A transformer's sizes, and what follows from them: parameters and floating-point operations, by part.

For the partition, the simulator and the search alike. Sources: operations of Narayanan et al. (arXiv 2104.04473), which
for a GPT sum up to the Holmes paper's 96 s l h^2 (1 + s / (6h) + V / (16 l h)) per sample with full recomputation, and
parameters 12 l h^2 (1 + 13 / (12h) + (V + s) / (12 l h)); grouped key and value heads: Ainslie et al. (arXiv
2305.13245); gated MLP (three matrices): Shazeer (arXiv 2002.05202).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from holmes_comm.errors import UsageError

MOST_LAYERS = 2_000  # published models have up to 1,000; planning them takes time and memory with the layers' square
RECOMPUTATIONS = ("none", "selective", "full")  # nothing, attention's scores, whole layers


@dataclass(frozen=True)
class Transformer:
    """Sizes of a decoder: layers, hidden size, attention heads, tokens of a sample, words of the vocabulary.

    `kv_heads` None: as many as heads; `mlp_hidden` None: 4 hidden; `gated`: the MLP has three matrices (SwiGLU) and
    there are no biases, as in Llama; `tied`: the output layer shares the word embedding; `learned_positions`: there is
    an embedding of positions.
    """

    layers: int
    hidden: int
    heads: int
    sequence: int = 2048
    vocabulary: int = 51200
    kv_heads: int | None = None
    mlp_hidden: int | None = None
    gated: bool = False
    tied: bool = True
    learned_positions: bool = True

    def __post_init__(self) -> None:
        for name in ("layers", "hidden", "heads", "sequence", "vocabulary", "kv_heads", "mlp_hidden"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UsageError(f"{name}={value} of a transformer must be at least 1")
        if self.layers > MOST_LAYERS:
            raise UsageError(f"layers={self.layers} of a transformer must be at most {MOST_LAYERS}")
        if self.hidden % self.heads:
            raise UsageError(f"heads={self.heads} must divide hidden={self.hidden}")
        if self.kv_heads is not None and self.heads % self.kv_heads:
            raise UsageError(f"kv_heads={self.kv_heads} must divide heads={self.heads}")

    @property
    def layer_matrix_parameters(self) -> int:
        """Of one layer's matrices: query, key, value, projection, and the MLP's."""
        kv = self.hidden * (self.kv_heads or self.heads) // self.heads
        mlp = (3 if self.gated else 2) * (self.mlp_hidden or 4 * self.hidden)
        return self.hidden * (2 * self.hidden + 2 * kv + mlp)

    @property
    def layer_parameters(self) -> int:
        """Of one layer, norms and biases included."""
        if self.gated:
            return self.layer_matrix_parameters + 2 * self.hidden
        kv = self.hidden * (self.kv_heads or self.heads) // self.heads
        biases = 2 * self.hidden + 2 * kv + (self.mlp_hidden or 4 * self.hidden) + self.hidden
        return self.layer_matrix_parameters + biases + 4 * self.hidden

    @property
    def embedding_parameters(self) -> int:
        """Of what the first stage holds: the embedding of words, and of positions where there is one."""
        return (self.vocabulary + (self.sequence if self.learned_positions else 0)) * self.hidden

    @property
    def head_parameters(self) -> int:
        """Of the output layer, or of the copy of the word embedding that the last of several stages holds."""
        return self.vocabulary * self.hidden

    @property
    def parameters(self) -> int:
        """Of the whole model."""
        return (
            self.layers * self.layer_parameters + self.embedding_parameters + (0 if self.tied else self.head_parameters)
        )

    def stage_parameters(self, layers_per_stage: tuple[int, ...], stage: int) -> int:
        """Of one stage. The last of several stages has its own copy of a tied embedding."""
        count = layers_per_stage[stage] * self.layer_parameters
        last = len(layers_per_stage) - 1
        if stage == 0:
            count += self.embedding_parameters
        if stage == last and (last > 0 or not self.tied):
            count += self.head_parameters
        return count

    @property
    def scores_forward_flops(self) -> float:
        """Of one layer's attention scores and context, one sample."""
        return 4.0 * self.sequence**2 * self.hidden

    @property
    def layer_forward_flops(self) -> float:
        """Of one layer, one sample."""
        return 2.0 * self.sequence * self.layer_matrix_parameters + self.scores_forward_flops

    @property
    def head_forward_flops(self) -> float:
        """Of the output layer, one sample."""
        return 2.0 * self.sequence * self.hidden * self.vocabulary

    def layer_backward_flops(self, recomputation: str = "full") -> float:
        """Of one layer, one sample: twice the forward, and what is computed a second time."""
        check_recomputation(recomputation)
        again = {"none": 0.0, "selective": self.scores_forward_flops, "full": self.layer_forward_flops}
        return 2 * self.layer_forward_flops + again[recomputation]

    def flops_per_sample(self, recomputation: str = "full") -> float:
        """Forward and backward of one sample; the head is never computed a second time."""
        layer = self.layer_forward_flops + self.layer_backward_flops(recomputation)
        return self.layers * layer + 3 * self.head_forward_flops


@dataclass(frozen=True)
class PassTimes:
    """Seconds of one micro-batch through a part of the model; `backward_s` includes recomputation."""

    forward_s: float
    backward_s: float

    @property
    def total_s(self) -> float:
        """Both."""
        return self.forward_s + self.backward_s


@dataclass(frozen=True)
class PartTimes:
    """Seconds of one micro-batch through the embedding, one layer, and the head with the loss, measured or modelled."""

    embedding: PassTimes
    layer: PassTimes
    head: PassTimes

    def scaled(self, factor: float) -> PartTimes:
        """All times `factor` times as long."""
        return PartTimes(*(PassTimes(part.forward_s * factor, part.backward_s * factor) for part in self._parts))

    @property
    def _parts(self) -> tuple[PassTimes, PassTimes, PassTimes]:
        return self.embedding, self.layer, self.head

    def stage(self, layers_per_stage: tuple[int, ...], stage: int) -> PassTimes:
        """Of one stage."""
        parts = [self.layer] * layers_per_stage[stage]
        parts += [self.embedding] if stage == 0 else []
        parts += [self.head] if stage == len(layers_per_stage) - 1 else []
        return PassTimes(sum(part.forward_s for part in parts), sum(part.backward_s for part in parts))


def modelled_times(
    model: Transformer,
    *,
    micro_batch: int,
    flops_per_s: float,
    tensor: int = 1,
    recomputation: str = "full",
    embedding_s: tuple[float, float] = (0.0, 0.0),
    tensor_bytes_per_s: float | None = None,
) -> PartTimes:
    """Times by FLOPs: micro-batches of `micro_batch` samples at `flops_per_s` reached by one GPU (peak times
    efficiency), shared out over `tensor` of them.

    The embedding is a look-up without matmul: measure it and pass its forward and backward seconds in `embedding_s`
    where it matters. `tensor_bytes_per_s`: of a GPU to the others of its tensor group, each way; a layer's exchanges
    then add to its times, as `tensor_exchange_s` has them. Raises ValueError for sizes and rates that are not positive.
    """
    for name, value in (("micro_batch", micro_batch), ("flops_per_s", flops_per_s), ("tensor", tensor)):
        if not (math.isfinite(value) and value > 0):
            raise UsageError(f"{name}={value} must be positive and finite")
    second = micro_batch / (flops_per_s * tensor)
    exchange_s = 0.0
    if tensor_bytes_per_s is not None:
        exchange_s = tensor_exchange_s(model, micro_batch=micro_batch, tensor=tensor, bytes_per_s=tensor_bytes_per_s)
    forward_s = model.layer_forward_flops * second + exchange_s
    again = 2 if recomputation == "full" else 1
    return PartTimes(
        embedding=PassTimes(*embedding_s),
        layer=PassTimes(forward_s, model.layer_backward_flops(recomputation) * second + again * exchange_s),
        head=PassTimes(model.head_forward_flops * second, 2 * model.head_forward_flops * second),
    )


def tensor_exchange_s(model: Transformer, *, micro_batch: int, tensor: int, bytes_per_s: float) -> float:
    """Seconds of a tensor group's exchanges in one layer's forward; its backward has as many.

    Two all-reduces of 16-bit activations, or a reduce-scatter and an all-gather each with sequence parallelism, which
    move as much (Shoeybi et al., arXiv 1909.08053; Korthikanti et al., arXiv 2205.05198), as rings, hidden by nothing.
    """
    activation_bytes = 2 * micro_batch * model.sequence * model.hidden
    return 2 * 2 * (tensor - 1) / tensor * activation_bytes / bytes_per_s


def check_recomputation(recomputation: str) -> None:
    """Raises ValueError, naming those there are, for an unknown one."""
    if recomputation not in RECOMPUTATIONS:
        raise UsageError(f"recomputation={recomputation!r} must be one of {list(RECOMPUTATIONS)}")
