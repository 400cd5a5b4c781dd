"""Megatron-core's GPT: pipeline across the clusters, data parallel inside them, its own 1F1B schedule and DDP.

    holmes testbed run -- python -W ignore examples/megatron_gpt.py

`initialize_megatron(plan)` is all that differs from a script without Holmes; an uneven split goes in as the layout.
"""

import common
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel.random import initialize_rng_tracker
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.overrides import TorchFunctionMode

import holmes
from holmes.training.integrations import initialize_megatron, megatron_layout

MICRO_BATCHES = 2


class StandInForGpu(TorchFunctionMode):
    """Megatron-core asks for CUDA's device and random state by name; while this is open, both are the processor's."""

    def __enter__(self):
        """Also tells Megatron that there is no state to fork."""
        torch.cuda.current_device = lambda: torch.device("cpu")
        torch.cuda.synchronize = lambda: None
        initialize_rng_tracker(inference_rng_tracker=True)
        return super().__enter__()

    def __torch_function__(self, function, types, args=(), kwargs=None):
        """Tensors that are made on "cuda" are made on the processor."""
        kwargs = dict(kwargs or {})
        if kwargs.get("device") == "cuda":
            kwargs["device"] = "cpu"
        return function(*args, **kwargs)


def build(settings: common.Settings, vocabulary: int, plan: holmes.Plan) -> DistributedDataParallel:
    """This rank's stage; weights depend on the stage only, so data-parallel ranks start alike."""
    config = TransformerConfig(
        num_layers=settings.layers,
        hidden_size=settings.width,
        num_attention_heads=settings.heads,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        pipeline_model_parallel_size=plan.pipeline,
        pipeline_model_parallel_layout=megatron_layout(plan),
        pipeline_dtype=torch.float32,
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        deallocate_pipeline_outputs=True,
        finalize_model_grads_func=finalize_model_grads,
    )
    torch.manual_seed(settings.seed + plan.stage_of(dist.get_rank()))
    model = GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_layer_local_spec(),
        vocab_size=vocabulary,
        max_sequence_length=settings.sequence,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=False,
    )
    return DistributedDataParallel(config, DistributedDataParallelConfig(overlap_grad_reduce=True), model)


def main() -> None:
    """Trains with the plan's groups."""
    arguments, settings = common.arguments(), common.Settings()
    dist.init_process_group(arguments.backend)
    plan = holmes.make_plan(model_layers=settings.layers, pipeline=2)
    groups = initialize_megatron(plan)
    batches = common.Batches(settings)
    with StandInForGpu():
        model = build(settings, batches.vocabulary, plan)
    optimizer = common.make_optimizer(model, settings)
    forward_backward = get_forward_backward_func()
    position = torch.arange(settings.sequence)
    mask = torch.ones(1, 1, settings.sequence, settings.sequence).tril() < 0.5
    replica, replicas = dist.get_rank(groups.dp), dist.get_world_size(groups.dp)

    def forward(micro_batches, model):
        tokens, labels = next(micro_batches)
        output = model(tokens, position.expand_as(tokens), mask, labels=labels)
        return output, lambda losses: (losses.mean(), losses.detach().mean())

    def step(number: int):
        inputs, targets = common.share_of_batch(batches, number, replica, replicas)
        model.zero_grad_buffer()
        losses = forward_backward(
            forward_step_func=forward,
            data_iterator=iter(list(zip(inputs.chunk(MICRO_BATCHES), targets.chunk(MICRO_BATCHES), strict=True))),
            model=[model],
            num_microbatches=MICRO_BATCHES,
            seq_length=settings.sequence,
            micro_batch_size=len(inputs) // MICRO_BATCHES,
            forward_only=False,
        )
        for parameter in model.parameters():
            parameter.grad = parameter.main_grad
        optimizer.step()
        return torch.stack(losses).mean() if losses else None

    with StandInForGpu():
        common.train(step, arguments.steps)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
