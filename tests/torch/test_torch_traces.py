"""Flight records in the form of PyTorch's own analyser, read by that analyser."""

import argparse

import pytest

pytest.importorskip(
    "torch.distributed.flight_recorder.fr_trace",
    reason="this torch has no analyser of flight records: use 2.9 or later",
)

from torch.distributed.flight_recorder.components.builder import build_db
from torch.distributed.flight_recorder.components.loader import read_dir

from holmes.tools.debug.record import ProcessRecord
from holmes.tools.debug.torch_traces import PREFIX, write_torch_traces


def operation(number, op, sequence, state="completed", **fields):
    call = {"op": op, "collective": op not in ("send", "recv"), "sequence": sequence, "dtype": "float32", "count": 8}
    call |= {"bytes": 32, "reduction": None, "root": None, "peer": None, "tag": 0}
    times = {"state": state, "queued_s": float(number), "started_s": None, "finished_s": None}
    return {"number": number, **call, **times, **fields}


def record(rank, operations):
    ranks = [{"host": f"h{r}", "nic": "eth0", "pid": 10 + r, "job_rank": r} for r in range(2)]
    group = {"id": "7", "name": "dp", "backend": "nccl", "rank": rank, "size": 2, "entered": 3, "failure": None}
    group |= {"ranks": ranks, "state": None, "operations": operations}
    process = {"kind": "holmes-flight-record", "version": 1, "host": f"h{rank}", "pid": 10 + rank, "job_rank": rank}
    process |= {"testbed": False, "reason": "asked", "wall_s": 1000.0, "monotonic_s": 100.0, "stacks": []}
    return ProcessRecord.from_dict({**process, "communicators": [group, {**group, "id": "8", "name": "dp/control"}]})


def analyse(folder):
    arguments = argparse.Namespace(
        trace_dir=str(folder),
        prefix=None,
        just_print_entries=False,
        verbose=False,
        mismatch_cap=10,
        allow_incomplete_ranks=False,
        print_stack_trace=False,
        transform_ft=False,
        group_world_size=None,
        pg_filters=None,
        selected_ranks=None,
    )
    details, version = read_dir(arguments)
    return build_db(details, arguments, version)


def test_what_fits_is_matched(tmp_path):
    operations = [operation(1, "all_reduce", 0), operation(2, "all_gather", 1), operation(3, "reduce_scatter", 2)]
    files = write_torch_traces([record(rank, operations) for rank in range(2)], tmp_path)
    assert [file.name for file in files] == [f"{PREFIX}0", f"{PREFIX}1"]
    found = analyse(tmp_path)
    assert [group.size for group in found.groups] == [2]
    assert [one.collective_name for one in found.collectives] == [
        "nccl:all_reduce",
        "nccl:_all_gather_base",
        "nccl:_reduce_scatter_base",
    ]
    assert all(one.pass_check for one in found.collectives)


def test_a_rank_that_did_not_come_is_named(tmp_path):
    one = operation(1, "all_reduce", 0)
    lonely = operation(2, "all_reduce", 1, state="running")
    write_torch_traces([record(0, [one, lonely]), record(1, [one])], tmp_path)
    last = analyse(tmp_path).collectives[-1]
    assert (last.collective_seq_id, last.missing_ranks, last.collective_state) == (1, {1}, "started")
