#!/usr/bin/env bash
# Where the time of a step goes: kernel times by name, and the use of the tensor cores, from Nsight Compute.
set -euo pipefail
. "$(dirname "$0")/common.sh"

command -v ncu > /dev/null || stop "Nsight Compute (ncu) is not installed"
# Every kernel of two steps of a model with few layers. A kernel is replayed once for each group of metrics, so there are
# few of them; the clock is that of an ordinary run.
metrics=gpu__time_duration.sum,dram__bytes.sum
# Not every GPU has this counter, and ncu refuses a list with a metric that it does not know.
if ncu --query-metrics 2> /dev/null | grep sm__pipe_tensor_cycles_active > /dev/null; then
  metrics+=,sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed
fi
failed=0
profile() { # NAME ARGUMENTS...
  local name=$1
  shift
  step "$name" "${KIT_PROFILE_LIMIT:-140}" bash -c 'ncu --clock-control none --metrics "$1" --csv --page raw "${@:3}" > "$2.csv" &&
    tools/gpu-kit/profile.py "$2.csv"' _ "$metrics" "$OUT/profile" \
    "$bin/step" --device cuda:0 --threads "$(nproc)" --layers 2 --seq 2048 --steps 1 "$@" || failed=$((failed + 1))
  rm -f "$OUT/profile.csv"
}
profile "0.5b lora 8 x 2048, 2 layers" --size 0.5b --method lora --batch 8
profile "llama-3.1-8b lora 1 x 2048, 2 layers" --size llama-3.1-8b --method lora --batch 1
profile "llama-3.1-8b full 1 x 2048, 2 layers" --size llama-3.1-8b --method full --batch 1
[ "$failed" -eq 0 ] || stop "$failed profiles failed"
