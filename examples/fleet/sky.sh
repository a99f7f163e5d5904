#!/usr/bin/env bash
# Measures one GPU of each type in the cloud with SkyPilot, and writes a report of all.
#
#     sky.sh RESULTS TYPE...        as in: sky.sh fleet H100 H200
#
# From the root of the repository. Each machine is taken down once its results are here, or after
# ten idle minutes. `sky check` tells which clouds can be used.
set -euo pipefail
results=$1
shift
mkdir -p "$results/log"
commit=$(git rev-parse HEAD)
for gpu in "$@"; do
    cluster=fsbench-${gpu,,}
    (
        sky launch --yes --cluster "$cluster" --gpus "$gpu:1" --env "GPU=$gpu" \
            --env "FSBENCH_COMMIT=$commit" --idle-minutes-to-autostop 10 --down \
            examples/fleet/sky.yaml || echo "sky launch: exit $?"
        rsync -a "$cluster:fleet/" "$results/" && sky down --yes "$cluster"
    ) > "$results/log/$cluster.txt" 2>&1 &
done
wait
fsbench report "$results" --out "$results/report"
