"""A rank of a job whose ranks do not fit together, a process of its own: `nccl_disagreement_rank.py RANK SIZE PORT`.

NET, HCA, INTERFACE and SYSFS of the environment are this rank's profile and machine. Prints the error of the set-up.
"""

from __future__ import annotations

import os
import sys

import holmes_comm
from holmes_comm import _C


def main() -> None:
    rank, size, port = map(int, sys.argv[1:])
    store = holmes_comm.TcpStore("127.0.0.1", port)
    hcas = [os.environ["HCA"]] if "HCA" in os.environ else []
    profile = _C.NcclProfile(os.environ["NET"], hcas, [os.environ.get("INTERFACE", "lo")])
    options = _C.CommunicatorOptions(
        rank=rank, size=size, name="test", nics=[("lo", "127.0.0.1")], timeout_s=20.0, connect_timeout_s=20.0
    )
    begin = "made"
    try:
        comm = _C.make_nccl_communicator(store, options, profile, device=rank, sysfs_root=os.environ.get("SYSFS"))
        comm.barrier()
    except holmes_comm.HolmesError as error:
        begin = f"{type(error).__name__}: {error}"
    print(begin, flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
