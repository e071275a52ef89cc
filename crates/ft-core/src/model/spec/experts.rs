//! The numbers and names of a mixture of experts.

use super::{ROUTER_CORRECTION, Spec};
use crate::formats::adapter::PeftNames;
use crate::ops::quantized::Products;
use crate::ops::routing::RouterSpec;

/// A mixture of experts: a router chooses some of them for each token.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ExpertsSpec {
    /// Number of experts.
    pub count: usize,
    /// Intermediate size of an expert.
    pub intermediate: usize,
    /// The rule of the router.
    pub router: RouterSpec,
    /// The files have a correction of the scores. It is never trained.
    pub correction: bool,
    /// Biases of the router and of the experts.
    pub bias: bool,
    /// The expert that computes every token.
    pub shared: Option<SharedExpertSpec>,
    /// Names of its parameters.
    pub names: ExpertNames,
}

/// The expert that computes every token.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SharedExpertSpec {
    /// Its intermediate size.
    pub intermediate: usize,
    /// Names of its gate, up and down projection; equal names of gate and up: one linear has both, gate first.
    pub names: [&'static str; 3],
    /// Name of the weight of its output's factor, the sigmoid of a projection to one number.
    pub gate: Option<&'static str>,
}

/// Names of the parameters of a mixture of experts, below the layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ExpertNames {
    /// The weight of the router is `{router}.weight`.
    pub router: &'static str,
    /// The module with the correction of the scores.
    pub correction: &'static str,
    /// Expert 3 is `{experts}.3`.
    pub experts: &'static str,
    /// Gate, up and down projection of an expert.
    pub projections: [&'static str; 3],
    /// The module of transformers with the parameters of all experts, below the layer.
    pub module: &'static str,
    /// In that module the rows of gate and up alternate.
    pub alternate: bool,
    /// The correction of the scores is `[1, E]` in the files.
    pub correction_row: bool,
    /// Parts of paths below the layer that have another name in transformers 5: as in the files, and there.
    pub in_transformers: &'static [(&'static str, &'static str)],
}

impl ExpertNames {
    /// Qwen, OLMoE, GLM.
    pub const MLP: Self = Self {
        router: "mlp.gate",
        correction: "mlp.gate",
        experts: "mlp.experts",
        projections: ["gate_proj", "up_proj", "down_proj"],
        module: "mlp.experts",
        alternate: false,
        correction_row: false,
        in_transformers: &[],
    };
    /// gpt-oss.
    pub const GPT_OSS: Self = Self {
        router: "mlp.router",
        alternate: true,
        ..Self::MLP
    };
    /// Granite.
    pub const GRANITE: Self = Self {
        router: "block_sparse_moe.router.layer",
        experts: "block_sparse_moe.experts",
        module: "block_sparse_moe.experts",
        in_transformers: &[("block_sparse_moe.router.layer", "block_sparse_moe.router")],
        ..Self::MLP
    };
    /// Mixtral.
    pub const MIXTRAL: Self = Self {
        router: "block_sparse_moe.gate",
        experts: "block_sparse_moe.experts",
        projections: ["w1", "w3", "w2"],
        in_transformers: &[("block_sparse_moe.gate", "mlp.gate")],
        ..Self::MLP
    };
    /// MiniMax-M2: the correction is beside the router.
    pub const MINIMAX: Self = Self {
        correction: "block_sparse_moe",
        in_transformers: &[
            ("block_sparse_moe.gate", "mlp.gate"),
            (
                "block_sparse_moe.e_score_correction_bias",
                "mlp.e_score_correction_bias",
            ),
        ],
        ..Self::MIXTRAL
    };
    /// ERNIE 4.5.
    pub const ERNIE: Self = Self {
        correction: "mlp.moe_statics",
        correction_row: true,
        in_transformers: &[("mlp.moe_statics", "mlp.gate.moe_statics")],
        ..Self::MLP
    };
    /// Hunyuan.
    pub const HUNYUAN: Self = Self {
        router: "mlp.gate.wg",
        ..Self::MLP
    };
}

impl SharedExpertSpec {
    /// True if one linear has gate and up.
    pub fn is_fused(&self) -> bool {
        self.names[0] == self.names[1]
    }
}

impl Spec {
    /// How names in the files of the model differ from those in the model that PEFT loads.
    pub fn peft_names(&self) -> PeftNames {
        let experts = self.layers.iter().find_map(|layer| layer.experts);
        PeftNames {
            multimodal: self.multimodal,
            parts: experts.map(|experts| experts.names.in_transformers).unwrap_or_default(),
        }
    }
}

impl ExpertsSpec {
    /// True if the experts of a layer are computed together, if their weights fit (`grouped::fits`): on a GPU, unless a source
    /// brings one at a time, and with products in the type of the activations.
    pub fn together(on_gpu: bool, streamed: bool, products: Products) -> bool {
        on_gpu && !streamed && products == Products::Dequantized
    }

    /// Name, below the layer, of projection `projection` (0: gate, 1: up, 2: down) of an expert.
    pub fn linear_name(&self, expert: usize, projection: usize) -> String {
        let names = &self.names;
        format!("{}.{expert}.{}", names.experts, names.projections[projection])
    }

    /// Name, below the layer, of the weight of the router.
    pub fn router_name(&self) -> String {
        format!("{}.weight", self.names.router)
    }

    /// Name, below the layer, of the correction of the scores.
    pub fn correction_name(&self) -> String {
        format!("{}.{ROUTER_CORRECTION}", self.names.correction)
    }
}
