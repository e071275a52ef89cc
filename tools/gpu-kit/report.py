#!/usr/bin/env python3
"""Turns the results of the kit into tables for docs/benchmarks-gpu.md: `report.py FOLDER`, Markdown on stdout."""
import json
import pathlib
import sys

folder = pathlib.Path(sys.argv[1])
lines = [json.loads(line) for path in sorted(folder.glob("*.jsonl")) for line in path.read_text().splitlines() if line]
machines = [line["result"] for line in lines if line["name"] == "machine"]
for machine in machines[:1]:
    print(f"Device: {machine['gpu']}; {machine['cores']} cores of {machine['cpu']}; commit {machine['commit'][:7]}; {machine['date']}.\n")
    settings = {key: value for one in machines for key, value in one["settings"].items()}
    if settings:
        print("Settings: " + ", ".join(f"`{key}={' / '.join(value.splitlines())}`" for key, value in sorted(settings.items())) + ".\n")


def of(script):
    return [line for line in lines if line["script"] == script and line["name"] != "machine"]


def table(head, rows):
    if rows:
        print("| " + " | ".join(head) + " |\n|" + "---|" * len(head))
        for row in rows:
            print("| " + " | ".join(str(cell) for cell in row) + " |")
        print()


def outcome(line):
    result = line.get("result") or {}
    if not isinstance(result, dict):
        return str(result)
    if "passed" in result:
        text = f"{result['passed']} passed, {result['failed']} failed"
        return text + "".join(": " + ", ".join(result[key]) for key in ("names", "runs") if result.get(key))
    return {0: "ok", 124: "ran into the time limit", None: "left out"}.get(line.get("rc"), f"exit code {line.get('rc')}")


for script, title in [("1-smoke", "Operations and a run"), ("2-sanitize", "compute-sanitizer"), ("3-runs", "Whole runs")]:
    steps = of(script)
    if steps:
        print(f"### {title}\n")
        table(["step", "result", "seconds"], [(s["name"], outcome(s), s.get("seconds", "")) for s in steps])

speed = of("4-speed")
if speed:
    print("### Speed and memory\n")
    for line in speed:
        if line["name"] == "ceilings" and line["result"]:
            table(["ceiling", "measured"], [(k, v) for k, v in line["result"].items() if k not in ("torch", "gpu")])
    pairs = {}
    for line in speed:
        implementation, _, rest = line["name"].partition(" ")
        if implementation in ("ft", "torch"):
            pairs.setdefault(rest, {})[implementation] = line.get("result")
    rows = []
    for name, pair in pairs.items():
        ours, theirs = pair.get("ft") or {}, pair.get("torch") or {}
        a, b = ours.get("tokens_per_s"), theirs.get("tokens_per_s")
        m, n = ours.get("peak_device_mib"), theirs.get("peak_device_mib")
        rows.append((name, a or "failed", b or "failed", f"{a / b:.2f}" if a and b else "-", m or "-", n or "-",
                     f"{m / n:.2f}" if m and n else "-"))
    recorded = [(line["name"], line.get("result") or {}) for line in speed if line["name"].startswith("layers")]
    table(["layers as graphs", "tokens/s", "layers as graphs", "peak MiB", "graphs, in addition MiB"],
          [(name, r.get("tokens_per_s") or "failed", r.get("graph_layers") or 0, r.get("peak_device_mib", "-"),
            r.get("peak_graph_mib", "-")) for name, r in recorded])
    decoded = [(line["name"], line.get("result") or {}) for line in speed if line["name"].startswith("decode")]
    table(["decoding", "tokens/s", "steps as graphs", "peak MiB", "graphs, in addition MiB"],
          [(name, round(r.get("decode_tokens_per_second") or 0) or "failed", r.get("graph_steps", "-"), r.get("peak_device_mib", "-"),
            r.get("peak_graph_mib", "-")) for name, r in decoded])
    table(["size, method, tokens", "ft tokens/s", "torch tokens/s", "ratio", "ft MiB", "torch MiB", "ratio"], rows)

profiles = of("5-profile")
for line in profiles:
    result = line.get("result") or {}
    if not isinstance(result, dict):
        print(f"### Profile\n\n{result}\n")
        continue
    print(f"### Profile: {line['name']}\n")
    if not result.get("kernels"):
        print(outcome(line) + "\n")
        continue
    total = result["ms"] or 1.0
    table(["kernel", "count", "ms", "share", "GB/s", "tensor cores"],
          [(f"`{name}`", k["count"], k["ms"], f"{k['ms'] / total:.1%}", round(k["gbytes"] / k["ms"] * 1e3) if k["ms"] else "-",
            "-" if k["tensor"] is None else f"{k['tensor']:.0f} %")
           for name, k in list(result["kernels"].items())[:25]])

budgets = of("6-budgets")
if budgets:
    print("### Budgets\n")
    keys = ("tokens_per_s", "peak_mib", "forecast_mib", "copy_hidden")
    results = [(b["name"], outcome(b), b["result"] if isinstance(b.get("result"), dict) else {}) for b in budgets]
    table(["run", "result", "tokens/s", "peak MiB", "forecast MiB", "copies hidden"],
          [(name, text, *(result.get(key, "-") for key in keys)) for name, text, result in results])
