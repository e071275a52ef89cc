//! The tables of a step on a KV cache, and new keys and values. The tables of a CUDA graph stay: those of the next step are
//! written over them, and as long as they fit, no address and no grid changes.

use super::memory::write;
use super::{Arg, FloatType, Gpu, Grid, address, address_of};
use crate::attention_schedule::AttentionTile;
use crate::cached_schedule::{CachedDocument, TileSizes, schedule};
use crate::kv_block::{KvBlock, KvDocument, rounded};
use crate::paged::{KvDtype, PageForm};
use candle_core::{DType, Device, Tensor};
use ft_base::sync::lock;
use ft_base::{Error, Result};
use std::collections::HashMap;
use std::sync::{Arc, Mutex};

const NAME: &str = "a block of the KV cache";

/// The stored type in kernel names, in the cache of a model of type `kind`: an f16 model keeps numbers of 16 bits as f16.
pub(super) fn stored_name(stored: KvDtype, kind: FloatType) -> &'static str {
    match stored {
        KvDtype::F32 => FloatType::F32.name(),
        KvDtype::Bf16 if kind == FloatType::F16 => kind.name(),
        KvDtype::Bf16 => FloatType::Bf16.name(),
        KvDtype::Int8 => "int8",
    }
}

/// Tiles on the device, as `CachedTiles`.
pub(super) struct DeviceTiles {
    pub tiles: u64,
    pub joins: u64,
    pub starts: u64,
    pub count: usize,
    pub slots: usize,
    /// Holds all three.
    lists: Tensor,
}

type WorkLists = HashMap<(Option<usize>, TileSizes), Arc<DeviceTiles>>;

/// Where the tokens of a step are stored, on the device.
pub(crate) struct Tables {
    pub(super) gpu: Gpu,
    /// True if the tables are written again: sizes are rounded up, so that they rarely change.
    stay: bool,
    /// `KvBlock[layers][blocks]`, then `KvPlace[N]`, as in `cuda/kv.cuh`.
    table: Tensor,
    /// The form of the pages of each layer; `None` without a block.
    forms: Vec<Option<PageForm>>,
    blocks: usize,
    /// N
    pub(super) tokens: usize,
    documents: Vec<CachedDocument>,
    work: Mutex<WorkLists>,
    /// The memory of all blocks.
    memory: Vec<Tensor>,
}

/// The bytes in the memory of `old`, if they fit exactly; else in new memory.
fn upload(gpu: &Gpu, old: Option<&Tensor>, bytes: &[u8]) -> Result<Tensor> {
    match old.filter(|old| old.elem_count() == bytes.len()) {
        Some(old) => {
            write(old, "a table of the KV cache", DType::U8, bytes)?;
            Ok(old.clone())
        }
        None => gpu.upload_bytes(bytes),
    }
}

/// Addresses as `KvBlock` of `cuda/kv.cuh` has them.
fn addresses(block: &KvBlock) -> Result<[u64; 4]> {
    let scales = match &block.scales {
        Some((keys, values)) => [address(keys, NAME)?, address(values, NAME)?],
        None => [0; 2],
    };
    Ok([
        address(&block.keys, NAME)?,
        address(&block.values, NAME)?,
        scales[0],
        scales[1],
    ])
}

impl Tables {
    /// The caller checked that the queries are consecutive and that the tokens lie in the blocks. `stay`: for `renew`.
    pub(crate) fn new(documents: &[KvDocument], device: &Device, stay: bool) -> Result<Self> {
        Self::after(None, Gpu::on(device)?, documents, stay)
    }

    /// The tables of another step. True if no address and no grid has changed, as far as they were used.
    pub(crate) fn renew(&mut self, documents: &[KvDocument]) -> Result<bool> {
        let new = Self::after(Some(self), self.gpu.clone(), documents, self.stay)?;
        let at = |t: &Tensor| address(t, "a table of the KV cache");
        let mut same = at(&new.table)? == at(&self.table)?
            && (new.tokens, new.blocks) == (self.tokens, self.blocks)
            && new.forms == self.forms;
        let known = std::mem::take(&mut *lock(&self.work));
        for ((window, sizes), old) in known {
            let work = new.prepare(window, sizes, Some(&old))?;
            same &= (work.tiles, work.joins, work.starts, work.count, work.slots)
                == (old.tiles, old.joins, old.starts, old.count, old.slots);
            let mut lists = lock(&new.work);
            lists.insert((window, sizes), Arc::new(work));
        }
        *self = new;
        Ok(same)
    }

    /// Frees the references to the blocks. No kernel may use them until `renew`.
    pub(crate) fn release_blocks(&mut self) {
        self.memory.clear();
    }

    fn after(old: Option<&Self>, gpu: Gpu, documents: &[KvDocument], stay: bool) -> Result<Self> {
        const BYTES: usize = size_of::<[u64; 4]>();
        let mut numbers: HashMap<u64, usize> = HashMap::new();
        let (mut parts, mut own) = (Vec::new(), Vec::new());
        for d in documents {
            let mut blocks = Vec::new();
            for part in &d.parts {
                let Some(first) = part.layers.iter().flatten().next() else {
                    continue;
                };
                let number = *numbers.entry(address(&first.keys, NAME)?).or_insert(parts.len());
                if number == parts.len() {
                    parts.push(part);
                }
                blocks.push((number, part.tokens));
            }
            own.push(CachedDocument {
                queries: d.queries.clone(),
                blocks,
            });
        }
        let layers = parts.iter().map(|part| part.layers.len()).max().unwrap_or(0);
        let blocks = if stay { rounded(parts.len()) } else { parts.len() };
        let mut bytes = vec![0; layers * blocks * BYTES];
        let (mut forms, mut memory) = (vec![None; layers], Vec::new());
        for (number, part) in parts.iter().enumerate() {
            for (layer, block) in part.layers.iter().enumerate() {
                let Some(block) = block else { continue };
                let entry = addresses(block)?.map(u64::to_ne_bytes).concat();
                bytes[(layer * blocks + number) * BYTES..][..BYTES].copy_from_slice(&entry);
                if forms[layer].replace(block.form).is_some_and(|form| form != block.form) {
                    return Err(Error::internal("the blocks of a layer differ in their form"));
                }
                memory.extend([block.keys.clone(), block.values.clone()]);
                memory.extend(block.scales.iter().flat_map(|(k, v)| [k.clone(), v.clone()]));
            }
        }
        for d in &own {
            // The new tokens are the last ones.
            let mut skipped = d.blocks.iter().map(|b| b.1).sum::<usize>() - d.queries.len();
            for &(block, tokens) in &d.blocks {
                for token in skipped.min(tokens)..tokens {
                    bytes.extend([block as i32, token as i32].map(i32::to_ne_bytes).concat());
                }
                skipped = skipped.saturating_sub(tokens);
            }
        }
        Ok(Self {
            table: upload(&gpu, old.map(|old| &old.table), &bytes)?,
            gpu,
            stay,
            forms,
            blocks,
            tokens: own.last().map_or(0, |d| d.queries.end),
            documents: own,
            work: Mutex::default(),
            memory,
        })
    }

    /// The form of a layer and its table of blocks.
    pub(super) fn layer(&self, layer: usize) -> Result<(PageForm, Arg)> {
        let form = self.forms.get(layer).copied().flatten();
        let form = form.ok_or_else(|| Error::shape("the KV cache does not have this layer").found(layer))?;
        let at = address(&self.table, NAME)? + (layer * self.blocks * size_of::<[u64; 4]>()) as u64;
        Ok((form, Arg::Address(at)))
    }

    /// The work of the layers with this window, uploaded once.
    pub(super) fn work(&self, window: Option<usize>, sizes: TileSizes) -> Result<Arc<DeviceTiles>> {
        let mut known = lock(&self.work);
        if let Some(work) = known.get(&(window, sizes)) {
            return Ok(work.clone());
        }
        let work = Arc::new(self.prepare(window, sizes, None)?);
        known.insert((window, sizes), work.clone());
        Ok(work)
    }

    /// The lists, in the memory of `old` if they fit. If the tables stay, tiles without rows follow, which do nothing.
    fn prepare(&self, window: Option<usize>, sizes: TileSizes, old: Option<&DeviceTiles>) -> Result<DeviceTiles> {
        let list = schedule(&self.documents, window, sizes);
        let size = |n: usize| if self.stay { rounded(n) } else { n };
        let (count, slots) = (
            size(list.tiles.len()),
            size(list.slots.div_ceil(sizes.pack)) * sizes.pack,
        );
        let (tiles, joins) = (count * size_of::<[i32; 8]>() / 4, list.joins.len() * 2);
        let mut numbers: Vec<i32> = list.tiles.iter().flat_map(AttentionTile::numbers).collect();
        numbers.resize(tiles, 0);
        numbers.extend(list.joins.iter().flatten());
        numbers.extend(&list.starts);
        numbers.resize(tiles + joins + size(list.starts.len()), 0);
        let bytes: Vec<u8> = numbers.into_iter().flat_map(i32::to_ne_bytes).collect();
        let lists = upload(&self.gpu, old.map(|old| &old.lists), &bytes)?;
        let at = address(&lists, "a list of tiles")?;
        Ok(DeviceTiles {
            tiles: at,
            joins: at + (4 * tiles) as u64,
            starts: at + (4 * (tiles + joins)) as u64,
            count,
            slots,
            lists,
        })
    }

    pub(crate) fn put(&self, layer: usize, k: &Tensor, v: &Tensor) -> Result<()> {
        const THREADS: usize = 256;
        let (form, blocks) = self.layer(layer)?;
        let kind = FloatType::of(k, "the keys")?;
        let want = [self.tokens, form.kv_heads * form.head_dim];
        if k.dims() != want || v.dims() != want || form.stored == KvDtype::F32 && kind.is_short() {
            return Err(Error::shape("keys and values do not match the KV cache")
                .found(format!("{:?} and {:?}", k.dims(), v.dims()))
                .expected(format!("{want:?}")));
        }
        let places = (self.forms.len() * self.blocks * size_of::<[u64; 4]>()) as u64;
        let rows = self.tokens * form.kv_heads;
        let args = [
            Arg::Address(address(k, "the keys")?),
            Arg::Address(address_of(v, "the values", k.dtype())?),
            blocks,
            Arg::Address(address(&self.table, NAME)? + places),
            Arg::size(rows),
            Arg::small(form.kv_heads, "the number of heads")?,
            Arg::small(form.head_dim, "a head")?,
        ];
        let grid = Grid::line((2 * rows).div_ceil(THREADS / 32), THREADS as u32);
        let name = ["kv_put_", kind.name(), "_", stored_name(form.stored, kind)];
        // SAFETY: the table has a place in a block for every token.
        unsafe { self.gpu.launch("kv_block", name, grid, &args) }
    }
}
