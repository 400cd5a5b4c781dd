"""From a Spec to namespaces and links: the commands that build them, for the testbed's first process to run.

A node is a network, a hostname and an IPC namespace, kept by bind mounts (the network one where `ip netns` looks for
it). Its processes add a mount namespace, for a /sys that shows the node's own NICs and a /dev/shm of its own. A fabric
is a bridge without address in the namespace around the nodes, so nothing routes between fabrics; where clusters have
uplinks, each has a bridge of its own, and the fabric's joins these.

Rates are the kernel's (tbf). Delay, loss and order are not, as few kernels have netem: such a link is a wire that is
cut. What comes from the far end still passes; what goes there `holmes-line` reads on one side of the cut and puts,
later, onto the other (see `lanes`).
"""

from __future__ import annotations

import os
import shlex
import sys
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import PurePosixPath

from holmes.lab.testbed.spec import MAX_QUEUE_BYTES, Link, Nic, Node, Spec, SpecError
from holmes.tools.debug.sources import testbed_runtime_folder

_ROOT = PurePosixPath("/run/holmes")
#: What `holmes-line` reads, inside the testbed.
LANES_FILE = _ROOT / "lanes"
# A token bucket must hold one interrupt's worth of data, and one TCP super-packet at a high rate; a larger bucket would
# let short messages through faster than the link.
_BURST_S = 0.001
_MIN_BURST_BYTES = 16384
# TCP super-packets that do not fit into the bucket would be cut into wire packets by the processor, which a real NIC
# does itself. The bucket counts each wire packet's headers too.
_SUPER_PACKET_SHARE = 0.9
_MAX_SUPER_PACKET_BYTES = 65536
# Super-packets that already wait when a bucket becomes smaller than they are would stop the link for good.
_CHANGED_BURST_BYTES = round(_MAX_SUPER_PACKET_BYTES / _SUPER_PACKET_SHARE)
# `most_frame_bytes` of csrc/line/packet_socket.hpp.
_MAX_LINE_BYTES = 16384
# A queue holds at least so many super-packets, else each of them would be a step of its length.
_LEAST_SUPER_PACKETS = 4
# What waits for a node's own kernel: Soft-RoCE sends megabytes at once, and resends all of them where a packet is lost.
_TAP_PACKETS = 8192
# What a lane may hold beyond what its delay and rate need, and what it may hold where there is no rate.
_SPARE_LANE_BYTES = 16 << 20
_MOST_LANE_BYTES = 256 << 20

_SET_HOSTNAME = "import socket, sys; socket.sethostname(sys.argv[1])"
# Packets of one connection are received on one processor, as a NIC's queues do it. Else whichever processor empties a
# link's bucket also delivers what it took, and two of them overtake each other. (Where no link is limited the sender
# delivers, which is the fastest way.) Kernels before 6.3 cannot be told here.
_KEEP_ORDER = "echo {} 2>/dev/null > /proc/sys/net/core/rps_default_mask || :"

# Older iproute2 has no name for it. What asks for an address then comes at once, and once more after the delay.
_DELAY_BROADCASTS = "ip -batch - 2>/dev/null || :"

# A container may forbid mounting sysfs; the old one then shows the outer machine's NICs, which is harmless.
_ENTER = 'mount -t sysfs sysfs /sys 2>/dev/null; mount --bind "$1" /dev/shm && cd "$2" && shift 2 && exec "$@"'


@dataclass(frozen=True)
class Step:
    """One command, what it is for (after "cannot ..."), and what it reads."""

    purpose: str
    argv: Sequence[str]
    stdin: str = ""


@dataclass(frozen=True)
class Lane:
    """What comes in at `port` goes to `bridge` as `link` says; `name`: of the NIC or the uplink that sends it.

    A bridge's queues hold no more of it than a socket's buffer; the rest waits in `holmes-line`, for `most_wait_ms`.
    """

    name: str
    port: str
    bridge: str
    link: Link
    most_wait_ms: float

    @property
    def out(self) -> str:
        """The device onto which it is put: the near end of a wire to the bridge."""
        return f"l{self.port}"

    def line(self, seed: int) -> str:
        """Its line in the file that `holmes-line` reads."""
        link = self.link
        rate_gbps = link.rate_gbps
        most_bytes = _MOST_LANE_BYTES
        if rate_gbps is not None:
            needed_s = (link.delay_ms + link.jitter_ms) / 1000
            most_bytes = min(most_bytes, _SPARE_LANE_BYTES + round(2 * rate_gbps * 1e9 / 8 * needed_s))
        return (
            f"{self.name} {self.port} {self.out} {zlib.crc32(f'{seed} {self.name}'.encode())} delay_ms={link.delay_ms} "
            f"jitter_ms={link.jitter_ms} loss_percent={link.loss_percent} reorder_percent={link.reorder_percent} "
            f"most_bytes={most_bytes} most_wait_ms={self.most_wait_ms}"
        )


@dataclass(frozen=True)
class _End:
    """Where a link begins: `device` sends onto it, `port` of `bridge` is what it leads to.

    `node` and `nic` are those of a NIC; an uplink's device is in the namespace of the bridges.
    """

    name: str
    link: Link
    device: str
    port: str
    bridge: str
    node: str | None = None
    nic: Nic | None = None

    @property
    def enter(self) -> list[str]:
        """What stands before a command about `device`."""
        return [] if self.node is None else ["nsenter", f"--net=/run/netns/{self.node}"]


def node_dir(node: str) -> PurePosixPath:
    """The node's folder inside the testbed: namespaces, shared memory, fake sysfs."""
    return _ROOT / "nodes" / node


def sysfs_root(node: str) -> PurePosixPath:
    """Where the node's fake sysfs is."""
    return node_dir(node) / "sys"


def enter_node(node: str, cwd: str, argv: Sequence[str]) -> list[str]:
    """The command that runs `argv` on a node, in place of itself: the process number stays."""
    folder = node_dir(node)
    namespaces = [f"--net=/run/netns/{node}", f"--uts={folder}/uts", f"--ipc={folder}/ipc"]
    return ["nsenter", *namespaces, "unshare", "--mount", "sh", "-c", _ENTER, "sh", f"{folder}/shm", cwd, *argv]


def node_env(node: Node) -> dict[str, str]:
    """What every process of a node finds in its environment."""
    runtime = testbed_runtime_folder()
    runtime.mkdir(mode=0o700, exist_ok=True)
    return {
        "HOLMES_TESTBED": "1",
        "XDG_RUNTIME_DIR": str(runtime),
        "HOLMES_HOSTNAME": node.name,
        "HOLMES_SYSFS_ROOT": str(sysfs_root(node.name)),
    }


def build(spec: Spec) -> list[Step]:
    """All commands that make the testbed, in order."""
    bridges = [line for index in range(len(spec.networks)) for line in _bridges(spec, index)]
    links = [line for node in spec.nodes for line in _links(spec, node)]
    shapes = [
        _limit(_port(spec, node, nic), nic.receives_gbps, nic)
        for node in spec.nodes
        for nic in node.nics
        if nic.receives_gbps
    ]
    shapes += [line for index in range(len(spec.networks)) for line in _uplink_shapes(spec, index)]
    return [
        Step("let packets keep their order", ["sh", "-c", _keep_order(spec)]),
        *(Step(f"make node {node.name}", ["sh", "-ec", _node_script(spec, node.name)]) for node in spec.nodes),
        Step("write the nodes' /etc/hosts", ["sh", "-ec", _hosts_script()], hosts_text(spec)),
        Step("make the links", ["ip", "-batch", "-"], "\n".join(bridges + links + _cuts(spec))),
        *_delay_broadcasts(spec),
        *(
            Step(f"configure the NICs of node {node.name}", ["sh", "-ec", _node_network_script(spec, node)])
            for node in spec.nodes
        ),
        Step("limit the links to their rates", ["tc", "-batch", "-"], "\n".join(shapes)),
    ]


def set_rate(spec: Spec, node: str, nic: str, rate_gbps: float) -> list[Step]:
    """The commands that change the rate of one NIC's link, both directions."""
    if not rate_gbps > 0:
        raise SpecError(f"rate_gbps is {rate_gbps!r}; it must be above 0 (set_link(..., up=False) cuts a link)")
    link = spec.node(node).nic(nic)
    return set_limits(spec, f"{node}.{nic}", replace(link, rate_gbps=rate_gbps, receive_gbps=None))


def links(spec: Spec) -> dict[str, Link]:
    """All links by name: NODE.NIC, and NETWORK/CLUSTER for a cluster's uplink."""
    return {end.name: end.link for end in _all_ends(spec)}


def set_limits(spec: Spec, name: str, link: Link) -> list[Step]:
    """The commands that give a link other rates or another queue."""
    end = _end(spec, name)
    purpose, tc = f"set the rate of {name}", ["tc", "-batch", "-"]
    steps = []
    if link.receives_gbps is not None:
        steps.append(Step(purpose, tc, _limit(end.port, link.receives_gbps, link, _CHANGED_BURST_BYTES)))
    if link.rate_gbps is not None:
        steps.append(Step(purpose, [*end.enter, *tc], _limit(end.device, link.rate_gbps, link, _CHANGED_BURST_BYTES)))
    if end.nic is not None:
        most_bytes = _super_packet_bytes(spec, replace(end.nic, queue_bytes=link.queue_bytes), link.rate_gbps)
        resize = f"link set dev {end.device} gso_max_size {most_bytes}"
        steps.append(Step(purpose, [*end.enter, "ip", "-batch", "-"], resize))
    return steps


def set_up(spec: Spec, name: str, up: bool) -> Step:
    """The command that takes a link down, or up again: a NIC's node sees it, nodes behind an uplink do not."""
    end = _end(spec, name)
    state = "up" if up else "down"
    return Step(f"take {name} {state}", [*end.enter, "ip", "link", "set", "dev", end.device, state])


def lanes(spec: Spec) -> list[Lane]:
    """What `holmes-line` has to carry: all that is sent over a link that is not plain."""
    ends = _all_ends(spec)
    most_wait_ms = max(end.link.waits_ms for end in ends)
    return [Lane(end.name, end.port, end.bridge, end.link, most_wait_ms) for end in ends if not end.link.is_plain]


def write_lanes(spec: Spec, carried: Sequence[Lane]) -> Step:
    """The command that writes the file of `holmes-line`."""
    text = "".join(f"{lane.line(spec.seed)}\n" for lane in carried)
    return Step("write what the links are like", ["sh", "-c", f"cat > {LANES_FILE}"], text)


def _keep_order(spec: Spec) -> str:
    links: list[Link] = [nic for node in spec.nodes for nic in node.nics]
    links += [network.uplink for network in spec.networks.values() if network.uplink]
    is_limited = any(link.rate_gbps or link.receive_gbps or not link.is_plain for link in links)
    return _KEEP_ORDER.format(_processors()) if is_limited else ":"


def _processors() -> str:
    """Those this process may use, as the kernel writes masks: groups of 32, the highest first."""
    mask = sum(1 << cpu for cpu in os.sched_getaffinity(0))
    groups = [f"{mask >> low & 0xFFFFFFFF:08x}" for low in range(0, mask.bit_length(), 32)]
    return ",".join(reversed(groups))


def _port(spec: Spec, node: Node, nic: Nic) -> str:
    """The bridge's end of a link; numbered, because interface names hold 15 characters."""
    return f"p{spec.nodes.index(node)}-{node.nics.index(nic)}"


def _bridges(spec: Spec, index: int) -> list[str]:
    """One for a network; where clusters have uplinks, one for each too, joined to it by a link."""
    network = list(spec.networks.values())[index]
    names = [f"br{index}"]
    if network.uplink:
        names += [f"br{index}-{cluster}" for cluster in range(len(spec.clusters))]
    lines = []
    for name in names:
        lines += [f"link add name {name} type bridge mcast_snooping 0", f"link set dev {name} mtu {network.mtu} up"]
    for ours, core in _uplinks(spec, index):
        cluster = ours.split("-")[1]
        lines += [
            f"link add name {ours} mtu {network.mtu} type veth peer name {core} mtu {network.mtu}",
            f"link set dev {ours} master br{index}-{cluster} up",
            f"link set dev {core} master br{index} up",
        ]
    return lines


def _uplinks(spec: Spec, index: int) -> list[tuple[str, str]]:
    """Both ends of each cluster's uplink: in its bridge and in the network's."""
    if not list(spec.networks.values())[index].uplink:
        return []
    return [(f"up{index}-{cluster}", f"core{index}-{cluster}") for cluster in range(len(spec.clusters))]


def _uplink_shapes(spec: Spec, index: int) -> list[str]:
    uplink = list(spec.networks.values())[index].uplink
    shapes = []
    for ours, core in _uplinks(spec, index):
        assert uplink is not None, "there are no ends of what is not there"
        shapes += [_limit(ours, uplink.rate_gbps, uplink)] if uplink.rate_gbps else []
        shapes += [_limit(core, uplink.receives_gbps, uplink)] if uplink.receives_gbps else []
    return shapes


def _all_ends(spec: Spec) -> list[_End]:
    found = [
        _End(
            f"{node.name}.{nic.name}",
            nic,
            nic.name,
            _port(spec, node, nic),
            _bridge_of(spec, node, nic),
            node.name,
            nic,
        )
        for node in spec.nodes
        for nic in node.nics
    ]
    for index, network in enumerate(spec.networks.values()):
        for cluster, (ours, core) in zip(spec.clusters, _uplinks(spec, index), strict=False):
            assert network.uplink is not None, "there are no ends of what is not there"
            found.append(_End(f"{network.name}/{cluster.name}", network.uplink, ours, core, f"br{index}"))
    return found


def _end(spec: Spec, name: str) -> _End:
    return next(end for end in _all_ends(spec) if end.name == name)


def _cuts(spec: Spec) -> list[str]:
    """Cuts the wires of all lanes: between a port and its bridge come a bridge that passes one way only, and a wire."""
    mtu = max(nic.mtu for node in spec.nodes for nic in node.nics)
    lines = []
    for lane in lanes(spec):
        middle, far = f"m{lane.port}", f"b{lane.port}"
        lines += [
            f"link add name {middle} type bridge mcast_snooping 0",
            f"link set dev {middle} mtu {mtu} up",
            f"link add name {lane.out} mtu {mtu} type veth peer name {far} mtu {mtu}",
            f"link set dev {lane.out} master {middle}",
            f"link set dev {lane.out} type bridge_slave learning off flood off mcast_flood off",
            f"link set dev {lane.port} master {middle}",
            f"link set dev {lane.port} type bridge_slave learning off",
            f"link set dev {lane.out} up",
            f"link set dev {far} master {lane.bridge} up",
        ]
    return lines


def _delay_broadcasts(spec: Spec) -> list[Step]:
    cut = [f"link set dev {lane.out} type bridge_slave bcast_flood off" for lane in lanes(spec)]
    return [Step("delay broadcasts too", ["sh", "-c", _DELAY_BROADCASTS], "\n".join(cut))] if cut else []


def _links(spec: Spec, node: Node) -> list[str]:
    lines = []
    for nic in node.nics:
        port = _port(spec, node, nic)
        lines += [
            f"link add name {port} mtu {nic.mtu} type veth peer name {nic.name} mtu {nic.mtu} netns {node.name}",
            f"link set dev {port} master {_bridge_of(spec, node, nic)} up",
        ]
    return lines


def _bridge_of(spec: Spec, node: Node, nic: Nic) -> str:
    bridge = f"br{list(spec.networks).index(nic.network)}"
    if spec.networks[nic.network].uplink:
        bridge += f"-{[other.name for other in spec.clusters].index(node.cluster)}"
    return bridge


def _limit(device: str, rate_gbps: float | None, link: Link, least_burst_bytes: int = 0) -> str:
    assert rate_gbps is not None, "an unlimited link has no shape"
    burst_bytes = max(_burst_bytes(rate_gbps, link.queue_bytes), least_burst_bytes)
    queue = f"latency {round(link.queue_ms * 1000)}us"
    if link.queue_bytes is not None:
        queue = f"limit {link.queue_bytes}"
    elif rate_gbps * 1e9 / 8 * link.queue_ms / 1000 + burst_bytes > MAX_QUEUE_BYTES:  # tc would take it modulo 2^32
        queue = f"limit {MAX_QUEUE_BYTES}"
    return f"qdisc replace dev {device} root tbf rate {round(rate_gbps * 1e9)}bit burst {burst_bytes} {queue}"


def _burst_bytes(rate_gbps: float, queue_bytes: int | None) -> int:
    most_bytes = round(rate_gbps * 1e9 / 8 * _BURST_S)
    if queue_bytes is not None:
        most_bytes = min(most_bytes, queue_bytes // _LEAST_SUPER_PACKETS)
    return max(most_bytes, _MIN_BURST_BYTES)


def _super_packet_bytes(spec: Spec, nic: Nic, rate_gbps: float | None) -> int:
    """The most that a NIC may be given as one piece."""
    most_bytes = _MAX_LINE_BYTES if _has_lanes(spec, nic.network) else _MAX_SUPER_PACKET_BYTES
    if rate_gbps is not None:
        most_bytes = min(most_bytes, round(_burst_bytes(rate_gbps, nic.queue_bytes) * _SUPER_PACKET_SHARE))
    return most_bytes


def _has_lanes(spec: Spec, network: str) -> bool:
    uplink = spec.networks[network].uplink
    links: list[Link] = [nic for node in spec.nodes for nic in node.nics if nic.network == network]
    return any(not link.is_plain for link in [*links, *([uplink] if uplink else [])])


def _node_script(spec: Spec, name: str) -> str:
    folder = node_dir(name)
    binds = {"net": f"/run/netns/{name}", "uts": f"{folder}/uts", "ipc": f"{folder}/ipc"}
    hostname = shlex.join([sys.executable, "-IS", "-c", _SET_HOSTNAME, name])
    # /proc/self: right even where /proc is of another PID namespace.
    order = _keep_order(spec)
    inner = " && ".join(
        [hostname, f"{{ {order}; }}", *(f"mount --bind /proc/self/ns/{kind} {path}" for kind, path in binds.items())]
    )
    return (
        f"mkdir -p /run/netns {folder}/shm {folder}/sys\n"
        f"touch {' '.join(binds.values())}\n"
        f"unshare --net --uts --ipc sh -c {shlex.quote(inner)}\n"
    )


def hosts_text(spec: Spec) -> str:
    """Every node's /etc/hosts: node names at their common address, and node-nic names for all."""
    lines = ["127.0.0.1 localhost", "::1 localhost"]
    for node in spec.nodes:
        for nic in (nic for nic in node.nics if nic.has_ip):
            common = nic is node.nic_on(spec.common_network)
            name = f"{node.name}-{nic.name}"
            lines.append(f"{nic.address.ip} {f'{node.name} ' if common else ''}{name}")
            # For dual-stack sockets that ask who their peer is; a name apart, so that "a0" stays an IPv4 address.
            lines.append(f"::ffff:{nic.address.ip} {name}.testbed")
    return "\n".join(lines) + "\n"


def _hosts_script() -> str:
    return f"cat > {_ROOT}/hosts\n[ ! -e /etc/hosts ] || mount --bind {_ROOT}/hosts /etc/hosts\n"


def tap_of(node: Node, nic: Nic) -> str:
    """The device through which a node's own kernel has this NIC."""
    return f"tap{node.nics.index(nic)}"


def _tap(nic: Nic, tap: str) -> list[str]:
    """A bridge from the NIC's wire to the node's own kernel. That has the addresses: here nothing may answer for it."""
    bridge = f"br-{tap}"
    return [
        f"tuntap add dev {tap} mode tap",
        f"link add name {bridge} type bridge mcast_snooping 0",
        *(f"link set dev {device} addrgenmode none" for device in (nic.name, tap, bridge)),
        f"link set dev {tap} mtu {nic.mtu} txqueuelen {_TAP_PACKETS} master {bridge} up",
        f"link set dev {nic.name} master {bridge}",
        f"link set dev {bridge} mtu {nic.mtu} up",
    ]


def _node_network_script(spec: Spec, node: Node) -> str:
    enter = f"nsenter --net=/run/netns/{node.name}"
    ip = ["link set dev lo up"]
    tc = []
    for nic in node.nics:
        if spec.kernel == "uml":
            ip += _tap(nic, tap_of(node, nic))
        else:
            ip.append(f"address add {nic.address} broadcast + dev {nic.name}")
        ip.append(f"link set dev {nic.name} up")
        if nic.rate_gbps or _has_lanes(spec, nic.network):
            ip.append(f"link set dev {nic.name} gso_max_size {_super_packet_bytes(spec, nic, nic.rate_gbps)}")
        if nic.rate_gbps:
            tc.append(_limit(nic.name, nic.rate_gbps, nic))
    # Namespaces inherit the host's forwarding, which container engines switch on. A read-only /proc/sys is fine where
    # there is nothing to change.
    settings = "for f in /proc/sys/net/ipv4/ip_forward /proc/sys/net/ipv6/conf/all/forwarding; do\n"
    settings += '[ ! -e $f ] || [ "$(cat $f)" = 0 ] || echo 0 > $f\ndone\n'
    if spec.congestion_control:
        wanted, file = shlex.quote(spec.congestion_control), "/proc/sys/net/ipv4/tcp_{}congestion_control"
        settings += (
            f"echo {wanted} 2>/dev/null > {file.format('')} || {{\n"
            f"echo congestion_control {wanted} is not allowed here, only: $(cat {file.format('allowed_')})\n"
            "exit 1\n}\n"
        )
    return (
        f"{enter} sh -ec {shlex.quote(settings)}\n"
        f"{enter} ip -batch - <<'END'\n" + "\n".join(ip) + "\nEND\n"
        f"{enter} tc -batch - <<'END'\n" + "\n".join(tc) + "\nEND\n"
    )
