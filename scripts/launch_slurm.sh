#!/bin/bash
# Train on a Slurm allocation, one task per machine, torchrun starting a rank per GPU:
#   sbatch --nodes 2 --gpus-per-node 8 scripts/launch_slurm.sh --config FILE --shards DIR [section.key=value …]
# Slurm's SIGTERM, sent two minutes before the limit, makes the run write a checkpoint at its next logged step; a job
# that is queued again resumes from it.
#SBATCH --job-name=somaspeed
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=48
#SBATCH --signal=TERM@120
#SBATCH --requeue
set -euo pipefail
cd "${SLURM_SUBMIT_DIR:?run this with sbatch from the repository}"
HEAD=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export HEAD NODES=$SLURM_JOB_NUM_NODES JOB=$SLURM_JOB_ID GPUS=${SLURM_GPUS_ON_NODE:-8}
if [ "${SLURM_RESTART_COUNT:-0}" -gt 0 ]; then set -- "$@" --resume; fi
exec srun --kill-on-bad-exit=1 scripts/launch_torchrun.sh "$@"
