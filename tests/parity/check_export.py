"""Does what `ft` wrote load where users take it, and does it compute the same? For hand use, not in CI.

    python check_export.py FINAL --logits LOGITS.safetensors             a model directory (full, block, freeze, merge)
    python check_export.py FINAL --base BASE --logits LOGITS.safetensors a PEFT adapter directory (lora)
    python check_export.py FINAL [--base BASE] --ft FT --rows ROWS.jsonl the same with the program FT and rows of text

FINAL loads with AutoModelForCausalLM.from_pretrained (a multimodal model with AutoModelForImageTextToText; or with PEFT
over BASE), in f32, eager attention. With --ft its loss is compared with that of `ft eval`.
LOGITS holds `input_ids.N` (integers, [T]) and `logits.N` (f32, [T, V]) of documents 0, 1, .. as ft computed
them; a .json file with {"documents": [{"input_ids": [..], "logits": [[..], ..]}, ..]} is read as well.
Prints the largest difference, absolute and relative to the largest logit; exits 1 above --tolerance.
"""

import argparse
import json
import pathlib
import subprocess
import sys

import torch
import transformers
from safetensors.torch import load_file

from common import mean_loss, read_rows
from make_families import auto

transformers.logging.set_verbosity_error()


def documents(path):
    if path.suffix == ".json":
        for document in json.loads(path.read_text())["documents"]:
            yield torch.tensor(document["input_ids"]), torch.tensor(document["logits"], dtype=torch.float32)
        return
    tensors = load_file(path)
    for number in sorted(int(key.split(".")[1]) for key in tensors if key.startswith("input_ids.")):
        yield tensors[f"input_ids.{number}"].long(), tensors[f"logits.{number}"].float()


def load(final, base):
    kind = auto(json.loads((pathlib.Path(base or final) / "config.json").read_text()))
    model, info = kind.from_pretrained(
        base or final, dtype=torch.float32, attn_implementation="eager", local_files_only=True, output_loading_info=True)
    strange = {key: sorted(map(str, value)) for key, value in info.items() if value}
    if strange:
        sys.exit(f"the weights do not fit the config: {strange}")
    if base:
        from peft import PeftModel

        # PEFT warns about keys that do not fit: such a warning is a failure here.
        import warnings

        with warnings.catch_warnings():
            warnings.filterwarnings("error", message=".*(missing|unexpected).*keys.*")
            model = PeftModel.from_pretrained(model, final)
        adapter = load_file(pathlib.Path(final) / "adapter_model.safetensors")
        loaded = {name.replace(".default", ""): p for name, p in model.named_parameters() if "lora_" in name}
        if set(adapter) != set(loaded):
            sys.exit(f"the adapter does not fit: {sorted(set(adapter) ^ set(loaded))}")
    transformers.AutoTokenizer.from_pretrained(final if not base else base, local_files_only=True)
    return model.eval()


def losses(model, arguments):
    """The mean loss of rows of text, and that of `ft eval`."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(arguments.base or arguments.final, local_files_only=True)
    end = [tokenizer.eos_token_id]
    ids = [tokenizer(row["text"])["input_ids"] for row in read_rows(arguments.rows)]
    rows = [(each, each) for each in (each if each[-1:] == end else each + end for each in ids)]
    where = ["--model", arguments.base, "--adapter", arguments.final] if arguments.base else ["--model", arguments.final]
    ran = subprocess.run([arguments.ft, "eval", *where, "--data", arguments.rows, "--dtype", "f32", "--json", "-q"],
                         capture_output=True, text=True)
    if ran.returncode:
        sys.exit(ran.stderr)
    return mean_loss(model, rows)[0], json.loads(ran.stdout)["loss"]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("final")
    parser.add_argument("--base", help="the model directory under an adapter")
    parser.add_argument("--logits", type=pathlib.Path)
    parser.add_argument("--ft", help="the program, for a comparison of losses")
    parser.add_argument("--rows", type=pathlib.Path, help="rows of text for --ft")
    parser.add_argument("--tolerance", type=float, default=1e-4, help="relative to the largest logit, or to the loss")
    arguments = parser.parse_args()
    if bool(arguments.logits) == bool(arguments.ft and arguments.rows):
        parser.error("either --logits, or --ft and --rows")
    model = load(arguments.final, arguments.base)
    if arguments.ft:
        theirs, ours = losses(model, arguments)
        off = abs(ours - theirs) / theirs
        print(f"{model.config.model_type}: loss {theirs:.7f} in transformers, {ours:.7f} in ft, relative {off:.1e}")
        sys.exit(0 if off <= arguments.tolerance else 1)
    worst, relative, count = 0.0, 0.0, 0
    for ids, logits in documents(arguments.logits):
        with torch.no_grad():
            theirs = model(ids[None], use_cache=False).logits[0].float()
        if theirs.shape != logits.shape:
            sys.exit(f"shape {tuple(logits.shape)} of ft, {tuple(theirs.shape)} of transformers")
        difference = (theirs - logits).abs().max().item()
        worst, relative = max(worst, difference), max(relative, difference / theirs.abs().max().item())
        count += 1
    if count == 0:
        sys.exit("no documents in the file of logits")
    print(f"{count} documents, {model.config.model_type}: largest difference {worst:.3e}, relative {relative:.3e}")
    sys.exit(0 if relative <= arguments.tolerance else 1)


if __name__ == "__main__":
    main()
