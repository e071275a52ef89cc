//! Double buffer for data from the disk: the next item is prefetched while the current one is in use. The memory is
//! allocated once and reused.

use crate::base::{Error, Result};
use crate::ops::transfer::HostRead;
use crate::source::{GroupWeights, SLOTS, lock, tensor_bytes};
use candle_core::Tensor;
use std::collections::BTreeMap;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

/// Memory of a slot: tensors by their index in the item.
pub(super) type SlotBuffers = BTreeMap<usize, Tensor>;

/// Loads an item into the buffers of a slot.
pub(super) trait ItemLoader: Send + Sync + 'static {
    type Key: Copy + Eq + Send + 'static;

    /// Allocates missing buffers. The requesting thread calls it, so that one thread allocates all memory.
    fn prepare(&self, key: Self::Key, buffers: &mut SlotBuffers) -> Result<()>;

    /// Fills the buffers and returns them by name. Runs on the reader thread, or on the thread that needs the item.
    fn fill(&self, key: Self::Key, buffers: &SlotBuffers) -> Result<GroupWeights>;
}

/// A job for the reader thread.
pub(super) type ReaderJob = Box<dyn FnOnce() + Send>;

enum SlotState {
    Empty,
    Loading,
    Ready(Arc<GroupWeights>),
    Failed(Error),
}

struct Slot<K> {
    key: Option<K>,
    content: SlotState,
    buffers: SlotBuffers,
    /// Copies that may still read the buffers.
    reads: Vec<HostRead>,
    /// True if the slot was prefetched, and not fetched since.
    prefetched: bool,
    /// Time of the last request (a counter).
    last: u64,
}

impl<K> Slot<K> {
    /// True if the slot is not being read or filled.
    fn is_free(&self) -> bool {
        match &self.content {
            SlotState::Loading => false,
            SlotState::Ready(handle) => Arc::strong_count(handle) == 1,
            _ => true,
        }
    }

    /// Replaces the content; keeps the copies that may still read its memory.
    fn empty(&mut self, content: SlotState) {
        if let SlotState::Ready(handle) = std::mem::replace(&mut self.content, content) {
            self.reads.extend(handle.take_reads());
        }
    }
}

struct PoolState<L: ItemLoader> {
    loader: L,
    slots: Mutex<Vec<Slot<L::Key>>>,
    changed: Condvar,
}

pub(super) struct DoubleBuffer<L: ItemLoader>(Arc<PoolState<L>>);

impl<L: ItemLoader> DoubleBuffer<L> {
    pub(super) fn new(loader: L) -> Self {
        Self(Arc::new(PoolState {
            loader,
            slots: Mutex::new(Vec::new()),
            changed: Condvar::new(),
        }))
    }

    /// Returns the item `key`; waits if it is being loaded, loads it if it is not present.
    pub(super) fn get(&self, key: L::Key) -> Result<Arc<GroupWeights>> {
        let shared = &*self.0;
        let mut slots = shared.lock();
        while let Some(at) = slots.iter().position(|p| p.key == Some(key)) {
            let now = clock(&slots);
            let slot = &mut slots[at];
            match std::mem::replace(&mut slot.content, SlotState::Empty) {
                SlotState::Ready(handle) => {
                    slot.content = SlotState::Ready(handle.clone());
                    (slot.prefetched, slot.last) = (false, now);
                    return Ok(handle);
                }
                SlotState::Loading => {
                    slot.content = SlotState::Loading;
                    slots = shared.changed.wait(slots).unwrap_or_else(PoisonError::into_inner);
                }
                SlotState::Failed(e) => {
                    slot.key = None;
                    return Err(e);
                }
                SlotState::Empty => break,
            }
        }
        // If the caller still holds both slots, a third one is created; waiting would be a deadlock.
        let at = shared.choose(&mut slots, true).unwrap_or_else(|| {
            slots.push(Slot::new());
            slots.len() - 1
        });
        let (mut buffers, reads) = begin(&mut slots, at, key, false);
        drop(slots);
        let filled = shared
            .loader
            .prepare(key, &mut buffers)
            .and_then(|()| shared.fill(key, &buffers, &reads));
        let mut slots = shared.lock();
        let slot = &mut slots[at];
        slot.buffers = buffers;
        let result = match filled {
            Ok(weights) => {
                let handle = Arc::new(weights);
                slot.content = SlotState::Ready(handle.clone());
                Ok(handle)
            }
            Err(e) => {
                (slot.key, slot.content) = (None, SlotState::Empty);
                Err(e)
            }
        };
        drop(slots);
        shared.changed.notify_all();
        result
    }

    /// Prefetches `key` on the reader thread if a slot is free; `get` returns the error, if any.
    pub(super) fn prefetch(&self, key: L::Key, send: impl FnOnce(ReaderJob)) {
        let shared = &*self.0;
        let mut slots = shared.lock();
        let now = clock(&slots);
        if let Some(slot) = slots.iter_mut().find(|p| p.key == Some(key)) {
            (slot.prefetched, slot.last) = (true, now);
            return;
        }
        let Some(at) = shared.choose(&mut slots, false) else {
            return;
        };
        let (mut buffers, reads) = begin(&mut slots, at, key, true);
        drop(slots);
        let prepared = shared.loader.prepare(key, &mut buffers);
        let shared = self.0.clone();
        let job = move || {
            let filled = prepared.and_then(|()| shared.fill(key, &buffers, &reads));
            let mut slots = shared.lock();
            let slot = &mut slots[at];
            slot.buffers = buffers;
            slot.content = match filled {
                Ok(weights) => SlotState::Ready(Arc::new(weights)),
                Err(e) => SlotState::Failed(e),
            };
            drop(slots);
            shared.changed.notify_all();
        };
        send(Box::new(job));
    }

    /// Invalidates the loaded items (their weights have changed); the memory is kept.
    pub(super) fn forget(&self) {
        let shared = &*self.0;
        let mut slots = shared.settled();
        for slot in slots.iter_mut() {
            if !slot.is_free() {
                // The memory is still in use: the last reader frees it.
                slot.buffers.clear();
            }
            slot.empty(SlotState::Empty);
            (slot.key, slot.prefetched) = (None, false);
        }
    }

    /// Bytes of all slots; waits for running loads.
    pub(super) fn bytes(&self) -> u64 {
        let slots = self.0.settled();
        let tensors = slots.iter().flat_map(|p| p.buffers.values());
        tensors.map(tensor_bytes).sum()
    }
}

impl<K> Slot<K> {
    fn new() -> Self {
        Self {
            key: None,
            content: SlotState::Empty,
            buffers: SlotBuffers::new(),
            reads: Vec::new(),
            prefetched: false,
            last: 0,
        }
    }
}

impl<L: ItemLoader> PoolState<L> {
    fn lock(&self) -> MutexGuard<'_, Vec<Slot<L::Key>>> {
        lock(&self.slots)
    }

    /// Fills buffers that no copy reads any more.
    fn fill(&self, key: L::Key, buffers: &SlotBuffers, reads: &[HostRead]) -> Result<GroupWeights> {
        reads.iter().try_for_each(HostRead::wait)?;
        self.loader.fill(key, buffers)
    }

    /// Waits until no load is running.
    fn settled(&self) -> MutexGuard<'_, Vec<Slot<L::Key>>> {
        let mut slots = self.lock();
        while slots.iter().any(|p| matches!(p.content, SlotState::Loading)) {
            slots = self.changed.wait(slots).unwrap_or_else(PoisonError::into_inner);
        }
        slots
    }

    /// Returns the slot to load into: a new one, or the least recently used free one. A prefetched slot that was not
    /// fetched yet is reused only if `must` is true.
    fn choose(&self, slots: &mut Vec<Slot<L::Key>>, must: bool) -> Option<usize> {
        let free = |p: &Slot<L::Key>| p.is_free() && (must || !p.prefetched);
        let oldest = (0..slots.len())
            .filter(|&i| free(&slots[i]))
            .min_by_key(|&i| (slots[i].prefetched, slots[i].last));
        if oldest.is_some() && slots.len() >= SLOTS {
            return oldest;
        }
        if slots.len() < SLOTS {
            slots.push(Slot::new());
            return Some(slots.len() - 1);
        }
        None
    }
}

fn clock<K>(slots: &[Slot<K>]) -> u64 {
    slots.iter().map(|p| p.last).max().unwrap_or(0) + 1
}

/// Assigns the slot to `key` and marks it as loading; returns its memory for the loader, and what may still read it.
fn begin<K>(slots: &mut [Slot<K>], at: usize, key: K, prefetched: bool) -> (SlotBuffers, Vec<HostRead>) {
    let now = clock(slots);
    let slot = &mut slots[at];
    slot.empty(SlotState::Loading);
    slot.key = Some(key);
    (slot.prefetched, slot.last) = (prefetched, now);
    (std::mem::take(&mut slot.buffers), std::mem::take(&mut slot.reads))
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::Device;
    use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

    /// Loads the key itself as a number; key 13 fails.
    #[derive(Default)]
    struct NumberLoader {
        filled: AtomicUsize,
    }

    impl ItemLoader for Arc<NumberLoader> {
        type Key = u32;

        fn prepare(&self, _: u32, buffers: &mut SlotBuffers) -> Result<()> {
            if buffers.is_empty() {
                buffers.insert(0, Tensor::zeros(1, candle_core::DType::F32, &Device::Cpu)?);
            }
            Ok(())
        }

        fn fill(&self, key: u32, buffers: &SlotBuffers) -> Result<GroupWeights> {
            self.filled.fetch_add(1, Relaxed);
            if key == 13 {
                return Err(Error::new("unlucky"));
            }
            crate::ops::update::with_slice_mut(&buffers[&0], |x| x[0] = key as f32)?;
            let mut weights = GroupWeights::default();
            weights.insert("x".into(), buffers[&0].clone());
            Ok(weights)
        }
    }

    fn value(handle: &GroupWeights) -> f32 {
        handle.get("x").unwrap().1.to_vec1::<f32>().unwrap()[0]
    }

    /// A reader that runs each job at once, on another thread.
    fn now(job: ReaderJob) {
        std::thread::spawn(job).join().unwrap();
    }

    #[test]
    fn two_places_serve_a_walk_up_and_down_with_each_thing_loaded_once_a_direction() {
        let load = Arc::new(NumberLoader::default());
        let pool = DoubleBuffer::new(load.clone());
        let n = 6;
        for round in 1..=2 {
            for i in 0..n {
                if i + 1 < n {
                    pool.prefetch(i + 1, now);
                }
                assert_eq!(value(&pool.get(i).unwrap()), i as f32);
            }
            for i in (0..n).rev() {
                pool.prefetch(i.saturating_sub(1), now);
                assert_eq!(value(&pool.get(i).unwrap()), i as f32);
            }
            // The first and last item of a sweep are still in memory at the turn.
            let once = n as usize + (n as usize - 2) * (2 * round - 1);
            assert_eq!(load.filled.load(Relaxed), once);
        }
        assert_eq!(pool.bytes(), 8, "two places of one f32");
    }

    #[test]
    fn what_is_in_use_is_never_overwritten() {
        let pool = DoubleBuffer::new(Arc::new(NumberLoader::default()));
        let handles: Vec<_> = (0..4).map(|i| pool.get(i).unwrap()).collect();
        pool.prefetch(9, now);
        for (i, handle) in handles.iter().enumerate() {
            assert_eq!(value(handle), i as f32);
        }
        drop(handles);
        pool.prefetch(9, now);
        pool.prefetch(10, now);
        assert_eq!(value(&pool.get(10).unwrap()), 10.0);
        let held = pool.get(9).unwrap();
        pool.forget();
        assert_eq!(value(&pool.get(7).unwrap()), 7.0);
        assert_eq!(value(&pool.get(8).unwrap()), 8.0);
        assert_eq!(value(&held), 9.0);
    }

    #[test]
    fn a_failed_load_is_told_and_can_be_tried_again() {
        let load = Arc::new(NumberLoader::default());
        let pool = DoubleBuffer::new(load.clone());
        assert!(pool.get(13).is_err());
        pool.prefetch(13, now);
        assert!(pool.get(13).is_err());
        assert!(pool.get(13).is_err());
        assert_eq!(load.filled.load(Relaxed), 3);
        assert_eq!(value(&pool.get(1).unwrap()), 1.0);
    }

    #[test]
    fn it_waits_for_what_is_on_its_way() {
        let pool = DoubleBuffer::new(Arc::new(NumberLoader::default()));
        let mut waiting = None;
        pool.prefetch(3, |job| waiting = Some(job));
        let job = waiting.unwrap();
        let reader = std::thread::spawn(move || {
            std::thread::sleep(std::time::Duration::from_millis(30));
            job();
        });
        assert_eq!(value(&pool.get(3).unwrap()), 3.0);
        reader.join().unwrap();
    }
}
