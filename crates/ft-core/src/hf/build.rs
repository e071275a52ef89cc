//! Builds the adapter of one linear from the tensors of a file, for every kind.
//!
//! Letters: I input features, O output features, R rank.

use crate::base::Result;
use crate::formats::adapter::{AdapterConfig, AdapterKind};
use crate::formats::weights::Weights;
use crate::peft::lora::scaling;
use crate::peft::targets::{self, Site};
use crate::peft::{
    self, Adalora, Adapter, Cayley, Dora, DropoutMask, Factor, Ia3, Loha, Lokr, Lora, Oft, Vera, VeraProjections,
};
use candle_core::{Device, Tensor};
use std::collections::BTreeMap;

/// The tensors of a file for one linear: names in the file by names below the module. `faults` gets all mismatches.
pub(super) struct LinearTensors<'a> {
    pub config: &'a AdapterConfig,
    pub weights: &'a Weights,
    pub site: &'a Site,
    /// Index of the site in the model.
    pub index: u64,
    /// The rank and the alpha of the config for this linear.
    pub r: usize,
    pub alpha: f64,
    pub names: &'a BTreeMap<&'static str, String>,
    pub faults: &'a mut Vec<String>,
}

/// `[R, largest I]` and `[largest O, R]` of a VeRA file.
pub(super) fn projections(
    config: &AdapterConfig,
    weights: &Weights,
    faults: &mut Vec<String>,
) -> Result<Option<VeraProjections>> {
    if !matches!(config.kind, AdapterKind::Vera { .. }) {
        return Ok(None);
    }
    let [a, b] = crate::formats::adapter::VERA;
    let dims = |name: &str, rank_at: usize| {
        let shape = weights.info(name).map(|i| i.shape.clone()).unwrap_or_default();
        let fits = shape.len() == 2 && shape[rank_at] == config.r;
        fits.then_some(shape)
    };
    let (Some(a_shape), Some(b_shape)) = (dims(a, 0), dims(b, 1)) else {
        faults.push(format!(
            "{a}, {b}: the shared pair is missing, or its rank is not {}",
            config.r
        ));
        return Ok(None);
    };
    let (a, b) = (read(weights, a, &a_shape, faults)?, read(weights, b, &b_shape, faults)?);
    Ok(a.zip(b).map(|(a, b)| VeraProjections { a, b }))
}

impl LinearTensors<'_> {
    /// Reads the tensor with this name below the module; adds a fault if it is missing or has another shape.
    fn take(&mut self, below: &str, shape: &[usize]) -> Result<Option<Tensor>> {
        let Some(name) = self.names.get(below) else {
            self.faults.push(format!("{}.{below}: missing", self.site.module));
            return Ok(None);
        };
        read(self.weights, name, shape, self.faults)
    }

    /// The shape of a tensor, if it is a matrix.
    fn matrix(&self, below: &str) -> Option<(usize, usize)> {
        match self.weights.info(self.names.get(below)?)?.shape.as_slice() {
            &[rows, columns] => Some((rows, columns)),
            _ => None,
        }
    }

    /// `None`: there was a mismatch; it is in `faults`.
    pub(super) fn build(mut self, shared: Option<&VeraProjections>) -> Result<Option<Adapter>> {
        let (config, site) = (self.config, self.site);
        let (module, i, o) = (site.module.as_str(), site.input, site.output);
        let (r, alpha) = (self.r, self.alpha);
        let mask = DropoutMask {
            p: config.lora_dropout as f32,
            site: self.index,
        };
        Ok(match &config.kind {
            AdapterKind::Lora => {
                let a = self.take("lora_A.weight", &[r, i])?;
                let b = self.take("lora_B.weight", &[o, r])?;
                let magnitude = if config.use_dora {
                    self.take("lora_magnitude_vector", &[o])?
                } else {
                    None
                };
                let scale = scaling(alpha, r, config.use_rslora);
                let lora = a.zip(b).map(|pair| Lora::new(module, pair, scale, mask));
                if !config.use_dora {
                    lora.map(Adapter::Lora)
                } else {
                    lora.zip(magnitude)
                        .map(|(lora, m)| Adapter::Dora(Dora::new(module, lora, m)))
                }
            }
            AdapterKind::Ia3 { feedforward } => {
                let scales_input = targets::scales_input(&config.name_in_file(module), feedforward)?;
                let dims = if scales_input { [1, i] } else { [o, 1] };
                self.take("ia3_l", &dims)?
                    .map(|f| Adapter::Ia3(Ia3::new(module, f, scales_input)))
            }
            AdapterKind::Vera { .. } => {
                let b = self.take("vera_lambda_b", &[o])?;
                let d = self.take("vera_lambda_d", &[r])?;
                let Some(shared) = shared else { return Ok(None) };
                if shared.a.dim(1)? < i || shared.b.dim(0)? < o {
                    self.faults
                        .push(format!("{module}: the shared pair is too small for this linear"));
                    return Ok(None);
                }
                b.zip(d)
                    .map(|(b, d)| Adapter::Vera(Vera::new(module, shared.clone(), b, d, i, mask)))
            }
            AdapterKind::Loha => {
                let [w1a, w1b, w2a, w2b] = peft::LOHA_NAMES;
                let one = (self.take(w1a, &[o, r])?, self.take(w1b, &[r, i])?);
                let two = (self.take(w2a, &[o, r])?, self.take(w2b, &[r, i])?);
                match (one, two) {
                    ((Some(a), Some(b)), (Some(c), Some(d))) => Some(Adapter::Loha(Loha::new(
                        module,
                        [a, b, c, d],
                        (alpha / r as f64) as f32,
                    ))),
                    _ => None,
                }
            }
            AdapterKind::Lokr { .. } => {
                let (a, c) = self.outer("lokr_w1").unwrap_or((0, 0));
                let (b, d) = self.outer("lokr_w2").unwrap_or((0, 0));
                if a.checked_mul(b) != Some(o) || c.checked_mul(d) != Some(i) {
                    self.faults.push(format!(
                        "{module}: found factors [{a}, {c}] and [{b}, {d}], expected a product of [{o}, {i}]"
                    ));
                    return Ok(None);
                }
                let first = self.factor("lokr_w1", (a, c), r)?;
                let second = self.factor("lokr_w2", (b, d), r)?;
                let scale = (alpha / r as f64) as f32;
                first
                    .zip(second)
                    .map(|(first, second)| Adapter::Lokr(Lokr { first, second, scale }))
            }
            AdapterKind::Oft { block, neumann, .. } => {
                let k = self.matrix("oft_R.weight").map_or(0, |(k, _)| k);
                // The size in the config may be anything; no tensor of this number of blocks has the shape of a fitting one.
                let s = if k > 0 && i % k == 0 {
                    i / k
                } else {
                    Oft::fitting((*block).max(1), i)
                };
                let cayley = neumann.map_or(Cayley::Exact, Cayley::Neumann);
                self.take("oft_R.weight", &[i / s, Oft::elements(s)])?
                    .map(|t| Adapter::Oft(Oft::new(module, t, s, cayley)))
            }
            AdapterKind::Adalora(allocation) => {
                // Pruned files are smaller; the scale uses the initial rank.
                let own = self.matrix("lora_E").map_or(r, |(rows, _)| rows).min(r);
                if let Some(kept) = allocation.kept_of(module) {
                    let left = kept.iter().filter(|k| **k).count();
                    if kept.len() != r || left != own {
                        self.faults.push(format!(
                            "{module}: `rank_pattern` leaves {left} of {} singular values, the file has {own} of {r}",
                            kept.len()
                        ));
                        return Ok(None);
                    }
                }
                let a = self.take("lora_A", &[own, i])?;
                let b = self.take("lora_B", &[o, own])?;
                let e = self.take("lora_E", &[own, 1])?;
                let scale = peft::adalora_scaling(alpha, r);
                a.zip(b)
                    .zip(e)
                    .map(|((a, b), e)| Adapter::Adalora(Adalora::new(module, a, b, e, scale, mask)))
            }
        })
    }

    /// The size of a Kronecker factor, either a full matrix or a product.
    fn outer(&self, name: &str) -> Option<(usize, usize)> {
        self.matrix(name).or_else(|| {
            let (rows, _) = self.matrix(&format!("{name}_a"))?;
            let (_, columns) = self.matrix(&format!("{name}_b"))?;
            Some((rows, columns))
        })
    }

    fn factor(&mut self, name: &str, (rows, columns): (usize, usize), r: usize) -> Result<Option<Factor>> {
        let module = &self.site.module;
        if self.names.contains_key(name) {
            return Ok(self
                .take(name, &[rows, columns])?
                .map(|t| Factor::whole(module, name, t)));
        }
        let a = self.take(&format!("{name}_a"), &[rows, r])?;
        let b = self.take(&format!("{name}_b"), &[r, columns])?;
        Ok(a.zip(b).map(|(a, b)| Factor::product(module, name, a, b)))
    }
}

/// Reads tensor `key` as f32 on the host; adds a fault if its shape differs or a value is not finite.
pub(super) fn read(weights: &Weights, key: &str, shape: &[usize], faults: &mut Vec<String>) -> Result<Option<Tensor>> {
    let found = weights.info(key).map(|i| (i.shape.clone(), i.dtype));
    match found {
        Some((found, _)) if found != shape => {
            faults.push(format!("{key}: found {found:?}, expected {shape:?}"));
            Ok(None)
        }
        Some((_, dtype)) if !dtype.is_weight() => {
            faults.push(format!("{key}: stored as {dtype}, which cannot be read as weights"));
            Ok(None)
        }
        _ => {
            let values = weights.read_f32(key)?;
            if let Some(i) = values.iter().position(|x| !x.is_finite()) {
                faults.push(format!("{key}: the number at position {i} is not finite"));
                return Ok(None);
            }
            Ok(Some(Tensor::from_vec(values, shape, &Device::Cpu)?))
        }
    }
}
