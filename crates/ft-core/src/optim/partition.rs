//! Partition of the parameters into blocks: one or more layers, half a layer, a matrix, a group of experts, or a fraction of
//! every matrix.

use super::blocks::BlockPlan;
use super::config::{BlockConfig, BlockOrder, Partition};
use super::mask::UpdateMasks;
use crate::source::{Group, ParamInfo, Sublayer};

/// The blocks of a model, in model order.
pub fn partition(config: &BlockConfig, params: &[ParamInfo], tied: bool) -> Vec<BlockPlan> {
    let named = |label: String, wanted: &dyn Fn(&ParamInfo) -> bool| block(label, params.iter().filter(|p| wanted(p)));
    let mut blocks = Vec::new();
    if config.partition == Partition::Ratio {
        return windows(config, params, tied);
    }
    if config.include_embedding {
        blocks.push(named("embedding".into(), &|p| p.group == Group::Embedding));
        if params.iter().any(|p| p.group == Group::Table) {
            blocks.push(named("embed_tokens_per_layer".into(), &|p| p.group == Group::Table));
        }
    }
    // Group by layer, so that a block searches its own layers only.
    let mut of_layer: Vec<Vec<&ParamInfo>> = Vec::new();
    for p in params {
        if let Group::Layer(l) = p.group {
            of_layer.resize_with(of_layer.len().max(l + 1), Vec::new);
            of_layer[l].push(p);
        }
    }
    let layers = of_layer.len();
    // Layers that are drawn together are not adjacent: each is a block.
    let per_block = match config.order {
        BlockOrder::Importance => 1,
        _ if config.partition == Partition::Experts => 1,
        _ => config.layers_per_block.max(1),
    };
    for first in (0..layers).step_by(per_block) {
        let end = (first + per_block).min(layers);
        let inside: Vec<&ParamInfo> = of_layer[first..end].concat();
        let part_of = |label: String, wanted: &dyn Fn(&ParamInfo) -> bool| {
            block(label, inside.iter().copied().filter(|p| wanted(p)))
        };
        let label = if end == first + 1 {
            format!("model.layers.{first}")
        } else {
            format!("model.layers.{first}-{}", end - 1)
        };
        match config.partition {
            Partition::Layer => blocks.push(part_of(label, &|_| true)),
            Partition::Module | Partition::Experts => {
                let linear = inside.iter().any(|p| p.name.contains(".linear_attn."));
                let softmax = inside.iter().any(|p| p.name.contains(".self_attn."));
                let mixer = if linear && !softmax { "linear_attn" } else { "self_attn" };
                let mlp: &[Sublayer] = &[Sublayer::Mlp, Sublayer::Router];
                for (name, sublayers) in [(mixer, &[Sublayer::Attention][..]), ("mlp", mlp)] {
                    let expert = |p: &ParamInfo| config.partition == Partition::Experts && expert_of(&p.name).is_some();
                    blocks.push(part_of(format!("{label}.{name}"), &|p| {
                        sublayers.contains(&p.sublayer) && !expert(p)
                    }));
                }
                if config.partition == Partition::Experts {
                    blocks.extend(groups_of_experts(&label, &inside, config.experts_per_block.max(1)));
                }
            }
            Partition::Matrix => {
                let below = |p: &ParamInfo| {
                    let rest = p.name.strip_prefix("model.layers.")?;
                    let rest = &rest[rest.find('.')? + 1..];
                    rest.rsplit_once('.').map(|(module, _)| module.to_string())
                };
                let mut modules: Vec<String> = Vec::new();
                for p in inside.iter().filter(|p| !p.is_vector()) {
                    modules.extend(below(p).filter(|m| !modules.contains(m)));
                }
                for module in modules {
                    let same = |p: &ParamInfo| below(p).as_deref() == Some(module.as_str());
                    blocks.push(part_of(format!("{label}.{module}"), &same));
                }
            }
            Partition::Ratio => {}
        }
    }
    if config.include_lm_head {
        // As in the reference, the last block is the output layer and the parameters outside the layers. A tied head is
        // the embedding, trained here unless the embedding is a separate block.
        let with_embedding = tied && !config.include_embedding;
        blocks.push(named("lm_head".into(), &|p| {
            p.group == Group::Head || (with_embedding && p.group == Group::Embedding)
        }));
    }
    blocks
}

/// The index of the expert to which a parameter belongs, if it does: `7` of `model.layers.0.mlp.experts.7.up_proj.weight`.
pub(crate) fn expert_of(name: &str) -> Option<usize> {
    let (_, rest) = name.split_once(".experts.")?;
    rest.split('.').next()?.parse().ok()
}

/// The groups of `size` experts of a layer.
fn groups_of_experts(layer: &str, params: &[&ParamInfo], size: usize) -> Vec<BlockPlan> {
    let mut groups: Vec<Vec<&ParamInfo>> = Vec::new();
    for p in params {
        if let Some(expert) = expert_of(&p.name) {
            groups.resize_with(groups.len().max(expert / size + 1), Vec::new);
            groups[expert / size].push(p);
        }
    }
    let label = |group: &[&ParamInfo]| {
        let indices = || group.iter().filter_map(|p| expert_of(&p.name));
        match (indices().min(), indices().max()) {
            (Some(first), Some(last)) if first < last => format!("{layer}.experts.{first}-{last}"),
            (first, _) => format!("{layer}.experts.{}", first.unwrap_or(0)),
        }
    };
    let blocks = groups.iter().map(|group| block(label(group), group.iter().copied()));
    blocks.collect()
}

/// The windows of the `ratio` partition: each contains a fraction of every parameter of the layers, and of embedding
/// and head if they are included.
fn windows(config: &BlockConfig, params: &[ParamInfo], tied: bool) -> Vec<BlockPlan> {
    let wanted = |p: &&ParamInfo| match p.group {
        Group::Layer(_) => true,
        Group::Embedding => config.include_embedding || (tied && config.include_lm_head),
        Group::Head => config.include_lm_head,
        Group::Table => config.include_embedding,
    };
    let count = UpdateMasks::windows(config.update_ratio);
    let label = |i| format!("window {} of {count}", i + 1);
    (0..count)
        .map(|i| block(label(i), params.iter().filter(wanted)))
        .collect()
}

fn block<'a>(label: String, params: impl Iterator<Item = &'a ParamInfo> + Clone) -> BlockPlan {
    BlockPlan {
        label,
        elements: params.clone().map(ParamInfo::elements).sum(),
        params: params.map(|p| p.name.to_string()).collect(),
    }
}
