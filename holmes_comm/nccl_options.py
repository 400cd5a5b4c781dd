"""What may be said to NCCL for each communicator, and what people tell ProcessGroupNCCL, its ``Options`` and
TORCH_NCCL_* variables, as the backend ``holmes`` takes them."""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass
from typing import Any

from holmes_comm.errors import UsageError

__all__ = [
    "NcclSettings",
    "is_torch_options",
    "net_of",
    "settings_of",
    "variable_notes",
    "variable_settings",
    "waits_and_checks",
]


@dataclass(frozen=True)
class NcclSettings:
    """Of one communicator on NCCL, alike on all its ranks; None: NCCL's choice. What its version lacks is refused.

    min_ctas, max_ctas: thread blocks that its kernels take. cga_cluster_size: of these, how many are one cluster.
    cta_policy: NCCL_CTA_POLICY_*, 2.27 and later. traffic_class: of its network's packets, 2.26 and later. comm_name:
    in NCCL's messages, 2.27 and later. high_priority: asynchronous operations run on a stream of the highest priority.
    split_share: what is split from it uses its connections and memory; a split that fails may then end it too.
    net: where its NICs are Ethernet, "socket" (NCCL's own) or "holmes" (Holmes as NCCL's network plugin: NCCL 2.28 and
    later, with NCCL_NET_PLUGIN=holmes); "": what HOLMES_NCCL_NET says, else "socket".
    """

    min_ctas: int | None = None
    max_ctas: int | None = None
    cga_cluster_size: int | None = None
    cta_policy: int | None = None
    traffic_class: int | None = None
    comm_name: str = ""
    high_priority: bool = False
    split_share: bool = False
    net: str = ""

    def given(self) -> dict[str, Any]:
        """What differs from the default, as the engine takes it; `net` is for what the ranks agree on before."""
        default = NcclSettings()
        return {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
            if field.name != "net" and getattr(self, field.name) != getattr(default, field.name)
        }


_UNDEFINED = -(2**31)  # NCCL_CONFIG_UNDEF_INT: NCCL's own choice
#: Fields of ncclConfig_t with ours of the same name.
_FIELDS = ("min_ctas", "max_ctas", "cga_cluster_size", "cta_policy", "traffic_class", "comm_name", "split_share")
_NETS = ("socket", "holmes")
#: What means nothing here: whether calls block (they never block longer than the deadline).
_NEEDLESS = ("blocking",)
_ON = ("1", "y", "yes", "t", "true", "on")
#: Variables of ProcessGroupNCCL that Holmes does not read, and what it does or has in their place.
_INSTEAD = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "a failed operation raises in the next wait or call and ends no process",
    "TORCH_NCCL_PROPAGATE_ERROR": "a failure is told to all ranks of the group, always",
    "TORCH_NCCL_ENABLE_MONITORING": "the watchdog never calls what may hang, so that nobody needs to watch it",
    "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": "the watchdog never calls what may hang, so that nobody needs to watch it",
    "TORCH_NCCL_DESYNC_DEBUG": "`holmes debug` shows who waits for whom, in what",
    "TORCH_NCCL_TRACE_BUFFER_SIZE": "operations are always recorded; HOLMES_FLIGHT_RECORDER says how many",
    "TORCH_FR_BUFFER_SIZE": "operations are always recorded; HOLMES_FLIGHT_RECORDER says how many",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "set HOLMES_FLIGHT_RECORDER_DIR: every failure is written there",
    "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": "set HOLMES_FLIGHT_RECORDER_DIR: every failure is written there",
    "TORCH_NCCL_ENABLE_TIMING": "the flight record has the host's times, of an end when it is seen",
    "TORCH_NCCL_USE_COMM_NONBLOCKING": "calls never block longer than the deadline",
    "TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK": "register a MemPool: backend.register_mem_pool(pool)",
    "TORCH_NCCL_AVOID_RECORD_STREAMS": "no operation records streams",
}
#: torchrun gives it to every worker, as 1 where the user has not said otherwise.
_TORCHRUNS = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
_OLD_NAMES = ("NCCL_ASYNC_ERROR_HANDLING", "NCCL_DESYNC_DEBUG", "NCCL_ENABLE_TIMING")


def is_torch_options(pg_options: Any) -> bool:
    """Whether it is a ProcessGroupNCCL.Options (a torch without CUDA has no such class). Local."""
    return hasattr(pg_options, "is_high_priority_stream") and hasattr(pg_options, "config")


def settings_of(pg_options: Any) -> NcclSettings:
    """What a ProcessGroupNCCL.Options says. Raises UsageError for what Holmes decides or does not know. Local."""
    found: dict[str, Any] = {"high_priority": bool(pg_options.is_high_priority_stream)}
    config = pg_options.config
    for name in (name for name in dir(config) if not name.startswith("_")):
        value = getattr(config, name)
        if callable(value) or value is None or value == _UNDEFINED or value == "" or name in _NEEDLESS:
            continue
        if name == "net_name":
            raise UsageError(
                f"ProcessGroupNCCL.Options().config.net_name={value!r}: Holmes chooses NCCL's network for each group; "
                "leave it out, and pass a NicSelection to say which NICs"
            )
        if name not in _FIELDS:
            raise UsageError(
                f"ProcessGroupNCCL.Options().config.{name}={value!r} is not known to Holmes; leave it out, or set "
                "NCCL's variable for the group: GroupOptions(nccl_variables={...})"
            )
        found[name] = bool(value) if name == "split_share" else value
    return NcclSettings(**found)


def net_of(settings: NcclSettings | None) -> str:
    """Whether "socket" or "holmes" carries a group on Ethernet: the settings, else HOLMES_NCCL_NET. Raises UsageError.
    Local.
    """
    given, of = (settings.net, "NcclSettings.net") if settings is not None else ("", "")
    if not given:
        given, of = os.environ.get("HOLMES_NCCL_NET", "") or "socket", "HOLMES_NCCL_NET"
    if given not in _NETS:
        raise UsageError(f"{of}={given!r} is not allowed: it must be {' or '.join(_NETS)}; leave it out for sockets")
    return given


def variable_settings(settings: NcclSettings) -> NcclSettings:
    """With what TORCH_NCCL_HIGH_PRIORITY says. Local."""
    return dataclasses.replace(settings, high_priority=True) if _is_on("TORCH_NCCL_HIGH_PRIORITY") else settings


def waits_and_checks() -> dict[str, bool]:
    """What TORCH_NCCL_BLOCKING_WAIT and TORCH_NCCL_NAN_CHECK say, as arguments of ProcessGroupHolmes. Local."""
    waits = _is_on("TORCH_NCCL_BLOCKING_WAIT") or _is_on("NCCL_BLOCKING_WAIT")
    return {"blocking_wait": waits, "nan_check": _is_on("TORCH_NCCL_NAN_CHECK")}


def variable_notes() -> list[str]:
    """A sentence for each variable of ProcessGroupNCCL that is set here and that Holmes does not read. Local."""
    names = {name: instead for name, instead in _INSTEAD.items() if name in os.environ}
    if "TORCHELASTIC_RUN_ID" in os.environ and os.environ.get(_TORCHRUNS) == "1":
        del names[_TORCHRUNS]
    names |= {old: _INSTEAD[f"TORCH_{old}"] for old in _OLD_NAMES if old in os.environ}
    return [
        f"{name}={os.environ[name]} is ProcessGroupNCCL's and changes nothing for the backend holmes: {instead}"
        for name, instead in names.items()
    ]


def _is_on(variable: str) -> bool:
    return os.environ.get(variable, "").strip().lower() in _ON
