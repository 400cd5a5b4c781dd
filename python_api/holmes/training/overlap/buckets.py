"""Buckets: where each parameter lies in the flat buffers, and which part of it each rank owns. Numbers only."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

ALIGNMENT_BYTES = 64  # a cache line: parameters and shards begin on one
LEAST_SHARE = 1 / 8  # of the size of a bucket, that the first and last ones may shrink to


@dataclass(frozen=True)
class ParameterSize:
    """Elements, bytes per element, and the kind (dtype, device): only parameters of one kind share a bucket."""

    numel: int
    itemsize: int
    kind: Hashable


@dataclass(frozen=True)
class Slot:
    """Parameter number `parameter` lies at elements [offset, offset + numel) of its bucket."""

    parameter: int
    offset: int
    numel: int


@dataclass(frozen=True)
class Fragment:
    """Elements [start, start + numel) of a flattened parameter lie at `offset` of a rank's shard."""

    parameter: int
    start: int
    offset: int
    numel: int


@dataclass(frozen=True)
class Bucket:
    """One flat buffer of `numel` elements, cut into `shards` equal parts, one for each rank; padded to that."""

    slots: tuple[Slot, ...]
    numel: int
    shards: int

    @property
    def shard_numel(self) -> int:
        """Elements that each rank owns, padding included."""
        return self.numel // self.shards

    def fragments(self, rank: int) -> list[Fragment]:
        """What rank `rank`'s shard holds of each parameter, without padding and without empty parts."""
        low, high = rank * self.shard_numel, (rank + 1) * self.shard_numel
        found = []
        for slot in self.slots:
            start, end = max(slot.offset, low), min(slot.offset + slot.numel, high)
            if start < end:
                found.append(Fragment(slot.parameter, start - slot.offset, start - low, end - start))
        return found


def lay_out(order: Sequence[int], sizes: Sequence[ParameterSize], bucket_bytes: int, shards: int) -> list[Bucket]:
    """The parameters `order` (indices into `sizes`) in buckets of at most `bucket_bytes`, in the order of completion.

    A parameter larger than that has a bucket of its own. A bucket is complete with the last of its parameters, so
    buckets are sorted by that one's place in `order`. The first ones are smaller, each at most as large as all before
    it, so that the link gets to work early, and the last ones, each at most half of what is left (both down to
    LEAST_SHARE): nothing hides the last reduce-scatter of a backward pass, nor the first all-gather of a forward pass,
    which is the same bucket's.
    """
    if bucket_bytes < 1 or shards < 1:
        raise ValueError(f"bucket_bytes={bucket_bytes} and shards={shards} must be 1 or more")
    open_buckets: dict[Hashable, list[int]] = {}
    open_bytes: dict[Hashable, int] = {}
    closed: list[list[int]] = []
    left_bytes = total_bytes = sum(sizes[index].numel * sizes[index].itemsize for index in order)
    for index in order:
        size = sizes[index]
        added = size.numel * size.itemsize
        limit_bytes = max(min(bucket_bytes, left_bytes / 2, total_bytes - left_bytes), bucket_bytes * LEAST_SHARE)
        left_bytes -= added
        members = open_buckets.get(size.kind)
        if members is not None and open_bytes[size.kind] + added > limit_bytes:
            closed.append(members)
            members = None
        if members is None:
            members = open_buckets[size.kind] = []
            open_bytes[size.kind] = 0
        members.append(index)
        open_bytes[size.kind] += added
    closed += open_buckets.values()
    place = {index: position for position, index in enumerate(order)}
    closed.sort(key=lambda members: place[members[-1]])
    return [_place(members, sizes, shards) for members in closed]


def _place(members: Sequence[int], sizes: Sequence[ParameterSize], shards: int) -> Bucket:
    alignment = max(1, ALIGNMENT_BYTES // sizes[members[0]].itemsize)
    slots, end = [], 0
    for index in members:
        slots.append(Slot(index, end, sizes[index].numel))
        end = _round_up(end + sizes[index].numel, alignment)
    return Bucket(tuple(slots), _round_up(max(end, 1), alignment * shards), shards)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
