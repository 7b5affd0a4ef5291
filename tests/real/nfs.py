"""A real NFSv4.2 server and two clients of it, in a guest: the kernel's own.

The clients are two machines to the server: each has a name and a network of its own, and so its own caches, locks and
delegations.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

from tests.real import uml

PROGRAMS = (
    *("modprobe", "ip", "nsenter", "unshare"),
    *("mkfs.ext4", "rpc.nfsd", "rpc.mountd", "exportfs", "mount.nfs4"),
)
LEASE_SECONDS = 10

_SERVE = f"""
set -e
for module in nfsd nfs nfsv4 veth; do
  modprobe $module
done
mkdir -p /run/nfs/export /run/nfs/a /run/nfs/b
mount /dev/ubda /run/nfs/export
chmod 777 /run/nfs/export
mount -t nfsd nfsd /proc/fs/nfsd
mount -t rpc_pipefs rpc_pipefs /var/lib/nfs/rpc_pipefs
echo {LEASE_SECONDS} > /proc/fs/nfsd/nfsv4leasetime
echo {LEASE_SECONDS} > /proc/fs/nfsd/nfsv4gracetime
exportfs -o rw,sync,no_root_squash,no_subtree_check,fsid=0,insecure 10.77.0.0/16:/run/nfs/export
rpc.mountd -N 3
rpc.nfsd -N 3 -V 4.0 -V 4.1 -V 4.2 4
add_host() {{  # NAME NUMBER: a network and a name of its own, and the mount /run/nfs/NAME
  ip netns add $1
  ip link add to-$1 type veth peer name eth0 netns $1
  ip addr add 10.77.$2.1/24 dev to-$1
  ip link set to-$1 up
  ip -n $1 addr add 10.77.$2.2/24 dev eth0
  ip -n $1 link set eth0 up
  unshare --uts sh -c "hostname host-$1; \\
    nsenter --net=/run/netns/$1 mount -t nfs4 -o vers=4.2,proto=tcp 10.77.$2.1:/ /run/nfs/$1"
}}
add_host a 1
add_host b 2
export NFS_A=/run/nfs/a NFS_B=/run/nfs/b HYPOTHESIS_STORAGE_DIRECTORY=/tmp/hypothesis
set +e
"""


def missing() -> str | None:
    """Why that cannot be had here, and what to do."""
    return uml.missing(*PROGRAMS)


def run(folder: Path, command: str, *, seconds: float, cwd: Path, memory: str = "2G") -> uml.Ended:
    """Run a command that finds the two mounts in `$NFS_A` and `$NFS_B`."""
    image = folder / "export.img"
    subprocess.run(["truncate", "-s", "512M", str(image)], check=True, timeout=60)
    subprocess.run(["mkfs.ext4", "-q", "-F", str(image)], check=True, timeout=60)
    return uml.run(folder / "guest", f"{_SERVE}\n{command}\n", seconds=seconds, disks=[image], cwd=cwd, memory=memory)
