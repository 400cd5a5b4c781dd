"""One rank of the benchmark: connects the peers, walks operations and sizes, reports on rank 0."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import json
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from holmes import files
from holmes.tools.bench import tables
from holmes.tools.bench.control import Control
from holmes.tools.bench.harness import measure
from holmes.tools.bench.measurement import Measurement
from holmes.tools.bench.operations import DTYPES, OPERATIONS, Case
from holmes.tools.bench.peer import AnyPeer, Context, PeerError
from holmes.tools.bench.settings import STDOUT, Output, Settings
from holmes.words import count
from holmes_comm.errors import HolmesError
from holmes_comm.launch import recognize, set_environment

_MEET_S = 60.0
_SAY_S = datetime.timedelta(seconds=1)


def own_rank() -> tuple[int, int] | None:
    """Returns this process's rank and the number of ranks, as the launcher or `launch` set them; else None."""
    found = recognize()
    return None if found is None else (found.rank, found.size)


def make_peers(settings: Settings) -> list[AnyPeer]:
    """Returns the peers that the settings ask for, Holmes first."""
    peers: list[AnyPeer] = []
    if settings.holmes:
        for nics in settings.nics or (None,):
            peers.append(_holmes(settings, nics))
    for name in settings.peers:
        if name == "gloo":
            from holmes.tools.bench.peer_torch import TorchPeer

            peers.append(TorchPeer("gloo"))
        elif name == "perftest":
            from holmes.tools.bench.peer_perftest import PerftestPeer

            peers += [PerftestPeer(nics) for nics in settings.nics or (None,)]
        else:
            from holmes.tools.bench.peer_mpi import MpiPeer

            peers.append(MpiPeer(name))
    return peers


def _holmes(settings: Settings, nics: str | None) -> AnyPeer:
    if settings.through == "api":
        from holmes.tools.bench.peer_holmes import HolmesPeer

        return HolmesPeer(settings.transport, nics)
    import holmes_comm
    from holmes.tools.bench.peer_torch import TorchPeer

    selection = holmes_comm.NicSelection.parse(nics or "", settings.transport)
    return TorchPeer("holmes", f"holmes[{nics}]" if nics else "holmes", selection)


def open_store(settings: Settings, rank: int, ranks: int) -> Any:
    """Returns the store all ranks share, where the launcher says."""
    launch = set_environment()  # as torch's rendezvous wants it
    assert launch is not None, "only a process that a launcher started is a rank"
    if settings.needs_torch or launch.launcher == "torchrun":  # which serves torch's own
        import torch.distributed as dist

        store, _, _ = next(dist.rendezvous("env://", rank, ranks))
        return store
    return launch.open_store(_MEET_S)


def run_rank(settings: Settings, output: Output) -> bool:
    """Collective. Runs this process's rank, see `own_rank`; returns whether every result was right.

    A peer that cannot be used is said on stderr, and so is what ends a communicator (another rank's Ctrl-C, say).
    """
    place = own_rank()
    assert place is not None, "only a process that a launcher started is a rank"
    store = None
    try:
        store = open_store(settings, *place)
        return _run_rank(store, *place, settings, output)
    except (PeerError, HolmesError) as error:
        _say_failure(store, *place, str(error))
        return False


def _say_failure(store: Any, rank: int, ranks: int, sentence: str) -> None:
    """On stderr, once for all ranks whose sentence is rank 0's, as that of an input which none of them can use is."""
    if rank == 0 or _failures(store, [0]) != [sentence]:
        print(f"holmes bench: rank {rank}: {sentence}", file=sys.stderr, flush=True)
    with contextlib.suppress(Exception):  # of a store that is gone
        store.set(f"bench/failed/{rank}", sentence)
    if rank == 0:
        _failures(store, range(1, ranks))  # which ask this process, where it serves the store


def _failures(store: Any, ranks: Iterable[int]) -> list[str]:
    """The sentences of these ranks; none where one of them has none within a second, or nobody serves the store."""
    keys = [f"bench/failed/{rank}" for rank in ranks]
    try:
        store.wait(keys, _SAY_S)
        return [store.get(key).decode() for key in keys]
    except Exception:  # each store raises its own
        return []


def _run_rank(store: Any, rank: int, ranks: int, settings: Settings, output: Output) -> bool:
    control = Control(store, rank, ranks)
    peers = make_peers(settings)
    for peer in peers:
        peer.setup(Context(rank, ranks, store, settings.timeout_s))
    facts = {peer.name: peer.describe() for peer in peers}
    measurements: list[Measurement] = []

    def save() -> dict[str, Any]:
        document = tables.document(output.command, dataclasses.asdict(settings), ranks, facts, measurements)
        if output.json_path not in (None, STDOUT):
            files.replace(output.json_path, json.dumps(document, indent=1) + "\n")
        return document

    references = [peer.name for peer in peers if not peer.name.startswith("holmes")]
    table = tables.Table({peer.name: peer.path for peer in peers}, references, output.width)
    say = _say if rank == 0 and output.json_path != STDOUT else _say_nothing
    try:
        good = _measure(rank, ranks, settings, peers, references, control, measurements, table, say, save)
    finally:  # also where Ctrl-C ends it
        if rank == 0:
            _finish(save(), output)
    for peer in peers:
        peer.teardown()
    control.leave()
    return good


def _say(line: str) -> None:
    print(line, flush=True)


def _say_nothing(line: str) -> None:
    pass


def _finish(document: dict[str, Any], output: Output) -> None:
    if output.json_path == STDOUT:
        _say(json.dumps(document, indent=1))
    if output.plot_path is not None and any(row["size_bytes"] for row in document["rows"]):
        tables.draw(Path(output.plot_path), document)


def _measure(
    rank: int,
    ranks: int,
    settings: Settings,
    peers: list[AnyPeer],
    references: list[str],
    control: Control,
    measurements: list[Measurement],
    table: tables.Table,
    say: Callable[[str], None],
    save: Callable[[], object],
) -> bool:
    """Collective. Appends what is measured; on rank 0 tells it to `say` and calls `save`. Whether all was right."""
    for name in settings.operations:
        operation = OPERATIONS[name]
        if ranks < operation.least_ranks:
            continue
        any_size = Case(operation, 0, DTYPES[settings.dtype], settings.op, rank, ranks)
        say(table.header(any_size))
        for peer in peers:
            if reason := peer.unsupported(any_size):
                say(f"# {peer.name}: skipped, {reason}")
        for size_bytes in settings.sizes_bytes() if operation.has_data else [0]:
            case = Case(operation, size_bytes, DTYPES[settings.dtype], settings.op, rank, ranks)
            for peer in peers:
                if peer.unsupported(any_size) is None and (reason := peer.unsupported(case)):
                    say(f"# {peer.name}: {case.size_bytes} B skipped, {reason}")
            done = measure(case, peers, control, settings, references)
            measurements += done
            if rank == 0:
                save()
            for measurement in done:
                say(table.line(measurement))
    wrong = sum(measurement.wrong_elements or 0 for measurement in measurements)
    good = bool(measurements) and wrong == 0
    for footnote in table.footnotes():
        say(footnote)
    say(f"# {count(len(measurements), 'measurement')}, {count(wrong, 'wrong element')}: {'OK' if good else 'FAILED'}")
    return good
