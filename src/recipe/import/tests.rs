//! Tests of recipes that are made of the configurations of other tools.

use super::*;
use crate::recipe;

/// The keys of the recipe, which must be valid.
fn keys(text: &str, name: &str) -> (Vec<String>, Imported) {
    let imported = import(text, name).unwrap();
    let lines: Vec<String> = imported
        .text
        .lines()
        .map(|l| l.split(" # ").next().unwrap().trim().to_string())
        .collect();
    let parsed = recipe::parse(&imported.text, "r.toml", &[]);
    assert!(
        parsed.is_ok(),
        "{}\n{}",
        imported.text,
        parsed.err().map(|e| e.to_string()).unwrap_or_default()
    );
    (lines, imported)
}

fn has(found: &(Vec<String>, Imported), wanted: &[&str]) {
    for line in wanted {
        assert!(found.0.iter().any(|l| l == line), "{line}\n{}", found.1.text);
    }
}

fn leaves(found: &(Vec<String>, Imported), wanted: &[&str]) {
    let left: Vec<&str> = found.1.left.iter().map(|(name, _)| name.as_str()).collect();
    assert_eq!(left, wanted, "{:#?}", found.1.left);
}

#[test]
fn axolotl() {
    let found = keys(
        "base_model: org/base-8b\nload_in_4bit: true\nload_in_8bit: false\nstrict: false\n\ndatasets:\n  - path: rows/a.jsonl\n    \
         type: alpaca\n  - path: rows/b.jsonl\n    type: alpaca\nval_set_size: 0.05\noutput_dir: ./outputs/out\n\nadapter: qlora\n\
         lora_model_dir:\n\nsequence_len: 4096\nsample_packing: true\nlora_r: 32\nlora_alpha: 16\nlora_dropout: 0.05\n\
         lora_target_modules:\n  - q_proj\n  - v_proj\nlora_target_linear:\n\ngradient_accumulation_steps: 4\nmicro_batch_size: 2\n\
         num_epochs: 4\noptimizer: paged_adamw_32bit\nlr_scheduler: cosine\nlearning_rate: 0.0002\nbf16: auto\ntf32: false\n\
         gradient_checkpointing: true\nflash_attention: true\nwarmup_ratio: 0.1\nweight_decay: 0.0\nwandb_project: mine\n",
        "axolotl.yml",
    );
    has(
        &found,
        &[
            "[model]",
            "path = \"org/base-8b\"",
            "frozen_weights = \"nf4\"",
            "activations = \"recompute\"",
            "train = [\"rows/a.jsonl\", \"rows/b.jsonl\"]",
            "format = \"alpaca\"",
            "eval_fraction = 0.05",
            "max_length = 4096",
            "packing = true",
            "method = \"lora\"",
            "r = 32",
            "lora_dropout = 0.05",
            "target_modules = [\"q_proj\", \"v_proj\"]",
            "name = \"adamw\"",
            "learning_rate = 0.0002",
            "name = \"cosine\"",
            "batch_size = 2",
            "num_epochs = 4",
        ],
    );
    leaves(&found, &["bf16", "flash_attention", "wandb_project"]);
}

#[test]
fn llama_factory() {
    let found = keys(
        "### model\nmodel_name_or_path: org/base\ntrust_remote_code: true\n\n### method\nstage: sft\ndo_train: true\n\
         finetuning_type: lora\nlora_rank: 8\nlora_target: all\n\n### dataset\ndataset: rows.jsonl\ncutoff_len: 2048\nmax_samples: 1000\n\n\
         ### output\noutput_dir: saves/out\nlogging_steps: 10\nsave_steps: 500\nplot_loss: true\n\n### train\n\
         per_device_train_batch_size: 1\ngradient_accumulation_steps: 8\nlearning_rate: 1.0e-4\nnum_train_epochs: 3.0\n\
         lr_scheduler_type: cosine\nwarmup_ratio: 0.1\nbf16: true\nuse_badam: false\nresume_from_checkpoint: null\n",
        "llamafactory.yaml",
    );
    has(
        &found,
        &[
            "stage = \"sft\"",
            "target_modules = \"all-linear\"",
            "r = 8",
            "train = \"rows.jsonl\"",
            "limit = 1000",
            "dtype = \"bf16\"",
            "learning_rate = 0.0001",
            "gradient_accumulation_steps = 8",
        ],
    );
    assert!(
        found
            .1
            .left
            .iter()
            .any(|(name, why)| name == "trust_remote_code" && why.contains("never runs code"))
    );
}

#[test]
fn trl_and_mlx() {
    let trl = keys(
        "{\"model_name_or_path\": \"org/base\", \"dataset_name\": \"rows.jsonl\", \"learning_rate\": 2e-05, \"use_peft\": true, \"lora_r\": 16,\
         \"adam_beta1\": 0.9, \"adam_beta2\": 0.95, \"optim\": \"adamw_8bit\", \"max_length\": 1024, \"completion_only_loss\": true,\
         \"gradient_checkpointing\": true, \"report_to\": \"none\", \"neftune_noise_alpha\": 5}",
        "trl.json",
    );
    has(
        &trl,
        &[
            "betas = [0.9, 0.95]",
            "state = \"int8\"",
            "train_on = \"completion\"",
            "learning_rate = 2e-5",
            "max_length = 1024",
            "neftune_noise_alpha = 5",
        ],
    );
    let mlx = keys(
        "model: org/base\ntrain: true\nfine_tune_type: lora\ndata: rows\nseed: 3\nnum_layers: 16\nbatch_size: 4\niters: 1000\n\
         steps_per_report: 10\nsave_every: 100\nadapter_path: adapters\nmax_seq_length: 2048\n\
         grad_checkpoint: false\nlora_parameters:\n  keys: [\"self_attn.q_proj\"]\n  rank: 8\n  scale: 20.0\n  dropout: 0.0\n\
         lr_schedule:\n  name: cosine_decay\n  warmup: 100\n  arguments: [1e-5, 1000, 1e-7]\n",
        "mlx.yaml",
    );
    has(
        &mlx,
        &[
            "r = 8",
            "lora_alpha = 160.0",
            "max_steps = 1000",
            "save_steps = 100",
            "name = \"cosine\"",
            "learning_rate = 1e-5",
            "seed = 3",
        ],
    );
}

#[test]
fn other_files_are_refused() {
    for text in ["- a\n- b\n", "", "[1]", "a: |\n  b\n"] {
        assert!(import(text, "x.yaml").is_err(), "{text:?}");
    }
}
