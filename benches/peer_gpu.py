#!/usr/bin/env python3
"""Times fine-tuning steps of transformers + PEFT + PyTorch on one NVIDIA GPU, on the shapes of benches/step.rs.

SDPA attention, gradient checkpointing, bf16 weights; LoRA through PEFT; `block` trains one decoder layer with an f32
master and f32 AdamW state for it, as a block-coordinate optimizer does, and is the mean over first, middle and last
layer; `full` keeps bf16 weights and bf16 state. One configuration a process; prints one line of JSON with the keys of
benches/step.rs. Needs torch, transformers and peft; random weights, no network.
"""
import argparse
import json
import os
import statistics
import time

parser = argparse.ArgumentParser()
parser.add_argument("--size", default="0.5b", help="0.5b, llama-3.1-8b, qwen2.5-7b, qwen3-8b, or a folder with a config.json")
parser.add_argument("--layers", type=int)
parser.add_argument("--method", default="lora", choices=["lora", "full", "block"])
parser.add_argument("--batch", type=int, default=1)
parser.add_argument("--seq", type=int, default=2048)
parser.add_argument("--steps", type=int, default=5)
parser.add_argument("--no-checkpointing", action="store_true")
options = parser.parse_args()
os.environ["HF_HUB_OFFLINE"] = "1"

import torch  # noqa: E402
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config  # noqa: E402

torch.manual_seed(0)
common = dict(use_cache=False, attn_implementation="sdpa")
if os.path.isdir(options.size):
    config = AutoConfig.from_pretrained(options.size, **common)
elif options.size == "0.5b":
    config = Qwen2Config(vocab_size=151936, hidden_size=896, intermediate_size=4864, num_hidden_layers=24,
                         num_attention_heads=14, num_key_value_heads=2, tie_word_embeddings=True, **common)
elif options.size == "qwen2.5-7b":
    config = Qwen2Config(vocab_size=152064, hidden_size=3584, intermediate_size=18944, num_hidden_layers=28,
                         num_attention_heads=28, num_key_value_heads=4, tie_word_embeddings=False, **common)
elif options.size == "qwen3-8b":
    config = Qwen3Config(vocab_size=151936, hidden_size=4096, intermediate_size=12288, num_hidden_layers=36,
                         num_attention_heads=32, num_key_value_heads=8, head_dim=128, tie_word_embeddings=False, **common)
else:
    config = LlamaConfig(vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32,
                         num_attention_heads=32, num_key_value_heads=8, tie_word_embeddings=False, **common)
if options.layers:
    config.num_hidden_layers = options.layers
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:options.layers]
with torch.device("cuda"):
    torch.set_default_dtype(torch.bfloat16)
    model = AutoModelForCausalLM.from_config(config)
    torch.set_default_dtype(torch.float32)
layers = model.model.layers
if not options.no_checkpointing:
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.enable_input_require_grads()
if options.method == "lora":
    import peft
    lora = peft.LoraConfig(r=16, lora_alpha=32, lora_dropout=0.0, target_modules="all-linear", task_type="CAUSAL_LM")
    model = peft.get_peft_model(model, lora, autocast_adapter_dtype=False)
model.train()
ids = torch.randint(0, config.vocab_size, (options.batch, options.seq), device="cuda")


class MasterAdamW:
    """AdamW on f32 copies of bf16 weights: what a block of layers needs while it is trained."""

    def __init__(self, parameters):
        self.parameters = parameters
        self.masters = [p.detach().float() for p in parameters]
        self.inner = torch.optim.AdamW(self.masters, lr=1e-5, fused=True)

    def step(self):
        for p, m in zip(self.parameters, self.masters):
            m.grad = p.grad.float()
            p.grad = None
        self.inner.step()
        for p, m in zip(self.parameters, self.masters):
            p.data.copy_(m)
            m.grad = None

    def zero_grad(self, set_to_none=True):
        pass


def run(optimizer):
    seconds = []
    for _ in range(options.steps + 2):
        torch.cuda.synchronize()
        start = time.perf_counter()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return seconds[2:], loss.item()


torch.cuda.reset_peak_memory_stats()
every, medians = [], []
if options.method == "block":
    for layer in (layers[0], layers[len(layers) // 2], layers[-1]):
        model.requires_grad_(False)
        layer.requires_grad_(True)
        seconds, loss = run(MasterAdamW(list(layer.parameters())))
        every += seconds
        medians.append(statistics.median(seconds))
else:
    trained = [p for p in model.parameters() if p.requires_grad]
    every, loss = run(torch.optim.AdamW(trained, lr=1e-5, fused=True))
    medians = [statistics.median(every)]
median = statistics.mean(medians)
print(json.dumps({
    "impl": "torch", "size": options.size, "layers": options.layers, "method": options.method, "dtype": "bf16", "batch": options.batch,
    "seq": options.seq, "device": torch.cuda.get_device_name(), "torch": torch.__version__,
    "activations": "keep" if options.no_checkpointing else "recompute",
    "tokens_per_s": round(options.batch * options.seq / median, 1), "step_s": [round(s, 4) for s in every],
    "peak_device_mib": torch.cuda.max_memory_allocated() >> 20, "loss": loss,
}))
