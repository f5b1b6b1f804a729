#!/bin/sh
# Pretrains on one machine or on several: one rank for each GPU, or without GPUs one for each two CPU cores.
#
#   ./launch.sh [--dry-run] [--nproc-per-node N] --config configs/gpt.yaml [SECTION.FIELD=VALUE]...
#
# Outside a checkout, the same command is `python -m megatron_lite.launch ...`.
#
# Some layouts need another number of ranks: configs/quickstart.yaml has parallel.tensor: 2 and needs --nproc-per-node 2
# or a multiple.
#
# On several machines, start the same command on each, with NNODES, NODE_RANK (0, 1, ...) and MASTER_ADDR (address of
# the first machine), and with MASTER_PORT if 29500 is in use. NNODES=1:4 lets machines join during the run, and with
# --max-restarts leave. A SLURM allocation sets all of these; outside a job step, srun starts this script on every node.
#
# All other arguments go to `megatron-lite pretrain`, whose exit code is returned. Variables that are already set stay.
# PYTHON is the interpreter, by default .venv/bin/python of the checkout if it exists, else python3.
set -eu

usage() {
    sed -n '2,/^set -eu/s/^# \{0,1\}//p' "$0"
}

fail() {
    echo "launch.sh: $1" >&2
    exit 2
}

dry_run=no
ranks=default
count=$#
while [ "$count" -gt 0 ]; do
    argument=$1
    shift
    count=$((count - 1))
    case $argument in
    --help | -h)
        usage
        exit 0
        ;;
    --dry-run) dry_run=yes ;;
    --nproc-per-node=*) ranks=${argument#*=} ;;
    --nproc-per-node)
        if [ "$count" -eq 0 ]; then fail "--nproc-per-node needs a number"; fi
        ranks=$1
        shift
        count=$((count - 1))
        ;;
    *) set -- "$@" "$argument" ;; # appended: the arguments keep their order
    esac
done
if [ $# -eq 0 ]; then
    usage >&2
    exit 2
fi
case $ranks in
default) ;;
'' | *[!0-9]* | 0*) fail "--nproc-per-node is '$ranks'; give a number above 0, such as 2" ;;
esac

PYTHON=${PYTHON:-python3}

# Several machines.
if [ "${SLURM_STEP_NUM_TASKS:-1}" -gt "${SLURM_STEP_NUM_NODES:-1}" ]; then
    fail "srun started this script $SLURM_STEP_NUM_TASKS times on $SLURM_STEP_NUM_NODES nodes; \
use srun --ntasks-per-node=1"
fi
if [ -z "${NNODES:-}" ] && [ "${SLURM_NNODES:-1}" -gt 1 ]; then
    if [ -z "${SLURM_STEP_ID:-}" ]; then
        if [ "$ranks" != default ]; then set -- --nproc-per-node "$ranks" "$@"; fi
        set -- "$PYTHON" -m megatron_lite.launch "$@"
        # Since SLURM 22.05, srun ignores SLURM_CPUS_PER_TASK.
        if [ -n "${SLURM_CPUS_PER_TASK:-}" ]; then set -- --cpus-per-task="$SLURM_CPUS_PER_TASK" "$@"; fi
        # --wait kills a node that still runs 60 s after another has finished.
        set -- srun --ntasks-per-node=1 --export=ALL --wait=60 "$@"
        echo "$*"
        if [ "$dry_run" = yes ]; then exit 0; fi
        exec "$@"
    fi
    NNODES=$SLURM_NNODES
    NODE_RANK=$SLURM_NODEID
    # Jobs on one node need different ports. Linux uses ports from 32768 for outgoing connections.
    MASTER_PORT=${MASTER_PORT:-$((20000 + SLURM_JOB_ID % 12000))}
    if [ -z "${MASTER_ADDR:-}" ]; then
        MASTER_ADDR=$(scontrol show hostnames "${SLURM_STEP_NODELIST:-$SLURM_JOB_NODELIST}" | head -n 1)
    fi
fi
nodes=
if [ -n "${NNODES:-}" ] && [ "$NNODES" != 1 ]; then
    if [ -z "${NODE_RANK:-}" ] || [ -z "${MASTER_ADDR:-}" ]; then
        fail "NNODES is $NNODES; set NODE_RANK (0 on the first machine) and MASTER_ADDR (the first machine) too"
    fi
    nodes="--nnodes $NNODES --node-rank $NODE_RANK --master-addr $MASTER_ADDR --master-port ${MASTER_PORT:-29500}"
fi

if [ -n "${CUDA_VISIBLE_DEVICES+set}" ]; then
    gpus=$(printf '%s' "$CUDA_VISIBLE_DEVICES" | tr ',' '\n' | grep -c '^[0-9GM]' || true)
elif command -v nvidia-smi >/dev/null 2>&1; then
    gpus=$(nvidia-smi --list-gpus 2>/dev/null | grep -c '^GPU ' || true)
else
    gpus=0
fi
# Unset OpenMP's variables, because nproc would print their number of threads.
cores=$(env -u OMP_NUM_THREADS -u OMP_THREAD_LIMIT nproc 2>/dev/null || getconf _NPROCESSORS_ONLN)
cores=${SLURM_CPUS_PER_TASK:-$cores}

if [ "$ranks" = default ]; then
    ranks=$gpus
    if [ "$ranks" -eq 0 ]; then ranks=$((cores / 2)); fi
    if [ "$ranks" -eq 0 ]; then ranks=1; fi
fi

threads=$((cores / ranks))
if [ "$threads" -eq 0 ]; then threads=1; fi
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-$threads}"
variables=OMP_NUM_THREADS
if [ "$gpus" -gt 0 ]; then
    # The ranks set the other variables of CUDA and NCCL, which follow from the config (launch/environment.py).
    export NCCL_DEBUG="${NCCL_DEBUG:-WARN}"
    variables="$variables NCCL_DEBUG"
fi

echo "gpus=$gpus cores=$cores ranks=$ranks"
for variable in $variables; do
    echo "$variable=$(printenv "$variable")"
done
# shellcheck disable=SC2086 # $nodes has several words
set -- "$PYTHON" -m megatron_lite pretrain $nodes --nproc-per-node "$ranks" "$@"
echo "$*"
if [ "$dry_run" = no ]; then
    exec "$@"
fi
