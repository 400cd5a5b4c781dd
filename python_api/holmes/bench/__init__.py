"""`holmes bench`: every operation, size and NIC against a peer (Gloo) in the same run, checked and timed."""

from holmes.bench.control import Control
from holmes.bench.harness import measure
from holmes.bench.launch import launch
from holmes.bench.launch_testbed import Nodes, launch_on_testbed
from holmes.bench.measurement import Measurement
from holmes.bench.operations import OPERATIONS, Case, Operation
from holmes.bench.peer import Context, Peer, PeerError
from holmes.bench.plot import check_plotting
from holmes.bench.rank import own_rank, run_rank
from holmes.bench.settings import PEERS, Output, Settings, parse_bytes

__all__ = [
    "OPERATIONS",
    "PEERS",
    "Case",
    "Context",
    "Control",
    "Measurement",
    "Nodes",
    "Operation",
    "Output",
    "Peer",
    "PeerError",
    "Settings",
    "check_plotting",
    "launch",
    "launch_on_testbed",
    "measure",
    "own_rank",
    "parse_bytes",
    "run_rank",
]
