"""Holmes through its own Python API as a peer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import holmes_comm
from holmes.tools.bench.operations import Array, Case, cut
from holmes.tools.bench.peer import Context, Peer, PeerError


def path_of(connections: list[dict[str, Any]]) -> str:
    """As `Peer.path`, of connections as a communicator lists them; "-" where there is nobody to connect to."""
    return "+".join(sorted({each["transport"] for each in connections if each["purpose"] != "control"})) or "-"


class HolmesPeer(Peer):
    """One holmes_comm communicator over all ranks."""

    def __init__(self, transport: str, nics: str | None) -> None:
        """`transport` is one of TRANSPORTS; `nics` is a selection as NicSelection.parse reads it."""
        self.name = f"holmes[{nics}]" if nics else "holmes"
        self._transport = transport
        self._nics = nics
        self._communicator: Any = None

    @property
    def path(self) -> str:
        """Of the communicator's connections."""
        return path_of(self._communicator.connections())

    def setup(self, context: Context) -> None:
        """Connects the ranks over the selected NICs."""
        try:
            self._communicator = holmes_comm.init(
                context.store,
                context.rank,
                context.ranks,
                nics=holmes_comm.NicSelection.parse(self._nics) if self._nics else None,
                transport=self._transport,
                timeout_s=context.timeout_s,
                name=f"bench-{self.name}",
            )
        except holmes_comm.HolmesError as error:
            raise PeerError(f"{self.name}: {error}") from error

    def prepare(self, case: Case, source: Array, output: Array) -> Callable[[], None]:
        """Returns the communicator's call on the arrays; bfloat16 travels as torch tensors of the same memory."""
        inputs: Any = source
        outputs: Any = output
        if case.dtype.torch_only:
            import torch

            inputs = torch.from_numpy(source).view(torch.bfloat16)
            outputs = torch.from_numpy(output).view(torch.bfloat16)
        communicator, op = self._communicator, case.op
        following, previous = (case.rank + 1) % case.ranks, (case.rank - 1) % case.ranks

        shares, name = case.parts(), case.operation.name
        # Lists of parts, where an operation takes one.
        if name == "all_gatherv" or (case.rank == 0 and name in ("gather", "gatherv")):
            outputs = cut(outputs, shares)
        if case.rank == 0 and name == "scatterv":
            inputs = cut(inputs, shares)
        at_root = case.rank == 0
        messages: list[tuple[str, Any, int, int]] = []
        if name == "batch":
            for into, of in zip(cut(outputs, case.pieces()), cut(inputs, case.pieces()), strict=True):
                messages += [("recv", into, previous, 0), ("send", of, following, 0)]

        def batch() -> None:
            communicator.batch(messages, async_op=False)

        def send() -> None:
            if case.rank == 0:
                communicator.send(inputs, 1)
            elif case.rank == 1:
                communicator.recv(outputs, 0)

        def ping_pong() -> None:
            if case.rank == 0:
                communicator.send(inputs, 1)
                communicator.recv(outputs, 1)
            elif case.rank == 1:
                communicator.recv(outputs, 0)
                communicator.send(inputs, 0)

        calls: dict[str, Callable[[], Any]] = {
            "all_reduce": lambda: communicator.all_reduce(inputs, op),
            "reduce_scatter": lambda: communicator.reduce_scatter(outputs, inputs, op),
            "all_gather": lambda: communicator.all_gather(outputs, inputs),
            "all_to_all": lambda: communicator.all_to_all(outputs, inputs),
            "broadcast": lambda: communicator.broadcast(inputs, 0),
            "reduce": lambda: communicator.reduce(inputs, 0, op),
            "gather": lambda: communicator.gather(inputs, outputs if at_root else None, 0),
            "scatter": lambda: communicator.scatter(outputs, inputs if at_root else None, 0),
            "all_gatherv": lambda: communicator.all_gather(outputs, inputs),
            "all_to_allv": lambda: communicator.all_to_all(outputs, inputs, shares, shares),
            "gatherv": lambda: communicator.gather(inputs, outputs if at_root else None, 0),
            "scatterv": lambda: communicator.scatter(outputs, inputs if at_root else None, 0),
            "send": send,
            "send_recv": lambda: communicator.sendrecv(inputs, following, outputs, previous),
            "batch": batch,
            "ping_pong": ping_pong,
            "barrier": lambda: communicator.barrier(),
        }
        return calls[name]

    def describe(self) -> dict[str, Any]:
        """Returns the version and, for this rank, the transport and interface of every connection."""
        paths = sorted({(each["transport"], each["interface"]) for each in self._communicator.connections()})
        return {
            "holmes_comm": holmes_comm.__version__,
            "paths": [{"transport": transport, "interface": interface} for transport, interface in paths],
        }

    def teardown(self) -> None:
        """Drops the communicator."""
        self._communicator = None
