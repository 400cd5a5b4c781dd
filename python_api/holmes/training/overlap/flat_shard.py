"""FlatShard: a rank's part of a flattened tensor, as torch.distributed.checkpoint saves and loads it on any layout."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

_KEEPING = (torch.ops.aten.detach.default, torch.ops.aten.clone.default, torch.ops.aten._to_copy.default)


class FlatShard(torch.Tensor):
    """Elements [start, start + len(local)) of a tensor of `numel` elements, flattened; other ranks have the rest.

    Its shape is the whole tensor's, (numel,). For checkpoints only: it can be detached, cloned, moved and pickled.
    """

    local: torch.Tensor
    start: int

    @staticmethod
    def __new__(cls, local: torch.Tensor, start: int, numel: int) -> FlatShard:
        """`local`: this rank's part, 1-D; its memory is shared."""
        made = torch.Tensor._make_wrapper_subclass(cls, (numel,), dtype=local.dtype, device=local.device)
        made.local, made.start = local, start
        return made

    def __init__(self, local: torch.Tensor, start: int, numel: int) -> None:
        pass

    def __repr__(self) -> str:  # type: ignore[override]
        """Where it lies and what is in it."""
        return f"FlatShard({self.local}, start={self.start}, numel={self.numel()})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickles this rank's part."""
        return FlatShard, (self.local.clone(), self.start, self.numel())

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Copies keep their place; nothing else is defined."""
        if func in _KEEPING:
            shard: FlatShard = args[0]
            return cls(func(shard.local, *args[1:], **(kwargs or {})), shard.start, shard.numel())
        raise NotImplementedError(f"{func} is not defined for a FlatShard; use its .local")

    def __create_write_items__(self, fqn: str, _value: Any) -> list[WriteItem]:
        """What this rank writes (torch's protocol of checkpointable objects)."""
        data = TensorWriteData(
            chunk=self._chunk(), properties=TensorProperties.create_from_tensor(self.local), size=self.size()
        )
        return [WriteItem(MetadataIndex(fqn, self._chunk().offsets), WriteItemType.SHARD, tensor_data=data)]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        """What this rank reads."""
        return [self._chunk()]

    def __get_tensor_shard__(self, _index: MetadataIndex) -> torch.Tensor:
        """The memory to write from or read into."""
        return self.local

    def _chunk(self) -> ChunkStorageMetadata:
        return ChunkStorageMetadata(offsets=torch.Size([self.start]), sizes=self.local.size())


torch.serialization.add_safe_globals([FlatShard])  # torch.load of a state_dict, with its default weights_only=True
