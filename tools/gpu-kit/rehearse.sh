#!/usr/bin/env bash
# Runs the whole kit on the software CUDA driver, with small sizes: `tools/soft-cuda/run.sh tools/gpu-kit/rehearse.sh`.
# Checks that every script ends as it should and that the report has a row for each of their steps.
set -euo pipefail
cd "$(dirname "$0")/../.."
export OUT=${OUT:-$CARGO_TARGET_DIR/gpu-kit}
rm -rf "$OUT"
mkdir -p "$OUT/bin"
cargo build --release --features cuda --bin ft --test gpu --bench step --message-format=json |
  sed -n 's/.*"executable":"\([^"]*\)".*/\1/p' | while read -r program; do
  name=$(basename "$program" | sed 's/-[0-9a-f]\{16\}$//')
  ln -sf "$program" "$OUT/bin/$name"
done
export KIT_BIN=$OUT/bin KIT_STEPS=1 KIT_NO_PEER=1 KIT_MODULES="transfer updates" KIT_LIST="small lora 1 64 none
small block 1 64 all" KIT_SHAPE=tiny KIT_BUDGETS=1 KIT_METHODS=block KIT_TOKENS=128 FT_GPU_RUNS=lora
fail() {
  echo "rehearsal: $1" >&2
  tail -n 30 "$OUT"/*.log >&2
  exit 1
}

tools/gpu-kit/1-smoke.sh || fail "1-smoke.sh fails"
# Without the sanitizer, and without Nsight Compute, the scripts say so and end with 1.
if KIT_SANITIZER=/nowhere/compute-sanitizer tools/gpu-kit/2-sanitize.sh; then fail "2-sanitize.sh misses nothing"; fi
grep -q '"stopped"' "$OUT/2-sanitize.jsonl" || fail "2-sanitize.sh does not say why it stopped"
tools/gpu-kit/3-runs.sh || fail "3-runs.sh fails"
tools/gpu-kit/4-speed.sh || fail "4-speed.sh fails"
if ! command -v ncu > /dev/null; then
  if tools/gpu-kit/5-profile.sh; then fail "5-profile.sh misses nothing"; fi
fi
tools/gpu-kit/6-budgets.sh || fail "6-budgets.sh fails"
# A driver that is not there stops the first script before anything else runs.
if LD_LIBRARY_PATH=/nowhere OUT=$OUT/broken KIT_LIMIT=60 CUDA_HOME=/nowhere tools/gpu-kit/1-smoke.sh > /dev/null 2>&1; then
  fail "1-smoke.sh runs without a driver"
fi
[ "$(grep -c '"rc"' "$OUT/broken/1-smoke.jsonl")" -eq 1 ] || fail "1-smoke.sh goes on without a driver"

tools/gpu-kit/report.py "$OUT" > "$OUT/report.md" || fail "report.py fails"
for row in 'transfer | [1-9][0-9]* passed, 0 failed' 'quickstart | ok' 'losses | 1 passed, 0 failed' 'resume | 1 passed' \
  'small lora 1 x 64 keep=none | [0-9.]* | failed' 'block in 1 GiB | ok | [0-9.]* | [0-9]* | [0-9]*'; do
  grep -q "$row" "$OUT/report.md" || fail "the report has no row like: $row"
done
echo "the kit is rehearsed: $OUT/report.md"
