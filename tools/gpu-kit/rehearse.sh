#!/usr/bin/env bash
# Runs the scripts of the kit on the software CUDA driver, with small sizes: `tools/soft-cuda/run.sh tools/gpu-kit/rehearse.sh`.
# Checks that every script ends as it should and that the report has a row for each of their steps. PyTorch,
# compute-sanitizer and ncu are not rehearsed, only what the scripts do without them.
set -euo pipefail
cd "$(dirname "$0")/../.."
# A folder of its own: it is removed, so it is never the user's $OUT.
export OUT=${CARGO_TARGET_DIR:?run it with tools/soft-cuda/run.sh}/gpu-kit-rehearsal
rm -rf "$OUT"
mkdir -p "$OUT/bin"
cargo build --release --features "$SOFT_CUDA_FEATURES" --bin ft --test gpu --bench step --bench generate --message-format=json |
  sed -n 's/.*"executable":"\([^"]*\)".*/\1/p' | while read -r program; do
  name=$(basename "$program" | sed 's/-[0-9a-f]\{16\}$//')
  ln -sf "$program" "$OUT/bin/$name"
done
# In CI the rehearsal gets only what other programs leave of the cores: ten times the limits.
export KIT_SLOW=10 KIT_LIMIT=4000 KIT_BIN=$OUT/bin KIT_STEPS=1 KIT_NO_PEER=1 KIT_MODULES="transfer updates" KIT_LIST="small lora 1 64 none
small block 1 64 all" KIT_GRAPHS="small lora 1 64" KIT_GRAPH_STEPS=2 KIT_SHAPE=tiny KIT_DECODE="2 8 6 0
2 8 6 100" KIT_DECODE_SHAPE=assets/tiny KIT_BUDGETS=1 KIT_METHODS=block KIT_TOKENS=128 KIT_MICRO_BATCHES=1 FT_GPU_RUNS=lora
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
# A profile as ncu writes it: two kernels, of which one runs twice.
profiled=$(tools/gpu-kit/profile.py tools/gpu-kit/profile-example.csv | tail -n 1)
[ "$profiled" = '{"ms": 4.0, "launches": 3, "kernels": {"gemm": {"ms": 3.0, "count": 2, "gbytes": 0.006, "tensor": 60.0}, "add": {"ms": 1.0, "count": 1, "gbytes": 0.002, "tensor": 0.0}}}' ] ||
  fail "profile.py sums to $profiled"
# A group of tests of which none runs is a failure.
if KIT_MODULES=nothing OUT=$OUT/empty tools/gpu-kit/1-smoke.sh > /dev/null 2>&1; then fail "1-smoke.sh passes without tests"; fi
[ "$(grep -c '"rc": 1, .*"passed": 0' "$OUT/empty/1-smoke.jsonl")" -eq 1 ] || fail "no failed step without tests"
# A run that needs more than its forecast fails.
over=$OUT/over
mkdir -p "$over"
echo '{"peak_bytes": 1000000}' > "$over/plan.json"
echo '{"loss": 1, "tokens_per_second": 1, "peak_memory_bytes": 1200000}' > "$over/metrics.jsonl"
if tools/gpu-kit/budget.py "$over" > /dev/null 2>&1; then fail "budget.py accepts a peak above the forecast"; fi
# A driver that is not there stops the first script before anything else runs.
if LD_LIBRARY_PATH=/nowhere OUT=$OUT/broken KIT_LIMIT=60 CUDA_HOME=/nowhere tools/gpu-kit/1-smoke.sh > /dev/null 2>&1; then
  fail "1-smoke.sh runs without a driver"
fi
[ "$(grep -c '"rc"' "$OUT/broken/1-smoke.jsonl")" -eq 1 ] || fail "1-smoke.sh goes on without a driver"

tools/gpu-kit/report.py "$OUT" > "$OUT/report.md" || fail "report.py fails"
for row in 'KIT_STEPS=1' 'transfer | [1-9][0-9]* passed, 0 failed' 'quickstart | ok' 'losses and resume | 1 passed, 0 failed' 'not finite | 1 passed' \
  'layers small lora 1 x 64 --vary --graphs | [0-9.]* | [1-9][0-9]* ' 'small lora 1 x 64 keep=none | [0-9.]* | failed' 'block in 1 GiB | ok | [0-9.]* | [0-9]* | [0-9]*'; do
  grep -q "$row" "$OUT/report.md" || fail "the report has no row like: $row"
done
echo "the kit is rehearsed: $OUT/report.md"
