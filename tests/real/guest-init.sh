#!/bin/bash
# The first process of a guest: makes a usable machine of a read-only root, runs the job, and switches off.
# The job's folder, named on the kernel's command line, has: command, folder, environment, shares; gets: output, status.
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
mount -t proc proc /proc 2>/dev/null
job=$(sed -n 's/.*uml_job=\([^ ]*\).*/\1/p' /proc/cmdline)
mount -t sysfs sys /sys
mkdir -p /dev/shm /dev/pts
mount -t tmpfs tmpfs /dev/shm
mount -t devpts devpts /dev/pts
ln -sf /proc/self/fd /dev/fd
mount -t tmpfs tmpfs /run
mkdir -p /run/job /run/m/lib /run/bin
mount -t hostfs none /run/job -o "$job"
for folder in /tmp /var/tmp /var/lib/nfs /root/.cache /mnt /etc/modprobe.d; do
  [ -d "$folder" ] && mount -t tmpfs tmpfs "$folder"
done
mkdir -p /var/lib/nfs/{v4recovery,rpc_pipefs,sm} /run/rpcbind
: > /var/lib/nfs/etab
: > /var/lib/nfs/rmtab
# Modules are those of the guest's kernel, wherever the host keeps its own.
ln -s /usr/lib/uml/modules /run/m/lib/modules
printf '#!/bin/sh\nexec /sbin/modprobe -d /run/m "$@"\n' > /run/bin/modprobe
chmod +x /run/bin/modprobe
export PATH=/run/bin:$PATH
echo /run/bin/modprobe > /proc/sys/kernel/modprobe
while read -r folder; do
  [ -n "$folder" ] && mkdir -p "$folder" && mount -t hostfs none "$folder" -o "$folder"
done < /run/job/shares
ip link set lo up
ip addr add 127.0.0.1/8 dev lo 2>/dev/null
set -a
. /run/job/environment
set +a
export PATH=/run/bin:$PATH
cd "$(cat /run/job/folder)" || cd /
: > /run/job/started
bash /run/job/command < /dev/null > /run/job/output 2>&1
echo $? > /run/job/status
sync
echo o > /proc/sysrq-trigger
sleep 10
