#!/usr/bin/env bash
# Runs the GPU tests on the software CUDA driver, with its own target directory (target/soft): nothing that it builds is
# linked by another build.
#
# Usage: tools/soft-cuda/run.sh                 all tests, as in CI
#        tools/soft-cuda/run.sh COMMAND...      a command with that environment, such as `cargo test ...` or
#                                               `target/soft/release/ft doctor`
# SOFT_CUDA_FEATURES: the features of what is built, `cuda` if not given.
set -euo pipefail
cd "$(dirname "$0")/../.."
export PATH="$PWD/tools/fake-nvcc:$PATH" NVCC="$PWD/tools/fake-nvcc/nvcc" CUDA_COMPUTE_CAP=80
export CARGO_TARGET_DIR="$PWD/target/soft"
# The kernels take the time, not ft: it is built fast (profile.toml). Its dependencies are those of the usual build.
cargo() { command cargo --config "$SOFT_CUDA_PROFILE" "$@"; }
export -f cargo
export SOFT_CUDA_FEATURES=${SOFT_CUDA_FEATURES:-cuda}
export SOFT_CUDA_PROFILE="$PWD/tools/soft-cuda/profile.toml"
if [ ! -d "$CARGO_TARGET_DIR/release" ] && [ -d target/release/deps ]; then
  mkdir -p "$CARGO_TARGET_DIR/release"
  # Links: cargo replaces a file and does not write into it.
  cp -rl target/release/{build,deps,.fingerprint} "$CARGO_TARGET_DIR/release/"
fi
driver="$CARGO_TARGET_DIR/cuda"
export LIBRARY_PATH="$driver${LIBRARY_PATH:+:$LIBRARY_PATH}" LD_LIBRARY_PATH="$driver${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
export FT_REQUIRE_GPU=1 FT_GPU_SHORT=1
# Without them programs can be checked, but not linked.
if command -v "${CXX:-g++}" > /dev/null; then tools/soft-cuda/build.sh "$driver"; else echo "no C++ compiler: no libraries of the driver" >&2; fi
if [ $# -gt 0 ]; then
  "$@"
  exit
fi

tests=$(cargo test --release --features "$SOFT_CUDA_FEATURES" --test gpu --no-run --message-format=json |
  sed -n 's/.*"executable":"\([^"]*\/gpu-[^"]*\)".*/\1/p' | tail -1)
[ -x "$tests" ] || { echo "cargo built no test binary" >&2; exit 1; }
logs="$CARGO_TARGET_DIR/logs"
rm -rf "$logs"
mkdir -p "$logs"

# ORDER[@CAPABILITY] FILTER [RUNS]: tests in one order of execution. An order makes a difference only where a second stream is
# used: the copies, layer inputs in host memory, layers of the host and of the disk. The long ones first.
list() {
  local names every="train::every_method"
  names=$("$tests" --list | sed -n 's/: test$//p')
  echo "late $every"
  sed -n 's/^\([a-z0-9_]*\)::.*/late \1::/p' <<< "$names" | sort -u | grep -vx 'late train::\|late transfer::'
  grep '^train::' <<< "$names" | grep -v "^$every\|^train::layer_inputs" | sed 's/^/late /'
  local copied="lora on layers of the host,blocks from the host,lora on layers and a head of the disk,blocks from the disk"
  for order in early random:1; do
    echo "$order $every $copied"
  done
  # Quantized weights and experts from the host and the disk, teachers with a head in parts.
  echo "early tiers::files_that_are_quantized"
  echo "random:1 tiers::loftq"
  echo "early tiers::distillation"
  echo "random:1 families::published_experts"
  for order in late early random:1; do echo "$order train::layer_inputs"; done
  # Less shared memory for a block: a GPU of a consumer.
  echo "late@86 attention::"
  for order in late early random:1 random:2 random:3 random:4; do echo "$order transfer::"; done
}

job() {
  local order=${1%@*} filter=$2 log
  if [ "$order" != "$1" ]; then export SOFT_CUDA_SM=${1#*@}; fi
  shift 2
  log="$logs/${order/:/-}${SOFT_CUDA_SM:-}-${filter//:/}.log"
  local start=$SECONDS
  # Products in fp8 need a newer device.
  if [ "$filter" = eight_bit:: ]; then export SOFT_CUDA_SM=90; fi
  if SOFT_CUDA_ORDER=$order FT_GPU_RUNS="$*" "$tests" "$filter" > "$log" 2>&1 && ! grep -q ' 0 passed' "$log"; then
    echo "ok      $order${SOFT_CUDA_SM:+@$SOFT_CUDA_SM} $filter ($((SECONDS - start)) s)"
  else
    echo "FAILED  $order $filter: $log"
    tail -n 40 "$log"
    return 1
  fi
}
export -f job
export tests logs
list | xargs -P "$(nproc)" -d '\n' -I{} bash -c 'job $1' job {}
