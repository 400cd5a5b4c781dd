"""`holmes bench`: every operation, size and NIC against a peer (Gloo) in the same run, checked and timed."""

from holmes.tools.bench.control import Control
from holmes.tools.bench.harness import measure
from holmes.tools.bench.launch import launch
from holmes.tools.bench.measurement import Measurement
from holmes.tools.bench.operations import OPERATIONS, Case, Operation
from holmes.tools.bench.peer import Context, Peer, PeerError
from holmes.tools.bench.rank import own_rank, run_rank
from holmes.tools.bench.settings import PEERS, Output, Settings, parse_bytes

__all__ = [
    "OPERATIONS",
    "PEERS",
    "Case",
    "Context",
    "Control",
    "Measurement",
    "Operation",
    "Output",
    "Peer",
    "PeerError",
    "Settings",
    "launch",
    "measure",
    "own_rank",
    "parse_bytes",
    "run_rank",
]
