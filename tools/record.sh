#!/usr/bin/env bash
# What results/ holds of a machine, measured anew: tools/record.sh FOLDER. Not what a whole model
# takes (fsbench e2e).
#
# One job at a time on each GPU, so that no timing shares one; the long ones first. A job's output
# is in FOLDER/log/, its exit code in FOLDER/log/jobs.txt. Exit codes of single jobs do not stop
# the others: a sampler that fails verification is a result.
set -euo pipefail
export FOLDER=$1
mkdir -p "$FOLDER/log" "$FOLDER/verify"
gpus=$(nvidia-smi --list-gpus | wc -l)

models=$(python3 -c '
import tomllib
from importlib import resources
print(",".join(tomllib.loads((resources.files("fsbench") / "models.toml").read_text())))')
samplers=$(fsbench list --json | python3 -c '
import json, sys
for each in json.load(sys.stdin)["providers"]:
    # Samplers on the host take hours for the full tier; they are verified in CI, on a CPU.
    host = not each["capabilities"].get("graph_safe", True)
    if each["kind"] in ("exact", "greedy") and each["cuda"] == "yes" and not host:
        print(each["name"])')

# The exact samplers of both presets, but for those in plain torch.
profiled="flash_sampling flash_sampling_hopper flash_sampling_token gumbel_argmax
    group_gumbel_parallel flashinfer_gumbel flashinfer_gumbel_lean
    flashinfer_top_k_top_p flashinfer_top_k_top_p_lean multinomial_compiled exponential_race
    matmul_only"

# The screened samplers and what they are compared with.
screened="flash_sampling_screened flash_sampling greedy_screened greedy matmul_only"

jobs() {
    echo "paper fsbench run --preset paper --breakdown --out $FOLDER/paper"
    echo "lean fsbench run --preset lean --breakdown --out $FOLDER/lean"
    [ "$gpus" -gt 1 ] || echo "simple fsbench hotvocab bench --rows 512 --out $FOLDER/simple"
    echo "options python3 tools/measure_options.py $FOLDER/options/options.csv"
    # Unverified and with caches of its own, so that first calls are cold.
    cold=$(mktemp -d)
    echo "profile env TRITON_CACHE_DIR=$cold/triton TORCHINDUCTOR_CACHE_DIR=$cold/inductor" \
        "FLASHINFER_WORKSPACE_BASE=$cold timeout 300" \
        "fsbench run --batch 1,16,64,256 --iters 50 --breakdown --energy 0.5 --no-check" \
        "$(printf -- '--provider %s ' $profiled) --out $FOLDER/profile"
    echo "store fsbench run --provider flash_sampling --provider flash_sampling_store --no-check" \
        "--out $FOLDER/store"
    echo "models fsbench run --model $models --batch 1,64,256 --iters 50 --no-check" \
        "--provider flash_sampling_hopper --provider flash_sampling --provider gumbel_argmax" \
        "--provider matmul_only --provider weight_stream --out $FOLDER/models"
    echo "odd fsbench run --model qwen3-8b --batch 3,24,77,96,200,512,1024 --no-check" \
        "--provider flash_sampling_hopper --provider gumbel_argmax --provider matmul_only" \
        "--out $FOLDER/odd"
    echo "truncated fsbench run --preset truncated --no-check --out $FOLDER/truncated"
    echo "launches python3 tools/measure_truncated.py $FOLDER/truncated-launches/launches.csv"
    for shape in "4096 --v 151936" "8192 --v 128256"; do
        echo "screened-${shape%% *} fsbench run --d $shape --logits normal:3 --no-check" \
            "--batch 1,2,4,8,16,32,64,128 --rounds 4 --breakdown" \
            "$(printf -- '--provider %s ' $screened) --out $FOLDER/screened-d${shape%% *}"
    done
    echo "screened-cases python3 tools/measure_screened.py $FOLDER/screened-cases/cases.csv"
    for name in $samplers; do
        echo "verify-$name fsbench verify --tier full --device cuda --provider $name" \
            "--output $FOLDER/verify/$name.jsonl"
    done
}

run() {
    name=${1%% *}
    begin=$(date +%s)
    code=0
    CUDA_VISIBLE_DEVICES=$SLOT ${1#* } > "$FOLDER/log/$name.txt" 2>&1 || code=$?
    echo "$name: exit $code after $(($(date +%s) - begin)) s" | tee -a "$FOLDER/log/jobs.txt"
}
export -f run

jobs | xargs -d '\n' -P "$gpus" --process-slot-var=SLOT -I{} bash -c 'run "$1"' _ {}
if [ "$gpus" -gt 1 ]; then
    degrees=1
    for n in 2 4 8; do if [ "$n" -le "$gpus" ]; then degrees+=,$n; fi; done
    SLOT=$(seq -s, 0 $((gpus - 1))) run "tp fsbench run --preset tp --tp $degrees --no-check
        --model llama3-70b,qwen3-8b --batch 1,16,64,256 --out $FOLDER/tp"
fi
