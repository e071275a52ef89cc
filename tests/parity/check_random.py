"""Random configurations of the families against transformers. For hand use, not in CI.

    python check_random.py FT [--seconds N] [--seed N] [--family NAME ...] [--heads N ...]

FT is the program. Each draw takes a configuration of make_families.py, gives it other sizes and random values of its options, and compares
with transformers in f32: the loss and every gradient (from the weights after one step of SGD), and greedy answers with a cache. The
tolerance is 1e-4 of the largest value of a tensor, or 20 times the distance of f32 from f64 in transformers if that is more. Options that
ft refuses are counted, and their messages are printed: each must name the option. The last line has the numbers.
"""

import argparse
import collections
import copy
import json
import pathlib
import random
import subprocess
import tempfile
import time

import torch
import transformers
from safetensors.torch import load_file

from common import GOLDENS, Encoder, loss_sum, randomize, relative
from make_families import PROMPTS, VARIANTS, auto, greedy, in_files, load

TOKENIZER = GOLDENS / "tokenizers" / "small"
TEXTS = ["the mill by the river grinds rye in spring, oats in autumn and nothing at all in winter.", "rain.",
         "17 + 25 = 42, and then some more words, so that this is longer than all of the windows. " * 2]
RATE = 100.0
# Of families whose config must have one.
BEGIN = dict(cwm=3)
# Values of options; a draw changes those that the configuration has, and adds some that it has not.
CHOICES = dict(
    tie_word_embeddings=[True, False], attention_bias=[True, False], mlp_bias=[True, False], use_bias=[True, False], qkv_bias=[True, False],
    use_qkv_bias=[True, False], hidden_act=["silu", "gelu", "gelu_pytorch_tanh", "relu2"], hidden_activation=["gelu_pytorch_tanh", "gelu"],
    norm_topk_prob=[True, False], sliding_window=[2, 3, 7, 200], rope_theta=[30.0, 1000.0, 5e5], use_qk_norm=[True, False], rope_interleave=[True, False],
    use_parallel_residual=[True, False], routed_scaling_factor=[0.7, 2.2], logit_scale=[0.3, 2.0], embedding_multiplier=[0.5, 3.0],
    residual_multiplier=[0.3, 1.0], attention_multiplier=[0.1, 0.9], logits_scaling=[0.5, 4.0], partial_rotary_factor=[0.25, 0.5, 1.0],
    query_pre_attn_scalar=[5, 30], attn_logit_softcapping=[None, 2.0], final_logit_softcapping=[None, 4.0], max_window_layers=[0, 1, 2],
    use_sliding_window=[True, False], decoder_sparse_step=[1, 2], first_k_dense_replace=[0, 1, 2], qk_layernorm=[False, True], clip_qkv=[None, 0.2],
    q_lora_rank=[None, 7], kv_lora_rank=[5, 9], qk_nope_head_dim=[4, 6], qk_rope_head_dim=[4, 6], v_head_dim=[4, 7, 10], n_shared_experts=[1, 3],
    linear_conv_kernel_dim=[2, 3, 4], linear_key_head_dim=[4, 6], linear_value_head_dim=[2, 5], altup_correct_scale=[True, False], laurel_rank=[2, 5],
    rms_norm_eps=[1e-6, 3e-2], layer_norm_eps=[1e-5, 3e-2], moe_intermediate_size=[6, 11], shared_expert_intermediate_size=[7, 16],
    scale_emb=[1, 2.5], scale_depth=[0.7, 2.0], pad_token_id=[None, 46], rotary_dim=[2, 4], moe_topk=[1, 2, 3])
ROPES = [None, dict(rope_type="linear", factor=2.5), dict(rope_type="dynamic", factor=2.0),
         dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=32), dict(
             rope_type="yarn", factor=8.0, original_max_position_embeddings=16, beta_fast=4.0, beta_slow=0.5, attention_factor=1.2),
         dict(rope_type="llama3", factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=24)]


def draw(rng, base, heads):
    """A configuration like `base`, with other sizes and options, and one of these numbers of heads."""
    config = copy.deepcopy(base) | dict(vocab_size=rng.choice([128, 131, 150]), max_position_embeddings=512)
    several = any(isinstance(value, list) for value in base.values())
    if "hidden_size_per_layer_input" not in base and "layer_types" not in base and "mlp_layer_types" not in base and not several:
        # transformers has no cache for LFM2 without a layer with attention.
        config["num_hidden_layers"] = rng.randint(2 if "full_attn_idxs" in base else 1, 4)
    if "num_kv_shared_layers" not in base:
        for key in ["layer_types", "mlp_layer_types"]:
            if isinstance(base.get(key), list) and rng.random() < 0.5:
                config[key] = [rng.choice(base[key]) for _ in base[key]]
    if "conv" in base.get("layer_types", []) and "full_attention" not in config["layer_types"]:
        config["layer_types"][0] = "full_attention"
    heads = rng.choice(heads)
    latent = "kv_lora_rank" in base
    config["num_attention_heads"] = heads
    config["num_key_value_heads"] = heads if latent else rng.choice([k for k in range(1, heads + 1) if heads % k == 0])
    config["hidden_size"] = 12 * heads if heads < 4 else 4 * heads
    if "head_dim" in base and not latent:
        config["head_dim"] = rng.choice([4, 8, 12, 16])
    if "intermediate_size" in base and not isinstance(base["intermediate_size"], list):
        config["intermediate_size"] = rng.choice([5, 20, 33])
    for key in ["vocab_size_per_layer_input"]:
        if key in base:
            config[key] = config["vocab_size"]
    for key, values in CHOICES.items():
        if key in base and rng.random() < 0.5 or key not in base and rng.random() < 0.01:
            config[key] = rng.choice(values)
    if "rope_parameters" not in base and rng.random() < 0.4:
        config["rope_scaling"] = copy.deepcopy(rng.choice(ROPES))
    for key in ["num_experts", "num_local_experts", "n_routed_experts"]:
        if key in base:
            config[key] = rng.choice([4, 6, 8])
            if "n_group" in base:
                config |= dict(n_group=2, topk_group=rng.choice([1, 2]))
            if "num_experts_per_tok" in base:
                config["num_experts_per_tok"] = rng.choice([1, 2])
    return config


def measure(model, rows):
    """The mean loss and every gradient under the names of the files."""
    trained = sum(len(ids) - 1 for ids, _ in rows)
    loss = sum(loss_sum(model(torch.tensor([ids]), use_cache=False).logits[0], torch.tensor(labels)) for ids, labels in rows) / trained
    loss.backward()
    named = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return loss.item(), named


def names_of_files(model, gradients, files):
    """The gradients under the names of the tensors in the files; of joined experts a tensor with the same values has the name."""
    renamed, joined = {}, dict(model.named_parameters())
    for key, gradient in gradients.items():
        single = in_files({key: gradient}, model.config.model_type)
        if not all(name in files for name in single):
            same = [name for name, value in files.items() if value.shape == gradient.shape and torch.equal(value, joined[key].detach())]
            single = {name: gradient for name in same[:1]} or single
        renamed |= single
    return renamed


def compare(ft, config, folder, seed, published=None):
    """None if all is equal, else what differs; ("refused", message) or ("invalid", message)."""
    encoder = Encoder(TOKENIZER)
    raw = dict(bos_token_id=BEGIN.get(config["model_type"]), eos_token_id=encoder.eos, pad_token_id=None) | config
    try:
        model = auto(raw).from_config(transformers.AutoConfig.for_model(**copy.deepcopy(raw)), attn_implementation="eager", dtype=torch.float32)
        randomize(model, seed=seed)
        model.generation_config = transformers.GenerationConfig(pad_token_id=encoder.eos, eos_token_id=[encoder.eos])
        model.save_pretrained(folder)
        for file in TOKENIZER.iterdir():
            (folder / file.name).write_bytes(file.read_bytes())
        # The file as a user has it: with the options that transformers does not know, too.
        saved = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({key: value for key, value in raw.items() if key not in saved and value is not None} | saved))
        encoder.as_loaded(TOKENIZER, folder)
        if published:
            (folder / "config.json").write_text(json.dumps(json.loads((folder / "config.json").read_text()) | dict(model_type=published)))
        rows = [encoder.text(text) for text in TEXTS]
        loss, gradients = measure(load(folder), rows)
        loss64, gradients64 = measure(load(folder, dtype=torch.float64), rows)
    except Exception as error:  # Any: transformers raises what it likes for what it cannot compute.
        return "invalid", f"{type(error).__name__}: {str(error)[:150]}"
    data, out = folder / "rows.jsonl", folder / "run"
    data.write_text("".join(json.dumps(dict(text=text)) + "\n" for text in TEXTS))
    recipe = folder / "recipe.toml"
    recipe.write_text(f'[model]\npath = "{folder}"\ndtype = "f32"\ndevice = "cpu"\n[data]\ntrain = "{data}"\nmax_length = 400\nshuffle = false\npacking = false\n'
                      f'[train]\noutput_dir = "{out}"\nmax_steps = 1\nbatch_size = 3\ngradient_accumulation_steps = 1\nsave_steps = 0\nmax_grad_norm = 0.0\n[tune]\nmethod = "full"\n'
                      f'[optimizer]\nname = "sgd"\nlearning_rate = {RATE}\n[schedule]\nname = "constant"\nwarmup_ratio = 0.0\n')
    before = {key: value for file in folder.glob("*.safetensors") for key, value in load_file(file).items()}
    gradients, gradients64 = [names_of_files(load(folder), named, before) for named in [gradients, gradients64]]
    ran = subprocess.run([ft, "train", "--recipe", recipe, "--threads", "1", "-q", "train.logging_steps=1"], capture_output=True, text=True)
    if ran.returncode:
        return "refused", ran.stderr.strip()[:400]
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    found = next(line["loss"] for line in lines if "loss" in line)
    differences = []
    if abs(found - loss) > max(1e-4 * abs(loss), 20 * abs(loss - loss64)):
        differences.append(f"loss {found} for {loss}")
    after = {key: value for file in (out / "final").glob("*.safetensors") for key, value in load_file(file).items()}
    for key, gradient in gradients.items():
        if key not in after:
            differences.append(f"no {key}")
            continue
        # w' = w - rate · g; the f32 of w' rounds w.
        mine = (before[key].double() - after[key].double()) / RATE
        rounding = 1e-7 * after[key].abs().max().item() / RATE
        largest = max(gradient.abs().max().item(), 1e-12)
        allowed = max(1e-4, 20 * relative(gradient, gradients64[key]), 4 * rounding / largest)
        off = (mine - gradient.double()).abs().max().item() / largest
        if not off <= allowed and largest > 1e-7:
            differences.append(f"gradient of {key}: {off:.1e}, allowed {allowed:.1e}")
    model = load(folder)
    # transformers has no cache for a model of linear attention alone, and no right one for a window of one token.
    kinds = getattr(model.config, "layer_types", None) or ["full_attention"]
    for prompt in PROMPTS[:2] if set(kinds) != {"linear_attention"} else []:
        wanted = greedy(model, encoder, [prompt])[0]
        told = subprocess.run([ft, "generate", "--model", folder, "--prompt", prompt, "--max-new-tokens", "16", "--temperature", "0", "--dtype", "f32",
                               "--device", "cpu", "--threads", "1", "-q"], capture_output=True, text=True)
        if told.returncode:
            differences.append(f"generate: {told.stderr.strip()[:300]}")
        elif told.stdout.rstrip("\n") != wanted["text"].rstrip("\n") and wanted["smallest_margin"] > 1e-3:
            # The cache of transformers has a window if the config names one, also where its layers have none.
            plain = greedy(model, encoder, [prompt], use_cache=False)[0]
            if told.stdout.rstrip("\n") != plain["text"].rstrip("\n"):
                differences.append(f"answer {told.stdout!r} for {wanted['text']!r}")
    return ("differs", "; ".join(differences[:4])) if differences else None


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("ft")
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--family", nargs="*", default=[])
    parser.add_argument("--heads", nargs="*", type=int, default=[1, 2, 3, 4, 6])
    parser.add_argument("--draws", type=int, default=10**6, help="stop after so many")
    arguments = parser.parse_args()
    bases = collections.defaultdict(list)
    for variant in VARIANTS.values():
        config = {key: value for key, value in variant["config"].items() if key != "pad_token_id"}
        family = variant.get("published", config["model_type"])
        if "text_config" not in config and not variant.get("joined") and (not arguments.family or family in arguments.family):
            bases[family].append(config)
    counts, number, end = collections.Counter(), arguments.seed, time.monotonic() + arguments.seconds
    by_family = collections.defaultdict(collections.Counter)
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    while time.monotonic() < end and number < arguments.seed + arguments.draws:
        # Every family in turn.
        families = sorted(bases)
        rng = random.Random(number)
        family = families[number % len(families)]
        config = draw(rng, rng.choice(bases[family]), arguments.heads)
        with tempfile.TemporaryDirectory() as folder:
            published = family if family != config["model_type"] else None
            result = compare(arguments.ft, config, pathlib.Path(folder), number, published)
        kind, message = result or ("equal", "")
        counts[kind] += 1
        by_family[family][kind] += 1
        if kind != "equal":
            print(number, family, kind, message, json.dumps(config) if kind == "differs" else "", flush=True)
        number += 1
    for family, own in sorted(by_family.items()):
        print(family, dict(own))
    print(f"seeds {arguments.seed} to {number - 1}:", dict(counts))


if __name__ == "__main__":
    main()
