//! Sends what each rank has of some parameters to all other ranks, in buckets.

use super::reduce::{BUCKET, GradientPiece, IN_FLIGHT, key, pack, unpack, words};
use crate::base::Result;
use crate::comm::{Collective, PendingNumbers};
use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;

/// Gives and takes numbers of a list of parameters.
pub(super) trait Publish {
    /// Elements `range` of number `item`, which are in the part of this rank. Called for each parameter, in order.
    fn own(&mut self, item: usize, range: Range<usize>) -> Result<Vec<f32>>;

    /// Elements `range` of number `item` from the rank that has them.
    fn put(&mut self, item: usize, range: Range<usize>, values: &[f32]) -> Result<()>;

    /// True if all numbers of this item are bf16 numbers, which travel in half the bytes.
    fn is_bf16(&self, _item: usize) -> bool {
        false
    }
}

/// Gives every rank all parts. `items`: names and elements, the same on all ranks.
pub(super) fn publish(comm: &dyn Collective, items: &[(Arc<str>, usize)], numbers: &mut dyn Publish) -> Result<()> {
    let size = comm.world().size;
    let mut coming: VecDeque<(Vec<(usize, GradientPiece)>, PendingNumbers)> = VecDeque::new();
    let (mut some, mut elements) = (Vec::new(), 0);
    for (item, (name, n)) in items.iter().enumerate() {
        for piece in GradientPiece::all(name, *n, size) {
            elements += piece.elements(size);
            some.push((item, piece));
            if elements >= BUCKET {
                let bucket = std::mem::take(&mut some);
                elements = 0;
                coming.push_back(send(comm, bucket, numbers)?);
                if coming.len() > IN_FLIGHT {
                    receive(comm, coming.pop_front(), numbers)?;
                }
            }
        }
    }
    if !some.is_empty() {
        coming.push_back(send(comm, some, numbers)?);
    }
    while !coming.is_empty() {
        receive(comm, coming.pop_front(), numbers)?;
    }
    Ok(())
}

type SentPieces = (Vec<(usize, GradientPiece)>, PendingNumbers);

fn send(comm: &dyn Collective, some: Vec<(usize, GradientPiece)>, numbers: &mut dyn Publish) -> Result<SentPieces> {
    let (rank, size) = (comm.world().rank, comm.world().size);
    let mut own = Vec::new();
    for (item, piece) in &some {
        let values = numbers.own(*item, piece.range(rank, size))?;
        if numbers.is_bf16(*item) {
            pack(&values, &mut own);
        } else {
            own.extend(values);
        }
    }
    let pieces: Vec<GradientPiece> = some.iter().map(|(_, piece)| piece.clone()).collect();
    let words =
        |(item, piece): &(usize, GradientPiece), rank| words(piece.range(rank, size).len(), numbers.is_bf16(*item));
    let length = |rank| some.iter().map(|one| words(one, rank)).sum();
    let pending = comm.all_gather(key(&pieces, size), own, (0..size).map(length).collect());
    Ok((some, pending))
}

fn receive(comm: &dyn Collective, sent: Option<SentPieces>, numbers: &mut dyn Publish) -> Result<()> {
    let Some((some, pending)) = sent else {
        return Ok(());
    };
    let (own, size) = (comm.world().rank, comm.world().size);
    for (rank, list) in pending.wait()?.iter().enumerate() {
        if rank == own {
            continue;
        }
        let mut rest = &list[..];
        for (item, piece) in &some {
            let range = piece.range(rank, size);
            let bf16 = numbers.is_bf16(*item);
            let (values, after) = rest.split_at(words(range.len(), bf16));
            rest = after;
            if range.is_empty() {
                continue;
            }
            if bf16 {
                let values = unpack(values, range.len());
                numbers.put(*item, range, &values)?;
            } else {
                numbers.put(*item, range, values)?;
            }
        }
    }
    Ok(())
}
