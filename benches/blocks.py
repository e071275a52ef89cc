"""The table of docs/block-optimizers.md: block orders, K and corrections against full AdamW and LoRA, by real runs of
`ft train` over the world of recipes/quickstart.toml at equal tokens.

    python benches/blocks.py FT [--steps 60] [--seeds 1,2] [--only NAME;...] [--rows FILE] > table.md

FT is the program. Needs no packages. Each row is the median over the seeds; one JSON object a run goes to FILE, and runs
that are there already are not repeated.
"""

import argparse
import json
import pathlib
import shutil
import statistics
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent

# name: overrides. The learning rates (LR) of full and LoRA training are the best of those in TRIED (`--only tried` runs
# them), that of blocks is the one of recipes/quickstart.toml.
BLOCK = ["tune.method=block", "tune.block.include_embedding=false"]
K = 15
LR = {"block": "2e-3", "full": "5e-4", "lora": "2e-3"}


def block(*more, k=K, lr=LR["block"]):
    return BLOCK + [f"tune.block.switch_every={k}", f"optimizer.learning_rate={lr}", *more]


RUNS = {
    "full AdamW": ["tune.method=full", f"optimizer.learning_rate={LR['full']}"],
    "full AdamW, int8 state": ["tune.method=full", f"optimizer.learning_rate={LR['full']}", "optimizer.state=int8"],
    "full Adafactor": ["tune.method=full", f"optimizer.learning_rate={LR['full']}", "optimizer.name=adafactor"],
    "full Lion": ["tune.method=full", "optimizer.learning_rate=1e-4", "optimizer.name=lion", "optimizer.betas=[0.9,0.99]"],
    "LoRA r 64": ["tune.method=lora", "tune.lora.r=64", "tune.lora.lora_alpha=128", f"optimizer.learning_rate={LR['lora']}"],
    "LoRA r 15 (a block's memory)": ["tune.method=lora", "tune.lora.r=15", "tune.lora.lora_alpha=30", f"optimizer.learning_rate={LR['lora']}"],
    "layer, descending": block("tune.block.order=descending"),
    "layer, ascending": block("tune.block.order=ascending"),
    "layer, random": block("tune.block.order=random"),
    "layer, importance (1 layer)": block("tune.block.order=importance"),
    "layer, importance (2 layers)": block("tune.block.order=importance", "tune.block.layers_per_block=2"),
    "layer, importance (1 layer), embedding always": block("tune.block.order=importance", 'tune.block.always_active=["model.embed_tokens."]', lr="1e-3"),
    "layer, descending, head its own block": block("tune.block.order=descending", "tune.block.include_lm_head=true"),
    "module, descending": block("tune.block.order=descending", "tune.block.partition=module"),
    "ratio 0.25, adjacent": block("tune.block.order=ascending", "tune.block.partition=ratio", "tune.block.update_ratio=0.25"),
    "ratio 0.25, scattered": block("tune.block.order=ascending", "tune.block.partition=ratio", "tune.block.update_ratio=0.25", "tune.block.mask=scattered"),
    "layer, descending, K = 1": block("tune.block.order=descending", k=1),
    "layer, descending, K = 5": block("tune.block.order=descending", k=5),
    "layer, descending, K = 30": block("tune.block.order=descending", k=30),
    "BREAD sgd, scale 10": block("tune.block.order=descending", "tune.block.correction=sgd", "tune.block.correction_scale=10"),
    "BREAD sgd, scale 10, partial": block("tune.block.order=descending", "tune.block.correction=sgd", "tune.block.correction_scale=10", "tune.block.correction_scope=partial"),
    "BREAD signsgd, scale 0.02": block("tune.block.order=descending", "tune.block.correction=signsgd", "tune.block.correction_scale=0.02"),
    "BREAD signsgd, scale 0.02, partial": block("tune.block.order=descending", "tune.block.correction=signsgd", "tune.block.correction_scale=0.02", "tune.block.correction_scope=partial"),
    "BREAD lora r 8": block("tune.block.order=descending", "tune.block.correction=lora", "tune.lora.r=8", "tune.lora.lora_alpha=16"),
    "BREAD lora r 8, partial": block("tune.block.order=descending", "tune.block.correction=lora", "tune.lora.r=8", "tune.lora.lora_alpha=16", "tune.block.correction_scope=partial"),
}
TRIED = {f"{kind}, learning rate {lr}": ["tune.method=" + kind, f"optimizer.learning_rate={lr}", *more]
         for kind, rates, more in [
             ("full", ["5e-4", "1e-3", "2e-3"], []), ("lora", ["2e-3", "4e-3"], ["tune.lora.r=64", "tune.lora.lora_alpha=128"])]
         for lr in rates}


def run(ft, name, seed, steps):
    work = pathlib.Path(tempfile.mkdtemp())
    command = [ft, "train", "--recipe", "recipes/quickstart.toml", *(RUNS | TRIED)[name], f"train.seed={seed}", f"train.max_steps={steps}",
               "train.save_steps=0", "train.sample_prompts=[]", f"train.output_dir={work / 'run'}"]
    started = time.monotonic()
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{name}: {done.stderr}")
    seconds = time.monotonic() - started
    lines = [json.loads(line) for line in (work / "run/metrics.jsonl").read_text().splitlines()]
    last = [line for line in lines if "eval_loss" in line][-1]
    plan = json.loads((work / "run/plan.json").read_text())
    shutil.rmtree(work)
    memory = sum(plan[key] for key in ["adapters", "optimizer", "retired_halves", "gradients"])
    return dict(name=name, seed=seed, steps=steps, eval_loss=last["eval_loss"], accuracy=last["eval_accuracy"],
                trained=plan["trained_parameters"], memory=memory, seconds=seconds)


def main():
    options = argparse.ArgumentParser()
    options.add_argument("ft")
    options.add_argument("--steps", type=int, default=60)
    options.add_argument("--seeds", default="1,2")
    options.add_argument("--only", default="")
    options.add_argument("--rows", default="blocks.jsonl")
    o = options.parse_args()
    file = pathlib.Path(o.rows)
    rows = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    names = list(TRIED) if o.only == "tried" else [n for n in RUNS if not o.only or n in o.only.split(";")]
    for seed in map(int, o.seeds.split(",")):
        for name in names:
            if any((r["name"], r["seed"], r["steps"]) == (name, seed, o.steps) for r in rows):
                continue
            rows.append(run(o.ft, name, seed, o.steps))
            with file.open("a") as out:
                out.write(json.dumps(rows[-1]) + "\n")
            print(rows[-1], file=sys.stderr, flush=True)
    print("| run | trained at a time | state, gradients, adapters | held-out loss | exact answers | seeds |")
    print("|---|---|---|---|---|---|")
    for name in names:
        mine = [r for r in rows if r["name"] == name and r["steps"] == o.steps]
        if mine:
            middle = lambda key: statistics.median(r[key] for r in mine)
            print(f"| {name} | {middle('trained'):,.0f} | {middle('memory') / 1e6:.2f} MB | {middle('eval_loss'):.3f} "
                  f"| {100 * middle('accuracy'):.1f} % | {len(mine)} |")


if __name__ == "__main__":
    main()
