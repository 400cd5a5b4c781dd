"""State dicts that holmes.DistributedOptimizer loads and saves: of other classes, precisions and kinds of numbers; as
torch's own optimizers go on from them."""

import copy

import numpy as np
import pytest

torch = pytest.importorskip("torch")
dist = pytest.importorskip("torch.distributed")

from torch import nn  # noqa: E402
from torch_ranks import init, run_ranks  # noqa: E402

import holmes  # noqa: E402


def small_step(model, optimizer, times):
    """Alone, always the same batch, in the model's dtype."""
    for _ in range(times):
        (model(torch.ones(2, 4, dtype=model[0].weight.dtype)) ** 2).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def small_model(dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 2)).to(dtype)


def assert_goes_on_as_torch(reference, plain, model, optimizer):
    small_step(reference, plain, 3)
    small_step(model, optimizer, 3)
    for one, other in zip(reference.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("after_a_step", [False, True])
@pytest.mark.parametrize("saves", [torch.optim.Adam, holmes.DistributedOptimizer])
def test_an_adams_state_makes_no_adam_of_an_adamw(saves, after_a_step):
    """As with torch, whose AdamW decays weights in its own way whatever it has loaded."""
    before = small_model()
    adam = torch.optim.Adam(before.parameters(), lr=0.01, weight_decay=0.3)
    saver = adam
    if saves is holmes.DistributedOptimizer:
        copied = small_model()
        saver = saves(copied, torch.optim.Adam, lr=0.01, weight_decay=0.3)
        small_step(copied, saver, 3)
    small_step(before, adam, 3)
    reference, model = copy.deepcopy(before), small_model()
    plain = torch.optim.AdamW(reference.parameters(), lr=0.01)
    plain.load_state_dict(copy.deepcopy(adam.state_dict()))
    optimizer = holmes.DistributedOptimizer(model, torch.optim.AdamW, lr=0.5)
    small_step(model, optimizer, int(after_a_step))
    model.load_state_dict(before.state_dict())
    optimizer.load_state_dict(copy.deepcopy(saver.state_dict()))
    assert_goes_on_as_torch(reference, plain, model, optimizer)


@pytest.mark.parametrize("after_a_step", [False, True])
@pytest.mark.parametrize("dtypes", [(torch.float64, torch.float32), (torch.float32, torch.float64)])
def test_a_state_of_another_precision_is_converted(dtypes, after_a_step):
    saved, loads = dtypes
    before = small_model(saved)
    saver = holmes.DistributedOptimizer(before, torch.optim.Adam, lr=0.01)
    small_step(before, saver, 3)
    model = small_model(loads)
    optimizer = holmes.DistributedOptimizer(model, torch.optim.Adam, lr=0.01)
    small_step(model, optimizer, int(after_a_step))
    model.load_state_dict(before.state_dict())
    optimizer.load_state_dict(copy.deepcopy(saver.state_dict()))
    assert optimizer.state_dict()["state"]["0.weight"]["exp_avg"].dtype == loads
    small_step(before, saver, 3)
    small_step(model, optimizer, 3)
    torch.testing.assert_close(model[0].weight.double(), before[0].weight.double(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("with_frozen", [False, True])
def test_a_plain_state_may_have_frozen_parameters(with_frozen):
    """torch.optim.AdamW(model.parameters()) counts them, which is what one writes."""
    reference, model = small_model(), small_model()
    for each in (reference, model):
        each[0].weight.requires_grad_(False)
    given = [p for p in reference.parameters() if p.requires_grad or with_frozen]
    plain = torch.optim.AdamW(given, lr=0.01)
    small_step(reference, plain, 3)
    model.load_state_dict(reference.state_dict())
    optimizer = holmes.DistributedOptimizer(model, torch.optim.AdamW, lr=0.5)
    optimizer.load_state_dict(copy.deepcopy(plain.state_dict()))
    assert_goes_on_as_torch(reference, plain, model, optimizer)


@pytest.mark.parametrize(
    "settings",
    [
        {"lr": np.float32(0.01)},
        {"lr": 0.01, "weight_decay": np.int64(0)},
        {"lr": 0.01, "betas": (torch.tensor(0.8), torch.tensor(0.9)), "foreach": False},
        {"lr": torch.tensor(0.01)},
    ],
    ids=["numpy", "numpy-int", "tensors-in-a-row", "tensor"],
)
def test_settings_that_are_no_numbers_of_pythons_are_saved(settings):
    reference, model, again = small_model(), small_model(), small_model()
    plain = torch.optim.AdamW(reference.parameters(), **settings)
    optimizer = holmes.DistributedOptimizer(model, torch.optim.AdamW, **settings)
    small_step(reference, plain, 3)
    small_step(model, optimizer, 3)
    kept = holmes.DistributedOptimizer(again, torch.optim.AdamW, **{**settings, "eps": 0.5})
    again.load_state_dict(model.state_dict())
    kept.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for name, value in settings.items():
        assert type(kept.param_groups[0][name]) is type(value) or isinstance(value, np.generic)
    assert_goes_on_as_torch(reference, plain, again, kept)


def test_a_setting_that_cannot_be_saved_is_named():
    optimizer = holmes.DistributedOptimizer(small_model(), torch.optim.AdamW, lr=0.01)
    optimizer.param_groups[0]["tag"] = {1}
    with pytest.raises(ValueError, match=r"tag of param_groups\[0\] is \{1\}, of type set"):
        optimizer.state_dict()


def step_with_own_rate(rank, size, store):
    init(store, rank, size)
    model = small_model()
    optimizer = holmes.DistributedOptimizer(model, torch.optim.AdamW, lr=np.float32(0.01 * (rank + 1)))
    with pytest.raises(RuntimeError, match=r"lr of param_groups\[0\] is 0.0\d+ on rank 0 of this group and 0.0\d+ on"):
        small_step(model, optimizer, 1)


def test_settings_of_numpys_that_differ_between_ranks_are_named():
    run_ranks(step_with_own_rate, 2)


@pytest.mark.parametrize("state", [None, [1], {"0.weight": None}], ids=["none", "list", "entry"])
def test_a_state_that_is_no_dict_is_named(state):
    optimizer = holmes.DistributedOptimizer(small_model(), torch.optim.AdamW, lr=0.01)
    saved = {**optimizer.state_dict(), "state": state}
    with pytest.raises(ValueError, match="'state' of the state to load is damaged"):
        optimizer.load_state_dict(saved)


@pytest.mark.parametrize("after_a_step", [False, True])
@pytest.mark.parametrize(
    ("saved", "loads", "says"),
    [
        ((torch.optim.SGD, {"momentum": 0.9}), (torch.optim.SGD, {}), r"keeps \['momentum_buffer'\].*momentum=0 here"),
        ((torch.optim.AdamW, {"amsgrad": True}), (torch.optim.AdamW, {}), "amsgrad=False here and True there"),
        ((torch.optim.AdamW, {}), (torch.optim.SGD, {}), "is of AdamW, which has no dampening, momentum, nesterov"),
    ],
    ids=["momentum", "amsgrad", "class"],
)
def test_what_a_checkpoint_keeps_beyond_what_is_asked_for_is_named(tmp_path, saved, loads, says, after_a_step):
    """torch.distributed.checkpoint brings what the state to load has, and says nothing of the rest."""
    import torch.distributed.checkpoint as dcp

    model = small_model()
    optimizer = holmes.DistributedOptimizer(model, saved[0], lr=0.01, **saved[1])
    small_step(model, optimizer, 2)
    dcp.save({"optimizer": optimizer.state_dict()}, checkpoint_id=tmp_path / "checkpoint", no_dist=True)
    other = small_model()
    begins = holmes.DistributedOptimizer(other, loads[0], lr=0.5, **loads[1])
    small_step(other, begins, int(after_a_step))
    state = {"optimizer": copy.deepcopy(begins.state_dict())}
    dcp.load(state, checkpoint_id=tmp_path / "checkpoint", no_dist=True)
    if not after_a_step and loads[0] is saved[0]:
        assert "momentum_buffer" not in state["optimizer"]["state"]["0.weight"]
    with pytest.raises(ValueError, match=says):
        begins.load_state_dict(state["optimizer"])
    assert begins.param_groups[0]["lr"] == 0.5
