#!/usr/bin/env bash
# compute-sanitizer: reads and writes outside of allocations, memory used after it is freed, races in shared memory,
# reads of memory that nothing wrote.
set -euo pipefail
. "$(dirname "$0")/common.sh"

sanitizer=${KIT_SANITIZER:-compute-sanitizer}
command -v "$sanitizer" > /dev/null || stop "compute-sanitizer is not installed"
export FT_GPU_SHORT=1
memcheck=("$sanitizer" --tool memcheck --padding 64 --track-stream-ordered-races all --error-exitcode 9)
failed=0
for module in ${KIT_MODULES:-attention loss quantized transfer updates activations}; do
  step "memcheck $module" 100 "${memcheck[@]}" "$bin/gpu" "$module::" --test-threads=1 || failed=$((failed + 1))
done
out_dir=$(mktemp -d)
step "memcheck run" 100 "${memcheck[@]}" "$FT_BIN" train --recipe recipes/quickstart.toml model.device=cuda:0 \
  tune.method=lora memory.tier=host memory.activations=host train.max_steps=2 "train.output_dir=$out_dir/run" \
  || failed=$((failed + 1))
rm -rf "$out_dir"
for module in ${KIT_RACES:-attention::forward_and_backward loss::loss_and}; do
  step "racecheck $module" 120 "$sanitizer" --tool racecheck --error-exitcode 9 "$bin/gpu" "$module" --test-threads=1 \
    || failed=$((failed + 1))
done
step "initcheck attention" 60 "$sanitizer" --tool initcheck --error-exitcode 9 "$bin/gpu" attention:: --test-threads=1 \
  || failed=$((failed + 1))
[ "$failed" -eq 0 ] || stop "$failed checks report errors"
