"""Goldens of training by reward: `python make_rl.py` writes goldens/rl.

GRPO and RLOO come from TRL's own trainers (trl 1.16.0): a trainer is made for a tiny model, what it generates and
how it is rewarded are replaced by fixed rollouts, and its own code computes log-probabilities, importance ratios,
advantages, KL, loss and (through autograd) gradients. So that clipping is met, fixed noise is added to the old and the
reference log-probabilities before the loss; the golden holds them with the noise.

That version of TRL has no PPO trainer any more. PPO is therefore plain torch here, written from the papers (Schulman et
al. 2016 and 2017, Ziegler et al. 2019), with a value head on the policy's own hidden states; autograd gives its
gradients.
"""

import json
import shutil
import tempfile
from pathlib import Path

import torch
import transformers
import trl
from datasets import Dataset
from safetensors.torch import save_file

from common import GOLDENS, VERSIONS, write_json

OUT = GOLDENS / "rl"
MODEL = GOLDENS / "training/models/llama"
TOKENIZER = GOLDENS / "tokenizers/chat"
KEPT = [
    "model.layers.0.self_attn.q_proj.weight",
    "model.layers.1.mlp.down_proj.weight",
    "model.norm.weight",
]
MOST_NEW = 9
GROUP = 3
# Of these cases the output projection too.
HEAD = {"dapo": ["lm_head.weight"], "ppo": ["lm_head.weight"]}
# Rows that ended by themselves, by number.
ENDED = [0, 1, 3, 5]

GRPO = {
    "grpo": {"loss_type": "grpo", "beta": 0.1},
    "dapo": {"loss_type": "dapo", "epsilon_high": 0.28, "beta": 0.04},
    "dr_grpo": {"loss_type": "dr_grpo", "scale_rewards": "none", "delta": 1.4},
    "bnpo": {"loss_type": "bnpo", "scale_rewards": "batch", "temperature": 0.7},
    "gspo": {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 0.05, "epsilon_high": 0.08,
             "beta": 0.2},
    "gspo_dapo": {"loss_type": "dapo", "importance_sampling_level": "sequence", "beta": 0.1, "epsilon": 0.05,
                  "vllm_importance_sampling_mode": "token_truncate"},
    "plain_kl": {"loss_type": "grpo", "beta": 0.3, "use_bias_correction_kl": False},
    "token_mask": {"loss_type": "dapo", "vllm_importance_sampling_mode": "token_mask"},
    "sequence_mask": {"loss_type": "grpo", "vllm_importance_sampling_mode": "sequence_mask"},
    "sequence_truncate": {"loss_type": "bnpo", "vllm_importance_sampling_mode": "sequence_truncate"},
    "masked": {"loss_type": "dapo", "mask_truncated_completions": True},
    "masked_grpo": {"loss_type": "grpo", "mask_truncated_completions": True},
}
RLOO = {
    "rloo": {"beta": 0.05},
    "rloo_normalized": {"beta": 0.0, "normalize_advantages": True, "epsilon": 0.1, "epsilon_high": 0.1},
}
PPO = {
    "ppo": dict(kl_coef=0.05, kl_estimator="k1", gamma=1.0, lam=0.95, cliprange=0.2, cliprange_value=0.2, vf_coef=0.1,
                whiten_rewards=False),
    "ppo_k3": dict(kl_coef=0.2, kl_estimator="k3", gamma=0.98, lam=0.9, cliprange=0.1, cliprange_value=0.05,
                   vf_coef=0.5, whiten_rewards=True),
}


def directory():
    """A model directory with a tokenizer."""
    out = Path(tempfile.mkdtemp())
    for source in (MODEL, TOKENIZER):
        for file in source.iterdir():
            shutil.copy(file, out / file.name)
    return out


def rollouts(tokenizer, vocab):
    """Two prompts, three answers to each, of different lengths; rewards of two functions with a hole."""
    draw = torch.Generator().manual_seed(7)
    ids = lambda n: torch.randint(5, vocab - 10, (n,), generator=draw).tolist()
    prompts = [p for p in (ids(5), ids(3)) for _ in range(GROUP)]
    answers = [ids(n) for n in (4, 7, 9, 3, 9, 6)]
    for row in ENDED:
        answers[row][-1] = tokenizer.eos_token_id
    rewards = torch.tensor([[1.0, 0.2], [0.0, -0.4], [0.5, float("nan")], [0.0, 0.1], [1.0, -0.3], [1.0, 0.7]])
    noise = [[torch.randn(len(a), generator=draw) * 0.25 for a in answers] for _ in range(3)]
    return prompts, answers, rewards, noise


def padded(rows, like):
    out = torch.zeros_like(like)
    for i, row in enumerate(rows):
        out[i, : len(row)] = row
    return out


def ragged(tensor, answers):
    tensor = tensor.expand(-1, max(map(len, answers))) if tensor.shape[1] == 1 else tensor
    return [tensor[i, : len(a)].tolist() for i, a in enumerate(answers)]


def gradients(model, more=()):
    return {name: p.grad.clone() for name, p in model.named_parameters() if name in KEPT or name in more}


def trainer_of(kind, config_kind, path, settings, prompts):
    vllm = {k: v for k, v in settings.items() if k.startswith("vllm")}
    plain = {k: v for k, v in settings.items() if not k.startswith("vllm")}
    config = config_kind(
        output_dir=tempfile.mkdtemp(), per_device_train_batch_size=len(prompts), num_generations=GROUP,
        max_completion_length=MOST_NEW, num_iterations=2, gradient_accumulation_steps=1, steps_per_generation=1,
        reward_weights=[1.0, 0.5], report_to=[], use_cpu=True, bf16=False, gradient_checkpointing=False,
        model_init_kwargs={"dtype": "float32", "attn_implementation": "eager"}, pad_to_multiple_of=None, **plain,
    )
    nothing = lambda **_: [0.0] * len(prompts)
    other = lambda **_: [0.0] * len(prompts)
    trainer = kind(
        model=str(path), reward_funcs=[nothing, other], args=config,
        train_dataset=Dataset.from_dict({"prompt": ["a"] * len(prompts)}),
        processing_class=transformers.AutoTokenizer.from_pretrained(path),
    )
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1
    if vllm:
        trainer.use_vllm = True
        trainer.vllm_importance_sampling_correction = True
        trainer.vllm_importance_sampling_mode = vllm["vllm_importance_sampling_mode"]
        trainer.vllm_importance_sampling_clip_max = 1.3
        trainer.vllm_importance_sampling_clip_min = 0.8
    return trainer


def answered(trainer, prompts, answers, rewards, sampling):
    """The trainer's own scoring of the fixed rollouts."""
    texts = ["" for _ in answers]
    # The results of `_generate` in GRPO, and in RLOO.
    whole = (prompts, answers, None, texts, sampling, {}, None, [])
    trainer._generate = lambda _: whole if isinstance(trainer, trl.GRPOTrainer) else (prompts, answers, texts)
    trainer._calculate_rewards = lambda *_: rewards.clone()
    return trainer._generate_and_score_completions([{"prompt": "a"} for _ in prompts])


def grpo(name, settings, path, prompts, answers, rewards, noise):
    trainer = trainer_of(trl.GRPOTrainer, trl.GRPOConfig, path, settings, prompts)
    coded = "vllm_importance_sampling_mode" in settings
    # The log-probabilities of the weights of the rollout: the exact log-probabilities with noise.
    trainer.temperature = settings.get("temperature", 1.0)
    first = answered(trainer, prompts, answers, rewards, [[0.0] * len(a) for a in answers])
    sampling = [
        (first["old_per_token_logps"][i, : len(a)] + noise[2][i]).tolist() for i, a in enumerate(answers)
    ]
    inputs = answered(trainer, prompts, answers, rewards, sampling)
    exact = ragged(inputs["old_per_token_logps"], answers)
    inputs["old_per_token_logps"] = inputs["old_per_token_logps"] + padded(noise[0], inputs["old_per_token_logps"])
    golden = {
        "settings": settings, "exact": exact, "old": ragged(inputs["old_per_token_logps"], answers),
        "sampling": sampling, "advantages": inputs["advantages"].tolist(),
    }
    if "ref_per_token_logps" in inputs:
        inputs["ref_per_token_logps"] = inputs["ref_per_token_logps"] + padded(noise[1], inputs["ref_per_token_logps"])
        golden["reference"] = ragged(inputs["ref_per_token_logps"], answers)
    if coded:
        golden["ratios"] = ragged(inputs["importance_sampling_ratio"], answers)
    trainer._metrics["train"].clear()
    trainer.model.zero_grad()
    loss = trainer._compute_loss(trainer.model, inputs)
    loss.backward()
    metrics = {k: v[-1] for k, v in trainer._metrics["train"].items()}
    golden |= {
        "loss": loss.item(), "kl": metrics.get("kl"), "entropy": metrics["entropy"],
        "clip_ratio_low": metrics["clip_ratio/low_mean"], "clip_ratio_high": metrics["clip_ratio/high_mean"],
    }
    return golden, gradients(trainer.model, HEAD.get(name, ()))


def rloo(name, settings, path, prompts, answers, rewards, noise):
    trainer = trainer_of(trl.RLOOTrainer, trl.RLOOConfig, path, settings, prompts)
    # The log-probabilities of the reference are those of the trainer's own copy, with noise.
    own, calls = trainer._get_per_token_logps_and_entropies, []

    def noisy(model, *args, **kwargs):
        out = list(own(model, *args, **kwargs))
        if model is trainer.ref_model and model is not None:
            out[0] = out[0] + padded(noise[1], out[0])
        calls.append((model, out[0].detach()))
        return tuple(out)

    trainer._get_per_token_logps_and_entropies = noisy
    inputs = answered(trainer, prompts, answers, rewards, None)
    old = next(logps for model, logps in calls if model is not trainer.ref_model or model is None)
    golden = {"settings": settings, "exact": ragged(old, answers), "advantages": inputs["advantages"].tolist()}
    if settings["beta"]:
        golden["reference"] = ragged(next(l for m, l in calls if m is trainer.ref_model), answers)
        golden["kl"] = trainer._metrics["train"]["kl"][-1]
    small = [0.2 * n for n in noise[0]]
    golden["old"] = ragged(old + padded(small, old), answers)
    inputs["old_logps"] = inputs["old_logps"] + torch.stack([n.sum() for n in small])
    trainer.model.zero_grad()
    loss = trainer._compute_loss(trainer.model, inputs)
    loss.backward()
    golden["loss"] = loss.item()
    return golden, gradients(trainer.model, HEAD.get(name, ()))


def whiten(values, mask, shift):
    known = values[mask]
    mean, var = known.mean(), known.var(unbiased=True)
    out = (values - mean) * torch.rsqrt(var + 1e-8)
    return torch.where(mask, out if shift else out + mean, 0.0)


def ppo(name, settings, path, prompts, answers, rewards, noise, dtype=torch.float32):
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation="eager")
    width = model.config.hidden_size
    draw = torch.Generator().manual_seed(3)
    head = (torch.randn(1, width, generator=draw) * 0.1).to(dtype).requires_grad_(True)
    bias = torch.tensor([0.05], dtype=dtype, requires_grad=True)

    def forward():
        logps, values = [], []
        for prompt, answer in zip(prompts, answers):
            out = model(torch.tensor([prompt + answer]), output_hidden_states=True, use_cache=False)
            before = slice(len(prompt) - 1, len(prompt) + len(answer) - 1)
            chosen = out.logits[0, before].log_softmax(-1)
            logps.append(chosen.gather(1, torch.tensor(answer)[:, None])[:, 0])
            values.append(out.hidden_states[-1][0, before] @ head[0] + bias)
        return logps, values

    longest = max(map(len, answers))
    pad = lambda rows: torch.stack([torch.nn.functional.pad(r, (0, longest - len(r))) for r in rows])
    mask = pad([torch.ones(len(a), dtype=torch.bool) for a in answers])
    with torch.no_grad():
        exact, now = forward()
    old = pad([e + n.to(dtype) for e, n in zip(exact, noise[0])])
    reference = pad([e + n.to(dtype) for e, n in zip(exact, noise[1])])
    values = pad([v + 0.6 * n.to(dtype) for v, n in zip(now, noise[2])])
    log_ratio = reference - old
    kl = -log_ratio if settings["kl_estimator"] == "k1" else log_ratio.exp() - 1 - log_ratio
    token_rewards = torch.where(mask, -settings["kl_coef"] * kl, 0.0)
    scores = rewards.nan_to_num(0.0).to(dtype) @ torch.tensor([1.0, 0.5], dtype=dtype)
    for i, answer in enumerate(answers):
        token_rewards[i, len(answer) - 1] += scores[i]
    if settings["whiten_rewards"]:
        token_rewards = whiten(token_rewards, mask, shift=False)
    advantages, last = torch.zeros_like(values), torch.zeros(len(answers), dtype=dtype)
    for t in reversed(range(longest)):
        following = values[:, t + 1] * mask[:, t + 1] if t + 1 < longest else torch.zeros_like(last)
        delta = token_rewards[:, t] + settings["gamma"] * following - values[:, t]
        last = torch.where(mask[:, t], delta + settings["gamma"] * settings["lam"] * last, 0.0)
        advantages[:, t] = last
    returns = torch.where(mask, advantages + values, 0.0)
    advantages = whiten(advantages, mask, shift=True)
    logps, new = (pad(x) for x in forward())
    ratio = torch.exp(logps - old)
    bound = ratio.clamp(1 - settings["cliprange"], 1 + settings["cliprange"])
    policy = torch.max(-advantages * ratio, -advantages * bound)[mask].mean()
    near = torch.clamp(new, values - settings["cliprange_value"], values + settings["cliprange_value"])
    value = 0.5 * torch.max((new - returns) ** 2, (near - returns) ** 2)[mask].mean()
    loss = policy + settings["vf_coef"] * value
    loss.backward()
    golden = {
        "settings": settings, "loss": loss.item(), "policy_loss": policy.item(), "value_loss": value.item(),
        "exact": [e.tolist() for e in exact], "value_weight": head[0].tolist(), "value_bias": bias.tolist(),
        "scores": scores.tolist(),
    }
    for key, tensor in dict(old=old, reference=reference, values=values, advantages=advantages, returns=returns).items():
        golden[key] = ragged(tensor.detach(), answers)
    found = gradients(model, HEAD.get(name, ())) | {"objective.value.weight": head.grad, "objective.value.bias": bias.grad}
    return golden, found


def main():
    path = directory()
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    vocab = json.loads((MODEL / "config.json").read_text())["vocab_size"]
    prompts, answers, rewards, noise = rollouts(tokenizer, vocab)
    cases, tensors = {}, {}
    for make, group in ((grpo, GRPO), (rloo, RLOO), (ppo, PPO)):
        for name, settings in group.items():
            golden, found = make(name, settings, path, prompts, answers, rewards, noise)
            cases[name] = {"kind": make.__name__} | golden
            tensors |= {f"{name}/{key}": value.contiguous().float() for key, value in found.items()}
            print(f"{name}: loss {golden['loss']:.6f}", flush=True)
    holes = [[None if x != x else x for x in row] for row in rewards.tolist()]
    write_json(OUT / "golden.json", {
        "versions": VERSIONS | {"trl": trl.__version__}, "prompts": prompts, "answers": answers, "ended": ENDED,
        "rewards": holes, "reward_weights": [1.0, 0.5], "group": GROUP, "max_completion_length": MOST_NEW,
        "clip": [0.8, 1.3], "cases": cases,
    })
    save_file(tensors, OUT / "gradients.safetensors")
    (OUT / "gradients.safetensors").chmod(0o644)


if __name__ == "__main__":
    main()
