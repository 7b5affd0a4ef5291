#!/bin/bash
#SBATCH --job-name=digits
#SBATCH --time=04:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=B:TERM@120
#
# Trains across preemptions: on Slurm (time limits, preempted nodes) and on spot instances.
#
#   sbatch examples/requeue.sh                        Slurm: ends 2 minutes before its limit and queues itself again
#   examples/requeue.sh python train.py --lr 0.1      anywhere else: the end of a machine is a SIGTERM too
#
# Told to stop, it passes that on to the training, which takes a last snapshot and ends. Under Slurm the job is then queued
# again; elsewhere the exit code is 143, and whoever starts the machine's jobs (systemd with Restart=on-failure, an instance
# group) starts the same command again. Either way training goes on where it was: ckpt_path="auto" finds the snapshots,
# which therefore must be on a disk that survives, or have a tier on an object store.
# A training that fails by itself is not queued again.
set -u
cd "${SLURM_SUBMIT_DIR:-$PWD}" || exit 1

if [ $# -eq 0 ]; then
  set -- python examples/lightning_yaml.py
fi

stopped=0
"$@" &
training=$!
trap 'stopped=1; kill -TERM "$training" 2>/dev/null' TERM

# `wait` returns when the trap has run; the training is still saving then.
wait "$training"
code=$?
while kill -0 "$training" 2>/dev/null; do
  wait "$training"
  code=$?
done

# What the training ends with does not tell whether it was complete when it was told to stop. One that was finds nothing to
# do when it is started again, and ends.
if [ "$stopped" -eq 1 ] && [ -n "${SLURM_JOB_ID:-}" ]; then
  echo "requeue.sh: told to stop, queued again"
  scontrol requeue "$SLURM_JOB_ID"
  code=$?
elif [ "$stopped" -eq 1 ]; then
  echo "requeue.sh: told to stop"
  code=143
elif [ "$code" -eq 0 ]; then
  echo "requeue.sh: training is complete"
else
  echo "requeue.sh: training failed with exit code $code, and is not started again" >&2
fi
exit "$code"
