#!/usr/bin/env python3
"""Do the GPU tests see a fault? The software driver leaves out one event, wait, synchronization, copy, memset, product or
kernel of ft at a time, swaps two arguments of a kernel, launches one block fewer, or transposes an operand of a product
(driver/faults.cpp). A test must fail each time. Nothing is compiled again: a fault is a place in the built program.

Usage: tools/soft-cuda/run.sh tools/soft-cuda/mutate.py [--tests WORD] [--only WORD] [--sample N] [--train]
    --tests WORD only tests whose name contains WORD, and the places that they come to
    --only WORD  only faults whose description contains WORD
    --sample N   every Nth fault
    --train      only the faults in a training run with layers of the host, seen by train.rs (slow)
"""

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TARGET = ROOT / "target/soft/release"
# Calls of candle that ft does not make are not ft's to test.
OURS = re.compile(r"ft_ops::cuda|ft_ops::transfer|ft_ops::device|ft_core::source::(uploaded|disk)")
# They serve many callers: the caller is the place.
HELPERS = re.compile(r"cuda::gemm::gemm|cuda::memory::|cuda::Gpu::")
ORDERS = ["late", "early", "random:1"]
# What no test sees, and why: lines `REGULAR EXPRESSION -- REASON`, for descriptions without the address at the end.
EXPECTED = ROOT / "tools/soft-cuda/unseen.txt"


def run(tests, name, order, env, limit):
    """True if the test passes."""
    env = {**os.environ, "SOFT_CUDA_ORDER": order, "RUST_BACKTRACE": "0", **env}
    # A session of its own: a fault may leave a run of ft in an endless loop, which must end with its test.
    pipe = subprocess.DEVNULL
    with subprocess.Popen([tests, name, "--exact"], env=env, stdout=pipe, stderr=pipe, start_new_session=True) as test:
        try:
            return test.wait(timeout=limit) == 0
        except subprocess.TimeoutExpired:
            os.killpg(test.pid, signal.SIGKILL)
            return False


class Symbols:
    """Functions of a program by address."""

    def __init__(self, program):
        text = subprocess.run(["nm", "-C", "--defined-only", program], capture_output=True, text=True, check=True).stdout
        found = (line.split(" ", 2) for line in text.splitlines())
        self.all = sorted((int(a, 16), name) for a, kind, name in found if kind in "tTwW")

    def of(self, address):
        low, high = 0, len(self.all)
        while low < high:
            middle = (low + high) // 2
            low, high = (middle + 1, high) if self.all[middle][0] <= address else (low, middle)
        return re.sub(r"::h[0-9a-f]{16}$", "", self.all[low - 1][1]) if low else "?"


def faults_of(lines, symbols):
    """Faults that can be put at the places of these lines: description to SOFT_CUDA_FAULT."""
    found = {}
    tables = (ROOT / "target/soft/cuda/modules/ft-kernels").glob("*.cpp")
    kernels = {name for table in tables for name in re.findall(r'emulated\("(\w+)"', table.read_text())}
    for line in lines:
        kind, name, *rest = line.split()
        if kind == "kernel":
            if name not in kernels:
                continue  # candle's
            found[f"kernel {name} left out"] = f"skip-kernel {name}"
            found[f"kernel {name} with one block fewer"] = f"blocks {name}"
            for i, one in enumerate(rest):
                for j in range(i + 1, len(rest)):
                    # Neighbors in kind and size: what the compiler of ft does not see.
                    if rest[j] == one:
                        found[f"kernel {name}, arguments {i} and {j} swapped"] = f"swap {name} {i} {j}"
                        break
            continue
        if name not in symbols:
            continue
        # The return address is behind the call.
        places = [(symbols[name].of(int(frame, 16) - 1), frame) for frame in rest]
        ours = [place for place in places if OURS.search(place[0])]
        callers = [place for place in ours if not HELPERS.search(place[0])]
        for function, frame in (callers or ours)[:1]:
            place = f"{function} {name.split('-')[0]}+{frame}"
            found[f"{kind} left out in {place}"] = f"skip {kind} {name} {frame}"
            if kind == "product":
                for operand in "ab":
                    found[f"operand {operand} transposed in {place}"] = f"flip {operand} {name} {frame}"
    return found


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--tests", default="")
    parser.add_argument("--only", default="")
    parser.add_argument("--sample", type=int, default=1)
    parser.add_argument("--train", action="store_true")
    options = parser.parse_args()
    tests = max((TARGET / "deps").glob("gpu-*[0-9a-f]"), key=lambda p: p.stat().st_mtime)
    symbols = {path.name: Symbols(path) for path in [tests, TARGET / "ft"]}
    listed = subprocess.run([tests, "--list"], capture_output=True, text=True, check=True).stdout
    names = [line[: -len(": test")] for line in listed.splitlines() if line.endswith(": test")]
    if options.train:
        names = [n for n in names if n.startswith(("train::every", "train::layer"))]
        os.environ["FT_GPU_RUNS"] = "lora on layers of the host,blocks from the host,lora on layers and a head of the disk"
    else:
        names = [n for n in names if not n.startswith("train::") and options.tests in n]

    # Which test comes to which place, and how long it takes.
    seen_by, took = {}, {}
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            sites = Path(folder) / name.replace(":", "_")
            start = time.time()
            if not run(tests, name, "late", {"SOFT_CUDA_SITES": str(sites)}, 900):
                sys.exit(f"{name} fails without a fault")
            took[name] = time.time() - start
            # A test that calls no driver, or only in another process, has no places.
            lines = sites.read_text().splitlines() if sites.exists() else []
            for fault in faults_of(lines, symbols).items():
                seen_by.setdefault(fault, []).append(name)
    wanted = sorted(fault for fault in seen_by if options.only in fault[0])[:: options.sample]
    lines = [line for line in EXPECTED.read_text().splitlines() if line and not line.startswith("#")]
    expected = [line.partition(" -- ")[::2] for line in lines]
    print(f"{len(wanted)} faults, {len(names)} tests", flush=True)
    unseen = []
    for description, fault in wanted:
        general = re.sub(r" (gpu|ft)\+[0-9a-f]+$", "", description)
        # An order matters only for what has to do with order.
        orders = ORDERS if re.match("wait|record|sync|copy", description) else ["late"]
        for name in sorted(seen_by[(description, fault)], key=took.get):
            killed = [o for o in orders if not run(tests, name, o, {"SOFT_CUDA_FAULT": fault}, 60 + 10 * took[name])]
            if killed:
                print(f"seen    {description}: {name} ({killed[0]})", flush=True)
                break
        else:
            reason = next((why for pattern, why in expected if re.fullmatch(pattern, general)), None)
            print(f"{'expected' if reason else 'UNSEEN'}  {description}{f': {reason}' if reason else ''}", flush=True)
            if not reason:
                unseen.append(description)
    print(f"{len(wanted)} faults, {len(unseen)} unseen")
    sys.exit(1 if unseen else 0)


if __name__ == "__main__":
    main()
