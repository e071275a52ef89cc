//! The per-layer inputs of Gemma 4, for all layers at once: a projection of the embedding x, and rows t of a table.
//!
//! ```text
//! i = (norm(projection(x) / sqrt(D)) + sqrt(P) · t) / sqrt(2)
//! ```
//!
//! Letters: L layers, P width of the input of a layer.

use super::contracts::{Context, GradSink};
use super::linear::{Dx, Linear};
use super::network::{Network, param};
use super::spec::{PER_LAYER_NORM, PER_LAYER_PROJECTION, PER_LAYER_TABLE, PerLayerSpec};
use crate::base::Result;
use crate::ops::{embedding, rms_norm, update};
use crate::source::Group;
use candle_core::{DType, Tensor};
use std::f32::consts::FRAC_1_SQRT_2;

impl Network {
    fn per_layer_projection(&self) -> Result<Linear> {
        self.linear_outside(PER_LAYER_PROJECTION.trim_end_matches(".weight"))
    }

    /// Ids of images and sounds beyond the table have the row of id 0.
    fn in_table(&self, ids: &[u32], vocab: usize) -> Vec<u32> {
        let beyond = |id: u32| id as usize >= vocab && self.spec.streams.is_some();
        ids.iter().map(|&id| if beyond(id) { 0 } else { id }).collect()
    }

    /// `[N]` ids and their embedding `[N, D]` to `[N, L·P]`, if the family has per-layer inputs.
    pub(super) fn per_layer_inputs(&self, ids: &[u32], x: &Tensor, ctx: &Context) -> Result<Option<Tensor>> {
        let Some(PerLayerSpec { vocab, width }) = self.spec.per_layer else {
            return Ok(None);
        };
        let z = self.per_layer_projection()?.forward(x, ctx)?;
        update::scale_assign(&z, (self.spec.hidden as f32).powf(-0.5))?;
        let norm = param(&*self.source.fetch(Group::Head)?, PER_LAYER_NORM)?;
        let sum = rms_norm::forward(&z, &norm.tensor, self.spec.norm_eps, self.spec.norm_plus_one)?;
        drop(z);
        let (table, ids) = self.source.rows(PER_LAYER_TABLE, &self.in_table(ids, vocab))?;
        let rows = embedding::gather(&table, &ids, (width as f32).sqrt())?;
        update::add_assign(&sum, &rows)?;
        update::scale_assign(&sum, FRAC_1_SQRT_2)?;
        Ok(Some(sum))
    }

    /// Backward of `per_layer_inputs`, if the gradient of its output was collected: adds the gradient of the embedding to
    /// `dx` `[N, D]`, and passes those of the table, the projection and the norm to the sink.
    ///
    /// # Errors
    /// The weights cannot be read; not enough memory on the device; those of the sink.
    pub fn per_layer_backward(&self, ids: &[u32], dx: &Tensor, ctx: &Context, sink: &mut dyn GradSink) -> Result<()> {
        let (Some(d), Some(PerLayerSpec { vocab, width })) = (ctx.shared.take_input_gradients(), self.spec.per_layer)
        else {
            return Ok(());
        };
        update::scale_assign(&d, FRAC_1_SQRT_2)?;
        if sink.wants(PER_LAYER_TABLE) {
            let table = param(&*self.source.fetch(Group::Table)?, PER_LAYER_TABLE)?;
            let dw = update::zeros(table.tensor.shape(), DType::F32, &self.device)?;
            self.add_lookups(&dw, &self.in_table(ids, vocab), &d, (width as f32).sqrt())?;
            sink.take(&table, dw)?;
        }
        let factor = (self.spec.hidden as f32).powf(-0.5);
        let x = self.embedded(ids, ctx)?;
        let projection = self.per_layer_projection()?;
        let z = projection.forward(&x, ctx)?;
        update::scale_assign(&z, factor)?;
        let norm = param(&*self.source.fetch(Group::Head)?, PER_LAYER_NORM)?;
        let need_dw = sink.wants(PER_LAYER_NORM);
        let (eps, plus_one) = (self.spec.norm_eps, self.spec.norm_plus_one);
        let (dz, dw) = rms_norm::backward(&z, &norm.tensor, &d, eps, plus_one, need_dw)?;
        drop((z, d));
        if let Some(dw) = dw {
            sink.take(&norm, dw)?;
        }
        update::scale_assign(&dz, factor)?;
        projection.backward(Some(&x), &dz, ctx, Dx::AddTo(dx), sink)?;
        Ok(())
    }
}
