#!/bin/sh
# Train on every GPU of this machine, or of several:
#   scripts/launch_torchrun.sh --config FILE --shards DIR [--resume] [section.key=value …]
# Several machines: run it on each with NODES=<number> HEAD=<host of the first>, started within a few minutes.
set -eu
cd "$(dirname "$0")/.."
nodes=${NODES:-1}
per_node=${GPUS:-$(nvidia-smi --list-gpus 2>/dev/null | wc -l)}
[ "$per_node" -gt 0 ] || per_node=1
if [ "$nodes" -gt 1 ]; then
    : "${HEAD:?set HEAD to the host name of the first machine}"
    set -- --nnodes "$nodes" --rdzv-backend c10d --rdzv-endpoint "$HEAD:${PORT:-29500}" --rdzv-id "${JOB:-somaspeed}" \
        --nproc-per-node "$per_node" -m somaspeed.train "$@"
else
    set -- --standalone --nproc-per-node "$per_node" -m somaspeed.train "$@"
fi
exec .venv/bin/torchrun "$@"
