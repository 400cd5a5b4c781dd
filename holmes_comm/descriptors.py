"""Whether a process may still open what it needs to look around."""

from __future__ import annotations

import os
import resource

from holmes_comm.errors import SystemError

_FOR_SYSFS = 4  # that reading it has open at a time, and some to spare


def check_descriptors() -> None:
    """Where too few are left to read sysfs, NICs would look as if they were not there. Raises SystemError."""
    spare: list[int] = []
    try:
        for _ in range(_FOR_SYSFS):
            spare.append(os.open("/", os.O_RDONLY | os.O_CLOEXEC))  # one by one: all are closed again
    except OSError as error:
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        raise SystemError(
            f"cannot look at the NICs: {error.strerror} (errno {error.errno}); this process may open {limit} files "
            "(ulimit -n), raise that",
            system_errno=error.errno,
        ) from error
    finally:
        for descriptor in spare:
            os.close(descriptor)
