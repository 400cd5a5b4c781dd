"""Megatron-core initialised with a plan: exactly the planned groups, in order, on the planned NICs."""

import contextlib
import dataclasses
import json
import sys
import warnings

import pytest
from paths import WORKERS
from plans import fake_job, make

pytest.importorskip("torch")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # that Transformer Engine and Apex are missing
    pytest.importorskip("megatron.core", reason="needs megatron-core: make test-trainers", exc_type=ImportError)

import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.enums import LayerType
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout
from megatron.core.transformer.transformer_config import TransformerConfig

from holmes.lab.testbed import Testbed, TestbedError
from holmes.planning.groups.rank_grid import KINDS
from holmes.training.integrations import (
    NotExpressible,
    initialize_megatron,
    megatron_arguments,
    megatron_groups,
    megatron_layout,
    megatron_process_groups,
)

# What Megatron's own code asks for each kind of group, and the list of ranks that it keeps beside it.
GETTERS = {
    "dp_cp": (lambda: parallel_state.get_data_parallel_group(True), "_DATA_PARALLEL_GLOBAL_RANKS_WITH_CP"),
    "dp": (parallel_state.get_data_parallel_group, "_DATA_PARALLEL_GLOBAL_RANKS"),
    "cp": (parallel_state.get_context_parallel_group, "_CONTEXT_PARALLEL_GLOBAL_RANKS"),
    "mp": (parallel_state.get_model_parallel_group, "_MODEL_PARALLEL_GLOBAL_RANKS"),
    "tp": (parallel_state.get_tensor_model_parallel_group, "_TENSOR_MODEL_PARALLEL_GLOBAL_RANKS"),
    "pp": (parallel_state.get_pipeline_model_parallel_group, "_PIPELINE_GLOBAL_RANKS"),
    "embd": (parallel_state.get_embedding_group, "_EMBEDDING_GLOBAL_RANKS"),
    "pos_embd": (parallel_state.get_position_embedding_group, "_POSITION_EMBEDDING_GLOBAL_RANKS"),
    "tp_dp_cp": (lambda: parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True), None),
    "tp_dp": (parallel_state.get_tensor_and_data_parallel_group, None),
    "tp_cp": (parallel_state.get_tensor_and_context_parallel_group, None),
    "ep": (parallel_state.get_expert_model_parallel_group, "_EXPERT_MODEL_PARALLEL_RANKS"),
    "expt_tp": (parallel_state.get_expert_tensor_parallel_group, None),
    "tp_ep": (parallel_state.get_expert_tensor_and_model_parallel_group, None),
    "tp_ep_pp": (parallel_state.get_expert_tensor_model_pipeline_parallel_group, None),
    "expt_dp": (parallel_state.get_expert_data_parallel_group, None),
}  # fmt: skip
CASES = {
    "tp2 pp2": {"tensor": 2, "pipeline": 2},
    "pp4": {"pipeline": 4},
    "tp2 pp4": {"tensor": 2, "pipeline": 4},
    "cp2 pp2": {"context": 2, "pipeline": 2},
    "ep2 pp2": {"expert": 2, "pipeline": 2},
    "tp2 ep4 etp1 pp2": {"tensor": 2, "expert": 4, "expert_tensor": 1, "pipeline": 2},
    "interleaved": {"tensor": 2, "pipeline": 2, "chunks": 2},
    "tp2 cp2 ep2 pp4 of 32": {"hosts": 8, "ranks_per_host": 4, "tensor": 2, "context": 2, "expert": 2, "pipeline": 4},
}


def ranks_of(group):
    return None if group is None else tuple(dist.get_process_group_ranks(group))


@pytest.fixture
def clean_megatron():
    yield
    parallel_state.destroy_model_parallel()
    parallel_state._global_process_group_list = None


@pytest.mark.parametrize("case", CASES)
def test_parallel_state_has_exactly_the_planned_groups(case, clean_megatron):
    plan = make(**CASES[case])
    assert list(plan.order) != list(range(plan.world_size))
    assert set(GETTERS) == set(KINDS) - {"world"}  # the default group
    for rank in range(plan.world_size):
        with fake_job(rank, plan.world_size):
            collection = initialize_megatron(plan, create_gloo_process_groups=False)
            planned = {group.kind: group.ranks for group in plan.groups_of(rank)}
            for kind, (getter, listed) in GETTERS.items():
                if kind not in planned:  # embedding groups of stages in the middle
                    assert kind in ("embd", "pos_embd")
                    assert getattr(collection, kind) is None
                    continue
                assert ranks_of(getter()) == planned[kind], kind
                assert ranks_of(getattr(collection, kind, None)) in (None, planned[kind]), kind
                assert listed is None or tuple(getattr(parallel_state, listed)) == planned[kind], kind
            assert ranks_of(collection.intra_dp_cp) == planned["dp_cp"]
            assert ranks_of(collection.intra_expt_dp) == planned["expt_dp"]
            assert set(ranks_of(collection.intra_dist_opt)) == set(planned["world"])
            assert parallel_state.get_pipeline_model_parallel_rank() == plan.stage_of(rank)
            assert parallel_state.get_tensor_model_parallel_rank() == planned["tp"].index(rank)
            assert parallel_state.get_data_parallel_rank() == planned["dp"].index(rank)
            parallel_state.destroy_model_parallel()


def test_process_group_collection_without_parallel_state():
    plan = make(tensor=2, pipeline=2, expert=2)
    for rank in range(plan.world_size):
        with fake_job(rank, plan.world_size):
            collection = megatron_process_groups(plan, "fake")
            assert not parallel_state.is_initialized()
            planned = {group.kind: group.ranks for group in plan.groups_of(rank)}
            fields = {field.name for field in dataclasses.fields(ProcessGroupCollection)}
            assert all(hasattr(collection, field) for field in fields)
            for kind in set(KINDS) & fields:
                assert ranks_of(getattr(collection, kind)) == planned.get(kind), kind


@pytest.mark.parametrize("sizes", [{"chunks": 1}, {"chunks": 2}, {"layers_per_chunk": [[0, 5], [2, 0]]}])
def test_megatron_reads_the_layout_as_the_plan_means_it(sizes):
    plan = make(pipeline=2, **sizes)
    layout = PipelineParallelLayerLayout(megatron_layout(plan), plan.pipeline)
    layout.validate_layer_layout(num_layers=7, mtp_num_layers=0)
    assert layout.virtual_pipeline_model_parallel_size == plan.chunks
    first = 0
    for part, count in enumerate(plan.layers_per_part):
        stage, chunk = part % plan.pipeline, part // plan.pipeline
        assert layout.layout[stage][chunk].count(LayerType.decoder) == count
        assert plan.layers_of(stage, chunk) == range(first, first + count)
        first += count


def test_arguments_are_those_of_megatron():
    plan = make(tensor=2, pipeline=2, expert=2, expert_tensor=1, micro_batch=1, global_batch=8)
    arguments = megatron_arguments(plan)
    given = dict(zip(arguments[::2], arguments[1::2], strict=True))
    known = {field.name for config in (ModelParallelConfig, TransformerConfig) for field in dataclasses.fields(config)}
    names = {name.removeprefix("--").replace("-", "_") for name in given}
    assert names - known == {"micro_batch_size", "global_batch_size"}  # of Megatron-LM's training loop
    assert given["--pipeline-model-parallel-layout"] == "Et*4|t*3L"
    assert (given["--num-layers"], given["--expert-tensor-parallel-size"]) == ("7", "1")
    assert "--pipeline-model-parallel-layout" not in megatron_arguments(make(hosts=1, pipeline=1))


def test_what_megatron_cannot_be_told(clean_megatron):
    with pytest.raises(NotExpressible, match=r"schedule is 'gpipe', but Megatron has '1f1b' and 'interleaved'"):
        megatron_arguments(make(pipeline=2, schedule="gpipe"))
    plan = make(pipeline=2)
    with fake_job(0, plan.world_size):
        with pytest.raises(ValueError, match="order of initialize_model_parallel come from the plan; leave them out"):
            initialize_megatron(plan, order="tp-pp-dp")
        with pytest.raises(ValueError, match="num_distributed_optimizer_instances=2, but a plan has no groups"):
            initialize_megatron(plan, num_distributed_optimizer_instances=2)
    with fake_job(0, 4), pytest.raises(ValueError, match="the plan is for 8 ranks, but this job has 4"):
        initialize_megatron(plan)


def test_megatron_is_left_as_it_was(clean_megatron):
    plan = make(pipeline=2)
    before = parallel_state.RankGenerator, parallel_state.create_group
    with fake_job(0, plan.world_size):
        with contextlib.suppress(KeyError), megatron_groups(plan):
            assert before != (parallel_state.RankGenerator, parallel_state.create_group)
            raise KeyError  # training ends with an error
        assert before == (parallel_state.RankGenerator, parallel_state.create_group)
        with megatron_groups(plan):  # as a training script calls it, which knows nothing of the plan
            parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2, create_gloo_process_groups=False)
        assert ranks_of(parallel_state.get_pipeline_model_parallel_group()) == plan.group_of("pp", 0).ranks


def test_groups_communicate_on_their_nics():
    """8 ranks shuffled over 4 emulated nodes: Megatron's groups carry data, over the NICs of the plan."""
    try:
        testbed = Testbed("two-clusters")
        lines: list[str] = []
        result = testbed.run(
            [sys.executable, "-W", "ignore", str(WORKERS / "megatron_worker.py")],
            nproc_per_node=2,
            shuffle_seed=5,
            timeout_s=160,
            on_line=lambda rank, node, line: lines.append(line),
        )
    except TestbedError as error:
        pytest.skip(f"needs unprivileged namespaces: {error}")
    assert result.returncode == 0, "\n".join(lines[-40:])
    reports = [json.loads(line) for line in lines if line.startswith("{")]
    assert len(reports) == 8
    for report in reports:
        assert report["tp"] == []  # one rank
        assert report["dp"], "no connection of the data-parallel group was reported"
        assert set(report["dp"]) <= {"ib0", "roce0", "shm"}, report
        assert set(report["pp"]) == {"eth0"}, report
