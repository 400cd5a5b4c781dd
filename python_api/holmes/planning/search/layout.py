"""Where a choice's stages run: from a choice and the machines to places, links and memory limits."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

from holmes.planning.model.gpt import Transformer
from holmes.planning.partition import Layer, Link, PartitionProblem, Stage
from holmes.planning.partition.transformer import layers_of_times
from holmes.planning.search.machines import ClusterMachines, Machines
from holmes.planning.search.space import Choice
from holmes.planning.simulate import Framework, Job, Place, Rates
from holmes.planning.simulate.rates import LinkRate

_ELEMENT_BYTES = 2  # of activations, gradients and parameters on the wire


@dataclass(frozen=True)
class Layout:
    """A choice on machines: the cluster of each stage, and what follows from it."""

    machines: Machines
    model: Transformer
    choice: Choice
    global_batch: int
    clusters: tuple[ClusterMachines, ...]  # of each stage

    @classmethod
    def of(cls, machines: Machines, model: Transformer, choice: Choice, global_batch: int) -> Layout:
        """Stages fill the clusters in the choice's order."""
        width = choice.tensor * choice.data
        ordered = [machines.clusters[i] for i in choice.order]
        stages = tuple(cluster for cluster in ordered for _ in range(cluster.ranks // width))
        return cls(machines, model, choice, global_batch, stages)

    @property
    def micro_batches(self) -> int:
        """Of a step, through each replica."""
        return self.choice.micro_batches(self.global_batch)

    @cached_property
    def reference_tflops(self) -> float:
        """Times are of a GPU this fast; the fastest one's."""
        return max(cluster.tflops for cluster in self.clusters)

    @cached_property
    def speeds(self) -> tuple[float, ...]:
        """Of each stage, relative to the fastest."""
        return tuple(cluster.tflops / self.reference_tflops for cluster in self.clusters)

    @cached_property
    def rates(self) -> Rates:
        """Of the simulator: networks by name; between clusters that share a bottleneck, what a host gets of it."""
        links: dict[str, LinkRate] = {}
        for cluster in self.machines.clusters:
            if cluster.network is not None:
                links[cluster.network.name] = cluster.network.rate
        if self.machines.pipeline is not None:
            links[self.machines.pipeline.name] = self.pipeline_rate()
        known = [cluster.tensor_gbps for cluster in self.clusters if cluster.tensor_gbps is not None]
        return Rates(self.reference_tflops, links, tensor_gbps=min(known, default=None))

    def pipeline_rate(self) -> LinkRate:
        """A host's rate between stages: the network's, or less where neighbouring clusters have less or are further."""
        assert self.machines.pipeline is not None, "hosts that a pipeline leaves"
        rate = self.machines.pipeline.rate
        gbps, latency_s, jitter_s = rate.gbps, rate.latency_s, rate.jitter_s
        for one, other in zip(self.clusters, self.clusters[1:], strict=False):
            if one.name != other.name:
                gbps = min(gbps, self.machines.host_gbps(one.name, other.name, self._hosts(one)))
                if link := self.machines.between_of(one.name, other.name):
                    latency_s, jitter_s = max(latency_s, link.latency_s), max(jitter_s, link.jitter_s or 0.0)
        return LinkRate(gbps, latency_s, jitter_s=jitter_s)

    def _hosts(self, cluster: ClusterMachines) -> int:
        return max(self.choice.tensor * self.choice.data // cluster.ranks_per_host, 1)

    @cached_property
    def places(self) -> tuple[Place, ...]:
        """Of the stages; several on one host share its NICs."""
        width = self.choice.tensor * self.choice.data
        seen: dict[str, int] = {}
        found = []
        for cluster, speed in zip(self.clusters, self.speeds, strict=True):
            first = seen.get(cluster.name, 0)
            seen[cluster.name] = first + width
            found.append(
                Place(
                    host=f"{cluster.name} host {first // cluster.ranks_per_host}",
                    hosts=self._hosts(cluster),
                    ranks_per_host=min(width, cluster.ranks_per_host),
                    data_nic=cluster.network.name if cluster.network else "none",
                    pipeline_nic=self.machines.pipeline.name if self.machines.pipeline else "none",
                    speed=speed,
                    cluster=cluster.name,
                    cluster_nic=cluster.network.name if cluster.network else None,
                )
            )
        return tuple(found)

    @cached_property
    def layers(self) -> tuple[Layer, ...]:
        """Of the partition: times on the fastest stage, bytes of one GPU."""
        choice, rates = self.choice, self.rates
        return _layers(
            self.model,
            rates.compute_tflops,
            rates.tensor_gbps,
            choice.micro_batch,
            choice.tensor,
            choice.data,
            choice.recomputation,
        )

    def problem(self, extra_s: tuple[float, ...] | None = None) -> PartitionProblem:
        """For the partition. `extra_s`: seconds of each stage in a step beside its layers (exposed communication),
        counted as if it computed as much slower."""
        layers, micro_batches, choice = self.layers, self.micro_batches, self.choice
        speeds = list(self.speeds)
        if extra_s is not None:
            busy_s = micro_batches * sum(layer.forward_s + layer.backward_s for layer in layers) / sum(speeds)
            speeds = [speed * busy_s / (busy_s + extra) for speed, extra in zip(speeds, extra_s, strict=True)]
        links: tuple[Link, ...] = ()
        if self.machines.pipeline is not None and choice.pipeline > 1:
            rates, places = self.rates, self.places
            count = choice.pipeline - (choice.chunks == 1)
            links = tuple(self._link(places[i], places[(i + 1) % choice.pipeline], rates) for i in range(count))
        return PartitionProblem(
            layers=layers,
            stages=tuple(
                Stage(speed, cluster.memory_bytes) for speed, cluster in zip(speeds, self.clusters, strict=True)
            ),
            links=links,
            micro_batches=micro_batches,
            schedule=choice.schedule,
            chunks=choice.chunks,
            overlap_transfers=True,
        )

    @staticmethod
    def _link(source: Place, target: Place, rates: Rates) -> Link:
        """What one GPU gets of its host's NICs."""
        if source.host == target.host:
            return Link(float("inf"))
        rate = rates.link(source.nic_to(target))
        return Link(rate.gbps / max(source.ranks_per_host, target.ranks_per_host), rate.message_s)

    def job(self, layers_per_stage: tuple[int, ...]) -> Job:
        """For the simulator: sharded optimizer, its traffic overlapped."""
        choice = self.choice
        framework = Framework(
            "sharded",
            overlap_reduce=True,
            overlap_gather=True,
            element_bytes=_ELEMENT_BYTES,
            recomputation=choice.recomputation,
        )
        return Job(
            self.model,
            layers_per_stage,
            self.places,
            framework,
            choice.micro_batch,
            self.global_batch,
            choice.tensor,
            choice.schedule,
            choice.chunks,
        )


@lru_cache(maxsize=1024)  # choices with another schedule or order have the same
def _layers(
    model: Transformer,
    compute_tflops: float | None,
    tensor_gbps: float | None,
    micro_batch: int,
    tensor: int,
    data: int,
    recomputation: str,
) -> tuple[Layer, ...]:
    times = Rates(compute_tflops, {}, tensor_gbps=tensor_gbps).times(model, micro_batch, tensor, recomputation)
    return layers_of_times(
        model, times, micro_batch=micro_batch, tensor=tensor, optimizer_shards=data, recomputation=recomputation
    )
