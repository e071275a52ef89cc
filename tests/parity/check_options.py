"""Every option of every family, one at a time, against transformers; and every model type that ft does not have. For hand use, not in CI.

    python check_options.py FT [--family NAME ...] [--bare | --pairs N | --types] [--write]

FT is the program. For each key of the config of a family (that of make_families.py with the defaults of transformers) other values are
tried. Either `ft eval` has the loss of transformers with the same weights within 1e-4, or ft refuses the config and names the key. Values
that transformers does not build or run are counted as invalid.

--bare: each key is left out instead, and the file has no defaults of transformers: those of ft must be the same.

--pairs: N random pairs of options of each family; neither may be refused by another text than its name.

--types: for each model type of transformers' causal language models that ft does not have, its default config must be refused by the
name of the type and with what it would need, and not by a missing key. --write: what was refused, and all types, to goldens/refused.json
for tests/parity/families.rs.
"""

import argparse
import collections
import copy
import json
import math
import pathlib
import random
import re
import subprocess
import tempfile

import torch
import transformers
from transformers.models.auto import modeling_auto

from check_random import BEGIN, TEXTS, TOKENIZER
from common import GOLDENS, Encoder, loss_sum, randomize
from make_families import VARIANTS, auto, load

# Keys that say nothing about the mathematics of a text without padding.
OTHER = {
    "architectures", "auto_map", "bos_token_id", "chunk_size_feed_forward", "dtype", "eos_token_id", "finetuning_task", "id2label",
    "initializer_range", "initializer_std", "is_decoder", "label2id", "model_type", "name_or_path", "num_labels", "output_attentions", "output_hidden_states",
    "prefix", "problem_type", "return_dict", "sep_token_id", "task_specific_params", "tokenizer_class", "torch_dtype", "transformers_version",
    "use_cache", "vocab_size", "_name_or_path", "is_encoder_decoder", "add_cross_attention", "cross_attention_hidden_size"}
BY_KEY = dict(
    hidden_act=["silu", "gelu", "gelu_pytorch_tanh", "relu", "relu2", "quick_gelu"], hidden_activation=["silu", "gelu", "gelu_pytorch_tanh", "relu"],
    sliding_window=[None, 3, 64], head_dim=[4, 8, 6], attn_logit_softcapping=[None, 2.0], final_logit_softcapping=[None, 4.0], clip_qkv=[0.1, 8.0],
    pad_token_id=[None, 46], q_lora_rank=[None, 6], num_key_value_heads=[1], topk_method=["greedy", "group_limited_greedy", "noaux_tc"],
    scoring_func=["softmax", "sigmoid"], layer_types=["full_attention", "sliding_attention", "linear_attention", "chunked_attention"],
    mlp_layer_types=["dense", "sparse"], first_k_dense_replace=[0, 1, 2], n_group=[1, 2], topk_group=[1, 2], mlp_only_layers=[[], [0]],
    partial_rotary_factor=[0.5, 0.25, 1.0], rotary_dim=[2, 4], no_rope_layers=[[1, 1], [0, 1], [1, 0], [1, 1, 1], [0, 1, 1]])
ROPES = [dict(rope_type="linear", factor=2.5), dict(rope_type="dynamic", factor=2.0), dict(
    rope_type="yarn", factor=4.0, original_max_position_embeddings=32), dict(
    rope_type="llama3", factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=24),
    dict(rope_type="proportional", partial_rotary_factor=0.5)]


def others(key, value):
    """Other values of an option."""
    if key in ["layer_types", "mlp_layer_types"] and isinstance(value, list):
        return [[kind] * len(value) for kind in BY_KEY[key]]
    if key == "rope_parameters" and isinstance(value, dict) and not any(isinstance(v, dict) for v in value.values()):
        theta = {k: v for k, v in value.items() if k in ["rope_theta", "partial_rotary_factor"]}
        return [theta | rope for rope in ROPES] + [value | dict(rope_theta=7.0)] + [value | dict(partial_rotary_factor=p) for p in [0.5, 1.0]]
    if key in BY_KEY:
        return BY_KEY[key]
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [v for v in [value - 1, value + 1, 2 * value] if v >= 0]
    if isinstance(value, float):
        return [0.6 * value + 0.1, 3 * value + 0.01] if 0 <= value < 1e4 else [value / 3]
    if isinstance(value, list):
        numbers = all(isinstance(v, (int, float)) and not isinstance(v, bool) for v in value)
        return [[v + 1 for v in value]] if value and numbers else []
    if value is None:
        return [True, 3, 0.3]
    return []


def options(base):
    """(key, value, config) of each option of a family that is not as in `base`."""
    made = transformers.AutoConfig.for_model(**copy.deepcopy(base))
    known = made.to_dict()
    # transformers writes some keys under another name: both names with two values are no config.
    renamed = {name for key, name in made.attribute_map.items() if key in base and name not in base}
    for key in sorted(set(known) | set(base)):
        if key in OTHER | renamed:
            continue
        value = base.get(key, known.get(key))
        for other in others(key, value):
            if other != value:
                yield key, other, copy.deepcopy(base) | {key: other}


def pairs(base, count):
    """(keys, values, config) of random pairs of options."""
    rng, known = random.Random(count), list(options(base))
    for _ in range(count):
        (a, first, config), (b, second, _) = rng.sample(known, 2)
        if a != b:
            yield f"{a}, {b}", [first, second], config | {b: second}


# Without them a model is too large, or has no layers.
SIZES = re.compile("hidden_size|intermediate|vocab|num_(hidden_layers|attention_heads|key_value_heads)|head_dim|rank|experts|max_position|model_type|layer_types|num_|_k$|laurel|altup")


def absences(base):
    """(key, None, config) of each key of a family that is left out."""
    yield "nothing", None, base
    for key in sorted(base):
        if not SIZES.search(key) and key not in OTHER:
            yield key, None, {name: value for name, value in copy.deepcopy(base).items() if name != key}


def check(ft, config, folder, published, bare=False):
    """What ft makes of the loss: (kind, message)."""
    encoder = Encoder(TOKENIZER)
    raw = dict(bos_token_id=BEGIN.get(config["model_type"]), eos_token_id=encoder.eos, pad_token_id=None) | config
    try:
        model = auto(raw).from_config(transformers.AutoConfig.for_model(**copy.deepcopy(raw)), attn_implementation="eager", dtype=torch.float32)
        randomize(model, seed=7)
        model.generation_config = transformers.GenerationConfig(pad_token_id=encoder.eos, eos_token_id=[encoder.eos])
        model.save_pretrained(folder)
        for file in TOKENIZER.iterdir():
            (folder / file.name).write_bytes(file.read_bytes())
        saved = json.loads((folder / "config.json").read_text())
        # The file as a user has it: with the options that transformers does not keep, too.
        file = raw | dict(dtype="float32") if bare else {k: v for k, v in raw.items() if k not in saved and v is not None} | saved
        (folder / "config.json").write_text(json.dumps(file))
        encoder.as_loaded(TOKENIZER, folder)
        if published:
            (folder / "config.json").write_text(json.dumps(json.loads((folder / "config.json").read_text()) | dict(model_type=published)))
        rows = [encoder.text(text) for text in TEXTS]
        loaded = load(folder)
        trained = sum(len(ids) - 1 for ids, _ in rows)
        with torch.no_grad():
            loss = sum(loss_sum(loaded(torch.tensor([ids]), use_cache=False).logits[0], torch.tensor(labels)) for ids, labels in rows).item() / trained
    except Exception as error:  # Any: transformers raises what it likes for what it cannot compute.
        return "invalid", f"{type(error).__name__}: {str(error)[:120]}"
    if not math.isfinite(loss):
        return "invalid", "the loss is not finite"
    data = folder / "rows.jsonl"
    data.write_text("".join(json.dumps(dict(text=text)) + "\n" for text in TEXTS))
    ran = subprocess.run([ft, "eval", "--model", folder, "--data", data, "--json", "--dtype", "f32", "--device", "cpu", "--threads", "1", "-q"],
                         capture_output=True, text=True)
    if ran.returncode:
        return "refused", ran.stderr.strip()[:400]
    found = json.loads(ran.stdout)["loss"]
    return ("equal", "") if abs(found - loss) <= 1e-4 * abs(loss) else ("differs", f"loss {found} for {loss}")


def families(chosen):
    """The first configuration of each family, without the tokens that its documents take for padding."""
    bases = {}
    for variant in VARIANTS.values():
        config = {key: value for key, value in variant["config"].items() if key != "pad_token_id"}
        family = variant.get("published", config["model_type"])
        if "text_config" not in config and (not chosen or family in chosen):
            bases.setdefault(family, config)
    return bases


def keep(write, **found):
    """Adds to the file of the Rust test."""
    if write:
        path = GOLDENS / "refused.json"
        known = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps(known | found | dict(transformers=transformers.__version__), separators=(",", ":")).replace('],["', '],\n["') + "\n")


def check_families(ft, chosen, write, bare, count):
    total, refused, bases = collections.Counter(), [], {}
    for family, base in sorted(families(chosen).items()):
        if family not in supported(ft):
            print(family, "is not supported")
            continue
        counts = collections.Counter()
        published = family if family != base["model_type"] else None
        for key, value, config in absences(base) if bare else pairs(base, count) if count else options(base):
            with tempfile.TemporaryDirectory() as folder:
                kind, message = check(ft, config, pathlib.Path(folder), published, bare)
            if kind == "refused":
                inner = [name for part in (value if isinstance(value, list) else [value]) if isinstance(part, dict) for name in part]
                names = key.split(", ") + inner
                kind = "refused by its name" if any(name in message for name in names) else "refused without its name"
                if key in message and "not supported" in message:
                    bases[family] = base | dict(model_type=family)
                    refused.append([family, key, value])
            counts[kind] += 1
            if kind not in ["equal", "invalid", "refused by its name"]:
                print(f"{family} {key} = {value!r}: {kind}: {message}", flush=True)
        print(family, dict(counts), flush=True)
        total += counts
    print("options:", dict(total))
    keep(write, configs=bases, options=refused)


def supported(ft):
    """The types that ft has."""
    return re.findall(r"^\| `(\w+)` \|", subprocess.run([ft, "models"], capture_output=True, text=True).stdout, re.M)


def unknown(ft):
    """Of each causal language model of transformers its type, and what ft says to its default config if it does not have it."""
    known = supported(ft)
    for model_type in sorted(modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
        if model_type in known:
            yield model_type, None
            continue
        try:
            config = transformers.AutoConfig.for_model(model_type).to_dict()
        except Exception:  # Some have no defaults.
            config = {}
        config = {key: value for key, value in config.items() if value is not None} | dict(model_type=model_type)
        with tempfile.TemporaryDirectory() as folder:
            (pathlib.Path(folder) / "config.json").write_text(json.dumps(config, default=str))
            recipe = pathlib.Path(folder) / "recipe.toml"
            recipe.write_text(f'[model]\npath = "{folder}"\n[data]\ntrain = "{folder}/rows.jsonl"\n[tune]\nmethod = "full"\n')
            (pathlib.Path(folder) / "rows.jsonl").write_text('{"text": "a"}\n')
            ran = subprocess.run([ft, "plan", "--recipe", recipe], capture_output=True, text=True)
        yield model_type, ran.stderr.strip()


def check_types(ft, write):
    counts, types = collections.Counter(), []
    for model_type, said in unknown(ft):
        types.append([model_type])
        if said is None:
            kind = "supported"
        elif f"model type `{model_type}` is not supported" not in said:
            kind = "refused for another reason"
        else:
            kind = "refused with what it would need" if "it would need" in said else "refused without what it would need"
        counts[kind] += 1
        if kind.startswith("refused") and not kind.endswith("with what it would need"):
            print(f"{model_type}: {kind}: {said[:200]}", flush=True)
    print("model types:", dict(counts))
    keep(write, types=types)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("ft")
    parser.add_argument("--family", nargs="*", default=[])
    parser.add_argument("--types", action="store_true")
    parser.add_argument("--bare", action="store_true")
    parser.add_argument("--pairs", type=int, default=0)
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    if arguments.types:
        check_types(arguments.ft, arguments.write)
    else:
        check_families(arguments.ft, arguments.family, arguments.write, arguments.bare, arguments.pairs)


if __name__ == "__main__":
    main()
