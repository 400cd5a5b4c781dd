"""Groups that span clusters: names, arguments, and on the testbed which bytes cross which NIC."""

from __future__ import annotations

import json
import sys
from typing import Any

import numpy as np
import pytest
from namespaces import needs_namespaces
from paths import WORKERS
from ranks import run_threads

import holmes_comm


def run_clusters(clusters: list[str], body: Any, **options: Any) -> list[Any]:
    """``body(communicator)`` on every thread rank; ``clusters[r]`` is the cluster of rank r."""
    store = holmes_comm.LocalStore()

    def rank_body(rank: int) -> Any:
        comm = holmes_comm.init(
            store, rank, len(clusters), transport="tcp", name="test", cluster=clusters[rank], timeout_s=60, **options
        )
        return body(comm)

    return run_threads(len(clusters), rank_body)


@pytest.mark.parametrize("clusters", [list("aabb"), list("abab"), list("aaab"), list("abbcc")])
def test_all_reduce_over_clusters(clusters: list[str]) -> None:
    size = len(clusters)

    def body(comm: Any) -> None:
        for dtype in ("float32", "int64"):
            for op, expected in (("sum", size * (size + 1) / 2), ("max", size), ("min", 1)):
                data = np.full(300_001, comm.rank + 1, dtype=dtype)
                comm.all_reduce(data, op)
                assert (data == expected).all()
        work = comm.all_reduce(data, async_op=True)
        work.wait()
        assert (data == size).all()

    run_clusters(clusters, body, hierarchical_min_bytes=0)


def test_read_only_broadcast_root() -> None:
    def body(comm: Any) -> None:
        data = np.full(1_000_001, comm.rank, dtype="float32")
        data.flags.writeable = comm.rank != 2
        comm.broadcast(data, 2)
        assert (data == 2).all()

    run_clusters(list("aabb"), body, hierarchical_min_bytes=0)


def test_compression_needs_clusters_and_sums_of_float32() -> None:
    compression = holmes_comm.Compression("bf16", error_feedback=True)
    assert (compression.codec, compression.error_feedback) == ("bf16", True)
    with pytest.raises(holmes_comm.UsageError, match="'fp8' does not exist; use one of: bf16, int8"):
        holmes_comm.Compression("fp8")

    def body(comm: Any) -> None:
        with pytest.raises(holmes_comm.UsageError, match="not for sum of float64"):
            comm.all_reduce(np.zeros(10), compression=compression)

    run_clusters(list("aab"), body, hierarchical_min_bytes=0)

    def one_cluster(comm: Any) -> None:
        with pytest.raises(holmes_comm.UsageError, match="spans clusters"):
            comm.all_reduce(np.zeros(10, dtype="float32"), compression=compression)
        comm.barrier()

    run_clusters(list("aa"), one_cluster)


def test_what_a_thread_says_is_of_its_block() -> None:
    """The inner block counts, an error leaves it as it was, and what cannot be compressed goes as ever."""

    def body(comm: Any) -> None:
        exact = 1 + 2**-10  # not a bf16

        def reduced(op: str = "avg", dtype: str = "float32") -> float:
            data = np.full(1000, exact, dtype=dtype)
            comm.all_reduce(data, op)
            return float(data[0])

        with holmes_comm.compressed(holmes_comm.Compression("bf16")):
            assert reduced() == 1
            assert (reduced("max"), reduced(dtype="float64")) == (exact, exact)
            with holmes_comm.compressed(None):
                assert reduced() == exact
            with pytest.raises(ZeroDivisionError), holmes_comm.compressed(None):
                _ = 1 / 0
            assert reduced() == 1
        assert reduced() == exact

    run_clusters(list("aabb"), body, hierarchical_min_bytes=0)


def test_a_group_is_made_in_a_block_of_compression() -> None:
    """It measures from which size on it is hierarchical, with sums of many sizes."""
    kept = [holmes_comm.Compression("int8", error_feedback=True) for _ in range(4)]
    store = holmes_comm.LocalStore()

    def body(rank: int) -> None:
        with holmes_comm.compressed(kept[rank]):
            comm = holmes_comm.init(store, rank, 4, cluster="aabb"[rank], name="in a block")
            comm.barrier()

    run_threads(4, body)


@pytest.mark.parametrize(
    ("codec", "options", "said"),
    [
        ("int2", {}, "compression 'int2' does not exist; use one of: bf16, int8, int4"),
        ("bf16", {"rotation": True}, "bf16 has no scale"),
    ],
)
def test_codecs_that_do_not_exist(codec: str, options: dict[str, bool], said: str) -> None:
    with pytest.raises(holmes_comm.UsageError, match=said):
        holmes_comm.Compression(codec, **options)


@pytest.mark.parametrize("clusters", [list("aabb"), list("aab")])
@pytest.mark.parametrize("count", [0, 1])
def test_error_feedback_of_fewer_values_than_ranks(clusters: list[str], count: int) -> None:
    def body(comm: Any) -> None:
        compression = holmes_comm.Compression("int8", error_feedback=True)
        for _ in range(3):
            data = np.full(count, comm.rank + 1, dtype="float32")
            comm.all_reduce(data, compression=compression)
            assert data == pytest.approx([comm.size * (comm.size + 1) / 2] * count, rel=0.01)
        compression.reset()

    run_clusters(clusters, body, hierarchical_min_bytes=0)


def test_error_feedback_refuses_another_count_on_all_ranks() -> None:
    def body(comm: Any) -> None:
        compression = holmes_comm.Compression("int8", error_feedback=True)
        comm.all_reduce(np.ones(4, dtype="float32"), compression=compression)
        for count in (3, 0):  # one rank's share changes; the others' are empty
            with pytest.raises(holmes_comm.UsageError, match=f"rest of 4 values, and the tensor now has {count}; give"):
                comm.all_reduce(np.ones(count, dtype="float32"), compression=compression, timeout_s=10)
        compression.reset()
        comm.all_reduce(np.ones(3, dtype="float32"), compression=compression)

    run_clusters(list("aaabb"), body, hierarchical_min_bytes=0)


def test_all_ranks_or_none_name_a_cluster() -> None:
    with pytest.raises(holmes_comm.NicError, match=r"rank 1 .* names no cluster, but rank 0 names 'a'"):
        run_clusters(["a", "", "b"], lambda comm: None)


def test_threshold_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLMES_HIERARCHICAL_MIN_BYTES", "many")
    with pytest.raises(holmes_comm.UsageError, match="a whole number of bytes, or never"):
        run_clusters(list("aabb"), lambda comm: None)
    monkeypatch.setenv("HOLMES_HIERARCHICAL_MIN_BYTES", "never")
    run_clusters(list("aabb"), lambda comm: comm.all_reduce(np.zeros(1_000_000)))


@needs_namespaces
def test_only_shares_cross() -> None:
    testbed = pytest.importorskip("holmes.lab.testbed")
    pytest.importorskip("torch")
    worker = WORKERS / "hierarchy_worker.py"
    result = testbed.Testbed("two-clusters").run([sys.executable, str(worker)], timeout_s=100)
    assert result.returncode == 0, result.outputs
    outcomes = [json.loads(line) for lines in result.outputs.values() for line in lines if line.startswith("{")]
    assert len(outcomes) == 4
    for rank, outcome in enumerate(outcomes):
        payload_bytes = outcome["payload_bytes"]
        cluster_nic = "ib0" if rank < 2 else "roce0"
        for title in ("plain", "torch", "bf16"):
            sent = outcome[title]["sent_bytes"]
            assert set(sent) == {cluster_nic, "eth0"}
            # Half of the data inside, each way; across, this rank's half once, or encoded half of that.
            share_bytes = payload_bytes / 4 if title == "bf16" else payload_bytes / 2
            assert sent[cluster_nic] == pytest.approx(payload_bytes, rel=0.02)
            assert sent["eth0"] == pytest.approx(share_bytes, rel=0.02)
        assert outcome["plain"]["error"] == outcome["torch"]["error"] == 0
        assert 0 < outcome["bf16"]["error"] < 1 / 256
        assert "spans the clusters a, b" in outcome["torch"]["reason"]


@needs_namespaces
def test_stages_of_one_cluster_use_its_nics() -> None:
    testbed = pytest.importorskip("holmes.lab.testbed")
    pytest.importorskip("torch")
    worker = WORKERS / "pair_nics_worker.py"
    result = testbed.Testbed("two-clusters").run([sys.executable, str(worker)], timeout_s=100)
    assert result.returncode == 0, result.outputs
    outcomes = [json.loads(line) for lines in result.outputs.values() for line in lines if line.startswith("{")]
    assert sorted(outcome["stage"] for outcome in outcomes) == [0, 1, 2, 3]
    # From stage 0 to 1, 1 to 2, 2 to 3: inside cluster a, across, inside b.
    nic_to_next = ["ib0", "eth0", "roce0"]
    for outcome in outcomes:
        stage = outcome["stage"]
        for title in ("hierarchical", "flat", "torch"):
            sent = outcome[title]
            if stage == 3:
                assert sent == {}
                continue
            assert list(sent) == [str(stage + 1)]
            assert sent[str(stage + 1)] == {nic_to_next[stage]: pytest.approx(outcome["payload_bytes"], rel=0.02)}
        inside = "ib0" if stage < 2 else "roce0"
        expected = [
            [peer, purpose, inside if peer // 2 == stage // 2 else "eth0"]
            for peer in range(4)
            if peer != stage
            for purpose in ("collective", "control", "p2p")
        ]
        assert outcome["connected"] == expected
        assert "spans the clusters" in outcome["reason"]


def test_hierarchical_min_bytes_is_a_size_or_never() -> None:
    def body(comm: Any) -> None:
        data = np.full(100_001, comm.rank + 1, dtype="float32")
        comm.all_reduce(data)
        assert (data == 10).all()

    run_clusters(list("aabb"), body, hierarchical_min_bytes="never")
    for wrong in (-1, 2**64, "always"):
        with pytest.raises(holmes_comm.UsageError, match="must be a number of bytes, 0 or more, or"):
            run_clusters(list("aabb"), body, hierarchical_min_bytes=wrong)
