"""What every store with torch's interface must do alike."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest


def store_program(store: Any) -> Iterator[Any]:
    """Uses a fresh store; yields what it answered, as torch's TCPStore does."""
    import torch.distributed as dist

    long = [f"key {place}" for place in range(300)]  # more than one transaction of etcd takes
    store.set("text", "value")
    store.set("bytes", b"\x00\xff")
    for key in long:
        store.set(key, key)
    yield store.get("text"), store.get("bytes"), store.multi_get(long) == [key.encode() for key in long]
    yield store.check(["text", "bytes"]), store.check(["text", "nothing"]), store.check([*long, "nothing"])
    yield store.compare_set("new", "", "first"), store.compare_set("new", "", "second"), store.get("new")
    yield store.compare_set("new", "first", "third"), store.compare_set("new", "first", "fourth")
    yield store.compare_set("absent", "expected", "value"), store.check(["absent"])
    yield store.add("count", 5), store.add("count", -2), store.add("count", 0), store.get("count")
    yield store.delete_key("text"), store.check(["text"]), store.delete_key("text")
    with pytest.raises(dist.DistError):
        store.wait(["nothing"], timedelta(seconds=0.3))
