"""Does PEFT load what `ft` saves, for every kind and start, and compute the same loss? For hand use, not in CI.

    python check_adapters.py FT

FT is the program. Each adapter is trained for 3 steps on a model of the training goldens, loaded with PEFT over the
original base, and the loss over all rows compared with `ft eval` and with the merged model (1e-4, f32).
"""

import json
import pathlib
import subprocess
import sys
import tempfile
import warnings

from peft import PeftModel

from common import GOLDENS, Encoder, mean_loss, read_rows
from make_training import load, model_directory, tokenizer_of

ROWS = GOLDENS / "data" / "messages.jsonl"
LORA = ["tune.lora.r=4"]
RUNS = {
    "lora": LORA,
    "rslora": LORA + ["tune.lora.use_rslora=true"],
    "patterns": LORA + ['tune.lora.rank_pattern=["q_proj=2", "layers.1.mlp.up_proj=3"]', "tune.lora.alpha_pattern=up_proj=5",
                        "tune.lora.layers_to_transform=[0, 1, 3]", "tune.lora.exclude_modules=k_proj"],
    "regex": LORA + [r"""tune.lora.target_modules='.*layers\.[0-2]\..*(q|up)_proj'"""],
    "saved": LORA + ["tune.lora.modules_to_save=lm_head"],
    "dora": LORA + ["tune.lora.use_dora=true"],
    "ia3": ["tune.lora.peft_type=ia3"],
    "vera": ["tune.lora.peft_type=vera", "tune.lora.r=8"],
    "loha": LORA + ["tune.lora.peft_type=loha"],
    "lokr": LORA + ["tune.lora.peft_type=lokr"],
    "oft": ["tune.lora.peft_type=oft", "tune.lora.oft_block_size=8"],
    "oft_exact": ["tune.lora.peft_type=oft", "tune.lora.oft_block_size=8", "tune.lora.use_cayley_neumann=false"],
    "adalora": LORA + ["tune.lora.peft_type=adalora"],
    "tokens": LORA + ["tune.lora.trainable_token_indices=[7, 40, 101]"],
    "loftq": LORA + ["tune.lora.init_lora_weights=loftq", "tune.lora.loftq_iter=3", "memory.frozen_weights=int4"],
    "adalora_pruned": LORA + ["tune.lora.peft_type=adalora", "tune.lora.adalora.target_r=1"],
    "gaussian": LORA + ["tune.lora.init_lora_weights=gaussian"],
    "pissa": LORA + ["tune.lora.init_lora_weights=pissa"],
    "pissa_fast_rslora": LORA + ["tune.lora.init_lora_weights=pissa", "tune.lora.pissa_niter=8", "tune.lora.use_rslora=true"],
    "olora": LORA + ["tune.lora.init_lora_weights=olora"],
    "eva": LORA + ["tune.lora.init_lora_weights=eva"],
    "lora_ga": LORA + ["tune.lora.init_lora_weights=lora_ga"],
    "corda": LORA + ["tune.lora.init_lora_weights=corda"],
    "corda_adaptive": LORA + ["tune.lora.init_lora_weights=corda", "tune.lora.corda.adaptive_rank=true",
                              "tune.lora.corda.method=kpm", f"tune.lora.corda.data={ROWS}"],
    "corda_compressed": LORA + ["tune.lora.init_lora_weights=corda", "tune.lora.save_rank=8"],
    "residual": LORA + ["tune.lora.init_lora_weights=pissa", "tune.lora.save_residual=true"],
    "random": LORA + ["model.init=random"],
}


def main():
    program = sys.argv[1]

    def ft(*arguments):
        done = subprocess.run([program, *map(str, arguments)], capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"ft {' '.join(map(str, arguments))}\n{done.stderr}")
        return done.stdout

    worst = 0.0
    encoder = Encoder(tokenizer_of("llama"))
    rows = [encoder.row(row) for row in read_rows(ROWS)]
    for name, settings in RUNS.items():
        with tempfile.TemporaryDirectory() as work:
            work = pathlib.Path(work)
            base = work / "model"
            base.mkdir()
            for source in [model_directory("llama"), tokenizer_of("llama")]:
                for file in source.iterdir():
                    (base / file.name).write_bytes(file.read_bytes())
            recipe = work / "recipe.toml"
            recipe.write_text(f"""[model]\npath = "{base}"\ndtype = "f32"\ndevice = "cpu"\n[data]\ntrain = "{ROWS}"
max_length = 512\n[tune]\nmethod = "lora"\n[optimizer]\nlearning_rate = 1e-2\n[train]\nmax_steps = 3
save_steps = 0\noutput_dir = "{work / 'run'}"\n""")
            ft("train", "--recipe", recipe, *settings)
            final = work / "run" / "final"
            under = final / "base" if (final / "base").is_dir() else base
            measured = json.loads(ft("eval", "--model", under, "--adapter", final, "--data", ROWS, "--dtype", "f32", "--json"))
            ft("merge", "--model", under, "--adapter", final, "--out", work / "merged")
            merged = json.loads(ft("eval", "--model", work / "merged", "--data", ROWS, "--dtype", "f32", "--json"))
            with warnings.catch_warnings():
                warnings.filterwarnings("error", message=".*(missing|unexpected).*keys.*")
                from transformers import AutoModelForCausalLM

                model = AutoModelForCausalLM.from_pretrained(under, attn_implementation="eager")
                model = PeftModel.from_pretrained(model.float(), final).eval()
            theirs, _ = mean_loss(model, rows)
            plain, _ = mean_loss(load("llama").eval(), rows)
            away = max(abs(measured["loss"] / theirs - 1), abs(merged["loss"] / theirs - 1))
            worst = max(worst, away)
            print(f"{name}: PEFT {theirs:.6f}, ft {measured['loss']:.6f}, merged {merged['loss']:.6f}, base {plain:.6f}, {away:.1e}",
                  flush=True)
            assert abs(theirs - plain) > 1e-4, "the adapter must matter"
    sys.exit(0 if worst < 1e-4 else 1)


if __name__ == "__main__":
    main()
