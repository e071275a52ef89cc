"""Greedy continuations of prompts of many lengths, some with a common beginning, by every model of make_families.py.

    python make_rollouts.py [VARIANT ...]

Writes goldens/rollouts/VARIANT.jsonl: per prompt its ids, the new ids (the stop id included) and the log-probability of
each in f32. Each prompt is one unpadded call with eager attention: ft decodes them together.
"""

import copy
import json
import sys

import torch
import transformers

from common import GOLDENS, write_rows
from make_families import V, VARIANTS, load

NEW = 40
LEAST_MARGIN = 5e-4


def prompts(seed):
    generator = torch.Generator().manual_seed(seed)

    def draw(n):
        return torch.randint(4, V, (n,), generator=generator).tolist()

    system, first, second = draw(24), draw(20), draw(18)
    # A group that shares a whole prompt, prompts below it and beside it, prompts of their own.
    return [system + first, system + first, system + first + draw(7), system + second + draw(1), system + second + draw(30),
            system, draw(1), draw(5), draw(37), draw(70), system[:10] + draw(6), system + draw(3)]


def model_of(name, spec):
    directory = GOLDENS / "families" / name
    if not spec.get("weights"):
        return load(directory)
    config = transformers.AutoConfig.for_model(**copy.deepcopy(json.loads((directory / "config.json").read_text())))
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32)
    model.load_state_dict(load(GOLDENS / "families" / spec["weights"]).state_dict())
    return model.eval()


def answer(model, ids, stops):
    got = model.generate(torch.tensor([ids]), attention_mask=torch.ones(1, len(ids), dtype=torch.long), do_sample=False,
                         max_new_tokens=min(NEW, 128 - len(ids)), eos_token_id=stops, pad_token_id=stops[-1],
                         output_logits=True, return_dict_in_generate=True)
    new = got.sequences[0, len(ids):].tolist()
    logits = torch.stack(got.logits)[:, 0].float()
    top = logits.topk(2).values
    # Near ties are no test of the mathematics: an answer ends before the first.
    clear = int(((top[:, 0] - top[:, 1]) > LEAST_MARGIN).int().cumprod(0).sum())
    log_probs = torch.log_softmax(logits, -1)[range(len(new)), new]
    return dict(prompt=ids, new_ids=new[:clear], finished=clear == len(new) and new[-1] in stops, cut=clear < len(new),
                log_probs=[round(x, 5) for x in log_probs[:clear].tolist()])


def main():
    chosen = sys.argv[1:] or list(VARIANTS)
    for index, (name, spec) in enumerate(VARIANTS.items()):
        if name == "phi3_longrope" or name not in chosen:
            continue  # ft decodes 32 tokens, its `original_max_position_embeddings`
        model = model_of(name, spec)
        stops = json.loads((GOLDENS / "families" / name / "generation_config.json").read_text())["eos_token_id"]
        rows = [answer(model, ids, stops) for ids in prompts(7000 + index)]
        new = sum(len(row["new_ids"]) for row in rows)
        cut = sum(row["cut"] for row in rows)
        assert new > 150 and cut <= 6, (name, new, cut)
        write_rows(GOLDENS / "rollouts" / f"{name}.jsonl", rows)
        print(name, "new ids:", new, "cut at a near tie:", cut, "finished:", sum(row["finished"] for row in rows))


if __name__ == "__main__":
    main()
