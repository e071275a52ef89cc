//! Tests of the complete path from text to recipe.

use super::table::*;
use super::value::KeyType;
use super::*;
use crate::base::ErrorKind;

pub(super) const LEAST: &str = "[model]\npath = \"m\"\n[data]\ntrain = \"t.jsonl\"\n";

fn read(text: &str, overrides: &[&str]) -> Result<LoadedRecipe> {
    let overrides: Vec<String> = overrides.iter().map(|s| s.to_string()).collect();
    parse(text, "r.toml", &overrides)
}

pub(super) fn good(text: &str, overrides: &[&str]) -> LoadedRecipe {
    read(text, overrides).unwrap()
}

pub(super) fn bad(text: &str, overrides: &[&str]) -> String {
    let error = read(text, overrides).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Usage);
    error.to_string()
}

/// A recipe with every key written.
const FULL: &str = r#"
[model]
path = "Qwen/Qwen2.5-0.5B-Instruct"
revision = "main"
dtype = "bf16"
device = "auto"
[memory]
budget = "auto"
host_budget = "auto"
goal = "auto"
frozen_weights = "auto"
tier = "auto"
head_chunk = "auto"
activations = "auto"
mlp_chunk = "auto"
[data]
train = "data/train.jsonl"
eval = "data/eval.jsonl"
format = "auto"
render = "auto"
max_length = 2048
long = "auto"
overlap = 1
cache = "auto"
cache_dir = "auto"
cache_limit = "auto"
streaming = false
shuffle_window = 10000
packing = true
packing_length = "auto"
train_on = "assistant"
shuffle = true
chat_template = "auto"
[tune]
method = "block"
[tune.block]
partition = "layer"
layers_per_block = 1
order = "random"
switch_every = "auto"
include_embedding = false
include_lm_head = false
always_active = []
correction = "none"
correction_scope = "all"
warmup_after_switch = 0
[tune.lora]
r = 16
lora_alpha = 32
lora_dropout = 0.0
target_modules = "all-linear"
init_lora_weights = "default"
use_rslora = false
use_dora = false
loraplus_lr_ratio = 1.0
adapter = ""
[optimizer]
name = "adamw"
learning_rate = "auto"
betas = [0.9, 0.999]
eps = 1e-8
weight_decay = 0.0
state = "f32"
[schedule]
name = "cosine"
warmup_ratio = 0.03
[train]
stage = "sft"
num_epochs = "auto"
max_steps = -1
batch_size = 1
gradient_accumulation_steps = "auto"
max_grad_norm = 1.0
seed = 42
logging_steps = 1
eval_steps = 0
save_steps = 100
save_total_limit = 2
output_dir = "runs/sft"
"#;

#[test]
fn the_full_recipe_of_the_design_is_accepted_and_equals_the_defaults() {
    let full = good(FULL, &[]);
    assert_eq!(full.warnings, Vec::<String>::new());
    let least = good(LEAST, &[]);
    let differ: Vec<&String> = full
        .values
        .iter()
        .zip(&least.values)
        .filter(|(a, b)| a.1 != b.1)
        .map(|(a, _)| &a.0)
        .collect();
    assert_eq!(differ, ["model.path", "data.train", "data.eval"]);
    let r = full.recipe;
    assert_eq!(
        (r.data.max_length, r.train.max_steps, r.tune.block.switch_every),
        (2048, -1, None)
    );
    assert_eq!(r.optimizer.betas, [0.9, 0.999]);
    assert!(r.tune.lora.target_modules.is_empty() && r.tune.lora.adapter.is_none());
}

#[test]
fn every_default_is_valid_and_has_a_reason() {
    for key in table::keys() {
        if key.default.is_empty() {
            continue;
        }
        assert!(!key.reason.is_empty(), "{}", key.path.0);
        let value = resolved::toml(&check::default_of(key));
        let again = good(LEAST, &[&format!("{}={}", key.path.0, value)]);
        let (_, read) = again.values.iter().find(|(p, _)| *p == key.path.0).unwrap();
        assert_eq!(*read, value, "{}", key.path.0);
        let written = good(LEAST, &[&format!("{}={}", key.path.0, key.default)]);
        assert_eq!(written.values, again.values, "{}", key.path.0);
        assert!(table::TABLES.iter().any(|(t, _)| *t == key.table));
        if let Some((other, _)) = key.when {
            assert!(table::find(other.0).is_some(), "{other}");
        }
    }
}

/// A value of the key's kind that is not its default.
fn another(key: &RecipeKey) -> String {
    // Keys whose rules accept only some values of their kind.
    let special = [
        (Model::device, "cpu"),
        (Memory::frozen_weights, "bf16"),
        (Memory::group_size, "128"),
        (Data::prompt_template, "a {x}"),
    ];
    if let Some((_, value)) = special.iter().find(|(path, _)| *path == key.path) {
        return value.to_string();
    }
    let number = |candidates: &[f64]| {
        let default = key.default.parse().unwrap_or(f64::NAN);
        let fits = |x: &&f64| key.range.contains(**x) && **x != default;
        candidates
            .iter()
            .find(fits)
            .unwrap_or_else(|| panic!("{}", key.path))
            .to_string()
    };
    match key.kind {
        ValueKind::Text => "x".into(),
        ValueKind::Name(names) => {
            let other = names.iter().find(|name| format!("{name:?}") != key.default);
            other.unwrap().to_string()
        }
        ValueKind::Flag => (key.default == "false").to_string(),
        ValueKind::Integer => number(&[0.0, 1.0, 2.0, 3.0, 16.0]),
        ValueKind::Number => number(&[0.5, 0.25, 3.0, 0.75]),
        ValueKind::Pair => "[0.5, 0.6]".into(),
        ValueKind::Texts => "[\"x=2\"]".into(),
        ValueKind::Integers | ValueKind::Numbers => "[1, 2]".into(),
        ValueKind::Pairs => "[[1, 2], [3, 6]]".into(),
        ValueKind::Size => "2GiB".into(),
        ValueKind::Map(names) => {
            let name = names.iter().find(|name| **name == "bf16").unwrap_or(&names[0]);
            format!("{{ \"layers.0.\" = {name:?} }}")
        }
        ValueKind::Fields(names) => format!("{{ {} = \"a.b[0]\" }}", names[0]),
        ValueKind::Tables(_) => "[{ path = \"a.jsonl\" }, { path = [\"b\"], columns = { prompt = \"q\" } }]".into(),
        ValueKind::Free => "{ a = 1, b = { c = [\"x\", 0.5], d = false } }".into(),
    }
}

/// Sets every key to a value other than the default and checks that it reaches the recipe.
#[test]
fn every_key_reaches_the_recipe() {
    let plain = [vec![], vec!["data.eval_fraction=0.2"]].map(|o| format!("{:?}", good(LEAST, &o).recipe));
    for key in table::keys() {
        let mut arguments = vec![format!("{}={}", key.path, another(key))];
        if key.path == Train::eval_steps {
            arguments.push("data.eval_fraction=0.2".into());
        }
        if key.path == Data::streaming {
            arguments.push("train.max_steps=3".into());
        }
        let changed = parse(LEAST, "r.toml", &arguments).unwrap();
        assert_ne!(
            format!("{:?}", changed.recipe),
            plain[usize::from(arguments.len() > 1)],
            "{}",
            key.path
        );
    }
}

section! {
    /// A table that only this test has.
    pub struct Example in "example", when Train::stage = ["sft", "dpo"] {
        /// How far
        /// it goes.
        distance: usize = 3, "close", in between(1, 9);
        /// How it goes.
        manner: Method = "lora", "as usual", when Self::distance = ["4"];
        /// From where.
        start: String;
    }
}

/// A row is all that a key needs: parsing, range, typed value, reference and schema follow.
#[test]
fn a_key_is_declared_in_one_place() {
    let read = |arguments: &[&str]| {
        let arguments: Vec<String> = arguments.iter().map(|a| a.to_string()).collect();
        let mut draft = Draft::new("", "r.toml", &arguments);
        let mut values = KeyValues::defaults(Example::KEYS.iter());
        check::check(&mut draft, &mut values, &mut Vec::new());
        let problems: String = draft.problems.iter().map(|p| p.error.to_string()).collect();
        (Example::read(&values), problems)
    };
    let (example, problems) = read(&["example.start=here", "example.distance=4"]);
    assert_eq!(
        (example.distance, example.manner, &*example.start),
        (4, Method::Lora, "here")
    );
    assert!(problems.is_empty(), "{problems}");
    let (example, problems) = read(&["example.distance=10", "example.manner=ful"]);
    assert_eq!((example.distance, example.start), (3, String::new()));
    assert!(
        problems.contains("found 10, expected a whole number from 1 to 9"),
        "{problems}"
    );
    assert!(problems.contains("did you mean `full`?"), "{problems}");
    let rows: String = Example::KEYS.iter().map(resolved::row).collect();
    assert_eq!(
        rows,
        "| `distance` | a whole number from 1 to 9 | `3` | close | How far it goes. Used with `train.stage` = `sft` or `dpo`. |\n\
         | `manner` | one of full, block, lora, freeze | `\"lora\"` | as usual | How it goes. Used with `example.distance` = `4`. |\n\
         | `start` | a string | required | - | From where. Used with `train.stage` = `sft` or `dpo`. |\n"
    );
    let schema = schema::property(&Example::KEYS[0]);
    assert_eq!(
        (&schema["minimum"], &schema["maximum"], &schema["default"]),
        (&1.into(), &9.into(), &3.into())
    );
    assert_eq!(Example::TABLE, ("example", "A table that only this test has."));
}

/// The condition of a key can become true, and every table is printed.
#[test]
fn conditions_name_values_of_other_keys() {
    for key in table::keys() {
        assert!(
            table::TABLES.iter().any(|(table, _)| *table == key.table),
            "{}",
            key.path
        );
        let Some((other, values)) = key.when else { continue };
        let other = table::find(other.0).unwrap();
        for value in values {
            let accepted = match other.kind {
                ValueKind::Name(names) => names.contains(value),
                _ => other.accepts_auto() && *value == "auto",
            };
            assert!(accepted, "`{value}` is not a value of `{}`", other.path);
        }
    }
}

/// Row R1.
#[test]
fn all_faults_at_once_each_with_its_place() {
    let text = "[model]\npath = \"m\"\nmax_steps = 3\n[data]\ntrain = \"t\"\npacking = \"yes\"\n\
                [optimizer]\nlearnin_rate = 1e-4\nname = \"adam\"\n[train]\nbatch_size = 0\n[optim]\nlr = 1\n";
    let error = bad(text, &["train.max_steps=1.5", "max_steps=2", "oops"]);
    let expected = "the recipe has 9 errors

error: unknown key `max_steps` in `[model]`
  --> r.toml:3:1
hint: this key belongs in [train]

error: `data.packing` has the wrong type
  --> r.toml:6:11
  found the string \"yes\", expected `true` or `false`
hint: write `true`

error: unknown key `learnin_rate` in `[optimizer]`
  --> r.toml:8:1
hint: did you mean `learning_rate`?

error: `adam` is not a value of `optimizer.name`
  --> r.toml:9:8
  expected one of adamw, sgd, lion, adafactor
hint: did you mean `adamw`?

error: `train.batch_size` is out of range
  --> r.toml:11:14
  found 0, expected a whole number from 1 to 1048576

error: unknown table `[optim]`
  --> r.toml:12:2
hint: did you mean `[optimizer]`?

error: `train.max_steps` has the wrong type
  --> argument `train.max_steps=1.5`
  found the number 1.5, expected a whole number, at least -1

error: unknown key `max_steps` outside of any table
  --> argument `max_steps=2`
hint: write `train.max_steps=2`

error: argument is not `key=value`
  --> argument `oops`
hint: write the dotted recipe path and the value, as in `train.max_steps=20`";
    assert_eq!(error, expected);
}

/// Row R2.
#[test]
fn faults_in_other_shapes_of_toml() {
    let e = bad("model = { path = \"m\", pth = 1 }\n[data]\ntrain = \"t\"\n", &[]);
    assert!(e.contains("`pth` in `[model]`\n  --> r.toml:1:23"), "{e}");
    let e = bad(&format!("{LEAST}[train.batch_size]\nx = 1\n"), &[]);
    assert!(
        e.contains("`train.batch_size` has the wrong type") && !e.contains("errors"),
        "{e}"
    );
    let e = bad(&format!("{LEAST}[[train]]\nseed = 1\n"), &[]);
    assert!(e.contains("`train` is a table"), "{e}");
    let e = bad("tune = \"block\"\n[model]\npath = \"m\"\n[data]\ntrain = \"t\"\n", &[]);
    assert!(e.contains("`tune` is a table\n  --> r.toml:1:8"), "{e}");
    let e = bad("[model]\npath = \n", &[]);
    assert!(
        e.contains("not valid TOML\n  --> r.toml:2:") && !e.contains("missing"),
        "{e}"
    );
    let e = bad("[model]\npath = \"m\"\npath = \"n\"\n", &[]);
    assert!(e.contains("not valid TOML\n  --> r.toml:3:1"), "{e}");
    let e = bad("", &[]);
    assert!(
        e.contains("`model.path` is missing") && e.contains("`data.train` is missing"),
        "{e}"
    );
    let e = bad(&format!("{LEAST}eval = [\"a\", 3]\n"), &[]);
    assert!(e.contains("item of the wrong type\n  --> r.toml:5:14"), "{e}");
    let e = bad(LEAST, &["train.output_dir=\"a", "tune.block={order=\"fixed\"}"]);
    assert!(
        e.contains("not valid TOML") && e.contains("`tune.block` is a table"),
        "{e}"
    );
    for value in ["nan", "inf", "-1", "-inf"] {
        assert!(bad(LEAST, &[&format!("optimizer.learning_rate={value}")]).contains("out of range"));
    }
    let e = bad(LEAST, &["train.seed=\"42\""]);
    assert!(e.contains("without quotes"), "{e}");
    let e = bad(LEAST, &["model.device=gpu"]);
    assert!(e.contains("expected `auto`, `cpu`, or `cuda:0`"), "{e}");
    good(LEAST, &["model.device=cuda:1"]);
}

#[test]
fn arguments_replace_and_bare_words_are_text() {
    let l = good(
        LEAST,
        &[
            "train.max_steps=20",
            "tune.method=lora",
            "data.eval=a b.jsonl",
            "model.revision=1234",
        ],
    );
    assert_eq!((l.recipe.train.max_steps, l.recipe.tune.method), (20, Method::Lora));
    assert_eq!(l.recipe.data.eval, ["a b.jsonl"]);
    assert_eq!(l.recipe.model.revision, "1234");
    assert!(l.resolved.contains("max_steps = 20  # argument\n"), "{}", l.resolved);
    assert!(l.resolved.contains("path = \"m\"  # recipe\n"));
    assert!(l.resolved.contains("seed = 42  # default: as in transformers\n"));
    assert_eq!(good(LEAST, &["train.seed=1", "train.seed=2"]).recipe.train.seed, 2);
    let twice = good(LEAST, &["train.seed=1", "train.seed=2"]).warnings;
    assert!(twice[0].contains("given twice"));
    // An argument overrides the other key of the pair in the recipe; two keys of the same origin contradict.
    let text = format!("{LEAST}eval = \"e\"\n[schedule]\nwarmup_ratio = 0.1\n");
    let l = good(&text, &["data.eval_fraction=0.5", "schedule.warmup_steps=3"]);
    assert!(l.recipe.data.eval.is_empty() && l.recipe.data.eval_fraction == 0.5);
    assert_eq!(l.recipe.schedule.warmup_steps, Some(3));
    assert_eq!(l.warnings.len(), 2);
    let e = bad(&text, &["data.eval=x", "data.eval_fraction=0.5"]);
    assert!(e.contains("`data.eval` and `data.eval_fraction` contradict"), "{e}");
    let e = bad(&format!("{text}warmup_steps = 3\n"), &[]);
    assert!(
        e.contains("`schedule.warmup_steps` and `schedule.warmup_ratio` contradict each other\n  --> r.toml:8:16"),
        "{e}"
    );
}

#[test]
fn what_is_not_built_is_refused_by_name() {
    assert!(bad(LEAST, &["memory.frozen_weights=f32"]).contains("has no effect"));
}

#[test]
fn products_in_8_bits_need_frozen_int8_weights_and_a_gpu() {
    good(LEAST, &["memory.frozen_products=int8"]);
    good(LEAST, &["memory.frozen_products=fp8", "memory.frozen_weights=int8"]);
    for (setting, text) in [
        ("tune.method=full", "every weight is trained"),
        ("model.device=cpu", "a run on the CPU"),
        ("memory.frozen_weights=nf4", "stored as nf4"),
        ("memory.group_size=128", "groups of columns"),
    ] {
        let e = bad(LEAST, &["memory.frozen_products=int8", setting]);
        assert!(
            e.contains("`memory.frozen_products = \"int8\"` is not possible here") && e.contains(text),
            "{e}"
        );
    }
}

#[test]
fn keys_without_effect_are_warned_of() {
    let text = format!("{LEAST}[tune.lora]\nr = 8\n[optimizer]\nmomentum = 0.9\nbetas = [0.9, 0.999]\n");
    let l = good(
        &text,
        &["train.max_steps=5", "train.num_epochs=3", "tune.block.start_block=2"],
    );
    assert_eq!(
        l.warnings,
        [
            "`tune.block.start_block` has no effect with `tune.block.order = \"random\"` (argument `tune.block.start_block=2`)",
            "`tune.lora.r` has no effect with `tune.method = \"block\"` (r.toml:6:5)",
            "`optimizer.momentum` has no effect with `optimizer.name = \"adamw\"` (r.toml:8:12)",
            "`train.num_epochs` has no effect with `train.max_steps = 5` (argument `train.num_epochs=3`)",
        ]
    );
    assert!(
        l.resolved
            .contains("r = 8  # recipe; no effect with tune.method = \"block\"")
    );
    assert!(l.resolved.contains("# lora_alpha = 32.0  # no effect with"));
    assert!(
        good(&text, &["tune.method=lora", "optimizer.name=sgd"])
            .warnings
            .is_empty()
    );
    for (arguments, why) in [
        (&["model.path=src", "model.revision=v1"][..], "model.path = \"src\""),
        (
            &["model.path=shape:tiny", "model.revision=v1"],
            "model.path = \"shape:tiny\"",
        ),
        (
            &["memory.tier=device", "memory.head_chunk=4096"],
            "memory.tier = \"device\"",
        ),
        (&["train.predict_with_generate=true"], "data.eval = []"),
        (
            &["data.format=messages", "data.render=plain"],
            "data.format = \"messages\"",
        ),
        (
            &["tune.method=lora", "optimizer.master=stochastic"],
            "tune.method = \"lora\"",
        ),
    ] {
        let warnings = good(LEAST, arguments).warnings;
        assert!(warnings.len() == 1 && warnings[0].contains(why), "{warnings:?}");
    }
    for arguments in [
        &["model.revision=v1", "memory.head_chunk=4096"][..],
        &["memory.double_quantization=false", "memory.group_size=128"],
        // The template is written to `final/`.
        &["data.format=text", "data.chat_template=t.jinja"],
    ] {
        assert!(good(LEAST, arguments).warnings.is_empty(), "{arguments:?}");
    }
}

#[test]
fn a_free_table_has_any_values() {
    let text = format!(
        "{LEAST}[data.template_kwargs]\nenable_thinking = false\nlevels = [1, 2.5, \"x\"]\n[data.template_kwargs.deep]\na = {{ b = 1 }}\n"
    );
    let l = good(
        &text,
        &[
            "data.template_kwargs.date=2025-01-02",
            "data.template_kwargs.deep.c=true",
        ],
    );
    let wanted = serde_json::json!({"enable_thinking": false, "levels": [1, 2.5, "x"], "deep": {"a": {"b": 1}, "c": true}, "date": "2025-01-02"});
    assert_eq!(serde_json::Value::Object(l.recipe.data.template_kwargs.clone()), wanted);
    let again = again(&l.values.iter().cloned().collect()).unwrap();
    assert_eq!(again.recipe.data.template_kwargs, l.recipe.data.template_kwargs);
    // A table as an argument replaces that of the recipe.
    let l = good(&text, &["data.template_kwargs={ a = 1, b = { c = \"d\" } }"]);
    assert_eq!(
        serde_json::Value::Object(l.recipe.data.template_kwargs),
        serde_json::json!({"a": 1, "b": {"c": "d"}})
    );
    let e = bad(
        &format!("{LEAST}template_kwargs = {{ a = 2025-01-02, messages = [] }}\n"),
        &[],
    );
    assert!(
        e.contains("`a` in `data.template_kwargs` has the wrong type\n  --> r.toml:5:25"),
        "{e}"
    );
    let e = bad(LEAST, &["data.template_kwargs.messages=1"]);
    assert!(
        e.contains("`messages` in `data.template_kwargs` comes from the rows"),
        "{e}"
    );
    let e = bad(LEAST, &["data.new_tokens=[\"a\"]", "data.new_special_tokens=[\"a\"]"]);
    assert!(e.contains("`a` is given twice"), "{e}");
    let e = bad(
        LEAST,
        &["data.new_tokens=[\"a\"]", "tune.method=lora", "tune.new_tokens=none"],
    );
    assert!(e.contains("cannot store new rows"), "{e}");
}

#[test]
fn the_resolved_recipe_reads_back_to_the_same_recipe() {
    for overrides in [
        vec![
            "data.template_kwargs={ a = [1, \"b\"], c = { d = 0.5 } }",
            "data.new_tokens=[\"x\"]",
        ],
        vec![
            "schedule.warmup_steps=5",
            "optimizer.learning_rate=3.3e-7",
            "data.train=[\"a\\\"b\", 'c']",
        ],
        vec![
            "tune.method=lora",
            "tune.lora.target_modules=[\"q_proj\"]",
            "memory.budget=22.5GiB",
            "train.max_steps=3",
        ],
        vec![
            "tune.method=freeze",
            "optimizer.name=sgd",
            "optimizer.momentum=0.1",
            "train.num_epochs=0.3333333333333333",
        ],
    ] {
        let first = good(LEAST, &overrides);
        let second = good(&first.resolved, &[]);
        assert_eq!(format!("{:?}", first.recipe), format!("{:?}", second.recipe));
        assert_eq!(first.values, second.values);
    }
}
