//! The library calls of the parity tests. All other tests use the `ft` program.

use candle_core::{DType, Device, Tensor};
use ft::data::order::BatchStream;
use ft::data::{Batch, IGNORE, batch::Example};
use ft::distill::hidden::{HiddenDistance, HiddenLoss};
use ft::engine::{self, ActiveSet, Engine, GradientPass, StepStrategy};
use ft::generate;
use ft::model::{Network, Objective, ObjectiveNeeds};
use ft::ops::distill;
use ft::ops::step_stats::StepStats;
use ft::ops::transfer::Copier;
use ft::ops::{CpuBackend, step};
use ft::optim::{Optimizer, Schedule, Update};
use ft::recipe::{self, Dtype, ModelInit, Recipe};
use ft::setup::active_schedule::ActiveSchedule;
use ft::setup::rows::{RecipeRows, stream};
use ft::setup::vocabulary::TextChanges;
use ft::setup::{ModelDir, adapters};
use ft::sft::CausalLm;
use ft::source::StoragePolicy;
use ft::train::stage;
use std::collections::BTreeMap;
use std::path::Path;

/// One document: its ids, and which of them are trained.
pub type Document = Example;

/// The results of one forward and backward pass over concatenated documents.
pub struct Measured {
    /// `[T, V]` of each document, row-major.
    pub logits: Vec<Vec<f64>>,
    /// Sum over the trained tokens / their number.
    pub loss: f64,
    /// Gradients by name in the checkpoint.
    pub gradients: BTreeMap<String, Vec<f64>>,
}

pub fn values(t: &Tensor) -> Vec<f64> {
    let flat = t.to_dtype(DType::F32).unwrap().flatten_all().unwrap();
    flat.to_vec1::<f32>().unwrap().into_iter().map(f64::from).collect()
}

pub fn open(dir: &Path, adapter: Option<&Path>) -> Network {
    // Selects the CPU operations of all parity tests: FT_CPU=portable cargo test --release --test parity
    if let Ok(path) = std::env::var("FT_CPU") {
        CpuBackend::force(&path).unwrap_or_else(|e| panic!("{e}"));
    }
    let model =
        ModelDir::open(dir.to_str().unwrap(), "main", &TextChanges::default()).unwrap_or_else(|e| panic!("{e}"));
    model
        .infer(adapter, Some(Dtype::F32), &Device::Cpu)
        .unwrap_or_else(|e| panic!("{e}"))
}

pub fn batch(documents: &[Document]) -> Batch {
    Batch::from_examples(documents)
}

fn logits_of(network: &Network, batch: &Batch) -> Vec<Vec<f64>> {
    let ctx = network.context(&batch.positions, &batch.documents, None).unwrap();
    let hidden = network.hidden_states(&batch.ids, &ctx).unwrap();
    let head = network.head().unwrap();
    let mut all = values(&head.logits(&hidden).unwrap());
    if let Some(cap) = head.softcap {
        all.iter_mut().for_each(|x| *x = cap as f64 * (*x / cap as f64).tanh());
    }
    let vocab = all.len() / batch.len();
    let bounds = batch.documents.windows(2);
    bounds.map(|d| all[d[0] * vocab..d[1] * vocab].to_vec()).collect()
}

/// Logits of documents, with or without an adapter.
pub fn logits(dir: &Path, adapter: Option<&Path>, documents: &[Document]) -> Vec<Vec<f64>> {
    logits_of(&open(dir, adapter), &batch(documents))
}

/// Computes the loss and the gradient of every parameter for one window.
pub fn loss_and_grads(
    network: &Network,
    objective: &dyn Objective,
    batches: &[Batch],
    saved_layers: usize,
    input_offload: Option<&Copier>,
) -> (f64, BTreeMap<String, Vec<f64>>) {
    let names = network.spec.params().into_iter().map(|p| p.name.to_string());
    let own = network.objective_params.iter().map(|p| p.name.to_string());
    let active = ActiveSet::new(names.chain(own));
    let mut sink = engine::sinks::CollectGradients {
        active: &active,
        gradients: BTreeMap::new(),
    };
    let step_stats = StepStats::new(&network.device).unwrap();
    let pass = GradientPass {
        saved_layers,
        input_offload,
        ..GradientPass::new(network, objective, &active, &step_stats)
    };
    let totals = pass.window(batches, &mut sink).unwrap();
    let gradients = sink.gradients.iter().map(|(n, g)| (n.clone(), values(g)));
    (totals.with(step_stats.read().unwrap()).loss(), gradients.collect())
}

/// Loads a model directory in f32; computes logits, loss and the gradient of every parameter.
pub fn logits_and_grads(dir: &Path, documents: &[Document]) -> Measured {
    let network = open(dir, None);
    let batch = batch(documents);
    let logits = logits_of(&network, &batch);
    let (objective, batches) = (CausalLm::new(network.spec.vocab), [batch]);
    let (loss, gradients) = loss_and_grads(&network, &objective, &batches, 0, None);
    // Offloaded layer inputs give the same bits.
    let copier = Copier::new(&network.device).unwrap();
    let (_, again) = loss_and_grads(&network, &objective, &batches, 1, Some(&copier));
    for (name, gradient) in &gradients {
        assert_eq!(gradient, &again[name], "{name}");
    }
    Measured {
        logits,
        loss,
        gradients,
    }
}

/// Parses a recipe with these lines and placeholders for required keys.
fn parse(lines: &str) -> Recipe {
    let text = format!("[model]\npath = \"unused\"\n[data]\ntrain = \"unused.jsonl\"\n{lines}");
    recipe::parse(&text, "parity", &[])
        .unwrap_or_else(|e| panic!("{e}\n{text}"))
        .recipe
}

/// Multipliers of steps 1 to `steps`; `lines` is the `[schedule]` table.
pub fn multipliers(lines: &str, steps: u64) -> Vec<f64> {
    let schedule = Schedule::new(&parse(lines).schedule, steps);
    (1..=steps).map(|k| schedule.multiplier(k)).collect()
}

/// One parameter `[3, 4]` with an optimizer (`lines` is the `[optimizer]` table): the weights and the stored moments
/// after each step.
pub fn optimizer_steps(lines: &str, start: &[f32], gradients: &[Vec<f32>]) -> Vec<(Vec<f64>, Vec<f64>, Vec<f64>)> {
    let settings = parse(lines).optimizer;
    let lr = settings.learning_rate;
    let mut optimizer = Optimizer::new(settings);
    let tensor = |v: &[f32]| Tensor::from_slice(v, (3, 4), &Device::Cpu).unwrap();
    let weight = tensor(start);
    let mut out = Vec::new();
    for gradient in gradients {
        let gradient = tensor(gradient);
        let update = Update {
            name: "w",
            weight: &weight,
            gradient: &gradient,
            subset: None,
        };
        optimizer.update_all(&[update], lr, 1.0).unwrap();
        let parts = optimizer.saved().next().map(|s| s.parts).unwrap_or_default();
        let part = |name| {
            parts
                .iter()
                .find(|(n, _)| *n == name)
                .map_or(vec![], |(_, t)| values(t))
        };
        let (m, v) = (part("m"), part("v"));
        out.push((values(&weight), m, v));
    }
    out
}

/// Elements per block of an eight-bit moment.
pub const INT8_BLOCK: usize = step::BLOCK;

/// The table of eight-bit code values.
pub fn code_table(signed: bool) -> [f32; 256] {
    step::code_table(signed)
}

/// Quantized codes and scales of `values`.
pub fn encode(values: &[f32], signed: bool) -> (Vec<u8>, Vec<f32>) {
    step::quantize_moment(values, signed)
}

/// AdamW with eight-bit moments on one vector (`lines` is the `[optimizer]` table): the weights after each step.
/// Parameters with so few elements keep f32 moments in a run, so this calls the rule directly, without `Optimizer`.
pub fn int8_steps(lines: &str, start: &[f32], gradients: &[Vec<f32>]) -> Vec<Vec<f32>> {
    let settings = parse(lines).optimizer;
    let n = start.len();
    let tensor = |v: &[f32]| Tensor::from_slice(v, n, &Device::Cpu).unwrap();
    let zeros = || step::Moment::zeros(n, true, &Device::Cpu).unwrap();
    let (weight, first, second) = (tensor(start), zeros(), zeros());
    let mut out = Vec::new();
    for (k, gradient) in gradients.iter().enumerate() {
        let item = step::ParameterStep {
            weight: &weight,
            precision: step::Precision::Whole,
            gradient: &tensor(gradient),
            first: Some(&first),
            second: Some(&second),
            lr: settings.learning_rate,
            weight_decay: 0.0,
            step: k as u64 + 1,
            begin: 0,
        };
        let rule = step::UpdateRule::Adamw {
            betas: settings.betas,
            eps: settings.eps,
        };
        step::step(rule, &[item], 1.0).unwrap();
        out.push(weight.to_vec1::<f32>().unwrap());
    }
    out
}

/// Ids and trained positions of every row of a file, as in a training run.
pub fn rows(model: &Path, file: &Path, stage: &str) -> Vec<Document> {
    let quoted = |p: &Path| serde_json::to_string(p.to_str().unwrap()).unwrap();
    let text = format!(
        "[model]\npath = {}\n[data]\ntrain = {}\nmax_length = 512\nshuffle = false\npacking = false\n[train]\nstage = \"{stage}\"\n",
        quoted(model),
        quoted(file)
    );
    let recipe = recipe::parse(&text, "parity", &[])
        .unwrap_or_else(|e| panic!("{e}"))
        .recipe;
    let rows = RecipeRows::read(&recipe, &described(&recipe)).unwrap_or_else(|e| panic!("{e}"));
    rows.train.examples.head(usize::MAX).unwrap()
}

/// A recipe for these rows and this model.
fn preference_recipe(model: &Path, rows: &Path, lines: &str) -> Recipe {
    let mut text = String::from(lines);
    // The goldens of text rows use no chat template.
    for (table, key, value) in [
        ("model", "path", model.to_str().unwrap()),
        ("data", "train", rows.to_str().unwrap()),
        ("data", "render", "plain"),
    ] {
        let line = format!("{key} = {}\n", serde_json::to_string(value).unwrap());
        match text.find(&format!("[{table}]\n")) {
            Some(at) => text.insert_str(at + table.len() + 3, &line),
            None => text.push_str(&format!("[{table}]\n{line}")),
        }
    }
    recipe::parse(&text, "parity", &[])
        .unwrap_or_else(|e| panic!("{e}\n{text}"))
        .recipe
}

fn described(recipe: &Recipe) -> ModelDir {
    ModelDir::open(&recipe.model.path.to_string(), "main", &TextChanges::default()).unwrap_or_else(|e| panic!("{e}"))
}

/// The documents of each preference row, as in a training run.
pub fn preference_rows(model: &Path, file: &Path, lines: &str) -> Vec<Vec<Document>> {
    let recipe = preference_recipe(model, file, lines);
    let rows = RecipeRows::read(&recipe, &described(&recipe)).unwrap_or_else(|e| panic!("{e}"));
    (0..rows.train.examples.len())
        .map(|row| rows.train.parts(row).unwrap())
        .collect()
}

/// The result of the first step of a preference stage.
pub struct Preferred {
    pub loss: f64,
    /// The reference's log-probability of each document, if the stage uses one.
    pub reference: Vec<f64>,
    pub metrics: Vec<(&'static str, f64)>,
    pub gradients: BTreeMap<String, Vec<f64>>,
}

/// Runs the first step with the policy of one directory and the reference of another; `score`: the head of a reward
/// model.
pub fn preference_step(policy: &Path, reference: &Path, rows: &Path, lines: &str, score: Option<&[f64]>) -> Preferred {
    let recipe = preference_recipe(policy, rows, lines);
    let model = described(&recipe);
    let rows = RecipeRows::read(&recipe, &model).unwrap_or_else(|e| panic!("{e}"));
    let setting = stage::StageContext {
        recipe: &recipe,
        spec: &model.spec,
        model: &model,
        device: &Device::Cpu,
        run_dir: Path::new(""),
        train: &rows.train,
        stream: BatchStream::new(&rows.train, stream(&recipe, rows.train.examples.len())).unwrap(),
        eval: None,
        questions: None,
        is_root: true,
    };
    let other = ModelDir::open(reference.to_str().unwrap(), "main", &TextChanges::default()).unwrap();
    let storage = StoragePolicy::dense(Dtype::F32);
    let loaded = other.load(&storage, ModelInit::Pretrained, 0, &Device::Cpu).unwrap();
    let (strategy, none) = (StepStrategy::new(Dtype::F32), ActiveSet::new([]));
    let adapter_set = adapters::of(&recipe, &model.spec).unwrap();
    let start = stage::PolicyStart {
        network: &loaded.network,
        strategy: &strategy,
        schedule: &ActiveSchedule::new(&recipe, &model.spec, &model.spec.params(), &adapter_set).unwrap(),
    };
    let stage::Stage {
        batches: mut source,
        objective,
    } = stage::open(setting, &start).unwrap_or_else(|e| panic!("{e}"));
    let optimizer = Optimizer::new(recipe.optimizer.clone());
    let engine = Engine::new(loaded, objective, optimizer, strategy, &none).unwrap();
    source.prepare(&engine).unwrap_or_else(|e| panic!("{e}"));
    let batches = source.window(0, &engine).unwrap_or_else(|e| panic!("{e}"));
    let mut optimizer = engine.optimizer;
    let objective = engine.objective;
    let mut network = open(policy, None);
    network.objective_params = objective.params();
    if let Some(score) = score {
        let values: Vec<f32> = score.iter().map(|x| *x as f32).collect();
        let param = &network.objective_params[0];
        optimizer.restore_weight(&param.name, &param.tensor, &values).unwrap();
    }
    let (loss, gradients) = loss_and_grads(&network, objective.as_ref(), &batches, 0, None);
    let found = batches
        .iter()
        .filter_map(|b| b.columns.documents.get("reference_logps"));
    Preferred {
        loss,
        reference: found.flatten().map(|x| f64::from(*x)).collect(),
        metrics: objective.metrics(),
        gradients,
    }
}

/// A prompt; the answer is greedy, with at most 40 tokens and 128 positions.
pub struct Question {
    pub prompt: Vec<u32>,
    pub stops: Vec<u32>,
}

/// The limits of a batch.
#[derive(Debug, Clone, Copy)]
pub struct Setup {
    pub rows: usize,
    pub prefill_tokens: usize,
    pub share_prefixes: bool,
    pub same_bits: bool,
    pub kv_cache: Option<generate::KvDtype>,
}

impl Setup {
    pub const ALL: Self = Self {
        rows: 64,
        prefill_tokens: 1024,
        share_prefixes: true,
        same_bits: false,
        kv_cache: None,
    };

    pub fn stored(kv_cache: &str) -> Self {
        let kv_cache = Some(match kv_cache {
            "bf16" => generate::KvDtype::Bf16,
            _ => generate::KvDtype::Int8,
        });
        Self { kv_cache, ..Self::ALL }
    }
}

/// Answers all questions in one batch; also returns the speed.
pub fn rollouts(dir: &Path, questions: &[Question], setup: Setup) -> (Vec<generate::Answer>, generate::GenerateStats) {
    let network = open(dir, None);
    let requests: Vec<generate::Request> = questions
        .iter()
        .zip(0..)
        .map(|(q, number)| generate::Request {
            prompt: q.prompt.clone(),
            number,
        })
        .collect();
    let settings = generate::GenerateSettings {
        max_new_tokens: 40,
        stop_ids: questions[0].stops.clone(),
        limits: generate::GenerateLimits {
            rows: setup.rows,
            prefill_tokens: setup.prefill_tokens,
            share_prefixes: setup.share_prefixes,
            same_bits: setup.same_bits,
            kv_cache: setup.kv_cache,
            ..generate::GenerateLimits::default()
        },
        ..generate::GenerateSettings::default()
    };
    generate::answer(&network, &requests, &settings, &mut |_, _| Ok(())).unwrap()
}

/// One case of a divergence: sizes N, D, V, Dt, Vt, and row-major values.
pub struct Distillation<'a> {
    pub sizes: [usize; 5],
    pub h: &'a [f32],
    pub head: &'a [f32],
    pub teacher_h: &'a [f32],
    pub teacher_head: &'a [f32],
    /// A negative label means not trained.
    pub labels: &'a [i64],
    pub beta: f32,
    pub temperature: f32,
    pub alpha: f32,
    pub softcap: Option<f32>,
    pub teacher_softcap: Option<f32>,
    pub chunk: usize,
}

fn matrix(values: &[f32], rows: usize, columns: usize) -> Tensor {
    Tensor::from_slice(values, (rows, columns), &Device::Cpu).unwrap()
}

fn targets(labels: &[i64]) -> Vec<u32> {
    labels.iter().map(|l| u32::try_from(*l).unwrap_or(IGNORE)).collect()
}

/// Mean loss, and its gradients with respect to the hidden states and the head.
pub fn divergence(case: &Distillation) -> (f64, Vec<f64>, Vec<f64>) {
    let [n, d, v, dt, vt] = case.sizes;
    let tensors = [
        matrix(case.h, n, d),
        matrix(case.head, v, d),
        matrix(case.teacher_h, n, dt),
        matrix(case.teacher_head, vt, dt),
    ];
    let targets = targets(case.labels);
    let trained = targets.iter().filter(|t| **t != IGNORE).count() as f64;
    let side = |h, head, softcap| distill::DistillSide {
        h,
        head: distill::HeadMatrix::Whole(head),
        softcap,
    };
    let options = distill::DistillOptions {
        beta: case.beta,
        temperature: case.temperature,
        alpha: case.alpha,
        chunk: case.chunk,
        scale: 1.0 / trained,
        need_dh: true,
        need_dw: true,
    };
    let step_stats = StepStats::new(&Device::Cpu).unwrap();
    let teacher = distill::DistillTeacher::Live(side(&tensors[2], &tensors[3], case.teacher_softcap));
    let student = side(&tensors[0], &tensors[1], case.softcap);
    let out = distill::forward_backward(&student, &teacher, &targets, &options, &step_stats).unwrap();
    let loss = step_stats.read().unwrap().loss / trained;
    (loss, values(&out.dh.unwrap()), values(&out.dw.unwrap()))
}

/// Sum of the distances, and its gradients with respect to the states x and the projection. `sizes` are N, D, Dt.
#[allow(clippy::too_many_arguments)]
pub fn hidden_distance(
    [n, d, dt]: [usize; 3],
    x: &[f32],
    teacher: &[f32],
    projection: &[f32],
    labels: &[i64],
    weight: f64,
    cosine: bool,
) -> (f64, Vec<f64>, Vec<f64>) {
    let distance = if cosine { HiddenLoss::Cosine } else { HiddenLoss::Mse };
    let hidden = HiddenDistance::new(&[(1, 2)], d, dt, distance, weight, 0, &Device::Cpu).unwrap();
    ft::ops::update::set(&hidden.params()[0].tensor, projection).unwrap();
    let states = BTreeMap::from([(2, matrix(teacher, n, dt))]);
    let need = ObjectiveNeeds {
        scale: 1.0,
        dh: true,
        dw: false,
    };
    let out = hidden
        .compare(1, &matrix(x, n, d), &states, &targets(labels), need)
        .unwrap();
    (
        out.loss,
        values(&out.dx.unwrap()),
        values(&out.objective_params[0].gradient),
    )
}

/// One case of a distillation from a teacher with another tokenizer: sizes N, D, V, Nt, Dt, Vt, and row-major values.
pub struct AlignedCase<'a> {
    pub sizes: [usize; 6],
    pub h: &'a [f32],
    pub head: &'a [f32],
    pub teacher_h: &'a [f32],
    pub teacher_head: &'a [f32],
    /// A negative label means not trained.
    pub labels: &'a [i64],
    pub teacher_labels: &'a [i64],
    /// Rows of the student, then of the teacher.
    pub spans: &'a [[usize; 4]],
    /// Shared ids of student and teacher; `None`: distributions are compared by rank.
    pub shared: Option<Vec<(u32, u32)>>,
    pub beta: f32,
    pub temperature: f32,
    pub alpha: f32,
    pub softcap: Option<f32>,
    pub teacher_softcap: Option<f32>,
    pub chunk: usize,
    /// Rows of a part of the heads; `None`: whole heads.
    pub parts: Option<usize>,
}

/// Mean loss, and its gradients with respect to the hidden states and the head (empty for heads in parts).
pub fn aligned(case: &AlignedCase) -> (f64, Vec<f64>, Vec<f64>) {
    use distill::aligned::{AlignedOptions, AlignedSpan, Comparison, SharedIds, forward_backward};
    let [n, d, v, nt, dt, vt] = case.sizes;
    let tensors = [
        matrix(case.h, n, d),
        matrix(case.head, v, d),
        matrix(case.teacher_h, nt, dt),
        matrix(case.teacher_head, vt, dt),
    ];
    let labels = targets(case.labels);
    let trained = labels.iter().filter(|t| **t != IGNORE).count() as f64;
    let spans: Vec<AlignedSpan> = case
        .spans
        .iter()
        .map(|s| AlignedSpan {
            student: s[0]..s[1],
            teacher: s[2]..s[3],
        })
        .collect();
    let shared = case.shared.clone().map(|pairs| SharedIds { pairs });
    let options = AlignedOptions {
        comparison: shared.as_ref().map_or(Comparison::Sorted, Comparison::Matched),
        common: distill::DistillOptions {
            beta: case.beta,
            temperature: case.temperature,
            alpha: case.alpha,
            chunk: case.chunk,
            scale: 1.0 / trained,
            need_dh: true,
            need_dw: case.parts.is_none(),
        },
    };
    let step_stats = StepStats::new(&Device::Cpu).unwrap();
    let part = |head: &Tensor, first: usize| {
        let rows = head.dim(0).unwrap();
        let count = case.parts.unwrap_or(rows).min(rows - first);
        Ok(head.narrow(0, first, count).unwrap())
    };
    let (own, other) = (|first| part(&tensors[1], first), |first| part(&tensors[3], first));
    let pieces = |rows, width, part| ft::ops::cross_entropy::OutputPieces {
        rows,
        width,
        rows_of_part: case.parts.unwrap_or(rows),
        part,
    };
    let (own, other) = (pieces(v, d, &own), pieces(vt, dt, &other));
    let side = |h, head, pieces, softcap| distill::DistillSide {
        h,
        head: match case.parts {
            Some(_) => distill::HeadMatrix::Parts(pieces),
            None => distill::HeadMatrix::Whole(head),
        },
        softcap,
    };
    let student = side(&tensors[0], &tensors[1], &own, case.softcap);
    let teacher = side(&tensors[2], &tensors[3], &other, case.teacher_softcap);
    let teacher_labels = targets(case.teacher_labels);
    let out = forward_backward(
        &student,
        &teacher,
        &labels,
        &teacher_labels,
        &spans,
        &options,
        &step_stats,
    )
    .unwrap();
    let loss = step_stats.read().unwrap().loss / trained;
    let dw = out.dw.map_or(Vec::new(), |dw| values(&dw));
    (loss, values(&out.dh.unwrap()), dw)
}
