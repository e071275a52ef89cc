//! The plan as a table and as JSON.

use super::PlanInputs;
use super::experts::{self, ExpertForecast};
use super::loss::LogitsChunk;
use super::model::PlanModel;
use crate::base::ledger::{Ledger, MemoryKind};
use crate::base::units::{bytes, count};
use crate::model::Spec;
use crate::model::spec::{EMBEDDING, LM_HEAD};
use crate::recipe::{Method, Recipe};
use crate::report;
use crate::setup::defaults::Choice;
use serde_json::{Value, json};

/// One line: the peak of this part, and its size at the moment of the total peak.
#[derive(Debug, Clone, PartialEq)]
pub struct PlanLine {
    pub key: &'static str,
    pub label: String,
    pub bytes: u64,
    /// The total peak is the sum over the lines.
    pub at_peak: u64,
    pub note: String,
}

#[derive(Debug, Clone, PartialEq)]
pub struct Plan {
    /// The chosen values of open settings.
    pub choices: Vec<Choice>,
    /// The whole strategy of a step, in words.
    pub strategy: Vec<(&'static str, String)>,
    pub lines: Vec<PlanLine>,
    pub peak_bytes: u64,
    /// With a GPU: the peak of host memory.
    pub peak_host_bytes: Option<u64>,
    /// The moment of the peak.
    pub peak_moment: String,
    /// Parameters of the model, adapters included.
    pub parameters: u64,
    /// Active parameters in the worst block.
    pub trained_parameters: u64,
    /// The experts that a micro-batch brings to the device; `None`: they are always there.
    pub experts: Option<ExpertForecast>,
}

impl Plan {
    /// Lines, their largest size, their size at the peak, and a note each.
    pub fn table(&self) -> String {
        self.table_within(None)
    }

    /// As `table`, no line wider than `columns`.
    pub fn table_within(&self, columns: Option<usize>) -> String {
        let width = self.lines.iter().map(|l| l.label.len()).max().unwrap_or(0).max(12);
        let mut out = format!("{:width$}  {:>10}  {:>10}\n", "", "largest", "at peak");
        for l in &self.lines {
            let row = format!("{:width$}  {:>10}  {:>10}  ", l.label, bytes(l.bytes), bytes(l.at_peak));
            out.push_str(&report::with_note(row, &l.note, columns));
        }
        let row = format!("{:width$}  {:>10}  {:>10}  ", "peak", "", bytes(self.peak_bytes));
        out.push_str(&report::with_note(row, &format!("in {}", self.peak_moment), columns));
        if let Some(host) = self.peak_host_bytes {
            out.push_str(&format!("{:width$}  {:>10}  {:>10}\n", "on the host", "", bytes(host)));
        }
        let share = format!(
            "{} of {} trained at a time ({:.2} %)",
            count(self.trained_parameters),
            count(self.parameters),
            100.0 * self.trained_parameters as f64 / self.parameters.max(1) as f64
        );
        out.push_str(&report::with_note(
            format!("{:width$}  ", "parameters"),
            &share,
            columns,
        ));
        if let Some(experts) = self.experts {
            let text = format!(
                "{:.0} % of a layer's are read, {} for each micro-batch (the router is even)",
                100.0 * experts.share,
                bytes(experts.bytes as u64)
            );
            out.push_str(&report::with_note(format!("{:width$}  ", "experts"), &text, columns));
        }
        out.push_str("strategy of a step\n");
        let name = self.strategy.iter().map(|(name, _)| name.len()).max().unwrap_or(0);
        for (setting, value) in &self.strategy {
            out.push_str(&report::with_note(format!("  {setting:name$}  "), value, columns));
        }
        if !self.choices.is_empty() {
            out.push_str("chosen\n");
        }
        let key = self.choices.iter().map(|c| c.key.0.len()).max().unwrap_or(0);
        let value = self.choices.iter().map(|c| c.value.len()).max().unwrap_or(0);
        for c in &self.choices {
            let row = format!("  {:key$}  {:value$}  ", c.key, c.value);
            out.push_str(&report::with_note(row, &c.why, columns));
        }
        out
    }

    /// Every line in bytes under its key, and the total as `peak_bytes`.
    pub fn json(&self) -> Value {
        let mut out = serde_json::Map::new();
        let mut at_peak = serde_json::Map::new();
        for l in &self.lines {
            out.insert(l.key.into(), json!(l.bytes));
            at_peak.insert(l.key.into(), json!(l.at_peak));
        }
        out.insert("peak_bytes".into(), json!(self.peak_bytes));
        if let Some(host) = self.peak_host_bytes {
            out.insert("peak_host_bytes".into(), json!(host));
        }
        out.insert("peak_moment".into(), json!(self.peak_moment));
        out.insert("at_peak".into(), Value::Object(at_peak));
        out.insert("parameters".into(), json!(self.parameters));
        out.insert("trained_parameters".into(), json!(self.trained_parameters));
        if let Some(experts) = self.experts {
            out.insert("expert_share".into(), json!(experts.share));
            out.insert("expert_bytes".into(), json!(experts.bytes));
        }
        let setting = |(name, value): &(&str, String)| (name.replace(' ', "_").to_lowercase(), json!(value));
        out.insert(
            "strategy".into(),
            Value::Object(self.strategy.iter().map(setting).collect()),
        );
        let choice = |c: &Choice| (c.key.to_string(), json!({"value": c.value, "why": c.why}));
        out.insert(
            "chosen".into(),
            Value::Object(self.choices.iter().map(choice).collect()),
        );
        Value::Object(out)
    }
}

fn head_trained(spec: &Spec, inputs: &PlanInputs) -> bool {
    let head = if spec.tied { EMBEDDING } else { LM_HEAD };
    inputs.trains_rows_of(head) || inputs.turns.iter().any(|turn| turn.active.contains(head))
}

pub(super) fn plan(
    model: &PlanModel,
    recipe: &Recipe,
    inputs: &PlanInputs,
    l: Ledger,
    parameters: u64,
    trained: u64,
) -> Plan {
    let answers = match inputs.rollout {
        0 => ("answers of the evaluation", inputs.evaluation.answers),
        rollout => ("rollout", rollout),
    };
    let spec = model.spec;
    let n = count(inputs.tokens as u64);
    let state = match recipe.tune.method {
        Method::Block => "optimizer of the active block",
        _ => "optimizer",
    };
    let in_parts = (inputs.turns.iter()).any(|turn| inputs.head_chunk(spec, &turn.active).is_some());
    let chunk = LogitsChunk::new(spec, recipe, inputs, head_trained(spec, inputs), in_parts);
    let stored = &model.stored;
    let layers = if spec.layers.iter().any(|l| l.experts.is_some()) {
        "layers without experts, two experts"
    } else {
        "layers"
    };
    let gradients = match inputs.strategy.gradients {
        crate::engine::GradientStorage::Keep => "f32, kept until the update",
        _ => "f32, each applied and freed immediately",
    };
    let among = match inputs.machines {
        0 | 1 => format!("{} ranks", inputs.ranks),
        _ => format!("{} ranks of a machine", inputs.near()),
    };
    let lines = [
        (
            MemoryKind::Weights,
            "weights",
            "weights",
            match inputs.strategy.placement {
                super::Placement::Device => format!("all of them, {stored}"),
                super::Placement::Sharded => {
                    format!("a part of each layer on each of {among}, two whole {layers}, head and embedding; {stored}")
                }
                super::Placement::ShardedHost => format!(
                    "a part of the active matrices on each of {} ranks, two whole {layers}, the head; {stored}",
                    inputs.ranks
                ),
                super::Placement::ExpertParallel => format!(
                    "the experts of one of {} ranks, all other weights; {stored}",
                    inputs.ranks
                ),
                super::Placement::Host | super::Placement::Disk { head_rows: None } => {
                    format!("active weights, two {layers}, the head; {stored}")
                }
                super::Placement::Disk { .. } => {
                    format!("active weights, two {layers}, two chunks of the head; {stored}")
                }
            },
        ),
        (
            MemoryKind::Reference,
            "reference",
            "reference",
            "the start of the run, for the KL divergence".into(),
        ),
        (MemoryKind::Adapters, "adapters", "adapters", "f32".into()),
        (
            MemoryKind::Optimizer,
            "optimizer",
            state,
            format!("{}, {}", recipe.optimizer.name.name(), recipe.optimizer.state.name()),
        ),
        (
            MemoryKind::Averages,
            "averages",
            "averages",
            "moving averages of the active parameters, f32".into(),
        ),
        (
            MemoryKind::HostWeights,
            "host_weights",
            "weights on the host",
            match inputs.strategy.placement {
                super::Placement::Host => format!("all of them, {stored}"),
                super::Placement::ShardedHost => {
                    format!("a part of each layer on each of {among}, two whole layers; {stored}")
                }
                _ => "two prefetched layers".into(),
            },
        ),
        (
            MemoryKind::OffloadedInputs,
            "host_layer_inputs",
            "inputs on the host",
            format!("{n} tokens × {} × {} bytes per layer", spec.row(), inputs.element),
        ),
        (
            MemoryKind::HostGradients,
            "host_gradients",
            "gradients on the host",
            "sums of the part of a rank, and what is on its way".into(),
        ),
        (
            MemoryKind::InactiveMasters,
            "retired_halves",
            "inactive blocks",
            "low 16 bits of their fp32 master weights".into(),
        ),
        (MemoryKind::Gradients, "gradients", "gradients", gradients.into()),
        (
            MemoryKind::LayerInputs,
            "layer_inputs",
            "layer inputs",
            format!("{n} tokens × {} × {} bytes per layer", spec.row(), inputs.element),
        ),
        (
            MemoryKind::Activations,
            "activations",
            "saved activations",
            match inputs.strategy.saved_layers.min(spec.layers.len()) {
                0 => "none: all layers are recomputed".into(),
                layers => format!("of {layers} of {} layers, which are not recomputed", spec.layers.len()),
            },
        ),
        (
            MemoryKind::LayerWork,
            "layer_work",
            "work of one layer",
            match inputs.strategy.mlp_tokens.filter(|most| *most < inputs.tokens) {
                Some(most) => format!("{n} tokens, {} at a time in the MLP", count(most as u64)),
                None => format!("{n} tokens"),
            },
        ),
        (MemoryKind::Loss, "logits", "logits chunk", chunk.to_string()),
        (
            MemoryKind::Rollout,
            "rollout",
            answers.0,
            format!("KV cache of {} answers", answers.1),
        ),
        (
            MemoryKind::Teacher,
            "teacher",
            "teacher",
            inputs
                .teacher
                .as_ref()
                .map_or(String::new(), |t| format!("{}; its forward pass", t.storage.describe())),
        ),
        (
            MemoryKind::RewardModels,
            "reward_models",
            "reward models",
            "their weights and a forward pass".into(),
        ),
        (
            MemoryKind::Saving,
            "saving",
            "saving",
            "the largest tensor as f32".into(),
        ),
        (
            MemoryKind::Data,
            "data",
            "data",
            "tokenized rows and the batches of a step".into(),
        ),
        (
            MemoryKind::Scratch,
            "scratch",
            "scratch",
            format!("buffers of {} threads", inputs.threads),
        ),
        (
            MemoryKind::Process,
            "process",
            "program",
            "before the model is loaded".into(),
        ),
    ];
    // Only some stages have these.
    let rare = |kind| {
        matches!(
            kind,
            MemoryKind::Reference
                | MemoryKind::Rollout
                | MemoryKind::Teacher
                | MemoryKind::RewardModels
                | MemoryKind::Averages
                | MemoryKind::HostWeights
                | MemoryKind::OffloadedInputs
                | MemoryKind::HostGradients
        )
    };
    let lines = lines
        .into_iter()
        .filter(|(kind, ..)| !rare(*kind) || l.largest[*kind] > 0)
        .map(|(kind, key, label, note)| PlanLine {
            key,
            label: label.to_string(),
            bytes: l.largest[kind],
            at_peak: l.at_peak[kind],
            note,
        })
        .collect();
    Plan {
        choices: Vec::new(),
        strategy: inputs.strategy.describe(spec.layers.len()),
        lines,
        peak_bytes: l.peak,
        peak_host_bytes: inputs.on_gpu.then_some(l.host_peak),
        peak_moment: l.peak_moment,
        parameters,
        trained_parameters: trained,
        experts: experts::forecast(model, recipe, inputs),
    }
}
