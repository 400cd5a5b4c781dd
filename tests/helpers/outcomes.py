"""What a worker tells its test of how it ended."""

from __future__ import annotations

from typing import Any

import holmes_comm


def error_fields(error: holmes_comm.HolmesError) -> dict[str, Any]:
    """Class, text and whom it names, for JSON."""
    return {
        "error": type(error).__name__,
        "message": str(error),
        "peer": error.peer,
        "host": error.host,
        "nic": error.nic,
    }
