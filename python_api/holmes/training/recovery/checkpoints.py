"""Checkpoints of a run in one folder that all hosts see, written with torch.distributed.checkpoint."""

from __future__ import annotations

import re
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from holmes_comm.errors import UsageError

_NAME = re.compile(r"step-(\d+)-generation-(\d+)")


class Checkpoints:
    """`folder/step-00000020-generation-0001` and so on; the last `keep` complete ones stay.

    A process that was given up and goes on writing spoils nothing: it writes to its own generation's folder. Complete
    is what has torch's `.metadata`, which is written last and renamed into place.
    """

    def __init__(self, folder: str | Path, keep: int = 2) -> None:
        if keep < 1:
            raise UsageError(f"keep={keep} checkpoints is not possible; keep at least 1")
        self.folder = Path(folder)
        self.keep = keep

    def complete(self) -> list[Path]:
        """All complete ones, oldest step first; of one step, the latest generation's last."""
        return [path for path in self._all() if (path / ".metadata").is_file()]

    def _all(self) -> list[Path]:
        if not self.folder.is_dir():
            return []
        found = [(match, path) for path in self.folder.iterdir() if (match := _NAME.fullmatch(path.name))]
        return [path for _, path in sorted(found, key=lambda item: (int(item[0][1]), int(item[0][2])))]

    def latest(self) -> Path | None:
        """The one to go on from; None: there is none yet."""
        return next(reversed(self.complete()), None)

    def save(self, state: dict[str, Any], step: int, generation: int, is_first_rank: bool) -> Path:
        """Collective over the default group. Writes `state`, then removes older ones. Returns its folder."""
        import torch.distributed.checkpoint as dcp

        path = self.folder / f"step-{step:08d}-generation-{generation:04d}"
        path.mkdir(parents=True, exist_ok=True)
        with _quiet():
            dcp.save(state, checkpoint_id=path)
        if is_first_rank:
            oldest_kept = self.complete()[-self.keep :][0]
            for old in self._all():
                if old == oldest_kept:
                    break
                shutil.rmtree(old, ignore_errors=True)
        return path

    def load(self, state: dict[str, Any], path: str | Path) -> None:
        """Collective over the default group. Fills `state` in place, from any layout."""
        import torch.distributed.checkpoint as dcp

        with _quiet():
            dcp.load(state, checkpoint_id=path)


@contextmanager
def _quiet() -> Iterator[None]:
    """Without torch's warnings that only concern its own callers."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=FutureWarning, module="torch")
        warnings.filterwarnings("ignore", message="torch.distributed is .*")
        yield
