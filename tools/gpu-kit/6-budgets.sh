#!/usr/bin/env bash
# Memory budgets: the forecast against the peak, and whether a run within a budget ever fails for lack of memory.
set -euo pipefail
. "$(dirname "$0")/common.sh"

failed=0
# A shape without data trains on random tokens.
run() { # NAME SETTINGS...
  local name=$1 out_dir
  shift
  out_dir=$(mktemp -d)
  step "$name" "${KIT_BUDGET_LIMIT:-150}" bash -c '"$FT_BIN" train --recipe recipes/quickstart.toml "train.output_dir=$1" "${@:2}" &&
    python3 tools/gpu-kit/budget.py "$1"' _ "$out_dir/run" model.device=cuda:0 model.dtype=bf16 'data.train=[]' \
    'data.eval=[]' "data.max_length=${KIT_TOKENS:-2048}" train.max_steps=3 train.batch_size=1 train.save_steps=0 train.logging_steps=1 \
    train.predict_with_generate=false 'train.sample_prompts=[]' "$@" || failed=$((failed + 1))
  rm -rf "$out_dir"
}
for budget in ${KIT_BUDGETS:-24 16 12 8}; do
  for method in ${KIT_METHODS:-block lora}; do
    run "$method in $budget GiB" "model.path=shape:${KIT_SHAPE:-llama-3.1-8b}" "tune.method=$method" "memory.budget=${budget}GiB"
  done
done
# Streamed layers against resident weights, at 16,384 tokens a step: 8 micro-batches.
streamed=(tune.method=block "train.gradient_accumulation_steps=${KIT_MICRO_BATCHES:-8}")
for tier in ${KIT_STREAMED:-host device}; do
  budget=(memory.budget=${KIT_STREAMED_BUDGET:-8GiB})
  if [ "$tier" = device ]; then budget=(); fi
  run "block, ${KIT_MICRO_BATCHES:-8} micro-batches, weights in the memory of the $tier" "model.path=shape:${KIT_SHAPE:-llama-3.1-8b}" "memory.tier=$tier" \
    "${streamed[@]}" "${budget[@]}"
done
[ "$failed" -eq 0 ] || stop "$failed runs failed or needed more than their forecast"
