#!/usr/bin/env bash
# Runs the GPU tests on the software CUDA driver, with its own target directory (target/soft): nothing that it builds is
# linked by another build.
#
# Usage: tools/soft-cuda/run.sh                 all tests, as in CI
#        tools/soft-cuda/run.sh COMMAND...      a command with that environment, such as `cargo test ...` or
#                                               `target/soft/release/ft doctor`
set -euo pipefail
cd "$(dirname "$0")/../.."
export PATH="$PWD/tools/fake-nvcc:$PATH" NVCC="$PWD/tools/fake-nvcc/nvcc" CUDA_COMPUTE_CAP=80
export CARGO_TARGET_DIR="$PWD/target/soft"
# The kernels take the time, not ft: it is built fast.
export CARGO_PROFILE_RELEASE_OPT_LEVEL=1 CARGO_PROFILE_RELEASE_CODEGEN_UNITS=64 CARGO_PROFILE_RELEASE_INCREMENTAL=true
driver="$CARGO_TARGET_DIR/cuda"
export LIBRARY_PATH="$driver${LIBRARY_PATH:+:$LIBRARY_PATH}" LD_LIBRARY_PATH="$driver${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
export FT_REQUIRE_GPU=1 FT_GPU_SHORT=1
tools/soft-cuda/build.sh "$driver"
if [ $# -gt 0 ]; then exec "$@"; fi

cargo test --release --features cuda --test gpu --no-run
