"""Checkpoints of a run: which one counts, which ones stay, and that no two layers share a name."""

import logging
import os
import pickle
import random
import re
import resource
import signal
from dataclasses import replace
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
dist = pytest.importorskip("torch.distributed")

from torch import nn  # noqa: E402
from torch_ranks import init, run_ranks  # noqa: E402

from holmes.training.recovery.checkpoints import Checkpoints  # noqa: E402
from holmes.training.recovery.errors import CheckpointError, FencedError, GenerationFailed  # noqa: E402
from holmes.training.recovery.generation import Generation  # noqa: E402
from holmes.training.recovery.member import Member  # noqa: E402
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


def names(folder):
    return sorted(path.name for path in folder.iterdir() if path.name.startswith("step"))


def test_an_earlier_generation_neither_commits_nor_removes(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=1)
    state = {"model": nn.Linear(2, 2).state_dict()}

    def save(step, generation):
        checkpoints.save(state, step, generation, True, lambda: checkpoints.check_claim(generation, "a", 0))

    checkpoints.claim(1, "a", 0)
    save(5, 1)
    checkpoints.claim(2, "a", 0)  # the others have gone on; whoever was cut off has not heard of it
    with pytest.raises(GenerationFailed, match="generation 2 has claimed"):
        save(10, 1)
    assert checkpoints.latest().name == "step-00000005-generation-0001"
    assert names(tmp_path) == ["step-00000005-generation-0001"]
    save(7, 2)
    late = tmp_path / "step-00000012-generation-0001"  # stopped between the check and the last rename
    late.mkdir()
    (late / ".metadata").touch()
    assert checkpoints.latest().name == "step-00000007-generation-0002"
    save(9, 2)
    assert names(tmp_path) == ["step-00000009-generation-0002"]


def test_who_is_fenced_while_it_writes_leaves_nothing(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    asked = []

    def may_write():
        asked.append(names(tmp_path))
        if len(asked) > 1:
            raise FencedError("another job claimed the folder")

    with pytest.raises(FencedError):
        checkpoints.save({"model": nn.Linear(2, 2).state_dict()}, 5, 1, True, may_write)
    assert asked == [[], ["step-00000005-generation-0001"]]
    assert names(tmp_path) == []


def test_a_folder_belongs_to_the_job_that_claimed_it_last(tmp_path):
    first, second = Checkpoints(tmp_path / "run"), Checkpoints(str(tmp_path / "other" / ".." / "run"))
    assert first.identity() == second.identity() != Checkpoints(tmp_path / "new").identity()
    first.claim(1, "a", 0)
    first.claim(2, "a", 0)
    floor = second.newest_generation()
    assert floor == 2
    second.claim(floor + 1, "b", floor)
    with pytest.raises(FencedError, match=r"another job claimed .* \(generation 3; this is 2 of job a\)"):
        first.check_claim(2, "a", 0)
    with pytest.raises(FencedError, match="two jobs train into one folder"):
        first.claim(4, "a", 0)
    with pytest.raises(FencedError):  # of two that begin at once with one number
        Checkpoints(tmp_path / "run").claim(floor + 1, "c", floor)


def generation_of(rank, size, folder, number, **options):
    plan = SimpleNamespace(data=size, world_size=size, global_batch=None)
    members = [Member(index + 1, index, f"n{index}") for index in range(size)]
    return Generation(number, members, rank, None, plan, Checkpoints(folder), 5, "holmes", lambda: False, **options)


def a_disk_that_is_full(rank, size, store, folder):
    init(store, rank, size)
    generation = generation_of(rank, size, folder, 1)
    torch.manual_seed(rank)  # of equal tensors only one rank would write
    model = nn.Linear(100, 100)
    generation.restore(name_of=lambda name: f"{rank}.{name}", model=model)
    generation.boundary()
    said = []
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    generation.step = 5
    generation.boundary()  # goes on
    assert generation.saved_step == 0
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    generation.step = 10
    generation.boundary()
    assert generation.saved_step == 10
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    for step in (15, 20):
        generation.step = step
        try:
            generation.boundary()
        except CheckpointError as error:
            said.append((step, str(error)))
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    return said


def test_a_rank_that_cannot_write_is_named_on_all_and_the_run_goes_on_once(tmp_path):
    for said in run_ranks(a_disk_that_is_full, 2, tmp_path):
        ((step, message),) = said
        assert step == 20
        assert "step-00000020-generation-0001 could not be written: rank 1 on n1: OSError: [Errno 27]" in message
    assert names(tmp_path) == ["step-00000000-generation-0001", "step-00000010-generation-0001"]


def an_interrupt(rank, size, store, folder):
    init(store, rank, size)
    generation = generation_of(rank, size, folder, 1)
    generation.restore(model=nn.Linear(2, 2))
    if rank == 1:
        signal.signal(signal.SIGALRM, signal.default_int_handler)
        torch.distributed.checkpoint.FileSystemWriter.write_data = lambda *_: os.kill(os.getpid(), signal.SIGALRM)
    try:
        generation.boundary()
    except (KeyboardInterrupt, GenerationFailed) as error:
        return f"{type(error).__name__} {error}".strip()


def test_an_interrupt_at_a_checkpoint_is_one_where_it_came_only(tmp_path):
    others, own = run_ranks(an_interrupt, 2, tmp_path)
    assert others == "GenerationFailed rank 1 on n1 ended by KeyboardInterrupt at a checkpoint"
    assert own == "KeyboardInterrupt"


def flip_bit(path, bit):
    data = bytearray(path.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)


def break_one(checkpoint, damage):
    """`bit`: one of the weight's, all elements of which are 10."""
    if damage == "bit":
        tens = torch.full((4,), 10.0).numpy().tobytes()
        (victim,) = (path for path in checkpoint.glob("*.distcp") if tens in path.read_bytes())
        flip_bit(victim, 8 * victim.read_bytes().index(tens) + 5)
        return
    victim = next(checkpoint.glob("*.distcp")) if damage != "metadata" else checkpoint / ".metadata"
    if damage == "gone":
        victim.unlink()
        return
    victim.write_bytes(victim.read_bytes()[:-200])


def a_corrupt_one(rank, size, store, folder, damage):
    init(store, rank, size)
    first = generation_of(rank, size, folder, 1)
    model = nn.Linear(4, 4)
    first.restore(model=model)
    for step in (5, 10):
        nn.init.constant_(model.weight, step)
        first.step = step
        first.boundary()
    dist.barrier()
    latest = Checkpoints(folder).latest()
    if rank == 0:
        break_one(latest, damage)
    dist.barrier()
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("holmes.training.recovery.generation").addHandler(handler)
    second = generation_of(rank, size, folder, 2)
    other = nn.Linear(4, 4)
    second.restore(model=other)
    assert other.weight.unique().tolist() == [5.0]
    assert second.step == second.saved_step == 5
    dist.barrier()
    (kept,) = Checkpoints(folder).complete()
    (kept / ".metadata").write_bytes(b"")
    dist.barrier()
    with pytest.raises(CheckpointError, match="could not be read") as caught:
        generation_of(rank, size, folder, 3).restore(model=other)
    return next(line for line in lines if "goes on from" in line), str(caught.value)


@pytest.mark.parametrize("damage", ["data", "metadata", "gone", "bit"])
def test_a_checkpoint_that_cannot_be_read_is_passed_over_with_a_warning(tmp_path, damage):
    for warning, error in run_ranks(a_corrupt_one, 2, tmp_path, damage):
        assert "step-00000010-generation-0001 could not be read: rank " in warning
        assert "goes on from" in warning
        assert "step-00000005-generation-0001, because" in warning
        assert "remove the folder's checkpoints" in error
        if damage == "bit":
            assert re.search(r"'model\.weight' in __\d_0\.distcp \(bytes \d+ to \d+\) has CRC-32 ", warning)
    assert names(tmp_path)[-1] == "step-00000010-generation-0001.unreadable"


@pytest.fixture
def saved(tmp_path):
    """A checkpoint of one process, and what loads it into zeros."""
    model = nn.Linear(8, 8)
    checkpoints = Checkpoints(tmp_path)
    path = checkpoints.save({"model": model.state_dict(), "step": 5}, 5, 1, True)

    def load():
        state = {"model": {name: torch.zeros_like(value) for name, value in model.state_dict().items()}, "step": 0}
        checkpoints.load(state, path)
        assert state["step"] == 5
        assert all(torch.equal(value, state["model"][name]) for name, value in model.state_dict().items())

    return path, load


def test_any_flipped_bit_of_what_was_written_is_found_and_its_file_named(saved):
    path, load = saved
    load()
    (file,) = path.glob("*.distcp")
    choice = random.Random(1)
    for _ in range(200):
        bit = choice.randrange(8 * file.stat().st_size)
        flip_bit(file, bit)
        with pytest.raises(CheckpointError, match=r"ChangedBytes: '[a-z.]+' in __0_0\.distcp .* has CRC-32"):
            load()
        flip_bit(file, bit)
    load()


def test_a_layout_or_manifest_that_was_changed_is_found(saved):
    path, load = saved
    metadata_file = path / ".metadata"
    written = metadata_file.read_bytes()
    metadata = pickle.loads(written)
    weight = metadata.state_dict_metadata["model.weight"]
    (whole,) = weight.chunks
    metadata.state_dict_metadata["model.weight"] = replace(weight, chunks=[replace(whole, sizes=torch.Size([4, 8]))])
    metadata_file.write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match=r"layout in \.metadata is not the one"):
        load()
    metadata_file.write_bytes(written)
    manifest = path / "checksums.json"
    manifest.write_text(manifest.read_text().replace("model.weight", "model.weighs"))
    with pytest.raises(CheckpointError, match=r"'model.weight' .* is in \.metadata and not in checksums\.json"):
        load()
    manifest.unlink()
    with pytest.raises(CheckpointError, match=r"checksums\.json"):
        load()
