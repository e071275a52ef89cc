//! Files that are made from the tables of the code are up to date.

use super::resolved::reference;
use super::schema::schema;
use crate::base::files;
use std::path::Path;

/// Compares a generated file with the repository; `FT_BLESS` writes it.
fn up_to_date(file: &str, now: &str) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(file);
    if std::env::var_os("FT_BLESS").is_some() {
        files::write_atomic(&path, now.as_bytes()).unwrap();
    }
    let kept = files::read_text(&path).unwrap();
    assert!(kept == now, "{file} is stale: run `FT_BLESS=1 cargo test`");
}

#[test]
fn the_list_of_models_is_up_to_date() {
    let now = format!(
        "# Models\n\nFamilies by `model_type` of `config.json`. `ft models` prints the tables; a test makes this page from \
         them.\n\n{}{MODELS}",
        crate::model::families::table()
    );
    up_to_date("docs/models.md", &now);
}

const MODELS: &str = "
- An option of a config that changes the mathematics is supported or refused by its name. Dropout is not applied
  in training: a config that has it gets a warning.
- rope: `default`, `linear`, `llama3`, `yarn`, `longrope`, `dynamic`. `dynamic` equals `default` up to `max_position_embeddings`; longer
  documents are refused. `longrope`: a document longer than `original_max_position_embeddings` gets the long frequencies, as in
  transformers. In decoding a text cannot become longer than that: the keys in the cache are already rotated with the short frequencies.
- Multimodal models train on text; positions are those of a model without images. `final/` has the tensors of the other parts
  unchanged, under the names of the base model; quantized ones are dequantized. Adapters have the module names of the multimodal class, and
  `tune.lora.target_modules` means the language model only. Reward models of multimodal models are refused: ft writes the
  classifier of a text-only model (of Gemma 3: `gemma3_text`).
- A reward model is a sequence classifier of transformers, which has none for `cohere`, `cohere2`, `cwm`, `dots1`, `ernie4_5`, `ernie4_5_moe`,
  `flex_olmo`, `gemma3n_text`, `gemma4_text`, `glm4_moe_lite`, `granite`, `granite_swa`, `granitemoe`, `granitemoehybrid`, `granitemoeshared`,
  `hyperclovax`, `internlm3`, `iquestcoder`, `jais2`, `lfm2`, `mellum`, `minimax_m2`, `nanochat`, `qwen3_5_moe_text`, `qwen3_moe_smile`, `solar_open`,
  `vaultgemma` and `youtu`. Their reward models are trained with a warning and have the same form (`Lfm2ForSequenceClassification`,
  `score.weight`): ft reads them, transformers with a class derived from its `GenericForSequenceClassification` and the class of the
  family (`Lfm2PreTrainedModel`).
- `pad_token_id` of the config is `padding_idx` of the embedding, as in transformers: where that token is in a text, its row of the
  embedding (and of the table of per-layer embeddings) gets no gradient from that place. Some checkpoints use a token that ends turns as
  the padding token; it is not trained there either ([optimizers.md](optimizers.md#the-row-of-the-padding-token)).
- `partial_rotary_factor` is an option of `gemma4_text`, `glm`, `glm4`, `glm4_moe`, `minimax_m2`, `nemotron`, `phi3`, `qwen3_5_text`,
  `qwen3_5_moe_text`, `qwen3_next` and `stablelm`, also inside of `gemma4`, `qwen3_5` and `qwen3_5_moe`; transformers does not apply it elsewhere.
- Gemma 3n and Gemma 4: the table of the per-layer embeddings is trained by `full`, by `block` with `tune.block.include_embedding` (a
  block of its own), and by `freeze` if it is named. Its gradient has the size of the table in f32, as has each moment of the optimizer, and
  every update changes all rows, as in transformers. Where it is not trained, only the rows of a batch are read, from host memory or the
  disk with `memory.tier`.
- Gemma 3n and Gemma 4: adapters on all linear layers include those of the per-layer inputs (`per_layer_model_projection` before the layers too) and of
  AltUp, as in PEFT. Then the gradient goes down to the embedding; with `tune.lora.target_modules` of layers only it does not.
- Gemma 4: the scale of each layer is not trained (it is a buffer in transformers). `enable_moe_block` (26B-A4B) and new tokens are
  refused.
  On a GPU the heads of 512 elements (full attention) use the kernels without tensor cores.
- LFM2: `full`, `block` and `freeze` train the weights of the convolutions too; adapters are on the projections around them.
- Quantized checkpoints load: bitsandbytes, FP8, GPTQ, AWQ, compressed-tensors, ModelOpt FP8 ([quantization.md](quantization.md#files-of-other-tools)).
- Checkpoints in f16 load: f16 and f32 keep every value, bf16 rounds each weight by up to 0.2 %. Training in f16 needs a GPU
  ([optimizers.md](optimizers.md#f16-and-the-loss-scale)).
";

#[test]
fn the_reference_is_up_to_date() {
    up_to_date("docs/recipe.md", &reference());
}

#[test]
fn the_schema_is_up_to_date() {
    up_to_date("docs/recipe.schema.json", &format!("{:#}\n", schema()));
}
