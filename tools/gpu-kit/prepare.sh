#!/usr/bin/env bash
# Builds the programs of the kit and packs them into .gpu/, for a machine that has a GPU and no compiler.
# Needs a CUDA toolkit (CUDA_HOME). FT_CUDA_ARCHS=90 builds for one architecture only and is smaller.
#
# Usage: tools/gpu-kit/prepare.sh            then copy the repository with .gpu/ and run tools/gpu-kit/1-smoke.sh there
set -euo pipefail
cd "$(dirname "$0")/../.."
export CUDA_COMPUTE_CAP=${CUDA_COMPUTE_CAP:-80}
rm -rf .gpu
mkdir -p .gpu
build() {
  cargo build --release --features cuda "$@" --message-format=json | sed -n 's/.*"executable":"\([^"]*\)".*/\1/p'
}
{ build --bin ft --test gpu --bench step --bench generate; } | sort -u | while read -r program; do
  name=$(basename "$program" | sed 's/-[0-9a-f]*$//')
  case $name in
    ft | gpu | step | generate) strip -o ".gpu/$name" "$program" ;;
  esac
done
git rev-parse HEAD > .gpu/commit
for name in ft gpu step generate; do [ -f ".gpu/$name" ] || { echo "$name was not built" >&2; exit 1; }; done
# One archive: the programs have most of their code in common, the kernels too.
(cd .gpu && tar -cf - generate step gpu ft | xz -T1 --lzma2=preset=4,dict=256MiB,nice=64 > programs.tar.xz && rm generate step gpu ft)
tree=$(git ls-files -z | xargs -0 du -cb | tail -1 | cut -f 1)
packed=$(du -cb .gpu/* | tail -1 | cut -f 1)
echo "packed: $((packed >> 20)) MiB; the tree: $((tree >> 20)) MiB"
[ $((tree + packed)) -lt $((64 << 20)) ] || { echo "more than 64 MiB" >&2; exit 1; }
