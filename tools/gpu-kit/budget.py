#!/usr/bin/env python3
"""Prints what a run directory says of its memory, as one line of JSON: `budget.py RUN`.

Ends with 1 if the peak is more than 10 % above the forecast.
"""
import json
import pathlib
import sys

run = pathlib.Path(sys.argv[1])
lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
steps = [line for line in lines if "loss" in line]
forecast = json.loads((run / "plan.json").read_text())
last = steps[-1]
peak, planned = last["peak_memory_bytes"], forecast["peak_bytes"]
print(json.dumps({"steps": len(steps), "loss": last["loss"], "tokens_per_s": last["tokens_per_second"],
                  "peak_mib": peak >> 20, "forecast_mib": planned >> 20,
                  "copy_hidden": last.get("copy_hidden")}))
if peak > 1.1 * planned:
    sys.exit(f"the peak is {peak / planned:.2f} of the forecast")
