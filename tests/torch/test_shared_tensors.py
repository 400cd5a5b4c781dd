"""holmes_comm.shared_tensors: torch's own tensors in shared memory, and what is given back."""

import copy
import gc
import io
import os
import resource
import subprocess
import sys
import threading

import pytest

torch = pytest.importorskip("torch")
dist = pytest.importorskip("torch.distributed")

from torch import nn  # noqa: E402
from torch_ranks import init, run_ranks  # noqa: E402

import holmes_comm  # noqa: E402
from holmes_comm import UsageError  # noqa: E402

COUNT = 1 << 18  # float32: 1 MiB


def is_shared(tensor):
    """Whether the tensor's memory is a shared buffer's."""
    with open("/proc/self/maps") as file:
        for line in file:
            begin, end = (int(number, 16) for number in line.split()[0].split("-"))
            if begin <= tensor.data_ptr() < end:
                return "memfd:holmes-buffer" in line
    return False


def descriptors():
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


def test_tensors_of_the_block_are_shared_and_given_back():
    before = descriptors()
    small, large = torch.ones(COUNT - 1), torch.ones(COUNT)
    assert not is_shared(large)
    with holmes_comm.shared_tensors():
        small, large = torch.ones(COUNT - 1), torch.ones(COUNT)
        views, copies = large[10:], large.clone()
        made = [large * 2, torch.empty(0), torch.zeros(COUNT, dtype=torch.int64), nn.Linear(512, 512).weight]
    after = torch.ones(COUNT)
    assert [is_shared(one) for one in (small, large, views, copies, after)] == [False, True, True, True, False]
    assert [is_shared(one) for one in made] == [True, False, True, True]
    assert bool((made[0] == 2).all())
    assert not made[2].any()
    large += after
    assert bool((views == 2).all())
    del small, large, views, copies, made
    assert descriptors() == before


def test_blocks_in_blocks_and_threads():
    assert holmes_comm.shared_tensors is not None
    with holmes_comm.shared_tensors(min_bytes=4 << 20):
        assert not is_shared(torch.ones(COUNT))
        with holmes_comm.shared_tensors(), holmes_comm.shared_tensors(min_bytes=8 << 20):
            assert is_shared(torch.ones(COUNT))
        assert not is_shared(torch.ones(COUNT))
        assert is_shared(torch.ones(4 * COUNT))
        seen = []
        thread = threading.Thread(target=lambda: seen.append(is_shared(torch.ones(4 * COUNT))))
        thread.start()
        thread.join()
        assert seen == [True]
    with pytest.raises(ZeroDivisionError), holmes_comm.shared_tensors():
        _ = 1 // 0
    assert not is_shared(torch.ones(4 * COUNT))


@pytest.mark.parametrize("min_bytes", [0, -1, 1.5, "1", None, True])
def test_what_is_no_number_of_bytes_is_refused(min_bytes):
    with pytest.raises(UsageError, match=r"min_bytes=.* is no whole number of at least 1"):
        holmes_comm.shared_tensors(min_bytes).__enter__()
    assert not is_shared(torch.ones(COUNT))


def test_they_are_tensors_as_others():
    """Resized, saved and loaded, moved to other memory, deep-copied, and used in autograd."""
    with holmes_comm.shared_tensors():
        values = torch.arange(COUNT, dtype=torch.float32, requires_grad=True)
        resized = torch.ones(COUNT)
        lazy = torch._lazy_clone(resized)
    wanted = torch.arange(COUNT, dtype=torch.float32)
    resized.resize_(3 * COUNT)
    assert bool((resized[:COUNT] == 1).all())
    resized.untyped_storage().resize_(0)
    lazy[0] = 5
    assert lazy[:2].tolist() == [5, 1]
    (values * 2).sum().backward()
    assert bool((values.grad == 2).all())
    file = io.BytesIO()
    torch.save(values.detach(), file)
    file.seek(0)
    assert torch.equal(torch.load(file), wanted)
    assert torch.equal(copy.deepcopy(values.detach()), wanted)
    assert torch.equal(torch.from_numpy(values.detach().numpy().copy()), wanted)
    moved = values.detach().share_memory_()
    assert moved.is_shared()
    assert torch.equal(moved, wanted)


def test_most_descriptors_stay_for_others():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = descriptors()
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(256, 2 * used), hard))
    try:
        with holmes_comm.shared_tensors(min_bytes=4096):
            many = [torch.full((1024,), i) for i in range(1024)]
        assert descriptors() - used <= max(256, 2 * used) // 2
        assert [int(one[-1]) for one in many] == list(range(1024))
        assert is_shared(many[0])
        assert not is_shared(many[-1])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    del many
    assert descriptors() == used


def test_a_process_ends_with_them():
    program = (
        "import torch, holmes_comm, os\n"
        "torch.set_num_threads(1)  # its threads are not in the child\n"
        "with holmes_comm.shared_tensors():\n"
        "    kept = torch.ones(1 << 20)\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    kept += 1\n"
        "    del kept\n"
        "    os._exit(0)\n"
        "assert os.waitpid(child, 0)[1] == 0\n"
        "assert bool((kept == 1).all())\n"
        "holmes_comm.kept = kept\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


def test_without_torch_it_says_so():
    program = "import holmes_comm\nwith holmes_comm.shared_tensors(): pass"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 1
    assert "UsageError: shared_tensors: torch is not imported" in ended.stderr


def bucket_places(rank, size, store):
    from torch.nn.parallel import DistributedDataParallel

    init(store, rank, size)
    with holmes_comm.shared_tensors():
        model = DistributedDataParallel(
            nn.Sequential(nn.Linear(256, 2048), nn.Linear(2048, 256)), gradient_as_bucket_view=True
        )
        for _ in range(2):
            model(torch.ones(4, 256)).sum().backward()
    model.zero_grad(set_to_none=False)
    model(torch.ones(4, 256)).sum().backward()
    return [is_shared(one.grad) for one in model.parameters()]


def test_buckets_of_ddp_are_shared():
    assert run_ranks(bucket_places, 2) == [[True] * 4] * 2


def same_steps(rank, size, store):
    from torch.nn.parallel import DistributedDataParallel

    init(store, rank, size)

    def trained():
        torch.manual_seed(0)
        model = DistributedDataParallel(nn.Sequential(nn.Linear(256, 2048), nn.ReLU(), nn.Linear(2048, 256)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        for step in range(4):
            optimizer.zero_grad()
            generator = torch.Generator().manual_seed(10 * rank + step)
            model(torch.randn(4, 256, generator=generator)).square().mean().backward()
            optimizer.step()
        return [one.detach().clone() for one in model.parameters()]

    ordinary = trained()
    with holmes_comm.shared_tensors():
        shared = trained()
    return all(torch.equal(one, other) for one, other in zip(ordinary, shared, strict=True))


def test_training_gives_the_same_numbers():
    assert run_ranks(same_steps, 2) == [True, True]
