#!/usr/bin/env bash
# Whole runs: every method has the losses of the CPU and resumes to the same bits, generation and evaluation.
set -euo pipefail
. "$(dirname "$0")/common.sh"

step "losses and resume" 400 "$bin/gpu" train::every_method --test-threads=1 &
step "generation" 60 "$bin/gpu" train::generation --test-threads=1 &
step "layer inputs in host memory" 60 "$bin/gpu" train::layer_inputs --test-threads=1 &
step "a step that is not finite" 60 "$bin/gpu" train::a_step_that --test-threads=1 &
side_by_side 1
failed=$(grep -vc '"rc": 0,\|"name":"machine"' "$results" || true)
[ "$failed" -eq 0 ] || stop "$failed groups of runs fail"
