"""The torch.distributed backend ``holmes``: CPU and CUDA tensors, every group on the NICs chosen for it.

``import torch`` registers it (entry point ``torch.backends``), so scripts that cannot be edited need no import::

    torch.distributed.init_process_group("holmes")  # CPU and CUDA tensors; or "cpu:holmes,cuda:nccl"
    group = torch.distributed.new_group(ranks, pg_options=NicSelection(...))

Collectives and point-to-point calls take what Gloo takes, and on CUDA tensors what NCCL takes (docs/nccl.md). Tensors
that are not contiguous go through a contiguous copy.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import hashlib
import re
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from holmes_comm import c10d_module, replace_gloo
from holmes_comm.errors import UsageError
from holmes_comm.nccl_options import (
    NcclSettings,
    is_torch_options,
    net_of,
    settings_of,
    variable_notes,
    variable_settings,
    waits_and_checks,
)

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from holmes_comm.clusters import GroupOptions
    from holmes_comm.nics import NicSelection

__all__ = [
    "NAME",
    "autoload",
    "connections",
    "create_backend",
    "device_descriptions",
    "group_options",
    "group_options_from",
    "nic_reason",
    "register",
]

NAME = "holmes"
_RETURN_S = 0.1
#: Of torch 2.13 and later.
_TORCHCOMMS = (
    "TORCH_DISTRIBUTED_USE_TORCHCOMMS=1 (torch.distributed.config.use_torchcomms) has torchcomms make and split groups "
    f"in place of '{NAME}'; unset it"
)
_choosers: list[Callable[[list[int]], NicSelection | GroupOptions | None]] = []
_options: dict[str, GroupOptions] = {}  # by the name of the group
_splits: weakref.WeakKeyDictionary[ProcessGroup, int] = weakref.WeakKeyDictionary()  # how often each was split
_turns: weakref.WeakKeyDictionary[ProcessGroup, threading.RLock] = weakref.WeakKeyDictionary()  # to start messages
_turns_lock = threading.Lock()
_splitting = threading.local()  # is_on: this thread is in split_group; is_out: its part of it is not NCCL's


@atexit.register
def _hold_threads() -> None:
    """Before the interpreter ends: a daemon thread that came back from a call after that would end the process by
    SIGABRT, as torch gives the interpreter's lock back in a destructor. Those on their way back get some time."""
    module = sys.modules.get("holmes_comm._c10d")
    if module is not None and threading.active_count() > 1:
        module.hold_other_threads()
        time.sleep(_RETURN_S)


def autoload() -> None:
    """Entry point that ``import torch`` calls: registers the backend; a failure is a warning, never an error. Local."""
    try:
        register()
    except Exception as error:
        warnings.warn(f"torch.distributed backend '{NAME}' is not available: {error!r}", RuntimeWarning, stacklevel=2)


def register() -> None:
    """Makes ``holmes`` known to torch.distributed, once; does nothing where torch has no distributed. Local."""
    import torch.distributed as dist

    if not dist.is_available() or NAME.upper() in dist.Backend._plugins:
        return
    dist.Backend.register_backend(NAME, create_backend, extended_api=True, devices=["cpu", "cuda"])
    _extend("monitored_barrier", _monitored_barrier)
    _extend("_set_pg_timeout", _set_pg_timeout)
    _extend("split_group", _split_group)
    _extend("_coalescing_manager", _coalescing_manager)
    _extend("_new_process_group_helper", _new_process_group_helper)
    replace_gloo.install()


def connections(group: ProcessGroup | None = None) -> list[dict[str, Any]]:
    """What each connection of ``group`` (default: the world) really uses; one dict per connection. Local.

    Keys: peer (group rank), host, transport ("tcp", "shm", "rdma"), purpose, interface, local_address, remote_address,
    device_bound, retired, path ("inter": to a rank of another cluster, or a far one where no clusters are named; else
    "intra"), sent_bytes, received_bytes, retransmitted_segments, resent_chunks, round_trip_us, busy_us (how long bytes
    waited to be sent or acknowledged), receiver_limited_us and buffer_limited_us (of that, while the peer did not read,
    while the send buffer was full), stalls (inter: how often bytes were under way and none arrived for 0.3 s, or three
    round trips if that is longer), stalled_us (in all), path_bytes_per_s (what a far path carries, all that share it
    together, while more is to be sent than it takes; 0: not known), path_changes (how often that became another rate),
    encryption ("" where there is none). Raises UsageError where the group's CPU backend is not holmes.
    """
    rows: list[dict[str, Any]] = _backend(group).connections()
    return rows


def device_descriptions(group: ProcessGroup | None = None) -> list[str]:
    """NCCL's version, library, NICs and the reason of each NCCL communicator that ``group`` has needed so far. Local.

    One for the group's collectives, one for each peer of single sends and receives. Raises UsageError where the group's
    backend is not holmes.
    """
    texts: list[str] = _backend(group).device_descriptions
    return texts


def nic_reason(group: ProcessGroup | None = None) -> str:
    """Why ``group`` (default: the world) is on its NICs, in a sentence. Local.

    Raises UsageError where the group's backend is not holmes.
    """
    reason: str = _backend(group).nic_reason
    return reason


@contextlib.contextmanager
def group_options_from(chooser: Callable[[list[int]], NicSelection | GroupOptions | None]) -> Iterator[None]:
    """While it is open, a group that is made without pg_options gets those that ``chooser(global_ranks)`` returns: for
    trainers that make their groups themselves. Local: each rank opens it, with a chooser that names its own NICs.

    ``global_ranks`` come in group-rank order; None leaves the choice to the environment. Holds for all threads of the
    process; the innermost one counts.
    """
    _choosers.append(chooser)
    try:
        yield
    finally:
        _choosers.remove(chooser)


def group_options(group: ProcessGroup | None = None) -> GroupOptions:
    """What ``group`` (default: the world) was told to use, as the pg_options of another group on the same NICs. Local.

    Raises UsageError where the group's backend is not holmes.
    """
    from holmes_comm.clusters import GroupOptions

    return _options.get(_backend(group).options.group_name) or GroupOptions()


def create_backend(options: Any, pg_options: Any) -> Any:
    """The backend of one group, as torch's creator function: agrees on the NICs, then connects. Collective over it.

    ``options``: torch's _DistributedBackendOptions; ``pg_options``: NicSelection, GroupOptions or None. Raises what
    agreeing and connecting raise.
    """
    from holmes_comm.metrics_server import start_from_environment

    c10d_module.load()
    start_from_environment()
    rank, size = options.group_rank, options.group_size
    if rank == 0:
        _tell_of_variables()
    if pg_options is None:
        # torch lists no ranks for the default group: it has all of them.
        pg_options = _chosen(list(options.global_ranks_in_group) or list(range(size)))
    return _connect(
        options.store,
        rank,
        size,
        options.group_id,
        options.timeout,
        list(options.global_ranks_in_group),
        _group_options_of(pg_options),
    )


@functools.cache
def _tell_of_variables() -> None:
    """Once in a process: which variables of ProcessGroupNCCL change nothing here, and what to set in their place."""
    for note in variable_notes():
        warnings.warn(note, RuntimeWarning, stacklevel=3)


def _chosen(global_ranks: list[int]) -> NicSelection | GroupOptions | None:
    """What the innermost group_options_from says of a group that is made without pg_options."""
    return _choosers[-1](global_ranks) if _choosers else None


def _group_options_of(pg_options: Any) -> GroupOptions:
    from holmes_comm.clusters import GroupOptions
    from holmes_comm.nics import NicSelection

    if is_torch_options(pg_options):
        return GroupOptions(nccl=settings_of(pg_options))
    asked = GroupOptions(pg_options) if isinstance(pg_options, NicSelection) or pg_options is None else pg_options
    if not isinstance(asked, GroupOptions):
        raise UsageError(
            f"pg_options is a {type(asked).__name__}; the {NAME} backend takes a NicSelection, GroupOptions, "
            "ProcessGroupNCCL.Options or None"
        )
    return asked


def _connect(
    group_store: Any,
    rank: int,
    size: int,
    name: str,
    timeout: timedelta,
    global_ranks: list[int],
    asked: GroupOptions,
) -> Any:
    """The ProcessGroupHolmes of a group. Collective over its ranks."""
    import torch.distributed as dist

    from holmes_comm import process_end  # noqa: F401 - importing it is what it is for
    from holmes_comm._C import CommunicatorOptions, log_nics
    from holmes_comm.clusters import agree_membership
    from holmes_comm.nics import NicSelection

    selection = asked.nics if asked.nics is not None else NicSelection.from_env()
    made_of = asked.engine_options()
    if made_of.timeout_s != CommunicatorOptions().timeout_s:
        raise UsageError(
            f"options.timeout_s={made_of.timeout_s:g} says nothing to a process group, whose deadline is torch's; give "
            "timeout= to init_process_group or new_group"
        )
    if made_of.transport == "auto":
        made_of.transport = selection.transport
    made_of.rank, made_of.size, made_of.name = rank, size, name
    made_of.timeout_s = timeout.total_seconds()
    made_of.connect_timeout_s = min(made_of.timeout_s, made_of.connect_timeout_s)
    # A store may outlive a group of this name, and the next one may have another size: every `size` arrivals at a size
    # are one incarnation, with keys of its own.
    arrivals = f"{NAME}/{size}/arrivals"
    incarnation = (group_store.add(arrivals, 1) - 1) // size
    store = dist.PrefixStore(f"{NAME}/{size}/{incarnation}", group_store)
    try:
        _options[name] = asked
        membership = agree_membership(
            store,
            made_of,
            selection,
            asked.cluster,
            asked.cluster_nics,
            key_prefix="nics",
        )
        membership.settle(made_of)
        if made_of.job_rank is None:
            made_of.job_rank = global_ranks[rank] if global_ranks else rank
        log_nics(made_of, membership.reason)
        return c10d_module.load().ProcessGroupHolmes(
            store,
            made_of,
            global_ranks=global_ranks,
            nic_reason=membership.reason,
            # Connected when a rank first needs it: the others come as late as an operation may take.
            agree_device=functools.partial(_agree_device, store, selection, asked, made_of.timeout_s),
            split=functools.partial(_split, group_store, rank, name, global_ranks or list(range(size)), asked),
            nccl_settings=variable_settings(asked.nccl or NcclSettings()).given(),
            **waits_and_checks(),
        )
    except Exception:
        # Somebody never came: not counting this attempt lets the next one meet him.
        if group_store.add(arrivals, 0) < (incarnation + 1) * size:
            group_store.add(arrivals, -1)
        raise


def _split(
    group_store: Any,
    rank: int,
    name: str,
    global_ranks: list[int],
    asked: GroupOptions,
    members: list[int],
    timeout: timedelta,
) -> tuple[Any, bool]:
    """The group of `members` of group `name` of `global_ranks`, in which this is `rank`; without a chooser it has that
    group's options. Collective over `members`; ProcessGroupHolmes calls it.

    Second: whether its NCCL communicator is split from that group's. They meet in that group's store: torch's name for
    the new group, and so its store, has the number of groups that a rank is in, which differs between ranks.
    """
    import torch.distributed as dist

    ranks = [global_ranks[member] for member in members]
    options = _group_options_of(_chosen(ranks)) if _choosers else asked
    inherits = getattr(_splitting, "is_on", False) and options == asked
    part = f"split/{','.join(map(str, members))}"
    store = dist.PrefixStore(part, group_store)
    group = _connect(store, members.index(rank), len(members), f"{name}/{part}", timeout, ranks, options)
    if getattr(_splitting, "is_on", False) and not inherits:
        _splitting.is_out = True
    return group, inherits


def _agree_device(
    store: Any, selection: NicSelection | None, asked: GroupOptions, timeout_s: float, name: str, rank: int, size: int
) -> tuple[Any, ...]:
    """What an NCCL communicator of a group may use. Collective over its ``size`` ranks; ProcessGroupHolmes calls it."""
    from holmes_comm.clusters import bindings
    from holmes_comm.nccl_agreement import agree_nccl, nccl_package_paths

    agreement = agree_nccl(
        store,
        rank,
        size,
        selection,
        timeout_s=timeout_s,
        key_prefix=f"nccl/{name}",
        variables=asked.nccl_variables,
        secret=asked.options.secret if asked.options is not None else "",
        net=net_of(asked.nccl),
    )
    profile = agreement.profile
    return (
        profile.net,
        profile.hcas,
        profile.interfaces,
        profile.gid_index,
        profile.variables,
        profile.host_id,
        bindings(agreement.nics),
        nccl_package_paths(),
    )


def _find_backend(group: ProcessGroup | None) -> Any:
    """The group's ProcessGroupHolmes, that of CPU tensors before that of CUDA tensors; None where it has none."""
    import torch
    import torch.distributed as dist

    pg = group if group is not None else dist.distributed_c10d._get_default_group()
    if not isinstance(pg, dist.ProcessGroup):
        return None
    for device in (torch.device("cpu"), torch.device("cuda")):
        if device not in pg._device_types:
            continue
        backend = pg._get_backend(device)
        backend = getattr(backend, "wrapped_pg", backend)  # TORCH_DISTRIBUTED_DEBUG=DETAIL wraps it
        if backend.name() == NAME:
            return backend
    return None


def _backend(group: ProcessGroup | None) -> Any:
    backend = _find_backend(group)
    if backend is None:
        raise UsageError(f"this group's backend is not '{NAME}'; make it with backend='{NAME}' or 'cpu:{NAME}'")
    return backend


def _extend(name: str, function: Any) -> None:
    """Puts ``function`` before torch's own ``name``, which knows the built-in backends by name only."""
    import torch.distributed as dist

    original = getattr(dist.distributed_c10d, name)
    wrapper = functools.wraps(original)(functools.partial(function, original))
    for module in (dist.distributed_c10d, dist, dist.device_mesh):
        if getattr(module, name, None) is original:
            setattr(module, name, wrapper)


def _monitored_barrier(
    original: Any,
    group: ProcessGroup | None = None,
    timeout: timedelta | float | None = None,
    wait_all_ranks: bool = False,
) -> None:
    """As torch.distributed.monitored_barrier. Every rank that arrived raises TimeoutError naming all that did not."""
    backend = _find_backend(group)
    if backend is None:
        original(group, timeout, wait_all_ranks)
        return
    if timeout is None:
        timeout = backend.options._timeout
    elif not isinstance(timeout, timedelta):
        timeout = timedelta(seconds=timeout)
    import torch.distributed as dist

    pg: Any = group if group is not None else dist.distributed_c10d._get_default_group()
    pg.monitored_barrier(timeout, wait_all_ranks=wait_all_ranks)


def _set_pg_timeout(original: Any, timeout: timedelta, group: ProcessGroup | None = None) -> None:
    """As torch's: the deadline of later operations of ``group`` that give none."""
    import torch
    import torch.distributed as dist

    backend = _find_backend(group)
    if backend is not None:
        backend.set_timeout(timeout)
    pg: Any = group if group is not None else dist.distributed_c10d._get_default_group()
    others = [device for device in pg._device_types if pg._get_backend(device).name() != NAME]
    if backend is None or torch.device("cuda") in others:
        original(timeout, group)


@contextlib.contextmanager
def _coalescing_manager(original: Any, group: ProcessGroup | None = None, *args: Any, **kwargs: Any) -> Iterator[Any]:
    """As torch's, in which batch_isend_irecv runs too; a block that ends in an exception is over.

    With torch's it stays open: what is called later on the group becomes part of it, and never runs (docs/upstream.md).
    Threads that call batch_isend_irecv on a group take turns: torch has one place for all their blocks.
    """
    import torch.distributed as dist

    has_begun = False
    pg: Any = group if group is not None else dist.distributed_c10d._get_default_group()
    turn: Any = contextlib.nullcontext()
    if kwargs.get("async_ops", False) and isinstance(
        pg, dist.ProcessGroup
    ):  # it ends at once; in others their end is waited for
        with _turns_lock:
            turn = _turns.setdefault(pg, threading.RLock())
    try:
        with turn, original(group, *args, **kwargs) as manager:
            has_begun = True
            yield manager
    except BaseException:
        backend = _find_backend(group) if has_begun else None
        if backend is not None:
            c10d: Any = dist.distributed_c10d
            c10d._world.pg_coalesce_state.pop(pg, None)
            backend.drop_coalescing()
        raise


def _new_process_group_helper(
    original: Any, size: int, rank: int, ranks: Any, backend: Any, *args: Any, **kw: Any
) -> Any:
    """As torch's, which makes every group; refuses a switch of torch that would never call Holmes."""
    import torch.distributed as dist

    # torch 2.13 gives torchcomms every group, later ones those that it says it can make.
    takes = getattr(dist.distributed_c10d, "_torchcomms_handles_backend", lambda name: True)
    if NAME in re.split("[:,]", str(backend).lower()) and _is_torchcomms_on() and takes(NAME):
        raise UsageError(_TORCHCOMMS)
    return original(size, rank, ranks, backend, *args, **kw)


def _is_torchcomms_on() -> bool:
    """Whether torchcomms is here and torch is told to use it."""
    import torch.distributed as dist

    is_on = getattr(dist.distributed_c10d, "_use_torchcomms_enabled", None)
    return is_on is not None and bool(is_on())


def _split_group(
    original: Any,
    parent_pg: ProcessGroup | None = None,
    split_ranks: Any = None,
    timeout: timedelta | None = None,
    pg_options: Any = None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """As torch.distributed.split_group; pg_options may be those of new_group: a NicSelection or GroupOptions."""
    import torch.distributed as dist
    from torch._C._distributed_c10d import Backend

    if _find_backend(parent_pg) is None:
        return original(parent_pg, split_ranks, timeout, pg_options, *args, **kwargs)
    is_bound = getattr(dist.distributed_c10d._get_default_group(), "bound_device_id", None) is not None
    is_asked_for = getattr(getattr(dist, "config", None), "use_torchcomms", False)
    if _is_torchcomms_on() or (is_asked_for and not is_bound):
        raise UsageError(_TORCHCOMMS)
    # All ranks of the parent are here, and all take part where NCCL splits.
    _splitting.is_on, _splitting.is_out = True, False
    try:
        with _names_of_splits(parent_pg):
            if pg_options is None or isinstance(pg_options, Backend.Options):
                group = original(parent_pg, split_ranks, timeout, pg_options, *args, **kwargs)
            else:
                asked = _group_options_of(pg_options)
                with group_options_from(lambda ranks: asked):
                    group = original(parent_pg, split_ranks, timeout, None, *args, **kwargs)
        if group is dist.GroupMember.NON_GROUP_MEMBER or group is None or _splitting.is_out:
            _backend(parent_pg).stay_out_of_split()
    finally:
        _splitting.is_on = False
    return group


@contextlib.contextmanager
def _names_of_splits(parent: ProcessGroup | None) -> Iterator[None]:
    """Around a split of a group that not all ranks are in, so that the names of the job's later groups stay the same.

    torch 2.15 takes the name of a split, and of every group after it, from a count of groups on this rank: after a
    split of some ranks only, the next group of all has two names and waits for itself, over any backend
    (docs/upstream.md). Here the parent's ranks count its splits by themselves.
    """
    import torch.distributed as dist

    if parent is None or parent.size() == dist.get_world_size():
        yield
        return
    world: Any = dist.distributed_c10d._world
    count = world.group_count
    _splits[parent] = _splits.get(parent, 0) + 1
    name = hashlib.sha256(f"{parent.group_name}/{_splits[parent]}".encode())
    world.group_count = int(name.hexdigest(), 16)  # torch hashes it with the ranks
    try:
        yield
    finally:
        world.group_count = count
