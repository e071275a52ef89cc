#!/usr/bin/env bash
# Does it start, is every operation right, does a run work? All other scripts depend on this one.
set -euo pipefail
. "$(dirname "$0")/common.sh"

step libraries 20 bash -c '! ldd "$FT_BIN" | grep "not found"' || stop "a library is missing"
step doctor 60 "$FT_BIN" doctor || echo "doctor reports a problem"
# Every group of tests but whole runs (3-runs.sh).
modules=${KIT_MODULES:-$("$bin/gpu" --list | sed -n 's/^\([a-z_]*\)::.*: test$/\1/p' | sort -u | grep -vx train)}
[ -n "$modules" ] || stop "the test program lists no test"
failed=0
for module in $modules; do
  FT_CUDA_SYNC=1 step "$module" 120 "$bin/gpu" "$module::" --test-threads=1 || failed=$((failed + 1))
  if tail -n 1 "$results" | grep -q '"passed": 0,'; then stop "no test of $module passes"; fi
done
out_dir=$(mktemp -d)
step quickstart 120 "$FT_BIN" train --recipe recipes/quickstart.toml model.device=cuda:0 \
  "train.max_steps=${KIT_STEPS:-20}" "train.output_dir=$out_dir/run" || stop "the quickstart fails"
rm -rf "$out_dir"
[ "$failed" -eq 0 ] || stop "$failed groups of operations fail"
