"""torch.distributed as a peer: Gloo, and Holmes through its c10d backend, over the same calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from holmes.tools.bench.operations import Array, Case, cut
from holmes.tools.bench.peer import Context, Peer, PeerError
from holmes.tools.bench.peer_holmes import path_of

_REDUCE_OPS = {
    "sum": "SUM",
    "avg": "AVG",
    "min": "MIN",
    "max": "MAX",
    "product": "PRODUCT",
    "band": "BAND",
    "bor": "BOR",
    "bxor": "BXOR",
}


class TorchPeer(Peer):
    """A torch.distributed backend. Its group is made beside others in one process, the first one is the default."""

    def __init__(self, backend: str, name: str | None = None, options: Any = None) -> None:
        """`options` is passed as pg_options to the group (a NIC selection for Holmes)."""
        self.name = name or backend
        self._backend = backend
        self._options = options
        self._group: Any = None

    def setup(self, context: Context) -> None:
        """Joins the default group, which torch wants first, and makes this backend's own group."""
        try:
            import datetime

            import torch.distributed as dist
        except ImportError as error:
            raise PeerError(f"{self.name} needs torch, which is not importable ({error}); pip install torch") from error
        timeout = datetime.timedelta(seconds=context.timeout_s)
        if not dist.is_initialized():
            store = dist.PrefixStore("default", context.store)
            dist.init_process_group("gloo", store=store, rank=context.rank, world_size=context.ranks, timeout=timeout)
        try:
            self._group = dist.new_group(backend=self._backend, timeout=timeout, pg_options=self._options)
        except Exception as error:  # each backend raises its own kinds
            raise PeerError(f"{self.name}: {error}") from error

    @property
    def path(self) -> str:
        """Gloo has only TCP, also between ranks of one host."""
        if self._backend != "holmes":
            return "tcp"
        from holmes_comm.torch_backend import connections

        return path_of(connections(self._group))

    def unsupported(self, case: Case) -> str | None:
        """Gloo does not reduce int16 and has equal parts in all but all_to_all."""
        if self._backend != "gloo":
            return None
        if case.operation.reduces and case.dtype.name == "int16":
            return "Gloo does not reduce int16"
        if case.operation.uneven and case.operation.name != "all_to_allv":
            return "Gloo has equal parts only"
        return None

    def prepare(self, case: Case, source: Array, output: Array) -> Callable[[], None]:
        """Returns the torch.distributed call on tensors that share the arrays' memory."""
        import torch
        import torch.distributed as dist

        def tensor(array: Array) -> torch.Tensor:
            whole = torch.from_numpy(array)
            return whole.view(torch.bfloat16) if case.dtype.name == "bfloat16" else whole

        inputs, outputs, group = tensor(source), tensor(output), self._group
        reduce_op = getattr(dist.ReduceOp, _REDUCE_OPS[case.op])
        following, previous = (case.rank + 1) % case.ranks, (case.rank - 1) % case.ranks

        shares, name = case.parts(), case.operation.name
        whole = inputs if name in ("scatter", "scatterv") else outputs
        parts: Any = cut(whole, shares) if name == "all_gatherv" or case.rank == 0 else None
        counts = case.pieces() if name == "batch" else [case.count]

        def batch() -> None:
            messages = [
                message
                for of, into in zip(cut(inputs, counts), cut(outputs, counts), strict=True)
                for message in (
                    dist.P2POp(dist.isend, of, following, group),
                    dist.P2POp(dist.irecv, into, previous, group),
                )
            ]
            for work in dist.batch_isend_irecv(messages):
                work.wait()

        def send() -> None:
            if case.rank == 0:
                dist.send(inputs, 1, group)
            elif case.rank == 1:
                dist.recv(outputs, 0, group)

        def ping_pong() -> None:
            if case.rank == 0:
                dist.send(inputs, 1, group)
                dist.recv(outputs, 1, group)
            elif case.rank == 1:
                dist.recv(outputs, 0, group)
                dist.send(inputs, 0, group)

        # torch 2.13 renamed these two and warns about the old names.
        reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
        all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        calls: dict[str, Callable[[], Any]] = {
            "all_reduce": lambda: dist.all_reduce(inputs, reduce_op, group=group),
            "reduce_scatter": lambda: reduce_scatter(outputs, inputs, reduce_op, group=group),
            "all_gather": lambda: all_gather(outputs, inputs, group=group),
            "all_to_all": lambda: dist.all_to_all_single(outputs, inputs, group=group),
            "broadcast": lambda: dist.broadcast(inputs, 0, group=group),
            "reduce": lambda: dist.reduce(inputs, 0, reduce_op, group=group),
            "gather": lambda: dist.gather(inputs, parts, 0, group=group),
            "scatter": lambda: dist.scatter(outputs, parts, 0, group=group),
            "all_gatherv": lambda: dist.all_gather(parts, inputs, group=group),
            "all_to_allv": lambda: dist.all_to_all_single(outputs, inputs, shares, shares, group=group),
            "gatherv": lambda: dist.gather(inputs, parts, 0, group=group),
            "scatterv": lambda: dist.scatter(outputs, parts, 0, group=group),
            "send": send,
            "send_recv": batch,
            "batch": batch,
            "ping_pong": ping_pong,
            "barrier": lambda: dist.barrier(group=group),
        }
        return calls[name]

    def describe(self) -> dict[str, Any]:
        """Returns torch's version and the backend."""
        import torch

        return {"torch": torch.__version__, "backend": self._backend}

    def teardown(self) -> None:
        """Destroys every group of the process."""
        import torch.distributed as dist

        if dist.is_initialized():
            dist.destroy_process_group()
