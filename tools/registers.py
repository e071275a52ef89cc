#!/usr/bin/env python3
"""Registers, spills and shared memory of every CUDA kernel, as `ptxas -v` tells them: prints kernels/REGISTERS.md.

Needs nvcc (in PATH or as NVCC). Usage: tools/registers.py > kernels/REGISTERS.md
"""

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ARCHS = [80, 86, 89, 90]
SOURCES = sorted((Path(__file__).parent.parent / "kernels" / "cuda").glob("*.cu"))


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


def main():
    print("# Registers and spills of the kernels\n")
    print("Made by `tools/registers.py`. Registers a thread on " + ", ".join(f"sm_{a}" for a in ARCHS), end="; ")
    print("bytes of static shared memory, stack and spills (stores and loads) are the most over these.\n")
    spilling = 0
    for source in SOURCES:
        tables = [kernels(source, arch) for arch in ARCHS]
        print(f"## {source.name}\n")
        print("| kernel | registers | shared | stack | spilled |")
        print("|---|---|---|---|---|")
        for name in sorted(tables[0]):
            rows = [table[name] for table in tables]
            registers = " ".join(str(row[0]) for row in rows)
            spilled = max(row[1] for row in rows)
            spilling += spilled > 0
            print(f"| `{readable(name)}` | {registers} | {max(r[2] for r in rows)} | {max(r[3] for r in rows)} | {spilled} |")
        print()
    print(f"Kernels that spill: {spilling}.")


main()
