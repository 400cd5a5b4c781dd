"""torchft's Manager over Holmes: a process group that it may configure anew for each quorum, on NICs of its own.

    from holmes.training.integrations.torchft import ProcessGroupHolmes

    manager = Manager(pg=ProcessGroupHolmes(nics=NicSelection(nic_class="ethernet")), ...)

This module imports torchft, so the package `holmes.training.integrations` does not import it.
"""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist
from torchft.process_group import ProcessGroupWrapper

from holmes_comm import torch_backend
from holmes_comm.clusters import GroupOptions
from holmes_comm.nic_selection import NicSelection


class ProcessGroupHolmes(ProcessGroupWrapper):  # type: ignore[misc]  # torchft may be absent where types are checked
    """One replica's rank in a group over all replicas, in place of torchft's ProcessGroupGloo. CPU tensors.

    `nics`: as `pg_options` of `new_group`; None: the environment's. `timeout`: of `configure`, and of each operation.

    `configure` is collective over the ranks of a quorum; it aborts the group that was before, whose operations fail on
    every rank, and the later `configure` gives another one. An operation that fails breaks the group until the next
    `configure`; its work raises PeerLostError, TimeoutError or another CommunicatorError. All else is local.
    """

    def __init__(
        self, timeout: timedelta = timedelta(seconds=60), nics: NicSelection | GroupOptions | None = None
    ) -> None:
        super().__init__(timeout=timeout)
        self._nics = nics

    def getBackendName(self) -> str:  # torch's name
        """For torch."""
        return "torchft-holmes"

    def set_timeout(self, timeout: timedelta) -> None:
        """The deadline of later operations, and of setting up later groups."""
        super().set_timeout(timeout)
        if self._pg is not None:
            self._pg.set_timeout(timeout)

    def shutdown(self) -> None:
        """Closes the group, once what is under way has arrived; its peers' later operations with this rank fail."""
        if self._pg is not None:
            self._pg.shutdown()
        super().shutdown()

    def _create_pg(self, store: dist.Store, rank: int, world_size: int) -> dist.ProcessGroup:
        options = dist.distributed_c10d._DistributedBackendOptions()
        options.store, options.group_rank, options.group_size = store, rank, world_size
        options.timeout, options.group_id = self._timeout, f"torchft-{self._quorum_id or 0}"
        options.global_ranks_in_group = list(self._global_ranks or range(world_size))
        backend = torch_backend.create_backend(options, self._nics)
        group = dist.ProcessGroup(store, rank, world_size)
        group._set_default_backend(dist.ProcessGroup.BackendType.CUSTOM)
        group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.CUSTOM, backend)
        return group
