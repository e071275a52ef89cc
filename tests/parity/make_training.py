"""Training runs by a plain PyTorch loop: losses, gradient norms and learning rates of 20 steps.

    python make_training.py [models] [RUN ...]

Writes goldens/training/models/{llama,qwen3}, goldens/training/adapters/*, goldens/training/runs/*.json
(and RUN.final.safetensors for LoRA). The loop is section 5 of the design, written out:

- Step k (from 1) takes the next batch_size x accumulation rows of the file, in order, wrapping around.
- loss = sum over the trained tokens of the whole window / their number, before the update.
- grad_norm = what `clip_grad_norm_` returns, over the parameters that are active.
- The learning rate of step k is the one transformers' schedule has after k-1 steps.
- Weight decay on matrices and embeddings, never on norms and biases.
- block (BAdam): every block is active for exactly K steps; at a switch the optimizer starts from nothing,
  bias correction included; the schedule of the learning rate runs on. Partitions:
    layer    a decoder layer (or `layers_per_block` of them)
    module   self_attn + input_layernorm, then mlp + post_attention_layernorm
    matrix   each matrix of a layer in forward order, with its bias; norms are in no block
  The embedding is the first block, lm_head with the final norm the last one. A tied head is the embedding.
- block, partition ratio (BAdam's ratio mode): of every parameter of the layers with n >= 100 elements a window of
  floor(n * ratio) elements is active; window w starts at w * length modulo n and wraps around; scattered masks take
  the elements in the order of a permutation (the program's own, written out in `reference.py`). AdamW, its decay and
  the norm see these elements only.
- block with correction sgd or signsgd (BREAD): after the backward pass of each micro-batch every parameter of the
  other blocks (scope partial: of the blocks after the active one) moves against its gradient, or its sign, by
  lr * correction_scale: no clipping, no decay, no state.
- block with correction lora: adapters on all linears train beside the block (scope partial: those of the active layer
  and above) under the same optimizer, which starts from nothing at a switch; clipping is over both. At the end the
  adapters are merged.
"""

import json
import math
import shutil
import sys

import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from reference import Lion, adafactor, window_indices

from common import GOLDENS, IGNORE, VERSIONS, Encoder, loss_sum, mean_loss, randomize, read_rows, relative, trained_tokens, write_json

TRAINING = GOLDENS / "training"
STEPS = 20
BATCH, ACCUMULATION = 2, 2

SHARED = dict(vocab_size=320, hidden_size=32, intermediate_size=48, num_attention_heads=4, num_key_value_heads=2,
              head_dim=16, max_position_embeddings=512, rms_norm_eps=1e-5, bos_token_id=None, eos_token_id=0,
              pad_token_id=0, dtype="float32")
# A small rope_theta for the one with key biases: where nothing rotates, their gradient is only rounding,
# and AdamW would make whole steps of it.
MODELS = {
    "llama": SHARED | dict(model_type="llama", num_hidden_layers=4, attention_bias=True, tie_word_embeddings=False,
                           rope_parameters=dict(rope_type="default", rope_theta=50.0)),
    "qwen3": SHARED | dict(model_type="qwen3", num_hidden_layers=3, tie_word_embeddings=True,
                           rope_parameters=dict(rope_type="default", rope_theta=1000.0)),
}

ADAMW = {"optimizer.name": "adamw", "optimizer.weight_decay": 0.01}
SGD = {"optimizer.name": "sgd", "optimizer.momentum": 0.9}
SEED = 42
COSINE = {"schedule.name": "cosine", "schedule.warmup_steps": 3}


def block(partition, order, every=3, lr=4e-3, **more):
    return {"tune.method": "block", "tune.block.partition": partition, "tune.block.order": order,
            "tune.block.switch_every": every, "optimizer.learning_rate": lr} | ADAMW | COSINE | {
            f"tune.block.{key}": value for key, value in more.items()}


def full(lr=5e-3, **more):
    return {"tune.method": "full", "optimizer.learning_rate": lr} | ADAMW | COSINE | more


def lora(adapter, lr=1e-2):
    return {"tune.method": "lora", "tune.lora.adapter": adapter, "optimizer.learning_rate": lr} | ADAMW | COSINE


# name: (model, rows, recipe)
RUNS = {
    "full_llama_messages": ("llama", "messages", full()),
    "full_llama_text": ("llama", "text", full()),
    "full_qwen3_messages": ("qwen3", "messages", full()),
    "full_qwen3_text": ("qwen3", "text", full()),
    "full_llama_no_clip": ("llama", "messages", full(**{"train.max_grad_norm": 0.0, "optimizer.betas": [0.8, 0.95], "optimizer.eps": 1e-5})),
    "sgd_momentum": ("llama", "messages", {"tune.method": "full", "optimizer.learning_rate": 0.1} | SGD | {
        "schedule.name": "linear", "schedule.warmup_steps": 2}),
    "sgd_plain": ("qwen3", "text", {"tune.method": "full", "optimizer.name": "sgd", "optimizer.learning_rate": 0.2,
                                    "schedule.name": "constant", "schedule.warmup_ratio": 0.16}),
    "freeze_llama": ("llama", "messages", {"tune.method": "freeze", "tune.freeze.trainable_layers": 2,
                                           "tune.freeze.trainable": ["model.norm."], "optimizer.learning_rate": 5e-3} | ADAMW | {
        "schedule.name": "wsd", "schedule.warmup_steps": 4, "schedule.decay_ratio": 0.5, "schedule.min_lr_ratio": 0.1}),
    "lora_llama": ("llama", "messages", lora("lora")),
    "lora_llama_rslora": ("llama", "messages", lora("rslora")),
    "lora_qwen3_targets": ("qwen3", "text", lora("targets")),
    # QLoRA: the base as bitsandbytes decodes it from NF4.
    "qlora_llama_nf4": ("llama", "messages", lora("lora") | {"memory.frozen_weights": "nf4"}),
    "qlora_qwen3_nf4_single": ("qwen3", "text", lora("targets") | {
        "memory.frozen_weights": "nf4", "memory.double_quantization": False}),
    "block_layer_ascending": ("llama", "messages", block("layer", "ascending")),
    "block_layer_descending": ("llama", "messages", block("layer", "descending")),
    "block_layer_triples": ("llama", "text", block("layer", "ascending", lr=2e-3, layers_per_block=3)),
    "block_module_ascending": ("llama", "messages", block("module", "ascending", every=2)),
    "block_module_descending": ("qwen3", "text", block("module", "descending")),
    "block_matrix_ascending": ("llama", "messages", block("matrix", "ascending", every=1)),
    "block_matrix_descending": ("qwen3", "messages", block("matrix", "descending", every=1)),
    "block_with_ends_ascending": ("llama", "messages", block("layer", "ascending", include_embedding=True, include_lm_head=True)),
    "block_with_ends_descending": ("llama", "text", block("layer", "descending", include_embedding=True, include_lm_head=True)),
    "block_with_ends_tied": ("qwen3", "messages", block("layer", "descending", include_embedding=True, include_lm_head=True)),
    "full_lion": ("qwen3", "text", full(lr=2e-4, **{"optimizer.name": "lion", "optimizer.betas": [0.9, 0.99]})),
    "full_adafactor": ("llama", "messages", full(lr=5e-3, **{"optimizer.name": "adafactor"})),
    "full_adafactor_tied": ("qwen3", "text", full(lr=5e-3, **{"optimizer.name": "adafactor"})),
    "block_ratio_adjacent": ("llama", "messages", block("ratio", "ascending", lr=2e-3, update_ratio=0.3, mask="adjacent")),
    "block_ratio_scattered": ("llama", "text", block("ratio", "descending", lr=2e-3, update_ratio=0.17, mask="scattered")),
    "block_ratio_with_ends": ("llama", "messages", block("ratio", "ascending", lr=1e-3, update_ratio=0.25, mask="scattered",
                                                         include_embedding=True, include_lm_head=True)),
    "block_bread_sgd": ("llama", "messages", block("layer", "ascending", correction="sgd", correction_scale=10.0)),
    "block_bread_sgd_partial": ("llama", "text", block("layer", "descending", lr=2e-3, correction="sgd", correction_scale=10.0,
                                                       correction_scope="partial", include_lm_head=True)),
    "block_bread_signsgd": ("qwen3", "text", block("module", "ascending", lr=2e-3, correction="signsgd", correction_scale=0.01)),
    "block_bread_lora": ("llama", "messages", block("layer", "ascending", correction="lora", correction_scale=0.5)
                         | {"tune.lora.adapter": "lora"}),
    "block_bread_lora_partial": ("llama", "text", block("layer", "descending", lr=2e-3, correction="lora", correction_scope="partial")
                                 | {"tune.lora.adapter": "lora"}),
    "ema_full": ("llama", "messages", full() | {"train.ema_decay": 0.9, "train.ema_ramp": False}),
    "ema_lora": ("llama", "messages", lora("lora") | {"train.ema_decay": 0.6}),
    "ema_block": ("llama", "messages", block("layer", "ascending", every=4) | {"train.ema_decay": 0.3}),
    "ema_ratio": ("llama", "messages", block("ratio", "ascending", lr=2e-3, update_ratio=0.3, mask="adjacent") | {"train.ema_decay": 0.8}),
    "block_head_tied": ("qwen3", "text", block("layer", "descending", include_lm_head=True)),
}

# name: (model, PEFT options)
ADAPTERS = {
    "lora": ("llama", dict(r=4, lora_alpha=8, target_modules="all-linear")),
    "rslora": ("llama", dict(r=4, lora_alpha=8, target_modules="all-linear", use_rslora=True)),
    "targets": ("qwen3", dict(r=4, lora_alpha=6, target_modules=["q_proj", "v_proj", "down_proj"])),
    "patterns": ("llama", dict(r=4, lora_alpha=8, target_modules=["q_proj", "o_proj", "up_proj"],
                               rank_pattern={"layers.1.self_attn.q_proj": 2}, alpha_pattern={"up_proj": 16})),
    "phi3": ("phi3", dict(r=4, lora_alpha=8, target_modules="all-linear")),
    "latent": ("deepseek_v2_groups", dict(r=4, lora_alpha=8, target_modules=[
        "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"])),
}


def model_directory(name):
    return TRAINING / "models" / name if name in MODELS else GOLDENS / "families" / name


def tokenizer_of(name):
    return GOLDENS / "tokenizers" / ("chat" if name in MODELS else "small")


def load(name, dtype=torch.float32):
    model = transformers.AutoModelForCausalLM.from_pretrained(model_directory(name), dtype=dtype, attn_implementation="eager")
    return model.train()


def make_models():
    for seed, (name, options) in enumerate(MODELS.items()):
        config = transformers.AutoConfig.for_model(**options)
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32)
        randomize(model, seed=3000 + seed, embedding=0.4, attention=0.2)
        model.generation_config = transformers.GenerationConfig(eos_token_id=[2, 0], pad_token_id=0)
        shutil.rmtree(model_directory(name), ignore_errors=True)
        model.save_pretrained(model_directory(name))


def make_adapters():
    for seed, (name, (base, options)) in enumerate(ADAPTERS.items()):
        directory = TRAINING / "adapters" / name
        shutil.rmtree(directory, ignore_errors=True)
        model = get_peft_model(load(base), LoraConfig(task_type="CAUSAL_LM", lora_dropout=0.0, **options))
        generator = torch.Generator().manual_seed(4000 + seed)
        with torch.no_grad():
            for key, parameter in model.named_parameters():
                if "lora_" in key:
                    parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
        model.peft_config["default"].base_model_name_or_path = base
        model.save_pretrained(directory)
        (directory / "README.md").unlink(missing_ok=True)

        # As the user loads it: logits and loss of base + adapter, and the merged weights that changed.
        model = PeftModel.from_pretrained(load(base), directory).eval()
        encoder, file = Encoder(tokenizer_of(base)), "messages" if base in MODELS else "eval_messages"
        rows = [encoder.row(row) for row in read_rows(GOLDENS / "data" / f"{file}.jsonl")]
        loss, tokens = mean_loss(model, rows)
        plain, _ = mean_loss(load(base).eval(), rows)
        assert abs(loss - plain) > 1e-2, "the adapter must matter"
        ids = torch.tensor(min((ids for ids, _ in rows), key=len))
        with torch.no_grad():
            tensors = {"input_ids": ids, "logits": model(ids[None], use_cache=False).logits[0].contiguous()}
        before = load(base).state_dict()
        merged = model.merge_and_unload()
        assert relative(merged(ids[None], use_cache=False).logits[0].detach(), tensors["logits"]) < 1e-5
        # The whole check once for split and once for fused projections; the others are held by their logits.
        changed = {f"merged.{key}": value.contiguous() for key, value in merged.state_dict().items()
                   if not torch.equal(value, before[key])}
        assert changed
        save_file(tensors | (changed if name in ("lora", "phi3", "latent") else {}), directory / "golden.safetensors")
        write_json(directory / "golden.json", dict(base=base, data=file, loss=loss, tokens=tokens, versions=VERSIONS))
        print("adapter", name, f"loss {loss:.4f} (base {plain:.4f})", len(changed), "merged")


def clean(name):
    """The name in the checkpoint of a parameter under PEFT."""
    return name.replace("base_model.model.", "").replace(".base_layer.", ".").replace(".default.", ".")


def blocks_of(model, recipe):
    """[[parameter name]] in ascending order; for partition ratio one list of all parameters a window is taken of."""
    names = [clean(name) for name, _ in model.named_parameters() if "lora_" not in name]
    if recipe["tune.block.partition"] == "ratio":
        ends = {"model.embed_tokens.": recipe.get("tune.block.include_embedding"), "model.norm.": recipe.get("tune.block.include_lm_head"),
                "lm_head.": recipe.get("tune.block.include_lm_head")}
        return [[n for n in names if n.startswith("model.layers.") or any(n.startswith(e) for e, on in ends.items() if on)]]
    layers, per = model.config.num_hidden_layers, recipe.get("tune.block.layers_per_block", 1)
    ATTENTION, MLP = ("self_attn.", "input_layernorm."), ("mlp.", "post_attention_layernorm.")
    MATRICES = [f"self_attn.{p}_proj." for p in "qkvo"] + [f"mlp.{p}_proj." for p in ["gate", "up", "down"]]
    parts = {"layer": [("",)], "module": [ATTENTION, MLP], "matrix": [(m,) for m in MATRICES]}[recipe["tune.block.partition"]]
    blocks = []
    if recipe.get("tune.block.include_embedding"):
        blocks.append(["model.embed_tokens.weight"])
    for first in range(0, layers, per):
        for part in parts:
            prefixes = tuple(f"model.layers.{i}.{p}" for i in range(first, min(first + per, layers)) for p in part)
            blocks.append([name for name in names if name.startswith(prefixes)])
    if recipe.get("tune.block.include_lm_head"):
        head = ["model.norm.weight", "lm_head.weight"]
        if "lm_head.weight" not in names:
            head = ["model.norm.weight"] + ([] if recipe.get("tune.block.include_embedding") else ["model.embed_tokens.weight"])
        blocks.append(head)
    assert all(blocks) and len({n for b in blocks for n in b}) == sum(map(len, blocks))
    return blocks


def optimizer_for(named, recipe):
    vector = lambda n: "norm" in n or n.endswith("bias")
    assert all(vector(n) for n, p in named if p.ndim < 2) or recipe.get("tune.block.partition") == "ratio"
    # Adapters learn at a rate of their own.
    scale = recipe.get("tune.block.correction_scale", 1.0) if recipe.get("tune.block.correction") == "lora" else 1.0
    decay = recipe.get("optimizer.weight_decay", 0.0)
    parts = [([p for n, p in named if "lora_" in n], decay, scale),
             ([p for n, p in named if not vector(n) and "lora_" not in n], decay, 1.0), ([p for n, p in named if vector(n)], 0.0, 1.0)]
    groups = [dict(params=ps, weight_decay=decay, factor=factor) for ps, decay, factor in parts if ps]
    lr = recipe["optimizer.learning_rate"]
    if recipe["optimizer.name"] == "lion":
        return Lion(groups, lr=lr, betas=tuple(recipe["optimizer.betas"]))
    if recipe["optimizer.name"] == "adafactor":
        return adafactor(groups, lr)
    if recipe["optimizer.name"] == "sgd":
        return torch.optim.SGD(groups, lr=lr, momentum=recipe.get("optimizer.momentum", 0.0))
    return torch.optim.AdamW(groups, lr=lr, betas=tuple(recipe.get("optimizer.betas", [0.9, 0.999])),
                             eps=recipe.get("optimizer.eps", 1e-8))


def learning_rates(recipe, steps):
    """lr of steps 1..steps, from transformers' own schedule on a stand-in parameter."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=recipe["optimizer.learning_rate"])
    warmup = recipe.get("schedule.warmup_steps")
    if warmup is None:
        # ft rounds down, transformers up.
        warmup = math.floor(recipe["schedule.warmup_ratio"] * steps)
    name = recipe["schedule.name"]
    if name == "constant":
        schedule = transformers.get_constant_schedule_with_warmup(optimizer, warmup)
    elif name == "linear":
        schedule = transformers.get_linear_schedule_with_warmup(optimizer, warmup, steps)
    elif name == "cosine":
        schedule = transformers.get_cosine_schedule_with_warmup(optimizer, warmup, steps)
    else:
        schedule = transformers.get_wsd_schedule(
            optimizer, warmup, math.ceil(recipe.get("schedule.decay_ratio", 0.1) * steps), num_training_steps=steps,
            min_lr_ratio=recipe.get("schedule.min_lr_ratio", 0.0))
    out = []
    for _ in range(steps):
        out.append(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()
    return out


def micro_loss(model, rows, trained):
    """Sum over the trained tokens of these rows / `trained`, which is that of the whole window."""
    longest = max(len(ids) for ids, _ in rows)
    ids = torch.tensor([ids + [0] * (longest - len(ids)) for ids, _ in rows])
    labels = torch.tensor([labels + [IGNORE] * (longest - len(labels)) for _, labels in rows])
    mask = torch.tensor([[1] * len(ids) + [0] * (longest - len(ids)) for ids, _ in rows])
    logits = model(ids, attention_mask=mask, use_cache=False).logits
    return sum(loss_sum(each, label) for each, label in zip(logits, labels)) / trained


def through_nf4(model, double):
    """Puts the projections of the layers through bitsandbytes' NF4 and back."""
    import nf4

    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".layers." in name and parameter.ndim == 2:
                parameter.copy_(nf4.decoded(parameter, double))


class Averages:
    """The averages of the trained weights. Without a ramp they are those of `torch.optim.swa_utils.AveragedModel`; the ramp is
    that of `EMAModel.get_decay` of diffusers (its step is one less than ours)."""

    def __init__(self, decay, ramp):
        self.decay, self.ramp, self.of, self.updates = decay, ramp, {}, {}

    @torch.no_grad()
    def update(self, named):
        for n, p in named:
            self.updates[n] = t = self.updates.get(n, 0) + 1
            if t == 1:
                self.of[n] = p.detach().clone()
            else:
                decay = min(self.decay, t / (9 + t)) if self.ramp else self.decay
                get_ema_multi_avg_fn(decay)([self.of[n]], [p.detach()], None)

    @torch.no_grad()
    def settle(self, named):
        """Gives weights their averages, and drops the averages."""
        for n, p in named:
            if n in self.of:
                p.copy_(self.of.pop(n))
                del self.updates[n]


def train(model_name, data, recipe, dtype, jitter=None):
    """`jitter`, a seed: changes every weight by a rounding error or two before the first step."""
    rows = read_rows(GOLDENS / "data" / f"{data}.jsonl")
    encoder = Encoder(tokenizer_of(model_name))
    rows = [encoder.row(row) for row in rows]
    model = load(model_name, dtype)
    if recipe.get("memory.frozen_weights") == "nf4":
        through_nf4(model, recipe.get("memory.double_quantization", True))
    if jitter is not None:
        generator = torch.Generator().manual_seed(jitter)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1 + 2e-7 * torch.randn(parameter.shape, generator=generator))
    method = recipe["tune.method"]
    base = {n: p.detach().clone() for n, p in model.named_parameters()}
    if "tune.lora.adapter" in recipe:
        model = PeftModel.from_pretrained(model, TRAINING / "adapters" / recipe["tune.lora.adapter"], is_trainable=True)
        model.to(dtype)
    start = base if method == "block" else {n: p.detach().clone() for n, p in model.named_parameters()}
    parameters_of = lambda: [(clean(n) if method == "block" else n, p) for n, p in model.named_parameters()]
    named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    blocks = blocks_of(model, recipe) if method == "block" else None
    if method == "freeze":
        layers = model.config.num_hidden_layers
        kept = tuple(f"model.layers.{i}." for i in range(layers - recipe["tune.freeze.trainable_layers"], layers))
        kept += tuple(recipe["tune.freeze.trainable"])
        for n, p in named:
            p.requires_grad_(n.startswith(kept))
        named = [(n, p) for n, p in named if p.requires_grad]
    optimizer = None if blocks else optimizer_for(named, recipe)
    clip = recipe.get("train.max_grad_norm", 1.0)
    window, place, touched = BATCH * ACCUMULATION, 0, set()
    correction, partial = recipe.get("tune.block.correction", "none"), recipe.get("tune.block.correction_scope") == "partial"
    scale, ratio, masked, corrected = recipe.get("tune.block.correction_scale", 1.0), recipe.get("tune.block.update_ratio"), {}, []
    windows = math.ceil(1 / ratio) if ratio else None
    decay = recipe.get("train.ema_decay", 0.0)
    averages, swa = Averages(decay, recipe.get("train.ema_ramp", True)), None
    if decay and not averages.ramp:
        swa = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(decay))
    out = dict(losses=[], grad_norms=[], learning_rates=learning_rates(recipe, STEPS), trained_tokens=[], active=[])
    for step in range(1, STEPS + 1):
        if blocks and (step - 1) % recipe["tune.block.switch_every"] == 0:
            count = windows or len(blocks)
            visit = (step - 1) // recipe["tune.block.switch_every"]
            turn, visit = visit // count, visit % count
            index = visit if recipe["tune.block.order"] == "ascending" else count - 1 - visit
            active = blocks[0 if ratio else index]
            others = [n for i, b in enumerate(blocks) if i != index and (not partial or i > index) for n in b]
            corrected = others if correction in ("sgd", "signsgd") else []
            layer = lambda n: int(n.split(".")[2]) if n.startswith("model.layers.") else -1
            averages.settle(parameters_of())
            lowest = min(layer(n) for n in active)
            wanted = lambda n: n in active or ("lora_" in n and (not partial or layer(n) >= lowest))
            for n, p in parameters_of():
                p.requires_grad_(wanted(n) or n in corrected)
                p.grad = None
            named = [(n, p) for n, p in parameters_of() if wanted(n)]
            if ratio:
                whole = named
                masked = {n: window_indices(n, p.numel(), ratio, turn * count + index, SEED, recipe["tune.block.mask"]) for n, p in whole}
                named = [(n, torch.nn.Parameter(p.detach().flatten()[masked[n]].clone())) for n, p in whole]
            optimizer = optimizer_for(named, recipe)
        out["active"].append(index if blocks else None)
        touched |= {n for n, _ in named} | set(corrected)
        batch = [rows[(place + i) % len(rows)] for i in range(window)]
        place += window
        trained = sum(trained_tokens(labels) for _, labels in batch)
        optimizer.zero_grad()
        total = 0.0
        for first in range(0, window, BATCH):
            loss = micro_loss(model, batch[first : first + BATCH], trained)
            loss.backward()
            total += loss.item()
            with torch.no_grad():
                for n, p in parameters_of():
                    if n in corrected:
                        move = p.grad.sign() if correction == "signsgd" else p.grad
                        p.add_(move, alpha=-out["learning_rates"][step - 1] * scale)
                        p.grad = None
        for (n, part), (_, p) in zip(named, whole) if ratio else []:
            part.grad = p.grad.flatten()[masked[n]].clone()
            p.grad = None
        parameters = [p for _, p in named]
        norm = torch.nn.utils.clip_grad_norm_(parameters, clip if clip > 0 else math.inf)
        for group in optimizer.param_groups:
            group["lr"] = out["learning_rates"][step - 1] * group["factor"]
        optimizer.step()
        with torch.no_grad():
            for (n, part), (_, p) in zip(named, whole) if ratio else []:
                p.view(-1)[masked[n]] = part
        if decay:
            averages.update([(n, p) for n, p in parameters_of() if p.requires_grad])
        if swa:
            swa.update_parameters(model)
        out["losses"].append(total)
        out["grad_norms"].append(float(norm))
        out["trained_tokens"].append(trained)
    averages.settle(parameters_of())
    if swa:
        pairs = zip(swa.module.parameters(), model.parameters())
        assert all(torch.equal(a, b) for a, b in pairs)
    if blocks:
        out["blocks"] = blocks
    else:
        del out["active"]
    if correction == "lora":
        model = model.merge_and_unload()
        # Every linear of the layers has an adapter: none is as it was.
        touched = {n for n in touched if "lora_" not in n} | {n for n in base if n.endswith("_proj.weight")}
    final = {n: p.detach() for n, p in model.named_parameters()}
    out["untouched"] = [n for n in start if n not in touched] if method != "lora" else []
    assert all(torch.equal(final[n], start[n]) for n in start if n not in touched)
    out["change_norms"] = {n: float((final[n].double() - start[n].double()).norm()) for n in sorted(touched)}
    return model, out


def make_run(name, model_name, data, recipe):
    model, out = train(model_name, data, recipe, torch.float32)
    others = [train(model_name, data, recipe, torch.float64)[1]]
    others += [train(model_name, data, recipe, torch.float32, jitter=seed)[1] for seed in range(4)]

    def away(key):
        values = lambda run: list(run[key].values()) if key == "change_norms" else run[key]
        pairs = [pair for other in others for pair in zip(values(out), values(other))]
        assert all((a == 0) == (b == 0) for a, b in pairs)
        return max(abs(a / b - 1) for a, b in pairs if b)

    noise = {key: away(key) for key in ["losses", "grad_norms", "change_norms"]}
    # A golden is fair only where rounding alone stays well below the tolerance of the test. AdamW turns the sign
    # of a gradient that is nearly zero into a whole step, most of all just after a switch: some runs are not.
    print(name, " ".join(f"{x:.3f}" for x in out["losses"]), "| norm", f"{min(out['grad_norms']):.2f}-{max(out['grad_norms']):.2f}",
          {k: f"{v:.1e}" for k, v in noise.items()}, flush=True)
    # A rule of signs does so at every step: there the noise may be five times as large, half of the tolerance at most.
    signs = recipe["optimizer.name"] == "lion" or recipe.get("tune.block.correction") == "signsgd"
    room = 5 if signs else 1
    assert noise["losses"] < room * 3e-6 and noise["grad_norms"] < room * 1e-5 and noise["change_norms"] < room * 1e-4, noise
    write_json(TRAINING / "runs" / f"{name}.json", dict(
        model=model_name, data=data, recipe=recipe | {
            "train.stage": "pretrain" if data == "text" else "sft", "train.max_steps": STEPS,
            "train.batch_size": BATCH, "train.gradient_accumulation_steps": ACCUMULATION,
            "train.max_grad_norm": recipe.get("train.max_grad_norm", 1.0)},
        **out, rounding=noise, versions=VERSIONS))
    if recipe["tune.method"] == "lora":
        scratch = TRAINING / "scratch"
        model.save_pretrained(scratch)
        save_file(load_file(scratch / "adapter_model.safetensors"), TRAINING / "runs" / f"{name}.final.safetensors")
        shutil.rmtree(scratch)


def main():
    if not sys.argv[1:] or "models" in sys.argv[1:]:
        make_models()
        make_adapters()
    for name, (model, data, recipe) in RUNS.items():
        if not sys.argv[1:] or name in sys.argv[1:]:
            make_run(name, model, data, recipe)


if __name__ == "__main__":
    main()
