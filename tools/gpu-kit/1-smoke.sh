#!/usr/bin/env bash
# Does it start, is every operation right, does a run work? All other scripts depend on this one.
set -euo pipefail
. "$(dirname "$0")/common.sh"

step libraries 20 bash -c '! ldd "$FT_BIN" | grep "not found"' || stop "a library is missing"
step doctor 60 "$FT_BIN" doctor || echo "doctor reports a problem"
# Every group of tests but whole runs (3-runs.sh).
modules=${KIT_MODULES:-$("$bin/gpu" --list | sed -n 's/^\([a-z0-9_]*\)::.*: test$/\1/p' | sort -u | grep -vx train)}
[ -n "$modules" ] || stop "the test program lists no test"
# Groups side by side, each on cores of its own: most of their time is that of the CPU they are compared with.
at_once=${KIT_JOBS:-4}
each=$(($(nproc) / at_once > 1 ? $(nproc) / at_once : 1))
run_groups() { # SLOT: takes the next group until none is left.
  local module first=$(($1 * each % $(nproc)))
  while module=$(flock "$OUT/.groups.lock" sh -c 'head -n 1 "$1" && sed -i 1d "$1"' _ "$OUT/.groups") && [ -n "$module" ]; do
    FT_CUDA_SYNC=1 step "$module" 180 taskset -c "$first-$((first + each - 1))" "$bin/gpu" "$module::" --test-threads=1 || true
  done
}
tr ' ' '\n' <<< "$modules" > "$OUT/.groups"
for slot in $(seq 0 $((at_once - 1))); do run_groups "$slot" & done
wait
failed=$(grep -vc '"rc": 0,\|"name":"machine"\|"name": "doctor"' "$results" || true)
if grep -q '"passed": 0,' "$results"; then stop "no test of a group passes"; fi
out_dir=$(mktemp -d)
step quickstart 120 "$FT_BIN" train --recipe recipes/quickstart.toml model.device=cuda:0 \
  "train.max_steps=${KIT_STEPS:-20}" "train.output_dir=$out_dir/run" || stop "the quickstart fails"
rm -rf "$out_dir"
[ "$failed" -eq 0 ] || stop "$failed groups of operations fail"
