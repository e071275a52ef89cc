#!/usr/bin/env bash
# compute-sanitizer: reads and writes outside of allocations, memory used after it is freed, races in shared memory,
# reads of memory that nothing wrote.
set -euo pipefail
. "$(dirname "$0")/common.sh"

sanitizer=${KIT_SANITIZER:-compute-sanitizer}
command -v "$sanitizer" > /dev/null || stop "compute-sanitizer is not installed"
export FT_GPU_SHORT=1
failed=0
out_dir=$(mktemp -d)
check() { # NAME SECONDS COMMAND...
  step "$@" || failed=$((failed + 1))
}
# initcheck and racecheck come first. They are slow, so they get short tests.
check "initcheck attention" 60 "$sanitizer" --tool initcheck --error-exitcode 9 "$bin/gpu" attention:: --test-threads=1
for test in ${KIT_RACES:-attention::documents loss::nothing_trained products::stacked}; do
  check "racecheck $test" 40 "$sanitizer" --tool racecheck --error-exitcode 9 "$bin/gpu" "$test" --test-threads=1
done
train=("$FT_BIN" train --recipe recipes/quickstart.toml model.device=cuda:0 tune.method=lora)
check "racecheck run" 90 "$sanitizer" --tool racecheck --error-exitcode 9 "${train[@]}" train.max_steps=1 \
  train.batch_size=1 'data.eval=[]' train.predict_with_generate=false 'train.sample_prompts=[]' "train.output_dir=$out_dir/races"
memcheck=("$sanitizer" --tool memcheck --padding 64 --track-stream-ordered-races all --error-exitcode 9)
check "memcheck run" 90 "${memcheck[@]}" "${train[@]}" memory.tier=host memory.activations=host train.max_steps=2 \
  "train.output_dir=$out_dir/run"
rm -rf "$out_dir"
for module in ${KIT_MODULES:-attention products loss quantized transfer updates activations}; do
  check "memcheck $module" 60 "${memcheck[@]}" "$bin/gpu" "$module::" --test-threads=1
done
[ "$failed" -eq 0 ] || stop "$failed checks did not pass"
