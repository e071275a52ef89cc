"""Writes names.txt: the option names of other training tools, for the test that each has a hint.

Needs transformers, trl and peft installed, and the unpacked wheels of llamafactory, axolotl, unsloth and mlx-lm in the
folder that is given. Only names are read; the wheels are parsed, not imported.

    pip download --no-deps llamafactory axolotl unsloth mlx-lm    # then unzip each into FOLDER
    python tests/peers/make_names.py FOLDER > tests/peers/names.txt
"""

import ast
import dataclasses
import importlib
import importlib.metadata
import inspect
import pathlib
import re
import sys

folder = pathlib.Path(sys.argv[1])
found = {}


def add(tool, names):
    known = set().union(*found.values()) if found else set()
    found[tool] = {n for n in names if not n.startswith("_")} - known - {"self", "cls", "args", "kwargs"}


def fields(cls):
    return {f.name for f in dataclasses.fields(cls)}


def of_module(module, *classes):
    return set().union(*(fields(getattr(importlib.import_module(module), c)) for c in classes))


def version(package):
    for info in folder.rglob("METADATA"):
        text = info.read_text(errors="replace")
        if re.search(rf"^Name: {package}$", text, re.M):
            return re.search(r"^Version: (.*)$", text, re.M)[1]
    return importlib.metadata.version(package)


def annotated(path):
    """Annotated fields of every class below `path`."""
    names = set()
    for file in path.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ClassDef):
                names |= {s.target.id for s in node.body if isinstance(s, ast.AnnAssign) and isinstance(s.target, ast.Name)}
    return names


def parameters(path, functions):
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef) and node.name in functions:
            names |= {a.arg for a in node.args.args + node.args.kwonlyargs}
    return names


from transformers import BitsAndBytesConfig

add(f"transformers {version('transformers')}", of_module("transformers", "TrainingArguments") | set(inspect.signature(BitsAndBytesConfig).parameters))
trl = of_module("trl", "SFTConfig", "DPOConfig", "GRPOConfig", "KTOConfig", "RewardConfig", "RLOOConfig", "ModelConfig", "ScriptArguments")
for name in ["orpo.ORPO", "cpo.CPO", "gkd.GKD", "online_dpo.OnlineDPO"]:
    module, cls = name.split(".")
    trl |= of_module(f"trl.experimental.{module}", f"{cls}Config")
add(f"trl {version('trl')}", trl)
add(f"peft {version('peft')}", of_module("peft", *(f"{k}Config" for k in "Lora AdaLora IA3 Vera LoHa LoKr OFT".split())))
add(f"llamafactory {version('llamafactory')}", annotated(next(folder.rglob("llamafactory/hparams"))))
add(f"axolotl {version('axolotl')}", annotated(next(folder.rglob("axolotl/utils/schemas"))))
models = next(folder.rglob("unsloth/models/loader.py")).parent
calls = {"from_pretrained", "get_peft_model"}
add(f"unsloth {version('unsloth')}", parameters(models / "loader.py", calls) | parameters(models / "llama.py", calls))
lora = next(folder.rglob("mlx_lm/lora.py")).read_text()
names = set(re.findall(r'"--([a-z-]+)"', lora)) | set(re.findall(r'"([a-z_]+)":', re.search(r"CONFIG_DEFAULTS = \{.*?\n\}", lora, re.S)[0]))
add(f"mlx-lm {version('mlx-lm')}", {n.replace("-", "_") for n in names} | {"keys"})

for tool, names in found.items():
    print(f"{tool}: {' '.join(sorted(names))}")
