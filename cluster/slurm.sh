#!/bin/bash
#SBATCH --job-name=weft
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=01:00:00
#SBATCH --output=%x-%j.log
#
# sbatch cluster/slurm.sh LAYOUT.toml COMMAND...
#
# One torchrun per node starts the ranks. COMMAND is a script or "-m MODULE"; the word LAYOUT in it
# stands for the layout file, which is copied beside the job's log when the job starts, so that
# editing the original does not change a job that runs.
#
#   sbatch cluster/slurm.sh cluster/layout.toml -m weft train tabular LAYOUT
#   sbatch --nodes=4 cluster/slurm.sh mine.toml train.py --layout LAYOUT
#
# RANKS_PER_NODE: default, the GPUs of a node. PYTHON: default, python.

set -euo pipefail

if [ "$#" -lt 2 ]; then
    echo "usage: sbatch $0 LAYOUT.toml COMMAND... (LAYOUT in COMMAND stands for the file)" >&2
    exit 2
fi
if [ ! -f "$1" ]; then
    echo "no layout file '$1'" >&2
    exit 2
fi

layout="${SLURM_SUBMIT_DIR:-$PWD}/layout-${SLURM_JOB_ID}.toml"
cp -- "$1" "$layout"
shift

command=()
for word in "$@"; do
    if [ "$word" = LAYOUT ]; then command+=("$layout"); else command+=("$word"); fi
done

ranks="${RANKS_PER_NODE:-${SLURM_GPUS_PER_NODE:-1}}"
ranks="${ranks##*:}" # "h100:8" is 8
mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
# Jobs that share a node do not share a port, and Linux gives out none below 32768 itself.
port=$((20000 + SLURM_JOB_ID % 12000))

# Settings of NCCL that matter are in docs/clusters.md.
threads=$((${SLURM_CPUS_PER_TASK:-1} / ranks))
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-$((threads > 0 ? threads : 1))}"
export TORCH_NCCL_ASYNC_ERROR_HANDLING="${TORCH_NCCL_ASYNC_ERROR_HANDLING:-1}"
export NCCL_DEBUG="${NCCL_DEBUG:-WARN}"

# SLURM_NODEID, not the order of arrival, numbers the nodes: the mesh follows the topology.
# shellcheck disable=SC2016
exec srun --kill-on-bad-exit=1 bash -c '
    python="$1" nodes="$2" ranks="$3" address="$4" port="$5"
    shift 5
    exec "$python" -m torch.distributed.run \
        --nnodes "$nodes" --node-rank "$SLURM_NODEID" --nproc-per-node "$ranks" \
        --master-addr "$address" --master-port "$port" "$@"
' node "${PYTHON:-python}" "$SLURM_NNODES" "$ranks" "${nodes[0]}" "$port" "${command[@]}"
