"""Every kind of adapter by PEFT: a filled one with its logits, and 20 training steps from it; starts by PEFT.

    python make_adapters.py [NAME ...]

Writes goldens/adapters/NAME/: adapter_config.json and adapter_model.safetensors as PEFT saves them, golden.json
(loss of the rows, losses and gradient norms of 20 steps, the recipe), golden.safetensors (ids and logits).
A start (pissa, olora, corda) has no adapter files: golden.safetensors holds A and B of every linear as PEFT made
them, and the loss after the 20 steps is that of the trained model. Needs the models of make_training.py.
"""

import copy
import dataclasses
import math
import shutil
import sys
import types

# PEFT 0.21.2 takes `dataclass` from a package that it does not require.
try:
    import attr  # noqa: F401
except ModuleNotFoundError:
    sys.modules["attr"] = types.SimpleNamespace(dataclass=dataclasses.dataclass)

import torch
from peft import (AdaLoraConfig, IA3Config, LoHaConfig, LoKrConfig, LoraConfig, OFTConfig, PeftModel, VeraConfig,
                  get_peft_model)
from peft.tuners.adalora import AdaLoraModel, RankAllocator
from peft.tuners.lora.config import CordaConfig, EvaConfig
from peft.tuners.lora.eva import initialize_lora_eva_weights
from peft.tuners.lora.corda import preprocess_corda
from safetensors.torch import save_file

from common import GOLDENS, IGNORE, VERSIONS, Encoder, mean_loss, read_rows, trained_tokens, write_json
from make_training import ACCUMULATION, BATCH, STEPS, learning_rates, load, micro_loss, tokenizer_of

OUT = GOLDENS / "adapters"
TARGETS = ["q_proj", "v_proj", "down_proj", "up_proj"]
RECIPE = {"optimizer.name": "adamw", "optimizer.weight_decay": 0.01, "schedule.name": "cosine",
          "schedule.warmup_steps": 3, "train.max_grad_norm": 1.0}


def lora(**more):
    return LoraConfig(task_type="CAUSAL_LM", **(dict(r=4, lora_alpha=8, target_modules=TARGETS) | more))


# name: (model, config, learning rate, deviation of the numbers that fill it, further recipe keys)
FILLED = {
    "dora": ("llama", lora(use_dora=True), 1e-2, 0.1, {}),
    "loraplus": ("qwen3", lora(), 2e-3, 0.1, {"tune.lora.loraplus_lr_ratio": 4.0}),
    "regex": ("llama", lora(target_modules=r".*layers\.[0-2]\..*(q|up)_proj", rank_pattern={r"layers\.0\..*": 2},
                            exclude_modules=r".*layers\.1\.mlp.*"), 3e-3, 0.2, {}),
    "saved": ("llama", lora(modules_to_save=["lm_head"], layers_to_transform=[1, 3]), 5e-3, 0.1, {}),
    "tokens": ("qwen3", lora(trainable_token_indices=[40, 7, 101]), 5e-3, 0.1, {}),
    "tokens_head": ("llama", lora(trainable_token_indices={"embed_tokens": [9, 60], "lm_head": [9, 60]}), 5e-3, 0.1, {}),
    "ia3": ("llama", IA3Config(task_type="CAUSAL_LM", target_modules=["k_proj", "v_proj", "down_proj"],
                               feedforward_modules=["down_proj"]), 1e-2, 0.2, {}),
    "vera": ("llama", VeraConfig(task_type="CAUSAL_LM", r=8, target_modules=TARGETS), 1e-2, 0.3, {}),
    "loha": ("llama", LoHaConfig(task_type="CAUSAL_LM", r=4, alpha=6, target_modules=TARGETS), 2e-3, 0.5, {}),
    "lokr": ("llama", LoKrConfig(task_type="CAUSAL_LM", r=2, alpha=4, target_modules=TARGETS), 1e-2, 0.3, {}),
    "lokr_both": ("qwen3", LoKrConfig(task_type="CAUSAL_LM", r=1, alpha=1, target_modules=TARGETS, decompose_both=True,
                                      decompose_factor=4), 1e-2, 0.6, {}),
    "oft": ("llama", OFTConfig(task_type="CAUSAL_LM", r=0, oft_block_size=8, target_modules=TARGETS,
                               use_cayley_neumann=True), 5e-3, 0.05, {}),
    "oft_exact": ("qwen3", OFTConfig(task_type="CAUSAL_LM", r=0, oft_block_size=16, target_modules=["q_proj", "gate_proj"],
                                     use_cayley_neumann=False), 5e-3, 0.05, {}),
    "adalora": ("llama", AdaLoraConfig(task_type="CAUSAL_LM", init_r=4, target_r=2, lora_alpha=8, total_step=100,
                                       target_modules=TARGETS), 1e-2, 0.4, {"tune.lora.adalora.orth_reg_weight": 0.0}),
    "adalora_ranks": ("qwen3", AdaLoraConfig(task_type="CAUSAL_LM", init_r=6, target_r=3, lora_alpha=6, total_step=STEPS, tinit=3,
                                             tfinal=5, deltaT=2, beta1=0.8, beta2=0.7, orth_reg_weight=0.1,
                                             target_modules=TARGETS), 5e-3, 0.3,
                      {"tune.lora.adalora.target_r": 3, "tune.lora.adalora.tinit": 3, "tune.lora.adalora.tfinal": 5,
                       "tune.lora.adalora.deltaT": 2, "tune.lora.adalora.beta1": 0.8, "tune.lora.adalora.beta2": 0.7,
                       "tune.lora.adalora.orth_reg_weight": 0.1}),
    # A tied model: what is saved whole is a matrix of its own, unless the config ensures the tie.
    "tied_embed": ("qwen3", lora(modules_to_save=["embed_tokens"]), 3e-3, 0.1, {}),
    "tied_head": ("qwen3", lora(modules_to_save=["lm_head"]), 3e-3, 0.1, {}),
    "tied_both": ("qwen3", lora(modules_to_save=["embed_tokens", "lm_head"]), 3e-3, 0.1, {}),
    "tied_ensure": ("qwen3", lora(modules_to_save=["embed_tokens"], ensure_weight_tying=True), 3e-3, 0.1, {}),
}
# name: (model, config, learning rate, further recipe keys)
STARTED = {
    "pissa": ("llama", lora(init_lora_weights="pissa"), 2e-3, {"tune.lora.init_lora_weights": "pissa"}),
    "olora": ("llama", lora(init_lora_weights="olora"), 2e-3, {"tune.lora.init_lora_weights": "olora"}),
    "corda_kpm": ("llama", lora(init_lora_weights="corda", corda_config=CordaConfig(corda_method="kpm")), 2e-3,
                  {"tune.lora.init_lora_weights": "corda", "tune.lora.corda.method": "kpm",
                   "tune.lora.corda.compatible": "peft"}),
    "corda_ipm": ("qwen3", lora(init_lora_weights="corda", corda_config=CordaConfig(corda_method="ipm")), 2e-3,
                  {"tune.lora.init_lora_weights": "corda", "tune.lora.corda.method": "ipm",
                   "tune.lora.corda.compatible": "peft"}),
}
ROWS = "messages"


def rows_of(model):
    encoder = Encoder(tokenizer_of(model))
    return [encoder.row(row) for row in read_rows(GOLDENS / "data" / f"{ROWS}.jsonl")]


def is_plus(name, parameter):
    return "lora_B" in name or parameter.ndim == 1


def regularizer(model):
    """PEFT's orthogonal regularization alone: its own code, around a model whose loss is 0."""
    inner, forward = model.base_model.model, model.base_model.model.forward
    inner.forward = lambda: types.SimpleNamespace(loss=torch.zeros(()))
    try:
        return model.base_model.forward().loss
    finally:
        inner.forward = forward


def train(model, rows, recipe):
    """The loop of make_training.py, with the groups of LoRA+."""
    model.train()
    named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    ratio = recipe.get("tune.lora.loraplus_lr_ratio", 1.0)
    groups = []
    for plus in (False, True):
        for matrix in (False, True):
            members = [p for n, p in named if is_plus(n, p) == plus and (p.ndim >= 2) == matrix]
            if members:
                groups.append(dict(params=members, weight_decay=recipe["optimizer.weight_decay"] if matrix else 0.0,
                                   factor=ratio if plus else 1.0))
    rates = learning_rates(recipe, STEPS)
    optimizer = torch.optim.AdamW(groups, lr=rates[0])
    losses, norms, place = [], [], 0
    ranks = "tune.lora.adalora.target_r" in recipe
    for step in range(STEPS):
        batch = [rows[(place + i) % len(rows)] for i in range(BATCH * ACCUMULATION)]
        place += len(batch)
        trained = sum(trained_tokens(labels) for _, labels in batch)
        optimizer.zero_grad()
        total = 0.0
        for first in range(0, len(batch), BATCH):
            loss = micro_loss(model, batch[first:first + BATCH], trained)
            loss.backward()
            total += loss.item()
        if ranks:
            regularizer(model).backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_([p for _, p in named], recipe["train.max_grad_norm"])))
        for group in optimizer.param_groups:
            group["lr"] = rates[step] * group["factor"]
        optimizer.step()
        if ranks:
            model.base_model.update_and_allocate(step + 1)
        losses.append(total)
    return losses, norms


def recipe_of(rate, more):
    return RECIPE | {"tune.method": "lora", "optimizer.learning_rate": rate, "train.stage": "sft", "train.max_steps": STEPS,
                     "train.batch_size": BATCH, "train.gradient_accumulation_steps": ACCUMULATION} | more


def jittered(name, seed):
    """The base with every weight off by a rounding error or two; as it is without a seed."""
    model = load(name)
    if seed is not None:
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1 + 2e-7 * torch.randn(parameter.shape, generator=generator))
    return model


def finish(name, base, make, rows, recipe, extra):
    """Trains what `make(seed)` gives and writes what came out; refuses it where rounding alone comes near the test's
    tolerance: AdamW turns the sign of a gradient that is nearly zero into a whole step."""
    model = make(None)
    losses, norms = train(model, rows, recipe)
    after, _ = mean_loss(model.eval(), rows)
    noise = 0.0
    for seed in range(2):
        for got, other in zip((losses, norms), train(make(seed), rows, recipe)):
            noise = max([noise] + [abs(a / b - 1) for a, b in zip(got, other)])
    print(name, " ".join(f"{x:.3f}" for x in losses), "| norm", f"{min(norms):.3f}-{max(norms):.3f} | rounding {noise:.1e}", flush=True)
    assert all(math.isfinite(x) for x in losses) and losses[-1] < losses[0]
    assert noise < 3e-5, noise
    write_json(OUT / name / "golden.json", dict(model=base, data=ROWS, recipe=recipe, losses=losses, grad_norms=norms,
                                                 after=after, rounding=noise, **extra, versions=VERSIONS))


def make_filled(seed, name):
    base, config, rate, deviation, more = FILLED[name]
    directory = OUT / name
    shutil.rmtree(directory, ignore_errors=True)
    model = get_peft_model(load(base), config)
    generator = torch.Generator().manual_seed(6000 + seed)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if not parameter.requires_grad:
                continue
            noise = torch.randn(parameter.shape, generator=generator) * deviation
            # Sizes, factors and whole weights stay near what they are.
            near = any(part in key for part in ("magnitude", "ia3_l", "modules_to_save", "trainable_tokens"))
            parameter.copy_(parameter * (1 + noise) if near else noise)
    model.peft_config["default"].base_model_name_or_path = base
    model.save_pretrained(directory)
    (directory / "README.md").unlink(missing_ok=True)
    rows = rows_of(base)
    model = PeftModel.from_pretrained(load(base), directory).eval()
    loss, tokens = mean_loss(model, rows)
    plain, _ = mean_loss(load(base).eval(), rows)
    assert abs(loss - plain) > 1e-2, "the adapter must matter"
    ids = torch.tensor(min((ids for ids, _ in rows), key=len))
    with torch.no_grad():
        logits = model(ids[None], use_cache=False).logits[0].contiguous()
    save_file({"input_ids": ids, "logits": logits}, directory / "golden.safetensors")
    trained = []

    def make(seed):
        trained.append(PeftModel.from_pretrained(jittered(base, seed), directory, is_trainable=True))
        return trained[-1]

    finish(name, base, make, rows, recipe_of(rate, {"tune.lora.adapter": name} | more), dict(loss=loss, tokens=tokens))
    if name == "adalora_ranks":
        patterns = [{key.replace(".default", ""): value for key, value in m.peft_config["default"].rank_pattern.items()}
                    for m in trained]
        assert all(p == patterns[0] for p in patterns), "rounding must not decide which ranks are left"
        write_json(directory / "kept.json", patterns[0])


class Triplets(torch.nn.Module):
    """Parameters named as PEFT's allocator looks for them."""

    def __init__(self, sizes, r, generator):
        super().__init__()
        for i, (inputs, outputs) in enumerate(sizes):
            self.add_module(f"m{i}", torch.nn.ModuleDict({
                part: torch.nn.ParameterDict({"default": torch.randn(shape, generator=generator)})
                for part, shape in (("lora_A", (r, inputs)), ("lora_B", (outputs, r)), ("lora_E", (r, 1)))}))


def make_ranks():
    """PEFT's RankAllocator on fixed weights and gradients: the singular values after every step, and what is left."""
    generator = torch.Generator().manual_seed(99)
    sizes, r, steps = [(5, 7), (6, 4), (3, 8)], 4, 12
    config = AdaLoraConfig(init_r=r, target_r=2, total_step=steps, tinit=2, tfinal=3, deltaT=2, beta1=0.85, beta2=0.6)
    model = Triplets(sizes, r, generator)
    tuner = types.SimpleNamespace(model=model, peft_config={"default": config}, trainable_adapter_name="default",
                                  rankallocator=RankAllocator(model, config, "default"))
    flat = lambda tensors: {key: tensor.flatten().tolist() for key, tensor in tensors}
    out = dict(sizes=sizes, r=r, start=flat((n, p.detach()) for n, p in model.named_parameters()), steps=[], versions=VERSIONS)
    for step in range(1, steps + 1):
        for p in model.parameters():
            p.grad = torch.randn(p.shape, generator=generator)
            with torch.no_grad():
                p -= 0.1 * p.grad
        gradients = flat((n, p.grad) for n, p in model.named_parameters())
        budget, _ = tuner.rankallocator.budget_schedule(step)
        AdaLoraModel.update_and_allocate(tuner, step)
        out["steps"].append(dict(gradients=gradients, budget=budget,
                                 after=flat((n, p.detach()) for n, p in model.named_parameters()),
                                 kept=config.rank_pattern))
    write_json(OUT.parent / "ranks.json", out)


def make_started(name):
    base, config, rate, more = STARTED[name]
    directory = OUT / name
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    rows = rows_of(base)

    def make(seed):
        model, own = jittered(base, seed), copy.deepcopy(config)
        if own.corda_config is not None:
            def run_model():
                for ids, _ in rows:
                    model(torch.tensor([ids]), use_cache=False)

            preprocess_corda(model, own, run_model=run_model)
        return get_peft_model(model, own)

    model = make(None)
    tensors = {key.replace("base_model.model.", "").replace(".default", ""): value.contiguous().clone()
               for key, value in model.state_dict().items() if "lora_" in key}
    save_file(tensors, directory / "golden.safetensors")
    targets = {"tune.lora.r": 4, "tune.lora.lora_alpha": 8, "tune.lora.target_modules": TARGETS}
    finish(name, base, make, rows, recipe_of(rate, targets | more), {})


# name: config. Every direction of every input is found: PEFT cuts its running decomposition to the most of r·rho components, which
# turns neighboring directions.
EVA = {
    "eva": lora(init_lora_weights="eva", eva_config=EvaConfig(rho=8.0)),
    # Linears with the same input and other ranks.
    "eva_ranks": lora(init_lora_weights="eva", eva_config=EvaConfig(rho=2.0), target_modules=["q_proj", "k_proj", "up_proj", "gate_proj"],
                      rank_pattern={"k_proj": 16, "gate_proj": 16}),
}


def make_eva(name):
    """EVA by PEFT: what A starts with, and the ranks and scales that it spends. Every row in one batch, seen twice; only inputs of
    trained tokens count, as by default."""
    base, config = "llama", copy.deepcopy(EVA[name])
    rows = rows_of(base)
    width = max(len(ids) for ids, _ in rows)
    batch = dict(input_ids=torch.tensor([ids + [0] * (width - len(ids)) for ids, _ in rows]),
                 attention_mask=torch.tensor([[1] * len(ids) + [0] * (width - len(ids)) for ids, _ in rows]),
                 labels=torch.tensor([labels + [IGNORE] * (width - len(labels)) for _, labels in rows]))
    assert (batch["labels"] == IGNORE).sum() > (batch["attention_mask"] == 0).sum(), "some tokens must not count"
    own = {"tune.lora.r": config.r, "tune.lora.lora_alpha": config.lora_alpha, "tune.lora.target_modules": sorted(config.target_modules),
           "tune.lora.init_lora_weights": "eva", "tune.lora.eva.rho": config.eva_config.rho, "tune.lora.init_samples": 1000}
    if config.rank_pattern:
        own["tune.lora.rank_pattern"] = [f"{key}={r}" for key, r in config.rank_pattern.items()]
    model = get_peft_model(load(base), config)
    initialize_lora_eva_weights(model, [batch, batch])
    config = model.peft_config["default"]
    tensors = {key.replace("base_model.model.", "").replace(".default", ""): value.contiguous().clone()
               for key, value in model.state_dict().items() if "lora_A" in key}
    directory = OUT.parent / name
    directory.mkdir(exist_ok=True)
    save_file(tensors, directory / "golden.safetensors")
    print(name, config.rank_pattern, config.alpha_pattern, len(tensors))
    recipe = recipe_of(1e-3, own) | {"train.max_steps": 0}
    write_json(directory / "golden.json", dict(model=base, data=ROWS, recipe=recipe, ranks=config.rank_pattern,
                                               alphas=config.alpha_pattern, versions=VERSIONS))


def main():
    for name in EVA:
        if not sys.argv[1:] or name in sys.argv[1:]:
            make_eva(name)
    for seed, name in enumerate(FILLED):
        if not sys.argv[1:] or name in sys.argv[1:]:
            make_filled(seed, name)
    if not sys.argv[1:] or "ranks" in sys.argv[1:]:
        make_ranks()
    for name in STARTED:
        if not sys.argv[1:] or name in sys.argv[1:]:
            make_started(name)


if __name__ == "__main__":
    main()
