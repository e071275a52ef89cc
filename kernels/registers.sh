#!/usr/bin/env bash
# Registers, spilled bytes and static shared memory of every kernel and architecture, as a Markdown table.
# Needs nvcc (NVCC, or in PATH). Usage: kernels/registers.sh [NAME...] (without names: every file of kernels/cuda)
set -euo pipefail
cd "$(dirname "$0")/cuda"
archs="80 86 89 90"
names=("$@")
[ ${#names[@]} -gt 0 ] || names=($(ls *.cu | sed 's/\.cu$//'))
echo "| kernel | registers on sm_80 / 86 / 89 / 90 | spilled bytes | static shared memory |"
echo "|---|---|---|---|"
for name in "${names[@]}"; do
  for arch in $archs; do
    "${NVCC:-nvcc}" -cubin -std=c++17 -O3 -arch="sm_$arch" -Xptxas -v "$name.cu" -o /dev/null 2>&1 |
      awk '/Compiling entry function/ { split($0, p, "\x27"); kernel = p[2] }
           /bytes spill stores/ { spill = $5 + $9 }
           /Used [0-9]+ registers/ { shared = 0
             for (i = 1; i < NF; i++) { if ($i == "Used") registers = $(i + 1); if ($(i + 2) == "smem" || $(i + 2) == "smem,") shared = $i }
             print kernel, registers, spill, shared }'
  done | awk '{ if (!($1 in seen)) { seen[$1] = 1; order[++n] = $1 }
                registers[$1] = registers[$1] (registers[$1] == "" ? "" : " / ") $2; spill[$1] += $3; shared[$1] = $4 }
              END { for (i = 1; i <= n; i++) print "| " order[i] " | " registers[order[i]] " | " spill[order[i]] " | " shared[order[i]] " |" }' |
    sort
done
