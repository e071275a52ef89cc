//! `ft recipes`: lists, shows and copies the recipes in the binary.

mod assets;

use super::out::{out, out_raw, out_text};
use crate::base::units::bytes;
use crate::base::{Error, Result, files, progress};
use crate::commands::plan::{self, MemoryFit};
use crate::recipe::{self, ModelRef, Recipe, suggest};
use assets::ASSETS;
use serde_json::json;
use std::path::{Path, PathBuf};

macro_rules! shipped {
    ($($name:literal),+ $(,)?) => {
        [$(($name, include_str!(concat!("../../recipes/", $name, ".toml")))),+]
    };
}

/// Name and text of every shipped recipe.
pub const SHIPPED: [(&str, &str); 20] = shipped![
    "block-llama3-70b-4x80gb",
    "block-llama3-8b-24gb",
    "block-llama3-8b-2x24gb",
    "block-qwen3-30b-a3b",
    "block-qwen3-4b-16gb",
    "distill-qwen3",
    "distill-tiny",
    "dpo-tiny",
    "grpo-start-tiny",
    "grpo-tiny",
    "lora-qwen3-30b-a3b",
    "lora-qwen3-4b",
    "moe-tiny",
    "ppo-tiny",
    "pretrain-tiny",
    "qlora-qwen3-4b-8gb",
    "qlora-qwen3-8b-16gb",
    "quickstart",
    "reward-tiny",
    "sft-qwen",
];

/// Recipes to start from: list, show, copy
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  ft recipes
  ft recipes show quickstart
  ft recipes copy quickstart --with-data  quickstart.toml, its model and rows
  ft recipes copy sft-qwen                sft-qwen.toml in the current directory
  ft recipes schema > recipe.schema.json  a JSON schema for editors

The list shows whether a recipe fits the free memory of this machine: `fits`, `tight` (uses nearly all of it, or needs
weights on the disk or quantized weights) or `no`. The number is the peak memory that the run would use on
this machine, if every row has `data.max_length` tokens. With less memory ft recomputes activations or reads
weights from the disk.")]
pub struct Args {
    #[command(subcommand)]
    action: Option<RecipesAction>,
    /// Print the list as JSON, one object per line
    #[arg(long, global = true)]
    json: bool,
}

#[derive(Debug, clap::Subcommand)]
enum RecipesAction {
    /// List names, methods, and whether each recipe fits this machine
    List,
    /// Print a recipe
    #[command(after_help = "Examples:
  ft recipes show quickstart
  ft recipes show lora-qwen3-4b > my.toml")]
    Show {
        /// Name of a recipe in the list
        #[arg(add = super::completions::shipped())]
        name: String,
    },
    /// Print the JSON schema of a recipe, for completion and checks in an editor
    #[command(after_help = "Examples:
  ft recipes schema > recipe.schema.json

An editor with taplo (Even Better TOML) uses it for a recipe whose first line is:

  #:schema ./recipe.schema.json")]
    Schema,
    /// Write a recipe to a file
    #[command(after_help = "Examples:
  ft recipes copy quickstart --with-data  quickstart.toml, assets/tiny, its rows
  ft recipes copy sft-qwen                sft-qwen.toml
  ft recipes copy sft-qwen --to my.toml

Paths in a recipe are relative to the current directory; --with-data writes the files there.")]
    Copy {
        /// Name of a recipe in the list
        #[arg(add = super::completions::shipped())]
        name: String,
        /// The new file [default: NAME.toml]
        #[arg(long, value_name = "FILE")]
        to: Option<PathBuf>,
        /// Also write the model and rows that the recipe uses, if they ship with ft
        #[arg(long)]
        with_data: bool,
    },
}

pub fn run(args: Args) -> Result<i32> {
    match args.action.unwrap_or(RecipesAction::List) {
        RecipesAction::List => list(args.json)?,
        RecipesAction::Show { name } => out_raw(find(&name)?.1)?,
        RecipesAction::Schema => out_raw(&format!("{:#}\n", recipe::schema()))?,
        RecipesAction::Copy { name, to, with_data } => copy(&name, to, with_data)?,
    }
    Ok(0)
}

/// The comment at the start of a recipe.
#[derive(Debug, Default, PartialEq)]
struct RecipeComment {
    what: &'static str,
    needs: &'static str,
    gives: &'static str,
    /// Recipes or commands to run before this one.
    first: Vec<&'static str>,
}

impl RecipeComment {
    fn of(text: &'static str) -> Self {
        let mut about = Self::default();
        for line in portable(text).lines().map_while(|l| l.strip_prefix("# ")) {
            if let Some(needs) = line.strip_prefix("Needs: ") {
                about.needs = needs;
            } else if let Some(gives) = line.strip_prefix("Gives: ") {
                about.gives = gives;
            } else if let Some(first) = line.strip_prefix("First: ") {
                about.first = if first.contains(' ') && !first.contains(", ") {
                    vec![first]
                } else {
                    first.split(", ").collect()
                };
            } else if about.what.is_empty() {
                about.what = line;
            }
        }
        about
    }

    /// Commands to run before the recipe.
    fn commands(&self) -> Vec<String> {
        let command = |first: &&str| {
            if SHIPPED.iter().any(|(name, _)| name == first) {
                format!("ft recipes copy {first} --with-data && ft train {first}.toml")
            } else {
                first.to_string()
            }
        };
        self.first.iter().map(command).collect()
    }
}

/// A recipe without its first line, which names the schema by its path in the repository.
fn portable(text: &'static str) -> &'static str {
    match text.split_once('\n') {
        Some((first, rest)) if first.starts_with("#:schema ") => rest,
        _ => text,
    }
}

fn list(as_json: bool) -> Result<()> {
    let width = SHIPPED.iter().map(|(n, _)| n.len()).max().unwrap_or(0);
    for (name, text) in SHIPPED {
        let recipe = recipe::parse(text, name, &[])?.recipe;
        let about = RecipeComment::of(text);
        // A mixture of experts takes a second.
        let fitted = {
            let _phase = progress::phase(format!("planning {name}"), 0, "");
            plan::fit(&recipe)?
        };
        let method = format!("{} {}", recipe.train.stage.name(), recipe.tune.method.name());
        let fit = match fitted.fit {
            MemoryFit::Fits => "fits",
            MemoryFit::Tight => "tight",
            MemoryFit::No => "no",
        };
        if as_json {
            out(json!({
                "name": name, "stage": recipe.train.stage.name(), "method": recipe.tune.method.name(),
                "model": recipe.model.path.to_string(), "fit": fit, "peak_bytes": fitted.peak, "remark": fitted.remark,
                "what": about.what, "needs": about.needs, "gives": about.gives, "first": about.commands(),
            }))?;
            continue;
        }
        let remark = fitted.remark.map_or(String::new(), |r| format!(", {r}"));
        out_text(format!(
            "{name:<width$}  {method:<14}  {fit:<5}  {}{remark}",
            bytes(fitted.peak)
        ))?;
        out_text(format!("    {}", about.what))?;
        out_text(format!("    needs {}", about.needs))?;
        for command in about.commands() {
            out_text(format!("    first {command}"))?;
        }
    }
    Ok(())
}

/// Files shipped with ft that the recipe uses.
fn assets_of(recipe: &Recipe) -> Vec<&'static (&'static str, &'static [u8])> {
    let models = [Some(&recipe.model.path), recipe.distill.teacher.as_ref()];
    let models = models.into_iter().flatten().map(ModelRef::to_string);
    let files = recipe.data.train_paths().chain(&recipe.data.eval).cloned();
    let named: Vec<String> = models.chain(files).collect();
    let is_named = |path: &str| named.iter().any(|n| Path::new(path).starts_with(n));
    ASSETS.iter().filter(|(path, _)| is_named(path)).collect()
}

fn copy(name: &str, to: Option<PathBuf>, with_data: bool) -> Result<()> {
    let (name, text) = find(name)?;
    let to = to.unwrap_or_else(|| PathBuf::from(format!("{name}.toml")));
    let recipe = recipe::parse(text, name, &[])?.recipe;
    let assets = assets_of(&recipe);
    // Refuses to overwrite other files.
    let mut new: Vec<(&Path, &[u8])> = vec![(&to, text.as_bytes())];
    if with_data {
        new.extend(assets.iter().map(|(path, bytes)| (Path::new(*path), *bytes)));
    }
    let mut missing = Vec::new();
    for (path, bytes) in new {
        if !path.exists() {
            missing.push((path, bytes));
        } else if !with_data || path.is_dir() || files::read(path)? != bytes {
            let hint = if path == to {
                "give another name with `--to FILE`"
            } else {
                "the file differs from the one that ships with ft: copy the recipe in another directory"
            };
            return Err(Error::usage("the file already exists").at_path(path).hint(hint));
        }
    }
    for (path, bytes) in missing {
        if let Some(folder) = path.parent().filter(|f| !f.as_os_str().is_empty()) {
            files::create_dir_all(folder)?;
        }
        files::write_output(path, bytes)?;
    }
    out(to.display())?;
    if let Some(rest) = to.to_str() {
        tell(name, rest, text, &recipe, with_data);
    }
    Ok(())
}

/// Prints the requirements of the recipe and the next command.
fn tell(name: &str, to: &str, text: &'static str, recipe: &Recipe, with_data: bool) {
    let about = RecipeComment::of(text);
    let mut lines = vec![format!("needs: {}", about.needs)];
    if !with_data && assets_of(recipe).iter().any(|(path, _)| !Path::new(path).exists()) {
        let to = if to == format!("{name}.toml") {
            String::new()
        } else {
            format!(" --to {to}")
        };
        lines.push(format!(
            "its model and rows are missing: `ft recipes copy {name}{to} --with-data` writes them"
        ));
    }
    for file in recipe
        .data
        .train
        .iter()
        .filter(|f| f.starts_with("data/") && !Path::new(f).exists())
    {
        lines.push(format!(
            "write your rows to {file}, or name another file in `data.train`"
        ));
    }
    let commands = about.commands();
    if !commands.is_empty() {
        lines.push("first:".into());
        lines.extend(commands.iter().map(|command| format!("  {command}")));
    }
    lines.push("next:".into());
    lines.extend(["data", "plan", "train"].map(|command| format!("  ft {command} {to}")));
    super::note(&lines.join("\n"));
}

fn find(name: &str) -> Result<(&'static str, &'static str)> {
    let wanted = name.strip_suffix(".toml").unwrap_or(name);
    if let Some(found) = SHIPPED.iter().find(|(n, _)| *n == wanted) {
        return Ok((found.0, portable(found.1)));
    }
    let names: Vec<&str> = SHIPPED.iter().map(|(n, _)| *n).collect();
    let error = Error::usage(format!("there is no recipe `{name}`")).expected(format!("one of {}", names.join(", ")));
    Err(match suggest::nearest(wanted, names) {
        Some(near) => error.hint(format!("did you mean `{near}`?")),
        None => error,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::gpu_time::GPUS;

    /// Row R3.
    #[test]
    fn every_recipe_in_the_folder_is_shipped_and_parses_without_a_warning() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("recipes");
        let on_disk = files::list(&folder).unwrap();
        assert_eq!(on_disk.len(), SHIPPED.len());
        for (path, (name, text)) in on_disk.iter().zip(SHIPPED) {
            assert_eq!(path.file_name().unwrap().to_str().unwrap(), format!("{name}.toml"));
            assert_eq!(files::read_text(path).unwrap(), text);
            let loaded = recipe::load(path, &[]).unwrap();
            assert_eq!(loaded.warnings, Vec::<String>::new(), "{name}");
            let again = recipe::parse(&loaded.resolved, name, &[]).unwrap();
            assert_eq!(loaded.values, again.values, "{name}");
            let about = RecipeComment::of(text);
            for said in [about.what, about.needs, about.gives] {
                assert!(
                    said.ends_with('.'),
                    "{name} says what it does, needs and gives: {said:?}"
                );
            }
            assert!(portable(text).lines().count() <= 40, "{name} is short");
            // Editors find the schema by this path.
            let schema = text.lines().next().unwrap().strip_prefix("#:schema ").unwrap();
            assert!(folder.join(schema).is_file(), "{name}");
        }
    }

    /// Row R3.
    #[test]
    fn every_recipe_is_planned_and_those_for_a_gpu_fit_it() {
        for (name, text) in SHIPPED {
            let recipe = recipe::parse(text, name, &[]).unwrap().recipe;
            assert!(plan::fit(&recipe).unwrap().peak > 0, "{name}");
            // `-16gb`: the budget is the memory of such a GPU less 1 GB; `-4x80gb`: of each of four ranks.
            let Some(size) = name.rsplit('-').next().and_then(|last| last.strip_suffix("gb")) else {
                continue;
            };
            let (ranks, size) = size.split_once('x').unwrap_or(("1", size));
            let ranks: usize = ranks.parse().unwrap();
            let mut recipe = plan::with_shapes(&recipe);
            recipe.model.device = recipe::DeviceRef::Gpu(Some(0));
            recipe.memory.budget = Some(((size.parse::<f64>().unwrap() - 1.0) * 1e9) as u64);
            if ranks > 1 {
                // What the recipe needs of the host, for each rank.
                let needs = RecipeComment::of(text).needs.split(", ").nth(1).unwrap();
                let host: u64 = needs.split(' ').next().unwrap().parse().unwrap();
                assert!(needs.contains(" GB of host memory"), "{needs}");
                recipe.memory.host_budget = Some(host * 1_000_000_000 / ranks as u64);
            }
            let planned = plan::plan_for(&recipe, None, ranks, 1).unwrap();
            assert!(planned.verdict.fits, "{name}: {}", planned.verdict.text);
            assert!(planned.plan.peak_bytes <= recipe.memory.budget.unwrap(), "{name}");
            assert_eq!(planned.sent > 0, ranks > 1, "{name}");
        }
    }

    /// The commands of docs/distributed.md: 8B on two GPUs of 24 GB, 70B on four of 80 GB, which fewer ranks cannot do.
    #[test]
    fn recipes_for_several_ranks_fit_them() {
        let docs = files::read_text(&Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/distributed.md")).unwrap();
        for (name, ranks, gpu) in [
            ("block-llama3-8b-2x24gb", 2, "4090"),
            ("block-llama3-70b-4x80gb", 4, "a100"),
        ] {
            let command = format!("ft plan recipes/{name}.toml --ranks {ranks} --device-like {gpu}");
            assert!(docs.contains(&command), "{command}");
            let recipe = recipe::parse(find(name).unwrap().1, name, &[]).unwrap().recipe;
            let mut recipe = plan::with_shapes(&recipe);
            // The machine of the table.
            recipe.memory.host_budget = Some(50_000_000_000);
            let gpu = GPUS.iter().find(|of| of.name == gpu);
            let plan = |ranks| plan::plan_for(&recipe, gpu, ranks, 1).unwrap();
            let planned = plan(ranks);
            assert!(
                planned.verdict.fits && !planned.refused,
                "{name}: {}",
                planned.verdict.text
            );
            let row = format!("| {} | {} |", bytes(planned.plan.peak_bytes), bytes(planned.sent));
            assert!(docs.contains(&row), "{name}: {row}");
        }
    }

    #[test]
    fn what_a_recipe_needs_is_in_its_first_lines() {
        let about = RecipeComment::of(find("ppo-tiny").unwrap().1);
        let commands = about.commands();
        assert_eq!(
            commands[0],
            "ft recipes copy grpo-start-tiny --with-data && ft train grpo-start-tiny.toml"
        );
        assert_eq!(commands.len(), 2);
        let about = RecipeComment::of(find("distill-tiny").unwrap().1);
        assert!(about.commands()[0].contains("cargo run --release --example tiny_world"));
        for (name, text) in SHIPPED {
            let recipe = recipe::parse(text, name, &[]).unwrap().recipe;
            let own =
                recipe.model.path.to_string().starts_with("assets/") || recipe.data.train[0].starts_with("assets/");
            assert_eq!(assets_of(&recipe).is_empty(), !own, "{name}");
            // A recipe that reads the run of another recipe must name that recipe.
            let reads_a_run = [&recipe.model.path.to_string(), &recipe.data.train[0]]
                .iter()
                .any(|p| p.starts_with("runs/"));
            assert_eq!(RecipeComment::of(text).first.is_empty(), !reads_a_run, "{name}");
        }
    }

    /// Tests that the folder and the binary have the same files.
    #[test]
    fn all_assets_are_inside() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR"));
        let mut found = 0;
        for folder in ["moe", "small", "tiny", "world"] {
            for path in files::list(&root.join("assets").join(folder)).unwrap() {
                let name = path.strip_prefix(root).unwrap().to_str().unwrap().replace('\\', "/");
                let (_, inside) = ASSETS.iter().find(|(n, _)| *n == name).unwrap();
                assert_eq!(files::read(&path).unwrap(), *inside, "{name}");
                found += 1;
            }
        }
        assert_eq!(found, ASSETS.len());
    }

    #[test]
    fn names_are_found_or_suggested() {
        assert_eq!(find("quickstart.toml").unwrap().0, "quickstart");
        assert!(
            find("quikstart")
                .unwrap_err()
                .to_string()
                .contains("did you mean `quickstart`?")
        );
    }
}
