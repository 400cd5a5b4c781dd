"""The end of a process that multiprocessing forked: by os._exit, past everything that is registered for the end."""

from __future__ import annotations

from multiprocessing import parent_process, util
from typing import Any

from holmes_comm import _C

#: After multiprocessing's own, the end of this process's children among them.
_LAST = -100


def _settle_before_exit(_: Any = None) -> None:
    util.Finalize(None, _C.wait_until_settled, exitpriority=_LAST)


# A child drops what its parent had registered, and then calls this.
util.register_after_fork(_settle_before_exit, _settle_before_exit)
if parent_process() is not None:
    _settle_before_exit()
