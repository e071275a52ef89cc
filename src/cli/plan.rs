//! `ft plan`: the memory that a recipe needs, before anything is allocated.

use super::out::{out, out_text};
use super::recipe_args::RecipeArgs;
use crate::base::Result;
use crate::commands::plan::plan_for;
use crate::plan::gpu_time::{GPUS, GpuRates};
use crate::plan::link::RankLink;
use crate::report;

/// Forecast the memory of a recipe; allocates nothing
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  ft plan recipes/quickstart.toml
  ft plan my.toml --budget 24GiB         does it fit?
  ft plan my.toml --device-like 4090     does it fit there, and how fast is it?
  ft plan my.toml --ranks 4 --link 10Gb  four ranks, and the time of their bytes
  ft plan my.toml --ranks 8 --nodes 2    eight ranks on two machines like this
  ft plan --recipe my.toml tune.method=lora --json")]
pub struct Args {
    #[command(flatten)]
    pub recipe: RecipeArgs,
    /// Most memory to use, in place of the recipe's `memory.budget`
    #[arg(long, value_name = "SIZE", value_parser = super::parse_bytes)]
    pub budget: Option<u64>,
    /// Plan for a GPU of this kind: the memory that it has, the estimated time of a step
    #[arg(long, value_name = "GPU", value_parser = clap::builder::PossibleValuesParser::new(GPUS.map(|gpu| gpu.name)))]
    pub device_like: Option<String>,
    /// Plan for one of N ranks
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..))]
    pub ranks: u16,
    /// The ranks are on N machines like this one, the same number on each
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..), requires = "ranks", hide_short_help = true)]
    pub nodes: u16,
    /// The connection of the ranks: seconds that the bytes of a step take at least
    #[arg(long, value_name = "RATE", requires = "ranks")]
    pub link: Option<String>,
    /// Print one JSON object: every line in bytes, the total as `peak_bytes`
    #[arg(long)]
    pub json: bool,
}

pub fn run(mut args: Args) -> Result<i32> {
    let mut loaded = args.recipe.load_and_warn()?;
    if args.budget.is_some() {
        loaded.recipe.memory.budget = args.budget;
    }
    let like: Option<&'static GpuRates> = args
        .device_like
        .as_ref()
        .and_then(|name| GPUS.iter().find(|gpu| gpu.name == name));
    let link = args.link.as_deref().map(RankLink::parse).transpose()?;
    let planned = plan_for(&loaded.recipe, like, args.ranks.into(), args.nodes.into())?;
    planned.notes.iter().for_each(|line| super::note(line));
    if let (Some(text), true) = (&args.link, args.nodes > 1) {
        super::note(&format!(
            "the seconds over {text} are not known: the ranks of a machine exchange layers over another connection"
        ));
    } else if let (Some(link), Some(text)) = (link, &args.link) {
        let seconds = link.seconds(planned.sent);
        super::note(&match planned.sync_every {
            0 => format!(
                "over {text}: at least {seconds:.3} s of a step, while the backward pass goes on and after the update"
            ),
            every => format!(
                "over {text}: at least {seconds:.3} s for an average, {:.3} s a step",
                seconds / every as f64
            ),
        });
    }
    if args.json {
        out(planned.json())?
    } else {
        out_text(planned.plan.table_within(report::result_width()))?;
        let time = planned.time.as_ref().map(|time| time.text());
        for text in [planned.verdict.text.clone(), planned.disk.text()]
            .into_iter()
            .chain(time)
        {
            let width = report::result_width().unwrap_or(usize::MAX / 2);
            report::wrapped(&text, width, 2, false).iter().try_for_each(out)?;
        }
    }
    Ok(0)
}
