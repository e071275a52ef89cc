//! Changes of a user to the vocabulary and the chat template of a model: new tokens with their rows in embedding and
//! head, another template, variables of the template.
//!
//! Letters: D hidden size.

use crate::base::{Error, Result};
use crate::formats::template::named;
use crate::formats::tokenizer::NewToken;
use crate::formats::weights::Weights;
use crate::formats::{ChatTemplate, Tokenizer};
use crate::hf;
use crate::model::Spec;
use crate::model::spec::{EMBEDDING, LM_HEAD, PER_LAYER_TABLE};
use crate::quant::Format;
use crate::recipe::{self, Auto, Method, Recipe};
use crate::report;
use crate::setup::locate;
use crate::setup::model::warn_once;
use crate::source::stored;
use serde_json::{Map, Value};
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

/// The changes of a user.
#[derive(Debug, Clone, Default)]
pub struct TextChanges {
    /// A Jinja file, or a name of `formats::template::named`.
    pub template: Option<String>,
    /// The template file of an adapter, used if the user gives none. As that of a model, it is rendered in a confined process only.
    pub adapter_template: Option<PathBuf>,
    /// Variables of the template.
    pub kwargs: Map<String, Value>,
    /// New tokens.
    pub tokens: Vec<NewToken>,
    /// Makes rows for tokens of the tokenizer that have none.
    pub missing_rows: bool,
    /// The number of rows stays a multiple of a power of two.
    pub rounds_up: bool,
    /// Adapters whose tokens the model gets too.
    pub adapters: Vec<PathBuf>,
}

/// Rows of an embedding are added up to a multiple of at most this.
const ROWS: usize = 128;
/// Tokens that an error message lists.
const SHOWN: usize = 20;

impl TextChanges {
    /// Errors: the adapter that the recipe continues to train does not exist.
    pub fn of_recipe(recipe: &Recipe) -> Result<Self> {
        let data = &recipe.data;
        let token = |text: &String, special: bool| NewToken {
            text: text.clone(),
            special,
        };
        let special = data.new_special_tokens.iter().map(|text| token(text, true));
        let normal = data.new_tokens.iter().filter_map(Auto::given);
        let adapter = recipe
            .tune
            .lora
            .adapter
            .as_ref()
            .filter(|_| recipe.tune.method == Method::Lora);
        Ok(Self {
            template: data.chat_template.given().cloned(),
            adapter_template: None,
            kwargs: data.template_kwargs.clone(),
            tokens: special.chain(normal.map(|text| token(text, false))).collect(),
            // `auto` stands for tokens without a row.
            missing_rows: data.new_tokens.contains(&Auto::Auto),
            // PEFT makes a base as long as the tokenizer before it loads an adapter.
            rounds_up: recipe.tune.method != Method::Lora,
            adapters: adapter
                .map(|dir| locate::adapter_directory(dir))
                .transpose()?
                .into_iter()
                .collect(),
        })
    }

    /// Rows of the embedding for `needed` tokens, if the files have `stored`.
    fn rows(&self, stored: usize, needed: usize) -> usize {
        let unit = if self.rounds_up && needed > stored {
            1 << stored.trailing_zeros().min(ROWS.trailing_zeros())
        } else {
            1
        };
        stored.max(needed.next_multiple_of(unit))
    }

    /// The template with its variables, `None` if the model has none and no other is given. Also returns the token that
    /// ends a turn, if the template is one of ft's own.
    pub fn template(&self, dir: &Path, tokenizer: &Tokenizer) -> Result<(Option<ChatTemplate>, Option<u32>)> {
        let mut end = None;
        let template = match &self.template {
            None => match &self.adapter_template {
                Some(file) => Some(ChatTemplate::from_file(file, tokenizer)?),
                None => ChatTemplate::from_dir(dir, tokenizer)?,
            },
            Some(name) => Some(match named::find(name) {
                Some(own) => {
                    let missing = own.missing(tokenizer);
                    if !missing.is_empty() {
                        let shown = |with: &str| {
                            missing
                                .iter()
                                .map(|m| format!("{with}{m}{with}"))
                                .collect::<Vec<_>>()
                                .join(", ")
                        };
                        warn_once(&format!(
                            "the tokenizer splits {} of the template `{}` into pieces; `data.new_special_tokens = \
                             [{}]` makes a token of each",
                            shown("`"),
                            own.name,
                            shown("\"")
                        ));
                    }
                    end = own.turn_end(tokenizer);
                    own.template(tokenizer)?.trusted(report::warn)
                }
                None => ChatTemplate::from_file(Path::new(name), tokenizer)
                    .map_err(|e| with_names(e, name))?
                    .trusted(report::warn),
            }),
        };
        let Some(template) = template else {
            if !self.kwargs.is_empty() {
                warn_once("`data.template_kwargs` has no effect: the model has no chat template");
            }
            return Ok((None, None));
        };
        let template = template.with_kwargs(&self.kwargs)?;
        for name in template.unread_kwargs() {
            warn_once(&format!(
                "the chat template does not read `{name}` of `data.template_kwargs`: it has no effect"
            ));
        }
        Ok((Some(template), end))
    }
}

/// Adds the names of ft's own templates to the error for a file that does not exist.
fn with_names(error: Error, name: &str) -> Error {
    if Path::new(name).exists() || name.contains('/') {
        return error;
    }
    let names: Vec<&str> = named::NAMED.iter().map(|t| t.name).collect();
    error.expected(format!("a Jinja file, or one of {}", names.join(", ")))
}

/// Rows of embedding and head for tokens that the files of a model have no rows for.
#[derive(Debug)]
pub struct NewRows {
    /// The new tokens, without gaps.
    pub ids: Vec<u32>,
    /// The tokens that the text of each was before.
    pieces: Vec<Vec<u32>>,
    /// Rows of the files.
    stored: usize,
    /// Rows of the model.
    pub vocab: usize,
}

impl NewRows {
    /// Adds the new tokens to the tokenizer of `dir`, whose embedding has `stored` rows. `None`: there is none.
    ///
    /// Errors: a token without a row that the changes do not list.
    pub fn add(changes: &TextChanges, tokenizer: &mut Tokenizer, dir: &Path, stored: usize) -> Result<Option<Self>> {
        let mut tokens = changes.tokens.clone();
        let mut of_adapters: Vec<(u32, NewToken)> = Vec::new();
        for adapter in &changes.adapters {
            let listed = Tokenizer::listed_from(adapter, 0)?;
            let has_row = |id: u32| (id as usize) < stored;
            let new = listed
                .into_iter()
                .filter(|(_, t)| !tokenizer.token_to_id(&t.text).is_some_and(has_row));
            of_adapters.extend(new);
            Tokenizer::ends_of(adapter)?
                .into_iter()
                .for_each(|id| tokenizer.add_stop(id));
        }
        for (_, token) in of_adapters.iter().rev() {
            tokens.retain(|own| own.text != token.text);
            tokens.insert(0, token.clone());
        }
        let without_row = if tokenizer.vocab_size() > stored {
            Tokenizer::listed_from(dir, stored)?
        } else {
            Vec::new()
        };
        let asked = |text: &str| changes.missing_rows || tokens.iter().any(|t| t.text == text);
        let unasked: Vec<&str> = without_row
            .iter()
            .map(|(_, t)| t.text.as_str())
            .filter(|t| !asked(t))
            .collect();
        if stored + without_row.len() < tokenizer.vocab_size() || !unasked.is_empty() {
            return Err(without_rows(tokenizer, dir, stored, &unasked));
        }
        let plain = if without_row.is_empty() {
            None
        } else {
            Some(Tokenizer::load_below(dir, stored)?)
        };
        let mut new: Vec<(NewToken, Vec<u32>)> = Vec::new();
        for token in without_row.into_iter().map(|(_, token)| token).chain(tokens) {
            let known = tokenizer.token_to_id(&token.text);
            if let Some(id) = known.filter(|id| (*id as usize) < stored) {
                warn_once(&format!(
                    "`{}` is a token of the model already ({id}): it gets no new row",
                    token.text
                ));
            } else if new.iter().all(|(t, _)| t.text != token.text) {
                let pieces = plain.as_ref().unwrap_or(tokenizer).encode(&token.text, false)?;
                if pieces.is_empty() {
                    return Err(Error::usage("the tokenizer removes the text of a new token")
                        .found(format!("{:?}", token.text)));
                }
                new.push((token, pieces));
            }
        }
        if new.is_empty() {
            return Ok(None);
        }
        let (texts, pieces): (Vec<NewToken>, Vec<Vec<u32>>) = new.into_iter().unzip();
        let ids = tokenizer.add_tokens(&texts)?;
        let moved = |(id, token): &&(u32, NewToken)| tokenizer.token_to_id(&token.text) != Some(*id);
        if let Some((id, token)) = of_adapters.iter().find(moved) {
            return Err(Error::unsupported("a new token of an adapter has another id in this model")
                .at_path(dir)
                .found(format!("`{}` is {:?}", token.text, tokenizer.token_to_id(&token.text)))
                .expected(id)
                .hint("use the base model of the adapter; adapters that are merged together must have the same new tokens"));
        }
        let follows = ids.windows(2).all(|pair| pair[1] == pair[0] + 1);
        if !follows || ids.first().is_none_or(|id| *id as usize > stored) {
            return Err(
                Error::unsupported("the ids of the new tokens do not follow the rows of the embedding")
                    .at_path(dir)
                    .found(format!("{ids:?}, {stored} rows"))
                    .hint(
                        "the vocabulary of this tokenizer has gaps: add the tokens with the tool that made the model",
                    ),
            );
        }
        Ok(Some(Self {
            vocab: changes.rows(stored, tokenizer.vocab_size()),
            ids,
            pieces,
            stored,
        }))
    }

    /// The new rows if neither tokenizer nor weights are here, for a plan: one for each token that is listed, after the
    /// `stored` rows. The model may have free rows, or some of the tokens, so there are at most so many.
    ///
    /// Errors: an adapter whose tokenizer is not JSON.
    pub fn assumed(changes: &TextChanges, stored: usize) -> Result<Option<Self>> {
        let mut texts: BTreeSet<String> = changes.tokens.iter().map(|token| token.text.clone()).collect();
        for adapter in &changes.adapters {
            let listed = Tokenizer::listed_from(adapter, stored)?;
            texts.extend(listed.into_iter().map(|(_, token)| token.text));
        }
        let count = texts.len();
        Ok((count > 0).then(|| Self {
            ids: (stored..stored + count).map(|id| id as u32).collect(),
            pieces: Vec::new(),
            stored,
            vocab: changes.rows(stored, stored + count),
        }))
    }

    /// Makes the rows in the weights of the model: a row is the mean of the rows of its pieces. `tied`: the model reads no
    /// head of its own.
    ///
    /// Errors: the embedding cannot be read; embedding or head is quantized, so no row can be added.
    pub fn place(&self, weights: &mut Weights, tied: bool) -> Result<()> {
        if let Some(table) = weights.info(PER_LAYER_TABLE) {
            return Err(
                Error::unsupported("new tokens are not supported in a model with per-layer embeddings").at(&table.name),
            );
        }
        let tables: &[&str] = if tied { &[EMBEDDING] } else { &[EMBEDDING, LM_HEAD] };
        for table in tables {
            if let Some((_, format)) = stored::find(weights, table)? {
                return Err(quantized_table(table, format));
            }
        }
        for table in tables {
            let Some(width) = weights.info(table).and_then(|info| info.shape.get(1).copied()) else {
                continue;
            };
            let mut values = Vec::with_capacity(self.pieces.len() * width);
            for pieces in &self.pieces {
                values.extend(mean(pieces, width, &mut |id, out| {
                    weights.read_f32_at(table, id as usize * width, out)
                })?);
            }
            // Rows that no token has are as likely as the new tokens at the start, so never the most likely ones.
            let first = self.ids.first().map_or(self.stored, |id| *id as usize);
            let rest = self.vocab.saturating_sub((first + self.ids.len()).max(self.stored));
            if rest > 0 {
                let all: Vec<u32> = (0..self.ids.len() as u32).collect();
                let row = mean(&all, width, &mut |id, out| {
                    out.copy_from_slice(&values[id as usize * width..][..width]);
                    Ok(())
                })?;
                (0..rest).for_each(|_| values.extend(&row));
            }
            weights.with_rows(table, first, &values)?;
        }
        Ok(())
    }
}

/// The tokenizer of a model with the tokens of these adapters, and the new rows; `None`: there are none.
///
/// Errors: as for `NewRows::add`.
pub fn of_adapters(model: &Path, adapters: Vec<PathBuf>, stored: usize) -> Result<Option<(Tokenizer, NewRows)>> {
    if !model.join("tokenizer.json").is_file() {
        return Ok(None);
    }
    let mut tokenizer = Tokenizer::load(model)?;
    let changes = TextChanges {
        adapters,
        ..TextChanges::default()
    };
    let rows = NewRows::add(&changes, &mut tokenizer, model, stored)?;
    Ok(rows.map(|rows| (tokenizer, rows)))
}

/// The mean of rows, `[D]`.
fn mean(ids: &[u32], width: usize, read: &mut dyn FnMut(u32, &mut [f32]) -> Result<()>) -> Result<Vec<f32>> {
    let (mut sum, mut row) = (vec![0f64; width], vec![0f32; width]);
    for &id in ids {
        read(id, &mut row)?;
        sum.iter_mut().zip(&row).for_each(|(sum, x)| *sum += f64::from(*x));
    }
    Ok(sum.iter().map(|x| (x / ids.len().max(1) as f64) as f32).collect())
}

fn quantized_table(table: &str, format: Format) -> Error {
    Error::unsupported("new tokens are not supported in a model whose embedding or output head is quantized")
        .at(table)
        .found(format)
        .expected("a matrix in 16 or 32 bits")
        .hint("give the model's unquantized weights, or train without new tokens")
}

fn without_rows(tokenizer: &Tokenizer, dir: &Path, stored: usize, unasked: &[&str]) -> Error {
    let error = Error::new("the tokenizer has more tokens than the embedding has rows")
        .at_path(dir)
        .found(format!("{} tokens", tokenizer.vocab_size()))
        .expected(format!("at most {stored} (vocab_size of config.json)"));
    if unasked.is_empty() {
        return error.hint("use the tokenizer that belongs to this model");
    }
    let mut shown: Vec<String> = unasked.iter().take(SHOWN).map(|text| format!("`{text}`")).collect();
    if unasked.len() > SHOWN {
        shown.push(format!("and {} more", unasked.len() - SHOWN));
    }
    error.hint(format!(
        "{} have no row: `data.new_tokens = \"auto\"` makes and trains one for each, or use the tokenizer that \
         belongs to this model",
        shown.join(", ")
    ))
}

/// The recipe with the rows of the new tokens among the trained parameters.
pub fn with_new_rows(recipe: &Recipe, new: Option<&NewRows>, spec: &Spec) -> Recipe {
    let mut recipe = recipe.clone();
    let Some(new) = new else { return recipe };
    let tune = &mut recipe.tune;
    let embeds = tune.block.include_embedding && tune.method == Method::Block;
    let ids = new.ids.iter().map(|id| *id as usize);
    let tables: &[&str] = if spec.tied { &[EMBEDDING] } else { &[EMBEDDING, LM_HEAD] };
    let tables = tables.iter().map(|table| table.to_string());
    match (tune.new_tokens, tune.method) {
        (recipe::NewTokens::None, _) | (_, Method::Full) => {}
        (recipe::NewTokens::Matrix, Method::Lora) => {
            let modules = &mut tune.lora.modules_to_save;
            let saved = hf::saved_whole(modules, spec);
            for (module, table) in [("embed_tokens", EMBEDDING), ("lm_head", LM_HEAD)] {
                if !modules.iter().any(|m| m == module) && !saved.iter().any(|p| p == table) {
                    modules.push(module.into());
                }
            }
        }
        (recipe::NewTokens::Matrix, Method::Block) => tune.block.always_active.extend(tables),
        (recipe::NewTokens::Matrix, Method::Freeze) => tune.freeze.trainable.extend(tables),
        (_, Method::Lora) => {
            let lora = &mut tune.lora;
            // By a longer name too, such as `model.embed_tokens`.
            let saved = hf::saved_whole(&lora.modules_to_save, spec);
            let named = |m: &String| m == "embed_tokens" || m == "lm_head";
            let whole = lora.modules_to_save.iter().any(named) || saved.iter().any(|p| p == EMBEDDING || p == LM_HEAD);
            let known = lora.trainable_token_indices.clone();
            if !whole {
                lora.trainable_token_indices
                    .extend(ids.filter(|id| !known.contains(id)));
            }
        }
        (_, Method::Block | Method::Freeze) if !embeds => tune.rows.extend(new.ids.iter().copied()),
        (_, Method::Block | Method::Freeze) => {}
    }
    recipe
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::ErrorKind;
    use crate::formats::StoredDtype;
    use crate::formats::writer::{TensorPlan, Values, write_file};
    use crate::model::{families, shapes};
    use serde_json::json;

    /// Suffix, type, shape and bytes of a part of the output head.
    type Part = (&'static str, StoredDtype, Vec<usize>, Vec<u8>);

    /// Weights with an embedding `[8, 8]` and an output head of these parts.
    fn weights(dir: &Path, quantization: &Value, head: &[Part]) -> Weights {
        let embedding = vec![0u8; 4 * 64];
        let first = (EMBEDDING.to_string(), StoredDtype::F32, vec![8, 8], &embedding);
        let head = head
            .iter()
            .map(|(suffix, dtype, shape, bytes)| (format!("lm_head.{suffix}"), *dtype, shape.clone(), bytes));
        let (plans, bytes): (Vec<TensorPlan>, Vec<&Vec<u8>>) = std::iter::once(first)
            .chain(head)
            .map(|(name, dtype, shape, bytes)| (TensorPlan { name, dtype, shape }, bytes))
            .unzip();
        let mut bytes = bytes.into_iter();
        write_file(&dir.join("model.safetensors"), &plans, &[], |_, sink| {
            sink(Values::Raw(bytes.next().unwrap()))
        })
        .unwrap();
        let config = json!({"quantization_config": quantization});
        std::fs::write(dir.join("config.json"), config.to_string()).unwrap();
        Weights::open(dir).unwrap()
    }

    fn row() -> NewRows {
        NewRows {
            ids: vec![8],
            pieces: vec![vec![0, 1]],
            stored: 8,
            vocab: 9,
        }
    }

    #[test]
    fn new_rows_are_trained_once_also_if_the_matrix_has_a_longer_name() {
        let spec = families::read(&shapes::config("shape:tiny").unwrap().unwrap()).unwrap();
        let new = NewRows {
            ids: vec![7],
            pieces: vec![vec![1]],
            stored: 7,
            vocab: 8,
        };
        for (module, rows) in [("model.embed_tokens", 0), ("embed_tokens", 0), ("model.norm", 1)] {
            let text = format!(
                "[model]\npath = \"m\"\n[data]\ntrain = \"t\"\n[tune]\nmethod = \"lora\"\n[tune.lora]\nmodules_to_save = [\"{module}\"]\n"
            );
            let recipe = recipe::parse(&text, "r.toml", &[]).unwrap().recipe;
            let with_rows = with_new_rows(&recipe, Some(&new), &spec);
            assert_eq!(with_rows.tune.lora.trainable_token_indices.len(), rows, "{module}");
        }
    }

    #[test]
    fn new_rows_are_refused_for_a_quantized_head_that_is_read() {
        let zeros = |suffix, dtype: StoredDtype, shape: [usize; 2]| -> Part {
            let bytes = vec![0; shape[0] * shape[1] * dtype.size()];
            (suffix, dtype, shape.to_vec(), bytes)
        };
        let qweight = [
            zeros("qweight", StoredDtype::I32, [1, 8]),
            zeros("qzeros", StoredDtype::I32, [1, 1]),
            zeros("scales", StoredDtype::F16, [1, 8]),
        ];
        let sizes = [8i64, 8].iter().flat_map(|n| n.to_le_bytes()).collect();
        let packed = [
            zeros("weight_packed", StoredDtype::I32, [8, 1]),
            zeros("weight_scale", StoredDtype::Bf16, [8, 1]),
            ("weight_shape", StoredDtype::I64, vec![2], sizes),
        ];
        let int8 = [
            zeros("weight", StoredDtype::I8, [8, 8]),
            ("SCB", StoredDtype::F32, vec![8], vec![0; 32]),
        ];
        for (quantization, head) in [
            (
                json!({"quant_method": "gptq", "bits": 4, "group_size": 8}),
                &qweight[..],
            ),
            (json!({"quant_method": "awq", "bits": 4, "group_size": 8}), &qweight[..]),
            (
                json!({"quant_method": "compressed-tensors", "format": "pack-quantized"}),
                &packed[..],
            ),
            (json!({"quant_method": "bitsandbytes", "load_in_8bit": true}), &int8[..]),
        ] {
            let dir = tempfile::tempdir().unwrap();
            let mut untied = weights(dir.path(), &quantization, head);
            let e = row().place(&mut untied, false).unwrap_err();
            assert_eq!(e.kind(), ErrorKind::Unsupported, "{quantization}");
            assert!(e.to_string().contains(LM_HEAD), "{quantization}: {e}");
            let shape = |weights: &Weights| weights.info(EMBEDDING).unwrap().shape.clone();
            assert_eq!(shape(&untied), [8, 8], "{quantization}");
            // A tied model does not read it.
            let mut tied = weights(dir.path(), &quantization, head);
            row().place(&mut tied, true).unwrap();
            assert_eq!(shape(&tied), [9, 8], "{quantization}");
        }
    }
}
