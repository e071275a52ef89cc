//! Work lists for attention on a KV cache on a GPU: which queries a block of threads attends to which tokens of which block
//! of the cache, and where the partial results of a query stand.

use crate::attention_schedule::AttentionTile;
use crate::kv_block::SPLIT;
use std::collections::HashMap;
use std::ops::Range;

/// Number of blocks of threads that fill a large GPU.
const ENOUGH_BLOCKS: usize = 256;

/// The tokens of a document: its queries are the last ones.
pub(crate) struct CachedDocument {
    pub queries: Range<usize>,
    /// Numbers of its blocks in the table of the step, with the tokens that are used.
    pub blocks: Vec<(usize, usize)>,
}

/// Sizes of a tile.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct TileSizes {
    pub rows: usize,
    /// Query heads of a key head that share a tile, and groups of them.
    pub pack: usize,
    pub groups: usize,
}

/// Tiles whose `other` is the number of a block, and whose places count from its first token.
pub(crate) struct CachedTiles {
    /// The heaviest first.
    pub tiles: Vec<AttentionTile>,
    /// As `attention::Join` in `cuda/attention.cuh`, for each query: its range of `starts`.
    pub joins: Vec<[i32; 2]>,
    /// First rows in the partial results.
    pub starts: Vec<i32>,
    /// Rows of partial results.
    pub slots: usize,
}

/// Queries, and the tokens of a block that they attend to.
struct QuerySpan {
    queries: Range<usize>,
    block: usize,
    /// Position of the first query, from the first token of the block.
    place: usize,
    keys: Range<usize>,
}

/// Spans of whole tiles of `step` queries, or of all queries that see a whole block.
fn spans(documents: &[CachedDocument], window: Option<usize>, step: usize) -> Vec<QuerySpan> {
    let mut spans: Vec<QuerySpan> = Vec::new();
    // Blocks that all queries of the last documents see.
    let mut whole: HashMap<(usize, usize), usize> = HashMap::new();
    for d in documents {
        let (all, n) = (d.blocks.iter().map(|b| b.1).sum::<usize>(), d.queries.len());
        let mut start = 0;
        for &(block, tokens) in d.blocks.iter().filter(|b| b.1 > 0 && n > 0) {
            // A tile counts its queries from the end of the block, so the window has to reach that far too.
            let visible = all - n >= start + tokens && window.is_none_or(|w| (all - start).max(tokens + step) <= w);
            let shared = whole.get(&(block, tokens)).copied().filter(|_| visible);
            if let Some(at) = shared.filter(|&at| spans[at].queries.end == d.queries.start) {
                spans[at].queries.end = d.queries.end;
            } else if visible {
                whole.insert((block, tokens), spans.len());
                spans.push(QuerySpan {
                    queries: d.queries.clone(),
                    block,
                    place: tokens,
                    keys: 0..tokens,
                });
            } else {
                let first = start.saturating_sub(all - n);
                for first in (first..n).step_by(step) {
                    let (end, place) = (n.min(first + step), all - n + first - start);
                    let low = window.map_or(0, |w| (place + 1).saturating_sub(w));
                    let high = tokens.min(place + end - first);
                    if low < high {
                        spans.push(QuerySpan {
                            queries: d.queries.start + first..d.queries.start + end,
                            block,
                            place,
                            keys: low..high,
                        });
                    }
                }
            }
            start += tokens;
        }
    }
    spans
}

/// The work of a step on the blocks of its documents.
pub(crate) fn schedule(documents: &[CachedDocument], window: Option<usize>, sizes: TileSizes) -> CachedTiles {
    let TileSizes { rows, pack, groups } = sizes;
    let step = (rows / pack).max(1);
    let spans = spans(documents, window, step);
    let visited: usize = spans
        .iter()
        .map(|s| s.queries.len().div_ceil(step) * s.keys.len())
        .sum();
    let longest = (visited * groups)
        .div_ceil(ENOUGH_BLOCKS)
        .max(SPLIT)
        .next_multiple_of(64);
    let queries = documents.last().map_or(0, |d| d.queries.end);
    let (mut tiles, mut slots, mut parts) = (Vec::new(), 0, vec![Vec::new(); queries]);
    for span in &spans {
        for token in span.queries.clone().step_by(step) {
            let tokens = step.min(span.queries.end - token);
            for low in span.keys.clone().step_by(longest) {
                tiles.push(AttentionTile {
                    token,
                    rows: tokens * pack,
                    place: span.place,
                    other: span.block,
                    low,
                    high: span.keys.end.min(low + longest),
                    slot: slots,
                });
                for i in 0..tokens {
                    parts[token + i].push((slots + i * pack) as i32);
                }
                slots += tokens * pack;
            }
        }
    }
    tiles.sort_by_key(|t| std::cmp::Reverse(t.high - t.low));
    let (mut joins, mut starts) = (Vec::new(), Vec::new());
    for own in parts {
        joins.push([starts.len() as i32, own.len() as i32]);
        starts.extend(own);
    }
    CachedTiles {
        tiles,
        joins,
        starts,
        slots,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A block of `shared` tokens for all documents, then two blocks of each document's own, of at most `room` tokens.
    fn documents(lengths: &[(usize, usize)], shared: usize, room: usize) -> Vec<CachedDocument> {
        let mut at = 0;
        let own = lengths.iter().enumerate().map(|(d, &(queries, all))| {
            let first = room.min(all - shared);
            at += queries;
            CachedDocument {
                queries: at - queries..at,
                blocks: vec![(0, shared), (2 * d + 1, first), (2 * d + 2, all - shared - first)],
            }
        });
        own.collect()
    }

    /// Every visible pair is in exactly one tile, and other pairs only where the kernel masks them.
    fn check(documents: &[CachedDocument], window: Option<usize>, rows: usize, pack: usize) -> CachedTiles {
        let sizes = TileSizes { rows, pack, groups: 2 };
        let work = schedule(documents, window, sizes);
        let mut used = vec![0; work.slots];
        for d in documents {
            let all: usize = d.blocks.iter().map(|b| b.1).sum();
            for token in d.queries.clone() {
                let position = all - d.queries.end + token;
                let mut seen = Vec::new();
                let mine = |t: &&AttentionTile| (t.token..t.token + t.rows / pack).contains(&token);
                for t in work.tiles.iter().filter(mine) {
                    let at = d.blocks.iter().position(|b| b.0 == t.other).unwrap();
                    let start: usize = d.blocks[..at].iter().map(|b| b.1).sum();
                    let place = t.place + token - t.token;
                    let masked = |key: &usize| *key > place || window.is_some_and(|w| place - key >= w);
                    seen.extend((t.low..t.high).filter(|key| !masked(key)).map(|key| start + key));
                    let [first, count] = work.joins[token].map(|n| n as usize);
                    let slot = (t.slot + (token - t.token) * pack) as i32;
                    assert!(work.starts[first..first + count].contains(&slot));
                    (slot as usize..slot as usize + pack).for_each(|s| used[s] += 1);
                }
                seen.sort();
                let low = window.map_or(0, |w| (position + 1).saturating_sub(w));
                assert_eq!(seen, (low..=position).collect::<Vec<_>>(), "query {token}");
            }
        }
        assert!(used.iter().all(|u| *u == 1));
        assert!(work.tiles.is_sorted_by_key(|t| std::cmp::Reverse(t.high - t.low)));
        assert!(work.tiles.iter().all(|t| t.rows <= rows.max(pack) && t.low < t.high));
        work
    }

    #[test]
    fn every_visible_key_is_visited_once() {
        let rows = [(1, 300), (1, 90), (70, 150), (0, 80), (3, 83), (20, 600)];
        for window in [None, Some(1), Some(20), Some(100), Some(1000)] {
            for (shared, room) in [(0, 64), (70, 33), (80, 500)] {
                for (tile, pack) in [(64, 4), (64, 1), (32, 7), (16, 16)] {
                    check(&documents(&rows, shared, room), window, tile, pack);
                }
            }
        }
    }

    #[test]
    fn a_common_prefix_is_read_once_for_the_queries_of_a_tile() {
        let rows = vec![(1, 1010); 16];
        let keys = |shared, pack, window| {
            let work = check(&documents(&rows, shared, 500), window, 64, pack);
            work.tiles.iter().map(|t| t.high - t.low).sum::<usize>()
        };
        assert_eq!(keys(0, 4, None), 16 * 1010);
        assert_eq!(keys(1000, 4, None), 1000 + 16 * 10);
        assert_eq!(keys(1000, 8, None), 2 * 1000 + 16 * 10);
        // A window that hides a part of the prefix: each query reads its own part.
        assert_eq!(keys(1000, 4, Some(500)), 16 * 500);
    }

    #[test]
    fn long_parts_are_split() {
        let rows = [(1, 40_000), (1, 300)];
        let work = check(&documents(&rows, 0, 40_000), None, 64, 4);
        assert_eq!(work.tiles.len(), 40_000usize.div_ceil(320) + 1);
        assert_eq!(work.joins, [[0, 125], [125, 1]]);
    }
}
