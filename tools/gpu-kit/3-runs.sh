#!/usr/bin/env bash
# Whole runs: every method has the losses of the CPU, a stopped run goes on bit for bit, generation and evaluation.
set -euo pipefail
. "$(dirname "$0")/common.sh"

failed=0
step "losses" 330 "$bin/gpu" train::every_method --test-threads=1 || failed=$((failed + 1))
step "generation" 60 "$bin/gpu" train::generation --test-threads=1 || failed=$((failed + 1))
step "layer inputs in host memory" 60 "$bin/gpu" train::layer_inputs --test-threads=1 || failed=$((failed + 1))
export FT_GPU_RUNS=${FT_GPU_RUNS:-lora,full,layer by layer,lora on layers of the host,blocks from the disk,adafactor}
step "resume" 150 "$bin/gpu" train::a_run_that_was_stopped --test-threads=1 || failed=$((failed + 1))
[ "$failed" -eq 0 ] || stop "$failed groups of runs fail"
