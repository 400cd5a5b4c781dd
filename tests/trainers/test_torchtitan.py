"""torchtitan's configuration from a plan: its own classes read it, its own meshes are the planned groups."""

from dataclasses import dataclass, field, replace

import pytest
from plans import fake_job, make

pytest.importorskip("torch")
pytest.importorskip("torchtitan", reason="needs torchtitan: make test-trainers", exc_type=ImportError)
pytest.importorskip("spmd_types", reason="needs spmd_types, which torchtitan imports: make test-trainers")

import torch.distributed as dist
import tyro
from torch import nn
from torchtitan.config.configs import ParallelismConfig, TrainingConfig
from torchtitan.config.manager import ConfigManager, custom_registry
from torchtitan.distributed import parallel_dims, pipeline_parallel
from torchtitan.distributed.activation_checkpoint import ActivationCheckpointingConfig, FullAC, SelectiveAC

from holmes.training.integrations import NotExpressible, renumbered, torchtitan_module_fqns, torchtitan_parallelism
from holmes.training.integrations.torchtitan import torchtitan_arguments


class Decoder(nn.Module):
    """Named as torchtitan's decoders are."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(2, 2)
        self.layers = nn.ModuleDict({str(index): nn.Linear(2, 2) for index in range(layers)})
        self.norm = nn.LayerNorm(2)
        self.lm_head = nn.Linear(2, 2)


@pytest.mark.parametrize(
    "sizes",
    [
        {"tensor": 2, "pipeline": 2},
        {"pipeline": 2, "context": 2},
        {"pipeline": 2, "expert": 2},
        {"tensor": 2, "pipeline": 2, "expert": 4, "expert_tensor": 1},
    ],
)
def test_meshes_are_the_planned_groups(sizes, monkeypatch):
    monkeypatch.setattr(parallel_dims, "device_type", "cpu")
    plan = renumbered(make(**sizes))
    config = ParallelismConfig(**torchtitan_parallelism(plan))
    for rank in range(plan.world_size):
        with fake_job(rank, plan.world_size):
            dims = parallel_dims.ParallelDims.from_config(config, plan.world_size)
            dims.build_mesh()
            axes = [("pp", "pp"), ("tp", "tp"), ("cp", "cp"), ("dp", "dp"), ("loss", "dp_cp"), ("ep", "ep")]
            found = {kind: dims.get_optional_mesh(axis) for axis, kind in axes}
            for kind, mesh in found.items():
                planned = plan.group_of(kind, rank).ranks
                if len(planned) > 1:
                    assert tuple(dist.get_process_group_ranks(mesh.get_group())) == planned, kind
            assert found["pp"].get_local_rank() == plan.stage_of(rank)


@pytest.mark.parametrize("chunks", [1, 2])
def test_torchtitan_splits_the_model_as_planned(chunks):
    plan = renumbered(make(pipeline=2, chunks=chunks))
    parts = ParallelismConfig(**torchtitan_parallelism(plan)).module_fqns_per_model_part
    assert parts == torchtitan_module_fqns(plan)
    model = Decoder(layers=7)
    for part, names in enumerate(parts):
        split = pipeline_parallel._split_module(model, names)
        expected = plan.layers_of(part % 2, part // 2)
        assert [int(name) for name in split.layers] == list(expected)
        assert (split.tok_embeddings is not None) == (part == 0)
        assert (split.lm_head is not None) == (part == len(parts) - 1)


@dataclass
class Told:
    """The parts of torchtitan's Trainer.Config that a plan sets."""

    parallelism: ParallelismConfig = field(default_factory=ParallelismConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    activation_checkpoint: ActivationCheckpointingConfig = field(default_factory=SelectiveAC.Config)


@pytest.mark.parametrize(("recomputation", "kind"), [("full", FullAC.Config), ("none", type(None))])
def test_its_command_line_reads_the_arguments(recomputation, kind):
    plan = renumbered(make(tensor=2, pipeline=2, micro_batch=2, global_batch=16))
    ConfigManager()  # registers how lists are read
    words = torchtitan_arguments(replace(plan, recomputation=recomputation))
    told = tyro.cli(Told, args=words, registry=custom_registry)
    assert told.parallelism == ParallelismConfig(**torchtitan_parallelism(plan))
    assert (told.training.local_batch_size, told.training.global_batch_size) == (8, 16)
    assert isinstance(told.activation_checkpoint, kind)


def test_names_of_another_model():
    plan = make(pipeline=2, model_layers=2)
    parts = torchtitan_module_fqns(plan, embedding=["wte", "wpe"], layer="h.{}", head=["ln_f"])
    assert parts == [["wte", "wpe", "h.0"], ["h.1", "ln_f"]]


def test_what_torchtitan_cannot_be_told():
    plan = make(pipeline=2)
    with pytest.raises(NotExpressible, match=r"torchtitan gives position 1 of its grid .*start_in_plan_order"):
        torchtitan_parallelism(plan)
    with pytest.raises(NotExpressible, match="schedule is 'zb-h1', but torchtitan has 'gpipe', '1f1b', 'interleaved'"):
        torchtitan_parallelism(renumbered(make(pipeline=2, schedule="zb-h1")))
    with pytest.raises(
        NotExpressible, match="has 1 micro-batches and pipeline=2, but torchtitan's 1F1B needs as many as"
    ):
        torchtitan_parallelism(renumbered(make(pipeline=2, schedule="1f1b", micro_batch=2, global_batch=8)))
    with pytest.raises(NotExpressible, match="expert_tensor=2, but torchtitan does not split"):
        torchtitan_parallelism(renumbered(make(pipeline=2, tensor=2, expert=2)))
    with pytest.raises(NotExpressible, match=r"virtual stage 2 of 4 has no layer .*\[2, 3, 0, 2\]"):
        torchtitan_module_fqns(make(pipeline=2, layers_per_chunk=[[2, 0], [3, 2]]))
