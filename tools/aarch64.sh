#!/usr/bin/env bash
# Checks ft for aarch64 Linux on another machine: tools/aarch64.sh check | test | run [ARGUMENTS]
#
#   check  clippy of all crates and of the program
#   test   the unit tests of ft-base, ft-ops, ft-formats, ft-data and ft-core under qemu
#   run    the program under qemu, for example `tools/aarch64.sh run doctor`
#
# Needs `rustup target add aarch64-unknown-linux-gnu` and on Debian gcc-aarch64-linux-gnu, libc6-dev-arm64-cross, qemu-user. `.ci/run`
# does `check`, if the tools are there. FT_TARGET is the target directory (default: target/aarch64).
set -euo pipefail
cd "$(dirname "$0")/.."
target=aarch64-unknown-linux-gnu
tools=(aarch64-linux-gnu-gcc)
[ "${1:-}" = check ] || tools+=(qemu-aarch64)
for tool in "${tools[@]}"; do
    command -v "$tool" >/dev/null || { echo "tools/aarch64.sh needs $tool" >&2; exit 3; }
done
[ -d "$(rustc --print sysroot)/lib/rustlib/$target" ] || { echo "tools/aarch64.sh needs: rustup target add $target" >&2; exit 3; }
aarch64-linux-gnu-gcc -fsyntax-only -xc - <<< '#include <stdlib.h>' || { echo "tools/aarch64.sh needs libc6-dev-arm64-cross" >&2; exit 3; }
export CARGO_TARGET_DIR=${FT_TARGET:-target/aarch64}
export CC_aarch64_unknown_linux_gnu=aarch64-linux-gnu-gcc
export CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER=aarch64-linux-gnu-gcc
export CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_RUNNER="qemu-aarch64 -L /usr/aarch64-linux-gnu"
case "${1:-}" in
check) cargo clippy --release --target "$target" --bins --lib -- -D warnings -D clippy::undocumented_unsafe_blocks ;;
test) cargo test --release --target "$target" -p ft-base -p ft-ops -p ft-formats -p ft-data -p ft-core --lib --no-fail-fast "${@:2}" ;;
run) cargo run --release --target "$target" --bin ft -- "${@:2}" ;;
*) sed -n '2,10s/^# \{0,1\}//p' "$0"; exit 2 ;;
esac
