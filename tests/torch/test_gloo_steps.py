"""Every step of gloo_steps on two ranks over Holmes and over Gloo: the same results, on this version of torch.

`make test-torch VERSIONS="..."` runs this for other versions, each in an environment of its own.
"""

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("torch.distributed")

from gloo_steps import GLOO_REFUSES, GLOO_REFUSES_BEFORE, STEPS  # noqa: E402
from torch_ranks import init, run_ranks  # noqa: E402

VERSION = tuple(int(part) for part in torch.__version__.split(".")[:2])


def plain(value):
    """Comparable and without torch's shared memory, which ends with the rank: tensors as type, shape and bytes."""
    if isinstance(value, torch.Tensor):
        whole = value.detach().resolve_conj().contiguous()
        return str(whole.dtype), tuple(whole.shape), whole.flatten().view(torch.uint8).numpy().tobytes()
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    return value


def run_step(rank, size, store, name, backend):
    init(store, rank, size, backend=backend)
    return plain(STEPS[name](rank, size))


def may_refuse(name):
    before, _ = GLOO_REFUSES_BEFORE.get(name, ((0, 0), ""))
    return name in GLOO_REFUSES or before > VERSION


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.filterwarnings("ignore")
def test_a_step_gives_what_it_gives_with_gloo(name, record_property):
    ours = run_ranks(run_step, 2, name, "holmes", timeout_s=60.0)
    try:
        theirs = run_ranks(run_step, 2, name, "gloo", timeout_s=60.0)
    except AssertionError:
        if not may_refuse(name):
            raise
        record_property("gloo", "refuses")
        return
    assert ours == theirs
