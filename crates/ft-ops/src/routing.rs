//! Routing in a mixture of experts: which experts compute a token, and with which weights, in f32; every sum has a fixed
//! order. Logits on a GPU stay there (`cuda::routing`), except those of a router of two levels, which are copied to the host.
//! `rows` gives each expert its tokens.
//!
//! Letters: N tokens, E experts, G groups of M = E / G experts, K experts for each token, D columns of a row.
//!
//! Scores p are the softmax or the sigmoid of the logits. The K largest are chosen (ties: the lower expert); their
//! weights are the scores, divided by their sum if `renormalize`, times `scale`. With `groups` only the experts of the
//! best groups can be chosen (DeepSeek-V2, arXiv 2405.04434, section 2.1.2). A correction of the scores changes the
//! choice, not the weights (DeepSeek-V3, arXiv 2412.19437, section 2.1.2).
//!
//! A router of two levels (SMILE, arXiv 2212.05191) has G more logits: p is a softmax over the groups times a softmax over
//! the experts of the group. A group is rated by its softmax, which is the sum of p over its experts.

mod host;
mod rows;
mod two_level;

pub use rows::{
    AssignedTokens, AssignmentLists, ExpertAssignment, gates, gates_backward, row_products, row_products_add,
    scale_rows,
};
pub use two_level::{TwoLevelLoss, TwoLevelSums};

use super::cpu::storage::{dims2, expect_dims};
use candle_core::{Device, Tensor};
use ft_base::{Error, Result};
use host::HostRouting;

/// How a router makes scores of its logits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Score {
    /// Softmax over all experts.
    Softmax,
    /// The sigmoid of each logit.
    Sigmoid,
    /// A softmax over the groups, times a softmax over the experts of each group. The logits of the groups follow those of
    /// the experts.
    TwoLevel,
}

/// How a group of experts is rated.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum GroupScore {
    /// By its largest score.
    Largest,
    /// By the sum of its two largest scores.
    TwoLargest,
    /// By the sum of its scores.
    Sum,
}

/// The experts are in groups of the same size; a token is computed by experts of the best groups only.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct ExpertGroups {
    /// Number of groups.
    pub count: usize,
    /// Number of groups that are chosen.
    pub chosen: usize,
    /// How a group is rated.
    pub score: GroupScore,
}

/// The rule of a router.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RouterSpec {
    /// Scores of the logits.
    pub score: Score,
    /// K: experts for each token.
    pub top_k: usize,
    /// The weights of a token are divided by their sum.
    pub renormalize: bool,
    /// Factor of the weights.
    pub scale: f32,
    /// Groups of experts.
    pub groups: Option<ExpertGroups>,
}

/// Gradients of the logits that do not come from the weights.
#[derive(Debug, Clone, Default)]
pub struct LogitLoss {
    /// The gradient of the scores of each token, one value for each expert; empty: none.
    pub balance: Vec<f32>,
    /// Factor c of the loss c · Σ (log Σ e^z)² over the tokens (ST-MoE, arXiv 2202.08906, equation 5). Softmax only.
    pub z: f32,
    /// Routers of two levels.
    pub two_level: Option<TwoLevelLoss>,
}

/// 1 / (1 + e^-x).
pub fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + (-x).exp())
}

impl RouterSpec {
    /// Number of experts, of `experts`, that a token can have; 0: the groups do not fit.
    pub fn available(&self, experts: usize) -> usize {
        match self.groups {
            None => experts,
            Some(g) if g.count > 0 && g.chosen <= g.count && experts.is_multiple_of(g.count) => {
                experts / g.count * g.chosen
            }
            Some(_) => 0,
        }
    }

    /// Logits of a router of `experts` experts: its rows.
    pub fn outputs(&self, experts: usize) -> usize {
        experts + self.group_logits()
    }

    fn group_logits(&self) -> usize {
        match (self.score, self.groups) {
            (Score::TwoLevel, Some(groups)) => groups.count,
            _ => 0,
        }
    }

    fn check(&self, experts: usize) -> Result<()> {
        if self.score == Score::TwoLevel && self.groups.is_none() {
            return Err(Error::argument("a router of two levels has no groups"));
        }
        let available = self.available(experts);
        if self.top_k == 0 || self.top_k > available {
            return Err(Error::argument("a router cannot choose this number of experts")
                .found(format!("{} of {experts}", self.top_k))
                .expected(format!("1 to {available}")));
        }
        Ok(())
    }

    /// Chooses the experts of every token. `logits` `[N, E]` f32, of a router of two levels `[N, E+G]`; `correction` `[E]` f32:
    /// added to the scores for the choice. Logits on a GPU are overwritten (a router of two levels: copied to the host).
    ///
    /// # Errors
    /// Shapes that do not fit; more experts for a token than there are; logits that are not finite.
    pub fn route(&self, logits: &Tensor, correction: Option<&Tensor>) -> Result<Routing> {
        let (_, outputs) = dims2(logits, "the logits of a router")?;
        let experts = outputs.saturating_sub(self.group_logits());
        self.check(experts)?;
        if let Some(c) = correction {
            expect_dims(c, "the correction of a router", &[experts])?;
        }
        #[cfg(feature = "cuda")]
        if logits.device().is_cuda() && super::cuda::routing::fits(self) {
            let routing = super::cuda::routing::route(self, logits, correction)?;
            return Ok(Routing(RoutingOn::Device(routing)));
        }
        Ok(Routing(RoutingOn::Host(self.route_on_host(logits, correction)?)))
    }
}

/// The experts of each token. On a GPU scores, choice and weights stay there; the host has the number of tokens of each expert.
#[derive(Debug, Clone)]
pub struct Routing(RoutingOn);

#[derive(Debug, Clone)]
enum RoutingOn {
    Host(HostRouting),
    #[cfg(feature = "cuda")]
    Device(super::cuda::routing::DeviceRouting),
}

/// Calls a method of the routing in its place.
macro_rules! in_place {
    ($self:ident, $routing:ident => $call:expr) => {
        match &$self.0 {
            RoutingOn::Host($routing) => $call,
            #[cfg(feature = "cuda")]
            RoutingOn::Device($routing) => $call,
        }
    };
}

impl Routing {
    /// Number of tokens.
    pub fn tokens(&self) -> usize {
        in_place!(self, routing => routing.tokens())
    }

    /// Number of tokens of each expert, `[E]`.
    pub fn counts(&self) -> Vec<usize> {
        in_place!(self, routing => routing.counts())
    }

    /// Sum of the scores of each expert over the tokens, `[E]`.
    pub fn score_sums(&self) -> Vec<f64> {
        in_place!(self, routing => routing.score_sums())
    }

    /// Sum over the tokens of (log Σ e^z)²; 0 for sigmoid scores.
    pub fn log_sum_squares(&self) -> f64 {
        in_place!(self, routing => routing.log_sum_squares())
    }

    /// Sum over the tokens of the entropy of their scores, in nats. Sigmoid scores are divided by their sum.
    pub fn entropy_sum(&self) -> f64 {
        in_place!(self, routing => routing.entropy_sum())
    }

    /// Sum over the tokens of the number of groups that compute them, if the router has groups. With each group on a rank of its
    /// own a token is sent to as many ranks.
    pub fn group_visits(&self) -> Option<u64> {
        in_place!(self, routing => routing.group_visits())
    }

    /// The sums that the balance loss of a router of two levels needs; `None` for others.
    pub fn two_level_sums(&self) -> Option<TwoLevelSums> {
        match &self.0 {
            RoutingOn::Host(routing) => routing.two_level_sums(),
            #[cfg(feature = "cuda")]
            RoutingOn::Device(_) => None,
        }
    }

    /// The gradient of the logits, `[N, E]` f32, from that of the weights: N·K values in the order of
    /// `ExpertAssignment`. In the place of the routing.
    ///
    /// # Errors
    /// Another number of values.
    pub fn backward(&self, d_weights: &Tensor, extra: &LogitLoss) -> Result<Tensor> {
        in_place!(self, routing => routing.backward(d_weights, extra))
    }

    /// Puts the tokens and weights of all experts on the device of the rows. `together`: experts are computed together (on a GPU
    /// only).
    ///
    /// # Errors
    /// Not enough memory on the device.
    pub fn assign(&self, device: &Device, together: bool) -> Result<ExpertAssignment> {
        match &self.0 {
            RoutingOn::Host(routing) => routing.assign(device, together),
            #[cfg(feature = "cuda")]
            RoutingOn::Device(routing) => Ok(routing.assign(together)),
        }
    }
}

#[cfg(test)]
mod tests;
