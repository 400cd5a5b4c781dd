"""DeepSpeed ZeRO-1 or ZeRO-2 (--stage 2) over every rank, on both clusters; only the backend's name is Holmes'.

holmes testbed run -- python -W ignore examples/deepspeed_zero.py
"""

import common
import deepspeed
import torch.distributed as dist


def main() -> None:
    """Trains the whole model on every rank, its optimizer state sharded."""
    arguments, settings = common.arguments(stage=1), common.Settings()
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # compiles for minutes, for inference only
    dist.init_process_group(arguments.backend)
    deepspeed.init_distributed(dist_backend=arguments.backend, dist_init_required=False)
    rank, size = dist.get_rank(), dist.get_world_size()
    batches = common.Batches(settings)
    model = common.Stage(settings, batches.vocabulary, range(settings.layers))
    engine, *_ = deepspeed.initialize(
        model=model,
        config={
            "train_batch_size": settings.global_batch,
            "zero_optimization": {"stage": arguments.stage},
            "zero_allow_untested_optimizer": True,
            "steps_per_print": 1000000,
        },
        optimizer=common.make_optimizer(model, settings),
    )

    def step(number: int):
        inputs, targets = common.share_of_batch(batches, number, rank, size)
        loss = common.loss_of(engine(inputs), targets)
        engine.backward(loss)
        engine.step()
        return loss

    common.train(step, arguments.steps)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
