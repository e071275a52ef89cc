"""Does PEFT load what `ft` saves of adapters on experts, and compute the same loss? For hand use, not in CI.

    python check_expert_adapters.py FT

FT is the program. Each adapter is trained for 3 steps on a model of goldens/families, loaded with PEFT over the original base, and
the loss over all rows compared with `ft eval` and with the merged model (1e-4, f32).
"""

import json
import pathlib
import subprocess
import sys
import tempfile
import warnings

from peft import PeftModel

from common import GOLDENS, Encoder, mean_loss, read_rows
from make_families import load

ROWS = GOLDENS / "data" / "eval_text.jsonl"
TOKENIZER = GOLDENS / "tokenizers" / "small"
BOTH = 'tune.lora.target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]'
RUNS = {
    "both": [BOTH],
    "only": [BOTH, "tune.lora.target_modules=[]"],
    "down": ["tune.lora.target_parameters=experts.down_proj", "tune.lora.use_rslora=true"],
    "active": [BOTH, "tune.lora.expert_rank=active"],
    "gaussian": [BOTH, "tune.lora.init_lora_weights=gaussian", "tune.lora.alpha_pattern=experts.down_proj=5"],
}
FAMILIES = ["qwen3_moe", "gpt_oss_plain", "mixtral", "olmoe", "qwen3_vl_moe"]


def main():
    program = sys.argv[1]

    def ft(*arguments):
        done = subprocess.run([program, *map(str, arguments)], capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"ft {' '.join(map(str, arguments))}\n{done.stderr}")
        return done.stdout

    worst = 0.0
    encoder = Encoder(TOKENIZER)
    rows = [encoder.row(row) for row in read_rows(ROWS)]
    for family in FAMILIES:
        plain, _ = mean_loss(load(GOLDENS / "families" / family), rows)
        for name, settings in RUNS.items():
            with tempfile.TemporaryDirectory() as work:
                work = pathlib.Path(work)
                base = work / "model"
                base.mkdir()
                for source in [GOLDENS / "families" / family, TOKENIZER]:
                    for file in source.iterdir():
                        (base / file.name).write_bytes(file.read_bytes())
                recipe = work / "recipe.toml"
                recipe.write_text(f"""[model]\npath = "{base}"\ndtype = "f32"\ndevice = "cpu"\n[data]\ntrain = "{ROWS}"
max_length = 512\n[tune]\nmethod = "lora"\nlora.r = 4\n[optimizer]\nlearning_rate = 1e-2\n[train]\nmax_steps = 3
save_steps = 0\noutput_dir = "{work / 'run'}"\n""")
                ft("train", "--recipe", recipe, *settings)
                final = work / "run" / "final"
                asked = ["--data", ROWS, "--render", "plain", "--dtype", "f32", "--json"]
                measured = json.loads(ft("eval", "--model", base, "--adapter", final, *asked))
                ft("merge", "--model", base, "--adapter", final, "--dtype", "f32", "--out", work / "merged")
                merged = json.loads(ft("eval", "--model", work / "merged", *asked))
                with warnings.catch_warnings():
                    warnings.filterwarnings("error", message=".*(missing|unexpected).*keys.*")
                    model = PeftModel.from_pretrained(load(base), final).eval()
                theirs, _ = mean_loss(model, rows)
            away = max(abs(measured["loss"] / theirs - 1), abs(merged["loss"] / theirs - 1))
            worst = max(worst, away)
            print(f"{family}, {name}: PEFT {theirs:.6f}, ft {measured['loss']:.6f}, merged {merged['loss']:.6f}, base {plain:.6f}, "
                  f"{away:.1e}", flush=True)
            assert abs(theirs - plain) > 1e-4, "the adapter must matter"
    sys.exit(0 if worst < 1e-4 else 1)


if __name__ == "__main__":
    main()
