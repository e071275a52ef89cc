#!/usr/bin/env bash
# Tokens per second and peak memory of ft and of transformers + PEFT + PyTorch, alternately, on the same shapes; and the
# ceilings of the device, measured with PyTorch.
set -euo pipefail
. "$(dirname "$0")/common.sh"

failed=0
if [ -z "${KIT_NO_PEER:-}" ]; then step ceilings 90 python3 tools/gpu-kit/ceilings.py || failed=$((failed + 1)); fi
# SIZE METHOD BATCH SEQUENCE KEPT; KEPT is `all` or `none`: the layers with saved activations.
list=${KIT_LIST:-"llama-3.1-8b lora 1 2048 none
llama-3.1-8b lora 1 2048 all
llama-3.1-8b block 1 2048 none
llama-3.1-8b block 1 2048 all
0.5b lora 1 2048 all
0.5b lora 8 2048 all
0.5b full 8 2048 all
0.5b lora 8 2048 none"}
while read -r size method batch seq kept; do
  ours=(--device cuda:0 --threads "$(nproc)" --size "$size" --method "$method" --batch "$batch" --seq "$seq" --steps "${KIT_STEPS:-5}")
  [ "$kept" = all ] || ours+=(--keep 0)
  theirs=(--size "$size" --method "$method" --batch "$batch" --seq "$seq" --steps "${KIT_STEPS:-5}")
  [ "$kept" != all ] || theirs+=(--no-checkpointing)
  step "ft $size $method $batch x $seq keep=$kept" 90 "$bin/step" "${ours[@]}" < /dev/null || failed=$((failed + 1))
  if [ -z "${KIT_NO_PEER:-}" ]; then
    step "torch $size $method $batch x $seq keep=$kept" 90 python3 benches/peer_gpu.py "${theirs[@]}" < /dev/null \
      || failed=$((failed + 1))
  fi
done <<< "$list"
# Training with layers as CUDA graphs in the order without, with, with, without; rows of one length, then of other lengths in each step:
# SIZE METHOD BATCH SEQUENCE. All activations are saved without graphs.
while read -r size method batch seq; do
  for lengths in "" --vary; do
    for graphs in "" --graphs --graphs ""; do
      # shellcheck disable=SC2086
      step "layers $size $method $batch x $seq ${lengths:-equal} ${graphs:-plain}" 60 "$bin/step" --device cuda:0 --threads "$(nproc)" --size "$size" \
        --method "$method" --batch "$batch" --seq "$seq" --steps "${KIT_GRAPH_STEPS:-16}" $lengths $graphs < /dev/null || failed=$((failed + 1))
    done
  done
done <<< "${KIT_GRAPHS:-0.5b lora 1 512
0.5b full 1 512
0.5b lora 1 2048}"
# Decoding in the order with CUDA graphs, without, without, with: ROWS PROMPT NEW, and the tokens after which a row ends on average
# (0: all after NEW). Twice in a process: the first time also loads kernels.
while read -r rows prompt new ends; do
  for graphs in "" --no-graphs --no-graphs ""; do
    # shellcheck disable=SC2086
    step "decode rows=$rows ends=$ends ${graphs:-with graphs}" 60 "$bin/generate" --device cuda:0 --threads "$(nproc)" --dtype bf16 --repeat 2 \
      --shape "${KIT_DECODE_SHAPE:-qwen2.5-0.5b}" --kv-cache bf16 --prompt "$prompt" --new "$new" --rows "$rows" --apart \
      $([ "$ends" = 0 ] || echo "--ends-after $ends") $graphs < /dev/null || failed=$((failed + 1))
  done
done <<< "${KIT_DECODE:-1 512 256 0
64 512 128 0
64 512 256 64}"
[ "$failed" -eq 0 ] || stop "$failed measurements failed"
