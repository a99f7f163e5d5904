#!/usr/bin/env bash
# Measures one GPU of each type of a Slurm cluster, and writes a report of all.
#
#     slurm.sh RESULTS TYPE...        as in: slurm.sh ~/fleet h100 h200
#
# RESULTS is a folder that all nodes see. `sinfo -o %G` tells the types. All tasks of a job array
# ask for the same, so each type gets an array of its own; its tasks are the lines of runs.txt.
# Partition, account and time limit: SBATCH_PARTITION, SBATCH_ACCOUNT, SBATCH_TIMELIMIT. To
# continue what a limit stopped, call it again.
set -euo pipefail
results=$(realpath -m "$1")
shift
here=$(dirname "$(realpath "$0")")
tasks=$(grep -c . "${RUNS:-$here/runs.txt}")
mkdir -p "$results/log"
after=afterany
for gpu in "$@"; do
    after+=:$(sbatch --parsable --array="1-$tasks" --gres="gpu:$gpu:1" --job-name="fsbench-$gpu" \
        --output="$results/log/%x-%a.txt" --open-mode=append \
        --wrap="'$here/measure.sh' '$results' '$gpu' \$SLURM_ARRAY_TASK_ID")
done
sbatch --dependency="$after" --job-name=fsbench-report --output="$results/log/report.txt" \
    --wrap="fsbench report '$results' --out '$results/report'"
