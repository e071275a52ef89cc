#!/usr/bin/env bash
# Builds the software CUDA driver into FOLDER (target/soft/cuda): the driver's libraries, and ft's kernels compiled with
# the emulator. Needs g++ (or CXX); compiles only what changed.
#
# Usage: tools/soft-cuda/build.sh [FOLDER]
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../.." && pwd)
folder=${1:-$root/target/soft/cuda}
cuda=$root/crates/ft-kernels/cuda
emulate=$root/crates/ft-kernels/emulate
cxx=${CXX:-g++}
# No contraction: the kernels promise the bits of the CPU.
flags=(-std=c++17 -O3 -march=native -g1 -fPIC -Wall -Wextra -ffp-contract=off)
emulator=(-I "$emulate" -I "$emulate/include" -Wno-unknown-pragmas -Wno-unused-function -Wno-unused-parameter)
mkdir -p "$folder/modules/ft-kernels"

# True if the target is missing, or older than one of the sources.
stale() {
  local target=$1 source
  shift
  [ -e "$target" ] || return 0
  for source in "$@"; do [ "$target" -nt "$source" ] || return 0; done
  return 1
}

# NAME, SONAME, extra flags: a library from driver/*.cpp.
library() {
  local name=$1 soname=$2
  shift 2
  local sources=("$@")
  local linked=()
  [ "$name" = cuda ] || linked=(-L "$folder" -lcuda)
  stale "$folder/$soname" "${sources[@]}" "$here"/driver/*.h "$here"/kernel.h "$here"/build.sh || return 0
  "$cxx" "${flags[@]}" -shared -Wl,-soname,"$soname" -o "$folder/$soname.new" "${sources[@]}" "${linked[@]}" -ldl -pthread
  mv "$folder/$soname.new" "$folder/$soname"
  ln -sfn "$soname" "$folder/lib$name.so"
}

# A library that the linker asks for, and nothing calls.
empty() {
  local name=$1
  [ -e "$folder/lib$name.so" ] || "$cxx" -shared -x c++ -o "$folder/lib$name.so" -Wl,-soname,"lib$name.so" /dev/null
}

# FILE, or FILE and `f16`: the module with f16 in the place of bf16.
module() {
  local source=$1 half=${2:-} name
  name=$(basename "$source" .cu)${half:+_f16}
  local target=$folder/modules/ft-kernels/$name.so table=$folder/modules/ft-kernels/$name.cpp
  stale "$target" "$cuda"/*.cuh "$source" "$emulate"/*.h "$here"/modules/emulated.h "$here"/kernel.h "$here"/build.sh || return 0
  {
    [ -z "$half" ] || echo '#define FT_F16'
    echo '#include "emulated.h"'
    echo "#include \"$source\""
  } > "$table"
  # In a list, a kernel is `extern "C" SOFT_CUDA_KERNEL void SOFT_CUDA_BOUNDS(threads, ...) name(`.
  local list
  list=$("$cxx" "${flags[@]}" "${emulator[@]}" -I "$here/modules" -DSOFT_CUDA_LIST -E -P "$table" | tr '\n' ' ' |
    grep -oE 'SOFT_CUDA_KERNEL +void +(SOFT_CUDA_BOUNDS *\([^;{]*, *\) *)?[A-Za-z0-9_]+ *\(' |
    sed -E 's/SOFT_CUDA_KERNEL +void +//; s/ *\($//' |
    sed -E 's/^([A-Za-z0-9_]+)$/0;\1/; s/^SOFT_CUDA_BOUNDS *\(([^,]*),.*\) *([A-Za-z0-9_]+)$/\1;\2/')
  [ -n "$list" ] || { echo "$source: no kernels found" >&2; return 1; }
  {
    echo 'extern "C" __attribute__((visibility("default"))) soft::Module soft_cuda_module(void (*leave)()) {'
    echo '  emulate::leave = leave;'
    echo '  static const soft::Kernel all[] = {'
    sed -E 's/^(.*);(.*)$/    soft::emulated("\2", \1, \2),/' <<< "$list"
    echo '  };'
    echo '  return {all, sizeof(all) / sizeof(all[0])};'
    echo '}'
  } >> "$table"
  # Hidden: each module has an emulator of its own.
  "$cxx" "${flags[@]}" "${emulator[@]}" -I "$here/modules" -include "$standard" -fvisibility=hidden -shared -o "$target.new" "$table"
  mv "$target.new" "$target"
}

# The headers of the standard library, compiled once: a file that includes this one first reads the compiled form.
standard=$folder/standard.h
precompile() {
  stale "$standard.gch" "$emulate/standard.h" "$here/build.sh" || return 0
  cp "$emulate/standard.h" "$standard"
  "$cxx" "${flags[@]}" "${emulator[@]}" -fvisibility=hidden -x c++-header -o "$standard.new" "$standard"
  mv "$standard.new" "$standard.gch"
}

candle() {
  local target=$folder/modules/candle-kernels.so
  stale "$target" "$here"/modules/candle.cpp "$emulate"/types.h "$here"/kernel.h "$here"/build.sh || return 0
  "$cxx" "${flags[@]}" "${emulator[@]}" -include "$standard" -fvisibility=hidden -shared -o "$target.new" "$here"/modules/candle.cpp
  mv "$target.new" "$target"
}

library cuda libcuda.so.1 "$here"/driver/{streams,graphs,memory,launch,device,faults,counts}.cpp
library cublas libcublas.so.13 "$here"/driver/cublas.cpp
library cublasLt libcublasLt.so.13 "$here"/driver/cublaslt.cpp
library curand libcurand.so.10 "$here"/driver/curand.cpp
library nccl libnccl.so.2 "$here"/driver/nccl.cpp
for name in nvrtc cudart; do empty "$name"; done
# The modules that the tests run in f16; the other files are compiled for it only if SOFT_CUDA_F16 names them, to save time.
with_f16=(adafactor adapters altup attention_backward attention_f32 attention_forward attention_sinks columns cross_entropy decode delta_rule
  delta_rule_backward elementwise embedding expert_pairs experts glu grouped kv_block latent layer_norm optimizer pairs reduce rms_norm rope
  sample short_conv ${SOFT_CUDA_F16:-})
precompile
# Modules, two at a time.
running=()
for step in candle "$cuda"/*.cu "${with_f16[@]/%/_f16}"; do
  case "$step" in
    candle) candle & ;;
    *_f16) module "$cuda/${step%_f16}.cu" f16 & ;;
    *) module "$step" & ;;
  esac
  running+=($!)
  if [ ${#running[@]} -ge 2 ]; then
    wait "${running[0]}"
    running=("${running[@]:1}")
  fi
done
for process in "${running[@]}"; do wait "$process"; done
