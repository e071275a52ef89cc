#!/usr/bin/env python3
"""Times transformers' `generate` on one NVIDIA GPU or on the CPU, on the shapes of benches/generate.rs: random weights
(bf16, or f32 with `--dtype f32`), SDPA attention, its default cache. `rows` answers, each to its own prompt; `new` tokens each, sampled at temperature 1. Prints
one line of JSON with the keys of benches/generate.rs: the prompt's share is the time of a call with one new token.
"""
import argparse
import json
import os
import statistics
import time

parser = argparse.ArgumentParser()
parser.add_argument("--shape", default="qwen2.5-0.5b", help="qwen2.5-0.5b, llama-3.1-8b, or a folder with a config.json")
parser.add_argument("--layers", type=int)
parser.add_argument("--rows", type=int, default=1)
parser.add_argument("--prompt", type=int, default=128)
parser.add_argument("--new", type=int, default=32)
parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
parser.add_argument("--dtype", default="bf16", choices=["bf16", "f32"])
parser.add_argument("--threads", type=int, default=2, help="on the CPU")
parser.add_argument("--repeats", type=int, default=3, help="calls with one new token, and with all; the median counts")
options = parser.parse_args()
os.environ["HF_HUB_OFFLINE"] = "1"

import torch  # noqa: E402
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, Qwen2Config  # noqa: E402

torch.manual_seed(0)
torch.set_num_threads(options.threads)
on_gpu = options.device == "cuda"
common = dict(attn_implementation="sdpa", bos_token_id=None, eos_token_id=None, pad_token_id=0)
if os.path.isdir(options.shape):
    config = AutoConfig.from_pretrained(options.shape, **common)
elif options.shape == "qwen2.5-0.5b":
    config = Qwen2Config(vocab_size=151936, hidden_size=896, intermediate_size=4864, num_hidden_layers=24,
                         num_attention_heads=14, num_key_value_heads=2, tie_word_embeddings=True, **common)
elif options.shape == "llama-3.1-8b":
    config = LlamaConfig(vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32,
                         num_attention_heads=32, num_key_value_heads=8, tie_word_embeddings=False, **common)
else:
    parser.error(f"there is no shape {options.shape}")
if options.layers:
    config.num_hidden_layers = options.layers
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:options.layers]
with torch.device(options.device):
    torch.set_default_dtype(torch.bfloat16 if options.dtype == "bf16" else torch.float32)
    model = AutoModelForCausalLM.from_config(config).eval()
    torch.set_default_dtype(torch.float32)
ids = torch.randint(1, config.vocab_size, (options.rows, options.prompt), device=options.device)
mask = torch.ones_like(ids)


def wait():
    if on_gpu:
        torch.cuda.synchronize()


def seconds(new):
    wait()
    start = time.perf_counter()
    with torch.inference_mode():
        out = model.generate(ids, attention_mask=mask, max_new_tokens=new, min_new_tokens=new, do_sample=True,
                             temperature=1.0, top_k=0, top_p=1.0)
    wait()
    assert out.shape[1] == options.prompt + new
    return time.perf_counter() - start


if options.repeats > 1 or on_gpu:
    seconds(2)
if on_gpu:
    torch.cuda.reset_peak_memory_stats()
prompt = statistics.median(seconds(1) for _ in range(options.repeats))
decode = statistics.median(seconds(options.new) for _ in range(max(1, options.repeats - 1))) - prompt
print(json.dumps({
    "impl": "transformers", "shape": options.shape, "dtype": options.dtype, "layers": options.layers, "rows": options.rows, "prompt": options.prompt,
    "device": torch.cuda.get_device_name() if on_gpu else "cpu", "torch": torch.__version__,
    "prefill_tokens_per_second": options.rows * options.prompt / prompt,
    "decode_tokens_per_second": options.rows * (options.new - 1) / decode,
    "seconds": prompt + decode, "peak_device_mib": torch.cuda.max_memory_allocated() >> 20 if on_gpu else None,
}))
