//! Losses of preference training; names as in TRL.

use ft_base::named;

named!(
    /// Losses of pairs with a reference (`dpo`), as in TRL's `loss_type`.
    PairLoss {
        Sigmoid = "sigmoid",
        Hinge = "hinge",
        Ipo = "ipo",
        ExoPair = "exo_pair",
        NcaPair = "nca_pair",
        Robust = "robust",
        BcoPair = "bco_pair",
        SppoHard = "sppo_hard",
        Aot = "aot",
        AotUnpaired = "aot_unpaired",
        ApoZero = "apo_zero",
        ApoDown = "apo_down",
        Discopop = "discopop",
        Sft = "sft",
        SigmoidNorm = "sigmoid_norm",
    }
);
named!(
    /// Losses of KTO rows (`kto`).
    JudgedLoss { Kto = "kto", ApoZeroUnpaired = "apo_zero_unpaired" }
);
named!(
    /// The divergence from the reference (f-DPO).
    FDivergence {
        ReverseKl = "reverse_kl",
        ForwardKl = "forward_kl",
        JsDivergence = "js_divergence",
        AlphaDivergence = "alpha_divergence",
    }
);
