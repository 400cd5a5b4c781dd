"""Topology: what all ranks see of their NICs, merged into hosts, fabrics and clusters. Needs no torch.

Flow: every rank's `NodeInventory` -> `merge_hosts` -> `candidate_fabrics` -> (holmes.probe confirms and measures) ->
`find_clusters`. Nobody types a label: a fabric is a NIC class and an IP subnet, a cluster is the hosts that share their
best fabric. Written by hand for machines one does not have: docs/topology.md.
"""

from holmes.topology.clusters import find_clusters, make_topology
from holmes.topology.fabrics import candidate_fabrics, make_fabric, merge_hosts
from holmes.topology.parts import (
    NIC_CLASSES,
    RDMA_CLASSES,
    Cluster,
    Fabric,
    Finding,
    Host,
    Link,
    NodeInventory,
    Port,
)
from holmes.topology.preference import ROUTED
from holmes.topology.topology import Topology

__all__ = [
    "NIC_CLASSES",
    "RDMA_CLASSES",
    "ROUTED",
    "Cluster",
    "Fabric",
    "Finding",
    "Host",
    "Link",
    "NodeInventory",
    "Port",
    "Topology",
    "candidate_fabrics",
    "find_clusters",
    "make_fabric",
    "make_topology",
    "merge_hosts",
]
