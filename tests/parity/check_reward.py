"""Loads a reward model that ft trained and scores pairs with transformers.

    python check_reward.py RUN_DIR ROWS.jsonl [BASE_DIR]

RUN_DIR holds final/ (a sequence classifier, or with BASE_DIR a PEFT adapter over that model) and metrics.jsonl; ROWS are
the rows that the run evaluated on (a prompt and two answers as messages). Fails unless accuracy, margin and mean score are
those of the run's last evaluation.
"""

import json
import pathlib
import sys

import torch
import transformers
from peft import PeftModel
from transformers.modeling_layers import GenericForSequenceClassification

from common import read_rows

run, rows, base = pathlib.Path(sys.argv[1]), read_rows(pathlib.Path(sys.argv[2])), sys.argv[3:]
final = run / "final"
tokenizer = transformers.AutoTokenizer.from_pretrained(final)
load = transformers.AutoModelForSequenceClassification.from_pretrained
# A family without a classifier in transformers gets one of the general form.
config = transformers.AutoConfig.from_pretrained(base[0] if base else final)
if type(config) not in transformers.AutoModelForSequenceClassification._model_mapping:
    causal = transformers.AutoModelForCausalLM._model_mapping[type(config)]
    family = causal.__name__.removesuffix("ForCausalLM")
    own = next(c for c in causal.__mro__ if c.__name__ == f"{family}PreTrainedModel")
    made = type(f"{family}ForSequenceClassification", (GenericForSequenceClassification, own), {})
    transformers.AutoModelForSequenceClassification.register(type(config), made, exist_ok=True)
if base:
    model = load(base[0], num_labels=1, dtype=torch.float32)
    model.config.pad_token_id = tokenizer.pad_token_id
    model = PeftModel.from_pretrained(model, final)
else:
    model, info = load(final, dtype=torch.float32, output_loading_info=True)
    assert not any(info[k] for k in ["missing_keys", "unexpected_keys", "mismatched_keys"]), info
    assert model.config.num_labels == 1 and model.config.architectures == [type(model).__name__]
model.eval()


def score(messages):
    ids = tokenizer.apply_chat_template(messages, tokenize=True, return_dict=True, return_tensors="pt")
    with torch.no_grad():
        return model(**ids).logits.item()


pairs = [(score(r["prompt"] + r["chosen"]), score(r["prompt"] + r["rejected"])) for r in rows]
got = {
    "eval_accuracy": sum(c > r for c, r in pairs) / len(pairs),
    "eval_margin": sum(c - r for c, r in pairs) / len(pairs),
    "eval_mean_reward": sum(c + r for c, r in pairs) / len(pairs) / 2,
}
evals = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
wanted = [line for line in evals if "eval_loss" in line][-1]
for name, value in got.items():
    print(f"{name:18} transformers {value:.6f}  ft {wanted[name]:.6f}")
    assert abs(value - wanted[name]) < 1e-4 * (1 + abs(value)), name
