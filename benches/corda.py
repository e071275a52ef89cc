"""Does CorDA do what it claims, on the tiny world? Numbers of docs/corda.md.

    python corda.py FT WORK

FT is the program, WORK an empty directory. Standard library only; about half an hour on two cores.

1. A chat model: the tiny model of assets/, fully fine-tuned on the rows of assets/world.
2. A new task that it has never seen: letters rotated by one place ("Rotate t a k e." -> "a k e t").
3. From the chat model, one adapter run for each start and seed. CorDA-kpm is calibrated on questions of facts, CorDA-ipm on
   the task.
4. Exact answers on held-out rows of the task, and on facts of the world that the chat model knew: none of them is in the
   calibration rows.
"""

import json
import pathlib
import random
import string
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[1]
FACTS = ("trade", "home", "pet", "colour", "work", "animal", "live", "season", "fair", "river", "sell", "made in")
SEEDS = (1, 2, 3)
STEPS = 160
EVERY = 40
RATES = {3e-3: ("LoRA", "PiSSA", "CorDA-kpm", "CorDA-ipm"), 1e-2: ("LoRA", "CorDA-kpm")}
STARTS = {
    "LoRA": [],
    "PiSSA": ["tune.lora.init_lora_weights=pissa"],
    "CorDA-kpm": ["tune.lora.init_lora_weights=corda", "tune.lora.corda.method=kpm", "tune.lora.corda.data=@facts"],
    "CorDA-ipm": ["tune.lora.init_lora_weights=corda", "tune.lora.corda.method=ipm"],
}


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def is_fact(row):
    question = row["messages"][0]["content"]
    return "letter" not in question and any(word in question for word in FACTS)


def task_rows(n, generator):
    rows, seen = [], set()
    while len(rows) < n:
        letters = tuple(generator.choice(string.ascii_lowercase) for _ in range(generator.choice((3, 4))))
        if letters in seen:
            continue
        seen.add(letters)
        turned = letters[1:] + letters[:1]
        rows.append({"messages": [{"role": "user", "content": f"Rotate {' '.join(letters)}."},
                                  {"role": "assistant", "content": " ".join(turned)}]})
    return rows


def steps(found):
    """Numbers of steps are text in JSON."""
    return {int(key) if key.isdigit() else key: value for key, value in found.items()}


def main():
    program, work = sys.argv[1], pathlib.Path(sys.argv[2])
    work.mkdir(parents=True, exist_ok=True)

    def ft(*arguments):
        done = subprocess.run([program, *map(str, arguments)], capture_output=True, text=True, cwd=ROOT)
        if done.returncode:
            sys.exit(f"ft {' '.join(map(str, arguments))}\n{done.stderr}")
        return done.stdout

    def accuracy(model, adapter, data):
        more = ["--adapter", adapter] if adapter else []
        return 100 * json.loads(ft("eval", "--model", model, *more, "--data", data, "--json"))["accuracy"]

    chat = work / "chat" / "final"
    if not chat.is_dir():
        ft("train", "--recipe", "recipes/quickstart.toml", "tune.method=full", "optimizer.learning_rate=1e-3",
           "train.max_steps=500", "train.save_steps=0", "train.sample_prompts=[]", "train.predict_with_generate=false",
           f"train.output_dir={work / 'chat'}")
    world = ROOT / "assets" / "world"
    calibration = [row for row in read(world / "train.jsonl") if is_fact(row)]
    held = [row for row in read(world / "eval.jsonl") if is_fact(row)]
    # Facts that the chat model was trained on, without those of the calibration: half of the asked ones, and the
    # held-out ones.
    random.Random(7).shuffle(calibration)
    half = len(calibration) // 2
    facts = write(work / "facts.jsonl", calibration[:half])
    keep = write(work / "keep.jsonl", calibration[half:] + held)
    rows = task_rows(1000, random.Random(11))
    train, test = write(work / "task.jsonl", rows[:800]), write(work / "test.jsonl", rows[800:])
    print(f"{half} facts to calibrate on, {len(calibration) - half + len(held)} to keep; "
          f"before: task {accuracy(chat, None, test):.1f} %, facts {accuracy(chat, None, keep):.1f} %", flush=True)

    results = {}
    for rate, names in RATES.items():
        for name in names:
            settings = STARTS[name]
            for seed in SEEDS:
                run = work / f"{name}-{rate}-{seed}"
                recipe = work / "recipe.toml"
                recipe.write_text(f"""[model]
path = "{chat}"
dtype = "f32"
[data]
train = "{train}"
eval = "{test}"
max_length = 128
[tune]
method = "lora"
[tune.lora]
r = 8
lora_alpha = 8
[optimizer]
learning_rate = {rate}
[schedule]
name = "constant"
warmup_ratio = 0.0
[train]
max_steps = {STEPS}
batch_size = 16
gradient_accumulation_steps = 1
logging_steps = 1000
save_steps = 0
eval_steps = {EVERY}
seed = {seed}
output_dir = "{run}"
""")
                if (run / "result.json").is_file():
                    results.setdefault((rate, name), []).append(json.loads((run / "result.json").read_text(), object_hook=steps))
                    continue
                if not (run / "final").is_dir():
                    ft("train", "--recipe", recipe, "--overwrite", *(s.replace("@facts", str(facts)) for s in settings))
                metrics = read(run / "metrics.jsonl")
                losses = [m["loss"] for m in metrics if "loss" in m]
                curve = {m["step"]: m["eval_loss"] for m in metrics if "eval_loss" in m}
                one = dict(task=accuracy(chat, run / "final", test), facts=accuracy(chat, run / "final", keep), curve=curve,
                           first=sum(losses[:40]) / 40)
                results.setdefault((rate, name), []).append(one)
                (run / "result.json").write_text(json.dumps(one))
                print(rate, name, seed, json.dumps(one), flush=True)

    def mean(values):
        values = list(values)
        return sum(values) / len(values)

    print("| rate | start | task | facts kept | loss at 40 | 80 | 120 | 160 |\n|---|---|---|---|---|---|---|---|")
    for (rate, name), all_seeds in results.items():
        at = " | ".join(f"{mean(r['curve'][s] for r in all_seeds):.4f}" for s in (40, 80, 120, 160))
        spread = [max(r[k] for r in all_seeds) - min(r[k] for r in all_seeds) for k in ("task", "facts")]
        print(f"| {rate} | {name} | {mean(r['task'] for r in all_seeds):.1f} ± {spread[0] / 2:.1f} "
              f"| {mean(r['facts'] for r in all_seeds):.1f} ± {spread[1] / 2:.1f} | {at} |")


if __name__ == "__main__":
    main()
