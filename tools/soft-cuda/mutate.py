#!/usr/bin/env python3
"""Do the GPU tests see a fault? The software driver leaves out one event, wait, synchronization, copy, memset, product or
kernel of ft at a time, swaps two arguments of a kernel, launches one block fewer, or transposes an operand of a product
(driver/faults.cpp). A test must fail each time. Nothing is compiled again: a fault is a place in the built program.

The order: what keeps streams in step (events, waits), copies, then all others at random, then early frees and
synchronizations, of which many make no difference to the result. The tests that come to its place run with each fault, the cheapest first, until
one fails. A kernel that exists for several types is launched by one line of ft, and a function of ft is in the test program
and in `ft`: the fault is put into the variant, and into the program, with the cheapest test, unless `--variants` is given.

Usage: tools/soft-cuda/run.sh tools/soft-cuda/mutate.py [--tests WORD] [--only WORD] [--minutes N] [--seed N]
                                                        [--variants] [--part I/N] [--train] [--log FILE]
    --tests WORD only tests whose name contains WORD, and the places that they come to
    --only WORD  only faults whose description contains WORD
    --minutes N  stops after this time
    --seed N     another random order
    --variants   faults of every variant of a kernel, and of both programs
    --part I/N   part I of N of the faults, so that several runs share them (each with a log of its own)
    --train      only the faults in a training run with layers of the host, seen by train.rs (slow)
    --log FILE   one line of JSON for each fault; a run with the same file goes on where it stopped
"""

import argparse
import json
import os
import random
import re
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDER = Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target/soft"))
TARGET = FOLDER / "release"
# Calls of candle that ft does not make are not ft's to test.
OURS = re.compile(r"ft_ops::cuda|ft_ops::transfer|ft_ops::device|ft_core::source::(uploaded|disk)")
# They serve many callers: the caller is the place.
HELPERS = re.compile(r"cuda::gemm::gemm|cuda::memory::|cuda::Gpu::")
ORDERS = ["late", "early", "random:1"]
# The parts of the name of a kernel that one line of ft fills in: the type of the numbers, the size of a head or of a
# group of rows, the format of quantized weights, the function of a gate.
VARIANT = re.compile(
    r"_(f32|bf16|f16|packed|single|narrow|wide|codes|\d+)(?![a-z0-9])|(?<=few|all)_[a-z]*\d?[a-z]*\d(?![a-z0-9])|(?<=kernel decode)_(?!all)[a-z]+\d*[a-z]*\d*"
    r"|(?<=kernel )(gelu_tanh|gelu|silu|relu2|relu|identity|sigmoid)_(?=alone|forward|backward)"
)
# Faults that no test sees, and the reason: lines `REGULAR EXPRESSION -- REASON`, for descriptions without the address at
# the end.
EXPECTED = ROOT / "tools/soft-cuda/unseen.txt"


def run(tests, name, order, env, limit=None):
    """True if the test passes, and its seconds of processor time. A test with a fault gets a few times its usual ones."""
    env = {**os.environ, "SOFT_CUDA_ORDER": order, "RUST_BACKTRACE": "0", **env}

    def limited():
        # A session of its own: a fault may leave a run of ft in an endless loop, which must end with its test.
        os.setsid()
        if limit:
            resource.setrlimit(resource.RLIMIT_CPU, (3 + int(4 * limit), 5 + int(4 * limit)))

    pipe = subprocess.DEVNULL
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    with subprocess.Popen([tests, name, "--exact"], env=env, stdout=pipe, stderr=pipe, preexec_fn=limited) as test:
        try:
            # Processor time is what counts; the clock is for a test that waits for ever.
            passed = test.wait(timeout=120 + 60 * limit if limit else 3600) == 0
        except subprocess.TimeoutExpired:
            passed = False
        try:
            os.killpg(test.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return passed, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


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


def general(description):
    """A description without the address in the program."""
    return re.sub(r" (gpu|ft)\+[0-9a-f]+$", "", description)


def faults_of(lines, symbols):
    """Faults that can be put at the places of these lines: description to SOFT_CUDA_FAULT."""
    found = {}
    tables = (FOLDER / "cuda/modules/ft-kernels").glob("*.cpp")
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
        if ours and not callers:
            # A helper that another module calls: that module is the place.
            behind = places[places.index(ours[-1]) + 1 :]
            callers = [place for place in behind if place[0] != "ft_ops::update::zeros"][:1]
        for function, frame in (callers or ours)[:1]:
            place = f"{function} {name.split('-')[0]}+{frame}"
            what = "free too early" if kind == "free" else f"{kind} left out"
            found[f"{what} in {place}"] = f"skip {kind} {name} {frame}"
            if kind == "product":
                for operand in "ab":
                    found[f"operand {operand} transposed in {place}"] = f"flip {operand} {name} {frame}"
    return found


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--tests", default="")
    parser.add_argument("--only", default="")
    parser.add_argument("--minutes", type=float, default=1e9)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--variants", action="store_true")
    parser.add_argument("--part", default="1/1")
    parser.add_argument("--train", action="store_true")
    parser.add_argument("--log")
    options = parser.parse_args()
    end = time.time() + 60 * options.minutes
    built = [path for path in (TARGET / "deps").glob("gpu-*") if not path.suffix]
    tests = max(built, key=lambda p: p.stat().st_mtime)
    symbols = {path.name: Symbols(path) for path in [tests, TARGET / "ft"]}
    listed = subprocess.run([tests, "--list"], capture_output=True, text=True, check=True).stdout
    names = [line[: -len(": test")] for line in listed.splitlines() if line.endswith(": test")]
    if options.train:
        names = [n for n in names if n.startswith(("train::every", "train::layer"))]
        os.environ["FT_GPU_RUNS"] = "lora on layers of the host,blocks from the host,lora on layers and a head of the disk"
    else:
        names = [n for n in names if not n.startswith("train::") and options.tests in n]
    log = Path(options.log) if options.log else None
    known = [json.loads(line) for line in log.read_text().splitlines()] if log and log.exists() else []

    def write(entry):
        if log:
            with log.open("a") as file:
                file.write(json.dumps(entry) + "\n")

    # Which test comes to which place, and its processor time.
    clean = {entry["test"]: entry for entry in known if "test" in entry}
    seen_by, took = {}, {}
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            if name not in clean:
                sites = Path(folder) / name.replace(":", "_")
                passed, seconds = run(tests, name, "late", {"SOFT_CUDA_SITES": str(sites)})
                # A test that calls no driver, or only in another process, has no places.
                lines = sites.read_text().splitlines() if sites.exists() else []
                clean[name] = {"test": name, "seconds": seconds, "passed": passed, "lines": lines}
                write(clean[name])
            if not clean[name]["passed"]:
                print(f"{name} fails without a fault: not used", flush=True)
                continue
            took[name] = clean[name]["seconds"]
            for fault in faults_of(clean[name]["lines"], symbols).items():
                seen_by.setdefault(fault, []).append(name)
    def cost(fault):
        return min(took[name] for name in seen_by[fault])

    wanted = sorted(fault for fault in seen_by if options.only in fault[0])
    if not options.variants:
        cheapest = {}
        for fault in sorted(wanted, key=cost):
            cheapest.setdefault(VARIANT.sub("", fault[0]), fault)
        # The same lines of ft are in two programs: in the tests, which are faster, and in `ft`, which they start.
        places = {program: Counter(general(d) for d, _ in cheapest.values() if f" {program}+" in d) for program in ["gpu", "ft"]}
        twice = {place for place, count in places["ft"].items() if count <= places["gpu"][place]}
        wanted = sorted(f for f in cheapest.values() if " ft+" not in f[0] or general(f[0]) not in twice)
    random.Random(options.seed).shuffle(wanted)
    first = ("wait", "record", "sync", "copy", "free")

    def rank(fault):
        kind = next((i for i, kind in enumerate(first) if fault[0].startswith(kind)), len(first))
        # The same place in two programs: the cheaper one first.
        late = next((8 + i for i, kind in enumerate(["free", "sync"]) if fault[0].startswith(kind)), kind)
        return late, cost(fault) if kind < len(first) else 0

    wanted.sort(key=rank)
    part, parts = map(int, options.part.split("/"))
    wanted = wanted[part - 1 :: parts]
    lines = [line for line in EXPECTED.read_text().splitlines() if line and not line.startswith("#")]
    expected = [line.partition(" -- ")[::2] for line in lines]
    print(f"{len(wanted)} faults, {len(took)} tests, {sum(took.values()):.0f} s", flush=True)
    done = {entry["fault"]: entry for entry in known if "fault" in entry}

    def meet(description, fault, most):
        """How a fault ends: `seen`, `expected` or `unseen`, with the test or the reason. `None` after `most` seconds."""
        used = 0
        reason = next((why for pattern, why in expected if re.fullmatch(pattern, general(description))), None)
        # An order matters only for what has to do with order.
        orders = ORDERS if description.startswith(first) else ["late"]
        for name in sorted(seen_by[(description, fault)], key=took.get):
            for order in orders:
                if reason and used > 15:
                    return "expected", reason
                if used > most:
                    return None
                passed, seconds = run(tests, name, order, {"SOFT_CUDA_FAULT": fault}, took[name])
                if not passed:
                    return "seen", f"{name} ({order})"
                used += seconds
        return ("expected", reason) if reason else ("unseen", f"{len(seen_by[(description, fault)])} tests")

    # The long tests run at the end, with the faults that no cheap test sees.
    for most in [30, float("inf")]:
        for description, fault in wanted:
            if description in done or time.time() > end:
                continue
            if found := meet(description, fault, most):
                verdict, why = found
                done[description] = {"fault": description, "verdict": verdict, "why": why}
                write(done[description])
                print(f"{verdict:8} {description}: {why}", flush=True)
    results = [done.get(description, {}).get("verdict", "not run") for description, _ in wanted]
    print(", ".join(f"{results.count(word)} {word}" for word in ["seen", "expected", "unseen", "not run"]))
    sys.exit(1 if "unseen" in results or len(took) < len(names) else 0)


if __name__ == "__main__":
    main()
