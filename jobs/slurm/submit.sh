#!/bin/bash
# An array of tasks that share the shards, and the step after it:
#   jobs/slurm/submit.sh jobs/eight-gpus.yaml 16
# from the folder the job file's paths begin at, which all nodes must see; 'embed-corpus' must be on the PATH there.
# Partition, account, GPUs and the like are given as sbatch takes them from the environment, for both steps:
#   SBATCH_PARTITION=gpu SBATCH_GPUS_PER_NODE=1 SBATCH_TIMELIMIT=08:00:00 jobs/slurm/submit.sh JOB.yaml 16
# CPUs of each task: CPUS_PER_TASK, 2 if not given. Limits of the job file (max-cost and the like) hold for each task and
# once more for the second step; a job file with 'verify: true' or 'prune: true' is for one machine, ranks refuse it.
# Started again it continues: what is finished is in the output's ledger.
set -euo pipefail
if [ $# -ne 2 ] || ! [[ "$2" =~ ^[1-9][0-9]*$ ]] || [ ! -r "$1" ]; then
    echo "usage: $0 JOB.yaml NUMBER_OF_TASKS" >&2
    exit 2
fi
job=$1 tasks=$2 here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

# More tasks than the cluster allows in one array are not needed: each does as many shards as its share has.
limit=$(scontrol show config | sed -n 's/^MaxArraySize *= *//p')
if [ "$tasks" -ge "${limit:-1001}" ]; then
    echo "$0: an array of this cluster has at most $((limit - 1)) tasks (MaxArraySize), asked for $tasks" >&2
    exit 2
fi

array=$(sbatch --parsable --cpus-per-task="${CPUS_PER_TASK:-2}" --array="0-$((tasks - 1))" "$here/embed.sbatch" "$job")
# afterany, not afterok: what a lost task left is done by the second step, and a damaged shard must not keep the others
# from being indexed. Its own exit code is the job's.
finish=$(sbatch --parsable --cpus-per-task="${CPUS_PER_TASK:-2}" --dependency="afterany:${array%%;*}" "$here/finish.sbatch" "$job")
echo "${array%%;*} ${finish%%;*}"
echo "array ${array%%;*} of $tasks tasks, then ${finish%%;*}; watch it with: squeue -u \$USER; logs: embed-corpus-*.log here" >&2
