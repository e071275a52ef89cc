#!/usr/bin/env python3
"""Times the training steps of llama.cpp's example `llama-finetune` on the CPU, on the shapes of benches/step.rs.

It trains one row at a time in f32 with AdamW: all weights but the tied embedding and head, for which it has no gradient. FT makes the GGUF file of a
random model; one line of JSON as of peer_cpu.py. Made with the llama.cpp of llama-cpp-python 0.3.36:

    FT=target/release/ft LLAMA_FINETUNE=/path/to/llama-finetune benches/peer_llama_cpp.py --size small --seq 256
"""
import argparse
import json
import os
import pathlib
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time

parser = argparse.ArgumentParser()
parser.add_argument("--size", default="0.5b", choices=["0.5b", "small"])
parser.add_argument("--method", default="full", choices=["full"])
parser.add_argument("--dtype", default="f32", choices=["f32"])
parser.add_argument("--batch", type=int, default=1, choices=[1])
parser.add_argument("--seq", type=int, default=512)
parser.add_argument("--steps", type=int, default=3)
parser.add_argument("--threads", type=int, default=2)
options = parser.parse_args()
root = pathlib.Path(__file__).resolve().parent.parent


def gguf(work):
    """A random model with the tokenizer of assets/tiny."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    shape = dict(vocab_size=151936, hidden_size=896, intermediate_size=4864, num_hidden_layers=24,
                 num_attention_heads=14, num_key_value_heads=2)
    if options.size == "small":
        shape = dict(vocab_size=4096, hidden_size=256, intermediate_size=704, num_hidden_layers=4,
                     num_attention_heads=4, num_key_value_heads=4)
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(Qwen2Config(**shape, tie_word_embeddings=True, max_position_embeddings=32768))
    model.save_pretrained(work / "model")
    del model
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(root / "assets/tiny" / name, work / "model" / name)
    subprocess.run([os.environ["FT"], "export", work / "model", "--out", work / "gguf", "--to", "gguf", "--type", "f32", "-q"],
                   check=True, stdout=subprocess.DEVNULL)
    shutil.rmtree(work / "model")
    return next((work / "gguf").glob("*.gguf"))


def steps(model, work):
    """Seconds of each step after one that warms up, and the peak of the memory in MiB."""
    words = random.Random(0)
    # A row begins every seq / 2 tokens; a token of this text has one character or two.
    count = options.seq * (options.steps + 4)
    text = work / "text.txt"
    text.write_text("".join(words.choice("0123456789 ") for _ in range(count)))
    command = [os.environ["LLAMA_FINETUNE"], "--file", text, "--model", model, "-c", options.seq, "-b", options.seq, "-ub", options.seq,
               "-t", options.threads, "-tb", options.threads, "-epochs", 1, "-val-split", 0, "-o", work / "out.gguf"]
    process = subprocess.Popen([str(word) for word in command], stderr=subprocess.PIPE, stdout=subprocess.DEVNULL)
    times, log = [], b""
    try:
        # Each step writes its progress, which begins with this word.
        while len(times) < options.steps + 1:
            piece = os.read(process.stderr.fileno(), 65536)
            if not piece:
                sys.exit(f"llama-finetune ended early:\n{log.decode(errors='replace')[-2000:]}")
            seen = log.count(b"train: [")
            log += piece
            times += [time.perf_counter()] * (log.count(b"train: [") - seen)
        status = pathlib.Path(f"/proc/{process.pid}/status").read_text()
    finally:
        process.kill()
        process.wait()
    peak = int(status.split("VmHWM:")[1].split()[0]) // 1024
    return [after - before for before, after in zip(times, times[1:])], peak


with tempfile.TemporaryDirectory(dir=os.environ.get("TMPDIR")) as directory:
    seconds, peak = steps(gguf(pathlib.Path(directory)), pathlib.Path(directory))
print(json.dumps({
    "impl": "llama.cpp", "size": options.size, "method": options.method, "dtype": options.dtype, "batch": 1,
    "seq": options.seq, "threads": options.threads, "tokens_per_s": round(options.seq / statistics.median(seconds), 1),
    "step_s": [round(s, 3) for s in seconds], "peak_rss_mib": peak,
}))
