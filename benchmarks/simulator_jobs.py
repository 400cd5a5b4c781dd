"""The demo's two distributed runs as simulator jobs: what bench_simulator.py predicts. Sizes only, no times."""

from holmes.lab.demo.settings import Settings
from holmes.planning.plan import Plan
from holmes.planning.simulate import Framework, Job, Place, Transformer
from holmes.training.overlap.link import TAIL_SHARE


def model_of(settings: Settings, vocabulary: int) -> Transformer:
    """The demo's model; its output layer has weights of its own."""
    return Transformer(settings.layers, settings.width, settings.heads, settings.sequence, vocabulary, tied=False)


def ddp(settings: Settings) -> Framework:
    """torch DDP: fp32 buckets are averaged during backward, ranks update all that they hold; no clipping."""
    return Framework(
        "all_reduce",
        overlap_reduce=True,
        bucket_bytes=settings.bucket_mib * 2**20,
        element_bytes=4,
        recomputation="none",
        global_norm=False,
    )


def distributed_optimizer(stage_bytes: float) -> Framework:
    """holmes.DistributedOptimizer on stages of so many bytes of gradients: its largest buckets; no clipping."""
    return Framework(
        "sharded",
        overlap_reduce=True,
        overlap_gather=True,
        bucket_bytes=stage_bytes * TAIL_SHARE,
        element_bytes=4,
        recomputation="none",
        global_norm=False,
    )


def holmes_job(settings: Settings, vocabulary: int, plan: Plan) -> Job:
    """train_holmes.py: GPipe over the clusters, DistributedOptimizer inside each; one rank on each node."""
    places = []
    for stage in range(plan.pipeline):
        ranks = [rank for rank in range(plan.world_size) if plan.stage_of(rank) == stage]
        data_nic = plan.group_of("dp", ranks[0]).nic_class or "none"
        pipeline_nic = plan.group_of("pp", ranks[0]).nic_class or "none"
        places.append(Place(f"stage {stage}", len(ranks), 1, data_nic, pipeline_nic))
    micro_batch = settings.share(plan.data * settings.micro_batches, "data-parallel ranks * micro-batches")
    model = model_of(settings, vocabulary)
    stage_bytes = 4 * max(model.stage_parameters(plan.layers_per_stage, stage) for stage in range(plan.pipeline))
    return Job(
        model,
        plan.layers_per_stage,
        tuple(places),
        distributed_optimizer(stage_bytes),
        micro_batch,
        settings.global_batch,
        schedule="gpipe",
    )


def gloo_job(settings: Settings, vocabulary: int, ranks: int) -> Job:
    """train_gloo.py: DDP over all ranks, the whole model on each, one micro-batch."""
    return Job(
        model_of(settings, vocabulary),
        (settings.layers,),
        (Place("all", ranks, 1, "ethernet", "none"),),
        ddp(settings),
        settings.share(ranks, "data-parallel ranks"),
        settings.global_batch,
    )
