"""Checkpoints of a run in one folder that all hosts see, written with torch.distributed.checkpoint."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist

from holmes.training.recovery.errors import CheckpointError, FencedError, GenerationFailed
from holmes_comm.errors import HolmesError, UsageError

_NAME = re.compile(r"step-(\d+)-generation-(\d+)")
_CLAIM = re.compile(r"generation-(\d+)\.claim")
_IDENTITY = "job"


class Checkpoints:
    """`folder/step-00000020-generation-0001` and so on; the last `keep` complete ones stay.

    Complete is what has torch's `.metadata`, which is written last and renamed into place. The generation's number is
    a fencing token: `claim` puts it into the folder, as a file `generation-0002.claim`, and whoever holds an earlier
    one commits and removes nothing any more. A later generation's checkpoint counts before an earlier one's, whatever
    its step. `who`: a rank's name for messages.
    """

    def __init__(self, folder: str | Path, keep: int = 2) -> None:
        if keep < 1:
            raise UsageError(f"keep={keep} checkpoints is not possible; keep at least 1")
        self.folder = Path(folder)
        self.keep = keep

    def complete(self) -> list[Path]:
        """All complete ones, the earliest generation first; of one generation, the oldest step first."""
        return [path for path in self._all() if (path / ".metadata").is_file()]

    def _all(self) -> list[Path]:
        found = self._matching(_NAME)
        return [path for _, path in sorted(found, key=lambda item: (int(item[0][2]), int(item[0][1])))]

    def _matching(self, pattern: re.Pattern[str]) -> list[tuple[re.Match[str], Path]]:
        if not self.folder.is_dir():
            return []
        return [(match, path) for path in self.folder.iterdir() if (match := pattern.fullmatch(path.name))]

    def latest(self) -> Path | None:
        """The one to go on from; None: there is none yet."""
        return next(reversed(self.complete()), None)

    def identity(self) -> str:
        """A random name that the folder keeps: what trains into it is one job, on whatever store and path."""
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / _IDENTITY
        if not path.exists():
            self._create(path, secrets.token_hex(8))
        return path.read_text()

    def _create(self, path: Path, text: str) -> None:
        """Unless it is there: whoever was first, its text is there as a whole."""
        own = self.folder / f".{secrets.token_hex(8)}"
        try:
            own.write_text(text)
            with contextlib.suppress(FileExistsError):
                os.link(own, path)
        finally:
            own.unlink(missing_ok=True)

    def newest_generation(self) -> int:
        """The highest number of a generation that ever claimed the folder, or wrote into it; 0: none."""
        numbers = [int(match[1]) for match, _ in self._matching(_CLAIM)]
        return max([0, *numbers, *(int(match[2]) for match, _ in self._matching(_NAME))])

    def claim(self, generation: int, job: str, floor: int) -> None:
        """Local, on the first rank. From now on earlier generations, and earlier jobs, write nothing any more.

        `job`: the run's identity; its generations come after `floor`. Raises as `check_claim`.
        """
        self._create(self.folder / f"generation-{generation:04d}.claim", job)
        self.check_claim(generation, job, floor)
        for match, old in self._matching(_CLAIM):
            if int(match[1]) < generation:
                old.unlink(missing_ok=True)

    def check_claim(self, generation: int, job: str, floor: int) -> None:
        """Local. Raises where the folder is not this generation's: another job claimed it, or a later generation did.

        FencedError and GenerationFailed; also where the claim is gone, with the folder.
        """
        owners = {int(match[1]): path.read_text() for match, path in self._matching(_CLAIM) if int(match[1]) > floor}
        others = [number for number, owner in owners.items() if owner != job]
        if others:
            raise FencedError(
                f"another job claimed {self.folder} (generation {max(others)}; this is {generation} of job {job}): two "
                "jobs train into one folder, so this one ends; give each its own, or end the other first"
            )
        newest = max(owners, default=0)
        if newest != generation:
            raise GenerationFailed(
                f"generation {newest} has claimed {self.folder}: generation {generation} writes nothing there any more"
            )

    def save(
        self,
        state: dict[str, Any],
        step: int,
        generation: int,
        is_first_rank: bool,
        may_write: Callable[[], None] = lambda: None,
        who: Callable[[int], str] = "rank {}".format,
    ) -> Path:
        """Collective over the default group. Writes `state`, then removes older ones. Returns its folder.

        `may_write`: called on the first rank before anything is written, before the checkpoint is made complete and
        before others are removed; what it raises is raised on all. Raises CheckpointError on all ranks where one
        cannot write.
        """
        import torch.distributed.checkpoint as dcp

        from holmes.training.recovery.storage import CheckedWriter

        path = self.folder / f"step-{step:08d}-generation-{generation:04d}"
        try:
            with _quiet(), _named(f"{path} could not be written", who):
                dcp.save(state, storage_writer=CheckedWriter(path, may_write))
        except (CheckpointError, FencedError, GenerationFailed):
            if is_first_rank and not (path / ".metadata").exists():
                shutil.rmtree(path, ignore_errors=True)  # it may be what fills the disk, and nobody else removes it
            raise
        if is_first_rank:
            may_write()
            self._prune()
        return path

    def _prune(self) -> None:
        oldest_kept = self.complete()[-self.keep :][0]
        for old in self._all():
            if old == oldest_kept:
                break
            shutil.rmtree(old, ignore_errors=True)

    def set_aside(self, paths: Iterable[Path]) -> None:
        """Local, on the first rank. Renames what cannot be read, so that it is none of the `keep` that stay."""
        for path in paths:
            with contextlib.suppress(OSError):
                path.rename(path.with_name(f"{path.name}.unreadable"))

    def load(self, state: dict[str, Any], path: str | Path, who: Callable[[int], str] = "rank {}".format) -> None:
        """Collective over the default group. Fills `state` in place, from any layout.

        Raises CheckpointError on all ranks where one cannot read it, or finds that bytes of what it reads have changed;
        part of `state` may be filled then.
        """
        import torch.distributed.checkpoint as dcp

        from holmes.training.recovery.storage import CheckedReader

        with _quiet(), _named(f"{path} could not be read", who):
            dcp.load(state, storage_reader=CheckedReader(path))


@contextmanager
def _named(what: str, who: Callable[[int], str]) -> Iterator[None]:
    """What torch raises on all ranks for some, a BaseException, as the error that it is."""
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        yield
    except CheckpointException as error:
        causes = {rank: cause for rank, (cause, _) in sorted(error.failures.items())}
        for rank, cause in causes.items():
            if isinstance(cause, (HolmesError, dist.DistError)):  # says itself what it is
                raise cause from None
            if not isinstance(cause, Exception):  # Ctrl-C, there
                if not dist.is_initialized() or rank == dist.get_rank():
                    raise cause from None
                raise GenerationFailed(f"{who(rank)} ended by {type(cause).__name__} at a checkpoint") from None
        said = "; ".join(f"{who(rank)}: {type(cause).__name__}: {cause}" for rank, cause in causes.items())
        raise CheckpointError(f"checkpoint {what}: {said}") from next(iter(causes.values()))


@contextmanager
def _quiet() -> Iterator[None]:
    """Without torch's warnings that only concern its own callers."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=FutureWarning, module="torch")
        warnings.filterwarnings("ignore", message="torch.distributed is .*")
        yield
