//! Recipe changes to suggest when a run does not fit. Each change is planned before it is suggested.

use crate::base::units::bytes;
use crate::base::{Error, Result};
use crate::plan::memory_plan::{MemoryLimits, PlanRefusal};
use crate::plan::search::{PlanContext, PlannedStrategy, fits, over};
use crate::recipe::table::KeyPath;
use crate::recipe::*;
use crate::setup::active_schedule::ActiveSchedule;
use crate::setup::adapters;

/// Number of changes in the error message.
const NAMED: usize = 3;
/// Largest number of pairs of changes that are planned.
const PAIRS: usize = 60;
/// The shortest `max_length` that is suggested, in tokens.
const SHORTEST: usize = 128;

/// A change of a recipe. A smaller `cost` means less effect on training.
struct RecipeChange {
    /// The change as command-line arguments.
    arguments: String,
    cost: u8,
    /// A short description.
    means: &'static str,
    recipe: Recipe,
}

/// Changes only the placement or the timing of data: the result of training is the same.
const SAME: u8 = 0;
/// Changes rounding.
const ROUNDING: u8 = 1;
/// Cuts the rows.
const ROWS: u8 = 2;
/// Trains other parameters.
const METHOD: u8 = 3;

/// A change with its plan.
struct AdvisedChange {
    change: RecipeChange,
    chosen: PlannedStrategy,
}

/// Returns the error of a run that does not fit, with the cheapest changes that make it fit.
pub(super) fn refused(
    setting: &PlanContext,
    recipe: &Recipe,
    limits: MemoryLimits,
    chosen: &PlannedStrategy,
) -> PlanRefusal {
    let plan = &chosen.plan;
    let most = plan.lines.iter().max_by_key(|l| l.at_peak);
    let most = most.map_or(String::new(), |l| {
        format!(", most of it {} ({})", l.label, bytes(l.at_peak))
    });
    let on_host = plan.peak_host_bytes.unwrap_or(0);
    let (error, by_budget) = match limits.most.filter(|most| plan.peak_bytes > *most) {
        // The device has enough memory, so the host does not.
        None => {
            let given = recipe.memory.host_budget.is_some();
            let what = if given {
                "the run does not fit the host's memory budget"
            } else {
                "the run does not fit the host's memory"
            };
            let error = Error::new(what)
                .at(Memory::host_budget)
                .found(format!("a forecast host peak of {}", bytes(on_host)))
                .expected(format!("at most {}", bytes(limits.host.unwrap_or(0))));
            (error, given)
        }
        Some(budget) => {
            let given = recipe.memory.budget.is_some();
            let what = if given {
                "the run does not fit the memory budget"
            } else {
                "the run does not fit the free memory"
            };
            let error = Error::new(what)
                .at(Memory::budget)
                .found(format!("a forecast peak of {}{most}", bytes(plan.peak_bytes)))
                .expected(match budget {
                    // A number without a unit.
                    1..1024 if given => format!("at most {}; did you mean `memory.budget={budget}GiB`?", bytes(budget)),
                    _ => format!("at most {}", bytes(budget)),
                });
            (error, given)
        }
    };
    PlanRefusal {
        error: error.hint(hint(setting, recipe, limits, chosen)),
        by_budget,
    }
}

fn hint(setting: &PlanContext, recipe: &Recipe, limits: MemoryLimits, chosen: &PlannedStrategy) -> String {
    // A change that cannot be planned is not suggested.
    let tried = |change: RecipeChange| {
        let chosen = plan(setting, &change.recipe, limits).ok()?;
        Some(AdvisedChange { change, chosen })
    };
    let singles = changes(recipe);
    let mut all: Vec<AdvisedChange> = singles.into_iter().filter_map(tried).collect();
    let fitting = |all: &[AdvisedChange]| all.iter().filter(|p| p.chosen.fits).count();
    if fitting(&all) < NAMED {
        let pairs = changes(recipe).into_iter().flat_map(|one| {
            let more = changes(&one.recipe)
                .into_iter()
                .filter(|two| apart(&one, two))
                .collect::<Vec<_>>();
            more.into_iter().map(move |two| RecipeChange {
                arguments: format!("{} {}", one.arguments, two.arguments),
                cost: one.cost.max(two.cost),
                means: if one.cost > two.cost { one.means } else { two.means },
                recipe: two.recipe,
            })
        });
        // (a, b) and (b, a) are the same pair.
        let mut seen = Vec::new();
        for pair in pairs {
            if fitting(&all) >= NAMED || seen.len() >= PAIRS {
                break;
            }
            let mut words: Vec<String> = pair.arguments.split(' ').map(str::to_string).collect();
            words.sort();
            if !seen.contains(&words) {
                seen.push(words);
                all.extend(tried(pair).filter(|p| p.chosen.fits));
            }
        }
    }
    all.sort_by(|a, b| {
        let rank = |p: &AdvisedChange| (!p.chosen.fits, p.change.arguments.contains(' ') as u8, p.change.cost);
        let time = |p: &AdvisedChange| {
            if p.chosen.fits {
                p.chosen.seconds
            } else {
                over(&p.chosen.plan, limits).0 as f64
            }
        };
        rank(a).cmp(&rank(b)).then(time(a).total_cmp(&time(b)))
    });
    let none_fits = fitting(&all) == 0;
    let before = over(&chosen.plan, limits);
    let smaller = |p: &AdvisedChange| p.chosen.fits || (none_fits && over(&p.chosen.plan, limits) < before);
    let lines = all.into_iter().filter(smaller).take(NAMED).map(|p| {
        let times = p.chosen.seconds / chosen.seconds;
        let speed = match times {
            t if t < 0.95 => format!(", a step takes {t:.2} of the time"),
            t if t > 1.05 => format!(", a step takes {t:.1} times as long"),
            _ => String::new(),
        };
        let enough = if p.chosen.fits { "" } else { " (not enough alone)" };
        let AdvisedChange { change, chosen } = p;
        format!(
            "\n  {}: {}{enough}; {}{speed}",
            change.arguments,
            bytes(chosen.plan.peak_bytes),
            change.means
        )
    });
    let lines: String = lines.collect();
    // Selects the budget that is exceeded: device or host.
    let needed = if limits.most.is_some_and(|most| chosen.plan.peak_bytes > most) {
        bytes(chosen.plan.peak_bytes)
    } else {
        format!("{} on the host", bytes(chosen.plan.peak_host_bytes.unwrap_or(0)))
    };
    match (lines.is_empty(), none_fits) {
        (true, _) => format!("no setting with less memory is available; the budget must be at least {needed}"),
        (false, true) => format!("no single change fits; these save most memory, or set a budget of {needed}{lines}"),
        (false, false) => format!("the cheapest changes that fit:{lines}"),
    }
}

/// True if the two changes set different keys.
fn apart(one: &RecipeChange, two: &RecipeChange) -> bool {
    let keys = |c: &RecipeChange| {
        let words = c.arguments.split(' ');
        words
            .filter_map(|w| w.split('=').next().map(str::to_string))
            .collect::<Vec<_>>()
    };
    let first = keys(one);
    keys(two).iter().all(|key| !first.contains(key))
}

/// Plans a changed recipe.
fn plan(setting: &PlanContext, recipe: &Recipe, limits: MemoryLimits) -> Result<PlannedStrategy> {
    let spec = setting.spec;
    let prepared = adapters::with(recipe, spec, adapters::AdapterValues::Shapes)?;
    let schedule = ActiveSchedule::new(recipe, spec, &spec.params(), &prepared)?;
    let changed = PlanContext {
        adapters: &prepared.adapters,
        schedule: &schedule,
        ..*setting
    };
    let mut chosen = changed.choose(recipe, limits)?;
    chosen.fits = fits(&chosen.plan, limits.most, limits.host);
    Ok(chosen)
}

/// All single changes that reduce the memory of this recipe.
fn changes(recipe: &Recipe) -> Vec<RecipeChange> {
    let mut all = Vec::new();
    let mut add = |cost, arguments: String, means, change: &dyn Fn(&mut Recipe)| {
        let mut changed = recipe.clone();
        change(&mut changed);
        all.push(RecipeChange {
            arguments,
            cost,
            means,
            recipe: changed,
        });
    };
    let (memory, train, tune, optimizer) = (&recipe.memory, &recipe.train, &recipe.tune, &recipe.optimizer);
    if !matches!(memory.tier, Tier::Auto | Tier::Disk) {
        add(SAME, "memory.tier=disk".into(), "the same results", &|r| {
            r.memory.tier = Tier::Disk;
        });
    }
    if memory.activations == Activations::Keep {
        add(SAME, "memory.activations=auto".into(), "the same results", &|r| {
            r.memory.activations = Activations::Auto;
        });
    }
    if memory.head_chunk == ChunkSize::Whole && memory.tier != Tier::Device {
        add(SAME, "memory.head_chunk=auto".into(), "the same results", &|r| {
            r.memory.head_chunk = ChunkSize::Auto;
        });
    }
    if memory.mlp_chunk == ChunkSize::Whole {
        add(SAME, "memory.mlp_chunk=auto".into(), "the same results", &|r| {
            r.memory.mlp_chunk = ChunkSize::Auto;
        });
    }
    let rows = train.batch_size;
    if rows > 1 {
        let accumulation = train.gradient_accumulation_steps * rows;
        let mut arguments = format!("train.batch_size=1 train.gradient_accumulation_steps={accumulation}");
        let pinned = recipe.data.packing && recipe.data.packing_length < recipe.data.max_length;
        if pinned {
            arguments.push_str(&format!(" data.packing_length={}", recipe.data.packing_length));
        }
        add(SAME, arguments, "the same rows per step", &|r| {
            r.train.batch_size = 1;
            r.train.gradient_accumulation_steps = accumulation;
            r.open.gradient_accumulation_steps = false;
            r.open.packing_length &= !pinned;
        });
    }
    if tune.method == Method::Full && train.gradient_accumulation_steps > 1 {
        add(
            ROWS,
            "train.gradient_accumulation_steps=1".into(),
            "fewer rows per step",
            &|r| {
                r.train.gradient_accumulation_steps = 1;
                r.open.gradient_accumulation_steps = false;
            },
        );
    }
    if optimizer.state == StateDtype::F32 && matches!(optimizer.name, OptimizerName::Adamw | OptimizerName::Lion) {
        add(ROUNDING, "optimizer.state=int8".into(), "moments in 8 bits", &|r| {
            r.optimizer.state = StateDtype::Int8;
        });
    }
    if recipe.model.dtype == Dtype::F32 {
        add(ROUNDING, "model.dtype=bf16".into(), "weights in bf16", &|r| {
            r.model.dtype = Dtype::Bf16;
        });
    } else if optimizer.master == Master::F32 && tune.method != Method::Lora {
        add(
            ROUNDING,
            "optimizer.master=stochastic".into(),
            "stochastic rounding of updates",
            &|r| {
                r.optimizer.master = Master::Stochastic;
            },
        );
    }
    if memory.frozen_weights == Auto::Of(WeightStorage::Bf16) && tune.method != Method::Full {
        add(
            ROUNDING,
            "memory.frozen_weights=nf4".into(),
            "frozen weights in 4 bits",
            &|r| {
                r.memory.frozen_weights = Auto::Of(WeightStorage::Nf4);
            },
        );
    }
    let mut length = recipe.data.max_length / 2;
    while length >= SHORTEST {
        add(
            ROWS,
            format!("data.max_length={length}"),
            "longer rows are truncated",
            &|r| {
                r.data.max_length = length;
                r.data.packing_length = r.data.packing_length.min(length);
            },
        );
        length /= 2;
    }
    if tune.method == Method::Block && matches!(tune.block.partition, Partition::Layer) {
        add(
            METHOD,
            "tune.block.partition=module".into(),
            "trains the attention or the MLP of a layer at a time",
            &|r| {
                r.tune.block.partition = Partition::Module;
            },
        );
    }
    type Without = fn(&mut BlockConfig);
    let tables: [(bool, KeyPath, Without); 2] = [
        (tune.block.include_embedding, BlockKeys::include_embedding, |block| {
            block.include_embedding = false;
        }),
        (tune.block.include_lm_head, BlockKeys::include_lm_head, |block| {
            block.include_lm_head = false;
        }),
    ];
    for (written, key, without) in tables {
        if tune.method == Method::Block && written {
            add(METHOD, format!("{key}=false"), "it is not trained", &|r| {
                without(&mut r.tune.block)
            });
        }
    }
    if tune.method == Method::Full {
        add(METHOD, "tune.method=block".into(), "trains one layer at a time", &|r| {
            r.tune.method = Method::Block;
        });
    }
    if tune.method != Method::Lora {
        add(METHOD, "tune.method=lora".into(), "trains adapters only", &|r| {
            r.tune.method = Method::Lora;
        });
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::recipe;

    fn named(text: &str) -> Vec<String> {
        let text = format!("[model]\npath = \"shape:small\"\n{text}");
        let recipe = recipe::parse(&text, "r.toml", &[]).unwrap().recipe;
        changes(&recipe).into_iter().map(|c| c.arguments).collect()
    }

    #[test]
    fn only_what_the_recipe_does_not_have_yet_is_named() {
        let all = named("[tune]\nmethod = \"full\"\n[train]\nbatch_size = 4\n[memory]\ntier = \"device\"");
        for want in [
            "memory.tier=disk",
            "train.batch_size=1 train.gradient_accumulation_steps=32",
            "optimizer.state=int8",
            "data.max_length=1024",
            "tune.method=block",
        ] {
            assert!(all.iter().any(|a| a == want), "{want} {all:?}");
        }
        let least = "[data]\nmax_length = 128\n[tune]\nmethod = \"lora\"\n[optimizer]\nstate = \"int8\"";
        assert!(named(least).is_empty(), "{:?}", named(least));
    }

    #[test]
    fn every_change_is_a_recipe_that_is_accepted() {
        let text = "[model]\npath = \"shape:small\"\n[tune]\nmethod = \"block\"\n[train]\nbatch_size = 2\n\
                    [tune.block]\ninclude_embedding = true\n[memory]\ntier = \"device\"\nactivations = \"keep\"";
        let recipe = recipe::parse(text, "r.toml", &[]).unwrap().recipe;
        for change in changes(&recipe) {
            let arguments: Vec<String> = change.arguments.split(' ').map(str::to_string).collect();
            let parsed = recipe::parse(text, "r.toml", &arguments).unwrap().recipe;
            assert_eq!(
                format!("{parsed:?}"),
                format!("{:?}", change.recipe),
                "{}",
                change.arguments
            );
        }
    }
}
