#!/usr/bin/env bash
# Times ft and the peers in turn on this machine and prints medians and ratios: in each round ft, then the peers.
#
#   PYTHON=/path/to/venv/bin/python ROUNDS=3 benches/peer.sh [configuration ...]
#
# A configuration is size:method:batch:seq:dtype[:layers[:settings]], or `products` for the matrix products alone; the default
# list is the tables of docs/benchmarks-cpu.md. `layers` of them keep their activations in ft (all, where nothing is said);
# `settings` of ft's optimizer, with commas between them: optimizer.state=int8. The virtual environment needs torch, transformers
# and peft. Rows go to $OUT (default: a temporary file).
#
# PEERS="torch torchtune llama.cpp" (default: torch) adds others. torchtune needs torchao 0.10, which peft refuses, so it has an
# environment of its own: TORCHTUNE_PYTHON. llama.cpp needs LLAMA_FINETUNE, its example `llama-finetune`, and takes part only in
# full training of one row in f32 (0.5b:full:1:512:f32).
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
rounds=${ROUNDS:-3}
steps=${STEPS:-2}
out=${OUT:-$(mktemp)}
threads=${THREADS:-2}
peers=${PEERS:-torch}
log=$(mktemp)
case " $peers " in *" llama.cpp "*) : "${LLAMA_FINETUNE:?the path of llama-finetune}" ;; esac
binary() {
  cargo build --release --bench "$1" --message-format=json 2>/dev/null |
    sed -n 's/.*"name":"'"$1"'".*"executable":"\([^"]*\)".*/\1/p' | tail -1
}
cargo build --release --bench step --bench product
case " $peers " in *" llama.cpp "*) cargo build --release --bin ft ;; esac
export FT=${CARGO_TARGET_DIR:-target}/release/ft
# peer NAME CONFIGURATION OPTIONS...: a line of a peer, or nothing if it has no such step.
peer() {
  local name=$1 configuration=$2
  shift 2
  case $name in
    torch) "$python" benches/peer_cpu.py "$@" ;;
    torchtune) "${TORCHTUNE_PYTHON:-$python}" benches/peer_cpu.py --impl torchtune "$@" ;;
    llama.cpp) case $configuration in *:full:1:*:f32*) "$python" benches/peer_llama_cpp.py "$@" ;; esac ;;
    *) echo "no peer has the name $name" >&2 && exit 2 ;;
  esac 2>"$log" || { tail -5 "$log" >&2; echo "the peer $name failed at $configuration" >&2; exit 1; }
}
ours=$(binary step) products=$(binary product)
if [ $# -eq 0 ]; then
  set -- 0.5b:lora:1:512:bf16 0.5b:full:1:512:bf16 0.5b:block:1:512:bf16:15 \
    0.5b:lora:4:512:bf16:20 0.5b:full:4:512:bf16 0.5b:block:4:512:bf16 \
    0.5b:full:1:512:bf16::optimizer.state=int8,optimizer.master=stochastic \
    small:lora:16:256:bf16 small:full:16:256:bf16 products
fi
for configuration in "$@"; do
  if [ "$configuration" = products ]; then
    for _ in $(seq "$rounds"); do
      "$products" --threads "$threads" | tee -a "$out"
      "$python" benches/peer_product.py --threads "$threads" 2>/dev/null | tee -a "$out"
    done
    continue
  fi
  IFS=: read -r size method batch seq dtype keep set <<<"$configuration"
  options=(--size "$size" --method "$method" --batch "$batch" --seq "$seq" --dtype "$dtype" --steps "$steps" --threads "$threads")
  for _ in $(seq "$rounds"); do
    # shellcheck disable=SC2086
    "$ours" "${options[@]}" ${keep:+--keep "$keep"} ${set:+--set ${set//,/ --set }} | tee -a "$out"
    for name in $peers; do
      peer "$name" "$configuration" "${options[@]}" | tee -a "$out"
    done
  done
done
"$python" - "$out" <<'PYTHON'
import json, statistics, sys
rows, products = {}, {}
for line in open(sys.argv[1]):
    row = json.loads(line)
    if "form" in row:
        key = (" x ".join(map(str, row["shape"])), row["form"])
        products.setdefault(key, {}).setdefault(row["impl"], []).append(row["gflops"])
        continue
    # A row of the peer follows the one of ft that it is compared with.
    if row["impl"] == "ft":
        key = tuple(row[k] for k in ("size", "method", "batch", "seq", "dtype", "keep")) + (" ".join(row["set"]),)
    rows.setdefault(key, {}).setdefault(row["impl"], []).append(row)
spread = lambda values: f"{statistics.median(values):.1f} ({min(values):.1f}-{max(values):.1f})"
print("| step | peer | ft tokens/s | peer tokens/s | ratio | ft MiB | peer MiB | ratio |")
print("|---|---|---|---|---|---|---|---|")
for (size, method, batch, seq, dtype, keep, settings), sides in rows.items():
    ours = sides.pop("ft")
    for name, peer in sides.items():
        speed = [[r["tokens_per_s"] for r in side] for side in (ours, peer)]
        memory = [statistics.median(r["peak_rss_mib"] for r in side) for side in (ours, peer)]
        ratio = statistics.median(a / b for a, b in zip(*speed))
        print(f"| {size} {method} {batch} x {seq} {dtype}, {keep} layers keep {settings} | {name} | {spread(speed[0])} | {spread(speed[1])} "
              f"| {ratio:.2f} | {memory[0]:.0f} | {memory[1]:.0f} | {memory[0] / memory[1]:.2f} |")
if products:
    print("| product | form | ft GFLOP/s | torch GFLOP/s | ratio |")
    print("|---|---|---|---|---|")
for (shape, form), sides in products.items():
    ratio = statistics.median(a / b for a, b in zip(sides["ft"], sides["torch"]))
    print(f"| {shape} | {form} | {spread(sides['ft'])} | {spread(sides['torch'])} | {ratio:.2f} |")
PYTHON
