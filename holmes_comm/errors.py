"""The error tree. Subclasses say what the caller should do: fix the call, rebuild the communicator, restart the job."""

from __future__ import annotations

__all__ = [
    "AbortedError",
    "CommunicatorError",
    "HolmesError",
    "IntegrityError",
    "JobError",
    "MismatchError",
    "NicError",
    "PeerLostError",
    "ProtocolError",
    "SystemError",
    "TimeoutError",
    "UnreachableError",
    "UsageError",
]

from builtins import TimeoutError as BuiltinTimeoutError


class HolmesError(RuntimeError):
    """Root of every error this library raises.

    Attributes:
        rank: rank that reports the error, in the communicator it happened on; None where it does not apply.
        peer: rank the error is about, or None.
        host: host of ``peer`` (of ``rank`` where there is no peer); empty where unknown.
        nic: interface the connection uses; empty where it does not apply.
        system_errno: errno of the failed system call, or None.
    """

    def __init__(
        self,
        message: str,
        *,
        rank: int | None = None,
        peer: int | None = None,
        host: str = "",
        nic: str = "",
        system_errno: int | None = None,
    ) -> None:
        super().__init__(message)
        self.rank = rank
        self.peer = peer
        self.host = host
        self.nic = nic
        self.system_errno = system_errno

    def __reduce__(self) -> tuple[object, ...]:
        context = (self.rank, self.peer, self.host, self.nic, self.system_errno)
        return (_rebuild, (type(self), str(self), *context), dict(self.__dict__))  # notes, and what others have set


def _rebuild(
    kind: type[HolmesError],
    message: str,
    rank: int | None,
    peer: int | None,
    host: str,
    nic: str,
    system_errno: int | None,
) -> HolmesError:
    return kind(message, rank=rank, peer=peer, host=host, nic=nic, system_errno=system_errno)


class UsageError(HolmesError, ValueError):
    """Fix the call: an argument, a NIC selection or the order of calls is wrong."""


class NicError(UsageError):
    """A NIC does not exist, is down, has no address, or does not match the selection."""


class MismatchError(UsageError):
    """Ranks disagree on operation, dtype, count, root or order. The communicator is dead."""


class CommunicatorError(HolmesError):
    """Rebuild the communicator: the group is broken, the process is fine."""


class PeerLostError(CommunicatorError, ConnectionError):
    """A peer's process or connection ended."""


class TimeoutError(CommunicatorError, BuiltinTimeoutError):
    """A deadline passed."""


class AbortedError(CommunicatorError):
    """Somebody aborted the communicator, or destroyed it with operations pending."""


class UnreachableError(CommunicatorError, ConnectionError):
    """A peer cannot be connected to over the chosen NICs."""


class IntegrityError(CommunicatorError):
    """Bytes have changed on their way to this rank (``integrity=True``), or a result differs between ranks."""


class JobError(HolmesError):
    """Restart the job: this process or the peer's library cannot go on."""


class ProtocolError(JobError):
    """A peer speaks another protocol version, or failed to prove the job's secret."""


class SystemError(JobError):
    """The operating system refused memory, descriptors or a system call."""
