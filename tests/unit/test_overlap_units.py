"""The parts of the overlapped optimizer that need no ranks: layout of buckets, bucket size, schedule, reports."""

import gc
import json
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
hypothesis = pytest.importorskip("hypothesis")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from torch import distributed as dist  # noqa: E402
from torch import nn  # noqa: E402

import holmes  # noqa: E402
from holmes.training.overlap.buckets import ParameterSize, lay_out  # noqa: E402
from holmes.training.overlap.link import SMALLEST_BYTES, TAIL_SHARE, bucket_bytes_from  # noqa: E402
from holmes.training.overlap.parameters import Trained  # noqa: E402
from holmes.training.overlap.report import union_s  # noqa: E402
from holmes.training.overlap.schedule import OBSERVED_STEPS, BucketTimes, StepObserver, gather_order  # noqa: E402
from holmes.training.overlap.storage import gradient_memory  # noqa: E402
from holmes.training.overlap.transfers import ALL_GATHER, REDUCE_SCATTER, Transfer  # noqa: E402
from holmes.training.process_groups import timeout_of  # noqa: E402

sizes = st.lists(
    st.builds(ParameterSize, st.integers(0, 5000), st.just(4), st.sampled_from(["a", "b"])), min_size=1, max_size=30
)


@given(sizes, st.integers(1, 20000), st.integers(1, 9), st.randoms())
def test_every_element_of_every_parameter_has_one_owner(parameters, bucket_bytes, shards, random):
    order = list(range(len(parameters)))
    random.shuffle(order)
    buckets = lay_out(order, parameters, bucket_bytes, shards)
    slots = [slot for bucket in buckets for slot in bucket.slots]
    assert sorted(slot.parameter for slot in slots) == sorted(order)
    owned = {index: [] for index in order}
    for bucket in buckets:
        assert bucket.numel % shards == 0
        assert len({parameters[slot.parameter].kind for slot in bucket.slots}) == 1
        ends = [slot.offset + slot.numel for slot in bucket.slots]
        assert all(end <= slot.offset for end, slot in zip(ends, bucket.slots[1:], strict=False))
        assert ends[-1] <= bucket.numel
        for rank in range(shards):
            for fragment in bucket.fragments(rank):
                assert fragment.offset + fragment.numel <= bucket.shard_numel
                owned[fragment.parameter].append((fragment.start, fragment.start + fragment.numel))
    for index, parts in owned.items():
        covered = sorted(parts)
        assert [end for _, end in covered[:-1]] == [start for start, _ in covered[1:]]
        assert (
            (covered[0][0], covered[-1][1]) == (0, parameters[index].numel) if covered else not parameters[index].numel
        )
    place = {index: position for position, index in enumerate(order)}
    last = [max(place[slot.parameter] for slot in bucket.slots) for bucket in buckets]
    assert last == sorted(last)  # buckets complete in their order


@settings(deadline=None, max_examples=40)
@given(
    st.lists(st.lists(st.integers(0, 5), min_size=0, max_size=3), min_size=1, max_size=6),
    st.lists(st.booleans(), min_size=6, max_size=6),
    st.integers(1, 400),
    st.sampled_from([torch.float32, torch.float64]),
)
def test_any_shapes_step_as_in_torch(shapes, frozen, bucket_bytes, dtype):
    """Parameters of any shape, some frozen, one tied, used or not from step to step."""

    def make():
        torch.manual_seed(0)
        model = nn.Module()
        for i, shape in enumerate(shapes):
            model.register_parameter(f"p{i}", nn.Parameter(torch.randn(shape, dtype=dtype), not frozen[i]))
        model.register_parameter("tied", model.p0)
        model.register_parameter("always", nn.Parameter(torch.ones(3, dtype=dtype)))
        return model

    def train(model, optimizer):
        for step in range(4):
            optimizer.zero_grad()
            used = [p for i, p in enumerate(model.parameters()) if (i + step) % 3 or p is model.always]
            (sum((p * p).sum() for p in used) + model.tied.sin().sum()).backward()
            optimizer.step()
        return [p.detach().clone() for p in model.parameters()]

    ours, theirs = make(), make()
    optimizer = holmes.DistributedOptimizer(ours, torch.optim.AdamW, lr=0.1, bucket_bytes=bucket_bytes)
    expected = train(theirs, torch.optim.AdamW([p for p in theirs.parameters() if p.requires_grad], lr=0.1))
    torch.testing.assert_close(train(ours, optimizer), expected)


def test_bucket_size_follows_the_link():
    total = 1 << 30
    slow, fast = (bucket_bytes_from(1e-4, rate, total) for rate in (1e7, 1e9))
    assert SMALLEST_BYTES == slow < fast < total * TAIL_SHARE
    assert bucket_bytes_from(1e-2, 1e10, total) == total * TAIL_SHARE


def order_of(ready, reduce_ns, gather_ns):
    return gather_order([BucketTimes(at, reduce_ns, gather_ns) for at in ready], range(len(ready) - 1, -1, -1))


def test_gathers_fill_the_link_where_backward_leaves_it_idle():
    assert order_of([0, 100, 200, 300], 40, 40) == [0, 1, 2, 3]  # each before the next gradients are complete
    assert order_of([0, 100, 200, 300], 80, 80) == [0, 3, 2, 1]  # only the first; forward needs the last bucket first
    assert order_of([0, 0, 0, 0], 10, 10) == [3, 2, 1, 0]  # never idle
    # Of two that are there the one of the later bucket, and no more than one until the next gradients.
    assert order_of([0, 0, 100, 100, 200, 200], 30, 40) == [1, 3, 5, 4, 2, 0]


def transfer(kind, bucket, submitted_s, start_s, ended_s):
    return Transfer(kind, bucket, 4, submitted_s=submitted_s, work=None, ended_s=ended_s), start_s


def test_the_first_step_is_not_counted_and_the_others_give_medians():
    observer = StepObserver(2)
    for step in range(OBSERVED_STEPS):
        assert not observer.is_full
        slow = 9.0 if step == 0 else 0.0
        reduces = [
            transfer(REDUCE_SCATTER, 0, 10.0, 10.0, 11.0),
            transfer(REDUCE_SCATTER, 1, 10.5 + slow, 11.0, 13.0 + slow),
        ]
        gathers = [transfer(ALL_GATHER, b, 1.0, 2.0, 2.5 + slow) for b in range(2)] if step else []
        observer.observe([row for row, _ in reduces], reduces + gathers)
    assert observer.is_full
    assert observer.times() == [BucketTimes(0, 10**9, 5 * 10**8), BucketTimes(5 * 10**8, 2 * 10**9, 5 * 10**8)]


def test_union_counts_overlaps_once():
    assert union_s([(0, 2), (1, 3), (5, 6), (5.5, 5.6)]) == 4
    assert union_s([]) == 0


def small(**options):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    return model, holmes.DistributedOptimizer(model, torch.optim.SGD, lr=0.1, **options)


def test_wrong_use_is_named():
    model, optimizer = small()
    with pytest.raises(ValueError, match=r"'0.weight' already has a DistributedOptimizer; call that one's close"):
        holmes.DistributedOptimizer(model, torch.optim.SGD, lr=0.1)
    for _ in range(2):
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    model(torch.ones(1, 4)).sum().backward()
    with pytest.raises(RuntimeError, match=r"'1.weight' got another gradient after those of this step|'1.bias' got"):
        model(torch.ones(1, 4)).sum().backward()
    optimizer.zero_grad()
    with pytest.raises(ValueError, match="takes no further parameters"):
        optimizer.add_param_group({"params": []})
    with pytest.raises(ValueError, match="LBFGS needs whole parameters"):
        holmes.DistributedOptimizer(nn.Linear(2, 2), torch.optim.LBFGS)
    with pytest.raises(ValueError, match="no parameter of the model is trained"):
        holmes.DistributedOptimizer(nn.Linear(2, 2).requires_grad_(False), torch.optim.SGD, lr=0.1)


def test_accumulation_may_change_between_steps():
    model, optimizer = small(accumulation_steps=1, step_in_backward=False)
    for count in (1, 3, 2):
        optimizer.accumulation_steps = count
        before = model[0].bias.detach().clone()
        slope = model[1].weight.detach().sum(0)
        for _ in range(count):
            (model(torch.ones(1, 4)).sum() / count).backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.testing.assert_close(model[0].bias.detach(), before - 0.1 * slope)


def test_state_dict_hooks_run():
    _, optimizer = small()
    calls = []
    optimizer.register_state_dict_pre_hook(lambda _: calls.append("before save"))
    optimizer.register_state_dict_post_hook(lambda _, state: calls.append("after save") or {**state, "more": 1})
    optimizer.register_load_state_dict_pre_hook(lambda _, state: calls.append(f"before load {state['more']}"))
    optimizer.register_load_state_dict_post_hook(lambda _: calls.append("after load"))
    optimizer.load_state_dict(optimizer.state_dict())
    assert calls == ["before save", "after save", "before load 1", "after load"]


def test_a_saved_state_dict_is_loaded_with_weights_only(tmp_path):
    model, optimizer = small(momentum=0.9)
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    torch.save(optimizer.state_dict(), tmp_path / "state.pt")
    loaded = torch.load(tmp_path / "state.pt")
    torch.testing.assert_close(
        loaded["state"]["0.weight"]["momentum_buffer"].local,
        optimizer.state_dict()["state"]["0.weight"]["momentum_buffer"].local,
    )


def test_lazy_modules_are_named():
    with pytest.raises(ValueError, match=r"'weight' has no shape yet.*run a batch through the model first"):
        holmes.DistributedOptimizer(nn.LazyLinear(3), torch.optim.SGD, lr=0.1)


def test_parameters_without_values_are_named():
    with torch.device("meta"):
        model = nn.Linear(3, 3)
    with pytest.raises(ValueError, match=r"'weight' is on the meta device and has no values"):
        holmes.DistributedOptimizer(model, torch.optim.SGD, lr=0.1)


def test_a_parameter_that_is_given_twice_is_named():
    model = nn.Linear(3, 3)
    for params in (
        [*model.parameters(), model.bias],
        [{"params": model.parameters()}, {"params": [model.bias], "lr": 1.0}],
    ):
        with pytest.raises(ValueError, match=r"'bias' stands 2 times in params"):
            holmes.DistributedOptimizer(model, torch.optim.SGD, params=params, lr=0.1)


def test_models_are_compiled_with_gradients_that_were_stepped_with():
    model, optimizer = small()
    compiled = torch.compile(model, backend="eager")
    for step in range(3):
        optimizer.zero_grad()
        model.train()
        compiled(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        model.eval()
        with torch.no_grad():
            torch.testing.assert_close(compiled(torch.ones(1, 4)), model(torch.ones(1, 4)), msg=f"step {step}")
    assert model[0].weight.grad is not None


def test_an_overflow_is_skipped_and_halves_the_scale():
    model, optimizer = small(loss_scale="dynamic")
    before = [p.detach().clone() for p in model.parameters()]
    scale = optimizer.loss_scale
    optimizer.scale(model(torch.full((1, 4), float("inf"))).sum()).backward()
    optimizer.step()
    optimizer.zero_grad()
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert optimizer.loss_scale == scale / 2
    optimizer.scale(model(torch.ones(1, 4)).sum()).backward()
    optimizer.step()
    assert not torch.equal(before[0], model[0].weight)


@pytest.mark.parametrize("wrong", [0, -1.0, float("nan")])
def test_a_norm_that_clips_nothing_or_everything_is_refused(wrong):
    with pytest.raises(ValueError, match=f"max_grad_norm={wrong} must be above 0; None clips nothing"):
        small(max_grad_norm=wrong)


@pytest.mark.parametrize("wrong", [0, -1, 1.5])
def test_passes_that_cannot_be_counted_are_refused(wrong):
    with pytest.raises(ValueError, match=f"accumulation_steps={wrong} must be a whole number"):
        small(accumulation_steps=wrong)
    _, optimizer = small()
    with pytest.raises(ValueError, match=f"accumulation_steps={wrong} must be a whole number"):
        optimizer.accumulation_steps = wrong


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"max_grad_norm": "1"}, "max_grad_norm='1' must be above 0"),
        ({"loss_scale": "dynamik"}, "loss_scale='dynamik' must be above 0, or \"dynamic\""),
        ({"loss_scale": float("inf")}, "loss_scale=inf makes every loss infinite"),
        ({"bucket_bytes": 0}, "bucket_bytes=0 must be a whole number, 1 or more"),
        ({"bucket_bytes": "25"}, "bucket_bytes='25' must be a whole number"),
        ({"accumulation_steps": True}, "accumulation_steps=True must be a whole number"),
        ({"group": 5}, "group=5 must be a process group"),
        ({"gather_group": dist.GroupMember.NON_GROUP_MEMBER}, "gather_group: this rank is not in that group"),
        ({"norm_groups": [None, "dp"]}, r"norm_groups\[1\]='dp' must be a process group"),
        ({"params": []}, "there is no parameter to train"),
        ({"params": ["weight"]}, "params holds 'weight'; give parameters"),
    ],
)
def test_arguments_that_cannot_be_are_named(arguments, words):
    with pytest.raises(ValueError, match=words):
        small(**arguments)


def test_an_optimizer_in_place_of_its_class_is_named():
    model = nn.Linear(2, 2)
    with pytest.raises(ValueError, match="optimizer_class is a SGD that was made; give the class"):
        holmes.DistributedOptimizer(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(TypeError, match=r"model=None is a NoneType; give a torch.nn.Module"):
        holmes.DistributedOptimizer(None, torch.optim.SGD, lr=0.1)


@pytest.mark.parametrize("wrong", ["bf16", torch.int32, float])
def test_a_dtype_that_gradients_cannot_have_is_refused(wrong):
    with pytest.raises(ValueError, match=r"reduce_dtype=.* must be a floating-point torch.dtype"):
        small(reduce_dtype=wrong)


def test_trace_has_compute_lanes(tmp_path):
    model, optimizer = small()
    path = tmp_path / "trace.json"
    with optimizer.tracing(path):
        for _ in range(2):
            model(torch.ones(1, 4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    events = json.loads(path.read_text())["traceEvents"]
    names = {event["name"] for event in events}
    assert {"forward", "backward", "step 1", "step 2"} <= names
    assert optimizer.last_report.hidden_share == 1.0


def shared_memory() -> list[range]:
    """Of this process: the addresses that `holmes_comm.empty` gave."""
    lines = [line.split() for line in Path("/proc/self/maps").read_text().splitlines() if "memfd:holmes-buffer" in line]
    return [range(*(int(address, 16) for address in line[0].split("-"))) for line in lines]


@pytest.mark.parametrize("reduce_dtype", [None, torch.float32, torch.float64])
def test_gradients_of_all_buckets_share_one_array_that_ranks_can_read(reduce_dtype):
    kinds = [torch.float32, torch.bfloat16, torch.float32]
    trained = [Trained(str(i), torch.nn.Parameter(torch.ones(5, dtype=kind)), 0) for i, kind in enumerate(kinds)]
    sizes = [ParameterSize(t.tensor.numel(), t.tensor.element_size(), t.tensor.dtype) for t in trained]
    buckets = [bucket for i in range(3) for bucket in lay_out([i], sizes, 1, 2)]
    gc.collect()  # what other tests left
    before = len(shared_memory())
    gradients = gradient_memory(buckets, trained, reduce_dtype)
    assert [part.dtype for part in gradients] == [reduce_dtype or kind for kind in kinds]
    assert [len(part) for part in gradients] == [bucket.numel for bucket in buckets]
    assert all(part.data_ptr() % 64 == 0 and not part.any() for part in gradients)
    assert len(shared_memory()) == before + 1
    assert all(any(part.data_ptr() in place for place in shared_memory()) for part in gradients)
    for number, part in enumerate(gradients):
        part.fill_(number)
    assert [part._version for part in gradients] == [1, 1, 1]  # a change of one is none of the others
    assert [set(part.tolist()) for part in gradients] == [{0.0}, {1.0}, {2.0}]
    del part, gradients
    assert len(shared_memory()) == before


def test_a_group_whose_backend_tells_no_time_limit_has_torchs() -> None:
    written_in_python = dist.ProcessGroup(0, 1)
    assert timeout_of(written_in_python) is None
    assert timeout_of(written_in_python, torch.device("cpu")) is None
