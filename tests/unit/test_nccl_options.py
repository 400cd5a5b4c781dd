"""What people tell ProcessGroupNCCL, as the backend "holmes" takes it."""

import re
from types import SimpleNamespace

import pytest

from holmes_comm import NcclSettings, UsageError, nccl_options
from holmes_comm._C import env_variables
from holmes_comm.nccl_options import (
    is_torch_options,
    net_of,
    settings_of,
    variable_notes,
    variable_settings,
    waits_and_checks,
)

UNDEFINED = -(2**31)


def torch_options(is_high_priority_stream=False, **config):
    """As a ProcessGroupNCCL.Options, which a torch without CUDA has not."""
    fields = {name: UNDEFINED for name in ("blocking", "cga_cluster_size", "min_ctas", "max_ctas", "split_share")}
    fields |= {name: UNDEFINED for name in ("cta_policy", "nvls_ctas", "traffic_class")} | {"net_name": None, **config}
    return SimpleNamespace(is_high_priority_stream=is_high_priority_stream, config=SimpleNamespace(**fields))


def test_untouched_options_say_nothing():
    assert is_torch_options(torch_options())
    assert settings_of(torch_options()) == NcclSettings()
    assert settings_of(torch_options()).given() == {}


def test_what_was_set_is_taken():
    given = torch_options(True, blocking=0, min_ctas=2, max_ctas=8, cga_cluster_size=1, split_share=1)
    found = settings_of(given)
    assert found == NcclSettings(min_ctas=2, max_ctas=8, cga_cluster_size=1, high_priority=True, split_share=True)
    assert found.given() == {
        "min_ctas": 2,
        "max_ctas": 8,
        "cga_cluster_size": 1,
        "high_priority": True,
        "split_share": True,
    }


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"net_name": "Socket"}, "net_name='Socket': Holmes chooses"),
        ({"nvls_ctas": 4}, "nvls_ctas=4 is not known to Holmes"),
    ],
)
def test_what_cannot_be_heeded_is_refused(config, message):
    with pytest.raises(UsageError, match=message):
        settings_of(torch_options(**config))


def test_variables(monkeypatch):
    for name in ("TORCH_NCCL_BLOCKING_WAIT", "NCCL_BLOCKING_WAIT", "TORCH_NCCL_NAN_CHECK", "TORCH_NCCL_HIGH_PRIORITY"):
        monkeypatch.delenv(name, raising=False)
    assert waits_and_checks() == {"blocking_wait": False, "nan_check": False}
    assert variable_settings(NcclSettings(min_ctas=1)) == NcclSettings(min_ctas=1)
    monkeypatch.setenv("NCCL_BLOCKING_WAIT", "1")
    monkeypatch.setenv("TORCH_NCCL_NAN_CHECK", "true")
    monkeypatch.setenv("TORCH_NCCL_HIGH_PRIORITY", "1")
    assert waits_and_checks() == {"blocking_wait": True, "nan_check": True}
    assert variable_settings(NcclSettings(min_ctas=1)) == NcclSettings(min_ctas=1, high_priority=True)
    monkeypatch.setenv("TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC", "600")
    monkeypatch.setenv("NCCL_ASYNC_ERROR_HANDLING", "1")
    notes = "\n".join(variable_notes())
    assert "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC=600 is ProcessGroupNCCL's" in notes
    assert "NCCL_ASYNC_ERROR_HANDLING=1" in notes
    assert "BLOCKING_WAIT" not in notes


def test_what_torchrun_sets_is_not_the_users(monkeypatch):
    name = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setenv(name, "1")
    assert not any(name in note for note in variable_notes())
    monkeypatch.setenv(name, "3")
    assert any(f"{name}=3 is ProcessGroupNCCL's" in note for note in variable_notes())
    monkeypatch.delenv("TORCHELASTIC_RUN_ID")
    monkeypatch.setenv(name, "1")
    assert any(f"{name}=1 is ProcessGroupNCCL's" in note for note in variable_notes())


def test_what_carries_groups_on_ethernet(monkeypatch):
    monkeypatch.delenv("HOLMES_NCCL_NET", raising=False)
    assert net_of(None) == net_of(NcclSettings()) == "socket"
    assert net_of(NcclSettings(net="holmes")) == "holmes"
    assert NcclSettings(net="holmes", min_ctas=1).given() == {"min_ctas": 1}  # the engine is told by the profile
    monkeypatch.setenv("HOLMES_NCCL_NET", "holmes")
    assert net_of(None) == net_of(NcclSettings()) == "holmes"
    assert net_of(NcclSettings(net="socket")) == "socket"
    with pytest.raises(UsageError, match=r"NcclSettings.net='IB' is not allowed: it must be socket or holmes"):
        net_of(NcclSettings(net="IB"))
    monkeypatch.setenv("HOLMES_NCCL_NET", "")
    assert net_of(None) == "socket"
    monkeypatch.setenv("HOLMES_NCCL_NET", "Holmes")
    with pytest.raises(UsageError, match=r"HOLMES_NCCL_NET='Holmes' is not allowed"):
        net_of(None)


def test_notes_name_variables_that_there_are(monkeypatch):
    for name in nccl_options._INSTEAD:
        monkeypatch.setenv(name, "1")
    named = set(re.findall(r"HOLMES_\w+", "\n".join(variable_notes())))
    assert named
    assert named <= {variable.name for variable in env_variables()}
