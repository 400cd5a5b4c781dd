#!/bin/sh
# Init of a user-mode Linux that is a host with Soft-RoCE. The kernel hands its parameters over as environment: RIG, a
# folder of the machine below in which `command.sh` is run and `status` left; RIG_ROOT, where the verbs tools are
# unpacked; RIG_PYTHON, to switch the machine off with; RIG_HOST: 0 for two devices in one kernel, else the host's number.
export PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/run TMPDIR=/run XDG_RUNTIME_DIR=/run TERM=dumb LANG=C.UTF-8
mount -t proc proc /proc; mount -t sysfs sys /sys; mount -t tmpfs tmp /dev/shm; mount -t tmpfs tmp /run
mkdir -p /run/rig && mount -t hostfs rig /run/rig -o "$RIG"
lib=$RIG_ROOT/usr/lib/x86_64-linux-gnu
# Soft-RoCE's provider has a name with the version of libibverbs in it, so it is named.
export LD_LIBRARY_PATH=$lib:$RIG_ROOT/lib/x86_64-linux-gnu RDMAV_DRIVERS=$lib/libibverbs/librxe PATH=$RIG_ROOT/usr/bin:$PATH
rdma=$(ls "$RIG_ROOT/bin/rdma" "$RIG_ROOT/usr/bin/rdma" 2>/dev/null | head -1)
ip link set lo up
if [ "$RIG_HOST" = 0 ]; then
  # Both ends in one namespace (Soft-RoCE knows only the first): the system is told to let packets of its own in.
  ip link add va type veth peer name vb
  ip link set va mtu 4200 address 02:00:00:00:00:0a up; ip link set vb mtu 4200 address 02:00:00:00:00:0b up
  for i in all va vb; do
    echo 1 >/proc/sys/net/ipv4/conf/$i/accept_local; echo 0 >/proc/sys/net/ipv4/conf/$i/rp_filter
    echo 1 >/proc/sys/net/ipv4/conf/$i/arp_ignore
  done
  ip addr add 10.0.0.1/24 dev va; ip addr add 10.0.0.2/24 dev vb
  "$rdma" link add rxe0 type rxe netdev va; "$rdma" link add rxe1 type rxe netdev vb
else
  ip link set vec0 up; ip addr add "10.0.0.$RIG_HOST/24" dev vec0
  "$rdma" link add rxe0 type rxe netdev vec0
  hostname "host$RIG_HOST"
fi
# A GID follows its address a little later.
for _ in 1 2 3 4 5 6 7 8 9 10; do
  grep -q . /sys/class/infiniband/rxe*/ports/1/gid_attrs/types/1 2>/dev/null && break; sleep 0.1
done
/bin/sh /run/rig/command.sh >/run/rig/output 2>&1
echo $? >/run/rig/status; sync
exec "$RIG_PYTHON" -c 'import ctypes; ctypes.CDLL(None).reboot(0x4321FEDC)'
