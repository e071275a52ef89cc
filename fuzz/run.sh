#!/usr/bin/env bash
# Builds and runs the fuzz targets: fuzz/README.md.
# Usage: run.sh build | seed | all SECONDS [TARGET...] | forever SECONDS [TARGET...] | one TARGET SECONDS | sum | keep [TARGET...]
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
root=$(dirname "$here")
target=${CARGO_TARGET_DIR:-$here/target}
host=$(rustc -vV | sed -n 's/^host: //p')
data=${FT_FUZZ_DATA:-$here}
# Seconds on the clock, which also run while the fuzzer is paused: the program has a limit of its own on the processor time.
timeout=${FT_FUZZ_TIMEOUT:-1800}
program=$target/$host/release/parse
# The program reads files of the repository.
export FT_FUZZ_ROOT=$root
# Threads of one program write the same counters, which takes longer than their work.
export RAYON_NUM_THREADS=${RAYON_NUM_THREADS:-1}

# Coverage for libFuzzer, as cargo-fuzz sets it.
flags="-Cpasses=sancov-module -Ccodegen-units=16 --cfg fuzzing"
for flag in level=4 inline-8bit-counters pc-table trace-compares; do
    flags+=" -Cllvm-args=-sanitizer-coverage-$flag"
done
# FT_FUZZ_SANITIZER=address finds wrong accesses to memory. It needs nightly Rust, and clang for the code in C.
sanitizer=${FT_FUZZ_SANITIZER:-}
toolchain=()
if [ -n "$sanitizer" ]; then
    flags+=" -Zsanitizer=$sanitizer"
    toolchain=(+nightly)
    # libFuzzer is the only code in C++, and stays as it is: its counting runs at every comparison of the program.
    export "CC_${host//-/_}=clang" "CFLAGS_${host//-/_}=-fsanitize=$sanitizer"
    # Freed memory that is kept, to find uses of it: the limit on memory below counts it.
    export ASAN_OPTIONS=quarantine_size_mb=64
fi

# The versions of the dependencies are those of the product.
build() {
    cp "$root/Cargo.lock" "$here/Cargo.lock"
    (cd "$here" && CARGO_TARGET_DIR=$target RUSTFLAGS=$flags RUSTC_WRAPPER=$here/rustc.sh cargo "${toolchain[@]}" build --release --target "$host")
}

# put TARGET FILE...: copies the files that exist and are at most 64 KiB.
put() {
    local name=$1 file
    shift
    mkdir -p "$data/corpus/$name"
    for file in "$@"; do
        [ -f "$file" ] && [ "$(stat -c %s "$file")" -le 65536 ] || continue
        cp "$file" "$data/corpus/$name/$(cksum <"$file" | tr -d ' ')"
    done
}

seed() {
    local goldens=$root/tests/parity/goldens name
    shopt -s nullglob globstar
    put safetensors "$goldens"/**/*.safetensors
    put index "$goldens"/**/*.index.json
    put config "$goldens"/**/config.json "$root"/assets/*/config.json
    put tokenizer "$goldens"/tokenizers/*/tokenizer.json "$root"/assets/*/tokenizer.json
    put tokenizer_config "$goldens"/**/tokenizer_config.json
    put template "$root"/crates/ft-formats/src/template/named/*.jinja "$goldens"/**/*.jinja
    put adapter "$goldens"/**/adapter_config.json
    put jsonl "$goldens"/**/*.jsonl "$root"/assets/**/*.jsonl
    put json "$goldens"/data/*.json
    put csv "$goldens"/**/*.csv
    put parquet "$goldens"/**/*.parquet
    put arrow "$goldens"/**/*.arrow
    put recipe "$root"/recipes/*.toml
    put special_tokens "$goldens"/**/special_tokens_map.json "$goldens"/**/added_tokens.json
    put generation_config "$goldens"/**/generation_config.json "$root"/assets/*/generation_config.json
    put quantized "$goldens"/quantfiles/**/config.json
    put preference "$goldens"/preference/*.jsonl
    put prompts "$goldens"/data/*.jsonl "$goldens"/preference/text.jsonl
    mkdir -p "$data"/corpus/{safetensors,gguf,index,json,csv,kwargs,argument,manifest,state,metrics,events,resolved}
    mkdir -p "$data"/corpus/{special_tokens,generation_config,quantized,preference,prompts,yaml}
    printf '\070\0\0\0\0\0\0\0{"a":{"dtype":"F32","shape":[2,1],"data_offsets":[0,8]}}\0\0\0\0\0\0\0\0' >"$data/corpus/safetensors/one"
    printf 'GGUF\003\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0' >"$data/corpus/gguf/one"
    printf '{"metadata": {"total_size": 9}, "weight_map": {"model.norm.weight": "model.safetensors"}}' >"$data/corpus/index/one"
    printf '[{"text": "one"}, {"prompt": "a", "completion": "b"}]' >"$data/corpus/json/one"
    printf 'prompt,completion\n"a, ""b""",c\n1,2\n' >"$data/corpus/csv/one"
    printf '{"enable_thinking": false, "bos_token": "x", "list": [1, {"a": null}]}' >"$data/corpus/kwargs/one"
    printf 'tune.method=lora\ntune.lora.r=4\nmemory.budget=22GiB\nrlhf.rewards=["regex:[a]", "length:4"]' >"$data/corpus/argument/one"
    # The hash of `{}`, which the target writes as the state.
    printf '{"format": 1, "ft": "0.1.0", "step": 1, "files": [{"name": "state.json", "size": 2, "blake3": "%s"}], "seal": "00"}' \
        6e46dd10defc9b56c29a6ec56b508c21f54c08192194e4df25bf36f0c9c3c279 >"$data/corpus/manifest/one"
    printf '{"recipe": {"train.seed": "1"}, "made_by": {"program": "a"}, "data": "aa", "base": "b:c", "stage": true, "trained_tokens": 3}' >"$data/corpus/state/one"
    printf '{"step":1,"epoch":0.5,"loss":2.5,"lr":0.1}\n{"step":2,"eval_loss":2.0}\n' >"$data/corpus/metrics/one"
    printf '{"event":"start","steps":2,"time":1.5}\n{"event":"warning","message":"x"}\n{"event":"stop","step":2,"reason":"done"}\n' >"$data/corpus/events/one"
    printf '{"eos_token": {"content": "<|im_end|>", "lstrip": false}, "pad_token": "<|endoftext|>", "<extra>": 900}' >"$data/corpus/special_tokens/one"
    printf '{"eos_token_id": [2, 0], "pad_token_id": 0, "do_sample": false}' >"$data/corpus/generation_config/one"
    printf '{"prompt": "q", "completion": "a", "label": true}\n{"prompt": "r", "completion": "b", "label": "False"}\n' >"$data/corpus/preference/one"
    printf '{"prompt": "add 3 and 4", "answer": 7}\n{"prompt": [{"role": "user", "content": "q"}], "answer": ["a", "b"]}\n' >"$data/corpus/prompts/one"
    local n=0 settings
    for settings in '"gptq", "bits": 4, "group_size": 32, "desc_act": false' '"gptq", "bits": 3, "group_size": 32, "checkpoint_format": "gptq_v2"' \
        '"awq", "bits": 4, "group_size": 32, "version": "gemm"' '"fp8", "weight_block_size": [32, 32]' '"bitsandbytes", "load_in_8bit": true' \
        '"bitsandbytes", "load_in_4bit": true, "bnb_4bit_quant_type": "nf4"' \
        '"compressed-tensors", "format": "pack-quantized", "config_groups": {"group_0": {"weights": {"num_bits": 4, "type": "int"}}}'; do
        n=$((n + 1))
        printf '{"model_type": "llama", "quantization_config": {"quant_method": %s}}' "$settings" >"$data/corpus/quantized/$n"
    done
    printf 'base_model: m\ndatasets:\n  - path: rows.jsonl\n    type: alpaca\nadapter: lora\nlora_r: 8\nbetas: [0.9, 0.95]\n' >"$data/corpus/yaml/axolotl"
    printf 'model_name_or_path: m\nfinetuning_type: lora\nstage: dpo\ndataset: own\nown:\n  file_name: o.json\n  columns: {prompt: q, response: r}\n' >"$data/corpus/yaml/factory"
    printf '{"model_name": "m", "max_steps": 2, "peft": {"r": 4, "lora_alpha": 8}}' >"$data/corpus/yaml/json"
    printf '[train]\nmax_steps = 2  # recipe\n[model]\npath = "m"  # argument\n' >"$data/corpus/resolved/one"
    mkdir -p "$data"/corpus/{run,lock,token_cache,teacher_cache,hub,request,score}
    # The hash of `{}`, which the target writes as a result.
    printf '{"format": "ft run 1", "ft": "0.1.0", "processes": [7, 8], "final": {"config.json": [2, 5, "%s"]}}\n' \
        6e46dd10defc9b56c29a6ec56b508c21f54c08192194e4df25bf36f0c9c3c279 >"$data/corpus/run/one"
    printf 'process 1 since 2026-01-01 00:00:00 UTC\n' >"$data/corpus/lock/one"
    printf 'process 4000000 since unix time 1767225600 on other.example (process namespace 4026531836)\n' >"$data/corpus/lock/other"
    printf '{"format":"ft token cache 3","fingerprint":"aa","stats":{"rows":2},"readings":[{"file":0,"columns":["text"],"skipped":[]}],"chunks":[{"read":2,"rows":2,"tokens":9,"hash":"00","stats":{},"sources":[[2,0]]}],"screened":null}' >"$data/corpus/token_cache/one"
    printf '{"format": "ft teacher outputs 1", "key": "00", "common": 8, "k": 4, "temperature": 1.5, "data": "aa", "teacher": "b:c", "shards": 0, "documents": 0, "tokens": 0}\n' >"$data/corpus/teacher_cache/one"
    printf '[{"type": "file", "path": "data/train-0.jsonl", "oid": "%040d", "size": 3}, {"type": "file", "path": "m.safetensors", "oid": "%040d", "size": 9, "lfs": {"oid": "%064d", "size": 9}}]' \
        1 1 2 >"$data/corpus/hub/one"
    printf 'GET /token/live?runs=0:5 HTTP/1.1\r\nHost:  127.0.0.1:8000 \r\nAccept: */*' >"$data/corpus/request/one"
    printf '0.5' >"$data/corpus/score/one"
    printf '{"score": -1e-3, "why": "short"}' >"$data/corpus/score/object"
    local file
    for file in "$here"/kept/*.txt; do
        name=$(basename "$file" .txt)
        mkdir -p "$data/corpus/$name"
        "$here/kept.py" files "$file" "$data/corpus/$name"
    done
}

# The longest inputs: a small format is explored with small ones.
longest() {
    case $1 in
    request | score | lock | hub | run | argument | kwargs | manifest | state | index | adapter | special_tokens | generation_config | quantized | \
        metrics | events | resolved | token_cache | teacher_cache | yaml | best | card | restored | sums | upload) echo 8192 ;;
    csv | json | jsonl | preference | prompts | text | options) echo 4096 ;;
    recipe | template | config | tokenizer_config) echo 16384 ;;
    *) echo 65536 ;;
    esac
}

# one TARGET SECONDS [OPTION...]: with options of libFuzzer.
one() {
    local name=$1 seconds=$2 words=$data/dict/$1.txt
    shift 2
    mkdir -p "$data/corpus/$name" "$data/artifacts/$name" "$data/dict"
    FT_FUZZ=dict:$name "$program" >"$words"
    [ ! -s "$words" ] || set -- "$@" -dict="$words"
    # The program has a mutator of its own, with which libFuzzer would begin with long inputs.
    FT_FUZZ=$name "$program" "$data/corpus/$name" -max_total_time="$seconds" -timeout="$timeout" -report_slow_units="$timeout" -rss_limit_mb=2048 \
        -malloc_limit_mb=1024 -max_len="$(longest "$name")" -len_control=100 -print_final_stats=1 -artifact_prefix="$data/artifacts/$name/" "$@" &
    local process=$! code=0
    wait "$process" || code=$?
    rm -rf "/dev/shm/ft-fuzz-$process"
    return "$code"
}

# The program ends itself, which libFuzzer takes for a fault.
names() {
    [ -x "$program" ] || { echo "there is no $program: $0 build" >&2; return 1; }
    { FT_FUZZ=? "$program" -runs=1 -artifact_prefix=/dev/shm/ft-fuzz-names- 2>&1 || true; } | sed -n 's/.*is none of: //p'
    rm -f /dev/shm/ft-fuzz-names-*
}

# The first input of a target: if it fails, the target itself is broken, and its figures would mean nothing.
first() {
    local name=$1 input code=0
    mkdir -p "$data/corpus/$name"
    # `head` would end before `sort`, which is a fault here.
    input=$(find "$data/corpus/$name" -type f | sort | sed -n 1p)
    [ -n "$input" ] || { echo "$name has no inputs: $0 seed" >&2; exit 1; }
    FT_FUZZ=$name "$program" "$input" -timeout="$timeout" -artifact_prefix=/dev/shm/ft-fuzz-first- >"$data/$name.log" 2>&1 &
    local process=$!
    wait "$process" || code=$?
    rm -rf /dev/shm/ft-fuzz-first-* "/dev/shm/ft-fuzz-$process"
    [ "$code" -eq 0 ] || { echo "$name fails at its first input $input: see $data/$name.log" >&2; exit 1; }
}

# The named targets, or all of them, one after the other; a line of figures for each: target, processor seconds, executions,
# files that failed.
all() {
    local seconds=$1 name list log before TIMEFORMAT='%U %S' used rounds
    shift
    list=${*:-$(names)}
    [ -n "$list" ] || return 1
    touch "$data/figures.tsv"
    for name in $list; do
        log=$data/$name.log
        mkdir -p "$data/artifacts/$name"
        first "$name"
        before=$(find "$data/artifacts/$name" -type f | wc -l)
        # Each second round of a target also keeps inputs that come nearer to a comparison.
        rounds=$(awk -F'\t' -v name="$name" '$1 == name { n++ } END { print n + 0 }' "$data/figures.tsv")
        used=$({ time one "$name" "$seconds" -use_value_profile=$((rounds % 2)) >"$log" 2>&1 || true; } 2>&1 | awk '{print $1 + $2}')
        printf '%s\t%s\t%s\t%s\n' "$name" "$used" "$(sed -n 's/stat::number_of_executed_units: *//p' "$log")" \
            $(($(find "$data/artifacts/$name" -type f | wc -l) - before)) >>"$data/figures.tsv"
        [ "$(find "$data/artifacts/$name" -type f | wc -l)" -eq "$before" ] || echo "$name: see $log and $data/artifacts/$name"
    done
}

# The sums of all lines of figures.
sum() {
    sort "$data/figures.tsv" | awk -F'\t' '
        { cpu[$1] += $2; runs[$1] += $3; bad[$1] += $4; c += $2; r += $3; b += $4 }
        END { for (n in cpu) printf "| %s | %.2f | %.2f | %d |\n", n, cpu[n] / 3600, runs[n] / 1e6, bad[n] | "sort"; close("sort")
              printf "| all | %.2f | %.2f | %d |\n", c / 3600, r / 1e6, b }'
}

# Adds inputs of the corpus that reach what those of fuzz/kept do not reach, as lines, which `cargo test` replays. No line is taken away.
keep() {
    local name list merged=$data/merged control=$data/merge.control file process
    list=${*:-$(names)}
    [ -n "$list" ] || return 1
    for name in $list; do
        [ -n "$(find "$data/corpus/$name" -type f 2>/dev/null | sed -n 1p)" ] || { echo "$name has no inputs: $0 seed" >&2; continue; }
        file=$here/kept/$name.txt
        rm -rf "$merged" "$control"
        mkdir -p "$merged"
        "$here/kept.py" files "$file" "$merged"
        # An input that fails is left out, and the merge goes on.
        if FT_FUZZ=$name "$program" -merge=1 -merge_control_file="$control" -timeout="$timeout" -rss_limit_mb=2048 -malloc_limit_mb=1024 \
            -max_len="$(longest "$name")" -artifact_prefix=/dev/shm/ft-fuzz-merge- "$merged" "$data/corpus/$name" >"$data/merge.log" 2>&1 &&
            "$here/kept.py" add "$file" "$control" >"$data/merge.txt"; then
            cp "$data/merge.txt" "$file"
        else
            echo "$name: the merge failed, and $file is as it was: see $data/merge.log" >&2
        fi
        rm -rf "$merged" "$control" "$data/merge.txt" /dev/shm/ft-fuzz-merge-*
        # A merge runs the inputs in processes of its own: what they left goes, what runs stays.
        for process in $(find /dev/shm -maxdepth 1 -name 'ft-fuzz-[0-9]*' | sed 's/.*-//'); do
            [ -d "/proc/$process" ] || rm -rf "/dev/shm/ft-fuzz-$process"
        done
    done
}

case "${1:-}" in
build) build ;;
seed) seed ;;
one) one "${@:2}" ;;
all) all "${@:2}" ;;
forever) while :; do all "${@:2}"; done ;;
sum) sum ;;
keep) keep "${@:2}" ;;
*) sed -n '2,3s/^# //p' "$0"; exit 2 ;;
esac
