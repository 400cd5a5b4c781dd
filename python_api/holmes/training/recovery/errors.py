"""What recovery itself raises: all of them end this process's part of the job."""

from __future__ import annotations

from holmes_comm.errors import CommunicatorError, JobError


class GenerationFailed(CommunicatorError):
    """This generation of the job has ended, on another rank first; recovery goes on with the next one."""


class StoreLostError(JobError):
    """The store of the job does not answer any more; start it and the job again, from the last checkpoint."""


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
