//! The trained parameters: the method, blocks, frozen layers.

use super::*;

named!(
    /// The parameters that are trained for new tokens.
    NewTokens {
        /// Only their rows of embedding and head.
        Rows = "rows",
        /// The whole embedding and head.
        Matrix = "matrix",
        /// Nothing.
        None = "none",
    }
);
named!(Method { Full = "full", Block = "block", Lora = "lora", Freeze = "freeze" });

section! {
    /// Which parameters are trained.
    pub struct TuneKeys in "tune" {
        /// `full`: all parameters at once; `block`: one block at a time; `lora`: adapters; `freeze`: the last layers.
        method: Method = "block", "trains all layers with the memory of one";
        /// For tokens of `data.new_tokens`: `rows` trains their rows of embedding and head in every step (with adapters:
        /// `trainable_token_indices` of PEFT); `matrix` trains the whole embedding and head (with adapters:
        /// `modules_to_save`); `none` leaves the rows as they are made.
        new_tokens: NewTokens = "rows", "the new rows need training, the others know their tokens";
        /// The routers of a mixture of experts are trained; adapters leave them frozen.
        train_router: bool = true, "as in transformers: routers are parameters as all others",
            when Self::method = ["full", "block", "freeze"];
        with block: BlockKeys;
        with freeze: Freeze;
        with lora: LoraKeys;
    }
}

section! {
    /// Block training (BAdam): one block of parameters is active at a time.
    pub struct BlockKeys in "tune.block", when TuneKeys::method = ["block"] {
        /// A block is a layer, a module (attention or mlp), a single matrix, in a mixture of experts
        /// (`experts`) attention, the part of the MLP that all tokens share, or a group of experts, or (`ratio`) a
        /// fraction of every parameter.
        partition: Partition = "layer", "as in BAdam";
        /// Number of consecutive layers (modules, matrices) in a block; with `order = "importance"` the number of
        /// blocks that are drawn together (they need not be consecutive).
        layers_per_block: usize = 1, "least memory", in from(1);
        /// Number of experts of a layer in a block.
        experts_per_block: usize = 8, "a small part of a layer with 64 or 128 experts", in MANY,
            when Self::partition = ["experts"];
        /// Order in which blocks become active; `fixed` stays on `start_block`; `importance` draws them at random at
        /// each switch (LISA).
        order: BlockOrder = "random", "as in BAdam: a new order in each round, from the seed";
        /// How often a block is drawn, relative to a block of importance 1: a prefix of its name, `=`, a number, as in
        /// `lm_head=2`.
        importance: Vec<String> = [], "all blocks are drawn equally often", when Self::order = ["importance"];
        /// Fraction of each parameter that is active at a time; parameters with fewer than 100 elements are fully
        /// active.
        update_ratio: f64 = 0.1, "as in BAdam", in RATIO, when Self::partition = ["ratio"];
        /// Which elements are active together: adjacent elements, or elements scattered over the whole parameter.
        mask: MaskShape = "adjacent", "as in BAdam", when Self::partition = ["ratio"];
        /// The block that stays active with `order = "fixed"`.
        start_block: usize = 0, "the first block", in from(0), when Self::order = ["fixed"];
        /// Number of optimizer steps for which a block stays active (K).
        switch_every: Option<usize> = "auto", "steps of the run / blocks, from 1 to 100: every block becomes active",
            in from(1);
        /// The embedding is a block too.
        include_embedding: bool = false, "it is large and learns little in fine-tuning";
        /// The output head is a block too.
        include_lm_head: bool = false, "it is large and learns little in fine-tuning";
        /// Parameters whose names start with one of these are trained in every step.
        always_active: Vec<String> = [], "only the active block is trained";
        /// BREAD: a cheap update of the inactive blocks: a step of SGD (`sgd`) or sign SGD (`signsgd`) as soon as each
        /// gradient is computed, or adapters (`lora`, `[tune.lora]`) that train together with the block and are merged
        /// at the end.
        correction: Correction = "none", "plain BAdam";
        /// Layers that the correction updates: all, or those above the active block (`partial`).
        correction_scope: CorrectionScope = "all", "as in BREAD",
            when Self::correction = ["sgd", "signsgd", "lora"];
        /// Learning rate of the correction, as a multiple of that of the block; `sgd` and `signsgd` need very different
        /// values.
        correction_scale: f64 = 1.0, "as in BREAD", in POSITIVE,
            when Self::correction = ["sgd", "signsgd", "lora"];
        /// Number of warmup steps after each switch.
        warmup_after_switch: usize = 0, "as in BAdam", in from(0);
    }
}

section! {
    /// Only the last layers, or parameters given by name.
    pub struct Freeze in "tune.freeze", when TuneKeys::method = ["freeze"] {
        /// The last N layers are trained.
        trainable_layers: usize = 2, "the last layers change most in fine-tuning", in from(0);
        /// Parameters whose names start with one of these are trained too.
        trainable: Vec<String> = [], "only the last layers";
    }
}

impl TuneKeys {
    /// True if inactive blocks are corrected by the adapters of `[tune.lora]`.
    pub fn corrects_by_adapters(&self) -> bool {
        self.method == Method::Block && self.block.correction == Correction::Lora
    }
}

impl From<BlockKeys> for BlockConfig {
    fn from(keys: BlockKeys) -> Self {
        Self {
            partition: keys.partition,
            layers_per_block: keys.layers_per_block,
            experts_per_block: keys.experts_per_block,
            order: keys.order,
            start_block: keys.start_block,
            importance: keys.importance,
            update_ratio: keys.update_ratio,
            mask: keys.mask,
            switch_every: keys.switch_every,
            include_embedding: keys.include_embedding,
            include_lm_head: keys.include_lm_head,
            always_active: keys.always_active,
            correction: keys.correction,
            correction_scope: keys.correction_scope,
            correction_scale: keys.correction_scale,
            warmup_after_switch: keys.warmup_after_switch,
        }
    }
}

/// Contradictions.
pub(super) fn check(s: &RecipeSections, faults: &mut KeyFaults) {
    let TuneKeys {
        method, freeze, block, ..
    } = &s.tune;
    let adds = s.data.adds_tokens() && s.tune.new_tokens != NewTokens::None;
    if *method == Method::Freeze && freeze.trainable_layers == 0 && freeze.trainable.is_empty() && !adds {
        faults.add(
            &[Freeze::trainable_layers, Freeze::trainable, TuneKeys::method],
            Error::usage("`tune.method = \"freeze\"` with nothing to train")
                .hint("set `tune.freeze.trainable_layers` or `tune.freeze.trainable`"),
        );
    }
    let lora = &s.tune.lora;
    if *method == Method::Lora && s.data.adds_tokens() && s.tune.new_tokens == NewTokens::None {
        faults.add(
            &[
                TuneKeys::new_tokens,
                Data::new_tokens,
                Data::new_special_tokens,
                TuneKeys::method,
            ],
            Error::usage("a PEFT adapter cannot store new rows of the embedding that are not trained")
                .found(TuneKeys::new_tokens.is("none"))
                .hint("set `tune.new_tokens` to `rows` or `matrix`, or add the tokens with another `tune.method`"),
        );
    }
    let rows = s.tune.new_tokens == NewTokens::Rows && lora.adapter.is_none();
    if *method == Method::Lora && s.data.adds_tokens() && rows && !has_rows(lora.peft_type) {
        faults.add(
            &[
                TuneKeys::new_tokens,
                Data::new_tokens,
                Data::new_special_tokens,
                LoraKeys::peft_type,
            ],
            Error::usage(format!(
                "adapters of the type `{}` cannot have single rows of the embedding: PEFT has them for LoRA and AdaLoRA only",
                lora.peft_type.name()
            ))
            .hint("set `tune.new_tokens = \"matrix\"`, or `tune.lora.peft_type = \"lora\"`"),
        );
    }
    if *method == Method::Block && block.partition == Partition::Ratio && block.correction != Correction::None {
        faults.add(
            &[BlockKeys::partition, BlockKeys::correction, TuneKeys::method],
            Error::usage(format!(
                "`{}` corrects the parameters that are not active, and with `{}` every matrix is active",
                BlockKeys::correction.is(block.correction.name()),
                BlockKeys::partition.is("ratio")
            ))
            .hint(
                "use `partition = \"layer\"`, `\"module\"`, `\"matrix\"` or `\"experts\"`, or `correction = \"none\"`",
            ),
        );
    }
}

/// True if PEFT has `trainable_token_indices` for adapters of this type.
fn has_rows(kind: PeftType) -> bool {
    matches!(kind, PeftType::Lora | PeftType::Adalora)
}

/// The setting because of which a key has no effect.
pub(super) fn unused(s: &RecipeSections, key: KeyPath) -> Option<String> {
    match key {
        TuneKeys::new_tokens if !s.data.adds_tokens() => Some("data.new_tokens = []".into()),
        TuneKeys::new_tokens if s.tune.method == Method::Full => Some(TuneKeys::method.is("full")),
        BlockKeys::layers_per_block if s.tune.block.partition == Partition::Ratio => {
            Some(BlockKeys::partition.is("ratio"))
        }
        BlockKeys::layers_per_block
            if s.tune.block.partition == Partition::Experts && s.tune.block.order != BlockOrder::Importance =>
        {
            Some(BlockKeys::partition.is("experts"))
        }
        _ => None,
    }
}
