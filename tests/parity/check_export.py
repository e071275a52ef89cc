"""Does what `ft` wrote load where users take it, and does it compute the same? For hand use, not in CI.

    python check_export.py FINAL --logits LOGITS.safetensors             a model directory (full, block, freeze, merge)
    python check_export.py FINAL --base BASE --logits LOGITS.safetensors a PEFT adapter directory (lora)

FINAL loads with AutoModelForCausalLM.from_pretrained (or with PEFT over BASE), in f32, eager attention.
LOGITS holds `input_ids.N` (integers, [T]) and `logits.N` (f32, [T, V]) of documents 0, 1, .. as ft computed
them; a .json file with {"documents": [{"input_ids": [..], "logits": [[..], ..]}, ..]} is read as well.
Prints the largest difference, absolute and relative to the largest logit; exits 1 above --tolerance.
"""

import argparse
import json
import pathlib
import sys

import torch
import transformers
from safetensors.torch import load_file

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
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
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


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("final")
    parser.add_argument("--base", help="the model directory under an adapter")
    parser.add_argument("--logits", required=True, type=pathlib.Path)
    parser.add_argument("--tolerance", type=float, default=1e-4, help="relative to the largest logit")
    arguments = parser.parse_args()
    model = load(arguments.final, arguments.base)
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
