//! Rotary position embeddings (Su et al. 2021, arXiv 2104.09864) with the scalings that checkpoints use:
//! linear, YaRN (Peng et al. 2023, arXiv 2309.00071, section 3), Llama 3, LongRoPE (Ding et al. 2024, arXiv 2402.13753),
//! dynamic NTK up to the context length of the model.

use crate::base::sync::lock;
use crate::base::{Error, Result};
use crate::ops::embedding;
use candle_core::{Device, Tensor};
use serde_json::{Map, Value};
use std::sync::Mutex;

/// Rope frequencies of one kind of layer.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Rope {
    /// `[R/2]`
    pub inv_freq: Vec<f32>,
    /// Factor of cos and sin (YaRN, LongRoPE).
    pub attention_factor: f32,
    /// The base of the frequencies, before they are scaled; 0: they have none.
    pub theta: f64,
    /// The options of YaRN, if it scales the frequencies.
    pub yarn: Option<Yarn>,
    /// Longer documents have other frequencies.
    pub long: Option<LongDocuments>,
    /// Ministral 3: queries grow with their position.
    pub growth: Option<Growth>,
}

/// The options of YaRN, with the values that it has where the config leaves one out.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Yarn {
    /// By how much the context is longer than `original`.
    pub factor: f64,
    /// The context length of the pretraining.
    pub original: f64,
    /// Dimensions with more rotations than this over `original` keep their frequency.
    pub beta_fast: f64,
    /// Dimensions with fewer rotations than this have the whole `factor`.
    pub beta_slow: f64,
    /// The limits between these dimensions are rounded to whole dimensions.
    pub truncate: bool,
}

/// The frequencies of long documents.
#[derive(Debug, Clone, PartialEq)]
pub struct LongDocuments {
    /// Documents with more tokens than this are long.
    pub beyond: usize,
    /// `[R/2]`; `None`: they depend on the length of the document, which ft does not support.
    pub inv_freq: Option<Vec<f32>>,
}

/// Factor 1 + beta · ln(1 + ⌊position / original⌋) of the queries, as in Llama 4.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Growth {
    /// The strength.
    pub beta: f32,
    /// The context length of the pretraining.
    pub original: f32,
}

/// Rope parameters and their place in the config, for errors.
struct RopeReader<'a> {
    map: &'a Map<String, Value>,
    place: &'a str,
}

impl RopeReader<'_> {
    fn opt(&self, key: &str) -> Result<Option<f64>> {
        match self.map.get(key) {
            None | Some(Value::Null) => Ok(None),
            Some(v) => match v.as_f64() {
                Some(x) if x.is_finite() => Ok(Some(x)),
                _ => Err(Error::format(format!("rope option `{key}` is not a finite number"))
                    .at(self.place)
                    .found(v)),
            },
        }
    }

    fn positive(&self, key: &str) -> Result<f64> {
        match self.opt(key)? {
            Some(x) if x > 0.0 => Ok(x),
            found => Err(Error::format(format!("rope option `{key}` must be a positive number"))
                .at(self.place)
                .found(found.map_or("nothing".to_string(), |x| x.to_string()))),
        }
    }
}

impl Rope {
    /// `parameters` is one set in the form of transformers 5: `rope_type` (or `type`), `rope_theta`, and the options of
    /// the type. `head_dim` is E, `max_positions` the config's `max_position_embeddings`.
    ///
    /// # Errors
    /// A `rope_type` that is not supported, by name; an option that is missing or not a number.
    pub fn new(parameters: &Map<String, Value>, head_dim: usize, max_positions: usize, place: &str) -> Result<Self> {
        let r = RopeReader { map: parameters, place };
        let kind = parameters
            .get("rope_type")
            .or_else(|| parameters.get("type"))
            .and_then(Value::as_str);
        let theta = r.positive("rope_theta")?;
        if kind == Some("proportional") {
            let rope = proportional(&r, head_dim, theta)?;
            return Ok(Self { theta, ..rope });
        }
        let partial = r.opt("partial_rotary_factor")?.unwrap_or(1.0);
        let dim = (head_dim as f64 * partial) as usize;
        if dim == 0 || !dim.is_multiple_of(2) || dim > head_dim {
            return Err(Error::format("the rotated part of a head must have an even size")
                .at(place)
                .found(format!(
                    "{dim} (`head_dim` {head_dim} × `partial_rotary_factor` {partial})"
                ))
                .expected(format!("an even number from 2 to {head_dim}"))
                .hint("many families rotate whole heads: there `partial_rotary_factor` is 1 or missing"));
        }
        // f32 like the reference, which rounds the power and the quotient too.
        let inv: Vec<f32> = (0..dim)
            .step_by(2)
            .map(|i| 1.0 / (theta as f32).powf(i as f32 / dim as f32))
            .collect();
        let rope = match kind.unwrap_or("default") {
            // mrope: the sections of a token of text have the same position.
            "default" | "mrope" => Self::plain(inv),
            "linear" => {
                let factor = r.positive("factor")? as f32;
                Self::plain(inv.iter().map(|f| f / factor).collect())
            }
            "llama3" => Self::plain(llama3(&r, &inv)?),
            "dynamic" => {
                r.positive("factor")?;
                Self {
                    long: Some(LongDocuments {
                        beyond: max_positions,
                        inv_freq: None,
                    }),
                    ..Self::plain(inv)
                }
            }
            "longrope" => longrope(&r, &inv, max_positions)?,
            "yarn" => yarn(&r, &inv, dim, theta, max_positions)?,
            other => {
                return Err(Error::unsupported(format!("rope type `{other}` is not supported"))
                    .at(place)
                    .expected("default, linear, dynamic, yarn, llama3, longrope or proportional"));
            }
        };
        Ok(Self { theta, ..rope })
    }

    /// The frequencies `inv_freq` `[R/2]`, in radians per position, without scaling.
    pub fn plain(inv_freq: Vec<f32>) -> Self {
        Self {
            inv_freq,
            attention_factor: 1.0,
            ..Self::default()
        }
    }

    /// No rotation: an angle of 0, for layers without positions.
    pub fn none() -> Self {
        Self::plain(vec![0.0])
    }

    /// The number of tables with a row for each position.
    pub fn tables(&self) -> usize {
        1 + usize::from(self.long.as_ref().is_some_and(|long| long.inv_freq.is_some()))
    }

    /// Which tokens are in long documents. `documents`: where each one starts, and the end.
    fn in_long(&self, positions: &[u32], documents: &[usize]) -> Result<Vec<bool>> {
        let mut out = vec![false; positions.len()];
        let Some(long) = &self.long else { return Ok(out) };
        for range in documents.windows(2).map(|ends| ends[0]..ends[1]) {
            let tokens = positions[range.clone()]
                .iter()
                .max()
                .map_or(0, |last| *last as usize + 1);
            if tokens <= long.beyond {
                continue;
            }
            if long.inv_freq.is_none() {
                return Err(Error::unsupported(
                    "rope type `dynamic` beyond `max_position_embeddings` is not supported",
                )
                .found(format!("a document of {tokens} tokens"))
                .expected(format!("at most {}", long.beyond))
                .hint(
                    "use shorter documents: beyond this length the frequencies depend on the length of each document",
                ));
            }
            out[range].fill(true);
        }
        Ok(out)
    }

    /// cos and sin of positions, each `[N, R/2]`; with each position whether its document is long.
    fn of(&self, positions: impl ExactSizeIterator<Item = (u32, bool)>, device: &Device) -> Result<(Tensor, Tensor)> {
        let of_long = self.long.as_ref().and_then(|long| long.inv_freq.as_ref());
        let shape = (positions.len(), self.inv_freq.len());
        let (mut cos, mut sin) = (
            Vec::with_capacity(shape.0 * shape.1),
            Vec::with_capacity(shape.0 * shape.1),
        );
        for (p, long) in positions {
            let grown = self
                .growth
                .map_or(1.0, |g| 1.0 + g.beta * (p as f32 / g.original).floor().ln_1p());
            let factor = self.attention_factor * grown;
            for &f in of_long.filter(|_| long).unwrap_or(&self.inv_freq) {
                let (s, c) = (p as f32 * f).sin_cos();
                cos.push(c * factor);
                sin.push(s * factor);
            }
        }
        Ok((
            Tensor::from_vec(cos, shape, device)?,
            Tensor::from_vec(sin, shape, device)?,
        ))
    }
}

/// cos and sin of the first positions on a GPU, for each rope: computed and uploaded once, and again with more positions
/// when a later one is needed. The rows of a batch are gathered from them.
#[derive(Default)]
pub struct RopeTables(Mutex<Vec<Tensor>>);

impl RopeTables {
    /// Number of positions in the tables, if `longest` are needed.
    pub fn rows(longest: usize) -> usize {
        longest.next_multiple_of(1024)
    }

    /// For each rope cos and sin of `positions`, `[N, R/2]`; `documents`: where each document starts, and the end.
    ///
    /// # Errors
    /// Not enough memory on the device.
    pub fn gather(
        &self,
        ropes: &[Rope],
        positions: &[u32],
        documents: &[usize],
        device: &Device,
    ) -> Result<Vec<(Tensor, Tensor)>> {
        if device.is_cpu() {
            let of = |r: &Rope| {
                let long = r.in_long(positions, documents)?;
                r.of(positions.iter().copied().zip(long), device)
            };
            return ropes.iter().map(of).collect();
        }
        let needed = positions.iter().max().map_or(0, |last| *last as usize + 1);
        // cos and sin of the first rope, then of the second.
        let mut tables = lock(&self.0);
        let ready = |(table, rope): (&Tensor, &Rope)| table.dims()[0] >= needed * rope.tables();
        if tables.is_empty() || !tables.iter().step_by(2).zip(ropes).all(ready) {
            // Frees the old ones first. After an error there are none.
            tables.clear();
            // The second half of the table is for long documents, if the rope has a table of its own for them.
            let of_rope = |rope: &Rope| {
                let of_table = |t: usize| (0..Self::rows(needed) as u32).map(move |p| (p, t > 0));
                let rows: Vec<_> = (0..rope.tables()).flat_map(of_table).collect();
                rope.of(rows.into_iter(), device)
            };
            let pairs: Vec<(Tensor, Tensor)> = ropes.iter().map(of_rope).collect::<Result<_>>()?;
            tables.extend(pairs.into_iter().flat_map(|(cos, sin)| [cos, sin]));
        }
        if ropes.iter().all(|rope| rope.long.is_none()) {
            let rows = embedding::gather_each(&tables, positions)?;
            let pairs = rows.chunks_exact(2);
            return Ok(pairs.map(|pair| (pair[0].clone(), pair[1].clone())).collect());
        }
        let mut out = Vec::with_capacity(ropes.len());
        for (rope, pair) in ropes.iter().zip(tables.chunks_exact(2)) {
            let long = rope.in_long(positions, documents)?;
            let second = (pair[0].dims()[0] / rope.tables()) as u32;
            let row = |(p, long): (&u32, bool)| if long { p + second } else { *p };
            let rows: Vec<u32> = positions.iter().zip(long).map(row).collect();
            let rows = embedding::gather_each(pair, &rows)?;
            out.push((rows[0].clone(), rows[1].clone()));
        }
        Ok(out)
    }
}

/// Gemma 4: frequencies of the whole head, of which only the first are used; the other elements are not rotated.
fn proportional(r: &RopeReader, head_dim: usize, theta: f64) -> Result<Rope> {
    let partial = r.opt("partial_rotary_factor")?.unwrap_or(1.0);
    let factor = match r.map.get("factor") {
        Some(_) => r.positive("factor")?,
        None => 1.0,
    };
    if !(0.0..=1.0).contains(&partial) || !head_dim.is_multiple_of(2) {
        return Err(
            Error::format("`partial_rotary_factor` must be from 0 to 1, and the head size even")
                .at(r.place)
                .found(format!("{partial} and {head_dim}")),
        );
    }
    let rotated = (partial * head_dim as f64 / 2.0).floor() as usize;
    let frequency = |i: usize| {
        if i < rotated {
            1.0 / (theta as f32).powf((2 * i) as f32 / head_dim as f32) / factor as f32
        } else {
            0.0
        }
    };
    Ok(Rope::plain((0..head_dim / 2).map(frequency).collect()))
}

/// Llama 3.1: stretches long wavelengths by `factor`, keeps short ones, interpolates between both.
fn llama3(r: &RopeReader, inv: &[f32]) -> Result<Vec<f32>> {
    let factor = r.positive("factor")?;
    let (low, high) = (r.positive("low_freq_factor")?, r.positive("high_freq_factor")?);
    let old = r.positive("original_max_position_embeddings")?;
    Ok(inv
        .iter()
        .map(|&f| {
            let wavelength = std::f64::consts::TAU / f as f64;
            if wavelength < old / high {
                f
            } else if wavelength > old / low {
                (f as f64 / factor) as f32
            } else {
                let smooth = (old / wavelength - low) / (high - low);
                ((1.0 - smooth) * f as f64 / factor + smooth * f as f64) as f32
            }
        })
        .collect())
}

fn yarn(r: &RopeReader, inv: &[f32], dim: usize, theta: f64, max_positions: usize) -> Result<Rope> {
    let original = r
        .opt("original_max_position_embeddings")?
        .unwrap_or(max_positions as f64);
    let factor = r.opt("factor")?.unwrap_or(max_positions as f64 / original);
    if factor <= 0.0 || original <= 0.0 {
        return Err(Error::format("YaRN needs a positive factor").at(r.place).found(factor));
    }
    let get_mscale = |scale: f64, m: f64| if scale <= 1.0 { 1.0 } else { 0.1 * m * scale.ln() + 1.0 };
    let attention_factor = match (r.opt("attention_factor")?, r.opt("mscale")?, r.opt("mscale_all_dim")?) {
        (Some(a), _, _) => a,
        (None, Some(m), Some(all)) if m != 0.0 && all != 0.0 => get_mscale(factor, m) / get_mscale(factor, all),
        _ => get_mscale(factor, 1.0),
    };
    let or = |x: Option<f64>, default: f64| x.filter(|v| *v != 0.0).unwrap_or(default);
    let yarn = Yarn {
        factor,
        original,
        beta_fast: or(r.opt("beta_fast")?, 32.0),
        beta_slow: or(r.opt("beta_slow")?, 1.0),
        truncate: r.map.get("truncate").and_then(Value::as_bool).unwrap_or(true),
    };
    // The dimension whose wavelength makes `n` rotations over the original context.
    let dimension = |n: f64| dim as f64 * (original / (n * std::f64::consts::TAU)).ln() / (2.0 * theta.ln());
    let (mut low, mut high) = (dimension(yarn.beta_fast), dimension(yarn.beta_slow));
    if yarn.truncate {
        (low, high) = (low.floor(), high.ceil());
    }
    let (low, mut high) = (low.max(0.0), high.min(dim as f64 - 1.0));
    if low == high {
        high += 0.001;
    }
    let inv_freq = inv
        .iter()
        .enumerate()
        .map(|(i, &f)| {
            let ramp = ((i as f64 - low) / (high - low)).clamp(0.0, 1.0) as f32;
            f / factor as f32 * ramp + f * (1.0 - ramp)
        })
        .collect();
    Ok(Rope {
        attention_factor: attention_factor as f32,
        yarn: Some(yarn),
        ..Rope::plain(inv_freq)
    })
}

/// LongRoPE: each frequency is divided by a number from the config; documents beyond the context length of the
/// pretraining have other numbers.
fn longrope(r: &RopeReader, inv: &[f32], max_positions: usize) -> Result<Rope> {
    let original = r.positive("original_max_position_embeddings")?;
    let factor = r.opt("factor")?.unwrap_or(max_positions as f64 / original);
    let attention_factor = match r.opt("attention_factor")? {
        Some(factor) => factor,
        None if factor <= 1.0 => 1.0,
        None => (1.0 + factor.ln() / original.ln()).sqrt(),
    };
    let divided = |key: &str| -> Result<Vec<f32>> {
        let wrong = || {
            Error::format(format!("rope option `{key}` must be a list of positive numbers"))
                .at(r.place)
                .expected(format!("{} numbers", inv.len()))
        };
        let list = r.map.get(key).and_then(Value::as_array).ok_or_else(wrong)?;
        let numbers: Vec<f32> = list.iter().filter_map(Value::as_f64).map(|x| x as f32).collect();
        if numbers.len() != inv.len() || list.len() != inv.len() || !numbers.iter().all(|x| *x > 0.0 && x.is_finite()) {
            return Err(wrong().found(format!("{} entries", list.len())));
        }
        Ok(inv.iter().zip(numbers).map(|(f, by)| f / by).collect())
    };
    Ok(Rope {
        attention_factor: attention_factor as f32,
        long: Some(LongDocuments {
            beyond: original as usize,
            inv_freq: Some(divided("long_factor")?),
        }),
        ..Rope::plain(divided("short_factor")?)
    })
}
