"""Injected faults of a job that goes on when ranks are lost: of its store, its checkpoints, its ranks.

Flow: a seed and a number -> one fault (catalogue) -> ranks of `run_elastic` on this machine and their store (job) ->
the fault, at a random step -> what was trained, by whom and when, is that of one unbroken run (check).
"""

from holmes.lab.stress.elastic import node_faults  # noqa: F401  (they enter themselves)
from holmes.lab.stress.elastic.catalogue import ELASTIC_FAULTS
from holmes.lab.stress.elastic.partitions import PartitionResult, run_partitions
from holmes.lab.stress.elastic.soak import ElasticResult, run_elastic_faults

__all__ = ["ELASTIC_FAULTS", "ElasticResult", "PartitionResult", "run_elastic_faults", "run_partitions"]
