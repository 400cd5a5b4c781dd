"""What `holmes testbed check` measures, what it expects there, and how it judges."""

from __future__ import annotations

from dataclasses import replace

import pytest

from holmes.lab.testbed import load_spec
from holmes.lab.testbed.check import (
    CheckedPath,
    complaints,
    loss,
    median_round_trip_ms,
    path_link,
    paths,
    rate,
    round_trip,
    slowness,
    too_slow,
)
from holmes.lab.testbed.spec import Spec, parse_spec


def _far() -> Spec:
    uplink = {"rate_gbps": 0.5, "receive_gbps": 0.25, "delay_ms": 20, "loss_percent": 1}
    nics = [{"name": "eth0", "network": "eth"}]
    return parse_spec(
        "far",
        {
            "networks": {"eth": {"class": "ethernet", "rate_gbps": 1, "delay_ms": 5, "uplink": uplink}},
            "clusters": {
                "a": {"nodes": {"a0": {}, "a1": {"eth0": {"receive_gbps": 0.1, "delay_ms": 0}}}, "nics": nics},
                "b": {"nodes": 1, "nics": nics},
            },
        },
    )


def test_every_nic_sends_to_the_next_of_its_network() -> None:
    names = [(node.name, nic.name, other.name) for node, nic, other, _ in paths(load_spec("two-clusters"))]
    assert names == [
        ("a0", "ib0", "a1"),
        ("a1", "ib0", "a0"),
        ("b0", "roce0", "b1"),
        ("b1", "roce0", "b0"),
        ("a0", "eth0", "a1"),
        ("a1", "eth0", "b0"),
        ("b0", "eth0", "b1"),
        ("b1", "eth0", "a0"),
    ]
    assert paths(load_spec("one-node")) == []


def test_a_path_adds_up_the_links_of_its_direction() -> None:
    spec = _far()
    expected = {
        (sender.name, receiver.name): path_link(spec, sender, nic, receiver, receiver_nic)
        for sender, nic, receiver, receiver_nic in paths(spec)
    }
    inside, across, back = expected["a0", "a1"], expected["a1", "b0"], expected["b0", "a0"]
    assert (inside.delay_ms, inside.gbps, inside.loss_percent) == (5, 0.1, 0)
    assert (across.delay_ms, across.gbps, across.loss_percent) == (20, 0.2475, pytest.approx(1))
    assert back.delay_ms == 25


@pytest.mark.parametrize(
    ("reorder_percent", "jitter_ms", "expected_ms"),
    [
        (0, 5, 40),
        (1, 5, 40),  # a few overtake: nothing to see
        (20, 0, 40),
        (20, 5, 37),  # of those round trips that wait both ways, the shorter ones are in the middle of all
        (40, 0, 20),  # most wait one way only
        (90, 5, 0),
    ],
)
def test_a_median_round_trip_knows_of_packets_that_do_not_wait(
    reorder_percent: float, jitter_ms: float, expected_ms: float
) -> None:
    data = {
        "networks": {"eth": {"class": "ethernet", "delay_ms": 20, "reorder_percent": reorder_percent}},
        "clusters": {"a": {"nodes": 2, "nics": [{"name": "eth0", "network": "eth"}]}},
    }
    data["networks"]["eth"]["jitter_ms"] = jitter_ms
    spec = parse_spec("early", data)
    there, back = (path_link(spec, *ends) for ends in paths(spec))
    assert median_round_trip_ms(there, back) == pytest.approx(expected_ms, abs=0.5)


def test_a_round_trip_may_be_off_by_a_twentieth_or_a_millisecond() -> None:
    assert round_trip(40, 41.9).is_right
    assert round_trip(40, 38.1).is_right
    assert not round_trip(40, 42.1).is_right
    assert round_trip(0, 0.9).is_right
    assert not round_trip(0, 1.1).is_right
    assert not round_trip(40, None).is_right


def test_a_rate_may_be_off_by_a_fiftieth() -> None:
    assert rate(1, 0.981).is_right
    assert rate(1, 1.019).is_right
    assert not rate(1, 0.979).is_right
    assert not rate(1, 1.021).is_right
    assert rate(None, None).is_right
    assert not rate(1, None).is_right


def test_a_loss_is_judged_by_what_so_many_packets_can_tell() -> None:
    assert loss(1, 1.09, 10_000_000).is_right
    assert not loss(1, 1.11, 10_000_000).is_right
    assert loss(1, 1.2, 10_000).is_right  # three deviations are 0.3
    assert not loss(1, 1.4, 10_000).is_right
    assert loss(0, 0, 1000).is_right
    assert not loss(0, 0.1, 1000).is_right


def test_the_emulators_slowness_is_what_came_between_two_looks() -> None:
    before = [{"frames": 100, "late_frames": 50, "overflowed": 2}, {"frames": 0, "late_frames": 0, "overflowed": 0}]
    after = [{"frames": 200, "late_frames": 60, "overflowed": 2}, {"frames": 100, "late_frames": 0, "overflowed": 3}]
    assert slowness(before, after) == (0.05, 3)
    assert slowness([], []) == (0, 0)
    assert too_slow(0.005, 0) is None
    assert too_slow(0, 1) is not None


def test_what_is_not_right_is_said_with_the_rule() -> None:
    path = CheckedPath("a0.eth0", "a1.eth0", "eth", round_trip(40, 50), rate(1, 0.5), loss(0, 1, 100), 100, 3)
    assert not path.is_right
    said = list(complaints(path))
    assert said[0] == "a0.eth0 to a1.eth0: round trip 50 ms, but the spec says 40 ms (within 5 % or 1 ms)"
    assert said[1] == "a0.eth0 to a1.eth0: rate 0.5 Gbit/s, but the spec says 1 Gbit/s (within 2 %)"
    assert said[2] == "a0.eth0 to a1.eth0: loss 1 %, but the spec says 0 % (within 10 % of that, and chance)"
    assert "too slow for 3 packets" in said[3]
    slow = replace(path, dropped_by_receiver=0, late_share=0.25, overflowed=7)
    assert (
        "holmes-line was too slow: 25 % of the frames left over a millisecond late, and 7" in list(complaints(slow))[3]
    )
    silent = CheckedPath("a0.eth0", "a1.eth0", "eth", round_trip(40, None), rate(None, None), loss(0, 0, 100), 100, 0)
    assert list(complaints(silent)) == [
        "a0.eth0 to a1.eth0: round trip nothing came, but the spec says 40 ms (within 5 % or 1 ms)"
    ]
