//! Tests of recipes that are made of the configurations of other tools.

use super::*;
use crate::recipe;

mod of_preferences;
mod of_trl;

/// The keys of the recipe.
fn lines(text: &str, name: &str) -> (Vec<String>, ImportedRecipe) {
    let imported = import(text, name, None).unwrap();
    let lines = imported.text.lines();
    let keys = lines.map(|l| l.split(" # ").next().unwrap().trim().to_string());
    (keys.collect(), imported)
}

const REGISTRY: &str = r#"{
    "pairs": {"file_name": "pairs.json", "ranking": true, "columns": {"prompt": "instruction", "chosen": "chosen", "rejected": "rejected"}},
    "own": {"file_name": "own.jsonl", "num_samples": 100, "columns": {"prompt": "question", "response": "reply", "images": "pictures"}},
    "chat": {"hf_hub_url": "org/chat", "subset": "en", "split": "train_sft", "formatting": "sharegpt",
        "columns": {"messages": "turns"},
        "tags": {"role_tag": "who", "content_tag": "says", "user_tag": "client", "assistant_tag": "agent"}},
    "script": {"script_url": "loader"}
}"#;

fn with_registry(text: &str) -> ImportedRecipe {
    import(text, "lf.yaml", Some(&Registry::read(REGISTRY, "data/").unwrap())).unwrap()
}

/// The recipe of an import is valid and has these lines; these keys are left.
fn reads(text: &str, wanted: &[&str], left: &[&str]) {
    let imported = with_registry(text);
    let parsed = recipe::parse(&imported.text, "r.toml", &[]);
    assert!(
        parsed.is_ok(),
        "{}\n{:?}",
        imported.text,
        parsed.err().map(|e| e.to_string())
    );
    for line in wanted {
        assert!(imported.text.contains(&format!("{line} ")), "{line}\n{}", imported.text);
    }
    assert!(!imported.text.contains("rows are missing"), "{}", imported.text);
    let names: Vec<&str> = imported.left.iter().map(|(name, _)| name.as_str()).collect();
    assert_eq!(names, left);
}

#[test]
fn names_of_dataset_info_are_files_with_their_columns() {
    const HEAD: &str = "model_name_or_path: m\nfinetuning_type: lora\n";
    reads(
        &format!("{HEAD}stage: dpo\ndataset: pairs\n"),
        &["train = \"data/pairs.json\""],
        &[],
    );
    reads(
        &format!("{HEAD}stage: sft\ndataset: own\neval_dataset: chat\n"),
        &[
            "train = \"data/own.jsonl\"",
            "limit = 100",
            "columns = { prompt = \"question\", completion = \"reply\" }",
            "eval = [\"org/chat\"]",
        ],
        &["dataset_info.json: own: images", "eval_dataset"],
    );
    reads(
        &format!("{HEAD}stage: sft\ndataset: own, chat, script\n"),
        &[
            "sources = [{ path = \"data/own.jsonl\", limit = 100, columns = { prompt = \"question\", completion = \"reply\" } }, \
           { path = \"org/chat\", config = \"en\", split = \"train_sft\", columns = { messages = \"turns\", role = \"who\", content = \"says\" }, \
           roles = { \"client\" = \"user\", \"agent\" = \"assistant\" } }, { path = \"script\" }]",
        ],
        &["dataset_info.json: own: images", "dataset"],
    );
    let unknown = import(&format!("{HEAD}dataset: own\n"), "lf.yaml", None).unwrap();
    assert!(
        unknown.left[0]
            .1
            .contains("no `data/dataset_info.json` that says what `own` is"),
        "{:?}",
        unknown.left
    );
}

/// The keys of the recipe, which must be valid.
fn keys(text: &str, name: &str) -> (Vec<String>, ImportedRecipe) {
    let (lines, imported) = lines(text, name);
    let parsed = recipe::parse(&imported.text, "r.toml", &[]);
    assert!(
        parsed.is_ok(),
        "{}\n{}",
        imported.text,
        parsed.err().map(|e| e.to_string()).unwrap_or_default()
    );
    (lines, imported)
}

fn has(found: &(Vec<String>, ImportedRecipe), wanted: &[&str]) {
    for line in wanted {
        assert!(found.0.iter().any(|l| l == line), "{line}\n{}", found.1.text);
    }
}

fn leaves(found: &(Vec<String>, ImportedRecipe), wanted: &[&str]) {
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
    leaves(&found, &["flash_attention", "wandb_project"]);
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
            // MLX evaluates on `valid.jsonl` of the folder every 200 steps.
            "eval = \"rows\"",
            "eval_steps = 200",
        ],
    );
}

#[test]
fn a_stage_of_llama_factory_may_be_in_another_key() {
    let simpo = keys(
        "model_name_or_path: org/base\nstage: dpo\nfinetuning_type: lora\npref_beta: 2.0\npref_loss: simpo\nsimpo_gamma: 1.0\n\
         dataset: dpo_en_demo\ntemplate: llama3\nlr_scheduler_type: cosine_with_min_lr\nlr_scheduler_kwargs: {\"min_lr_rate\": 0.1}\n\
         report_to: tensorboard\nrun_name: x\noutput_dir: out\nlearning_rate: 1e-6\n",
        "simpo.yaml",
    );
    has(
        &simpo,
        &[
            "stage = \"simpo\"",
            "beta = 2.0",
            "simpo_gamma = 1.0",
            "min_lr_ratio = 0.1",
            "chat_template = \"llama3\"",
            "report_to = \"tensorboard\"",
            "output_dir = \"out\"",
            // Defaults of the tool.
            "r = 8",
            "lora_alpha = 16",
            "packing = false",
            "batch_size = 8",
            "warmup_ratio = 0.0",
        ],
    );
    leaves(&simpo, &["dataset", "run_name"]);
    let badam = keys(
        "model_name_or_path: org/base\nfinetuning_type: full\nuse_badam: true\nbadam_mode: ratio\ndataset: rows.json\n",
        "badam.yaml",
    );
    has(
        &badam,
        &["method = \"block\"", "partition = \"ratio\"", "learning_rate = 5e-5"],
    );
    assert!(!badam.1.text.contains("\"full\""), "{}", badam.1.text);
}

#[test]
fn tables_and_texts_of_axolotl() {
    // It has no rewards.
    let found = lines(
        "base_model: org/base\nrl: grpo\ntrl:\n  beta: 0.001\n  use_vllm: true\n  num_generations: 8\n  max_completion_length: 512\n\
         datasets:\n  - path: openai/gsm8k\n    name: main\n    type: rewards.transform\nspecial_tokens:\n  pad_token: <pad>\n\
         chat_template_jinja: |\n  {% for m in messages %}\n  {{ m }}  # text\n\n  {% endfor %}\nchat_template_kwargs:\n  enable_thinking: false\n\
         bf16: auto\noptimizer: adamw_torch_fused\nlr_scheduler: rex\nval_set_size: 100\nmax_steps: 20\n",
        "grpo.yml",
    );
    has(
        &found,
        &[
            "stage = \"grpo\"",
            "[rlhf.grpo]",
            "beta = 0.001",
            "num_generations = 8",
            "config = \"main\"",
            "template_kwargs = { enable_thinking = false }",
            "dtype = \"bf16\"",
            "name = \"adamw\"",
            "method = \"full\"",
        ],
    );
    leaves(
        &found,
        &[
            "trl.use_vllm",
            "datasets: type rewards.transform",
            "special_tokens.pad_token",
            "chat_template_jinja",
            "lr_scheduler",
            "val_set_size",
        ],
    );
    let pretrain = keys(
        "base_model: org/base\npretraining_dataset:\n  - path: allenai/c4\n    name: en\n    type: pretrain\nmax_steps: 10\n\
         unfrozen_parameters:\n  - ^lm_head.weight$\n  - model.layers.2[0-9]+.mlp\n",
        "pretrain.yml",
    );
    has(
        &pretrain,
        &[
            "stage = \"pretrain\"",
            "train = \"allenai/c4\"",
            "method = \"freeze\"",
            "trainable_layers = 0",
            "trainable = [\"lm_head.weight\"]",
        ],
    );
}

#[test]
fn schedules_and_optimizers_of_mlx() {
    let found = keys(
        "model: m\ntrain: true\ndata: rows\niters: 1000\noptimizer: adamw\noptimizer_config:\n  adamw:\n    betas: [0.9, 0.98]\n\
         \x20   eps: 1e-6\nlearning_rate: 1e-3\nlr_schedule:\n  name: linear_schedule\n  warmup: 50\n  arguments: [2e-5, 0.0, 950]\n\
         steps_per_eval: 200\nadapter_path: adapters\nnum_layers: -1\n",
        "mlx.yaml",
    );
    has(
        &found,
        &[
            "eval = \"rows\"",
            "train_on = \"all\"",
            "name = \"linear\"",
            "learning_rate = 2e-5",
            "warmup_steps = 50",
            "betas = [0.9, 0.98]",
            "weight_decay = 0.01",
            "lora_alpha = 160.0",
            "max_grad_norm = 0.0",
            "output_dir = \"adapters\"",
        ],
    );
    // MLX has no bias correction.
    leaves(&found, &["optimizer"]);
    let hub = keys(
        "model: m\niters: 5\nhf_dataset:\n  path: billsum\n  train_split: train[:100]\n  prompt_feature: text\n  completion_feature: summary\n\
         num_layers: -1\nlr_schedule:\n  name: step_decay\n  arguments: [1e-1, 0.9, 10]\n",
        "hub.yaml",
    );
    has(
        &hub,
        &[
            "train = \"billsum\"",
            "columns = { prompt = \"text\", completion = \"summary\" }",
            "learning_rate = 0.1",
        ],
    );
    leaves(&hub, &["hf_dataset: train_split", "lr_schedule", "optimizer"]);
}

/// The file has exactly these keys without a counterpart. Each is listed with a reason that has this text, in the recipe too.
fn notes(text: &str, name: &str, wanted: &[(&str, &str)]) {
    let found = keys(text, name);
    let names: Vec<&str> = wanted.iter().map(|(key, _)| *key).collect();
    leaves(&found, &names);
    for ((key, why), (_, part)) in found.1.left.iter().zip(wanted) {
        assert!(why.contains(part), "{key}: {why}");
    }
    let (_, end) = found.1.text.split_once("# Without a counterpart:\n").unwrap();
    let listed: Vec<String> = found
        .1
        .left
        .iter()
        .map(|(key, why)| format!("#   {key}: {why}"))
        .collect();
    assert_eq!(end.lines().collect::<Vec<_>>(), listed);
}

#[test]
fn what_axolotl_has_and_ft_has_not_is_listed_with_the_reason() {
    notes(
        "base_model: org/base\nadapter: lora\ndatasets:\n  - path: rows.jsonl\n    type: alpaca\n    drop_system_message: true\n\
         sequence_len: 2048\nflash_attention: true\nwandb_project: mine\nlr_scheduler: rex\nval_set_size: 100\n\
         special_tokens:\n  pad_token: <pad>\nplugins:\n  - a.b\n",
        "axolotl.yml",
        &[
            ("datasets: drop_system_message", "a system message of a row stays"),
            ("flash_attention", "attention, loss and updates are always fused"),
            ("wandb_project", "ft sends nothing to a tracker"),
            ("lr_scheduler", "ft has no such schedule: write `cosine`"),
            ("val_set_size", "write the part of the rows as `data.eval_fraction`"),
            ("special_tokens.pad_token", "`data.new_special_tokens` adds tokens"),
            ("plugins", "ft has no plugins"),
        ],
    );
}

#[test]
fn what_llama_factory_has_and_ft_has_not_is_listed_with_the_reason() {
    notes(
        "model_name_or_path: org/base\nstage: sft\nfinetuning_type: lora\ndataset: rows.jsonl\ncutoff_len: 2048\n\
         trust_remote_code: true\nplot_loss: true\noverwrite_cache: true\ntemplate: no_such_template\noptim: muon\n\
         deepspeed: ds.json\noutput_dir: out\nrun_name: first\n",
        "llamafactory.yaml",
        &[
            ("trust_remote_code", "ft never runs code of a model directory"),
            ("plot_loss", "every run writes `curves.svg`"),
            ("overwrite_cache", "rows are read and tokenized before the first step"),
            ("template", "the template of the model is used"),
            ("optim", "ft has no such optimizer: use `adamw`"),
            ("deepspeed", "`distributed.weights = \"sharded\"` divides the weights"),
            (
                "run_name",
                "a name for a tracker; the run directory is `train.output_dir`",
            ),
        ],
    );
}

#[test]
fn what_mlx_has_and_ft_has_not_is_listed_with_the_reason() {
    notes(
        "model: org/base\ntrain: true\ndata: rows\niters: 100\nnum_layers: 16\nval_batches: 25\nlr_schedule:\n  name: step_decay\n  \
         arguments: [1e-1, 0.9, 10]\noptimizer: adamw\noptimizer_config:\n  adamw:\n    fused: true\n\
         lora_parameters:\n  rank: 8\n  scale: 20.0\n  dropout: 0.0\n",
        "mlx.yaml",
        &[
            ("num_layers", "write `tune.lora.layers_to_transform`"),
            ("val_batches", "the loss over all rows of `data.eval`"),
            ("lr_schedule", "ft has no such schedule"),
            ("optimizer_config.adamw.fused", "ft has no such option of an optimizer"),
            ("optimizer", "has no bias correction by default"),
        ],
    );
}

/// A rule is for names whose value decides which key is meant.
#[test]
fn the_names_of_the_rules_are_in_the_docs() {
    let page = include_str!("../../../docs/coming-from.md");
    let arms = concat!(include_str!("rules.rs"), include_str!("trl.rs"))
        .lines()
        .filter(|line| line.starts_with("        \"") && line.contains("=>"));
    let names: Vec<&str> = arms
        .flat_map(|line| {
            line.split(" =>")
                .next()
                .unwrap_or_default()
                .split(" if ")
                .next()
                .unwrap_or_default()
                .split(" | ")
        })
        .map(|name| name.trim().trim_matches('"'))
        .collect();
    assert!(names.len() > 40 && names.contains(&"use_badam"), "{names:?}");
    for name in names {
        assert!(
            page.contains(&format!("`{name}`")) || page.contains(&format!("`{name}:")),
            "{name}"
        );
    }
}

#[test]
fn other_files_are_refused() {
    for text in ["- a\n- b\n", "", "[1]", "a: &x\n  b: 1\n"] {
        assert!(import(text, "x.yaml", None).is_err(), "{text:?}");
    }
}

/// Row W6: no key, value or name of the file adds a line to the recipe, such as a program that the run would start.
#[test]
fn what_the_file_says_adds_no_keys_to_the_recipe() {
    let lines = "\n[rlhf]\nrewards = [\"program:x\"]\n#";
    let json = |key: &str, value: serde_json::Value| {
        let mut all =
            serde_json::json!({"model_name_or_path": "m", "train_file": "t.jsonl", "per_device_train_batch_size": 2});
        all[key] = value;
        all.to_string()
    };
    for (key, value) in [
        (format!("unknown{lines}"), "1".into()),
        (format!("model_name_or_path{lines}"), "1".into()),
        ("model_name_or_path".into(), format!("m\"{lines}").into()),
        ("model_name_or_path".into(), format!("[1]{lines}").into()),
        ("model_name_or_path".into(), "a\"\\".into()),
        ("warmup_steps".into(), format!("1{lines}").into()),
        ("adam_beta1".into(), format!("0.9]{lines}").into()),
        (
            "lr_scheduler_kwargs".into(),
            serde_json::json!({"min_lr_rate": format!("0.1{lines}"), format!("a{lines}"): 1}),
        ),
        ("optimizer".into(), format!("adamw{lines}").into()),
        ("max_new_tokens".into(), format!("5{lines}").into()),
        ("template".into(), format!("x{lines}").into()),
        ("target_modules".into(), serde_json::json!([format!("q_proj{lines}")])),
        ("dataset".into(), format!("x{lines}").into()),
        ("save_steps".into(), format!("5{lines}").into()),
    ] as [(String, serde_json::Value); 14]
    {
        let text = json(&key, value);
        let imported = import(&text, &format!("c.json{lines}"), None).unwrap();
        // What the file says badly is left out.
        let needed = ["model.path=m".to_string(), "data.train=t.jsonl".to_string()];
        let parsed = recipe::parse(&imported.text, "r.toml", &needed);
        let parsed = parsed.unwrap_or_else(|e| panic!("{text}\n{}\n{e}", imported.text));
        assert!(
            !parsed.resolved.contains("program:x") || key == "target_modules",
            "{text}\n{}",
            imported.text
        );
        assert!(!imported.text.contains("\n[rlhf]"), "{text}\n{}", imported.text);
    }
}

/// A file of somebody else starts no program: what does is left to the user.
#[test]
fn programs_of_rewards_are_not_imported() {
    for text in [
        "base_model: m\nrl: grpo\nrewards: [\"program:sh -c 'x'\", exact]\nreward_network: true\ndatasets:\n  - path: t.jsonl\n",
        // An escape of TOML.
        "base_model: m\nrl: grpo\nrewards: '[\"\\u0070rogram:x\"]'\nreward_network: true\ndatasets:\n  - path: t.jsonl\n",
        "base_model: m\nrl: grpo\nrlhf:\n  rewards: \"program:x\"\n  reward_network: true\ndatasets:\n  - path: t.jsonl\n",
    ] {
        let imported = import(text, "c.yaml", None).unwrap();
        let values = imported.text.lines().filter(|line| !line.starts_with('#'));
        let values: Vec<&str> = values.collect();
        assert!(
            !values
                .iter()
                .any(|line| line.contains("program:") || line.contains("reward_network")),
            "{}",
            imported.text
        );
        assert!(!imported.text.contains("[rlhf]"), "{}", imported.text);
        let left: Vec<&str> = imported.left.iter().map(|(_, why)| why.as_str()).collect();
        assert!(left.iter().any(|why| why.contains("starts programs")), "{left:?}");
    }
}
