#!/usr/bin/env python3
"""Sums the kernels of a profile by name: `profile.py FILE.csv`, written by ncu with `--csv --page raw`.

Prints a table, and one line of JSON: time of all kernels in ms, and for each name its time, count, bytes, and the
percentage of its cycles in which the tensor cores work (null if it was not collected).
"""
import csv
import json
import re
import sys

UNITS = {"ns": 1e-6, "nsecond": 1e-6, "us": 1e-3, "usecond": 1e-3, "ms": 1.0, "msecond": 1.0, "s": 1e3, "second": 1e3,
         "byte": 1e-9, "Kbyte": 1e-6, "Mbyte": 1e-3, "Gbyte": 1.0}
TIME, TENSOR, BYTES = "gpu__time_duration.sum", "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed", "dram__bytes.sum"

with open(sys.argv[1], errors="replace") as file:
    lines = [line for line in file if line.startswith('"')]
rows = list(csv.DictReader(lines))
if len(rows) < 2:
    sys.exit(f"{sys.argv[1]} has no kernels: ncu was stopped before it wrote them, or found none")
units, rows = rows[0], rows[1:]


def value(row, metric):
    text = (row.get(metric) or "0").replace(",", "")
    return float(text or 0) * UNITS.get(units.get(metric, ""), 1.0)


kernels = {}
for row in rows:
    name = re.sub(r"\(.*", "", row["Kernel Name"]).replace("void ", "")
    name = re.sub(r"<.*", "", name)[:70]
    total = kernels.setdefault(name, {"count": 0, "ms": 0.0, "gbytes": 0.0, "tensor": 0.0})
    total["count"] += 1
    total["ms"] += value(row, TIME)
    total["gbytes"] += value(row, BYTES)
    total["tensor"] += value(row, TENSOR) * value(row, TIME)
total = sum(k["ms"] for k in kernels.values()) or 1.0
for k in kernels.values():
    k["tensor"] = round(k["tensor"] / k["ms"], 1) if k["ms"] and TENSOR in units else None
ranked = sorted(kernels.items(), key=lambda item: -item[1]["ms"])
for name, k in ranked[:40]:
    rate = k["gbytes"] / k["ms"] * 1e3 if k["ms"] else 0.0
    print(f"{k['ms']:9.3f} ms {k['ms'] / total:6.1%} {k['count']:6d} x {k['ms'] / k['count'] * 1e3:8.1f} us {rate:7.0f} GB/s  "
          f"{'?' if k['tensor'] is None else k['tensor']:>5} % tensor  {name}")
print(json.dumps({"ms": round(total, 3), "launches": len(rows), "kernels": {
    name: {"ms": round(k["ms"], 3), "count": k["count"], "gbytes": round(k["gbytes"], 3), "tensor": k["tensor"]}
    for name, k in ranked}}))
