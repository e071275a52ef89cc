#!/usr/bin/env python3
"""Prints what a run directory says of its memory, as one line of JSON: `budget.py RUN`."""
import json
import pathlib
import sys

run = pathlib.Path(sys.argv[1])
lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
steps = [line for line in lines if "loss" in line]
forecast = json.loads((run / "plan.json").read_text())
last = steps[-1]
print(json.dumps({"steps": len(steps), "loss": last["loss"], "tokens_per_s": last["tokens_per_second"],
                  "peak_mib": last["peak_memory_bytes"] >> 20, "forecast_mib": forecast.get("peak_bytes", 0) >> 20,
                  "copy_hidden": last.get("copy_hidden")}))
