//! Memory of the MLP half of a layer: each tensor that `mlp.rs` allocates and frees, in the same order.

use super::super::block::memory::LayerMemory;
use super::super::contracts::GradSinkMemory;
use super::super::pieces::{GradientSumsMemory, pieces};
use super::MlpNeeds;
use crate::base::ledger::MemoryKind::{Activations, LayerWork};
use crate::base::ledger::{Allocation, Ledger};

/// As the list of `SavedPiece`: gate and up, or up alone, then `SavedLow` of both, then that of down if no norm follows
/// it.
pub(in crate::model) type SavedPiecesMemory = Vec<Vec<Allocation>>;

impl LayerMemory<'_> {
    /// The number of MLP chunks, and the largest one.
    fn cut(&self) -> (usize, Self) {
        let all = pieces(self.settings.tokens, self.settings.mlp_tokens);
        let most = all.iter().map(|p| p.len()).max().unwrap_or(0);
        (all.len(), self.piece(most))
    }

    /// Bytes of a gate after its cut, if the layer has sparse activations.
    fn sparse(&self) -> u64 {
        match self.settings.spec.layers[self.index].sparsity {
            0.0 => 0,
            _ => self.ni,
        }
    }

    /// Widths of the results of the first projections: of gate and up, or of up alone.
    fn widths(&self) -> Vec<u64> {
        vec![self.ni; if self.settings.spec.plain_mlp.is_some() { 1 } else { 2 }]
    }

    /// From x1, which the caller holds, to the layer's output; also gate and up if they are saved.
    pub(in crate::model) fn mlp(&self, l: &mut Ledger, keep: bool) -> (Allocation, SavedPiecesMemory) {
        if let Some(sizes) = &self.settings.spec.layers[self.index].experts {
            let (y, saved) = self.experts(l, sizes, keep);
            return (y, vec![saved]);
        }
        let (count, piece) = self.cut();
        if count == 1 {
            let (y, parts) = self.mlp_piece(l, keep);
            return (y, parts.into_iter().collect());
        }
        let whole = l.alloc(LayerWork, self.nd);
        let mut kept = SavedPiecesMemory::new();
        for _ in 0..if keep { count } else { 1 } {
            let (y, parts) = piece.mlp_piece(l, keep);
            l.free(y);
            kept.extend(parts);
        }
        (whole, kept)
    }

    fn mlp_piece(&self, l: &mut Ledger, keep: bool) -> (Allocation, Option<Vec<Allocation>>) {
        let (linears, down) = self.linears(false);
        let names = self.settings.spec.norms;
        let h = names.before_mlp.map(|_| l.alloc(LayerWork, self.nd));
        let low = self.low(l, &linears);
        let mut parts = self.projections(l, &linears, &self.widths());
        parts.push(low);
        l.free_all(h);
        let m = l.alloc(LayerWork, self.ni);
        l.touch(LayerWork, self.sparse());
        if !keep {
            l.free_all(std::mem::take(&mut parts));
        }
        let low = self.low(l, &[down]);
        let mut y = self.linear(l, down);
        if names.after_mlp.is_some() {
            let normed = l.alloc(LayerWork, self.nd);
            l.free(std::mem::replace(&mut y, normed));
        } else {
            y = self.add_residual(l, y, down);
        }
        l.free(m);
        if keep && names.after_mlp.is_none() {
            parts.push(low);
        } else {
            l.free(low);
        }
        let parts = keep.then(|| parts.into_iter().map(|p| l.relabel(p, Activations)).collect());
        (y, parts)
    }

    /// The caller holds `dy`; the returned `∂x`, if there is one, is held.
    pub(in crate::model) fn mlp_backward(
        &self,
        l: &mut Ledger,
        mut parts: SavedPiecesMemory,
        need_dx: bool,
        sink: &mut dyn GradSinkMemory,
    ) -> Option<Allocation> {
        if let Some(sizes) = &self.settings.spec.layers[self.index].experts {
            let saved = parts.pop().unwrap_or_default();
            return self.experts_backward(l, sizes, saved, need_dx, sink);
        }
        let names = self.settings.spec.norms;
        let (linears, down) = self.linears(false);
        let post_wanted = names.after_mlp.is_some_and(|n| self.norm_wanted(sink, n));
        let dh = need_dx || names.before_mlp.is_some_and(|n| self.norm_wanted(sink, n));
        let needs = MlpNeeds {
            inputs: linears.iter().any(|&x| self.linear_wanted(sink, x)),
            down: self.linear_wanted(sink, down),
            dh,
        };
        if !needs.dm() && !needs.down && !post_wanted {
            l.free_all(parts.into_iter().flatten());
            return None;
        }
        let (count, piece) = self.cut();
        let dh = if count == 1 {
            self.mlp_piece_backward(l, parts.pop(), needs, sink)
        } else {
            let dh = needs.dh.then(|| l.alloc(LayerWork, self.nd));
            let mut sums = GradientSumsMemory::new(sink);
            // The second chunk adds to the sums of the first; later chunks are like the second, with fewer saved
            // tensors.
            let mut parts = parts.into_iter();
            for _ in 0..count.min(2) {
                let part = piece.mlp_piece_backward(l, parts.next(), needs, &mut sums);
                l.free_all(part);
            }
            l.free_all(parts.flatten());
            sums.finish(l);
            dh
        };
        let dx = dh.map(|dh| self.normed_backward(l, names.before_mlp, dh, sink));
        if need_dx {
            dx
        } else {
            l.free_all(dx);
            None
        }
    }

    fn mlp_piece_backward(
        &self,
        l: &mut Ledger,
        parts: Option<Vec<Allocation>>,
        needs: MlpNeeds,
        sink: &mut dyn GradSinkMemory,
    ) -> Option<Allocation> {
        let names = self.settings.spec.norms;
        let (linears, down) = self.linears(false);
        let has_h = names.before_mlp.is_some() && (needs.inputs || parts.is_none());
        let mut h = has_h.then(|| l.alloc(LayerWork, self.nd));
        let mut parts = parts.unwrap_or_else(|| {
            let low = self.low(l, &linears);
            let mut parts = self.projections(l, &linears, &self.widths());
            parts.push(low);
            parts
        });
        let mut low = parts.split_off(self.widths().len());
        if !needs.inputs {
            l.free_all(h.take());
        }
        let m = (needs.down || names.after_mlp.is_some()).then(|| l.alloc(LayerWork, self.ni));
        if m.is_some() {
            l.touch(LayerWork, self.sparse());
        }
        let mut low_out = (low.len() > 1).then(|| low.remove(1));
        let d_down = match names.after_mlp {
            Some(norm) => {
                low_out = Some(self.low(l, &[down]));
                let y = self.linear(l, down);
                let d = self.norm_backward(l, norm, self.nd, sink);
                l.free(y);
                Some(d)
            }
            None => self.scaled_gradient(l),
        };
        // The output that was not saved is computed again for the gradients of DoRA.
        if low_out.is_none() && needs.down && self.output_in_low(down) {
            low_out = Some(self.low(l, &[down]));
            let y = self.linear(l, down);
            l.free(y);
        }
        let dm = self.linear_backward(l, down, needs.dm(), sink);
        l.free_all(low_out);
        l.free_all(m);
        l.free_all(d_down);
        let Some(dm) = dm else {
            l.free_all(parts);
            l.free_all(low);
            l.free_all(h);
            return None;
        };
        // The gate before its cut is freed after the gradient of the gate exists.
        l.touch(LayerWork, self.sparse());
        // On the CPU the gradients overwrite gate and up.
        let dys = if !self.settings.on_gpu {
            parts
        } else {
            let dys = self.widths().iter().map(|&bytes| l.alloc(LayerWork, bytes)).collect();
            l.free_all(parts);
            dys
        };
        l.free(dm);
        let dh = self.projections_backward(l, &linears, dys, needs.dh, sink);
        l.free_all(low);
        l.free_all(h);
        dh
    }
}
