//! The model card: the model, the data, the method and the result of the training. It says only what the files of the run say, without
//! what looks like a secret.

use super::has_own_base;
use crate::base::units::{bytes, count, duration};
use crate::base::{files, secrets};
use crate::formats::index::stays_inside;
use crate::history::{Curve, RunRecord};
use crate::hub;
use crate::recipe::ModelRef;
use serde_json::Value;
use std::path::Path;
use std::time::Duration;

/// Steps in the mean of the last loss.
const RECENT: usize = 10;

pub struct ModelCard<'a> {
    pub id: &'a str,
    pub license: Option<&'a str>,
    pub adapter: bool,
    pub directory: &'a Path,
    pub run: Option<(&'a Path, &'a RunRecord)>,
}

impl ModelCard<'_> {
    pub fn text(&self) -> String {
        let mut out = self.header();
        let name = self.id.rsplit('/').next().unwrap_or(self.id);
        out.push_str(&format!("\n# {name}\n\n{}\n", self.summary()));
        out.push_str(&self.usage());
        if let Some((dir, record)) = self.run {
            out.push_str(&data(dir, record));
            out.push_str(&results(record));
            out.push_str(&how(dir));
        } else {
            out.push_str(
                "\n## Training\n\nNo run directory was given, so this card does not say how it was trained.\n",
            );
        }
        out.push_str(&self.license_text());
        out
    }

    fn setting(&self, key: &str) -> &str {
        self.run.map_or("", |(_, record)| record.setting(key))
    }

    /// The base model: of an adapter, the one in its config. One in the directory of the adapter has no name.
    fn base(&self) -> Option<String> {
        let config = own_text(&self.directory.join("adapter_config.json"));
        let config = config.filter(|_| !has_own_base(self.directory));
        let config: Option<Value> = config.and_then(|text| serde_json::from_str(&text).ok());
        let named = config.and_then(|c| Some(c["base_model_name_or_path"].as_str()?.to_string()));
        let of_run = || {
            let (_, record) = self.run?;
            let base = record.place("model.path").trim_matches('"');
            (!base.is_empty()).then(|| base.to_string())
        };
        named.or_else(of_run)
    }

    /// The id of the base on the hub. A directory says nothing elsewhere.
    fn base_id(&self) -> Option<String> {
        match ModelRef::new(&self.base()?) {
            ModelRef::Hub(text) => Some(hub::split_revision(&text).map_or(text.clone(), |(id, _)| id.into())),
            ModelRef::Dir(_) | ModelRef::Shape(_) => None,
        }
    }

    fn header(&self) -> String {
        let mut lines = vec!["---".to_string()];
        if let Some(base) = self.base_id() {
            lines.push(format!("base_model: {base}"));
            let relation = if self.adapter { "adapter" } else { "finetune" };
            lines.push(format!("base_model_relation: {relation}"));
        }
        let library = match (self.adapter, self.is_mlx()) {
            (true, true) => "mlx",
            (true, false) => "peft",
            (false, _) => "transformers",
        };
        lines.push(format!("library_name: {library}"));
        let reward = self.setting("train.stage") == "reward";
        let task = if reward {
            "text-classification"
        } else {
            "text-generation"
        };
        lines.push(format!("pipeline_tag: {task}"));
        if let Some(license) = self.license {
            lines.push(format!("license: {license}"));
        }
        let places = ["data.train", "data.sources"];
        let sets = datasets(places.map(|key| self.run.map_or("", |(_, record)| record.place(key))));
        if !sets.is_empty() {
            lines.push("datasets:".into());
            lines.extend(sets.iter().map(|set| format!("- {set}")));
        }
        lines.push("tags:".into());
        let tags = ["ft", self.setting("train.stage"), self.setting("tune.method")];
        lines.extend(tags.iter().filter(|tag| is_tag(tag)).map(|tag| format!("- {tag}")));
        lines.push("---".into());
        lines.join("\n") + "\n"
    }

    fn summary(&self) -> String {
        let kind = if self.adapter { "An adapter" } else { "A model" };
        let base = match (self.base_id(), self.setting("model.revision")) {
            (Some(id), "" | "main") => format!(" of [{id}](https://huggingface.co/{id})"),
            (Some(id), revision) => format!(" of [{id}](https://huggingface.co/{id}), revision {}", code(revision)),
            (None, _) => String::new(),
        };
        let start = if self.base_id().is_none() && self.base().is_some() {
            " The base model was a local directory; its id on the hub is not known."
        } else {
            ""
        };
        let way = match (self.setting("train.stage"), self.setting("tune.method")) {
            ("", _) => String::new(),
            (stage, method) => format!(", trained with stage {} and method {}", code(stage), code(method)),
        };
        let version = env!("CARGO_PKG_VERSION");
        format!("{kind}{base}{way}.{start} Written by ft {version}; the numbers below are from the files of the run.")
    }

    /// An adapter with the names of mlx-lm, which ft and PEFT do not read.
    fn is_mlx(&self) -> bool {
        self.adapter && self.directory.join("adapters.safetensors").is_file()
    }

    fn usage(&self) -> String {
        if self.is_mlx() {
            let base = self.base_id().unwrap_or_else(|| "BASE".into());
            // mlx-lm takes a directory.
            let commands = format!(
                "hf download {} --local-dir adapter\nmlx_lm.generate --model {base} --adapter-path adapter --prompt TEXT",
                self.id
            );
            return format!("\n```\n{commands}\n```\n");
        }
        if has_own_base(self.directory) {
            let commands = format!(
                "hf download {} --local-dir adapter\nft generate --model adapter --chat",
                self.id
            );
            return format!("\n```\n{commands}\n```\n\nThe adapter works on the model in `base/` only.\n");
        }
        format!("\n```\nft generate --model {} --chat\n```\n", self.id)
    }

    fn license_text(&self) -> String {
        let file = ["LICENSE", "LICENSE.txt", "LICENSE.md"];
        let file = file.iter().find(|name| self.directory.join(name).is_file());
        let text = match (self.license, file) {
            (Some(license), _) => {
                format!("`{license}`, as stated by who uploaded it. That of the base model applies too.")
            }
            (None, Some(name)) => format!("`{name}` of the base model is in this repository."),
            (None, None) => "Not stated. That of the base model applies; see its page.".into(),
        };
        format!("\n## License\n\n{text}\n")
    }
}

/// Ids of hub datasets in the values of `data.train` and `data.sources`.
fn datasets(values: [&str; 2]) -> Vec<String> {
    let mut all: Vec<String> = values
        .iter()
        .flat_map(|text| text.split('"'))
        .map(|word| word.split(':').next().unwrap_or_default())
        .filter(|word| hub::is_id(word) && !Path::new(word).exists())
        // `data/train.jsonl` has the form of an id.
        .filter(|word| Path::new(word).extension().is_none())
        .map(str::to_string)
        .collect();
    all.sort();
    all.dedup();
    all
}

fn event(dir: &Path, kind: &str) -> Option<Value> {
    let text = own_text(&dir.join("events.jsonl"))?;
    let events = text
        .lines()
        .rev()
        .filter_map(|line| serde_json::from_str::<Value>(line).ok());
    events.into_iter().find(|event| event["event"] == kind)
}

/// The commands of the last start and of the resumes after it. Equal ones in a row are shown once.
fn commands(dir: &Path) -> Vec<String> {
    let text = own_text(&dir.join("events.jsonl")).unwrap_or_default();
    let mut commands: Vec<String> = Vec::new();
    for event in text.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok()) {
        if event["event"] == "start" {
            commands.clear();
        }
        if event["event"] == "start" || event["event"] == "resume" {
            commands.extend(event["command"].as_str().map(public));
        }
    }
    commands.dedup();
    commands
}

fn data(dir: &Path, record: &RunRecord) -> String {
    let mut rows = Vec::new();
    let mut add = |name: &str, value: String| rows.push(format!("| {name} | {value} |\n"));
    let sources = ["data.train", "data.eval"].map(|key| (key, record.settings.get(key)));
    for (key, value) in sources {
        if let Some(value) = value.filter(|value| !["", "[]", "\"\""].contains(&value.as_str())) {
            add(&code(key), code(&public(value)));
        }
    }
    if let Some(event) = event(dir, "data") {
        for (key, name) in [
            ("rows", "rows"),
            ("tokens", "tokens"),
            ("trained_tokens", "trained tokens"),
        ] {
            if let Some(n) = event[key].as_u64() {
                add(name, count(n));
            }
        }
        if let Some(print) = event["fingerprint"].as_str().filter(|print| !print.is_empty()) {
            add("fingerprint (BLAKE3 of the encoded rows)", code(print));
        }
    }
    format!("\n## Data\n\n| | |\n|---|---|\n{}", rows.concat())
}

fn results(record: &RunRecord) -> String {
    let curve = |name: &str| record.curves.get(name);
    let mut rows = Vec::new();
    let mut add = |name: &str, value: Option<String>| {
        rows.extend(value.map(|value| format!("| {name} | {value} |\n")));
    };
    let plain = |x: f64| format!("{x:.4}");
    let steps = record.curves.steps;
    let is_plain = |state: &str| state.chars().all(|c| c.is_ascii_alphanumeric() || c == ' ');
    let state = record.state.as_str();
    add(
        "state of the run",
        Some(if is_plain(state) {
            state.to_string()
        } else {
            code(state)
        }),
    );
    add(
        "steps",
        Some(
            record
                .total_steps
                .map_or(count(steps), |total| format!("{} of {}", count(steps), count(total))),
        ),
    );
    add(
        "training loss (mean of the last 10 steps)",
        curve("loss").and_then(|c| c.recent(RECENT)).map(plain),
    );
    let evaluations = record.curves.names();
    for name in evaluations
        .into_iter()
        .filter(|name| name.starts_with("eval_") && *name != "eval_tokens")
    {
        let first = curve(name)
            .and_then(|c: &Curve| c.points.first())
            .map(|point| plain(point.1));
        let last = curve(name).and_then(Curve::last).map(plain);
        if let (Some(first), Some(last)) = (first, last) {
            add(
                &format!("{}, before and after", code(name)),
                Some(format!("{first}, {last}")),
            );
        }
    }
    let peak = curve("peak_memory_bytes").and_then(|c| c.points.iter().map(|p| p.1).reduce(f64::max));
    add("peak memory", peak.map(|x| bytes(x as u64)));
    let time = record
        .began
        .zip(record.ended)
        .map(|(a, b)| duration(Duration::try_from_secs_f64(b - a).unwrap_or_default()));
    add("time", time);
    format!(
        "\n## Results\n\n| | |\n|---|---|\n{}\nMeasured by the run itself. Nothing else was evaluated.\n",
        rows.concat()
    )
}

/// The text of a file; `None` for a link out of its directory, to a file that has nothing to do with the model.
fn own_text(path: &Path) -> Option<String> {
    stays_inside(path).and_then(|()| files::read_text(path)).ok()
}

fn how(dir: &Path) -> String {
    let mut out = "\n## How it was made\n".to_string();
    let commands = commands(dir);
    if !commands.is_empty() {
        out.push_str(&format!("\n{}", block("", &commands.join("\n"))));
    }
    if let Some(recipe) = own_text(&dir.join("recipe.toml")) {
        out.push_str(&format!("\n{}", block("toml", &public(recipe.trim_end()))));
    }
    if out.contains(secrets::MASK) {
        out.push_str(&format!(
            "\n`{}` is in the place of texts that look like secrets.\n",
            secrets::MASK
        ));
    }
    out
}

/// True for a word that is text in YAML and nothing else. Other values of `resolved.toml` are not those of ft.
fn is_tag(text: &str) -> bool {
    text.starts_with(|c: char| c.is_ascii_lowercase())
        && text
            .chars()
            .all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || "-_".contains(c))
}

/// The length of the longest run of backticks in a text.
fn backticks(text: &str) -> usize {
    text.split(|c: char| c != '`').map(str::len).max().unwrap_or(0)
}

/// A text as code in a line or a cell of a table: what is in it has no effect on the rest of the card.
fn code(text: &str) -> String {
    let text: String = text.chars().map(|c| if c.is_control() { ' ' } else { c }).collect();
    // Two backslashes would be one, and the bar behind them would end the cell.
    let text = text.replace("\\|", "\\ |").replace('|', "\\|");
    match backticks(&text) {
        0 if text.trim().is_empty() => String::new(),
        0 => format!("`{text}`"),
        n => {
            let fence = "`".repeat(n + 1);
            format!("{fence} {text} {fence}")
        }
    }
}

/// A text as a block of code, with a fence that it does not have.
fn block(language: &str, text: &str) -> String {
    let fence = "`".repeat(3.max(backticks(text) + 1));
    format!("{fence}{language}\n{text}\n{fence}\n")
}

/// The text without directories of a machine and without what looks like a secret.
fn public(text: &str) -> String {
    without_directories(&secrets::mask(text))
}

/// The text with `.../name` in the place of each absolute path: it describes the machine of the training, not the model.
fn without_directories(text: &str) -> String {
    let inside = |c: char| !c.is_whitespace() && !"\"'`,[]{}()".contains(c);
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(c) = rest.chars().next() {
        let begins = !out.ends_with(|c: char| inside(c) && c != '=');
        if begins && (rest.starts_with('/') || rest.starts_with("~/")) {
            let end = rest.find(|c| !inside(c)).unwrap_or(rest.len());
            let name = rest[..end].trim_end_matches('/').rsplit('/').next().unwrap_or_default();
            out.push_str(&format!(".../{name}"));
            rest = &rest[end..];
        } else {
            out.push(c);
            rest = &rest[c.len_utf8()..];
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_of_a_machine_are_not_in_a_card() {
        for (text, wanted) in [
            (
                "train = [\"/srv/me/rows/a.jsonl\", \"b/c.jsonl\"]",
                "train = [\".../a.jsonl\", \"b/c.jsonl\"]",
            ),
            (
                "ft train /data/r.toml train.output_dir=/mnt/x/",
                "ft train .../r.toml train.output_dir=.../x",
            ),
            ("path = \"~/models/m\" # 1/2", "path = \".../m\" # 1/2"),
            ("Qwen/Qwen3-0.6B", "Qwen/Qwen3-0.6B"),
        ] {
            assert_eq!(without_directories(text), wanted);
        }
    }

    #[test]
    fn secrets_in_the_command_and_in_comments_of_the_recipe_are_masked() {
        let dir = tempfile::tempdir().unwrap();
        let write = |name: &str, text: &str| std::fs::write(dir.path().join(name), text).unwrap();
        // As an earlier version recorded it.
        let command = "ft train /srv/r.toml 'rlhf.rewards=[\"program:sh judge.sh --api-key PLANTED1\"]'";
        let event = serde_json::json!({"event": "start", "command": command});
        write("events.jsonl", &format!("{event}\n"));
        write(
            "recipe.toml",
            "# export OPENAI_API_KEY=PLANTED2\n[data]\ntrain = \"https://me:PLANTED3@host/x.jsonl\"  # hf_PLANTED4xyz0123456789\n",
        );
        let text = how(dir.path());
        assert!(!text.contains("PLANTED"), "{text}");
        for line in [
            "ft train .../r.toml 'rlhf.rewards=[\"program:sh judge.sh --api-key <secret>\"]'\n",
            "# export OPENAI_API_KEY=<secret>\n",
            "train = \"https://<secret>@host/x.jsonl\"  # <secret>\n",
            "\n`<secret>` is in the place of texts",
        ] {
            assert!(text.contains(line), "{line:?}\n{text}");
        }
        write("recipe.toml", "[data]\ntrain = \"rows.jsonl\"\n");
        // All commands since the last start made the model.
        let event = |kind: &str, command: &str| format!("{}\n", serde_json::json!({"event": kind, "command": command}));
        let longer = event("resume", "ft train r.toml --resume train.max_steps=8");
        let events = [
            event("start", "ft train earlier.toml"),
            event("start", "ft train r.toml"),
            longer.clone(),
            longer,
        ];
        write("events.jsonl", &events.concat());
        let text = how(dir.path());
        let wanted = "```\nft train r.toml\nft train r.toml --resume train.max_steps=8\n```\n";
        assert!(text.contains(wanted) && !text.contains("earlier"), "{text}");
        write("events.jsonl", "");
        assert!(!how(dir.path()).contains("secret"));
    }

    #[test]
    fn files_of_the_run_add_nothing_to_the_structure_of_a_card() {
        let dir = tempfile::tempdir().unwrap();
        let write = |name: &str, text: &str| std::fs::write(dir.path().join(name), text).unwrap();
        write(
            "resolved.toml",
            "[train]\nstage = \"sft\"\n[tune]\nmethod = \"a: [b\"\n[data]\ntrain = \"a`|b.jsonl\"\n",
        );
        let event = |kind: &str, key: &str, text: &str| format!("{}\n", serde_json::json!({"event": kind, key: text}));
        let events = [
            event("start", "command", "ft train\n```\n# Injected"),
            event("data", "fingerprint", "aa\n\n# Injected | x"),
            event("stop", "reason", "done\n# Injected | `x`"),
        ];
        write("events.jsonl", &events.concat());
        let metrics = serde_json::json!({"step": 1, "eval_a\n# Injected": 0.5});
        write("metrics.jsonl", &format!("{metrics}\n"));
        write("recipe.toml", "# ````\n# Injected\n");
        let record = RunRecord::read(dir.path()).unwrap();
        let card = ModelCard {
            id: "me/model",
            license: None,
            adapter: false,
            directory: &dir.path().join("final"),
            run: Some((dir.path(), &record)),
        };
        let text = card.text();
        for line in [
            "tags:\n- ft\n- sft\n---\n",
            "| `data.train` | `` \"a`\\|b.jsonl\" `` |\n",
            "| `aa  # Injected \\| x` |\n",
            "| state of the run | `` done # Injected \\| `x` `` |\n",
            "| `eval_a # Injected`, before and after | 0.5000, 0.5000 |\n",
            "\n````\nft train\n```\n# Injected\n````\n",
            "\n`````toml\n# ````\n# Injected\n`````\n",
        ] {
            assert!(text.contains(line), "{line:?}\n{text}");
        }
    }

    #[test]
    fn only_hub_ids_are_data_sets() {
        assert_eq!(
            datasets(["[\"openai/gsm8k\", \"data/train.jsonl\", \"a/b:c.jsonl\"]", ""]),
            ["a/b", "openai/gsm8k"]
        );
    }
}
