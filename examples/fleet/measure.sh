#!/usr/bin/env bash
# What one machine does, whoever starts it: the runs of runs.txt, or only that of line N.
#
#     measure.sh RESULTS GPU [N]
#
# A line is a name and options of `fsbench run`. The run goes to RESULTS/GPU/NAME-HOST, so that no
# folder has times of two machines; if it was stopped there, it is continued. RUNS names another
# file of runs.
set -euo pipefail
results=$1 gpu=$2 lines=${3:-1,\$}
runs=${RUNS:-$(dirname "$0")/runs.txt}
code=0
while read -r name options || [ -n "$name" ]; do
    folder=$results/$gpu/$name-$(uname -n)
    if [ -e "$folder/env.json" ]; then
        again=(--resume "$folder")
    else
        read -ra again <<< "$options"
        again+=(--out "$folder")
    fi
    fsbench run "${again[@]}" < /dev/null || code=$?
done < <(sed -n "${lines}p" "$runs")
exit "$code"
