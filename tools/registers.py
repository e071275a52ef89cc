#!/usr/bin/env python3
"""Registers, spills and shared memory of every CUDA kernel, as `ptxas -v` reports them: writes crates/ft-kernels/REGISTERS.md.

Needs nvcc (in PATH or as NVCC). Usage: tools/registers.py [NAME...]   with names (of cuda/NAME.cu): only their tables
"""

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ARCHS = [80, 86, 89, 90]
PAGE = Path(__file__).parent.parent / "crates/ft-kernels" / "REGISTERS.md"
SOURCES = sorted((Path(__file__).parent.parent / "crates/ft-kernels" / "cuda").glob("*.cu"))


def kernels(source, arch):
    """Name -> (registers, bytes spilled, bytes of shared memory, bytes of stack)."""
    nvcc = os.environ.get("NVCC", "nvcc")
    with tempfile.TemporaryDirectory() as folder:
        out = subprocess.run(
            [nvcc, "-cubin", "-std=c++17", "-O3", f"-arch=sm_{arch}", "-Xptxas", "-v", "-o", f"{folder}/a", str(source)],
            capture_output=True,
            text=True,
        )
    if out.returncode != 0:
        sys.exit(out.stderr)
    found, name, spilled, stack = {}, None, 0, 0
    for line in out.stderr.splitlines():
        if match := re.search(r"Compiling entry function '(\w+)'", line):
            name = match[1]
        if match := re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", line):
            stack, spilled = int(match[1]), int(match[2]) + int(match[3])
        if match := re.search(r"Used (\d+) registers", line):
            shared = re.search(r"(\d+) bytes smem", line)
            found[name] = (int(match[1]), spilled, int(shared[1]) if shared else 0, stack)
    return found


def readable(name):
    tool = subprocess.run(["c++filt", name], capture_output=True, text=True)
    return re.sub(r"\(.*", "", tool.stdout.strip()) if tool.returncode == 0 else name


HEAD = f"""# Registers and spills of the kernels

Made by `tools/registers.py` with CUDA {{release}}. Registers a thread on {", ".join(f"sm_{a}" for a in ARCHS)}; bytes of
static shared memory, of stack and of spills (stores and loads) are the most over these. The attention kernels get shared
memory at the launch on top, and so do those of the delta rule: see the comments above their definitions.
"""


def table(source):
    """The section of a file, and how many of its kernels spill."""
    tables = [kernels(source, arch) for arch in ARCHS]
    lines = ["| kernel | registers | shared | stack | spilled |", "|---|---|---|---|---|"]
    for name in sorted(tables[0]):
        rows = [one[name] for one in tables]
        registers = " ".join(str(row[0]) for row in rows)
        shared, stack, spilled = (max(row[i] for row in rows) for i in (2, 3, 1))
        lines.append(f"| `{readable(name)}` | {registers} | {shared} | {stack} | {spilled} |")
    return "\n".join(lines) + "\n"


def main():
    names = sys.argv[1:]
    old = dict(re.findall(r"^## (\S+)\n\n((?:\|.*\n)+)", PAGE.read_text(), re.M)) if names else {}
    nvcc = subprocess.run([os.environ.get("NVCC", "nvcc"), "--version"], capture_output=True, text=True).stdout
    page = HEAD.format(release=re.search(r"release ([\d.]+)", nvcc)[1])
    spilling = 0
    for source in SOURCES:
        section = table(source) if not names or source.stem in names or source.name not in old else old[source.name]
        spilling += len(re.findall(r"\| [1-9]\d* \|$", section, re.M))
        page += f"\n## {source.name}\n\n{section}"
    PAGE.write_text(page + f"\nKernels that spill: {spilling}.\n")


main()
