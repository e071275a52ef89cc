//! Dictionaries: words that a mutation of bytes does not find by chance. Most of them are the literals in the source of the parser, or
//! stand in ft's own tables, so that they are those of the parser as it is.

use super::tiny;
use ft::model::families;
use ft::recipe::ValueKind;
use ft::recipe::table::{self, RecipeKey};
use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

/// libFuzzer ignores longer words.
const LONGEST: usize = 64;

/// Beside the words of a target with JSON.
const JSON: &str = "{} [] null true false 0 -1 0.5 1e999 1e-400 18446744073709551616 9223372036854775808 4294967296 \"\\ud800\" NaN Infinity";

/// What the words of a target come from.
struct Dictionary {
    /// The words stand in quotes.
    is_json: bool,
    /// Files of the source, and folders of it.
    sources: &'static [&'static str],
    /// Words, separated by spaces.
    more: &'static str,
}

const fn plain(sources: &'static [&'static str], more: &'static str) -> Dictionary {
    Dictionary {
        is_json: false,
        sources,
        more,
    }
}

const fn json(sources: &'static [&'static str], more: &'static str) -> Dictionary {
    Dictionary {
        is_json: true,
        sources,
        more,
    }
}

const COLUMNS: &str = "text prompt completion messages conversations role content from value system user assistant human gpt tool tools \
                       tool_calls function name arguments instruction input output chosen rejected label margin answer history";

const TOKENIZER: &[&str] = &["crates/ft-formats/src/tokenizer.rs", "crates/ft-formats/src/tokenizer"];
const TOKENS: &str = "<|im_end|> <|endoftext|> bos_token eos_token pad_token unk_token additional_special_tokens added_tokens_decoder \
                      content lstrip rstrip single_word normalized special id chat_template tokenizer_class add_bos_token add_eos_token";

const ROWS: &[&str] = &[
    "crates/ft-data/src/layout.rs",
    "crates/ft-data/src/chat.rs",
    "crates/ft-data/src/rows.rs",
    "crates/ft-data/src/mapping",
    "crates/ft-data/src/preference",
];

fn dictionary(target: &str) -> Option<Dictionary> {
    let found = match target {
        "safetensors" => json(
            &["crates/ft-formats/src/header.rs", "crates/ft-formats/src/dtype.rs"],
            "__metadata__ dtype shape data_offsets format pt",
        ),
        "index" => json(
            &["crates/ft-formats/src/index.rs"],
            "metadata total_size weight_map model.norm.weight model.safetensors model-00001-of-00002.safetensors",
        ),
        "config" => json(
            &[
                "crates/ft-formats/src/config.rs",
                "crates/ft-core/src/model/families",
                "crates/ft-core/src/model/rope.rs",
            ],
            "model_type architectures text_config torch_dtype hidden_act full_attention sliding_attention",
        ),
        "tokenizer" => json(
            TOKENIZER,
            "model type vocab merges added_tokens normalizer pre_tokenizer post_processor decoder BPE WordPiece WordLevel Unigram \
             byte_fallback unk_id ignore_merges fuse_unk continuing_subword_prefix end_of_word_suffix dropout Sequence normalizers \
             pretokenizers processors decoders NFC NFD NFKC NFKD Lowercase Strip StripAccents Replace Prepend Precompiled \
             precompiled_charsmap BertNormalizer Nmt ByteLevel Metaspace Whitespace WhitespaceSplit BertPreTokenizer Digits \
             Punctuation Split CharDelimiterSplit UnicodeScripts FixedLength TemplateProcessing BertProcessing RobertaProcessing \
             ByteFallback Fuse CTC pattern Regex String behavior Isolated Removed MergedWithPrevious MergedWithNext Contiguous invert \
             prepend_scheme first always never add_prefix_space trim_offsets use_regex truncation padding",
        ),
        "tokenizer_config" | "special_tokens" => json(TOKENIZER, TOKENS),
        "generation_config" => json(
            TOKENIZER,
            "eos_token_id pad_token_id bos_token_id do_sample temperature top_k top_p",
        ),
        "template" => plain(
            &["crates/ft-formats/src/jinja"],
            "{% %} {%- -%} {{ }} {# #} if elif else endif for endfor in is not and or set endset macro endmacro call endcall filter \
             endfilter generation endgeneration break continue recursive loop.index0 loop.first loop.last loop.previtem namespace( \
             messages message['role'] message['content'] tools add_generation_prompt bos_token eos_token raise_exception( strftime_now( \
             |tojson |trim |length |join( |selectattr( |map(attribute= [::-1] [-1] [1:] ~ // ** {{''}} {%raw%} {%endraw%}",
        ),
        "kwargs" => json(
            &["crates/ft-formats/src/template/kwargs.rs"],
            "enable_thinking bos_token eos_token tools messages documents add_generation_prompt date_string reasoning_effort",
        ),
        "adapter" => json(
            &[
                "crates/ft-formats/src/adapter.rs",
                "crates/ft-formats/src/adapter",
                "crates/ft-core/src/peft/targets.rs",
            ],
            "peft_type r lora_alpha target_modules all-linear rank_pattern alpha_pattern modules_to_save bias none task_type CAUSAL_LM \
             q_proj k_proj v_proj o_proj gate_proj up_proj down_proj layers_to_transform layers_pattern init_lora_weights use_dora",
        ),
        "jsonl" | "json" | "preference" | "prompts" => json(ROWS, COLUMNS),
        "csv" => plain(ROWS, "\"\" \", ,\" \r\n \r \u{feff} prompt,completion \n\n"),
        "parquet" => plain(
            ROWS,
            "PAR1 PARE schema list element list.element key_value map text prompt completion messages ARROW:schema \0\0\0\0 \u{15} \u{7f}",
        ),
        "arrow" => plain(
            ROWS,
            "ARROW1 ARROW1\0\0 item text prompt completion messages \0\0\0\0 \u{1}\0\0\0 lz4_frame zstd",
        ),
        "gguf" => plain(
            &["crates/ft-formats/src/gguf/read.rs", "crates/ft-core/src/gguf/keys.rs"],
            "GGUF GGUF\u{3}\0\0\0 general.architecture general.alignment general.name llama.block_count tokenizer.ggml.tokens \
             \u{1}\0\0\0\0\0\0\0 \u{2}\0\0\0\0\0\0\0 \u{8}\0\0\0 \u{9}\0\0\0 token_embd.weight output_norm.weight",
        ),
        "recipe" | "argument" | "resolved" => plain(
            &[],
            "[[data.sources]] auto \"auto\" [\" \"] 22GiB 1e-3 1_000 0x10 # \"\"\" ''' {} = , true false",
        ),
        "checkpoint_tensors" | "restored" => plain(
            &["src/train/state.rs", "crates/ft-formats/src/dtype.rs"],
            "F32 BF16 F16 U8 I64 \0 \"format\": model.norm.weight model.layers.0. 0 1 -1 18446744073709551615",
        ),
        "best" => json(
            &["src/train/best.rs"],
            "metric values unsaved eval_loss eval_reward eval_accuracy step 10 NaN inf -0.0 1e999",
        ),
        "card" => plain(
            &["src/commands/push/card.rs"],
            "\0 \"base_model_name_or_path\": \"a/b\" a/b@main ``` ```` ` | \\| \\n# \\n---\\n --- [train]\nstage= [tune]\nmethod= \
             [model]\nrevision= [data]\ntrain= \"event\":\"data\" \"event\":\"start\" \"event\":\"stop\" \"fingerprint\": \"command\": \
             \"reason\": \"eval_ ''' \"\"\"",
        ),
        "upload" => json(
            &["crates/ft-hub/src/upload/send.rs"],
            "m.safetensors README.md empty lfs regular files path uploadMode oid objects actions upload href header chunk_size verify \
             error message commitOid 1 2 3 00001 5 authorization content-length https://store.example/1 //hub.example/ /x \
             84d89877f0d4041efb6bf91a16f0248f2fd573e6af05c19f96bedb9f882f7882 8c7c28205527f226b7a84dfee2c6cc22d33418a8",
        ),
        "sums" => plain(
            &["src/train/ranks.rs"],
            "{\"host\": \"a\" \"b\" \"available\": \"resident\": \"threads\": [[\"a\",\"b\"],[\"seed\",\"1\"]] kl \
             \0\0\0\0\0\0\0\0 \u{1}\0\0\0\0\0\0\0 \u{2}\0\0\0\0\0\0\0 \0\0\0\0\0\0\u{7f}",
        ),
        "manifest" => json(
            &["src/checkpoint/manifest.rs"],
            "state.json step files name size blake3 seal format ft",
        ),
        "state" => json(
            &["src/train/state.rs", "src/train/resumed.rs"],
            "recipe made_by program data base stage trained_tokens train.seed model.path",
        ),
        "metrics" => json(&["src/history"], "step loss lr eval_loss epoch time grad_norm NaN"),
        "events" => json(
            &["src/history"],
            "event start stop warning save step steps time reason done message",
        ),
        "quantized" => json(
            &["crates/ft-core/src/source/stored"],
            "quantization_config model_type text_config llama",
        ),
        "yaml" => plain(
            &["src/recipe/peers/keys.rs", "src/recipe/import"],
            "- : | > |- >- |2 & * << --- ... # {} [] ~ null true false .inf .nan !!str \" ' ? file_name: columns: tags: formatting: sharegpt",
        ),
        "run" => json(
            &["src/train/verify.rs", "src/train/owner.rs"],
            "ft run 1 final processes format config.json",
        ),
        "lock" => plain(
            &["crates/ft-base/src/lock.rs", "crates/ft-base/src/lock"],
            "process since UTC unix time on namespace (process 2026-01-01 00:00:00 4026531836)",
        ),
        "token_cache" => json(
            &["crates/ft-data/src/tokens"],
            "format fingerprint stats readings chunks screened read rows tokens hash sources file columns skipped",
        ),
        "teacher_cache" => json(
            &["src/train/teacher_cache.rs", "src/train/teacher_cache"],
            "format key common k temperature data teacher shards documents tokens",
        ),
        "hub" => json(
            &["crates/ft-hub/src/download.rs", "crates/ft-hub/src/select.rs"],
            "type file directory path oid size lfs sha256 train test validation data/train-00000-of-00001.parquet README.md .. C:",
        ),
        "request" => plain(
            &["src/look/http.rs", "src/look/server.rs"],
            "GET POST HEAD HTTP/1.1 HTTP/1.0 \r\n \r\n\r\n Host: host: ?runs= 0:5 & %2F %00 127.0.0.1 localhost [::1] :8000 /live Origin:",
        ),
        "score" => json(&["src/setup/rewards/program.rs"], "score nan inf -inf 1e400 0x1p3"),
        "adapter_weights" => plain(
            &[
                "crates/ft-formats/src/adapter.rs",
                "crates/ft-formats/src/adapter",
                "crates/ft-core/src/peft/targets.rs",
                "crates/ft-core/src/hf/load_adapter.rs",
            ],
            "F32 BF16 F16 U8 I64 F64 __metadata__ base_model.model.model.layers.0.self_attn.q_proj. lora_A.weight lora_B.weight \
             lora_magnitude_vector lora_embedding_A lora_embedding_B vera_lambda_b vera_lambda_d hada_w1_a lokr_w1 oft_R.weight \
             .experts.gate_up_proj .modules_to_save.default. token_adapter.trainable_tokens_delta lm_head.weight embed_tokens \
             \"rank_pattern\": \"modules_to_save\": \"peft_type\": 0 1 4 -1 18446744073709551615",
        ),
        "quantized_weights" => plain(
            &["crates/ft-core/src/source/stored", "crates/ft-formats/src/dtype.rs"],
            "= * - 32 64 1 0 4294967295 18446744073709551615 \"blocksize\": \"shape\": \"quant_type\": \"nested_blocksize\": \"nested_offset\": \0\0\0\0 \0\0\u{7f}",
        ),
        "shards" => plain(
            &[
                "crates/ft-core/src/model/families/wrapped.rs",
                "crates/ft-core/src/model/families/experts.rs",
            ],
            "tensor move copy drop unlist list one config F32 BF16 model.safetensors model-00001-of-00002.safetensors \
             model-00002-of-00002.safetensors model.layers.0.self_attn.q_proj.weight model.layers.0.mlp.experts.0. \
             model.embed_tokens.weight model.norm.weight lm_head.weight gate_up_proj tie_word_embeddings num_hidden_layers vocab_size",
        ),
        "template_dir" => plain(
            &["crates/ft-formats/src/template.rs", "crates/ft-formats/src/jinja"],
            "\"chat_template\": [{\"name\": \"template\": \"default\" \"tool_use\" {% %} {{ }} messages tools \0 \"role\": \"content\":",
        ),
        "messages" => json(
            &["crates/ft-data/src/chat.rs"],
            "messages tools prompt kwargs role content tool_calls function name arguments type parameters reasoning_content tool_call_id \
             system user assistant tool text <think> </think> <|im_end|> enable_thinking object properties description",
        ),
        "text" | "packed" => plain(ROWS, "\n\n \r\n \t \u{feff} text\t prompt\tcompletion \u{85} \0"),
        "options" => json(
            &[
                "crates/ft-data/src/mapping",
                "crates/ft-data/src/layout.rs",
                "crates/ft-data/src/screen",
            ],
            COLUMNS,
        ),
        "dash" => plain(
            &["src/look/http.rs", "src/look/server.rs"],
            "GET POST /token/ HTTP/1.1 \r\n \r\n\r\n Host: 127.0.0.1:8000 runs.json run/0.json live ?runs= Content-Length: %2F",
        ),
        "page" => json(
            &["src/look", "src/history"],
            "step when prompt completion before row text total ft event start stop warning command time message loss eval_loss reason",
        ),
        "hub_address" => plain(
            &["crates/ft-hub/src/http.rs", "crates/ft-hub/src/download.rs"],
            "https:// http:// hub.example rel=\"next\" Link: < > ; , ?cursor= // @ : :443 :80 [::1] /../ %2e \\ # etag: x-linked-etag: \
             x-repo-commit: x-linked-size: content-length: W/\" location:",
        ),
        "environment" => plain(
            &["src/cli/launch.rs", "crates/ft-hub/src/settings.rs"],
            "RANK= WORLD_SIZE= LOCAL_RANK= MASTER_ADDR= MASTER_PORT= OMPI_COMM_WORLD_RANK= OMPI_COMM_WORLD_SIZE= PMI_RANK= PMI_SIZE= \
             SLURM_PROCID= SLURM_NTASKS= TORCHELASTIC_RUN_ID= HF_TOKEN= HF_HOME= HF_HUB_CACHE= HF_ENDPOINT= HF_HUB_OFFLINE=1",
        ),
        "greeting" => plain(
            &["crates/ft-core/src/comm/meeting.rs"],
            "ft-rank-3 0 1 2 65535 - \n +\0\0\0 \0\0\0\0 \u{1}\0\0\0",
        ),
        "rendered" => plain(
            &[],
            "\0\0\0\0\0\0\0\0 \u{1}\0\0\0\0\0\0\0 \u{2}\0\0\0\0\0\0\0 \u{e9} \u{7f}\0\0\0\0\0\0\0",
        ),
        "reward" => json(
            &[
                "src/setup/rewards/schema.rs",
                "src/setup/rewards/numbers.rs",
                "src/setup/rewards/checks.rs",
            ],
            "type object array string integer number properties required items enum const anyOf allOf oneOf not $ref #/$defs/a $defs \
             pattern minLength maxLength minItems maxItems uniqueItems minimum maximum additionalProperties \\boxed{ #### 1,000 3/4 50% 1e3",
        ),
        "pair_cache" | "prompt_cache" => json(&["crates/ft-data/src/tokens"], "rows tokens pairs prompts hash chunks"),
        "row_index" | "rollout" => plain(
            &["src/setup/alignment/row_index.rs", "src/train/stage/rollout_buffer.rs"],
            "\0\0\0\0 \u{1}\0\0\0 \u{1}\0\0\0\0\0\0\0 \u{7f}\0\0\0 \0\0\u{7f} \" [ ] , : rows ids",
        ),
        "position" => json(
            &["crates/ft-data/src/streaming.rs", "crates/ft-data/src/streaming"],
            "position epoch row source rows seed",
        ),
        _ => return None,
    };
    Some(found)
}

/// The words of the dictionary of a target. None: it has no dictionary.
#[allow(dead_code, reason = "tests/memory has this module too, and no use for it")]
pub fn words(target: &str) -> Vec<String> {
    let Some(dictionary) = dictionary(target) else {
        return Vec::new();
    };
    let mut plain: BTreeSet<String> = dictionary.more.split(' ').map(str::to_string).collect();
    for source in dictionary.sources {
        literals(source, &mut plain);
    }
    match target {
        "config" => plain.extend(families::NAMES.map(str::to_string)),
        "recipe" | "resolved" | "argument" => recipe_words(target, &mut plain),
        "yaml" => plain.extend(table::keys().map(|key| key.name.to_string())),
        _ => {}
    }
    plain.remove("");
    let mut out = plain;
    if dictionary.is_json {
        out = out.iter().map(|word| format!("\"{word}\"")).collect();
        out.extend(JSON.split(' ').map(str::to_string));
    }
    out.retain(|word| word.len() <= LONGEST);
    out.into_iter().collect()
}

/// The keys of a recipe with their defaults, as a file has them, and as an argument has them; and the names that they accept.
fn recipe_words(target: &str, out: &mut BTreeSet<String>) {
    let mut all: Vec<&RecipeKey> = table::keys().collect();
    let inner = |key: &&RecipeKey| match key.kind {
        ValueKind::Tables(keys) => keys.iter().collect(),
        _ => Vec::new(),
    };
    let more: Vec<&RecipeKey> = all.iter().flat_map(inner).collect();
    all.extend(more);
    for key in all {
        let default = if key.default.is_empty() { "\"a\"" } else { key.default };
        if target == "argument" {
            out.insert(format!("{}={default}", key.path));
        } else {
            out.insert(format!("\n[{}]\n", key.table));
            out.insert(format!("\n{} = {default}\n", key.name));
        }
        if let ValueKind::Name(names) | ValueKind::Map(names) | ValueKind::Fields(names) = key.kind {
            let shown = |name: &&str| match target {
                "argument" => name.to_string(),
                _ => format!("\"{name}\""),
            };
            out.extend(names.iter().map(shown));
        }
    }
}

/// The literals of a file or of the files of a folder that may be words of a format: error messages have spaces.
fn literals(source: &str, out: &mut BTreeSet<String>) {
    let path = root().join(source);
    if path.is_dir() {
        for entry in fs::read_dir(&path).unwrap() {
            let name = entry.unwrap().file_name().into_string().unwrap();
            if name.ends_with(".rs") && !name.contains("test") {
                literals(&format!("{source}/{name}"), out);
            }
        }
        return;
    }
    let text = fs::read_to_string(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    let text = text.split("#[cfg(test)]\nmod tests {").next().unwrap_or_default();
    for line in text.lines().map(str::trim).filter(|line| !line.starts_with("//")) {
        let mut found = line.split('"').skip(1).step_by(2);
        // The names of a row, separated by spaces.
        if line.starts_with("(\"") {
            let names = found.next().unwrap_or_default();
            out.extend(names.split(' ').filter(|name| is_word(name)).map(str::to_string));
        }
        out.extend(found.filter(|name| is_word(name)).map(str::to_string));
    }
}

fn is_word(text: &str) -> bool {
    let is_good = |byte: u8| byte.is_ascii_alphanumeric() || b"_.-*/:<>|[]+@".contains(&byte);
    (2..=40).contains(&text.len()) && text.bytes().all(is_good) && text.bytes().any(|byte| byte.is_ascii_alphanumeric())
}

/// The repository.
fn root() -> PathBuf {
    let tiny = tiny();
    tiny.ancestors().nth(2).map(Path::to_path_buf).unwrap_or_default()
}
