//! Which architecture of llama.cpp computes a family, and which options of a model it cannot compute.

use crate::base::{Error, Result};
use crate::model::Spec;
use crate::model::families::NAMES;
use crate::model::rope::Rope;
use crate::model::spec::Mixer;
use crate::ops::glu::Activation;
use crate::ops::rope::RopePairing;
use crate::ops::routing::Score;

/// How llama.cpp places sliding windows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum WindowLayout {
    /// Every layer attends to all tokens.
    Ignored,
    /// All layers of a period but the last.
    Period(usize),
    /// As `Period`, with the period in the file.
    AnyPeriod,
    /// A flag for each layer in the file.
    Listed,
}

/// How a router's weights are normalized.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum RouterNorm {
    /// The weights of the chosen experts add up to 1.
    Always,
    /// The weights are not normalized.
    Never,
    /// The file says which.
    Stored,
}

/// An architecture of llama.cpp.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Arch {
    /// Its name.
    pub name: &'static str,
    /// It rotates neighboring elements of a head; else its halves.
    pub neighbors: bool,
    /// For a model that rotates the halves, `neighbors` is correct too: rows of q and k change their order in the file.
    pub permuted: bool,
    /// It reads biases of q, k and v; of the output projection of the attention; of the MLP.
    pub biases: [bool; 3],
    /// It reads factors of the frequencies (`rope_freqs`).
    pub rope_factors: bool,
    /// Sliding windows.
    pub windows: WindowLayout,
    /// The embedding and the output projection have tensors of their own.
    pub needs_head: bool,
    /// The embedding is the output projection, always.
    pub only_tied: bool,
    /// Name of the norm on the input of the MLP.
    pub mlp_norm: &'static str,
    /// Activation of the MLP.
    pub activation: Activation,
    /// How the weights of the chosen experts are normalized.
    pub renormalized: RouterNorm,
    /// Layers without experts before those with experts.
    pub leading_dense: bool,
}

const PLAIN: Arch = Arch {
    name: "",
    neighbors: false,
    permuted: false,
    biases: [false; 3],
    rope_factors: false,
    windows: WindowLayout::Ignored,
    needs_head: false,
    only_tied: false,
    mlp_norm: "ffn_norm",
    activation: Activation::Silu,
    renormalized: RouterNorm::Always,
    leading_dense: false,
};

/// The architecture of a family.
fn named(model_type: &str) -> Option<Arch> {
    let llama = Arch {
        neighbors: true,
        permuted: true,
        biases: [true; 3],
        rope_factors: true,
        ..PLAIN
    };
    let gemma = Arch {
        only_tied: true,
        activation: Activation::GeluTanh,
        ..PLAIN
    };
    Some(match model_type {
        "llama" | "mistral" | "mixtral" => Arch { name: "llama", ..llama },
        "granite" => Arch {
            name: "granite",
            ..llama
        },
        "granitemoe" => Arch {
            name: "granitemoe",
            ..llama
        },
        "smollm3" => Arch {
            name: "smollm3",
            biases: [false; 3],
            ..llama
        },
        "olmo" => Arch {
            name: "olmo",
            neighbors: true,
            permuted: true,
            ..PLAIN
        },
        "qwen2" | "qwen2_5_vl_text" => Arch {
            name: "qwen2",
            biases: [true, false, false],
            ..PLAIN
        },
        "qwen3" | "qwen3_vl_text" => Arch { name: "qwen3", ..PLAIN },
        "qwen2_moe" => Arch {
            name: "qwen2moe",
            biases: [true, false, false],
            renormalized: RouterNorm::Never,
            ..PLAIN
        },
        "qwen3_moe" | "qwen3_vl_moe_text" => Arch {
            name: "qwen3moe",
            ..PLAIN
        },
        "gemma" => Arch { name: "gemma", ..gemma },
        "gemma2" => Arch {
            name: "gemma2",
            windows: WindowLayout::Period(2),
            ..gemma
        },
        "gemma3_text" => Arch {
            name: "gemma3",
            windows: WindowLayout::AnyPeriod,
            ..gemma
        },
        "phi3" => Arch { name: "phi3", ..PLAIN },
        "olmo2" | "olmo3" => Arch {
            name: "olmo2",
            windows: WindowLayout::Listed,
            needs_head: true,
            ..PLAIN
        },
        "olmoe" => Arch {
            name: "olmoe",
            needs_head: true,
            renormalized: RouterNorm::Never,
            ..PLAIN
        },
        "glm4" => Arch {
            name: "glm4",
            neighbors: true,
            biases: [true, false, false],
            ..PLAIN
        },
        "glm4_moe" => Arch {
            name: "glm4moe",
            biases: [true, false, false],
            mlp_norm: "post_attention_norm",
            renormalized: RouterNorm::Stored,
            leading_dense: true,
            ..PLAIN
        },
        "cohere" => Arch {
            name: "command-r",
            neighbors: true,
            only_tied: true,
            ..PLAIN
        },
        "cohere2" => Arch {
            name: "cohere2",
            neighbors: true,
            only_tied: true,
            windows: WindowLayout::Period(4),
            ..PLAIN
        },
        "starcoder2" => Arch {
            name: "starcoder2",
            biases: [true; 3],
            activation: Activation::GeluTanh,
            ..PLAIN
        },
        "nemotron" => Arch {
            name: "nemotron",
            biases: [true; 3],
            needs_head: true,
            activation: Activation::Relu2,
            ..PLAIN
        },
        "stablelm" => Arch {
            name: "stablelm",
            biases: [true, false, false],
            needs_head: true,
            ..PLAIN
        },
        "gpt_oss" => Arch {
            name: "gpt-oss",
            biases: [true, true, false],
            windows: WindowLayout::Period(2),
            needs_head: true,
            mlp_norm: "post_attention_norm",
            ..PLAIN
        },
        "exaone4" => Arch {
            name: "exaone4",
            rope_factors: true,
            windows: WindowLayout::Period(4),
            ..PLAIN
        },
        "hunyuan_v1_dense" => Arch {
            name: "hunyuan-dense",
            ..PLAIN
        },
        "ernie4_5" => Arch {
            name: "ernie4_5",
            neighbors: true,
            biases: [true, true, false],
            ..PLAIN
        },
        "seed_oss" => Arch {
            name: "seed_oss",
            biases: [true, false, false],
            mlp_norm: "post_attention_norm",
            ..PLAIN
        },
        "deepseek_v2" | "deepseek_v3" | "glm4_moe_lite" | "youtu" => Arch {
            name: "deepseek2",
            neighbors: true,
            renormalized: RouterNorm::Stored,
            leading_dense: true,
            ..PLAIN
        },
        _ => return None,
    })
}

/// The families that can be exported.
pub fn families() -> Vec<&'static str> {
    NAMES.into_iter().filter(|name| named(name).is_some()).collect()
}

/// The architecture that computes this model.
///
/// # Errors
/// A family or an option that llama.cpp, or ft's export, does not have.
pub(crate) fn of(spec: &Spec) -> Result<Arch> {
    let Some(arch) = named(&spec.model_type) else {
        let why = match spec.model_type.as_str() {
            "qwen3_next" | "qwen3_5_text" | "qwen3_5_moe_text" => {
                "the tensors of Gated DeltaNet are laid out differently in llama.cpp, and ft does not convert them"
            }
            "gemma3n_text" | "gemma4_text" => {
                "the tensors of per-layer inputs and streams are laid out differently in llama.cpp, and ft does not \
                 convert them"
            }
            "lfm2" => "ft does not convert short convolutions",
            "ministral3" => "ft does not convert its growing queries",
            _ => "llama.cpp does not have it, or ft does not know its names there",
        };
        return Err(Error::unsupported("this model family cannot be written as GGUF")
            .at(&spec.model_type)
            .found(why)
            .expected(families().join(", ")));
    };
    check(spec, &arch)?;
    Ok(arch)
}

fn refuse(spec: &Spec, arch: &Arch, what: &str) -> Error {
    Error::unsupported(format!("llama.cpp cannot compute this model: {what}"))
        .at(format!("{} as `{}`", spec.model_type, arch.name))
        .hint("use the Hugging Face directory with another program")
}

fn check(spec: &Spec, arch: &Arch) -> Result<()> {
    let no = |what: &str| Err(refuse(spec, arch, what));
    let granite = arch.name.starts_with("granite");
    let gemma = arch.name.starts_with("gemma");
    let plus_one = gemma || arch.name == "nemotron";
    let cohere = ["command-r", "cohere2"].contains(&arch.name);
    let rotates = match spec.pairing {
        RopePairing::Neighbors => arch.neighbors,
        RopePairing::Halves => !arch.neighbors || arch.permuted,
    };
    if !rotates {
        return no("other elements of a head are rotated together (`rope_interleave`)");
    }
    if spec.activation != arch.activation && spec.clamped_glu.is_none() {
        return no("another activation");
    }
    if spec.norm_plus_one != plus_one {
        return no("other norms");
    }
    let has = [spec.qkv_bias, spec.o_bias, spec.mlp_bias];
    if has.iter().zip(arch.biases).any(|(has, read)| *has && !read) {
        return no("biases that it does not read");
    }
    if !granite && (spec.residual_scale != 1.0 || (!cohere && spec.logit_scale != 1.0)) {
        return no("a factor of the residual stream or of the logits");
    }
    let expected = if gemma { (spec.hidden as f32).sqrt() } else { 1.0 };
    if !granite && (spec.embedding_scale / expected - 1.0).abs() > 1e-5 {
        return no("another factor of the embedding");
    }
    let caps = (spec.attention_softcap.is_some(), spec.logit_softcap.is_some());
    let caps_fit = match arch.name {
        "gemma2" => caps == (true, true),
        "gemma3" => !caps.0,
        _ => caps == (false, false),
    };
    if !caps_fit {
        return no("soft caps that it does not have, or not without");
    }
    if arch.only_tied && !spec.tied {
        return no("an output projection that is not the embedding");
    }
    let width = spec.heads * spec.head_dim;
    if (arch.name == "exaone4" && width != spec.hidden) || (arch.name == "olmoe" && spec.kv_heads != spec.heads) {
        return no("other sizes of its heads");
    }
    if arch.name == "gpt-oss" && spec.layers.iter().all(|layer| layer.window.is_none()) {
        return no("no sliding windows");
    }
    let clamped = spec.clamped_glu.map(|glu| (glu.alpha, glu.limit));
    if clamped != (arch.name == "gpt-oss").then_some((1.702, 7.0)) {
        return no("other limits of the gates of its experts");
    }
    // It detects the model with windows by the number of its layers.
    let windows = spec.layers.iter().any(|layer| layer.window.is_some());
    if arch.name == "exaone4" && windows != (spec.layers.len() == 64) {
        return no("sliding windows in a model of this size");
    }
    // It rotates layers with windows by the base of the other layers, without their scaling.
    if let ("olmo2", [full, windowed]) = (arch.name, spec.ropes.as_slice())
        && !(windowed.theta == full.theta && is_unscaled(windowed))
    {
        return no(
            "another base of the rotary frequencies in the layers with sliding windows, or scaled frequencies there",
        );
    }
    check_layers(spec, arch)
}

/// True for the frequencies of the base alone.
fn is_unscaled(rope: &Rope) -> bool {
    let rotary = 2 * rope.inv_freq.len();
    let plain = |i: usize| 1.0 / (rope.theta as f32).powf((2 * i) as f32 / rotary as f32);
    let long = rope.long.as_ref().is_some_and(|long| long.inv_freq.is_some());
    rope.attention_factor == 1.0 && !long && rope.inv_freq.iter().enumerate().all(|(i, f)| *f == plain(i))
}

fn check_layers(spec: &Spec, arch: &Arch) -> Result<()> {
    let no = |what: &str| Err(refuse(spec, arch, what));
    let window = spec.layers.iter().find_map(|layer| layer.window);
    let mut dense = 0;
    for (l, layer) in spec.layers.iter().enumerate() {
        let latent = matches!(layer.mixer, Mixer::Latent(_));
        // It detects DeepSeek-V2-Lite by the number of its layers.
        let whole = matches!(layer.mixer, Mixer::Latent(sizes) if sizes.q_rank.is_none());
        if whole && ![26, 27].contains(&spec.layers.len()) {
            return no("queries without a low rank");
        }
        if latent != (arch.name == "deepseek2") {
            return no("another kind of attention");
        }
        if (layer.head_dim, layer.kv_heads, layer.intermediate) != (None, None, None) {
            return no("layers of different sizes");
        }
        if let (WindowLayout::Period(period), Some(_)) = (arch.windows, window)
            && layer.window.is_some() != ((l + 1) % period != 0)
        {
            return no("sliding windows in other layers");
        }
        if layer.window.is_some() && layer.window != window {
            return no("sliding windows of different sizes");
        }
        let rotated = spec.ropes.get(layer.rope).is_none_or(|rope| rope.inv_freq != [0.0]);
        let expected = match arch.name {
            "smollm3" => (l + 1) % 4 != 0,
            "cohere2" => layer.window.is_some(),
            "exaone4" => window.is_none() || layer.window.is_some(),
            _ => true,
        };
        if rotated != expected {
            return no("other layers without positions");
        }
        match layer.experts {
            None => dense += usize::from(dense == l),
            Some(experts) => {
                if l >= dense && dense > 0 && !arch.leading_dense {
                    return no("layers without experts");
                }
                let renormalizes = experts.router.renormalize;
                let fits = match arch.renormalized {
                    RouterNorm::Always => renormalizes,
                    RouterNorm::Never => !renormalizes,
                    RouterNorm::Stored => true,
                };
                if !fits || experts.router.score == Score::TwoLevel {
                    return no("another rule of the router");
                }
            }
        }
    }
    let experts = spec.layers.iter().filter(|layer| layer.experts.is_some()).count();
    if experts > 0 && experts + dense != spec.layers.len() {
        return no("layers without experts between those with experts");
    }
    if arch.windows == WindowLayout::AnyPeriod && window.is_some() && period(spec).is_none() {
        return no("sliding windows without a period");
    }
    Ok(())
}

/// The period of the windows: all layers of it but the last have one.
pub(crate) fn period(spec: &Spec) -> Option<usize> {
    let count = spec.layers.len();
    let fits = |period: &usize| {
        let mut layers = spec.layers.iter().enumerate();
        layers.all(|(l, layer)| layer.window.is_some() == ((l + 1) % period != 0))
    };
    // Without a full layer every longer period fits: the usual one of the family is 6.
    [6].into_iter().chain(1..=count + 1).find(fits)
}

/// Number of layers without experts before the first layer with experts.
pub(crate) fn leading_dense(spec: &Spec) -> usize {
    let first = spec.layers.iter().position(|layer| layer.experts.is_some());
    first.unwrap_or(spec.layers.len())
}
