"""Flight records as the files that PyTorch's own analyser reads (torch.distributed.flight_recorder.fr_trace)."""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from holmes.files import make_folder
from holmes.tools.debug.record import Operation, ProcessRecord, View
from holmes_comm.errors import UsageError

__all__ = ["PREFIX", "write_torch_traces"]

PREFIX = "holmes_trace_rank_"
_VERSION = "2.6"  # the format's: operations of a group match by their numbers
#: Torch's names of the operations. A batch of sends and receives is one operation of ours, which it cannot match.
_NAMES = {
    "all_gather": "_all_gather_base",
    "reduce_scatter": "_reduce_scatter_base",
    **{name: name for name in ("all_reduce", "broadcast", "reduce", "gather", "scatter", "barrier", "send", "recv")},
    "all_to_all": "all_to_all",
    "split": "_all_gather_base",
}
_STATES = {"queued": "scheduled", "running": "started", "completed": "completed", "failed": "started"}


def write_torch_traces(records: Iterable[ProcessRecord], folder: Path) -> list[Path]:
    """A file for each process, named by its rank in the job. Local. Returns the files.

    Raises UsageError where a process does not know its rank in the job.
    """
    make_folder(folder)
    files = []
    for record in records:
        if record.job_rank is None:
            raise UsageError(
                f"process {record.pid} on {record.host} does not know its rank in the job, by which PyTorch's analyser "
                "names files; start it under torchrun, or set RANK"
            )
        file = folder / f"{PREFIX}{record.job_rank}"
        file.write_bytes(pickle.dumps(_trace(record)))
        files.append(file)
    return files


def _trace(record: ProcessRecord) -> dict[str, Any]:
    # The set-up's own communicators are no groups of the program's.
    views = [view for view in record.views if not view.name.endswith("/control") and _members(view)]
    entries = [entry for view in views for entry in _entries(view)]
    entries.sort(key=lambda entry: int(entry["time_created_ns"]))
    for number, entry in enumerate(entries):
        entry["record_id"] = number
    groups = {view.name: {"name": view.name, "desc": "holmes", "ranks": str(_members(view))} for view in views}
    return {"version": _VERSION, "entries": entries, "pg_config": groups, "pg_status": {}}


def _members(view: View) -> list[int]:
    """Its ranks in the job, in the group's order; empty where they are not known."""
    ranks = [rank.job_rank for rank in view.ranks]
    return [rank for rank in ranks if rank is not None] if None not in ranks else []


def _entries(view: View) -> list[dict[str, Any]]:
    return [_entry(view, operation) for operation in view.recent if operation.op in _NAMES]


def _entry(view: View, operation: Operation) -> dict[str, Any]:
    title = _NAMES[operation.op]
    if operation.op == "send":
        title += f" {view.rank}->{operation.peer}"
    elif operation.op == "recv":
        title += f" {view.rank}<-{operation.peer}"
    inputs, outputs = _counts(operation, view.size)
    finished = operation.finished_s
    return {
        "pg_id": 0,
        "process_group": (view.name, "holmes"),
        "collective_seq_id": operation.sequence if operation.is_collective else 0,
        "p2p_seq_id": 0 if operation.is_collective else operation.sequence,
        "op_id": operation.sequence,
        "is_p2p": not operation.is_collective,
        "profiling_name": f"nccl:{title}",
        "time_created_ns": int(operation.queued_s * 1e9),
        "time_discovered_started_ns": int(operation.queued_s * 1e9) if operation.state != "queued" else None,
        "time_discovered_completed_ns": int(finished * 1e9) if finished is not None else None,
        "input_sizes": inputs,
        "output_sizes": outputs,
        "input_dtypes": [operation.dtype],
        "output_dtypes": [operation.dtype],
        "state": _STATES.get(operation.state, "scheduled"),
        "retired": operation.state == "completed",
        "timeout_ms": 0,
        "frames": [],
    }


def _counts(operation: Operation, size: int) -> tuple[Sequence[Sequence[int]], Sequence[Sequence[int]]]:
    """Elements read and written, as shapes. A record has those of one part."""
    one, all_ = [[operation.count]], [[operation.count * size]]
    if operation.op in ("all_gather", "gather"):
        return one, all_
    if operation.op in ("reduce_scatter", "scatter"):
        return all_, one
    return one, one
