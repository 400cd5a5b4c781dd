"""The emulated testbed: N nodes in C clusters on one machine, without root.

    from holmes.lab.testbed import Testbed

    result = Testbed("two-clusters").run(["python", "train.py"])

Each node is a set of network, hostname, IPC and mount namespaces; each fabric is a Linux bridge; every link is limited
to its rate in both directions; fabrics have no route to each other. Needs util-linux and iproute2, and user namespaces.
"""

from holmes.lab.testbed.launch import RankFailure, RunningJob, Testbed, TestbedResult, TestbedSession
from holmes.lab.testbed.session import Process, Session
from holmes.lab.testbed.spec import (
    Cluster,
    NetworkSpec,
    Nic,
    Node,
    Spec,
    SpecError,
    TestbedError,
    builtin_specs,
    load_spec,
)

__all__ = [
    "Cluster",
    "NetworkSpec",
    "Nic",
    "Node",
    "Process",
    "RankFailure",
    "RunningJob",
    "Session",
    "Spec",
    "SpecError",
    "Testbed",
    "TestbedError",
    "TestbedResult",
    "TestbedSession",
    "builtin_specs",
    "load_spec",
]
