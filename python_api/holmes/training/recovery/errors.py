"""What recovery itself raises: all of them end this process's part of the job."""

from __future__ import annotations

import contextlib

from holmes_comm.errors import CommunicatorError, JobError, UsageError

_SHOWN = 80  # characters of a value, in messages


class GenerationFailed(CommunicatorError):
    """This generation of the job has ended, on another rank first; recovery goes on with the next one."""


class StoreLostError(JobError):
    """The store of the job does not answer any more, or not as one; start both again, from the last checkpoint."""


class StoreContentError(StoreLostError):
    """A key of the job's store holds what no process of the job wrote; the message names key, value and rule."""

    @classmethod
    def of(cls, address: object, key: str, value: str | bytes, rule: str, why: Exception) -> StoreContentError:
        """What the store at `address` holds under `key` must be `rule`."""
        if isinstance(value, bytes):
            with contextlib.suppress(UnicodeDecodeError):
                value = value.decode()
        shown = repr(value) if len(value) <= _SHOWN else f"{value[:_SHOWN]!r} and more"
        return cls(
            f"the job's store at {address} holds {shown} under the key '{key}', which must be {rule} "
            f"({type(why).__name__}: {why}); somebody else writes into this store, or it or its memory is broken: "
            "start the job again, from the last checkpoint, on a store that only its ranks reach"
        )


class CheckpointError(JobError):
    """A checkpoint could not be written, or none could be read; the message names each rank and its cause."""


class FencedError(JobError):
    """Another job writes into this one's checkpoint folder; this one has ended, without touching it any more."""


class TooFewRanksError(JobError):
    """Fewer ranks are left, or came, than the job can go on with."""


class ReplacedError(JobError):
    """Another process was started in this one's place, and the job goes on with that."""


class LeftOutError(JobError):
    """The others named this host lost in several generations in a row and go on without it; mend its network first."""


class NoProgressError(JobError):
    """Generation after generation failed without reaching the next checkpoint."""


class UnequalStepsError(UsageError):
    """Ranks would save checkpoints after different steps, which they do together. All of them have this error."""
