"""Topology: what all ranks see of their NICs, merged into hosts, fabrics and clusters. Needs no torch.

Flow: every rank's `NodeInventory` -> `merge_hosts` -> `candidate_fabrics` -> (probe confirms and measures) ->
`find_clusters`. Nobody types a label: a fabric is a NIC class and an IP subnet, a cluster is the hosts that share their
best fabric. Written by hand for machines one does not have: docs/topology.md.
"""

from holmes.cluster.topology.fabrics import candidate_fabrics, make_fabric, merge_hosts
from holmes.cluster.topology.parts import (
    NIC_CLASSES,
    RDMA_CLASSES,
    Cluster,
    Fabric,
    Host,
    Link,
    NodeInventory,
    Pair,
    Port,
    TopologyFinding,
)
from holmes.cluster.topology.preference import ROUTED, VERBS, is_verbs_only
from holmes.cluster.topology.topology import Topology, find_clusters, make_topology

__all__ = [
    "NIC_CLASSES",
    "RDMA_CLASSES",
    "ROUTED",
    "VERBS",
    "Cluster",
    "Fabric",
    "Host",
    "Link",
    "NodeInventory",
    "Pair",
    "Port",
    "Topology",
    "TopologyFinding",
    "candidate_fabrics",
    "find_clusters",
    "is_verbs_only",
    "make_fabric",
    "make_topology",
    "merge_hosts",
]
