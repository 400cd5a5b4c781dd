"""What the links of a testbed give, measured with nothing of Holmes on them, beside what its spec says."""

from __future__ import annotations

import json
import math
import random
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holmes.lab.testbed.launch import Testbed, TestbedSession
from holmes.lab.testbed.spec import Link, Nic, Node, Spec, TestbedError

#: How far what is measured may be from the spec: of a round trip the larger of the two, of rate and loss a share.
ROUND_TRIP_SHARE, ROUND_TRIP_MS = 0.05, 1.0
RATE_SHARE = 0.02
LOSS_SHARE = 0.1
#: A loss is judged by chance as well: so many standard deviations of what this many packets tell.
_LOSS_DEVIATIONS = 3.0
# Half of a link, so that its queue loses nothing, and no more than the receiving program can count.
_MOST_LOSS_GBPS = 0.1
_LOSS_RATE_SHARE = 0.5
# Of frames that are late, what is said.
_LATE_SHARE = 0.01
# Of round trips, to know their median where packets overtake others.
_DRAWS = 20_001
_PROBE = Path(__file__).with_name("probe.py")
_LISTEN_S = 20.0
_SPARE_S = 60.0
# Round trips that a probe waits for, one after the other, where each of its first pings is lost.
_MOST_WAITS = 25


@dataclass(frozen=True)
class PathLink:
    """What a packet's way from one NIC to another is like, in one direction; None: no rate limits it.

    `delays`: of each link of the way, how long, by how much that differs, and the share of packets that do not wait.
    """

    delay_ms: float
    gbps: float | None
    loss_percent: float
    queue_s: float
    delays: tuple[tuple[float, float, float], ...] = ()


@dataclass(frozen=True)
class Quantity:
    """One quantity of a path. None: the spec limits nothing, or nothing could be measured."""

    expected: float | None
    measured: float | None
    is_right: bool


@dataclass(frozen=True)
class CheckedPath:
    """One direction between two NICs; `packets`: from how many the loss is known.

    `dropped_by_receiver` of them came, but the program that counts was too slow for them. `late_share` of the frames
    left more than a millisecond late, and `overflowed` packets were lost, because `holmes-line` was too slow.
    """

    sender: str
    receiver: str
    network: str
    round_trip_ms: Quantity
    gbps: Quantity
    loss_percent: Quantity
    packets: int
    dropped_by_receiver: int
    late_share: float = 0.0
    overflowed: int = 0

    @property
    def is_right(self) -> bool:
        """Whether all of it is as the spec says."""
        return all(quantity.is_right for quantity in (self.round_trip_ms, self.gbps, self.loss_percent))


def paths(spec: Spec) -> list[tuple[Node, Nic, Node, Nic]]:
    """From every NIC with an address to the next one of its network on another node, the last one's to the first."""
    found = []
    for network in spec.networks:
        ends = [(node, nic) for node in spec.nodes for nic in node.nics if nic.network == network and nic.has_ip]
        for index, (node, nic) in enumerate(ends):
            others = ends[index + 1 :] + ends[:index]
            found += [(node, nic, *end) for end in [end for end in others if end[0] is not node][:1]]
    return found


def path_link(spec: Spec, node: Node, nic: Nic, other: Node, other_nic: Nic) -> PathLink:
    """What the spec says of the way from one NIC to another."""
    links: list[Link] = [nic]
    uplink = spec.networks[nic.network].uplink
    received = [other_nic.receives_gbps]
    if uplink is not None and node.cluster != other.cluster:
        links.append(uplink)
        received.append(uplink.receives_gbps)
    rates = [rate for rate in [*(link.rate_gbps for link in links), *received] if rate is not None]
    gbps = min(rates, default=None)
    arriving = math.prod(1 - link.loss_percent / 100 for link in links)
    return PathLink(
        delay_ms=sum(link.delay_ms for link in links),
        gbps=None if gbps is None else gbps * arriving,
        loss_percent=100 * (1 - arriving),
        queue_s=max(_queue_s(link, gbps) for link in [*links, other_nic]),
        delays=tuple((link.delay_ms, link.jitter_ms, link.reorder_percent / 100) for link in links),
    )


def median_round_trip_ms(there: PathLink, back: PathLink) -> float:
    """What the spec says of most round trips: where packets overtake others, less than all delays together."""
    delays = [*there.delays, *back.delays]
    if not any(share for _, _, share in delays):
        return there.delay_ms + back.delay_ms
    draws = random.Random(0)

    def drawn_ms(delay_ms: float, jitter_ms: float, share: float) -> float:
        return 0.0 if draws.random() < share else delay_ms + draws.uniform(-jitter_ms, jitter_ms)

    return statistics.median(sum(drawn_ms(*delay) for delay in delays) for _ in range(_DRAWS))


def _queue_s(link: Link, gbps: float | None) -> float:
    if link.queue_bytes is None or gbps is None:
        return link.queue_ms / 1000
    return link.queue_bytes * 8 / (gbps * 1e9)


def check_testbed(
    spec: Spec, seconds: float, on_path: Callable[[CheckedPath], None] | None = None
) -> list[CheckedPath]:
    """Builds the testbed and measures one path after the other: rate and loss for `seconds` each.

    `on_path` is called with each. Raises TestbedError where the testbed cannot be built or a probe fails.
    """
    found = []
    with Testbed(spec).session() as session:
        for ends in paths(spec):
            found.append(_check(session, seconds, *ends))
            if on_path is not None:
                on_path(found[-1])
    return found


def _check(session: TestbedSession, seconds: float, node: Node, nic: Nic, other: Node, other_nic: Nic) -> CheckedPath:
    there = path_link(session.spec, node, nic, other, other_nic)
    back = path_link(session.spec, other, other_nic, node, nic)
    longest_ms = sum(delay_ms + jitter_ms for delay_ms, jitter_ms, _ in (*there.delays, *back.delays))
    settings = {
        "round_trip_ms": there.delay_ms + back.delay_ms,
        "gbps": there.gbps,
        "queue_s": there.queue_s,
        "mtu": min(nic.mtu, other_nic.mtu),
        "seconds": seconds,
        "loss_bits_per_s": 1e9 * min(_MOST_LOSS_GBPS, _LOSS_RATE_SHARE * (there.gbps or math.inf)),
    }
    address = str(other_nic.address.ip)
    probe = [sys.executable, "-IS", str(_PROBE)]
    receiver = session.spawn(other.name, [*probe, "receive", address])
    receiver.wait_for_line("listening", _LISTEN_S)
    timeout_s = 2 * seconds + _SPARE_S + _MOST_WAITS * longest_ms / 1000
    before = session.line_counters()
    measured = json.loads(session.exec(node.name, [*probe, "send", address, json.dumps(settings)], timeout_s=timeout_s))
    if why := measured.get("unreachable"):
        raise TestbedError(
            f"{node.name}.{nic.name} to {other.name}.{other_nic.name}: no connection, so nothing can be measured: "
            f"{why}; with this delay and loss it may take longer than the system waits, make them smaller"
        )
    receiver.kill()
    receiver.wait(_LISTEN_S)
    late_share, overflowed = slowness(before, session.line_counters())
    return CheckedPath(
        sender=f"{node.name}.{nic.name}",
        receiver=f"{other.name}.{other_nic.name}",
        network=nic.network,
        round_trip_ms=round_trip(median_round_trip_ms(there, back), measured["round_trip_ms"]),
        gbps=rate(there.gbps, measured["gbps"]),
        loss_percent=loss(there.loss_percent, measured["loss_percent"], measured["packets"]),
        packets=measured["packets"],
        dropped_by_receiver=measured["dropped_by_receiver"],
        late_share=late_share,
        overflowed=overflowed,
    )


def slowness(before: list[dict[str, Any]], after: list[dict[str, Any]]) -> tuple[float, int]:
    """The share of frames that `holmes-line` sent late between two looks, and the packets for which it had no room."""

    def grown(key: str) -> int:
        return sum(int(lane[key]) for lane in after) - sum(int(lane[key]) for lane in before)

    return grown("late_frames") / max(grown("frames"), 1), grown("overflowed")


def too_slow(late_share: float, overflowed: int) -> str | None:
    """What is said where what was measured may be about `holmes-line`; None: it kept up."""
    if late_share <= _LATE_SHARE and not overflowed:
        return None
    late = f"{100 * late_share:.0f} % of the frames left over a millisecond late"
    return f"holmes-line was too slow: {late}, and {overflowed} packets found no room; measure on a quieter machine"


def round_trip(expected_ms: float, measured_ms: float | None) -> Quantity:
    """Judges a median round trip; None: no answer came."""
    bound_ms = max(ROUND_TRIP_MS, ROUND_TRIP_SHARE * expected_ms)
    return Quantity(expected_ms, measured_ms, measured_ms is not None and abs(measured_ms - expected_ms) <= bound_ms)


def rate(expected_gbps: float | None, measured_gbps: float | None) -> Quantity:
    """Judges a rate."""
    if expected_gbps is None or measured_gbps is None:
        return Quantity(expected_gbps, measured_gbps, expected_gbps is None)
    is_right = abs(measured_gbps - expected_gbps) <= RATE_SHARE * expected_gbps
    return Quantity(expected_gbps, measured_gbps, is_right)


def loss(expected_percent: float, measured_percent: float, packets: int) -> Quantity:
    """Judges a loss: where it is outside, this is not by chance."""
    share = expected_percent / 100
    chance = 100 * _LOSS_DEVIATIONS * math.sqrt(share * (1 - share) / packets)
    bound = max(LOSS_SHARE * expected_percent, chance)
    return Quantity(expected_percent, measured_percent, abs(measured_percent - expected_percent) <= bound)


def complaints(path: CheckedPath) -> Iterator[str]:
    """A sentence for each quantity that is not as the spec says."""
    where = f"{path.sender} to {path.receiver}"
    for name, unit, quantity, bound in (
        ("round trip", "ms", path.round_trip_ms, f"within {100 * ROUND_TRIP_SHARE:g} % or {ROUND_TRIP_MS:g} ms"),
        ("rate", "Gbit/s", path.gbps, f"within {100 * RATE_SHARE:g} %"),
        ("loss", "%", path.loss_percent, f"within {100 * LOSS_SHARE:g} % of that, and chance"),
    ):
        if quantity.is_right:
            continue
        measured = "nothing came" if quantity.measured is None else f"{quantity.measured:.4g} {unit}"
        yield f"{where}: {name} {measured}, but the spec says {quantity.expected:.4g} {unit} ({bound})"
    if slow := too_slow(path.late_share, path.overflowed):
        yield f"{where}: {slow}"
    if path.dropped_by_receiver:
        yield (
            f"{where}: the program that counts was too slow for {path.dropped_by_receiver} packets, which look lost; "
            "measure on a quieter machine"
        )
