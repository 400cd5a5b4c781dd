"""Compression of the hop between clusters for calls that take no argument of it: torch.distributed's."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from holmes_comm import _C

__all__ = ["compressed"]


@contextlib.contextmanager
def compressed(compression: _C.Compression | None) -> Iterator[None]:
    """What this thread starts in this block crosses between clusters compressed, where it can be. Local.

    That is: all_reduce, reduce_scatter and all_gather of float32 in host memory (of reductions sums and averages), over
    groups that span clusters, as large as is run hierarchically; the last two with equal counts and clusters of as many
    ranks each. All else goes as ever. All ranks do the same, as for any argument of an operation::

        with holmes_comm.compressed(holmes_comm.Compression("int8", rotation=True)):
            torch.distributed.all_reduce(gradient)

    Of blocks in blocks the inner one counts; None: not compressed.
    """
    before = _C.exchange_thread_compression(compression)
    try:
        yield
    finally:
        _C.exchange_thread_compression(before)
