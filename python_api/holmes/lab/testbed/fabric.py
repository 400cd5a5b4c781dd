"""From a Spec to namespaces and links: the commands that build them, for the testbed's first process to run.

A node is a network, a hostname and an IPC namespace, kept by bind mounts (the network one where `ip netns` looks for
it). Its processes add a mount namespace, for a /sys that shows the node's own NICs and a /dev/shm of its own. A fabric
is a bridge without address in the namespace around the nodes, so nothing routes between fabrics; where clusters have
uplinks, each has a bridge of its own, and the fabric's joins these.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

from holmes.lab.testbed.spec import Nic, Node, Spec, SpecError
from holmes.tools.debug.sources import testbed_runtime_folder

_ROOT = PurePosixPath("/run/holmes")
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

_SET_HOSTNAME = "import socket, sys; socket.sethostname(sys.argv[1])"
# Packets of one connection are received on one processor, as a NIC's queues do it. Else whichever processor empties a
# link's bucket also delivers what it took, and two of them overtake each other. (Where no link is limited the sender
# delivers, which is the fastest way.) Kernels before 6.3 cannot be told here.
_KEEP_ORDER = "echo {} 2>/dev/null > /proc/sys/net/core/rps_default_mask || :"

# A container may forbid mounting sysfs; the old one then shows the outer machine's NICs, which is harmless.
_ENTER = 'mount -t sysfs sysfs /sys 2>/dev/null; mount --bind "$1" /dev/shm && cd "$2" && shift 2 && exec "$@"'


@dataclass(frozen=True)
class Step:
    """One command, what it is for (after "cannot ..."), and what it reads."""

    purpose: str
    argv: Sequence[str]
    stdin: str = ""


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
    shapes = [_shape(_port(spec, node, nic), nic, spec) for node in spec.nodes for nic in node.nics if nic.rate_gbps]
    shapes += [line for index in range(len(spec.networks)) for line in _uplink_shapes(spec, index)]
    return [
        Step("let packets keep their order", ["sh", "-c", _keep_order(spec)]),
        *(Step(f"make node {node.name}", ["sh", "-ec", _node_script(spec, node.name)]) for node in spec.nodes),
        Step("write the nodes' /etc/hosts", ["sh", "-ec", _hosts_script()], _hosts(spec)),
        Step("make the links", ["ip", "-batch", "-"], "\n".join(bridges + links)),
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
    where = spec.node(node)
    link = where.nic(nic)
    purpose, tc = f"set the rate of {node}'s {nic}", ["tc", "-batch", "-"]
    queue_ms = spec.networks[link.network].queue_ms

    def limit(device: str) -> str:
        return _limit(device, rate_gbps, queue_ms, max(_burst_bytes(rate_gbps), _CHANGED_BURST_BYTES))

    return [
        Step(purpose, tc, limit(_port(spec, where, link))),
        Step(purpose, ["nsenter", f"--net=/run/netns/{node}", *tc], limit(nic)),
        Step(
            purpose,
            ["nsenter", f"--net=/run/netns/{node}", "ip", "-batch", "-"],
            f"link set dev {nic} gso_max_size {_super_packet_bytes(rate_gbps)}",
        ),
    ]


def _keep_order(spec: Spec) -> str:
    is_limited = any(nic.rate_gbps for node in spec.nodes for nic in node.nics) or any(
        network.uplink_gbps for network in spec.networks.values()
    )
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
    if network.uplink_gbps:
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
    if not list(spec.networks.values())[index].uplink_gbps:
        return []
    return [(f"up{index}-{cluster}", f"core{index}-{cluster}") for cluster in range(len(spec.clusters))]


def _uplink_shapes(spec: Spec, index: int) -> list[str]:
    network = list(spec.networks.values())[index]
    if not network.uplink_gbps:
        return []
    ends = [end for uplink in _uplinks(spec, index) for end in uplink]
    burst_bytes = _burst_bytes(network.uplink_gbps)
    return [_limit(end, network.uplink_gbps, network.queue_ms, burst_bytes) for end in ends]


def _links(spec: Spec, node: Node) -> list[str]:
    networks = list(spec.networks)
    cluster = [other.name for other in spec.clusters].index(node.cluster)
    lines = []
    for nic in node.nics:
        port = _port(spec, node, nic)
        bridge = f"br{networks.index(nic.network)}"
        if spec.networks[nic.network].uplink_gbps:
            bridge += f"-{cluster}"
        lines += [
            f"link add name {port} mtu {nic.mtu} type veth peer name {nic.name} mtu {nic.mtu} netns {node.name}",
            f"link set dev {port} master {bridge} up",
        ]
    return lines


def _shape(device: str, nic: Nic, spec: Spec) -> str:
    assert nic.rate_gbps is not None, "an unlimited link has no shape"
    return _limit(device, nic.rate_gbps, spec.networks[nic.network].queue_ms, _burst_bytes(nic.rate_gbps))


def _limit(device: str, rate_gbps: float, queue_ms: float, burst_bytes: int) -> str:
    rate_bits_per_s, queue_us = round(rate_gbps * 1e9), round(queue_ms * 1000)
    return f"qdisc replace dev {device} root tbf rate {rate_bits_per_s}bit burst {burst_bytes} latency {queue_us}us"


def _burst_bytes(rate_gbps: float) -> int:
    return max(round(rate_gbps * 1e9 / 8 * _BURST_S), _MIN_BURST_BYTES)


def _super_packet_bytes(rate_gbps: float) -> int:
    return min(round(_burst_bytes(rate_gbps) * _SUPER_PACKET_SHARE), _MAX_SUPER_PACKET_BYTES)


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


def _hosts(spec: Spec) -> str:
    """Every node's /etc/hosts: node names at their common address, and node-nic names for all."""
    lines = ["127.0.0.1 localhost", "::1 localhost"]
    for node in spec.nodes:
        for nic in node.nics:
            common = nic is node.nic_on(spec.common_network)
            name = f"{node.name}-{nic.name}"
            lines.append(f"{nic.address.ip} {f'{node.name} ' if common else ''}{name}")
            # For dual-stack sockets that ask who their peer is; a name apart, so that "a0" stays an IPv4 address.
            lines.append(f"::ffff:{nic.address.ip} {name}.testbed")
    return "\n".join(lines) + "\n"


def _hosts_script() -> str:
    return f"cat > {_ROOT}/hosts\n[ ! -e /etc/hosts ] || mount --bind {_ROOT}/hosts /etc/hosts\n"


def _node_network_script(spec: Spec, node: Node) -> str:
    enter = f"nsenter --net=/run/netns/{node.name}"
    ip = ["link set dev lo up"]
    tc = []
    for nic in node.nics:
        ip += [f"address add {nic.address} broadcast + dev {nic.name}", f"link set dev {nic.name} up"]
        if nic.rate_gbps:
            ip.append(f"link set dev {nic.name} gso_max_size {_super_packet_bytes(nic.rate_gbps)}")
            tc.append(_shape(nic.name, nic, spec))
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
