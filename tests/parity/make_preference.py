"""Preference learning by TRL's own trainers: tokens, losses, metrics and the gradient of every weight.

    python make_preference.py [models] [tokens] [steps] [runs]

Writes goldens/preference/{policy,reference} (two tiny llamas), goldens/preference/*.jsonl (rows),
tokens.json, steps.json with steps/NAME.safetensors, runs.json. Needs trl 1.16.0 and datasets beside requirements.txt.

- tokens: what `_prepare_dataset` of DPOTrainer, KTOTrainer and RewardTrainer makes of each row.
- steps: one batch of all rows of a file through the trainer's loss, policy and reference being different models.
- runs: `trainer.train()`; the reference is the policy before the first step.

Everything is computed a second time in f64; a step in which rounding comes near the tolerance is refused.
"""

import copy
import json
import os
import sys
import tempfile

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import datasets
import torch
import transformers
import trl
from safetensors.torch import save_file
from trl import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer, RewardConfig, RewardTrainer
from trl.experimental.cpo import CPOConfig, CPOTrainer
from trl.experimental.orpo import ORPOConfig, ORPOTrainer

from common import GOLDENS, VERSIONS, randomize, relative, write_json, write_rows

datasets.disable_progress_bars()
datasets.disable_caching()
OUT = GOLDENS / "preference"
TOKENIZER = GOLDENS / "tokenizers" / "small"
MAX_LENGTH = 40
VERSIONS = VERSIONS | {"trl": trl.__version__}

CONFIG = dict(model_type="llama", vocab_size=128, hidden_size=8, intermediate_size=12, num_hidden_layers=2,
              num_attention_heads=2, num_key_value_heads=1, head_dim=4, max_position_embeddings=64, rms_norm_eps=1e-5,
              tie_word_embeddings=False, bos_token_id=None, eos_token_id=0, pad_token_id=0, dtype="float32",
              rope_parameters=dict(rope_type="default", rope_theta=100.0))


def turn(role, text):
    return {"role": role, "content": text}


TEXT_PAIRS = [
    {"prompt": "the mill grinds", "chosen": " rye in spring.", "rejected": " stones."},
    {"prompt": "a river runs", "chosen": " to the sea", "rejected": " up the hill, and then it sleeps there."},
    {"prompt": "who sells bread?", "chosen": " the baker of the town does, every day.", "rejected": " nobody"},
    {"prompt": "add 3 and 4:", "chosen": " 7", "rejected": " 9"},
]
MESSAGE_PAIRS = [
    {"prompt": [turn("user", "what is red?")], "chosen": [turn("assistant", "a rose.")], "rejected": [turn("assistant", "the sea.")]},
    {"prompt": [turn("system", "be short."), turn("user", "hi")], "chosen": [turn("assistant", "hi.")],
     "rejected": [turn("assistant", "hello to you, dear friend")]},
]
IMPLICIT_PAIRS = [
    {"chosen": "the sky is blue today.", "rejected": "the sky is green."},
    {"chosen": "so be it", "rejected": "so be"},
]
IMPLICIT_MESSAGES = [
    {"chosen": [turn("user", "q?"), turn("assistant", "yes")], "rejected": [turn("user", "q?"), turn("assistant", "no")]},
]
JUDGED = [
    {"prompt": "the mill grinds", "completion": " rye in spring.", "label": True},
    {"prompt": "a river runs", "completion": " up the hill, and then it sleeps there.", "label": False},
    {"prompt": "who sells bread?", "completion": " the baker of the town does.", "label": True},
    {"prompt": "add 3 and 4:", "completion": " 9", "label": False},
    {"prompt": "the sky is", "completion": " blue", "label": True},
]
MARGINS = [row | {"margin": m} for row, m in zip(TEXT_PAIRS, [0.5, 0.0, 1.25, 2.0])]
FILES = {"text": TEXT_PAIRS, "messages": MESSAGE_PAIRS, "implicit": IMPLICIT_PAIRS, "implicit_messages": IMPLICIT_MESSAGES,
         "judged": JUDGED, "margins": MARGINS}


def tokenizer():
    return transformers.AutoTokenizer.from_pretrained(TOKENIZER)


def models():
    for seed, name in [(11, "policy"), (12, "reference")]:
        model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**CONFIG))
        randomize(model, seed, matrix=0.3, attention=0.5, embedding=0.5)
        model.save_pretrained(OUT / name)
        (OUT / name / "generation_config.json").unlink(missing_ok=True)


def load(name):
    return transformers.AutoModelForCausalLM.from_pretrained(OUT / name, dtype=torch.float32, attn_implementation="eager")


def settings(**more):
    return dict(output_dir=tempfile.mkdtemp(), use_cpu=True, bf16=False, report_to=[], gradient_checkpointing=False,
                max_length=MAX_LENGTH, per_device_train_batch_size=8, disable_tqdm=True, save_strategy="no",
                logging_steps=1) | more


def trainer(kind, rows, policy, reference, **keys):
    shared = dict(model=policy, processing_class=tokenizer(), train_dataset=datasets.Dataset.from_list(rows))
    if kind == "dpo":
        return DPOTrainer(args=DPOConfig(**settings(**keys)), ref_model=reference, **shared)
    if kind == "kto":
        return KTOTrainer(args=KTOConfig(**settings(per_device_train_batch_size=keys.pop("batch", 5), **keys)),
                          ref_model=reference, **shared)
    if kind == "orpo":
        return ORPOTrainer(args=ORPOConfig(**settings(remove_unused_columns=False, **keys)), **shared)
    if kind == "simpo":
        keys = {"loss_type": "simpo", "cpo_alpha": 0.0} | keys
        return CPOTrainer(args=CPOConfig(**settings(remove_unused_columns=False, **keys)), **shared)
    return RewardTrainer(args=RewardConfig(**settings(**keys)), **shared)


def classifier():
    config = transformers.AutoConfig.from_pretrained(OUT / "policy", num_labels=1)
    model = transformers.AutoModelForSequenceClassification.from_config(config, attn_implementation="eager", dtype=torch.float32)
    model.load_state_dict(load("policy").state_dict(), strict=False)
    with torch.no_grad():
        model.score.weight.copy_(torch.randn(1, CONFIG["hidden_size"], generator=torch.Generator().manual_seed(13)) * 0.5)
    return model


def step(kind, rows, double, **keys):
    """Loss, metrics, gradients of one batch."""
    convert = (lambda m: m.double()) if double else (lambda m: m)
    policy = convert(classifier() if kind == "reward" else load("policy"))
    t = trainer(kind, rows, policy, None if kind in ("reward", "orpo", "simpo") else convert(load("reference")), **keys)
    model = t.model
    model.train()
    batch = t.data_collator([t.train_dataset[i] for i in range(len(t.train_dataset))])
    if kind in ("orpo", "simpo"):
        loss, metrics = t.get_batch_loss_metrics(model, batch)
    else:
        loss = t.compute_loss(model, dict(batch))
        metrics = {k: v[-1] for k, v in t._metrics["train"].items()}
    loss.backward()
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    references = {}
    if kind in ("dpo", "kto"):
        with torch.no_grad():
            found = t.compute_ref_log_probs(t.ref_model, batch)
        references = {"reference": [x.tolist() for x in found if x is not None]}
    return loss.item(), metrics, gradients, references


PAIR_LOSSES = ["sigmoid", "hinge", "ipo", "exo_pair", "nca_pair", "robust", "bco_pair", "sppo_hard", "aot", "aot_unpaired",
               "apo_zero", "apo_down", "discopop", "sft", "sigmoid_norm"]
SMOOTHED = {"exo_pair": 1e-2, "robust": 0.2, "aot": 0.1, "aot_unpaired": 0.1}
STEPS = {}
for name in PAIR_LOSSES:
    keys = {"loss_type": name, "beta": 0.3}
    if name in SMOOTHED:
        keys["label_smoothing"] = SMOOTHED[name]
    if name == "discopop":
        keys["discopop_tau"] = 0.5
    STEPS[f"dpo_{name}"] = ("dpo", "text", keys)
for name in ["forward_kl", "js_divergence", "alpha_divergence"]:
    STEPS[f"dpo_{name}"] = ("dpo", "text", {"beta": 0.2, "f_divergence_type": name, "f_alpha_divergence_coef": 0.7})
STEPS |= {
    "dpo_ld": ("dpo", "text", {"beta": 0.3, "ld_alpha": 0.4}),
    "dpo_messages": ("dpo", "messages", {"beta": 0.3}),
    "dpo_implicit": ("dpo", "implicit", {"beta": 0.3}),
    "dpo_cut": ("dpo", "text", {"beta": 0.3, "max_length": 11}),
    "orpo": ("orpo", "text", {"beta": 0.4}),
    "simpo": ("simpo", "text", {"beta": 2.0, "simpo_gamma": 0.7}),
    "simpo_nll": ("simpo", "text", {"beta": 1.5, "simpo_gamma": 0.5, "cpo_alpha": 0.6, "label_smoothing": 0.1}),
    "kto": ("kto", "judged", {"beta": 0.3, "desirable_weight": 1.2, "undesirable_weight": 0.9}),
    "kto_apo_zero_unpaired": ("kto", "judged", {"beta": 0.3, "loss_type": "apo_zero_unpaired"}),
    "kto_pairs": ("kto", "text", {"beta": 0.3, "batch": 8}),
    "reward": ("reward", "text", {}),
    "reward_margins": ("reward", "margins", {"center_rewards_coefficient": 0.1}),
    "reward_messages": ("reward", "messages", {}),
}
OURS = {"f_divergence_type", "f_alpha_divergence_coef", "loss_type", "beta", "label_smoothing", "discopop_tau", "ld_alpha",
        "simpo_gamma", "cpo_alpha", "desirable_weight", "undesirable_weight", "center_rewards_coefficient"}
WANTED = {"rewards/chosen", "rewards/rejected", "rewards/accuracies", "rewards/margins", "logps/chosen", "logps/rejected",
          "nll_loss", "log_odds_ratio", "log_odds_chosen", "kl", "min_reward", "mean_reward", "max_reward", "accuracy", "margin"}


def recipe(keys):
    out = {f"rlhf.{k}": v for k, v in keys.items() if k in OURS}
    if "max_length" in keys:
        out["data.max_length"] = keys["max_length"]
    return out


def steps():
    out = {}
    for name, (kind, rows, keys) in STEPS.items():
        loss, metrics, gradients, references = step(kind, FILES[rows], False, **copy.deepcopy(keys))
        exact, _, exact_gradients, _ = step(kind, FILES[rows], True, **copy.deepcopy(keys))
        error = max([abs(loss - exact) / max(abs(exact), 1e-3)] + [relative(gradients[n], exact_gradients[n]) for n in gradients])
        print(f"{name:24} loss {loss:.6f}  f32 against f64 {error:.1e}")
        assert error < 2e-5, name
        own = recipe(keys)
        if kind == "simpo":
            own.pop("rlhf.loss_type", None)
        out[name] = {"stage": kind, "rows": f"{rows}.jsonl", "recipe": own, "batch": len(FILES[rows]) * (2 if name == "kto_pairs" else 1),
                     "loss": loss, "metrics": {k: float(v) for k, v in metrics.items() if k in WANTED}, "f32_against_f64": error} | references
        tensors = {n: g.contiguous() for n, g in gradients.items()}
        if kind == "reward":
            tensors["score"] = classifier().score.weight.detach().clone()
        (OUT / "steps").mkdir(exist_ok=True)
        save_file(tensors, OUT / "steps" / f"{name}.safetensors")
    write_json(OUT / "steps.json", {"versions": VERSIONS, "max_length": MAX_LENGTH, "steps": out})


def tokens():
    out = {}
    for name in ["text", "messages", "implicit", "implicit_messages"]:
        t = trainer("dpo", FILES[name], load("policy"), load("reference"))
        r = trainer("reward", FILES[name], classifier(), None)
        out[name] = [{k: row[k] for k in ["prompt_ids", "chosen_ids", "rejected_ids"]} | {"whole": [score["chosen_ids"], score["rejected_ids"]]}
                     for row, score in zip(t.train_dataset, r.train_dataset)]
    for name in ["judged", "text"]:
        t = trainer("kto", FILES[name], load("policy"), load("reference"), batch=3)
        out[f"kto_{name}"] = [{k: row[k] for k in ["prompt_ids", "completion_ids", "KL_completion_ids", "label"]} for row in t.train_dataset]
    (OUT / "tokens.json").write_text(json.dumps({"versions": VERSIONS, "rows": out}) + "\n")


def runs():
    out = {}
    shared = dict(gradient_accumulation_steps=2, learning_rate=5e-3, max_steps=6, lr_scheduler_type="cosine", warmup_steps=0,
                  optim="adamw_torch", weight_decay=0.0, max_grad_norm=1.0, seed=1)
    for name, kind, file, keys in [
        ("dpo", "dpo", "text", {"beta": 0.3, "per_device_train_batch_size": 2}),
        ("dpo_ipo", "dpo", "text", {"beta": 0.2, "loss_type": "ipo", "per_device_train_batch_size": 2}),
        ("kto", "kto", "text", {"beta": 0.3, "batch": 4}),
        ("orpo", "orpo", "text", {"beta": 0.4, "per_device_train_batch_size": 2}),
    ]:
        batch = keys.get("batch", 2)
        t = trainer(kind, FILES[file], load("policy"), load("policy") if kind in ("dpo", "kto") else None,
                    **copy.deepcopy(keys) | shared)
        # Rows in the order of the file.
        t._get_train_sampler = lambda dataset=None: torch.utils.data.SequentialSampler(dataset or t.train_dataset)
        t.train()
        log = [line for line in t.state.log_history if "loss" in line]
        assert len(log) == 6, name
        out[name] = {
            "stage": kind, "rows": f"{file}.jsonl",
            "recipe": recipe(keys) | {"train.batch_size": batch, "train.gradient_accumulation_steps": 2, "train.max_steps": 6,
                                      "optimizer.learning_rate": 5e-3, "schedule.name": "cosine", "schedule.warmup_steps": 0,
                                      "tune.method": "full"},
            "steps": [{k: float(v) for k, v in line.items() if k in WANTED | {"loss", "grad_norm"}} for line in log],
        }
        print(name, [line["loss"] for line in log])
    write_json(OUT / "runs.json", {"versions": VERSIONS, "max_length": MAX_LENGTH, "runs": out})


if __name__ == "__main__":
    wanted = sys.argv[1:] or ["models", "tokens", "steps", "runs"]
    OUT.mkdir(exist_ok=True)
    for name, rows in FILES.items():
        write_rows(OUT / f"{name}.jsonl", rows)
    if "models" in wanted:
        models()
    for part in ["tokens", "steps", "runs"]:
        if part in wanted:
            globals()[part]()
