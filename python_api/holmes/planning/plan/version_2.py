"""Reading plans of version 2, some of which called a network's `rate_gbps` its `speed_gbps`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def upgrade(data: Mapping[str, Any]) -> dict[str, Any]:
    """The same plan as version 3. Raises ValueError naming what is wrong."""
    try:
        networks = [_renamed(entry) for entry in data["networks"]]
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"not a plan of version 2: {error!r}") from error
    return {**data, "version": 3, "networks": networks}


def _renamed(network: Mapping[str, Any]) -> dict[str, Any]:
    return {"rate_gbps" if key == "speed_gbps" else key: value for key, value in network.items()}
