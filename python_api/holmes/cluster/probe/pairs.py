"""Which pairs of hosts measure when: every host is in at most one pair of a round, and never all pairs are tried."""

from __future__ import annotations

from collections.abc import Collection, Sequence

Round = list[tuple[str, str]]
_EVERY_PAIR = 16  # up to so many hosts, every pair is worth its round


def tournament(members: Sequence[str], most_rounds: int) -> list[Round]:
    """Rounds of disjoint pairs: all pairs (circle method) where they fit, of up to 16 members, else a sample.

    The sample pairs members whose places differ in one bit. Over its log2 rounds that joins everybody with everybody
    else through few steps; near and far ones are compared in turn, as neighbours often share a switch.
    """
    count = len(members)
    if count <= min(_EVERY_PAIR, most_rounds + 1):
        rounds = _circle(members)
    else:
        bits = (count - 1).bit_length()
        order = [bit for low in range((bits + 1) // 2) for bit in dict.fromkeys((low, bits - 1 - low))]
        rounds = [
            [(members[i], members[i | 1 << bit]) for i in range(count) if not i & 1 << bit and i | 1 << bit < count]
            for bit in order
        ]
    # Alternate who connects, so that nobody only does or only waits.
    return [
        [pair if (index + place) % 2 == 0 else pair[::-1] for place, pair in enumerate(pairs)]
        for index, pairs in enumerate(rounds[:most_rounds])
    ]


def pack(wishes: Sequence[Sequence[Collection[tuple[str, str]]]], most_rounds: int) -> list[list[tuple[int, str, str]]]:
    """Rounds of several networks in as few common ones as their hosts allow, at most `most_rounds`.

    `wishes[n]` are the rounds of network n; the result's pairs carry n. The first rounds of all networks come first, so
    that a small limit leaves every network with some, then the rest of the largest one, which has most to show.
    """
    packed: list[list[tuple[int, str, str]]] = []
    busy: list[set[str]] = []
    order = [(0, network) for network, rounds in enumerate(wishes) if rounds]
    sizes = [sum(map(len, rounds)) for rounds in wishes]
    for network in sorted(range(len(wishes)), key=lambda network: -sizes[network]):
        order += [(depth, network) for depth in range(1, len(wishes[network]))]
    for depth, network in order:
        pairs = wishes[network][depth]
        hosts = {host for pair in pairs for host in pair}
        place = next((i for i, others in enumerate(busy) if others.isdisjoint(hosts)), len(packed))
        if place == len(packed):
            if place == most_rounds:
                continue
            packed.append([])
            busy.append(set())
        packed[place] += [(network, one, other) for one, other in pairs]
        busy[place] |= hosts
    return packed


def _circle(members: Sequence[str]) -> list[Round]:
    """Every pair once, in rounds of disjoint pairs: the first stays, the others turn around it."""
    seats: list[str | None] = [*members, *([None] if len(members) % 2 else [])]
    rounds = []
    for _ in range(len(seats) - 1):
        half = len(seats) // 2
        facing = zip(seats[:half], reversed(seats[half:]), strict=True)
        rounds.append([(one, other) for one, other in facing if one is not None and other is not None])
        seats = [seats[0], seats[-1], *seats[1:-1]]
    return rounds
