//! Settings of adapters; names as in PEFT. With their defaults.

use ft_base::named;

named!(
    /// Initial values of an adapter. Names as in PEFT.
    LoraInit {
    Default = "default",
    Gaussian = "gaussian",
    Corda = "corda",
    Pissa = "pissa",
    Olora = "olora",
    Eva = "eva",
    Loftq = "loftq",
    LoraGa = "lora_ga",
}
);
named!(
    /// The kind of adapter.
    PeftType {
        Lora = "lora",
        Adalora = "adalora",
        Ia3 = "ia3",
        Vera = "vera",
        Loha = "loha",
        Lokr = "lokr",
        Oft = "oft",
    }
);
named!(
    /// The components that CorDA trains: the least important for knowledge to preserve, or the most important for the
    /// task.
    CordaMethod {
        /// The smallest components.
        Kpm = "kpm",
        /// The largest components.
        Ipm = "ipm",
    }
);
named!(
    /// The variant of CorDA's normalization and damping.
    CordaArithmetic {
        Ft = "ft",
        /// Divides each row of data by |max(x)| and counts it as one.
        Peft = "peft",
    }
);

named!(
    /// The rank of an adapter on the parameters of all experts.
    ExpertRank {
        /// Every expert has the rank R.
        Each = "each",
        /// R divided by the number of experts that compute a token.
        Active = "active",
        /// R divided by the number of experts.
        All = "all",
    }
);

/// Adapters: kind, targets, ranks and initial values.
#[derive(Debug, Clone)]
pub struct LoraConfig {
    /// The kind of adapter.
    pub peft_type: PeftType,
    /// R: the rank.
    pub r: usize,
    /// The scale is `lora_alpha / r`.
    pub lora_alpha: f64,
    /// Probability that an input element is dropped.
    pub lora_dropout: f64,
    /// Empty means `all-linear`; otherwise names, suffixes of names or regular expressions, as in PEFT.
    pub target_modules: Vec<String>,
    /// Linears without an adapter, although `target_modules` matches them.
    pub exclude_modules: Vec<String>,
    /// Parameters with the matrices of all experts of a layer that get an adapter: whole paths or their endings, as in PEFT.
    pub target_parameters: Vec<String>,
    /// No linear gets an adapter, only `target_parameters`.
    pub only_parameters: bool,
    /// The rank of adapters on `target_parameters`.
    pub expert_rank: ExpertRank,
    /// Empty means every layer.
    pub layers_to_transform: Vec<usize>,
    /// In the written order; the first match is used.
    pub rank_pattern: Vec<(String, usize)>,
    /// As `rank_pattern`, for `lora_alpha`.
    pub alpha_pattern: Vec<(String, f64)>,
    /// Modules that train in full beside the adapters.
    pub modules_to_save: Vec<String>,
    /// Rows of the embedding (and of an untied head) that train.
    pub trainable_token_indices: Vec<usize>,
    /// The initial values.
    pub init_lora_weights: LoraInit,
    /// Number of training rows for `eva` and `lora_ga`.
    pub init_samples: usize,
    /// Power iterations of the fast SVD; 0 means the exact SVD.
    pub pissa_niter: usize,
    /// Alternating iterations of LoftQ.
    pub loftq_iter: usize,
    /// The scale is `lora_alpha / √r`.
    pub use_rslora: bool,
    /// DoRA: also trains the magnitude of each output feature.
    pub use_dora: bool,
    /// LoRA+: learning rate of B relative to that of A.
    pub loraplus_lr_ratio: f64,
    /// (IA)³: modules whose input is scaled.
    pub feedforward_modules: Vec<String>,
    /// OFT: rows of a block.
    pub oft_block_size: usize,
    /// OFT: computes the rotation with a Neumann series, not with an inverse.
    pub use_cayley_neumann: bool,
    /// LoKr: -1 factorizes as square as possible.
    pub decompose_factor: i64,
    /// LoKr: both factors are low-rank products.
    pub decompose_both: bool,
    /// VeRA: initial value of the small vector.
    pub d_initial: f64,
    /// Saves the adapter with its changed base weights.
    pub save_residual: bool,
    /// Rank of the saved plain LoRA; 0 means twice the trained rank, which is exact.
    pub save_rank: usize,
    /// Continue from this PEFT adapter directory; `None` starts a new adapter.
    pub adapter: Option<String>,
    /// For the initial values of CorDA.
    pub corda: CordaConfig,
    /// For AdaLoRA.
    pub adalora: AdaloraConfig,
    /// For the initial values of EVA.
    pub eva: EvaConfig,
}

impl Default for LoraConfig {
    fn default() -> Self {
        Self {
            peft_type: PeftType::Lora,
            r: 16,
            lora_alpha: 32.0,
            lora_dropout: 0.0,
            target_modules: Vec::new(),
            exclude_modules: Vec::new(),
            target_parameters: Vec::new(),
            only_parameters: false,
            expert_rank: ExpertRank::Each,
            layers_to_transform: Vec::new(),
            rank_pattern: Vec::new(),
            alpha_pattern: Vec::new(),
            modules_to_save: Vec::new(),
            trainable_token_indices: Vec::new(),
            init_lora_weights: LoraInit::Default,
            init_samples: 64,
            pissa_niter: 0,
            loftq_iter: 1,
            use_rslora: false,
            use_dora: false,
            loraplus_lr_ratio: 1.0,
            feedforward_modules: vec!["down_proj".into()],
            oft_block_size: 32,
            use_cayley_neumann: true,
            decompose_factor: -1,
            decompose_both: false,
            d_initial: 0.1,
            save_residual: false,
            save_rank: 0,
            adapter: None,
            corda: CordaConfig::default(),
            adalora: AdaloraConfig::default(),
            eva: EvaConfig::default(),
        }
    }
}

/// EVA: initial values from the main directions of the inputs.
#[derive(Debug, Clone)]
pub struct EvaConfig {
    /// Largest factor by which a rank may grow; 1 keeps all ranks.
    pub rho: f64,
}

impl Default for EvaConfig {
    fn default() -> Self {
        Self { rho: 2.0 }
    }
}

/// Rank allocation of AdaLoRA; names as in PEFT.
#[derive(Debug, Clone)]
pub struct AdaloraConfig {
    /// Mean final rank; 0 means two thirds of `r`, or no change for a given adapter.
    pub target_r: usize,
    /// Steps before the first pruning.
    pub tinit: usize,
    /// Steps after the last pruning.
    pub tfinal: usize,
    /// Steps between two prunings.
    pub delta_t: usize,
    /// Decay of the average of the sensitivity.
    pub beta1: f64,
    /// Decay of the average of the uncertainty.
    pub beta2: f64,
    /// Weight of the orthogonality term.
    pub orth_reg_weight: f64,
}

impl Default for AdaloraConfig {
    fn default() -> Self {
        Self {
            target_r: 0,
            tinit: 0,
            tfinal: 0,
            delta_t: 1,
            beta1: 0.85,
            beta2: 0.85,
            orth_reg_weight: 0.5,
        }
    }
}

/// CorDA: initial values from the covariance of the inputs.
#[derive(Debug, Clone)]
pub struct CordaConfig {
    /// The components that are trained.
    pub method: CordaMethod,
    /// Empty means the training rows.
    pub data: Vec<String>,
    /// Number of rows for the covariance.
    pub samples: usize,
    /// The arithmetic of the normalization.
    pub compatible: CordaArithmetic,
    /// Chooses ranks by layer with the same total.
    pub adaptive_rank: bool,
}

impl Default for CordaConfig {
    fn default() -> Self {
        Self {
            method: CordaMethod::Ipm,
            data: Vec::new(),
            samples: 256,
            compatible: CordaArithmetic::Ft,
            adaptive_rank: false,
        }
    }
}
