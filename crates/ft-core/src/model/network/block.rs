//! A block from the weights of its layer.

use super::{Network, param};
use crate::base::sync::lock;
use crate::base::{Error, Result};
use crate::model::block::DecoderBlock;
use crate::model::block::altup::AltUp;
use crate::model::block::laurel::Laurel;
use crate::model::block::per_layer::PerLayerInput;
use crate::model::delta_net::DeltaNet;
use crate::model::experts::Experts;
use crate::model::latent::LatentAttention;
use crate::model::linear::Linear;
use crate::model::norm::Norm;
use crate::model::projections::Projections;
use crate::model::short_conv::ShortConv;
use crate::model::spec::{
    ALTUP, ATTENTION_SINKS, LATENT_NORM, LATENT_QUERY_NORM, LAUREL, LAYER_SCALAR, Mixer, NormSpec, PER_LAYER,
    SHORT_CONV, SHORT_CONV_BIAS,
};
use crate::ops::{sparse_gate, update};
use crate::source::{GroupWeights, Sublayer};

impl Network {
    /// Creates the block of layer `index` from its weights.
    ///
    /// # Errors
    /// The source cannot deliver the weights of this layer.
    pub fn block(&self, index: usize) -> Result<DecoderBlock> {
        let weights = self.source.fetch_dense(index)?;
        let spec = &self.spec;
        let norms = spec.norms(index);
        let sparsity = spec.layers[index].sparsity;
        let norm = |name: Option<&str>| {
            let of = norms.iter().find(|norm| Some(norm.name) == name);
            let read = |norm: &NormSpec| {
                let ones = self.ones_of(norm)?;
                Norm::read(&weights, &format!("model.layers.{index}.{}", norm.name), norm, ones)
            };
            of.map(read).transpose()
        };
        let linear = |name: &str, bias: bool| -> Result<Linear> {
            let module = format!("model.layers.{index}.{name}");
            let bias = if bias {
                Some(param(&weights, &format!("{module}.bias"))?)
            } else {
                None
            };
            let adapter = self.adapter_of(&module);
            let (name, weight) = weights.weight(&format!("{module}.weight"))?;
            let weight = weight.with_products(self.products);
            Ok(Linear {
                name,
                weight,
                bias,
                adapter,
            })
        };
        let (q, kv, i) = (
            spec.query_width(index),
            spec.kv_width(index),
            spec.intermediate_of(index),
        );
        let of_mixer = spec.linears(index).into_iter();
        let of_mixer = of_mixer.filter(|l| l.sublayer == Sublayer::Attention && !LAUREL.contains(&l.name));
        let mut of_mixer: Vec<Linear> = of_mixer.map(|l| linear(l.name, l.bias)).collect::<Result<_>>()?;
        let mut o_proj = Projections::separate(of_mixer.pop().into_iter().collect());
        let mut latent = match spec.layers[index].mixer {
            Mixer::Latent(sizes) => {
                let expand = Projections::separate(of_mixer.pop().into_iter().collect());
                let query = sizes.q_rank.and_then(|_| of_mixer.pop());
                let query = query.map(|linear| Projections::separate(vec![linear]));
                let Some(inner) = norm(Some(LATENT_NORM))? else {
                    return Err(Error::internal("latent attention has no norm"));
                };
                Some(LatentAttention {
                    sizes,
                    queries: norm(Some(LATENT_QUERY_NORM))?.zip(query),
                    norm: inner,
                    expand,
                })
            }
            _ => None,
        };
        let convolution = match spec.layers[index].mixer {
            Mixer::ShortConv { kernel, bias } => Some((kernel, bias)),
            _ => None,
        };
        let mut attention_in = match (of_mixer.pop(), spec.fused_qkv) {
            (Some(fused), _) if convolution.is_some() => Projections::fused(fused, vec![spec.hidden; 3]),
            (Some(fused), true) => Projections::fused(fused, vec![q, kv, kv]),
            (last, _) => {
                of_mixer.extend(last);
                Projections::separate(of_mixer)
            }
        };
        let mlp = |names: &[&str]| {
            let linears = names.iter().map(|n| linear(n, spec.mlp_bias));
            Ok::<_, Error>(Projections::separate(linears.collect::<Result<_>>()?))
        };
        let [gate, up, down] = spec.modules.mlp;
        let [up, down] = spec.plain_mlp.or(spec.fused_gate_up).unwrap_or([up, down]);
        let experts = spec.layers[index].experts;
        let shared = experts.and_then(|e| e.shared);
        let down: Vec<&str> = match (&experts, &shared) {
            (Some(_), shared) => shared.iter().map(|s| s.names[2]).collect(),
            (None, _) => vec![down],
        };
        let mut mlp_in = match (spec.plain_mlp.or(spec.fused_gate_up), shared) {
            (_, Some(s)) if s.is_fused() => {
                Projections::fused(linear(s.names[0], spec.mlp_bias)?, vec![s.intermediate; 2])
            }
            (_, Some(s)) => mlp(&s.names[..2])?,
            _ if experts.is_some() => mlp(&[])?,
            (Some(_), _) if spec.fused_gate_up.is_some() => Projections::fused(linear(up, spec.mlp_bias)?, vec![i, i]),
            (Some(_), _) => mlp(&[up])?,
            _ => mlp(&[gate, up])?,
        };
        let other = |name: &str| param(&weights, &format!("model.layers.{index}.linear_attn.{name}"));
        let delta_net = match spec.layers[index].mixer {
            Mixer::DeltaNet(sizes) => Some(DeltaNet {
                sizes,
                conv: other("conv1d.weight")?,
                a_log: other("A_log")?,
                dt_bias: other("dt_bias")?,
                norm: other("norm.weight")?,
            }),
            Mixer::Attention | Mixer::Latent(_) | Mixer::ShortConv { .. } => None,
        };
        let convolution = convolution.map(|(kernel, bias)| {
            let of_layer = |name| param(&weights, &format!("model.layers.{index}.{name}"));
            Ok::<_, Error>(ShortConv {
                conv: of_layer(SHORT_CONV)?,
                bias: bias.then(|| of_layer(SHORT_CONV_BIAS)).transpose()?,
                kernel,
            })
        });
        let mut down_proj = mlp(&down)?;
        let experts = self.expert_reader(index).map(|reader| Experts::read(&weights, reader));
        let mut groups = vec![&mut attention_in, &mut o_proj, &mut mlp_in, &mut down_proj];
        if let Some(latent) = &mut latent {
            groups.extend(latent.queries.as_mut().map(|(_, linear)| linear));
            groups.push(&mut latent.expand);
        }
        let mut per_layer = None;
        if let (Some(of), Some(norm)) = (spec.per_layer, norm(Some(PER_LAYER[2]))?) {
            let one = |name| Ok::<_, Error>(Projections::separate(vec![linear(name, false)?]));
            let input = per_layer.insert(PerLayerInput {
                width: of.width,
                gate: one(PER_LAYER[0])?,
                projection: one(PER_LAYER[1])?,
                norm,
            });
            groups.extend([&mut input.gate, &mut input.projection]);
        }
        let mut laurel = None;
        if let Some(norm) = norm(spec.laurel.map(|_| LAUREL[2]))? {
            let one = |name| Ok::<_, Error>(Projections::separate(vec![linear(name, false)?]));
            let (left, right) = (one(LAUREL[0])?, one(LAUREL[1])?);
            let of = laurel.insert(Laurel { left, right, norm });
            groups.extend([&mut of.left, &mut of.right]);
        }
        let of_layer = |name: &str| param(&weights, &format!("model.layers.{index}.{name}"));
        let altup = match (spec.streams, norm(Some(ALTUP[1]))?) {
            (Some(streams), Some(norm)) => Some(AltUp {
                streams,
                router: linear(ALTUP[0], false)?,
                norm: norm.scaled(1.0 / spec.hidden as f32),
                prediction: linear(ALTUP[2], false)?,
                correction: linear(ALTUP[3], false)?,
                scale: of_layer(ALTUP[4])?,
            }),
            _ => None,
        };
        let sinks = spec.has_sinks(index).then_some(ATTENTION_SINKS);
        let sinks = sinks.map(|name| param(&weights, &format!("model.layers.{index}.{name}")));
        let sinks = sinks.transpose()?;
        let value_norm = spec.value_norm.then(|| self.plain_norm(spec.head_dim_of(index)));
        let mut copies = lock(&self.pair_copies);
        match copies.as_mut() {
            Some(copies) => Projections::copy_pairs(groups, copies.entry(index).or_default())?,
            None => Projections::copy_pairs(groups, &mut None)?,
        }
        Ok(DecoderBlock {
            _weights: weights.clone(),
            index,
            attention_in,
            o_proj,
            q_norm: norm(spec.qk_norm.map(|n| n.names[0]))?,
            k_norm: norm(spec.qk_norm.map(|n| n.names[1]))?,
            value_norm: value_norm.transpose()?,
            sinks,
            delta_net,
            latent,
            short_conv: convolution.transpose()?,
            mlp_in,
            down_proj,
            experts: experts.transpose()?,
            input_norm: norm(spec.norms.before_attention)?,
            attention_post_norm: norm(spec.norms.after_attention)?,
            mlp_norm: norm(spec.norms.before_mlp)?,
            mlp_post_norm: norm(spec.norms.after_mlp)?,
            per_layer,
            laurel,
            altup,
            sparse_gate: (sparsity > 0.0).then(|| sparse_gate::quantile(sparsity)),
            scale: self.layer_scale(index, &weights)?,
            spec: self.spec.clone(),
        })
    }

    /// The factor of the output of a layer.
    fn layer_scale(&self, index: usize, weights: &GroupWeights) -> Result<f32> {
        if !self.spec.layer_scalar {
            return Ok(1.0);
        }
        let mut known = lock(&self.scales);
        if let Some(scale) = known.get(&index) {
            return Ok(*scale);
        }
        let name = format!("model.layers.{index}.{LAYER_SCALAR}");
        let values = update::to_f32_vec(&param(weights, &name)?.tensor)?;
        let scale = values.first().copied().unwrap_or(1.0);
        known.insert(index, scale);
        Ok(scale)
    }
}
