"""CommunicatorOptions: the engine's options in Python, and the ways in which they are given."""

import copy
import pickle

import numpy as np
import pytest
from ranks import run_threads

import holmes_comm
from holmes_comm import CommunicatorOptions, GroupOptions, UsageError


def test_defaults_are_those_of_init():
    options = CommunicatorOptions()
    assert (options.timeout_s, options.connect_timeout_s) == (1800.0, 60.0)
    assert (options.transport, options.tls, options.hierarchical_min_bytes) == ("auto", None, None)
    assert (options.nics, options.clusters, options.cluster_nics) == ([], [], [])


def test_fields_by_name_and_as_attributes():
    options = CommunicatorOptions(rank=1, size=2, nics=[("lo", "127.0.0.1")], timeout_s=2.5, tls="all")
    assert options.nics == [("lo", "127.0.0.1")]
    options.hierarchical_min_bytes = "never"
    assert options.hierarchical_min_bytes == "never"
    options.hierarchical_min_bytes = 4096
    assert (options.hierarchical_min_bytes, options.timeout_s, options.tls) == (4096, 2.5, "all")


def test_copies_are_equal_and_independent():
    options = CommunicatorOptions(name="x", secret="hidden", hierarchical_min_bytes="never", transport="shm")
    assert pickle.loads(pickle.dumps(options)) == options
    other = copy.copy(options)
    assert other == options
    other.rank = 1
    assert other != options
    assert "hidden" not in repr(options)
    assert GroupOptions(options=copy.copy(options)) == GroupOptions(options=options)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"transport": "udp"}, "transport 'udp' does not exist; use one of: auto, tcp, shm"),
        ({"tls": "some"}, "tls 'some' does not exist"),
        ({"timeout_s": 0.0}, "timeout_s is 0.0"),
        ({"hierarchical_min_bytes": -1}, "hierarchical_min_bytes=-1 is not possible"),
    ],
)
def test_impossible_values(wrong, message):
    with pytest.raises(UsageError, match=message):
        CommunicatorOptions(**wrong)


def sum_with(options):
    store = holmes_comm.LocalStore()

    def body(rank):
        comm = holmes_comm.init(store, rank, 2, name="spin", options=options)
        data = np.ones(3)
        comm.all_reduce(data)
        return data.tolist()

    return run_threads(2, body, timeout_s=60)


@pytest.mark.parametrize("spin_us", [0, 500])
def test_the_spin_is_an_option(spin_us):
    assert sum_with(CommunicatorOptions(spin_us=spin_us)) == [[2, 2, 2], [2, 2, 2]]


def test_integrity_is_an_option():
    assert sum_with(CommunicatorOptions(integrity=True)) == [[2, 2, 2], [2, 2, 2]]


def test_comparing_results_is_an_option():
    assert sum_with(CommunicatorOptions(integrity_digest_every=1)) == [[2, 2, 2], [2, 2, 2]]
    with pytest.raises(UsageError, match="integrity_digest_every=-1 is not possible"):
        sum_with(CommunicatorOptions(integrity_digest_every=-1))


def test_a_negative_spin_is_refused():
    with pytest.raises(UsageError, match="spin_us=-1 is not possible"):
        sum_with(CommunicatorOptions(spin_us=-1))


@pytest.mark.parametrize(
    ("priority", "turn", "dscp"), [(0, None, None), (3, None, 0), (None, None, 63), (3, 0, None), (1, 15, None)]
)
def test_priority_turn_and_code_point_are_options(priority, turn, dscp):
    store = holmes_comm.LocalStore()

    def body(rank):
        options = {"priority": priority, "turn": turn, "dscp": dscp}
        comm = holmes_comm.init(store, rank, 2, name="p", transport="tcp", **options)
        data = np.ones(300_000)
        comm.all_reduce(data)
        return bool((data == 2).all())

    assert run_threads(2, body, timeout_s=60) == [True, True]


@pytest.mark.parametrize(("name", "wrong", "most"), [("priority", 4, 3), ("priority", -1, 3), ("dscp", 64, 63)])
def test_impossible_priorities_and_code_points(name, wrong, most):
    store = holmes_comm.LocalStore()

    def body(rank):
        with pytest.raises(UsageError, match=f"{name}={wrong} is not possible; it must be from 0 to {most}"):
            holmes_comm.init(store, rank, 2, name="p", **{name: wrong})

    run_threads(2, body, timeout_s=60)


@pytest.mark.parametrize(
    ("name", "values", "told"),
    [
        ("priority", (3, 1), r"have priority=3 and priority=1; give every rank the same priority, or none"),
        ("priority", (None, 0), r"have no priority and priority=0; give every rank the same priority, or none"),
        ("turn", (0, 1), r"have turn=0 and turn=1; give every rank the same turn, or none"),
        ("turn", (None, 15), r"have no turn and turn=15; give every rank the same turn, or none"),
        ("dscp", (46, None), r"have dscp=46 and no dscp; give every rank the same dscp, or none"),
    ],
)
def test_ranks_that_differ_in_priority_or_code_point_are_told(name, values, told):
    store = holmes_comm.LocalStore()

    def body(rank):
        priority = {"priority": 3} if name == "turn" else {}
        with pytest.raises(UsageError, match=rf"rank 0 \(host .*\) and rank 1 \(host .*\) {told}"):
            holmes_comm.init(store, rank, 2, name="p", **priority, **{name: values[rank]})

    run_threads(2, body, timeout_s=60)


def test_names_of_clusters_are_the_ranks_own():
    with pytest.raises(UsageError, match=r"cluster_names=.* is chosen; give cluster="):
        sum_with(CommunicatorOptions(cluster_names=["a"]))


def test_labels_are_of_all_ranks():
    with pytest.raises(UsageError, match="labels names 1 ranks, but there are 2; give one for each rank, or none"):
        sum_with(CommunicatorOptions(labels=[5]))


def test_a_congestion_control_that_cannot_be_had_is_told(monkeypatch):
    monkeypatch.setenv("HOLMES_TCP_CONGESTION", "nosuch")
    with pytest.raises(UsageError, match=r"rank \d .*HOLMES_TCP_CONGESTION='nosuch' cannot be used here: it must be"):
        sum_with(CommunicatorOptions(transport="tcp"))


def test_unknown_field():
    with pytest.raises(TypeError, match="no field 'colour'"):
        CommunicatorOptions(colour="red")


def test_a_value_of_another_type():
    with pytest.raises(TypeError, match=r"CommunicatorOptions: clusters=\['a'\] is of another type than it can be"):
        CommunicatorOptions(clusters=["a"])
    with pytest.raises(TypeError, match="CommunicatorOptions: secret=<class 'list'> is of another type"):
        CommunicatorOptions(secret=["hidden"])


def test_init_takes_them_and_its_own_arguments_count():
    options = CommunicatorOptions(rank=7, job_rank=3, timeout_s=1.0)

    store = holmes_comm.LocalStore()

    def body(rank):
        comm = holmes_comm.init(store, rank, 2, name="options", options=options)
        data = np.ones(3)
        comm.all_reduce(data)
        assert (comm.rank, data.tolist()) == (rank, [2, 2, 2])

    run_threads(2, body, timeout_s=60)
    assert options == CommunicatorOptions(rank=7, job_rank=3, timeout_s=1.0)


def with_options(body, options, size=2, **arguments):
    store = holmes_comm.LocalStore()

    def made(rank):
        return body(holmes_comm.init(store, rank, size, name="given", options=options, **arguments))

    return run_threads(size, made, timeout_s=60)


def paths_of(comm):
    return {(connection["transport"], connection["encryption"] != "") for connection in comm.connections()}


@pytest.mark.parametrize(
    ("given", "arguments", "expected"),
    [
        ({"tls": "all"}, {"transport": "tcp"}, {("tcp", True)}),
        ({"tls": "all", "transport": "tcp"}, {"tls": "off"}, {("tcp", False)}),
        ({"transport": "tcp"}, {}, {("tcp", False)}),
        ({"transport": "shm"}, {"transport": "tcp"}, {("tcp", False)}),
    ],
)
def test_what_init_is_not_given_the_options_say(given, arguments, expected):
    found = with_options(paths_of, CommunicatorOptions(**given), **arguments)
    assert found == [expected, expected]


def test_deadlines_of_the_options_count():
    def body(comm):
        with pytest.raises(holmes_comm.TimeoutError, match="the deadline passed"):
            comm.recv(np.ones(3), 1 - comm.rank)

    with_options(body, CommunicatorOptions(timeout_s=0.3))
    store = holmes_comm.LocalStore()
    with pytest.raises(holmes_comm.TimeoutError):
        holmes_comm.init(store, 0, 2, name="alone", options=CommunicatorOptions(connect_timeout_s=0.3))


def test_ranks_whose_options_have_different_secrets_are_told():
    store = holmes_comm.LocalStore()

    def body(rank):
        options = CommunicatorOptions(secret=f"{rank}0123456789abcdef", connect_timeout_s=5)
        with pytest.raises(holmes_comm.ProtocolError):
            holmes_comm.init(store, rank, 2, name="s", options=options)

    run_threads(2, body, timeout_s=60)


@pytest.mark.parametrize(
    ("field", "value", "argument"),
    [
        ("nics", [("lo", "127.0.0.1")], "nics"),
        ("rdma_ports", ["mlx5_0:1"], "nics"),
        ("clusters", [0, 1], "cluster"),
        ("cluster_nics", [("lo", "127.0.0.1")], "cluster_nics"),
    ],
)
def test_what_init_chooses_is_not_taken_from_options(field, value, argument):
    with pytest.raises(
        UsageError, match=rf"options\.{field}=.* says nothing here, where it is chosen; give {argument}="
    ):
        holmes_comm.init(holmes_comm.LocalStore(), 0, 1, options=CommunicatorOptions(**{field: value}))


@pytest.mark.parametrize("name", ["", 5, b"dp"])
def test_a_name_that_names_nothing(name):
    with pytest.raises(UsageError, match=r"name=.* names nothing in errors; give text of one character or more"):
        holmes_comm.init(holmes_comm.LocalStore(), 0, 1, name=name)


@pytest.mark.parametrize(
    "given",
    [
        {"device": 0},
        {"nccl_variables": {"NCCL_IB_TC": "106"}},
        {"nccl_host_id": "other"},
        {"nccl": holmes_comm.NcclSettings(max_ctas=1)},
    ],
)
def test_what_only_nccl_has_is_refused_for_host_memory(given):
    with pytest.raises(UsageError, match=rf"{next(iter(given))}=.* is for backend='nccl'; give that, or leave it out"):
        holmes_comm.init(holmes_comm.LocalStore(), 0, 1, **given)


@pytest.mark.parametrize("as_option", [False, True])
@pytest.mark.parametrize("given", [{"transport": "tcp"}, {"priority": 3}, {"dscp": 10}])
def test_what_only_host_memory_has_is_refused_for_nccl(given, as_option):
    arguments = {"options": CommunicatorOptions(**given)} if as_option else given
    with pytest.raises(UsageError, match=rf"{next(iter(given))}=.* is for host memory, not for backend='nccl'"):
        holmes_comm.init(holmes_comm.LocalStore(), 0, 1, backend="nccl", **arguments)


@pytest.mark.parametrize("arguments", [{"tls": "all"}, {"options": CommunicatorOptions(tls="all")}])
def test_nccl_does_not_run_in_the_clear_where_all_is_to_be_encrypted(arguments):
    with pytest.raises(UsageError, match="NCCL's connections cannot be encrypted, and tls is 'all'"):
        holmes_comm.init(holmes_comm.LocalStore(), 0, 1, backend="nccl", **arguments)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"nics": "lo"}, "nics='lo' is no NicSelection"),
        ({"cluster_nics": "lo"}, "cluster_nics='lo' is no NicSelection"),
        ({"cluster": 3}, "cluster=3 is no name of a cluster"),
        ({"tls": "ALL"}, "tls 'ALL' does not exist"),
        ({"dscp": "x"}, "dscp='x' is of another type"),
        ({"dscp": 64}, "dscp=64 is not possible; it must be from 0 to 63"),
        ({"priority": -1}, "priority=-1 is not possible; it must be from 0 to 3"),
        ({"priority": 3, "turn": 16}, "turn=16 is not possible; it must be from 0 to 15"),
        ({"turn": 0}, "turn=0 is the place among groups of one priority, but there is no priority; give priority="),
        ({"priority": 3, "turn": "first"}, "turn='first' is of another type"),
        ({"options": CommunicatorOptions(priority=2), "priority": 9}, "priority=9 is not possible"),
        ({"nccl_variables": "NCCL_IB_TC=106"}, "nccl_variables='NCCL_IB_TC=106' is no dict"),
        ({"nccl": {}}, "nccl={} is no NcclSettings"),
        ({"options": {}}, "options={} is no CommunicatorOptions"),
        ({"options": CommunicatorOptions(clusters=[0, 1])}, r"options\.clusters=\[0, 1\] says nothing here"),
    ],
)
def test_a_value_that_group_options_cannot_have(given, told):
    with pytest.raises(UsageError, match=told):
        GroupOptions(**given)


def test_they_are_one_class():
    assert holmes_comm.CommunicatorOptions is CommunicatorOptions
