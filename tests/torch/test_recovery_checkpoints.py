"""Checkpoints of a run: which one counts, which ones stay, and that no two layers share a name."""

import pytest

torch = pytest.importorskip("torch")
dist = pytest.importorskip("torch.distributed")

from torch import nn  # noqa: E402
from torch_ranks import init, run_ranks  # noqa: E402

from holmes.training.recovery.checkpoints import Checkpoints  # noqa: E402
from holmes.training.recovery.state import TrackedState  # noqa: E402


def test_the_last_complete_one_counts_and_older_ones_go(tmp_path):
    checkpoints = Checkpoints(tmp_path / "run", keep=2)
    assert checkpoints.latest() is None
    model = nn.Linear(2, 2)
    for step, generation in [(5, 1), (10, 1), (10, 2)]:
        checkpoints.save({"model": model.state_dict()}, step, generation, True)
    assert [path.name for path in checkpoints.complete()] == [
        "step-00000010-generation-0001",
        "step-00000010-generation-0002",
    ]
    (tmp_path / "run" / "step-00000015-generation-0002").mkdir()  # its writers were killed
    assert checkpoints.latest().name == "step-00000010-generation-0002"
    checkpoints.save({"model": model.state_dict()}, 20, 3, True)
    checkpoints.save({"model": model.state_dict()}, 25, 3, True)
    assert sorted(path.name for path in checkpoints.folder.iterdir()) == [
        "step-00000020-generation-0003",
        "step-00000025-generation-0003",
    ]
    other = nn.Linear(2, 2)
    state = {"model": other.state_dict()}
    checkpoints.load(state, checkpoints.latest())
    assert torch.equal(state["model"]["weight"], model.weight)
    with pytest.raises(ValueError, match="keep at least 1"):
        Checkpoints(tmp_path, keep=0)


def two_stages(rank, size, store):
    import holmes
    from holmes.training.recovery.state import TrackedState

    init(store, rank, size)
    torch.manual_seed(rank)
    plan = holmes.make_plan(model_layers=2, pipeline=2, topology=holmes.gather_topology(measure_s=0))
    model = nn.Linear(3, 3)
    named = TrackedState({"model": model}, lambda name: f"{plan.stage_of(rank)}.{name}")
    named.check_names(plan)
    assert sorted(named.collect()["model"]) == [f"{rank}.bias", f"{rank}.weight"]
    with pytest.raises(ValueError, match=r"ranks 0 and 1 hold different parameters named 'model.weight'") as caught:
        TrackedState({"model": model}, None).check_names(plan)
    nn.init.ones_(model.weight)
    nn.init.ones_(model.bias)
    TrackedState({"model": model}, None).check_names(plan)  # tied: one name for equal tensors
    return str(caught.value)


def test_two_stages_with_equal_names_are_refused():
    for message in run_ranks(two_stages, 2):
        assert "name_of=" in message


def test_what_has_no_state_is_refused():
    with pytest.raises(TypeError, match="lr is a float"):
        TrackedState({"lr": 0.1}, None)
