//! A double buffer: the current item and the next one.

use super::SLOTS;

/// The items of a double buffer, the oldest first.
#[derive(Debug)]
pub(super) struct Slots<K, T>(Vec<Slot<K, T>>);

#[derive(Debug)]
struct Slot<K, T> {
    key: K,
    content: T,
    /// True if the slot was prefetched, and not fetched since.
    prefetched: bool,
}

impl<K, T> Default for Slots<K, T> {
    fn default() -> Self {
        Self(Vec::new())
    }
}

impl<K: PartialEq, T> Slots<K, T> {
    /// Takes the content of `key`; if there is none, frees the oldest slot that is not prefetched.
    pub(super) fn take(&mut self, key: K) -> Option<T> {
        if let Some(at) = self.0.iter().position(|slot| slot.key == key) {
            return Some(self.0.remove(at).content);
        }
        while self.0.len() >= SLOTS {
            let oldest = self.0.iter().position(|slot| !slot.prefetched).unwrap_or(0);
            self.0.remove(oldest);
        }
        None
    }

    pub(super) fn put(&mut self, key: K, content: T, prefetched: bool) {
        self.0.push(Slot {
            key,
            content,
            prefetched,
        });
    }

    /// Drops the content of the keys that `keep` rejects.
    pub(super) fn retain(&mut self, keep: impl Fn(&K) -> bool) {
        self.0.retain(|slot| keep(&slot.key));
    }

    pub(super) fn clear(&mut self) {
        self.0.clear();
    }

    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.0.len()
    }

    #[cfg(test)]
    pub(super) fn has(&self, key: K) -> bool {
        self.0.iter().any(|slot| slot.key == key)
    }
}
