#!/usr/bin/env python3
"""Times fine-tuning steps of transformers + PEFT + PyTorch, or of torchtune, on the CPU, on the shapes of benches/step.rs.

One configuration a process; prints one line of JSON with the same keys. Made with torch 2.13.0, transformers 5.24.0,
peft 0.21.2; torchtune 0.6.1 with torchao 0.10.0. `others_busy`: share of the machine that other processes used during the
steps; above 0.05 the row is void.
"""
import argparse
import json
import os
import resource
import statistics
import time

parser = argparse.ArgumentParser()
parser.add_argument("--impl", default="torch", choices=["torch", "torchtune"])
parser.add_argument("--size", default="0.5b", choices=["0.5b", "small"])
parser.add_argument("--method", default="lora", choices=["lora", "full", "block"])
parser.add_argument("--dtype", default="bf16", choices=["bf16", "f32"])
parser.add_argument("--batch", type=int, default=1)
parser.add_argument("--seq", type=int, default=512)
parser.add_argument("--steps", type=int, default=3)
parser.add_argument("--threads", type=int, default=2)
options = parser.parse_args()
os.environ["OMP_NUM_THREADS"] = str(options.threads)
os.environ["HF_HUB_OFFLINE"] = "1"

import torch  # noqa: E402

torch.set_num_threads(options.threads)
torch.manual_seed(0)

shape = dict(vocab_size=151936, hidden_size=896, intermediate_size=4864, num_hidden_layers=24,
             num_attention_heads=14, num_key_value_heads=2)
if options.size == "small":
    shape = dict(vocab_size=4096, hidden_size=256, intermediate_size=704, num_hidden_layers=4,
                 num_attention_heads=4, num_key_value_heads=4)


def of_transformers():
    """The model, its decoder layers, and its loss for token ids."""
    import peft
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(**shape, tie_word_embeddings=True, use_cache=False, max_position_embeddings=32768)
    config._attn_implementation = "sdpa"
    model = Qwen2ForCausalLM(config)
    layers = model.model.layers
    if options.method == "lora":
        lora = peft.LoraConfig(r=16, lora_alpha=32, lora_dropout=0.0, target_modules="all-linear", task_type="CAUSAL_LM")
        # Adapters in the type of the base: the faster setting of the peer.
        model = peft.get_peft_model(model, lora, autocast_adapter_dtype=False)
    return model, layers, lambda ids: model(input_ids=ids, labels=ids).loss


def of_torchtune():
    """The same as torchtune's recipes for one device set it up: activation checkpointing, loss in chunks."""
    from torchtune.models.qwen2 import lora_qwen2, qwen2
    from torchtune.modules import TransformerSelfAttentionLayer
    from torchtune.modules.loss import CEWithChunkedOutputLoss
    from torchtune.modules.peft import get_adapter_params, set_trainable_params
    from torchtune.training import set_activation_checkpointing

    sizes = dict(vocab_size=shape["vocab_size"], num_layers=shape["num_hidden_layers"], num_heads=shape["num_attention_heads"],
                 num_kv_heads=shape["num_key_value_heads"], embed_dim=shape["hidden_size"],
                 intermediate_dim=shape["intermediate_size"], max_seq_len=32768, tie_word_embeddings=True)
    if options.method == "lora":
        model = lora_qwen2(["q_proj", "k_proj", "v_proj", "output_proj"], apply_lora_to_mlp=True, lora_rank=16, lora_alpha=32, **sizes)
        set_trainable_params(model, get_adapter_params(model))
    else:
        model = qwen2(**sizes)
    layers = model.layers
    set_activation_checkpointing(model, auto_wrap_policy={TransformerSelfAttentionLayer})
    cross_entropy = CEWithChunkedOutputLoss()
    model.set_num_output_chunks(cross_entropy.num_output_chunks)
    ignored = torch.full((options.batch, 1), cross_entropy.ignore_index)
    return model, layers, lambda ids: cross_entropy(model(ids), torch.hstack((ids[:, 1:], ignored)))


dtype = torch.bfloat16 if options.dtype == "bf16" else torch.float32
torch.set_default_dtype(dtype)
model, layers, loss = of_transformers() if options.impl == "torch" else of_torchtune()
torch.set_default_dtype(torch.float32)
model.train()
ids = torch.randint(0, shape["vocab_size"], (options.batch, options.seq))


def busy_seconds():
    """CPU seconds that the whole machine has worked."""
    with open("/proc/stat") as stat:
        fields = [int(x) for x in stat.readline().split()[1:9]]
    return (sum(fields) - fields[3] - fields[4]) / os.sysconf("SC_CLK_TCK")


def run(parameters):
    """Seconds of each step after one that warms up, and the share of others."""
    optimizer = torch.optim.AdamW(parameters, lr=1e-4, fused=True)
    seconds, others = [], []
    for _ in range(options.steps + 1):
        busy, own, start = busy_seconds(), time.process_time(), time.perf_counter()
        loss(ids).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        seconds.append(time.perf_counter() - start)
        idle_work = busy_seconds() - busy - (time.process_time() - own)
        others.append(max(0.0, idle_work / (seconds[-1] * os.cpu_count())))
    return seconds[1:], others[1:]


every, medians, shares = [], [], []
if options.method == "block":
    for layer in (layers[0], layers[len(layers) // 2], layers[-1]):
        model.requires_grad_(False)
        layer.requires_grad_(True)
        seconds, others = run(list(layer.parameters()))
        layer.zero_grad(set_to_none=True)
        every, shares = every + seconds, shares + others
        medians.append(statistics.median(seconds))
else:
    every, shares = run([p for p in model.parameters() if p.requires_grad])
    medians = [statistics.median(every)]
median = statistics.mean(medians)
print(json.dumps({
    "impl": options.impl, "size": options.size, "method": options.method, "dtype": options.dtype, "batch": options.batch,
    "seq": options.seq, "threads": options.threads, "cpu": "torch " + torch.__version__,
    "tokens_per_s": round(options.batch * options.seq / median, 1), "step_s": [round(s, 3) for s in every],
    "peak_rss_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
    "others_busy": [round(s, 2) for s in shares],
}))
