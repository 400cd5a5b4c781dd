"""`holmes bench`: every operation, size and NIC against a peer (Gloo) in the same run, checked and timed."""

from holmes.bench.harness import Control, Measurement, measure
from holmes.bench.launch import launch
from holmes.bench.operations import OPERATIONS, Case, Operation
from holmes.bench.peer import Context, Peer, PeerError
from holmes.bench.rank import run_rank
from holmes.bench.settings import Settings, parse_bytes

__all__ = [
    "OPERATIONS",
    "Case",
    "Context",
    "Control",
    "Measurement",
    "Operation",
    "Peer",
    "PeerError",
    "Settings",
    "launch",
    "measure",
    "parse_bytes",
    "run_rank",
]
