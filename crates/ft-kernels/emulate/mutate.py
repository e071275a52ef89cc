#!/usr/bin/env python3
"""Do the emulated tests see a missing barrier? Takes every __syncthreads, __syncwarp and cp.async wait out of a kernel
in turn and expects its test to fail for one of six seeds. Fails itself, and names the places, when one goes unseen.

Usage: crates/ft-kernels/emulate/mutate.py [NAME...]    NAME.cu (and NAME.cuh) is tested by NAME.cpp; without names: every such pair.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

EMULATE = Path(__file__).resolve().parent
CUDA = EMULATE.parent / "cuda"
REMOVED = re.compile(r"__syncthreads\(\);|__syncwarp\(\);|ptx::wait<[12]>\(\);")


def sees(folder, name):
    """First seed that fails, or None; compilation must work."""
    program = folder / "program"
    emulate = folder / "emulate"
    command = [os.environ.get("CXX", "c++"), "-std=c++17", "-O1", "-w", "-I", emulate, "-I", emulate / "include"]
    subprocess.run([*command, emulate / "tests" / f"{name}.cpp", "-o", program], check=True)
    for seed in range(6):
        if subprocess.run([program, str(seed)], capture_output=True, timeout=600).returncode != 0:
            return seed
    return None


def main():
    names = sys.argv[1:] or sorted(p.stem for p in CUDA.glob("*.cu") if (EMULATE / "tests" / f"{p.stem}.cpp").exists())
    unseen = []
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        shutil.copytree(EMULATE, folder / "emulate")
        shutil.copytree(CUDA, folder / "cuda")
        for name in names:
            # And in a header of its own.
            for file in [f"{name}.cu", f"{name}.cuh"]:
                if not (CUDA / file).exists():
                    continue
                source = (CUDA / file).read_text()
                for found in REMOVED.finditer(source):
                    place = f"{file}:{source[: found.start()].count(chr(10)) + 1} {found[0]}"
                    (folder / "cuda" / file).write_text(source[: found.start()] + ";" + source[found.end() :])
                    seed = sees(folder, name)
                    print(f"{place} {'UNSEEN' if seed is None else f'seen with seed {seed}'}", flush=True)
                    if seed is None:
                        unseen.append(place)
                (folder / "cuda" / file).write_text(source)
    sys.exit(f"unseen: {unseen}" if unseen else 0)


if __name__ == "__main__":
    main()
