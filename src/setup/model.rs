//! Opens the model directory with its config, tokenizer and template: the first step of every program.

use crate::base::sync::lock;
use crate::base::{Error, ErrorKind, Result, progress};
use crate::comm::Collective;
use crate::data::codec::ChatRender;
use crate::engine::StepStrategy;
use crate::formats::StoredDtype;
use crate::formats::config::Config;
use crate::formats::template::ChatTemplate;
use crate::formats::tokenizer::Tokenizer;
use crate::formats::weights::Weights;
use crate::hf::{self, Fingerprint};
use crate::hub;
use crate::model::{Network, Spec, TokenRows, TrainableNetwork, families, shapes};
use crate::ops::transfer::HostMemory;
use crate::ops::{self, update};
use crate::recipe::{self, DeviceRef, Dtype, Method, ModelInit, ModelRef, RankWeights, Recipe};
use crate::report;
use crate::setup::locate::{adapter_directory, model_config};
use crate::setup::vocabulary::{NewRows, TextChanges};
use crate::source::sharded::{MatrixDivision, WeightOrigin};
use crate::source::{
    DiskWeights, ResidentWeights, ShardedWeights, StoragePolicy, TrainableStore, UploadedWeights, disk, resident,
};
use crate::source::{ParamInfo, Placement};
use candle_core::{Device, Tensor};
use std::collections::BTreeSet;
use std::ops::{Deref, DerefMut};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, OnceLock};

mod dequantized;
mod stored;

pub use stored::StoredWeights;

/// Keys of `config.json` that name code of a model directory.
const CODE: [&str; 3] = ["auto_map", "model_file", "_attn_implementation_internal"];

/// A model of which only the config is read, and the headers of its weights at first use. A plan needs no more, and
/// tokenizer and weights may be absent.
pub struct ModelFiles {
    /// The name from which it was opened.
    pub named: ModelRef,
    pub dir: PathBuf,
    pub config: Config,
    pub spec: Spec,
    /// Rows that the files of the model do not have.
    pub new_rows: Option<NewRows>,
    /// Opened at first use.
    weights: OnceLock<Arc<Weights>>,
}

/// A model with its tokenizer and template. The weights are not loaded.
pub struct ModelDir {
    pub files: ModelFiles,
    pub tokenizer: Tokenizer,
    pub template: Option<ChatTemplate>,
    /// The token that ends a turn of a template by name, which the files of the model do not name as an end.
    pub turn_end: Option<u32>,
}

impl Deref for ModelDir {
    type Target = ModelFiles;
    fn deref(&self) -> &ModelFiles {
        &self.files
    }
}

impl DerefMut for ModelDir {
    fn deref_mut(&mut self) -> &mut ModelFiles {
        &mut self.files
    }
}

/// The files of a model that must be on this machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum NeededFiles {
    /// `config.json`; of a hub id no other file is downloaded.
    Config,
    /// All but the weights.
    Text,
    All,
}

impl ModelDir {
    /// Opens the model of a recipe. Errors: as `open`.
    pub fn of_recipe(recipe: &Recipe) -> Result<Self> {
        let (model, changes) = (&recipe.model, TextChanges::of_recipe(recipe)?);
        Self::read(&model.path, &model.revision, model.init, &changes)
    }

    /// Opens a model by its name.
    ///
    /// Errors: an invalid directory; a tokenizer with more ids than the embedding has rows.
    pub fn open(name: &str, revision: &str, changes: &TextChanges) -> Result<Self> {
        Self::read(&ModelRef::new(name), revision, ModelInit::Pretrained, changes)
    }

    pub fn read(named: &ModelRef, revision: &str, init: ModelInit, changes: &TextChanges) -> Result<Self> {
        ModelFiles::find(named, revision, init, NeededFiles::All)?.with_text(changes)
    }

    /// As `read`, but weights of a hub id are not downloaded: enough to read rows.
    pub fn read_text(named: &ModelRef, revision: &str, init: ModelInit, changes: &TextChanges) -> Result<Self> {
        ModelFiles::find(named, revision, init, NeededFiles::Text)?.with_text(changes)
    }

    /// The chat template as a trait object of `data`.
    pub fn template(&self) -> Option<&dyn ChatRender> {
        self.template.as_ref().map(|t| t as &dyn ChatRender)
    }
}

impl ModelFiles {
    /// Reads the config of a recipe's model. Errors: as `of_config`.
    pub fn of_recipe(recipe: &Recipe) -> Result<Self> {
        Self::of_config(&recipe.model.path, &recipe.model.revision, recipe.model.init)
    }

    /// Reads the config of a model.
    ///
    /// Errors: no such directory, hub id or shape; a config that is not supported.
    pub fn of_config(named: &ModelRef, revision: &str, init: ModelInit) -> Result<Self> {
        Self::find(named, revision, init, NeededFiles::Config)
    }

    fn find(named: &ModelRef, revision: &str, init: ModelInit, needed: NeededFiles) -> Result<Self> {
        let (dir, config) = match named {
            ModelRef::Shape(text) => {
                let config = shapes::config(text)?;
                (
                    text.into(),
                    config.ok_or_else(|| Error::internal("a shape has no prefix"))?,
                )
            }
            ModelRef::Dir(dir) => {
                let dir = hub::local_model(dir)?;
                let config = read_config(&dir, init)?;
                (dir, config)
            }
            ModelRef::Hub(id) => {
                let dir = match needed {
                    NeededFiles::Config => hub::resolve_config(id, revision)?,
                    NeededFiles::Text => hub::resolve_text(id, revision)?,
                    NeededFiles::All => hub::resolve_model(id, revision, true)?,
                };
                let config = read_config(&dir, init)?;
                (dir, config)
            }
        };
        // A family that is not supported is named before anything else is missed.
        let spec = families::read(&config)?;
        Ok(Self {
            named: named.clone(),
            dir,
            config,
            spec,
            new_rows: None,
            weights: OnceLock::new(),
        })
    }

    /// True if the directory has a tokenizer. A built-in shape has no directory.
    pub fn has_tokenizer(&self) -> bool {
        self.dir.join("tokenizer.json").is_file()
    }

    /// Reads tokenizer and template, with the changes of the user to tokenizer, embedding and template.
    ///
    /// Errors: no tokenizer, or an invalid one; more ids than the embedding has rows.
    pub fn with_text(mut self, changes: &TextChanges) -> Result<ModelDir> {
        let mut tokenizer = if self.is_shape() {
            Tokenizer::bytes()?
        } else {
            self.warn_of_code();
            let _phase = progress::phase("reading the tokenizer", 0, "");
            Tokenizer::load(&self.dir)?
        };
        let warnings = self.spec.warnings.iter().map(String::as_str);
        warnings.chain(tokenizer.warning()).for_each(warn_once);
        self.new_rows = NewRows::add(changes, &mut tokenizer, &self.dir, self.spec.vocab)?;
        if let Some(new) = &self.new_rows {
            self.spec.vocab = new.vocab;
        }
        let (template, turn_end) = changes.template(&self.dir, &tokenizer)?;
        let turn_end = turn_end.filter(|id| !tokenizer.stop_ids().contains(id));
        turn_end.into_iter().for_each(|id| tokenizer.add_stop(id));
        Ok(ModelDir {
            files: self,
            tokenizer,
            template,
            turn_end,
        })
    }

    fn warn_of_code(&self) {
        let code: Vec<&str> = CODE.into_iter().filter(|key| self.config.get(key).is_some()).collect();
        if !code.is_empty() {
            report::warn(&format!(
                "{} refers to custom code (`{}`): ft never runs code of a model directory, and loads the model \
                 as `{}`",
                self.config.path.display(),
                code.join("`, `"),
                self.spec.model_type
            ));
        }
    }

    /// True for random weights of a built-in shape: they have no directory and are not exported.
    pub fn is_shape(&self) -> bool {
        self.named.is_shape()
    }

    /// Unties embedding and head if the adapter that the recipe continues to train does so (`hf::unties`).
    pub fn untie_for(&mut self, recipe: &Recipe) -> Result<()> {
        if let Some(dir) = &recipe.tune.lora.adapter
            && self.spec.tied
            && recipe.tune.method == Method::Lora
        {
            self.spec.tied = !hf::unties(&adapter_directory(dir)?, &self.spec)?;
        }
        Ok(())
    }

    /// The weight files, opened once. Call it after `untie_for`.
    pub fn weights(&self) -> Result<Arc<Weights>> {
        if let Some(weights) = self.weights.get() {
            return Ok(weights.clone());
        }
        let weights = Arc::new(self.open_weights()?);
        Ok(self.weights.get_or_init(|| weights).clone())
    }

    /// As `weights`, with handles of its own.
    fn open_weights(&self) -> Result<Weights> {
        self.open_untied(!self.spec.tied && families::read(&self.config)?.tied)
    }

    fn open_untied(&self, untied: bool) -> Result<Weights> {
        let mut weights = Weights::open(&self.dir)?;
        if let Some(new) = &self.new_rows {
            new.place(&mut weights, self.spec.tied || untied)?;
        }
        if untied {
            hf::untied_weights(weights)
        } else {
            Ok(weights)
        }
    }

    /// The fingerprint of the model as its files define it, also if `untie_for` or new tokens changed it.
    pub fn fingerprint(&self) -> Result<Fingerprint> {
        let spec = families::read(&self.config)?;
        match self.new_rows {
            None => hf::fingerprint_of(&spec, &*self.weights()?),
            // `weights` has the new rows.
            Some(_) => hf::fingerprint_of(&spec, &Weights::open(&self.dir)?),
        }
    }

    /// The contents of `config.json` for an export: with the changed vocabulary, in 16 or 32 bits.
    pub fn raw_config(&self) -> serde_json::Map<String, serde_json::Value> {
        let mut raw = self.config.raw.clone();
        if self.new_rows.is_some() {
            hf::set_language_key(&mut raw, "vocab_size", &self.spec.vocab.into());
        }
        // The exported model is not quantized.
        hf::unquantized(&mut raw);
        raw
    }

    /// Checks that the weights fit the config. Reads headers only.
    pub fn check_weights(&self, init: ModelInit) -> Result<()> {
        match init {
            ModelInit::Pretrained => {
                let weights = self.weights()?;
                if weights.info(hf::SCORE).is_some() {
                    return Err(Error::new("a reward model returns scores, not text")
                        .at_path(&self.dir)
                        .hint("use it in `rlhf.rewards`; here, give the model from which it was trained"));
                }
                resident::check_names(&self.spec.params(), &weights)
            }
            ModelInit::Random => Ok(()),
        }
    }

    /// How the files store the weights.
    pub fn stored(&self, init: ModelInit) -> Result<StoredWeights> {
        match init {
            ModelInit::Random => Ok(StoredWeights::random()),
            ModelInit::Pretrained => StoredWeights::of(&*self.weights()?, &self.spec),
        }
    }

    /// As `stored`; `None`: the weights are not on this machine.
    ///
    /// Errors: they are here and cannot be read.
    pub fn stored_if_here(&self, init: ModelInit) -> Result<Option<StoredWeights>> {
        match self.stored(init) {
            Err(e) if e.kind() == ErrorKind::NotFound => Ok(None),
            stored => stored.map(Some),
        }
    }

    /// Loads the weights in their storage types; `init = random` draws them from `seed` instead.
    pub fn load(
        &self,
        storage: &StoragePolicy,
        init: ModelInit,
        seed: u64,
        device: &Device,
    ) -> Result<TrainableNetwork> {
        self.spec.runs_on(!device.is_cpu())?;
        storage.dtype().runs_on(!device.is_cpu())?;
        let store = Arc::new(self.resident(storage, init, seed, None, device)?);
        Ok(TrainableNetwork::new(self.spec.clone(), store, device.clone()))
    }

    /// Reads the weights from `dequantized`, if given.
    fn resident(
        &self,
        storage: &StoragePolicy,
        init: ModelInit,
        seed: u64,
        dequantized: Option<Weights>,
        device: &Device,
    ) -> Result<ResidentWeights> {
        let params = self.spec.params();
        let source = match init {
            ModelInit::Pretrained => {
                let weights = match dequantized {
                    Some(weights) => Arc::new(weights),
                    None => self.weights()?,
                };
                let f16 = |p: &ParamInfo| weights.info(&p.name).is_some_and(|i| i.dtype == StoredDtype::F16);
                if storage.dtype() == ops::Dtype::Bf16 && params.iter().any(f16) {
                    warn_once(&format!(
                        "{} has f16 weights: bf16 keeps 8 of their 11 bits and rounds each weight by up to 0.2 %; \
                         `model.dtype = \"f32\"` keeps every value",
                        self.dir.display()
                    ));
                }
                let source = ResidentWeights::load(params, &weights, |p| storage.of(p), device)?;
                source.with_originals(move |p, dtype| resident::read_dense(&weights, p, dtype, &Device::Cpu))
            }
            ModelInit::Random => {
                let resident::RandomWeights { seed, std, norm } = self.random_weights(seed);
                let names: Vec<_> = params.iter().map(|p| p.name.clone()).collect();
                let source = ResidentWeights::random_stored(params, seed, std, norm, |p| storage.of(p), device)?;
                source.with_originals(move |p, dtype| {
                    let index = names.iter().position(|n| *n == p.name).unwrap_or(0) as u64 + 1;
                    resident::draw_tensor(p, index, dtype, resident::RandomWeights { seed, std, norm })
                })
            }
        };
        Ok(source)
    }

    fn random_weights(&self, seed: u64) -> resident::RandomWeights {
        resident::RandomWeights {
            seed,
            std: self.spec.initializer_range,
            norm: if self.spec.norm_plus_one { 0.0 } else { 1.0 },
        }
    }

    /// Loads the weights as `strategy` says, in parts on `ranks` if it says so. Files that the run needs meanwhile go to
    /// `run_dir`.
    pub fn load_for(
        &self,
        strategy: &StepStrategy,
        recipe: &Recipe,
        run_dir: &Path,
        device: &Device,
        ranks: &Arc<dyn Collective>,
    ) -> Result<TrainableNetwork> {
        strategy.storage.products().check(device)?;
        let mut loaded = self.place(strategy, recipe, run_dir, device, ranks)?;
        strategy.apply(&mut loaded.network);
        Ok(loaded)
    }

    fn place(
        &self,
        strategy: &StepStrategy,
        recipe: &Recipe,
        run_dir: &Path,
        device: &Device,
        ranks: &Arc<dyn Collective>,
    ) -> Result<TrainableNetwork> {
        self.spec.runs_on(!device.is_cpu())?;
        let (dtype, init, seed) = (recipe.model.dtype, recipe.model.init, recipe.train.seed);
        dtype.runs_on(!device.is_cpu())?;
        let storage = &strategy.storage;
        let (writer, run_dir) = dequantized::writer(recipe, run_dir, ranks)?;
        let dequantized = if self.stored(init)?.is_dequantized(recipe.tune.method) {
            Some(self.decode(storage, dtype, &run_dir, &writer)?)
        } else {
            None
        };
        let head_rows = match strategy.placement {
            Placement::Device => {
                let store = Arc::new(self.resident(storage, init, seed, dequantized, device)?);
                return Ok(TrainableNetwork::new(self.spec.clone(), store, device.clone()));
            }
            Placement::Sharded | Placement::ShardedHost | Placement::ExpertParallel => {
                let division = match strategy.placement {
                    Placement::ExpertParallel => MatrixDivision::Experts,
                    _ if recipe.distributed.weights == RankWeights::ShardedInNode => MatrixDivision::InNode,
                    _ => MatrixDivision::Elements,
                };
                let params = self.spec.params();
                let origin = match (init, dequantized) {
                    (ModelInit::Pretrained, Some(weights)) => WeightOrigin::Files(Arc::new(weights)),
                    (ModelInit::Pretrained, None) => WeightOrigin::Files(self.weights()?),
                    (ModelInit::Random, _) => WeightOrigin::random(&params, self.random_weights(seed)),
                };
                let store = ShardedWeights::open(params, origin, |p| storage.of(p), ranks.clone(), division, device)?;
                if strategy.placement == Placement::ShardedHost {
                    return self.upload(Arc::new(store), HostMemory::Temporary, device);
                }
                return Ok(TrainableNetwork::new(
                    self.spec.clone(),
                    Arc::new(store),
                    device.clone(),
                ));
            }
            Placement::Host => {
                let host = self
                    .resident(storage, init, seed, dequantized, &Device::Cpu)?
                    .with_quantized_tensors()?;
                return self.upload(Arc::new(host), HostMemory::Stable, device);
            }
            Placement::Disk { head_rows } => head_rows,
        };
        let params = self.spec.params();
        let weights = match init {
            ModelInit::Pretrained if dequantized.is_some() => dequantized.map_or_else(|| self.open_weights(), Ok)?,
            // The disk tier opens the files again: it sets read hints on its own handles.
            ModelInit::Pretrained => self.open_weights()?,
            ModelInit::Random => self.draw(&params, seed, dtype, &run_dir, &writer)?,
        };
        let options = disk::DiskOptions {
            dtype,
            storage: storage.clone(),
            device: Device::Cpu,
            trained: run_dir.join(TRAINED),
            codes: run_dir.join(CODES),
            head: self.spec.head_name().to_string(),
            head_rows,
        };
        let store = Arc::new(DiskWeights::open_written(params, weights, options, writer)?);
        if device.is_cpu() {
            Ok(TrainableNetwork::new(self.spec.clone(), store, device.clone()))
        } else {
            self.upload(store, HostMemory::Reused, device)
        }
    }

    /// Wraps a store on the host so that its weights are uploaded to `device`; `memory` as in `UploadedWeights::new`.
    fn upload(&self, host: Arc<dyn TrainableStore>, memory: HostMemory, device: &Device) -> Result<TrainableNetwork> {
        let store = UploadedWeights::new(host, self.spec.head_name(), memory, device)?;
        Ok(TrainableNetwork::new(
            self.spec.clone(),
            Arc::new(store),
            device.clone(),
        ))
    }
}

/// Directories of a run with `memory.tier = "disk"` that are not needed after it: trained parameters, and random
/// weights.
pub const TRAINED: &str = "trained";
pub const DRAWN: &str = "drawn";
/// Decoded weights of quantized files, if other parameters than adapters are trained.
pub const DEQUANTIZED: &str = "decoded";
/// Scratch directory of a teacher on the disk.
pub const TEACHER: &str = "teacher";
/// Quantized data of the weights that are stored quantized.
pub const CODES: &str = "codes.safetensors";

impl ModelFiles {
    /// True if the model has a score head instead of the output projection. Errors: it has several scores.
    pub fn has_score(&self, weights: &Weights) -> Result<bool> {
        hf::has_score(&self.spec, weights, &self.dir)
    }

    /// The network for inference: weights in `dtype` (default: the stored type; f16 as f32), with the PEFT adapter of a
    /// directory on its linears. Errors: the model or the adapter is a reward model.
    pub fn infer(&self, adapter: Option<&Path>, dtype: Option<Dtype>, device: &Device) -> Result<Network> {
        match self.infer_scored(adapter, dtype, device)? {
            (network, None) => Ok(network),
            (_, Some(_)) => Err(Error::new("a reward model returns scores, not text")
                .at_path(adapter.unwrap_or(&self.dir))
                .hint("`ft eval` evaluates it on preference rows; `rlhf.rewards = [\"model:DIR\"]` trains with it")),
        }
    }

    /// As `infer`, for any model; a reward model also returns its score head, f32 `[1, D]`.
    pub fn infer_scored(
        &self,
        adapter: Option<&Path>,
        dtype: Option<Dtype>,
        device: &Device,
    ) -> Result<(Network, Option<Tensor>)> {
        if self.is_shape() {
            let storage = StoragePolicy::dense(dtype.unwrap_or(Dtype::Bf16));
            return Ok((self.load(&storage, ModelInit::Random, 0, device)?.network, None));
        }
        let mut weights = self.weights()?;
        let (mut spec, mut score) = (self.spec.clone(), None);
        if self.has_score(&weights)? {
            score = Some(Tensor::from_vec(
                weights.read_f32(hf::SCORE)?,
                (1, spec.hidden),
                device,
            )?);
            // The model has no output projection.
            spec.tied = true;
        }
        let print = match adapter {
            Some(_) if self.new_rows.is_some() => Some(self.fingerprint()?.base()),
            Some(_) => Some(hf::fingerprint_of(&spec, &weights)?.base()),
            None => None,
        };
        if let Some(dir) = adapter
            && score.is_none()
            && hf::unties(dir, &spec)?
        {
            spec.tied = false;
            weights = Arc::new(self.open_untied(true)?);
        }
        let mut kinds = spec
            .params()
            .into_iter()
            .filter_map(|p| weights.info(&p.name).map(|i| i.dtype));
        let all_bf16 = kinds.all(|dtype| dtype == StoredDtype::Bf16 || !dtype.is_weight());
        let stored = if all_bf16 { Dtype::Bf16 } else { Dtype::F32 };
        let storage = StoragePolicy::dense(dtype.unwrap_or(stored));
        spec.runs_on(!device.is_cpu())?;
        storage.dtype().runs_on(!device.is_cpu())?;
        let source = ResidentWeights::load(spec.params(), &weights, |p| storage.of(p), device)?;
        let mut network = Network::new(spec.clone(), Arc::new(source), device.clone());
        if let (Some(dir), Some(print)) = (adapter, &print) {
            let loaded = hf::load_adapter(dir, &spec)?;
            hf::check_base(dir, print)?;
            if let Some(own) = &loaded.score {
                score = Some(own.to_device(device)?);
            }
            for (module, adapter) in loaded.adapters {
                network.adapters.insert(module, Arc::new(adapter.on(device)?));
            }
            for (name, tensor) in &loaded.whole {
                let values = update::to_f32_vec(tensor)?;
                update::set(&network.param(name)?.tensor, &values)?;
            }
            for (table, (ids, rows)) in &loaded.rows {
                TokenRows::new(&network, table, ids, Some(rows))?;
            }
        }
        Ok((network, score))
    }
}

/// Shows a warning once: config and tokenizer are read several times in a run.
pub(crate) fn warn_once(warning: &str) {
    static SHOWN: Mutex<BTreeSet<String>> = Mutex::new(BTreeSet::new());
    if lock(&SHOWN).insert(warning.into()) {
        report::warn(warning);
    }
}

/// Reads the config. Random weights may have other sizes than the weight files beside the config.
fn read_config(dir: &Path, init: ModelInit) -> Result<Config> {
    match init {
        ModelInit::Pretrained => model_config(dir, Config::load),
        ModelInit::Random => model_config(dir, Config::read),
    }
}

/// Opens the device; prints a note if the choice may surprise the user.
pub fn device(device: &DeviceRef) -> Result<Device> {
    let opened = ops::device::open(&device.to_string())?;
    if let Some(note) = &opened.note {
        report::warn(&recipe::in_program_terms(note));
    }
    Ok(opened.device)
}
