"""One rank of the benchmark: connects the peers, walks operations and sizes, reports on rank 0."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from holmes.tools.bench import tables
from holmes.tools.bench.control import Control
from holmes.tools.bench.harness import measure
from holmes.tools.bench.measurement import Measurement
from holmes.tools.bench.operations import DTYPES, OPERATIONS, Case
from holmes.tools.bench.peer import Context, Peer, PeerError
from holmes.tools.bench.settings import Output, Settings
from holmes_comm.errors import HolmesError


def own_rank() -> tuple[int, int] | None:
    """Returns this process's rank and the number of ranks, as torchrun, the testbed or mpirun set them; else None."""
    for rank, ranks in [("RANK", "WORLD_SIZE"), ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")]:
        if rank in os.environ and ranks in os.environ:
            return int(os.environ[rank]), int(os.environ[ranks])
    return None


def make_peers(settings: Settings) -> list[Peer]:
    """Returns the peers that the settings ask for, Holmes first."""
    peers: list[Peer] = []
    if settings.holmes:
        for nics in settings.nics or (None,):
            peers.append(_holmes(settings, nics))
    for name in settings.peers:
        if name == "gloo":
            from holmes.tools.bench.peer_torch import TorchPeer

            peers.append(TorchPeer("gloo"))
        else:
            from holmes.tools.bench.peer_mpi import MpiPeer

            peers.append(MpiPeer(name))
    return peers


def _holmes(settings: Settings, nics: str | None) -> Peer:
    if settings.through == "api":
        from holmes.tools.bench.peer_holmes import HolmesPeer

        return HolmesPeer(settings.transport, nics)
    import holmes_comm
    from holmes.tools.bench.peer_torch import TorchPeer

    selection = holmes_comm.NicSelection.parse(nics or "", settings.transport)
    return TorchPeer("holmes", f"holmes[{nics}]" if nics else "holmes", selection)


def open_store(settings: Settings, rank: int, ranks: int) -> Any:
    """Returns the store all ranks share, at MASTER_ADDR and MASTER_PORT as torchrun and the testbed set them."""
    if settings.needs_torch:
        import torch.distributed as dist

        store, _, _ = next(dist.rendezvous("env://", rank, ranks))
        return store
    import holmes_comm

    # Where a launcher serves the store already, rank 0 is a client like the others.
    serves = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    return holmes_comm.TcpStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), serves)


def run_rank(settings: Settings, output: Output) -> bool:
    """Collective. Runs this process's rank, see `own_rank`; returns whether every result was right.

    A peer that cannot be used is said on stderr, and so is what ends a communicator (another rank's Ctrl-C, say).
    """
    place = own_rank()
    assert place is not None, "only a process that a launcher started is a rank"
    try:
        return _run_rank(*place, settings, output)
    except (PeerError, HolmesError) as error:
        print(f"holmes bench: rank {place[0]}: {error}", file=sys.stderr, flush=True)
        return False


def _run_rank(rank: int, ranks: int, settings: Settings, output: Output) -> bool:
    store = open_store(settings, rank, ranks)
    control = Control(store, rank, ranks)
    peers = make_peers(settings)
    for peer in peers:
        peer.setup(Context(rank, ranks, store, settings.timeout_s))
    facts = {peer.name: peer.describe() for peer in peers}
    measurements: list[Measurement] = []

    def save() -> dict[str, Any]:
        document = tables.document(output.command, dataclasses.asdict(settings), ranks, facts, measurements)
        if output.json_path is not None:
            _replace(Path(output.json_path), json.dumps(document, indent=1) + "\n")
        return document

    try:
        good = _measure(rank, ranks, settings, peers, control, measurements, save)
    finally:  # also where Ctrl-C ends it
        if rank == 0 and output.plot_path is not None and any(one.case.size_bytes for one in measurements):
            tables.draw(Path(output.plot_path), save())
    for peer in peers:
        peer.teardown()
    control.leave()
    return good


def _replace(path: Path, text: str) -> None:
    """Writes a file that is whole at any moment."""
    new = path.with_name(f".{path.name}.new")
    new.write_text(text)
    new.replace(path)


def _measure(
    rank: int,
    ranks: int,
    settings: Settings,
    peers: list[Peer],
    control: Control,
    measurements: list[Measurement],
    save: Callable[[], object],
) -> bool:
    """Collective. Appends what is measured; on rank 0 prints it and calls `save`. Whether all was right."""
    for name in settings.operations:
        operation = OPERATIONS[name]
        if ranks < operation.least_ranks:
            continue
        if rank == 0:
            print(tables.header(name, ranks, settings.peers), flush=True)
            for peer in peers:
                if reason := peer.unsupported(Case(operation, 0, DTYPES[settings.dtype], settings.op, rank, ranks)):
                    print(f"# {peer.name}: skipped, {reason}", flush=True)
        for size_bytes in settings.sizes_bytes() if operation.has_data else [0]:
            case = Case(operation, size_bytes, DTYPES[settings.dtype], settings.op, rank, ranks)
            done = measure(case, peers, control, settings, settings.peers)
            measurements += done
            if rank == 0:
                save()
                for measurement in done:
                    print(tables.line(measurement, settings.peers), flush=True)
    wrong = sum(measurement.wrong_elements for measurement in measurements)
    good = bool(measurements) and wrong == 0
    if rank == 0:
        outcome = "OK" if good else "FAILED"
        print(f"# {len(measurements)} measurements, {wrong} wrong elements: {outcome}", flush=True)
        save()
    return good
