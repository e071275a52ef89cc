"""New tokens in transformers and PEFT: rows of embedding and head, loss, and the rows after steps of SGD.

    python make_new_tokens.py         # writes goldens/new_tokens
    python make_new_tokens.py FT      # also: do transformers and PEFT open what the program FT saves, with the same loss?

For an untied and a tied model: the tokens are added with `add_tokens`, the embedding is resized, each new row is the
mean of the rows of the pieces of its text, and rows beyond the tokens are the mean of the new rows. Then
  alone        only the new rows train
  full         everything trains
  lora_rows    PEFT's `trainable_token_indices`: one step, which does not depend on the random lora_A
  lora_matrix  PEFT's `modules_to_save`, tied with `ensure_weight_tying`: one step
"""

import json
import pathlib
import subprocess
import sys
import tempfile

import peft
import tokenizers
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from common import GOLDENS, VERSIONS, Encoder, loss_sum, mean_loss, read_rows, relative, trained_tokens, write_json, write_rows
from make_training import load, model_directory, tokenizer_of

HERE = GOLDENS / "new_tokens"
ROWS = HERE / "rows.jsonl"
SPECIAL, NORMAL = ["<tool>", "</tool>"], ["Δspan", "river-bank"]
# ft encodes control tokens in the text of a user as plain text, transformers does not: none are there.
TEXTS = [
    ("Use the tool.", "<tool>add 2 3</tool> 5"),
    ("Where is the Δspan?", "At the river-bank."),
    ("river-bank Δspan", "Δspan <tool>x</tool>"),
    ("No new words here.", "None."),
    ("What follows?", "</tool>"),
    ("Say it.", "The riverbank, the river-bank."),
]
BATCH = 3
RATES = {"alone": 0.5, "full": 0.02, "lora_rows": 0.5, "lora_matrix": 0.5}
STEPS = {"alone": 4, "full": 3, "lora_rows": 1, "lora_matrix": 1}


def resized(name, multiple):
    """The model with rows for the new tokens, the encoder, and the new ids."""
    model, encoder = load(name), Encoder(tokenizer_of(name)).as_loaded(tokenizer_of(name), model_directory(name))
    pieces = [encoder.ids(text, False) for text in SPECIAL + NORMAL]
    before = len(model.get_input_embeddings().weight)
    encoder.tokenizer.add_special_tokens([tokenizers.AddedToken(t, special=True, normalized=False) for t in SPECIAL])
    encoder.tokenizer.add_tokens(NORMAL)
    ids = [encoder.tokenizer.token_to_id(text) for text in SPECIAL + NORMAL]
    assert ids == list(range(before, before + len(ids)))
    model.resize_token_embeddings(before + len(ids), pad_to_multiple_of=multiple, mean_resizing=False)
    with torch.no_grad():
        for table in {id(m.weight): m.weight for m in [model.get_input_embeddings(), model.get_output_embeddings()]}.values():
            new = torch.stack([table[own].mean(0) for own in pieces])
            table[ids[0] : ids[-1] + 1] = new
            table[ids[-1] + 1 :] = new.mean(0)
    return model, encoder, ids


def tables(model):
    both = {"embed_tokens": model.get_input_embeddings(), "lm_head": model.get_output_embeddings()}
    return {"embed_tokens": both["embed_tokens"]} if model.config.tie_word_embeddings else both


def step_loss(model, batch):
    total = sum(loss_sum(model(torch.tensor([ids]), use_cache=False).logits[0], torch.tensor(labels)) for ids, labels in batch)
    return total / sum(trained_tokens(labels) for _, labels in batch)


def windows(rows, steps):
    return [[rows[(step * BATCH + i) % len(rows)] for i in range(BATCH)] for step in range(steps)]


def whole_model(name, method):
    model, encoder, ids = resized(name, 64)
    rows = [encoder.row(row) for row in read_rows(ROWS)]
    losses, rate = [], RATES[method]
    for batch in windows(rows, STEPS[method]):
        model.zero_grad()
        loss = step_loss(model, batch)
        loss.backward()
        losses.append(loss.item())
        with torch.no_grad():
            if method == "full":
                for parameter in model.parameters():
                    parameter -= rate * parameter.grad
            else:
                for module in tables(model).values():
                    module.weight[ids] -= rate * module.weight.grad[ids]
    return losses, {key: module.weight[ids] for key, module in tables(model).items()}, mean_loss(model, rows)[0], model


def with_peft(name, method):
    model, encoder, ids = resized(name, None)
    rows = [encoder.row(row) for row in read_rows(ROWS)]
    names, tied = list(tables(model)), model.config.tie_word_embeddings
    more = {"trainable_token_indices": {key: ids for key in names}}
    if method == "lora_matrix":
        more = {"modules_to_save": list(names), "ensure_weight_tying": tied}
    settings = peft.LoraConfig(r=2, lora_alpha=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", **more)
    model = peft.get_peft_model(model, settings).train()
    batch = windows(rows, 1)[0]
    loss = step_loss(model, batch)
    loss.backward()
    rate = RATES[method]
    after = {}
    for key, parameter in model.named_parameters():
        module = next((m for m in ["embed_tokens", "lm_head"] if f".{m}." in key), None)
        if module is None or parameter.grad is None:
            continue
        new = parameter - rate * parameter.grad
        after[module] = new if method == "lora_rows" else new[ids]
    assert sorted(after) == sorted(names), (sorted(after), names)
    return [loss.item()], after, None, model


def make():
    write_rows(ROWS, [{"messages": [{"role": "user", "content": q}, {"role": "assistant", "content": a}]} for q, a in TEXTS])
    out = {"versions": VERSIONS, "special": SPECIAL, "normal": NORMAL, "batch": BATCH, "rates": RATES, "models": {}}
    for name in ["llama", "qwen3"]:
        encoder, ids = resized(name, None)[1:]
        own = out["models"][name] = {"ids": ids, "row_ids": [encoder.row(row)[0] for row in read_rows(ROWS)]}
        for method in RATES:
            losses, after, end, _ = (with_peft if method.startswith("lora") else whole_model)(name, method)
            rows = {key: [[round(x, 8) for x in row] for row in rows.tolist()] for key, rows in after.items()}
            own[method] = {"losses": losses, "rows": rows, "loss_after": end}
    write_json(HERE / "golden.json", out)


def check(program):
    golden = json.loads((HERE / "golden.json").read_text(encoding="utf-8"))

    def ft(*arguments):
        done = subprocess.run([program, *map(str, arguments)], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def quoted(texts):
        return json.dumps(texts, ensure_ascii=False)

    methods = {
        "alone": ["tune.method=freeze", "tune.freeze.trainable_layers=0"],
        "full": ["tune.method=full"],
        "block": ["tune.method=block"],
        "lora_rows": ["tune.method=lora", "tune.lora.r=2"],
        "lora_matrix": ["tune.method=lora", "tune.lora.r=2", "tune.new_tokens=matrix"],
        "adalora_rows": ["tune.method=lora", "tune.lora.r=2", "tune.lora.peft_type=adalora"],
        **{
            f"{kind}_matrix": ["tune.method=lora", "tune.lora.r=2", f"tune.lora.peft_type={kind}", "tune.lora.oft_block_size=8", "tune.new_tokens=matrix"]
            for kind in ["adalora", "loha", "lokr", "oft", "ia3", "vera"]
        },
        "lora_residual": ["tune.method=lora", "tune.lora.r=2", "tune.lora.init_lora_weights=pissa", "tune.lora.save_residual=true"],
    }
    for name in golden["models"]:
        for method, settings in methods.items():
            with tempfile.TemporaryDirectory() as work:
                work = pathlib.Path(work)
                model = work / "model"
                model.mkdir()
                for file in [*model_directory(name).iterdir(), *tokenizer_of(name).iterdir()]:
                    (model / file.name).write_bytes(file.read_bytes())
                recipe = work / "r.toml"
                recipe.write_text(
                    f'[model]\npath = "{model}"\ndtype = "f32"\n[data]\ntrain = "{ROWS}"\npacking = false\n'
                    f"new_special_tokens = {quoted(SPECIAL)}\nnew_tokens = {quoted(NORMAL)}\n"
                    f'[train]\noutput_dir = "{work / "run"}"\nmax_steps = 3\nbatch_size = 3\n'
                    f"gradient_accumulation_steps = 1\n[optimizer]\nlearning_rate = 1e-2\n",
                    encoding="utf-8",
                )
                ft("train", "--recipe", recipe, *settings)
                final = work / "run" / "final"
                if "tune.method=lora" in settings:
                    opened = peft.AutoPeftModelForCausalLM.from_pretrained(final, attn_implementation="eager")
                    merged = work / "merged"
                    ft("merge", "--adapter", final, "--out", merged)
                    whole = AutoModelForCausalLM.from_pretrained(merged, attn_implementation="eager")
                else:
                    opened = whole = AutoModelForCausalLM.from_pretrained(final, attn_implementation="eager")
                    merged = final
                    assert whole.config.vocab_size == 384 == len(whole.get_input_embeddings().weight)
                tokenizer = AutoTokenizer.from_pretrained(final)
                encoder = Encoder(tokenizer_of(name))
                encoder.tokenizer = tokenizer.backend_tokenizer
                rows = [encoder.row(row) for row in read_rows(ROWS)]
                assert [ids for ids, _ in rows] == golden["models"][name]["row_ids"], method
                assert AutoTokenizer.from_pretrained(merged)("<tool>Δspan").input_ids == tokenizer("<tool>Δspan").input_ids
                ours = json.loads(ft("eval", "--model", final, "--data", ROWS, "--dtype", "f32", "--json"))["loss"]
                theirs = mean_loss(opened.eval(), rows)[0]
                after_merge = mean_loss(whole.eval(), rows)[0]
                print(f"{name} {method}: ft {ours:.6f}, opened by transformers {theirs:.6f}, merged {after_merge:.6f}")
                assert relative(ours, theirs) < 1e-4 and relative(ours, after_merge) < 1e-4


make()
if len(sys.argv) > 1:
    check(sys.argv[1])
