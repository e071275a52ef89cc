//! Tables of the documents of a batch for the kernels of Gated DeltaNet, on the device. Every layer of a step, and every
//! step of a generation, uses the same few tables, so the last ones are cached.

use super::{Gpu, address, graph, narrow};
use candle_core::Tensor;
use candle_core::cuda::DeviceId;
use ft_base::{Error, Result};
use std::collections::VecDeque;
use std::sync::Mutex;

/// Tables that are kept.
const KEPT: usize = 8;

/// Which table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum TableKind {
    /// `[N]`: the index of each token in its document.
    Places,
    /// `[documents, 3]`: start and end of a document, and its first chunk of this many tokens.
    Spans(usize),
    /// `[chunks, 2]`: first token of a chunk of up to this many tokens, and its tokens.
    Chunks(usize),
}

impl TableKind {
    fn numbers(self, documents: &[usize]) -> Vec<usize> {
        let each = || documents.windows(2).map(|d| d[0]..d[1]);
        match self {
            Self::Places => each().flat_map(|d| 0..d.len()).collect(),
            Self::Spans(chunk) => {
                let mut first = 0;
                let span = |d: std::ops::Range<usize>| {
                    let before = first;
                    first += d.len().div_ceil(chunk);
                    [d.start, d.end, before]
                };
                each().flat_map(span).collect()
            }
            Self::Chunks(chunk) => each()
                .flat_map(|d| {
                    d.clone()
                        .step_by(chunk)
                        .flat_map(move |start| [start, chunk.min(d.end - start)])
                })
                .collect(),
        }
    }
}

/// A table on the device. It must live until the launch is queued; its memory is freed in stream order.
#[derive(Clone)]
pub(super) struct DocumentList {
    numbers: Tensor,
    pub len: usize,
}

impl DocumentList {
    pub(super) fn new(gpu: &Gpu, table: TableKind, documents: &[usize]) -> Result<Self> {
        type Key = (DeviceId, TableKind, Vec<usize>);
        static LISTS: Mutex<VecDeque<(Key, DocumentList)>> = Mutex::new(VecDeque::new());
        let device = gpu.device().id();
        let mut lists = LISTS
            .lock()
            .map_err(|_| Error::internal("another thread failed while it used the tables of documents"))?;
        let known = lists
            .iter()
            .find(|((on, of, offsets), _)| (*on, *of) == (device, table) && offsets == documents);
        if let Some((_, list)) = known {
            graph::keep(&list.numbers);
            return Ok(list.clone());
        }
        narrow(documents.last().copied().unwrap_or(0), "a batch of documents")?;
        let numbers: Vec<u32> = table.numbers(documents).into_iter().map(|n| n as u32).collect();
        let list = Self {
            len: numbers.len(),
            numbers: gpu.upload_u32(&numbers)?,
        };
        if lists.len() == KEPT {
            lists.pop_front();
        }
        lists.push_back(((device, table, documents.to_vec()), list.clone()));
        Ok(list)
    }

    pub(super) fn address(&self) -> Result<u64> {
        address(&self.numbers, "a table of documents")
    }
}

#[cfg(test)]
mod tests {
    use super::TableKind;

    #[test]
    fn tables_name_every_token_once() {
        let documents = [0, 2, 2, 7];
        assert_eq!(TableKind::Places.numbers(&documents), [0, 1, 0, 1, 2, 3, 4]);
        assert_eq!(TableKind::Spans(4).numbers(&documents), [0, 2, 0, 2, 2, 1, 2, 7, 1]);
        assert_eq!(TableKind::Chunks(4).numbers(&documents), [0, 2, 2, 4, 6, 1]);
    }
}
