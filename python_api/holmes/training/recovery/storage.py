"""Storage: torch's files of a checkpoint, with a checksum of each item, by which changed bytes are found when read.

`checksums.json` in the checkpoint's folder holds the CRC-32 of every tensor and object as it lies in the files, and one
of the tensors' layout, which torch keeps in `.metadata`.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

MANIFEST = "checksums.json"
_PIECE_BYTES = 1 << 20


class ChangedBytes(Exception):
    """A file of a checkpoint does not hold what was written."""


@dataclass(frozen=True)
class Item:
    """One tensor, part of a tensor, or object, and where it lies."""

    name: str
    file: str
    offset: int
    length: int

    @classmethod
    def of(cls, index: Any, place: Any) -> Item:
        """torch's index and place of it."""
        return cls(str(index.fqn), str(place.relative_path), int(place.offset), int(place.length))

    def crc(self, folder: Path) -> int:
        """Of its bytes as they are now. Raises ChangedBytes where the file is too short."""
        crc, left = 0, self.length
        with open(folder / self.file, "rb", buffering=0) as file:
            file.seek(self.offset)
            while left and (piece := file.read(min(left, _PIECE_BYTES))):
                crc, left = zlib.crc32(piece, crc), left - len(piece)
        if left:
            raise ChangedBytes(f"{self} ends {left} bytes early: the file was truncated")
        return crc

    def __str__(self) -> str:
        """For messages."""
        return f"{self.name!r} in {self.file} (bytes {self.offset} to {self.offset + self.length})"


@dataclass(frozen=True)
class _CheckedResult(WriteResult):
    """What a rank tells the first one of an item that it wrote."""

    crc: int = 0


class CheckedWriter(dcp.FileSystemWriter):
    """`may_write`: called on the first rank before anything is written, and before the checkpoint is made complete."""

    def __init__(self, path: str | Path, may_write: Callable[[], None]) -> None:
        super().__init__(path)
        self._folder, self._may_write = Path(path), may_write

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """As torch's."""
        if is_coordinator:
            self._may_write()
        super().set_up_storage_writer(is_coordinator, *args, **kwargs)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """As torch's."""
        try:
            written = super().write_data(plan, planner).wait()
        except RuntimeError as error:  # torch's zip writer meets another one when it is left; no rank but this
            raise system_error(error) or error from None  # would hear of the first
        checked: Future[list[WriteResult]] = Future()
        checked.set_result([self._checked(result) for result in written])
        return checked

    def finish(self, metadata: Metadata, results: list[list[Any]]) -> None:
        """As torch's: the checkpoint is complete then."""
        self._may_write()
        items = [
            [*vars(Item.of(result.index, result.storage_data)).values(), result.crc]
            for of_rank in results
            for result in of_rank
        ]
        with open(self._folder / MANIFEST, "w") as file:
            json.dump({"layout": layout_crc(metadata), "items": items}, file)
            file.flush()
            os.fsync(file.fileno())
        super().finish(metadata, results)

    def _checked(self, result: WriteResult) -> WriteResult:
        crc = Item.of(result.index, result.storage_data).crc(self._folder)
        return _CheckedResult(result.index, result.size_in_bytes, result.storage_data, crc)


class CheckedReader(dcp.FileSystemReader):
    """Raises ChangedBytes, which names file and tensor, where something that is read is not what was written."""

    def __init__(self, path: str | Path) -> None:
        super().__init__(path)
        self._folder = Path(path)
        self._crcs: dict[Item, int] = {}

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """As torch's."""
        super().set_up_storage_reader(metadata, is_coordinator, *args, **kwargs)
        layout, self._crcs = _read_manifest(self._folder / MANIFEST)
        if layout_crc(metadata) != layout:
            raise ChangedBytes(f"the tensors' layout in .metadata is not the one that {MANIFEST} was written for")

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """As torch's."""
        for index in dict.fromkeys(read.storage_index for read in plan.items):
            self._check(Item.of(index, self.storage_data[index]))
        return super().read_data(plan, planner)

    def _check(self, item: Item) -> None:
        written = self._crcs.get(item)
        if written is None:
            raise ChangedBytes(f"{item} is in .metadata and not in {MANIFEST}: one of the two was changed")
        found = item.crc(self._folder)
        if found != written:
            raise ChangedBytes(
                f"{item} has CRC-32 {found:08x} and had {written:08x} when it was written: disk, network or memory "
                "changes bits, or somebody else wrote into it"
            )


def layout_crc(metadata: Metadata) -> int:
    """Of names, types, sizes and parts of all tensors: the same in every version of torch."""
    layout = {name: _layout_of(stored) for name, stored in metadata.state_dict_metadata.items()}
    return zlib.crc32(json.dumps(layout, sort_keys=True).encode())


def _layout_of(stored: Any) -> Any:
    if not isinstance(stored, TensorStorageMetadata):
        return "object"
    parts = sorted([list(chunk.offsets), list(chunk.sizes)] for chunk in stored.chunks)
    return [str(stored.properties.dtype), list(stored.size), parts]


def _read_manifest(path: Path) -> tuple[int, dict[Item, int]]:
    try:
        manifest: Mapping[str, Any] = json.loads(path.read_text())
        items: Sequence[Sequence[Any]] = manifest["items"]
        return int(manifest["layout"]), {Item(*item): crc for *item, crc in items}
    except (ValueError, TypeError, KeyError) as error:
        raise ChangedBytes(f"{path.name} is not what was written: {type(error).__name__}: {error}") from None


def system_error(error: BaseException | None) -> OSError | None:
    """The one that this error comes from, if any."""
    while error is not None and not isinstance(error, OSError):
        error = error.__cause__ or error.__context__
    return error
