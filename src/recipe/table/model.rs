//! Model, memory and data.

use super::*;
use crate::ops::quantized::Products;
use crate::recipe::peers;
use crate::source::policy::StorageRules;

named!(
    /// Source of the initial weights.
    ModelInit {
        /// The weights in the model directory.
        Pretrained = "pretrained",
        /// Drawn from a normal distribution with the config's `initializer_range`.
        Random = "random",
    }
);
named!(
    /// The goal of the `auto` settings of the planner.
    MemoryGoal {
        /// `Balanced` on a CPU without a budget, else `Fast`.
        Auto = "auto",
        /// Memory for speed only where it pays.
        Balanced = "balanced",
        /// As fast as the memory allows.
        Fast = "fast",
    }
);
named!(Tier { Auto = "auto", Device = "device", Host = "host", Disk = "disk" });
named!(Activations { Auto = "auto", Keep = "keep", Recompute = "recompute", Host = "host" });

section! {
    /// The model and its computation.
    pub struct Model in "model" {
        /// Hub id (`org/name`, `org/name@revision`), local directory, or `shape:NAME` (seeded random weights of a built-in shape, for plans and
        /// benchmarks).
        path: ModelRef, resume BASE_MODEL;
        /// Branch, tag or commit of a hub model.
        revision: String = "main", "the default branch of every hub repository", resume BASE_MODEL;
        /// Data type of unquantized weights and of matrix multiplications. `final/` is stored in it.
        dtype: Dtype = "bf16", "half the memory of f32; sums and optimizer states stay in f32";
        /// `auto`, `cpu`, or `cuda:0` and so on.
        device: DeviceRef = "auto", "the first GPU that this build supports, else the CPU";
        /// `random` initializes the weights at random, for pre-training.
        init: ModelInit = "pretrained", "fine-tuning starts from the weights in the model directory";
    }
}

section! {
    /// Storage of weights and activations. With `auto` the planner chooses.
    pub struct Memory in "memory" {
        /// Most memory to use, such as `22GiB`. On a CPU, if you give a size and the process uses more than this size
        /// plus 10 %, the run stops after the step and saves its state.
        budget: Option<u64> = "auto", "the free memory of the device at the start", resume FREE;
        /// With a GPU: most host memory to use. Set it to plan for a GPU in another machine. On a CPU it has no effect
        /// and is an error.
        host_budget: Option<u64> = "auto", "the free memory of this machine at the start";
        /// How much memory `activations` takes for speed while it is `auto`. `fast`: as much as there is. `balanced`: only
        /// if a step gets at least 1 % faster for each 4 % of the peak, and freely below 1 GiB; `ft plan` shows what
        /// `fast` would give and cost.
        goal: MemoryGoal = "auto", "`balanced` on a CPU; `fast` on a GPU, and with a `budget`, which says how much may be taken";
        /// Storage of the projections of the layers that are not trained. Quantized, they take a half (`int8`) to a
        /// quarter (`int4`, `nf4`) of the memory of bf16, and lose precision. `bf16` in an f32 model takes half the memory; matrix
        /// multiplications with it are exact. Norms, biases, embedding and head stay in `model.dtype`.
        frozen_weights: Auto<WeightStorage> = "auto", "as `model.dtype`; `int8` or `nf4` if nothing else fits (lossy; `ft plan` shows it)";
        /// A different storage for some projections, by prefixes of parameter names (`"layers.0."`) or by patterns with
        /// `*` (`"*.down_proj.*"`). The longest match applies.
        overrides: Vec<(String, WeightStorage)> = {}, "the same storage for every projection";
        /// Number of weights that share a scale: 64 or 128 for `int4`, 128 for `int8`. `nf4` has blocks of 64.
        group_size: Option<usize> = "auto", "a whole row for `int8`, 64 for `int4`", in from(1);
        /// `nf4`: the scales of the blocks are stored in 8 bits.
        double_quantization: bool = true, "0.4 bits per weight less, as in QLoRA";
        /// On a GPU: how matrix multiplications with frozen projections that are stored as int8 with one scale per row are computed, for
        /// more than 8 tokens. `dequantized`: W is dequantized to `model.dtype`. `int8` and `fp8`: tensor cores multiply
        /// W with activations and gradients in 8 bits, with one scale per token; faster, and each result has an error of 1 to
        /// 5 %. `fp8` needs compute capability 8.9. With `frozen_weights = "auto"` the projections are stored as int8.
        frozen_products: Products = "dequantized", "operands are rounded once at most, to `model.dtype`";
        /// Where inactive weights are stored: on the `device`, in the memory of the `host` (the same on a CPU), or on
        /// the `disk`. On the `disk` they are read layer by layer, and trained weights are stored in files of the run.
        /// Results are bit-identical.
        tier: Tier = "auto", "on the device if they fit, else on the disk";
        /// With `tier = "disk"`: number of rows of the output projection that are loaded at a time (rounded up to a
        /// multiple of 4096); `0` loads all of it. Results are bit-identical on a CPU; on a GPU they differ by
        /// rounding.
        head_chunk: ChunkSize = "auto", "the whole projection if it fits", in from(0);
        /// Saved activations: `keep` saves all of them; `recompute` saves only layer inputs (gradient checkpointing);
        /// `host` is `recompute` with the layer inputs offloaded to host memory (GPU only); or `auto`. Results are
        /// bit-identical.
        activations: Activations = "auto",
            "saves the activations of as many layers as fit the budget, if it pays (`goal`); the other layers are recomputed \
             from their inputs";
        /// Number of tokens that an MLP processes at a time; it limits the size of the wide intermediate tensors. `0`
        /// processes all at once. Outputs are bit-identical; a gradient that is summed over the chunks can differ in
        /// its last bits.
        mlp_chunk: ChunkSize = "auto", "all tokens if they fit", in from(0);
    }
}

section! {
    /// The rows, their format, and the trained tokens.
    pub struct Data in "data" {
        /// File or list of files (jsonl, ndjson, json, csv, tsv, parquet, arrow, txt, md; also .gz and .zst), folders or patterns
        /// such as `data/*.jsonl`, relative to the current directory; or a hub dataset: `org/name`,
        /// `org/name:file.jsonl`. Not with `sources`.
        train: Vec<String>, resume TRAINING_ROWS;
        /// File or list of files to evaluate on.
        eval: Vec<String> = [], "no evaluation by default", resume EVALUATION_ROWS;
        /// Fraction of the train rows that are held out for evaluation, in place of `eval`.
        eval_fraction: f64 = 0.0, "all rows are training rows", in BELOW_ONE;
        /// Format of the rows.
        format: RowFormat = "auto",
            "detected from the columns of the first row of a file; `ft data` shows the format, the columns that are \
             read and the columns that are ignored";
        /// The column of each use, for columns without a usual name: `{ prompt = "question", completion = "answers.text[0]" }`.
        /// `role` and `content` are the fields of a message.
        columns: Vec<(ColumnRole, String)> = {}, "found by their names; `ft data` shows what is read";
        /// Roles of messages with unusual names: `{ Customer = "user", Agent = "assistant" }`.
        roles: Vec<(String, ChatRole)> = {}, "`human`, `gpt`, `bot`, `model` and the like are known";
        /// The prompt as a text with columns in braces: `"{context}\n\nQuestion: {question}"`; `{{` and `}}` are braces.
        prompt_template: Option<String> = "", "the prompt is one column";
        /// The system message of conversations without one.
        system_prompt: Option<String> = "", "conversations stay as they are";
        /// The part of a text file (`.txt`, `.md`) that is a row: `line`, `paragraph` (up to a blank line) or `file`.
        text_unit: TextUnit = "auto", "`line` for `.txt`, as in Hugging Face datasets; `file` for `.md`";
        /// Number of rows to read from the training files, from the first one; `0`: all.
        limit: usize = 0, "all rows", in from(0);
        /// Configuration of a hub dataset, such as `main`.
        config: Option<String> = "", "the only one; if there are several, they are listed", resume TRAINING_ROWS;
        /// Split of a hub dataset or of a folder, for training.
        split: Auto<String> = "train", "the rows that are meant for training", resume TRAINING_ROWS;
        /// Split of a hub dataset or of a folder in `eval`.
        eval_split: Auto<String> = "auto", "`validation`, else `test`", resume EVALUATION_ROWS;
        /// Branch, tag or commit of hub datasets.
        revision: String = "main", "the current version", resume TRAINING_ROWS;
        /// Several sources with their own settings and weights, in place of `train`; a setting that is left out is that of
        /// `[data]`.
        sources: Vec<SourceKeys> = [], "give it, or `train`", resume OnResume::Path(PathContent::Sources);
        /// How a prompt and an answer (plain texts) are joined. `chat`: as a user and an assistant message, with the
        /// chat template; `plain`: concatenated; `auto`: `chat` if the model has a template and the stage is not
        /// `pretrain`. Conversations always use the template, text rows never.
        render: Render = "auto",
            "a chat model uses its template at inference too; rows that contain the markers of a template are \
             rendered already";
        /// Most tokens in a row.
        max_length: usize = 2048, "enough for most instruction rows; longer rows are counted and reported (`data.long`)",
            in between(2, 1 << 31);
        /// Rows longer than `max_length`: `truncate` keeps the first tokens; `drop` leaves the row out; `split` makes
        /// several rows of it. Pairs and prompts cannot be split.
        long: Long = "auto", "rows of plain text, and all rows in the stage `pretrain`, are split; others are truncated";
        /// Tokens that a piece of a split row repeats from the end of the piece before it, as context; they are not
        /// trained again.
        overlap: usize = 1, "every token is trained once, and a piece repeats as little as possible", in from(1);
        /// Stores the tokens of the rows in files that runs share: rows are tokenized once, and need little memory. The
        /// prompts of `grpo` and `ppo` are tokenized once too, and stay in memory with their columns.
        cache: Option<bool> = "auto", "`true` if the data files have 16 MiB or more: tokenizing takes seconds below that", resume FREE;
        /// Directory of these files. They can be removed at any time between runs.
        cache_dir: Auto<String> = "auto", "`.ft-tokens` beside the run directory", resume FREE;
        /// Most bytes of these files. Beyond it the files of the datasets that no run used for the longest time are
        /// removed when new ones are written; those of a run in progress stay.
        cache_limit: Option<u64> = "auto", "half of the space that the files and the free part of the disk have together", resume FREE;
        /// Reads rows during training in place of before it, for data that is too large to tokenize first. Needs
        /// `train.max_steps`.
        streaming: bool = false, "an exact shuffle of all rows, a run by epochs, and all rows checked before the first step";
        /// Number of rows that are read, shuffled and packed together.
        shuffle_window: usize = 10000, "neighboring rows are separated, and the rows of a window fit in memory",
            in between(1, 1 << 31);
        /// Several rows in one sequence of at most `packing_length` tokens; positions restart at each row.
        packing: bool = true, "no time is lost on padding; documents never attend to each other";
        /// Most tokens in a packed sequence, never above `max_length`; a longer row is not packed with others. No
        /// effect without `packing`.
        packing_length: usize = "auto",
            "`max_length`; less if the data has so few rows that the run would have too few steps",
            in from(2);
        /// `assistant`: every assistant turn; `completion`: the last answer only; `all`: every token.
        train_on: TrainOn = "assistant",
            "the model learns the answers, not the prompts; every token of a text row is trained";
        /// A new order in each epoch, from (seed, epoch). `false` reads rows in the order of the file.
        shuffle: bool = true, "neighboring rows of a file are often similar";
        /// `auto`, a path to a Jinja file, or the name of a format: `chatml`, `qwen2.5`, `qwen3`, `llama3`, `llama3.1`,
        /// `gemma`, `phi3`, `phi4`, `mistral`, `zephyr`, `alpaca`. Another template than the model's is saved in `final/`.
        chat_template: Auto<String> = "auto", "the template of the model";
        /// Variables of the chat template, such as `{ enable_thinking = false }`, in training, evaluation, rollouts and
        /// sample answers. The template in `final/` has them as defaults.
        template_kwargs: serde_json::Map<String, serde_json::Value> = {}, "the defaults of the template";
        /// Tokens that are added to the vocabulary. Each gets a row in the embedding and in the head: the mean of the
        /// rows of the tokens that its text was before. `auto` stands for tokens that the tokenizer has and the
        /// embedding has no row for. `tune.new_tokens` decides how they are trained.
        new_tokens: Vec<Auto<String>> = [], "the vocabulary of the model";
        /// As `new_tokens`, for control tokens: they are left out of decoded text, as `special` tokens of transformers.
        new_special_tokens: Vec<String> = [], "the vocabulary of the model";
        with quality: Quality;
    }
}

const INT8: Auto<WeightStorage> = Auto::Of(WeightStorage::Int8);
const INT4: Auto<WeightStorage> = Auto::Of(WeightStorage::Int4);
const NF4: Auto<WeightStorage> = Auto::Of(WeightStorage::Nf4);

impl Memory {
    /// The storage of frozen projections. `frozen_weights = "auto"` that is not resolved means dense.
    pub fn storage_rules(&self) -> StorageRules {
        StorageRules {
            frozen: self.frozen_weights.given().copied(),
            overrides: self.overrides.clone(),
            group_size: self.group_size,
            double_quantization: self.double_quantization,
            products: self.frozen_products,
        }
    }

    /// All storage types that projections may get.
    fn storages(&self) -> impl Iterator<Item = Auto<WeightStorage>> {
        let overrides = self.overrides.iter().map(|(_, storage)| Auto::Of(*storage));
        [self.frozen_weights].into_iter().chain(overrides)
    }
}

impl Data {
    /// True if the recipe adds tokens to the vocabulary.
    pub fn adds_tokens(&self) -> bool {
        !self.new_tokens.is_empty() || !self.new_special_tokens.is_empty()
    }

    /// True if the recipe has evaluation rows.
    pub fn evaluates(&self) -> bool {
        !self.eval.is_empty() || self.eval_fraction > 0.0
    }

    /// True if the recipe names training rows.
    pub fn has_train(&self) -> bool {
        !(self.train.is_empty() && self.sources.is_empty())
    }

    /// Files, folders, patterns and hub ids with training rows.
    pub fn train_paths(&self) -> impl Iterator<Item = &String> {
        let sources = self.sources.iter().flat_map(|source| &source.path);
        self.train.iter().chain(sources)
    }

    /// Replaces the training rows by these files, for an evaluation of all their rows.
    pub fn set_train(&mut self, files: Vec<String>) {
        (self.train, self.sources, self.limit) = (files, Vec::new(), 0);
        self.split.clone_from(&self.eval_split);
    }
}

/// Variables of a template that a row sets.
const FROM_ROWS: [&str; 3] = ["messages", "tools", "add_generation_prompt"];

/// Contradictions.
pub(super) fn check(s: &RecipeSections, faults: &mut KeyFaults) {
    let (model, memory, data) = (&s.model, &s.memory, &s.data);
    let teacher = s.distill.teacher.as_ref();
    for (name, key, revision, other) in [
        (Some(&model.path), Model::path, &model.revision, Model::revision),
        (
            teacher,
            DistillSection::teacher,
            &s.distill.teacher_revision,
            DistillSection::teacher_revision,
        ),
    ] {
        if let Some((_, own)) = name.and_then(ModelRef::with_revision)
            && revision != "main"
            && *revision != own
        {
            faults.add(
                &[key, other],
                Error::usage(format!("`{key}` and `{other}` name different revisions"))
                    .found(format!("`{own}` and `{revision}`"))
                    .hint(format!("remove `{other}`")),
            );
        }
    }
    if model.path.is_empty() {
        faults.add(
            &[Model::path],
            Error::usage("`model.path` is missing").hint(
                "write a hub id or a directory: `path = \"Qwen/Qwen3-0.6B\"` below `[model]`, or the argument \
                 `model.path=Qwen/Qwen3-0.6B`",
            ),
        );
    }
    // A built-in shape is for plans and benchmarks, which need no data.
    if data.train.is_empty() && data.sources.is_empty() && !model.path.is_shape() {
        faults.add(
            &[Data::train],
            Error::usage("`data.train` is missing").hint(
                "write a file: `train = \"data/train.jsonl\"` below `[data]`, or the argument \
                 `data.train=data/train.jsonl`",
            ),
        );
    }
    if let DeviceRef::Unknown(device) = &model.device {
        let error =
            Error::usage(format!("`{device}` is not a value of `model.device`")).expected("`auto`, `cpu`, or `cuda:0`");
        faults.add(
            &[Model::device],
            match peers::value(Model::device.0, device) {
                Some(hint) => error.hint(hint),
                None => error,
            },
        );
    }
    for (path, empty) in [
        (Train::output_dir, s.train.output_dir.is_empty()),
        (Model::revision, model.revision.is_empty()),
        (Data::chat_template, data.chat_template.is_empty()),
        (Data::split, data.split.is_empty()),
        (Data::eval_split, data.eval_split.is_empty()),
        (Data::revision, data.revision.is_empty()),
    ] {
        if empty {
            faults.add(
                &[path],
                Error::usage(format!("`{path}` is empty")).hint("remove the key to get its default"),
            );
        }
    }
    if s.train.eval_steps > 0 && !data.evaluates() {
        faults.add(
            &[Train::eval_steps, Data::eval, Data::eval_fraction],
            Error::usage("`train.eval_steps` needs rows to evaluate on")
                .hint("set `data.eval` or `data.eval_fraction`, or `train.eval_steps = 0`"),
        );
    }
    let dtype = model.dtype.name();
    // In a 16-bit model matrix multiplications round their operands to its type, so nothing is left of another one.
    let other = |storage: &Auto<WeightStorage>| {
        let unquantized = match storage {
            Auto::Of(WeightStorage::F32) => Dtype::F32,
            Auto::Of(WeightStorage::Bf16) => Dtype::Bf16,
            _ => return false,
        };
        model.dtype != Dtype::F32 && model.dtype != unquantized
    };
    if other(&memory.frozen_weights) {
        let name = memory.frozen_weights.name();
        faults.add(
            &[Memory::frozen_weights, Model::dtype],
            Error::usage(format!(
                "`memory.frozen_weights = \"{name}\"` has no effect with `model.dtype = \"{dtype}\"`: matrix multiplications round each weight to {dtype}"
            ))
            .hint("use `auto`, or `model.dtype = \"f32\"`"),
        );
    }
    if let Some(storage) = memory.storages().skip(1).find(other) {
        let name = storage.name();
        faults.add(
            &[Memory::overrides, Model::dtype],
            Error::usage(format!(
                "`{name}` in `memory.overrides` has no effect with `model.dtype = \"{dtype}\"`: matrix multiplications round each weight to {dtype}"
            ))
            .hint(format!("unquantized weights are `{dtype}` here")),
        );
    }
    check_products(s, faults);
    super::train::check_f16(s, faults);
    match memory.group_size {
        None | Some(128) => {}
        Some(64) if !memory.storages().any(|s| s == INT8) => {}
        Some(64) => faults.add(
            &[Memory::group_size, Memory::frozen_weights, Memory::overrides],
            Error::usage("`int8` has no groups of 64")
                .expected("`memory.group_size = 128`, or `auto`: one scale per row"),
        ),
        Some(size) => faults.add(
            &[Memory::group_size],
            Error::usage("`memory.group_size` is out of range")
                .found(size)
                .expected("`auto`, 64 or 128"),
        ),
    }
    check_rows(s, faults);
    let normal = data.new_tokens.iter().map(Auto::to_string);
    let mut texts: Vec<String> = normal.chain(data.new_special_tokens.iter().cloned()).collect();
    texts.sort_unstable();
    if let Some(pair) = texts.windows(2).find(|pair| pair[0] == pair[1]) {
        faults.add(
            &[Data::new_tokens, Data::new_special_tokens],
            Error::usage(format!("the new token `{}` is given twice", pair[0]))
                .hint("list it once, in `data.new_tokens` or in `data.new_special_tokens`"),
        );
    }
    if let Some(name) = data
        .template_kwargs
        .keys()
        .find(|name| FROM_ROWS.contains(&name.as_str()))
    {
        faults.add(
            &[Data::template_kwargs],
            Error::usage(format!("`{name}` in `data.template_kwargs` comes from the rows"))
                .expected("a variable that the template reads, such as `enable_thinking`"),
        );
    }
    let (packed, most) = (data.packing_length, data.max_length);
    if packed > most {
        faults.add(
            &[Data::packing_length, Data::max_length],
            Error::usage("`data.packing_length` is above `data.max_length`")
                .found(packed)
                .expected(format!("at most {most}, or `auto`")),
        );
    }
}

/// Products of 8-bit operands need frozen weights that are stored as int8 with one scale per row, and a GPU.
fn check_products(s: &RecipeSections, faults: &mut KeyFaults) {
    let (memory, products) = (&s.memory, s.memory.frozen_products);
    if products == Products::Dequantized {
        return;
    }
    let mut refuse = |keys: &[KeyPath], found: String, hint: &str| {
        let what = format!(
            "`memory.frozen_products = \"{}\"` is not possible here",
            products.name()
        );
        faults.add(keys, Error::usage(what).found(found).hint(hint));
    };
    if s.tune.method == Method::Full {
        refuse(
            &[Memory::frozen_products, TuneKeys::method],
            "every weight is trained: `tune.method = \"full\"`".into(),
            "train adapters, blocks or some layers; or remove it",
        );
    }
    if s.model.device == DeviceRef::Cpu {
        refuse(
            &[Memory::frozen_products, Model::device],
            "a run on the CPU".into(),
            "remove it: the products of the CPU dequantize while they pack",
        );
    }
    if !memory.storages().any(|storage| [Auto::Auto, INT8].contains(&storage)) {
        refuse(
            &[Memory::frozen_products, Memory::frozen_weights],
            format!("weights that are stored as {}", memory.frozen_weights.name()),
            "set `memory.frozen_weights = \"int8\"`",
        );
    }
    if memory.group_size.is_some() {
        refuse(
            &[Memory::frozen_products, Memory::group_size],
            "scales for groups of columns".into(),
            "remove `memory.group_size`: a whole row shares a scale",
        );
    }
}

/// True if rows may be split.
fn splits(s: &RecipeSections) -> bool {
    match s.data.long {
        Long::Auto => s.train.stage == Stage::Pretrain || matches!(s.data.format, RowFormat::Auto | RowFormat::Text),
        long => long == Long::Split,
    }
}

/// Settings for rows that are long, cached or streamed.
fn check_rows(s: &RecipeSections, faults: &mut KeyFaults) {
    let (data, stage) = (&s.data, s.train.stage);
    if data.overlap >= data.max_length {
        faults.add(
            &[Data::overlap, Data::max_length],
            Error::usage("`data.overlap` is not below `data.max_length`: the pieces of a row would not end")
                .found(data.overlap)
                .expected(format!("at most {}", data.max_length - 1)),
        );
    }
    let separate = stage.is_preference() || stage.is_rl();
    if separate && data.long == Long::Split {
        faults.add(
            &[Data::long, Train::stage],
            Error::usage(format!(
                "`data.long = \"split\"` has no effect with `train.stage = \"{}\"`",
                stage.name()
            ))
            .cause("both parts of a row are needed: a prompt and its answers")
            .hint("use `truncate` or `drop`"),
        );
    }
    if !data.streaming {
        return;
    }
    if !matches!(stage, Stage::Sft | Stage::Pretrain) {
        faults.add(
            &[Data::streaming, Train::stage],
            Error::usage(format!(
                "`data.streaming` has no effect with `train.stage = \"{}\"`",
                stage.name()
            ))
            .cause("this stage looks at all rows before the first step")
            .expected("`sft` or `pretrain`")
            .hint("for large datasets `data.cache` needs little memory too"),
        );
    }
    if s.train.max_steps < 0 {
        faults.add(
            &[Data::streaming, Train::max_steps],
            Error::usage("`data.streaming` needs `train.max_steps`")
                .cause("the number of rows is not known before the run, so its epochs have no length")
                .hint("set the number of steps, such as `train.max_steps = 10000`"),
        );
    }
    if data.eval_fraction > 0.0 {
        faults.add(
            &[Data::streaming, Data::eval_fraction],
            Error::usage("`data.eval_fraction` needs all rows before the run, and `data.streaming` does not read them")
                .hint("name a file in `data.eval`"),
        );
    }
    if data.cache == Some(true) {
        faults.add(
            &[Data::streaming, Data::cache],
            Error::usage("`data.cache = true` and `data.streaming = true` contradict each other")
                .hint("keep one of them"),
        );
    }
}

/// True for the path of one data file on this machine: it has no configurations and splits.
fn is_file(path: &String) -> bool {
    let is_pattern = path.contains(['*', '?', '[', ':']);
    !is_pattern && ft_data::source::is_data_file(path.as_ref())
}

/// The training files, as the reason why a key has no effect.
fn files_of(data: &Data) -> String {
    let paths: Vec<&String> = data.train_paths().collect();
    let key = if data.train.is_empty() {
        Data::sources
    } else {
        Data::train
    };
    format!("{key} = {paths:?}")
}

/// True for a data file that has columns: it is not a text.
fn has_columns(path: &String) -> bool {
    let name = path.trim_end_matches(".gz").trim_end_matches(".zst");
    ft_data::source::is_data_file(path.as_ref()) && ![".txt", ".md"].iter().any(|kind| name.ends_with(kind))
}

/// The setting because of which a key has no effect.
pub(super) fn unused(s: &RecipeSections, key: KeyPath) -> Option<String> {
    let (model, memory, data) = (&s.model, &s.memory, &s.data);
    let stored = |any: &[Auto<WeightStorage>]| memory.storages().any(|storage| any.contains(&storage));
    let frozen = || Some(Memory::frozen_weights.is(memory.frozen_weights.name()));
    match key {
        Model::revision if model.path.is_local() => Some(Model::path.is(&model.path.to_string())),
        Memory::head_chunk if matches!(memory.tier, Tier::Device | Tier::Host) => {
            Some(Memory::tier.is(memory.tier.name()))
        }
        Memory::frozen_weights | Memory::overrides if s.tune.method == Method::Full => {
            Some(TuneKeys::method.is("full"))
        }
        // With `auto` the planner may choose quantized weights; the teacher's weights use the same key.
        Memory::group_size if !stored(&[Auto::Auto, INT8, INT4]) => frozen(),
        Memory::double_quantization if !stored(&[Auto::Auto, NF4]) && s.distill.teacher_weights != NF4 => frozen(),
        Data::config | Data::split | Data::revision if data.has_train() && data.train_paths().all(is_file) => {
            Some(files_of(data))
        }
        Data::eval_split if data.eval.iter().all(is_file) => Some(format!("data.eval = {:?}", data.eval)),
        Data::text_unit if data.has_train() && data.train_paths().chain(&data.eval).all(has_columns) => {
            Some(files_of(data))
        }
        Data::shuffle_window if !data.streaming => Some("data.streaming = false".into()),
        Data::overlap if !splits(s) => Some(match data.long {
            Long::Auto => Data::format.is(data.format.name()),
            long => Data::long.is(long.name()),
        }),
        Data::cache_dir | Data::cache_limit if data.cache == Some(false) => Some("data.cache = false".into()),
        Data::cache_dir | Data::cache_limit if data.streaming => Some("data.streaming = true".into()),
        Data::packing_length if !data.packing => Some("data.packing = false".into()),
        Data::train_on if data.train_on == TrainOn::All => None,
        Data::train_on if s.train.stage == Stage::Pretrain => Some(Train::stage.is("pretrain")),
        Data::train_on if data.format == RowFormat::Text => Some(Data::format.is("text")),
        // Conversations always use the template, text rows never.
        Data::render if matches!(data.format, RowFormat::Messages | RowFormat::Sharegpt | RowFormat::Text) => {
            Some(Data::format.is(data.format.name()))
        }
        _ => None,
    }
}
