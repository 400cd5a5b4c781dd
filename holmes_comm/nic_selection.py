"""NicSelection: says which NICs a group uses."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from numbers import Integral

from holmes_comm import _C
from holmes_comm._C import Nic
from holmes_comm.errors import UsageError

TRANSPORTS = ("auto", "tcp", "shm", "rdma")
_KINDS = {
    "nic_class": (str | None, "text, or None for any"),
    "fastest": (bool, "True or False"),
    "subnet": (str | None, "text such as '10.1.0.0/16', or None for any"),
    "max_rails": (Integral | None, "a whole number, or None"),
    "streams": (Integral, "a whole number"),
}


def text_of(variable: str, env: Mapping[str, str] | None = None) -> str:
    """The environment's text, "" where there is none. Raises UsageError where it is none of UTF-8. Local."""
    text = (os.environ if env is None else env).get(variable, "")
    try:
        text.encode()
    except UnicodeEncodeError:
        shown = os.fsencode(text).decode(errors="backslashreplace")
        raise UsageError(f"{variable}='{shown}' is not allowed: it must be UTF-8; write it anew or unset it") from None
    return text


@dataclass(frozen=True)
class NicSelection:
    """Which NICs a group uses. Conditions add up; none at all means the fastest NIC that all members share.

    names: interfaces ("eth1"), HCA ports ("mlx5_0:1") or HCAs ("mlx5_0"), glob patterns allowed ("mlx5_*"). They are
        alternatives: names may differ per node, and every node must have at least one of them.
    nic_class: "infiniband", "roce" (or "roce_v1", "roce_v2"), "ethernet" or "loopback".
    fastest: the fastest NIC that all members share; this is also what happens when nothing is said.
    subnet: only NICs with an address in it ("10.1.0.0/16").
    transport: "auto" (shared memory between ranks of one host, else RDMA where all members share a fabric and nothing
        asks for what only TCP has, else TCP), "tcp" (always), "shm" (one host only) or "rdma" (shared memory between
        ranks of one host, else RDMA over ports that all members share, or an error; docs/rdma.md).
    max_rails: stripe every operation over up to so many NICs of the best class that all members share, whatever their
        speeds; where ranks differ, the smallest number counts. None: one; NCCL gets every port of the class and about
        the speed of the best.
    streams: connections over each NIC, for links that one TCP connection cannot fill (long ones, very fast ones); where
        ranks differ, the smallest number counts. 1: to far ranks there are up to 4, without bbr 16, used where one is
        too slow (HOLMES_FAR_STREAMS; docs/wan.md).

    Raises UsageError where a field has a value it cannot have. Immutable, so safe to share between threads.
    """

    names: tuple[str, ...] = ()
    nic_class: str | None = None
    fastest: bool = False
    subnet: str | None = None
    transport: str = "auto"
    max_rails: int | None = None
    streams: int = 1

    def __post_init__(self) -> None:
        given = (self.names,) if isinstance(self.names, str) else self.names
        names = tuple(given) if isinstance(given, Iterable) else (None,)
        if not all(isinstance(name, str) for name in names):
            raise UsageError(f"names={self.names!r} are no names of NICs; give text, or a sequence of it")
        object.__setattr__(self, "names", names)
        for field, (wanted, words) in _KINDS.items():
            value = getattr(self, field)
            if not isinstance(value, wanted) or (isinstance(value, bool) and wanted is not bool):
                raise UsageError(f"{field}={value!r} is of another type than it can be; give {words}")
            if isinstance(value, Integral) and abs(int(value)) >= 1 << 31:
                raise UsageError(f"{field}={value!r} is beyond what its type can hold; give {words}")
        if self.transport not in TRANSPORTS:
            raise UsageError(f"transport {self.transport!r} does not exist; use one of {', '.join(TRANSPORTS)}")
        for field in ("nic_class", "subnet"):
            if getattr(self, field) == "":
                raise UsageError(f"{field}='' is none; name one, or leave it out for any")
        self._rule()

    @classmethod
    def parse(cls, text: str, transport: str = "auto") -> NicSelection:
        """Reads a comma-separated list of "class:roce", "subnet:10.1.0.0/16", "rails:2", "streams:2", "fastest", names.

        Local.
        Names are as in the constructor: "eth1,eth2", "mlx5_*", "mlx5_0:1". Raises UsageError on a wrong value.
        """
        rule = _C.NicSelection.parse(text)
        return cls(
            tuple(rule.names),
            rule.nic_class or None,
            rule.fastest,
            rule.subnet or None,
            transport,
            rule.max_rails,
            rule.streams,
        )

    @classmethod
    def from_env(cls, env: Mapping[str, str] | None = None) -> NicSelection:
        """The selection of HOLMES_NICS (as `parse` reads it) and HOLMES_TRANSPORT, for scripts that cannot be edited.

        Local. `env`: None means os.environ. Raises UsageError on a wrong value.
        """
        env = os.environ if env is None else env
        return cls.parse(text_of("HOLMES_NICS", env), env.get("HOLMES_TRANSPORT") or "auto")

    @property
    def restricts(self) -> bool:
        """Whether a class, a name or a subnet is asked for."""
        return self._rule().restricts

    def resolve(self, nics: Iterable[Nic]) -> list[Nic]:
        """The NICs among `nics` (of this host) that the selection allows and that TCP can use: up, with an address.

        Local. With a subnet, each NIC's first address lies in it. Link-local addresses count only where a subnet asks
        for them. Loopback is left out unless it is asked for. Raises NicError where an asked-for NIC does not exist,
        is down or has no address; without a condition the result may be empty.
        """
        return self._rule().resolve(list(nics))

    def matching(self, nics: Iterable[Nic]) -> list[Nic]:
        """The NICs among `nics` with a name and class that the selection allows, in any state.

        Local. Loopback is left out unless something is asked for. Raises NicError where an asked-for NIC does not
        exist.
        """
        return self._rule().matching(list(nics))

    def offer(self, nics: Iterable[Nic], carrier: str, host: str, place: str) -> _C.NicOffer:
        """What `host`, which has `nics`, brings to the choice for `carrier`.

        Local. carrier: "tcp", "nccl", "rdma" or "auto". place: host_identity. Raises NicError as `resolve`, but where
        NCCL has ports that need no address.
        """
        return self._rule().offer(list(nics), carrier, host, place)

    def _rule(self) -> _C.NicSelection:
        return _C.NicSelection(
            self.names, self.nic_class or "", self.fastest, self.subnet or "", self.max_rails, self.streams
        )
