#!/usr/bin/env bash
# Makes the tarball of a release: tools/release.sh OUT [TARGET]
#
# TARGET is a Rust target; with `.2.28` behind a glibc target the program starts with glibc 2.28 and later (default:
# x86_64-unknown-linux-gnu.2.28). That needs cargo-zigbuild and zig (`pip install cargo-zigbuild ziglang`); a target without a version is
# linked by the usual linker. aarch64-unknown-linux-gnu.2.28 and x86_64-unknown-linux-musl need `rustup target add`.
#
# OUT gets ft-VERSION-TARGET.tar.gz (program, README, licenses, SBOM) and SHA256SUMS. The same sources, compiler and linker give the same
# bytes: paths of this machine are replaced, times are that of the last commit, the tar has a fixed order. Built in OUT/build.
set -euo pipefail
[ $# -ge 1 ] || { sed -n '2,10s/^# \{0,1\}//p' "$0"; exit 2; }
mkdir -p "$1"
out=$(cd "$1" && pwd)
wanted=${2:-x86_64-unknown-linux-gnu.2.28}
root=$(cd "$(dirname "$0")/.." && pwd)
cd "$root"

target=${wanted%%.*}
glibc=${wanted#"$target"}
glibc=${glibc#.}
version=$(sed -n '/^\[workspace.package\]/,/^$/s/^version = "\(.*\)"/\1/p' Cargo.toml)
SOURCE_DATE_EPOCH=$(git log -1 --format=%ct)
export SOURCE_DATE_EPOCH
cargo_home=${CARGO_HOME:-$HOME/.cargo}
export CARGO_TARGET_DIR=$out/build
# Parts that are compiled again alone need not be in the same order.
export CARGO_INCREMENTAL=0
# Of prefixes that fit, rustc takes the last.
export RUSTFLAGS="--remap-path-prefix=$root=ft --remap-path-prefix=$cargo_home=cargo --remap-path-prefix=$out=build -Cstrip=symbols"
export CFLAGS="${CFLAGS:-} -ffile-prefix-map=$cargo_home=cargo -ffile-prefix-map=$out=build"

if [ -n "$glibc" ]; then
    cargo zigbuild --release --locked --bin ft --target "$wanted"
else
    cargo build --release --locked --bin ft --target "$target"
fi
program=$CARGO_TARGET_DIR/$target/release/ft

# The newest symbol of the C library decides where the program starts.
# A static program (musl) has none.
newest=$(objdump -T "$program" | { grep -o 'GLIBC_[0-9.]*' || true; } | sort -uV | tail -1 | cut -d_ -f2)
echo "newest symbol: glibc ${newest:-none}"
if [ -n "$glibc" ] && [ "$(printf '%s\n' "$newest" "$glibc" | sort -V | tail -1)" != "$glibc" ]; then
    echo "the program needs glibc $newest, wanted $glibc" >&2
    exit 1
fi
# Every library must be part of any Linux system.
needed=$(objdump -p "$program" | sed -n 's/ *NEEDED *//p')
if others=$(grep -vE '^(|lib(c|m|dl|pthread|rt|gcc_s|util)\.so\.[0-9]+|ld-linux.*)$' <<<"$needed"); then
    echo "the program needs other libraries: $others" >&2
    exit 1
fi
# No path of this machine.
strings -a "$program" >"$out/strings"
if grep -m 3 -F -e "$root/" -e "$cargo_home/" -e "$out/" "$out/strings"; then
    echo "the program contains paths of this machine" >&2
    exit 1
fi
rm "$out/strings"

name=ft-$version-$target
rm -rf "${out:?}/$name"
mkdir "$out/$name"
install -m 755 "$program" "$out/$name/ft"
cp README.md CHANGELOG.md LICENSE-MIT LICENSE-APACHE "$out/$name/"
FT_SBOM_TARGET=$target tools/sbom.py >"$out/$name/ft.cdx.json"
(
    cd "$out"
    tar --sort=name --mtime="@$SOURCE_DATE_EPOCH" --owner=0 --group=0 --numeric-owner --mode=u=rwX,go=rX -cf - "$name" | gzip -n9 >"$name.tar.gz"
    rm -rf "$name"
    sha256sum ft-*.tar.gz >SHA256SUMS
)
cat "$out/SHA256SUMS"
