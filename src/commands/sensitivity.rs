//! Measures how much the loss rises when one part of a layer is quantized, and chooses the bits per part.
//!
//! A unit is the attention or the MLP half of one layer. Each unit is quantized alone, in each format, and the loss on
//! some rows is measured; the rises are assumed to add up. The choice minimizes their sum within a budget of bytes: a
//! Lagrangian (every unit takes the option with the least rise + λ · bytes, λ by bisection), then the rest of the
//! budget goes to the units with the largest gain.

use crate::base::units::bytes;
use crate::base::{Error, Result, progress, signal};
use crate::data::order::eval_batches;
use crate::data::{Batch, Dataset, Source, dataset};
use crate::engine::Totals;
use crate::formats::weights::Weights;
use crate::model::shared::SharedStates;
use crate::model::{Context, Layer, Network, Objective, ObjectiveNeeds};
use crate::ops::step_stats::StepStats;
use crate::quant::{self, Format, Weight};
use crate::recipe::Dtype;
use crate::setup::ModelDir;
use crate::sft::CausalLm;
use crate::source::policy::is_projection;
use crate::source::{
    Group, GroupWeights, InMemoryWeights, ParamInfo, ResidentWeights, StoragePolicy, Sublayer, WeightSource,
};
use candle_core::{Device, Tensor};
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::rc::Rc;
use std::sync::Arc;

/// Tokens per batch.
const BATCH_TOKENS: usize = 2048;

/// The attention or MLP half of a layer.
pub type SublayerId = (usize, Sublayer);

pub struct Sensitivity {
    /// Candidates from the largest down; `None` means unquantized.
    pub formats: Vec<Option<Format>>,
    /// Loss of the unchanged model.
    pub base: f64,
    pub tokens: usize,
    /// Rise of the loss for each candidate; 0 for unquantized.
    pub rises: BTreeMap<SublayerId, Vec<f64>>,
    network: Network,
    /// The weights of the files.
    exact: ResidentWeights,
    /// The source of `network`: `exact`, or with quantized layers.
    measured: Arc<InMemoryWeights>,
    batches: Vec<Batch>,
    dequantized_dtype: Dtype,
    /// The types of the projections in the files.
    stored: String,
}

pub struct FormatChoice {
    /// Index of the candidate of each unit.
    pub units: BTreeMap<SublayerId, usize>,
    pub formats: BTreeMap<Arc<str>, Format>,
    pub bytes: u64,
    pub budget: u64,
    /// Loss with this choice, and with the smallest format everywhere.
    pub loss: f64,
    pub smallest: f64,
    pub smallest_bytes: u64,
}

/// Bytes of all weights in the files.
pub fn dense_bytes(weights: &Weights, params: &[ParamInfo]) -> u64 {
    params
        .iter()
        .filter_map(|p| weights.info(&p.name).map(|i| i.bytes))
        .sum()
}

/// The type of a tensor in the files, as reports name it; `-` without the tensor.
pub fn stored_type(weights: &Weights, name: &str) -> String {
    let info = weights.info(name);
    info.map_or("-".to_string(), |info| info.dtype.name().to_lowercase())
}

/// Measures every unit on at most `tokens` tokens of `data`. `smallest` is the smallest candidate; int8 is always one.
///
/// Errors: an invalid model or invalid rows; a loss that is not finite.
pub fn measure(
    model: &ModelDir,
    data: &Path,
    smallest: Format,
    dequantized_dtype: Dtype,
    tokens: usize,
) -> Result<Sensitivity> {
    let device = Device::Cpu;
    let batches = calibration(model, data, tokens)?;
    let policy = StoragePolicy::dense(dequantized_dtype);
    let weights = model.weights()?;
    let exact = ResidentWeights::load(model.spec.params(), &weights, |p| policy.of(p), &device)?;
    let measured = Arc::new(InMemoryWeights::new(model.spec.params()));
    let mut formats = vec![None, Some(Format::Int8 { group: 0 }), Some(smallest)];
    formats.dedup();
    let params = model.spec.params();
    let stored: BTreeSet<String> = params
        .iter()
        .filter(|p| is_projection(p))
        .map(|p| stored_type(&weights, &p.name))
        .collect();
    let mut out = Sensitivity {
        formats,
        base: 0.0,
        tokens: batches.iter().map(|b| b.trained()).sum(),
        rises: BTreeMap::new(),
        network: Network::new(model.spec.clone(), measured.clone(), device),
        exact,
        measured,
        batches,
        dequantized_dtype,
        stored: stored.into_iter().collect::<Vec<_>>().join(" or "),
    };
    if out.tokens == 0 {
        return Err(Error::new("nothing can be measured: no row has a trained token").at_path(data));
    }
    out.reset()?;
    out.run()?;
    Ok(out)
}

/// Batches of at most `tokens` tokens of the rows of `data`.
///
/// Errors: an invalid model or invalid rows.
pub fn calibration(model: &ModelDir, data: &Path, tokens: usize) -> Result<Vec<Batch>> {
    let sources = [Source::new(vec![data.display().to_string()])];
    let spec = dataset::DatasetSpec {
        sources: &sources,
        max_length: model.spec.max_positions.min(BATCH_TOKENS),
        embedding_rows: model.spec.vocab,
        ..dataset::DatasetSpec::default()
    };
    let rows = Dataset::load(&spec, &model.tokenizer, model.template())?;
    // One batch is needed, even of a row that is longer.
    let (mut left, mut taken) = (tokens, false);
    // Small batches leave little of a small number of tokens unused.
    eval_batches(&rows, BATCH_TOKENS.min((tokens / 4).max(1)))
        .take_while(|batch| {
            let (length, trained) = batch.as_ref().map_or((0, 0), |b| (b.len(), b.trained()));
            let fits = !taken || (left > 0 && length <= left);
            left = left.saturating_sub(length);
            taken |= trained > 0;
            fits
        })
        .filter(|batch| batch.as_ref().map_or(true, |b| b.trained() > 0))
        .collect()
}

/// The input of a layer for a batch, and what the layers of this batch share.
type LayerInput = (Tensor, Rc<SharedStates>);

impl Sensitivity {
    fn run(&mut self) -> Result<()> {
        let mut xs = self.embed()?;
        let phase = progress::phase("measuring", self.network.layers(), "layers");
        self.base = self.loss_from(0, &xs)?;
        for layer in 0..self.network.layers() {
            phase.set(layer as u64);
            let parts = progress::part("part", 2 * self.formats.len());
            for sublayer in [Sublayer::Attention, Sublayer::Mlp] {
                let mut rises = Vec::new();
                for format in self.formats.clone() {
                    if let Some(s) = signal::received() {
                        return Err(Error::signal(s, "stopped while measuring"));
                    }
                    rises.push(match format {
                        None => 0.0,
                        Some(format) => {
                            self.put(layer, |p| (p.sublayer == sublayer).then_some(format))?;
                            // A rise below 0 is noise: quantization does not improve a model.
                            (self.loss_from(layer, &xs)? - self.base).max(0.0)
                        }
                    });
                    parts.add(1);
                    self.reset()?;
                }
                self.rises.insert((layer, sublayer), rises);
            }
            for ((x, shared), batch) in xs.iter_mut().zip(&self.batches) {
                let mut ctx: Context = self.network.context(&batch.positions, &batch.documents, None)?;
                ctx.shared = shared.clone();
                *x = self.network.block(layer)?.forward(x, &ctx)?;
            }
        }
        Ok(())
    }

    fn embed(&self) -> Result<Vec<LayerInput>> {
        let embed = |b: &Batch| {
            let ctx = self.network.context(&b.positions, &b.documents, None)?;
            Ok((self.network.embed(&b.ids, &ctx)?, ctx.shared))
        };
        self.batches.iter().map(embed).collect()
    }

    /// Mean loss when the forward pass starts at layer `first` with inputs `xs`.
    fn loss_from(&self, first: usize, xs: &[LayerInput]) -> Result<f64> {
        let objective = CausalLm::new(self.network.spec.vocab);
        let (mut totals, step_stats) = (Totals::default(), StepStats::new(&self.network.device)?);
        for ((x, shared), batch) in xs.iter().zip(&self.batches) {
            let mut ctx: Context = self.network.context(&batch.positions, &batch.documents, None)?;
            ctx.shared = shared.clone();
            let mut x = x.clone();
            for layer in first..self.network.layers() {
                x = self.network.block(layer)?.forward(&x, &ctx)?;
            }
            let need = ObjectiveNeeds {
                scale: 1.0,
                dh: false,
                dw: false,
            };
            objective.evaluate(
                &self.network.normalize(&x, &ctx)?,
                &self.network.head()?,
                batch,
                need,
                &step_stats,
            )?;
            totals.count(batch, &objective);
        }
        totals = totals.with(step_stats.read()?);
        if totals.loss().is_finite() {
            Ok(totals.loss())
        } else {
            Err(Error::new("the loss on the calibration rows is not finite").found(totals.loss()))
        }
    }

    /// Replaces the projections of `layer` by quantized ones in the format that `format` returns.
    fn put(&self, layer: usize, format: impl Fn(&ParamInfo) -> Option<Format>) -> Result<()> {
        let group = Group::Layer(layer);
        let weights = self.exact.fetch(group)?;
        let mut quantized = GroupWeights::default();
        for p in self.network.source.params().iter().filter(|p| p.group == group) {
            let (name, weight) = weights.weight(&p.name)?;
            let format = format(p).filter(|_| is_projection(p));
            let (Some(format), &[rows, columns]) = (format, p.shape.as_slice()) else {
                quantized.insert(name, weight);
                continue;
            };
            let values = crate::ops::update::to_f32_vec(weight.dense()?)?;
            quantized.insert(
                name,
                Weight::from(quant::quantize(
                    &values,
                    (rows, columns),
                    format,
                    self.dequantized_dtype,
                )?),
            );
        }
        self.measured.set(group, quantized);
        Ok(())
    }

    /// Sets the weights of the files again.
    fn reset(&self) -> Result<()> {
        let layers = (0..self.network.layers()).map(Group::Layer);
        let table = self.network.spec.per_layer.map(|_| Group::Table);
        let mut groups = layers.chain([Group::Embedding, Group::Head]).chain(table);
        groups.try_for_each(|group| {
            self.measured.set(group, self.exact.fetch(group)?);
            Ok(())
        })
    }

    /// The loss when every unit uses its chosen candidate.
    fn loss_of(&self, units: &BTreeMap<SublayerId, usize>) -> Result<f64> {
        for layer in 0..self.network.layers() {
            self.put(layer, |p| {
                self.formats[units.get(&(layer, p.sublayer)).copied().unwrap_or(0)]
            })?;
        }
        let _phase = progress::phase("measuring the choice", 0, "");
        let loss = self.embed().and_then(|xs| self.loss_from(0, &xs));
        self.reset()?;
        loss
    }

    /// Chooses the candidates with the least rise of the loss within `budget` bytes.
    ///
    /// Errors: even the smallest format for all weights exceeds the budget.
    pub fn choose(&self, weights: &Weights, params: &[ParamInfo], budget: u64) -> Result<FormatChoice> {
        let mut costs: BTreeMap<SublayerId, Vec<u64>> = BTreeMap::new();
        let mut fixed = 0;
        for p in params {
            let own = weights.info(&p.name).map_or(0, |i| i.bytes);
            let (Group::Layer(layer), true, &[rows, columns]) = (p.group, is_projection(p), p.shape.as_slice()) else {
                fixed += own;
                continue;
            };
            let sum = costs
                .entry((layer, p.sublayer))
                .or_insert_with(|| vec![0; self.formats.len()]);
            for (sum, format) in sum.iter_mut().zip(&self.formats) {
                *sum += format.map_or(own, |f| f.bytes(rows, columns));
            }
        }
        let last = self.formats.len() - 1;
        let smallest: BTreeMap<SublayerId, usize> = costs.keys().map(|u| (*u, last)).collect();
        let smallest_bytes = fixed + total(&costs, &smallest);
        if smallest_bytes > budget {
            return Err(Error::new("the model does not fit the budget in the smallest format")
                .at("--budget")
                .found(format!("{} with {} everywhere", bytes(smallest_bytes), self.name(last)))
                .expected(format!("at most {}", bytes(budget)))
                .hint("give a larger budget, or a smaller format with --to"));
        }
        let units = allot(&self.rises, &costs, budget - fixed);
        let format_of = |p: &ParamInfo| match p.group {
            Group::Layer(layer) if is_projection(p) => self.formats[*units.get(&(layer, p.sublayer))?],
            _ => None,
        };
        let formats = params
            .iter()
            .filter_map(|p| Some((p.name.clone(), format_of(p)?)))
            .collect();
        Ok(FormatChoice {
            formats,
            bytes: fixed + total(&costs, &units),
            budget,
            loss: self.loss_of(&units)?,
            smallest: self.loss_of(&smallest)?,
            smallest_bytes,
            units,
        })
    }

    fn name(&self, candidate: usize) -> String {
        self.formats[candidate].map_or(self.stored.clone(), |f| f.name().to_string())
    }

    /// The measurements and the choice, as Markdown.
    pub fn text(&self, choice: &FormatChoice) -> String {
        let mut out = format!(
            "\n## Bits per layer\n\nBudget {}, chosen {}. Measured on {} tokens.\n\n\
             | weights | bytes | loss |\n|---|---|---|\n\
             | unchanged | - | {:.4} |\n| this choice | {} | {:.4} |\n| {} everywhere | {} | {:.4} |\n\n\
             Increase of the loss if only this part is stored in this format:\n\n| layer | part |",
            bytes(choice.budget),
            bytes(choice.bytes),
            self.tokens,
            self.base,
            bytes(choice.bytes),
            choice.loss,
            self.name(self.formats.len() - 1),
            bytes(choice.smallest_bytes),
            choice.smallest,
        );
        for candidate in 1..self.formats.len() {
            out.push_str(&format!(" {} |", self.name(candidate)));
        }
        out.push_str(" chosen |\n|---|---|");
        out.push_str(&"---|".repeat(self.formats.len()));
        out.push('\n');
        for ((layer, sublayer), rises) in &self.rises {
            let part_name = if *sublayer == Sublayer::Attention {
                "attention"
            } else {
                "mlp"
            };
            let rises: String = rises.iter().skip(1).map(|r| format!(" {r:.5} |")).collect();
            let chosen = choice
                .units
                .get(&(*layer, *sublayer))
                .map_or(String::new(), |c| self.name(*c));
            out.push_str(&format!("| {layer} | {part_name} |{rises} {chosen} |\n"));
        }
        out
    }
}

fn total(costs: &BTreeMap<SublayerId, Vec<u64>>, units: &BTreeMap<SublayerId, usize>) -> u64 {
    costs
        .iter()
        .map(|(unit, c)| c[units.get(unit).copied().unwrap_or(0)])
        .sum()
}

/// Returns the candidate of each unit: the least sum of rises within `budget`. The smallest candidates must fit into
/// it.
fn allot(
    rises: &BTreeMap<SublayerId, Vec<f64>>,
    costs: &BTreeMap<SublayerId, Vec<u64>>,
    budget: u64,
) -> BTreeMap<SublayerId, usize> {
    let at = |lambda: f64| -> BTreeMap<SublayerId, usize> {
        let best = |(unit, costs): (&SublayerId, &Vec<u64>)| {
            let price = |i: usize| rises.get(unit).map_or(0.0, |r| r[i]) + lambda * costs[i] as f64;
            let best = (0..costs.len()).min_by(|a, b| price(*a).total_cmp(&price(*b)));
            (*unit, best.unwrap_or(0))
        };
        costs.iter().map(best).collect()
    };
    let smallest = costs.iter().map(|(unit, c)| (*unit, c.len() - 1)).collect();
    // λ = 0 gives the least rise; the largest λ the fewest bytes.
    let mut chosen = at(0.0);
    if total(costs, &chosen) > budget {
        let (mut low, mut high) = (0.0f64, 1.0f64);
        chosen = smallest;
        for _ in 0..100 {
            let middle = if low == 0.0 { high * 1e-3 } else { (low * high).sqrt() };
            let tried = at(middle);
            if total(costs, &tried) <= budget {
                (high, chosen) = (middle, tried);
            } else {
                low = middle;
            }
            if high < 1e-30 {
                break;
            }
        }
    }
    // Spends the rest of the budget on the change with the largest reduction of the rise.
    loop {
        let left = budget - total(costs, &chosen);
        let steps = chosen
            .iter()
            .flat_map(|(unit, now)| (0..*now).map(move |to| (*unit, *now, to)));
        let gain = |(unit, now, to): &(SublayerId, usize, usize)| rises.get(unit).map_or(0.0, |r| r[*now] - r[*to]);
        let fits = |(unit, now, to): &(SublayerId, usize, usize)| costs[unit][*to] <= costs[unit][*now] + left;
        let best = steps.filter(fits).max_by(|a, b| gain(a).total_cmp(&gain(b)));
        match best.filter(|step| gain(step) > 0.0) {
            Some((unit, _, to)) => chosen.insert(unit, to),
            None => return chosen,
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Units with random rises and sizes; the candidates are 16, 8 and 4 bits.
    fn problem(seed: u64, n: usize) -> (BTreeMap<SublayerId, Vec<f64>>, BTreeMap<SublayerId, Vec<u64>>) {
        use crate::base::rng::{Rng, Stream};
        let rng = Rng::new(seed, Stream::Init, &[]);
        let (mut rises, mut costs) = (BTreeMap::new(), BTreeMap::new());
        for i in 0..n {
            let unit = (i, Sublayer::Mlp);
            let (a, b) = (rng.uniform(2 * i as u64) as f64, rng.uniform(2 * i as u64 + 1) as f64);
            rises.insert(unit, vec![0.0, 0.01 * a, 0.01 * a + b]);
            let size = 100 + 50 * (i as u64 % 3);
            costs.insert(unit, vec![4 * size, 2 * size, size]);
        }
        (rises, costs)
    }

    fn rise(rises: &BTreeMap<SublayerId, Vec<f64>>, units: &BTreeMap<SublayerId, usize>) -> f64 {
        units.iter().map(|(u, c)| rises[u][*c]).sum()
    }

    /// Compares the result for 6 units with the best of all combinations.
    #[test]
    fn the_choice_comes_near_the_best_of_all() {
        for seed in 0..20 {
            let (rises, costs) = problem(seed, 6);
            let least: u64 = costs.values().map(|c| c[2]).sum();
            for budget in [least, least * 3 / 2, least * 2, least * 3, least * 4] {
                let chosen = allot(&rises, &costs, budget);
                assert!(total(&costs, &chosen) <= budget);
                let mut best = f64::MAX;
                for code in 0..3usize.pow(6) {
                    let units = (0..6)
                        .map(|i| ((i, Sublayer::Mlp), code / 3usize.pow(i as u32) % 3))
                        .collect();
                    if total(&costs, &units) <= budget {
                        best = best.min(rise(&rises, &units));
                    }
                }
                let got = rise(&rises, &chosen);
                assert!(got <= 1.5 * best + 0.01, "seed {seed} budget {budget}: {got} {best}");
            }
        }
    }

    #[test]
    fn the_loss_is_that_of_all_batches() {
        let assets = Path::new(env!("CARGO_MANIFEST_DIR")).join("assets");
        let model = ModelDir::open(
            &assets.join("tiny").to_string_lossy(),
            "main",
            &crate::setup::vocabulary::TextChanges::default(),
        )
        .unwrap();
        let rows = assets.join("world/eval.jsonl");
        let measured = measure(&model, &rows, Format::Int4 { group: 64 }, Dtype::F32, 600).unwrap();
        assert!(measured.batches.len() > 1);
        for most in [600, 700, 1000, 1700] {
            let batches = calibration(&model, &rows, most).unwrap();
            assert!(batches.iter().map(Batch::len).sum::<usize>() <= most, "{most}");
        }
        assert_eq!(calibration(&model, &rows, 1).unwrap().len(), 1);
        let (mut totals, objective) = (Totals::default(), CausalLm::new(model.spec.vocab));
        for batch in &measured.batches {
            totals.add(crate::engine::evaluate(&measured.network, &objective, batch).unwrap());
        }
        let (got, want) = (measured.base, totals.loss());
        assert!((got - want).abs() < 1e-9 * want, "{got} {want}");
    }

    #[test]
    fn a_weight_that_stays_has_the_type_of_its_file() {
        use crate::formats::StoredDtype;
        use crate::formats::writer::{self, TensorPlan, Values};
        let dir = tempfile::tempdir().unwrap();
        let plan = TensorPlan {
            name: "a".into(),
            dtype: StoredDtype::F16,
            shape: vec![1, 4],
        };
        writer::write_file(&dir.path().join("model.safetensors"), &[plan], &[], |_, sink| {
            sink(Values::Raw(&[0; 8]))
        })
        .unwrap();
        let weights = Weights::open(dir.path()).unwrap();
        assert_eq!(
            (&*stored_type(&weights, "a"), &*stored_type(&weights, "b")),
            ("f16", "-")
        );
    }

    #[test]
    fn all_the_room_there_is_changes_nothing() {
        let (rises, costs) = problem(3, 10);
        let chosen = allot(&rises, &costs, u64::MAX / 2);
        assert!(chosen.values().all(|c| *c == 0));
    }
}
