//! The gated delta rule on slices, backward. A task computes the states before the chunks of its document again, then
//! goes back through the chunks with the gradient of the state. Names as in `delta_rule`.

use super::attention::Cutter;
use super::delta_rule::{
    CHUNK, ChunkKeys, ChunkScratch, Decays, DeltaSlices, HeadChunk, HeadTask, Products, TokenChunk, chunks, decayed,
    gates, packed_lens, solve_transposed, tasks,
};
use super::math::{add_scaled, add_slice, dot, scale_slice, vectorized};
use super::product::task_gemm::TaskGemm;
use super::product::{CpuBackend, Matrix, Rounding};
use super::{LINE, SharedSlice, with_scratch};
use crate::delta_rule::DeltaHeads;
use rayon::prelude::*;

vectorized!(fn dot_product(a: &[f32], b: &[f32]) -> f32 = dot);

fn product_of(a: &[f32], b: &[f32]) -> f64 {
    f64::from(dot_product(a, b))
}

/// Memory of the gradients of a chunk.
struct ChunkGradients<'a> {
    /// Of q and k, `[c, P]`, summed over the value heads.
    q: &'a mut [f32],
    k: &'a mut [f32],
    /// `[c, P]`
    spare: &'a mut [f32],
    /// Of D, then of R, then of K S, `[c, Q]`.
    delta: &'a mut [f32],
    /// P, and two more `[c, c]`.
    probabilities: &'a mut [f32],
    square: &'a mut [f32],
    decayed: &'a mut [f32],
}

impl ChunkGradients<'_> {
    fn lens(p: usize, q: usize) -> [usize; 7] {
        let square = CHUNK * CHUNK;
        [CHUNK * p, CHUNK * p, CHUNK * p, CHUNK * q, square, square, square]
    }
}

fn lens(gemm: TaskGemm, heads: &DeltaHeads, chunks: usize) -> ([usize; 2], [usize; 2]) {
    let (p, q) = (heads.key_dim, heads.value_dim);
    let states = heads.value_heads / heads.key_heads * p * q;
    (packed_lens(gemm, CHUNK.max(p).max(q)), [(chunks + 1) * states, states])
}

fn total(gemm: TaskGemm, heads: &DeltaHeads, chunks: usize) -> usize {
    let (packed, states) = lens(gemm, heads, chunks);
    let (p, q) = (heads.key_dim, heads.value_dim);
    let (keys, work, gradients) = (ChunkKeys::lens(p), ChunkScratch::lens(q), ChunkGradients::lens(p, q));
    let all = packed.iter().chain(&states).chain(&keys).chain(&work).chain(&gradients);
    all.map(|len| len.next_multiple_of(LINE)).sum()
}

/// Elements of scratch memory of a task.
pub(crate) fn scratch(gemm: TaskGemm, heads: &DeltaHeads, longest: usize) -> usize {
    total(gemm, heads, longest.div_ceil(CHUNK))
}

/// Gradients of a chunk for one value head, with respect to the sums of g and to β. Most of their terms cancel.
struct Gates {
    sums: [f64; CHUNK],
    beta: [f64; CHUNK],
}

/// A value head in a chunk, as its forward pass left it.
#[derive(Clone, Copy)]
struct ForwardChunk<'a> {
    of: HeadChunk<'a>,
    keys: &'a ChunkKeys<'a>,
    work: &'a ChunkScratch<'a>,
    /// Before the chunk, `[P, Q]`.
    state: &'a [f32],
}

/// Writes the gradients of qkv, a and b; returns those of A_log and dt_bias.
pub(crate) fn backward(
    backend: CpuBackend,
    x: &DeltaSlices,
    heads: &DeltaHeads,
    documents: &[usize],
    d_o: &[f32],
    gradients: [&mut [f32]; 3],
) -> (Vec<f32>, Vec<f32>) {
    let [qkv, a, b] = gradients;
    let to = [SharedSlice::new(qkv), SharedSlice::new(a), SharedSlice::new(b)];
    tasks(heads, documents)
        .into_par_iter()
        .with_max_len(1)
        .for_each(|task| run(backend, x, heads, task, d_o, to));
    // `a` holds the gradients of g.
    let v = heads.value_heads;
    let (mut a_log, mut dt_bias) = (vec![0f64; v], vec![0f64; v]);
    for (token, row) in a.chunks_exact_mut(v).enumerate() {
        for (head, da) in row.iter_mut().enumerate() {
            let (g, _) = gates(x, token, heads, head);
            a_log[head] += f64::from(*da * g);
            let slope = 1.0 / (1.0 + (-(x.a[token * v + head] + x.dt_bias[head])).exp());
            *da *= -x.a_log[head].exp() * slope;
            dt_bias[head] += f64::from(*da);
        }
    }
    let narrow = |sums: Vec<f64>| sums.into_iter().map(|x| x as f32).collect();
    (narrow(a_log), narrow(dt_bias))
}

fn run(backend: CpuBackend, x: &DeltaSlices, heads: &DeltaHeads, task: HeadTask, d_o: &[f32], to: [SharedSlice; 3]) {
    let HeadTask {
        start, end, key_head, ..
    } = task;
    let gemm = TaskGemm::new(backend, Rounding::Exact);
    let (p, q, group) = (heads.key_dim, heads.value_dim, heads.value_heads / heads.key_heads);
    let (per_chunk, count) = (group * p * q, chunks(start, end).len());
    let (packed, states) = lens(gemm, heads, count);
    with_scratch(total(gemm, heads, count), |scratch| {
        let mut cut = Cutter(scratch);
        let [a, b] = packed.map(|len| cut.take(len));
        let mut products = Products { gemm, a, b };
        let [states, d_state] = states.map(|len| cut.take(len));
        let [q_rows, k, inverse_q, inverse_k, kk, qk] = ChunkKeys::lens(p).map(|len| cut.take(len));
        let mut keys = ChunkKeys {
            q: q_rows,
            k,
            inverse_q,
            inverse_k,
            kk,
            qk,
        };
        let [triangle, read, delta, spare] = ChunkScratch::lens(q).map(|len| cut.take(len));
        let mut work = ChunkScratch {
            triangle,
            read,
            delta,
            spare,
        };
        let [dq, dk, spare, delta, probabilities, square, decayed] =
            ChunkGradients::lens(p, q).map(|len| cut.take(len));
        let mut g = ChunkGradients {
            q: dq,
            k: dk,
            spare,
            delta,
            probabilities,
            square,
            decayed,
        };
        states[..per_chunk].fill(0.0);
        for (i, c) in chunks(start, end).enumerate().take(count - 1) {
            keys.fill(x, heads, key_head, c, &mut products);
            let (before, after) = states[i * per_chunk..][..2 * per_chunk].split_at_mut(per_chunk);
            after.copy_from_slice(before);
            for (j, state) in after.chunks_exact_mut(p * q).enumerate() {
                let head = key_head * group + j;
                let d = Decays::new(x, heads, head, c);
                let d = &d;
                let of = HeadChunk { x, heads, head, c, d };
                work.deltas(&of, keys.k, keys.kk, state, &mut products);
                work.update(&of, keys.k, state, &mut products);
            }
        }
        d_state[..per_chunk].fill(0.0);
        for (i, c) in chunks(start, end).enumerate().rev() {
            keys.fill(x, heads, key_head, c, &mut products);
            g.q.fill(0.0);
            g.k.fill(0.0);
            let own = states[i * per_chunk..][..per_chunk].chunks_exact(p * q);
            for (j, (state, d_state)) in own.zip(d_state.chunks_exact_mut(p * q)).enumerate() {
                let head = key_head * group + j;
                let d = Decays::new(x, heads, head, c);
                let d = &d;
                let of = HeadChunk { x, heads, head, c, d };
                work.deltas(&of, keys.k, keys.kk, state, &mut products);
                let d_rows = GradientRows {
                    values: &d_o[(c.first * heads.value_heads + head) * q..],
                    stride: heads.value_heads * q,
                };
                let forward = ForwardChunk {
                    of,
                    keys: &keys,
                    work: &work,
                    state,
                };
                let mut gates = g.outputs(&forward, d_state, d_rows, &mut products);
                g.updates(&forward, d_state, &mut gates, &mut products, to[0]);
                let mut sum = 0.0;
                for t in (0..c.tokens).rev() {
                    sum += gates.sums[t];
                    let at = (c.first + t) * heads.value_heads + head;
                    let beta = d.beta[t];
                    // SAFETY: these heads of this document belong to this task alone.
                    unsafe {
                        *to[1].at(at) = sum as f32;
                        *to[2].at(at) = gates.beta[t] as f32 * beta * (1.0 - beta);
                    }
                }
            }
            g.lengths(heads, key_head, c, &keys, to[0]);
        }
    });
}

/// The gradient of the outputs of a head in a chunk: rows of Q elements, `stride` apart.
#[derive(Clone, Copy)]
struct GradientRows<'a> {
    values: &'a [f32],
    stride: usize,
}

impl ChunkGradients<'_> {
    /// Through `O = e^γ Q S + P D` and `S' = e^γ_c S + (e^(γ_c - γ) K)ᵀ D`. Leaves the gradient of D in `delta`, and in
    /// `d_state` that part of the gradient of S.
    fn outputs(
        &mut self,
        forward: &ForwardChunk,
        d_state: &mut [f32],
        d_o: GradientRows<'_>,
        products: &mut Products,
    ) -> Gates {
        let ForwardChunk { of, keys, work, state } = *forward;
        let HeadChunk { heads, c, d, .. } = of;
        let (n, p, q) = (c.tokens, heads.key_dim, heads.value_dim);
        let mut gates = Gates {
            sums: [0.0; CHUNK],
            beta: [0.0; CHUNK],
        };
        let d_rows = Matrix::k_inner(d_o.values, d_o.stride);
        let d_columns = Matrix::k_outer(d_o.values, d_o.stride);
        products.product((n, p, q), self.spare, false, d_rows, Matrix::k_inner(state, q));
        for i in 0..n {
            let row = &mut self.spare[i * p..][..p];
            scale_slice(row, d.from_start[i]);
            gates.sums[i] += product_of(row, &keys.q[i * p..][..p]);
            add_slice(&mut self.q[i * p..][..p], row);
        }
        let k_rows = Matrix::k_inner(&*keys.k, p);
        products.product((n, q, p), self.delta, false, k_rows, Matrix::k_outer(&*d_state, q));
        for (row, decay) in self.delta.chunks_exact_mut(q).zip(&d.to_end).take(n) {
            scale_slice(row, *decay);
        }
        decayed(keys.qk, d, n, true, self.probabilities);
        products.product(
            (n, q, n),
            self.delta,
            true,
            Matrix::k_outer(&*self.probabilities, n),
            d_columns,
        );

        let deltas = Matrix::k_inner(&*work.delta, q);
        products.product((n, p, q), self.spare, false, deltas, Matrix::k_inner(&*d_state, q));
        for i in 0..n {
            let row = &mut self.spare[i * p..][..p];
            scale_slice(row, d.to_end[i]);
            let along = product_of(row, &keys.k[i * p..][..p]);
            gates.sums[i] -= along;
            gates.sums[n - 1] += along;
            add_slice(&mut self.k[i * p..][..p], row);
        }
        gates.sums[n - 1] += f64::from(d.whole) * product_of(state, d_state);

        products.product((n, n, q), self.square, false, d_rows, deltas);
        for i in 0..n {
            for l in 0..i {
                let along = f64::from(self.square[i * n + l]) * f64::from(self.probabilities[i * n + l]);
                gates.sums[i] += along;
                gates.sums[l] -= along;
            }
        }
        decayed(self.square, d, n, true, self.decayed);
        let k_columns = Matrix::k_outer(&*keys.k, p);
        products.product((n, p, n), self.q, true, Matrix::k_inner(&*self.decayed, n), k_columns);
        let q_columns = Matrix::k_outer(&*keys.q, p);
        products.product((n, p, n), self.k, true, Matrix::k_outer(&*self.decayed, n), q_columns);

        scale_slice(d_state, d.whole);
        self.spare[..n * p].copy_from_slice(&keys.q[..n * p]);
        for (row, decay) in self.spare.chunks_exact_mut(p).zip(&d.from_start).take(n) {
            scale_slice(row, *decay);
        }
        products.product((p, q, n), d_state, true, Matrix::k_outer(&*self.spare, p), d_columns);
        gates
    }

    /// Through `(I + A) D = β (V - e^γ K S)`. Writes the gradient of v.
    fn updates(
        &mut self,
        forward: &ForwardChunk,
        d_state: &mut [f32],
        gates: &mut Gates,
        products: &mut Products,
        to: SharedSlice,
    ) {
        let ForwardChunk { of, keys, work, state } = *forward;
        let HeadChunk { x, heads, head, c, d } = of;
        let (n, p, q, width) = (c.tokens, heads.key_dim, heads.value_dim, heads.channels());
        solve_transposed(work.triangle, &d.beta, self.delta, n, q);
        let deltas = Matrix::k_inner(&*work.delta, q);
        products.product((n, n, q), self.square, false, Matrix::k_inner(&*self.delta, q), deltas);
        for i in 0..n {
            for l in 0..i {
                let along = f64::from(self.square[i * n + l]) * f64::from(work.triangle[i * n + l]);
                gates.beta[i] -= along;
                gates.sums[i] -= f64::from(d.beta[i]) * along;
                gates.sums[l] += f64::from(d.beta[i]) * along;
            }
        }
        decayed(self.square, d, n, false, self.decayed);
        for (row, beta) in self.decayed.chunks_exact_mut(n).zip(&d.beta).take(n) {
            scale_slice(row, -beta);
        }
        let k_columns = Matrix::k_outer(&*keys.k, p);
        products.product((n, p, n), self.k, true, Matrix::k_inner(&*self.decayed, n), k_columns);
        products.product((n, p, n), self.k, true, Matrix::k_outer(&*self.decayed, n), k_columns);

        let v_at = 2 * heads.key_heads * p + head * q;
        for i in 0..n {
            let (beta, decay) = (d.beta[i], d.from_start[i]);
            let at = (c.first + i) * width + v_at;
            let (row, read) = (&mut self.delta[i * q..][..q], &work.read[i * q..][..q]);
            let along = product_of(row, read);
            gates.beta[i] += product_of(row, &x.qkv[at..][..q]) - f64::from(decay) * along;
            gates.sums[i] -= f64::from(beta * decay) * along;
            // SAFETY: these values belong to this task alone.
            let dv = unsafe { to.part(at, q) };
            for (dv, row) in dv.iter_mut().zip(row) {
                *dv = beta * *row;
                *row *= -beta * decay;
            }
        }
        products.product(
            (n, p, q),
            self.k,
            true,
            Matrix::k_inner(&*self.delta, q),
            Matrix::k_inner(state, q),
        );
        products.product((p, q, n), d_state, true, k_columns, Matrix::k_outer(&*self.delta, q));
    }

    /// Writes the gradients of q and k before their lengths became 1.
    fn lengths(&self, heads: &DeltaHeads, key_head: usize, c: TokenChunk, keys: &ChunkKeys, to: SharedSlice) {
        let (p, width) = (heads.key_dim, heads.channels());
        let scale_q = 1.0 / (p as f32).sqrt();
        for i in 0..c.tokens {
            let parts = [
                (key_head, &*self.q, &*keys.q, keys.inverse_q[i], scale_q),
                (heads.key_heads + key_head, &*self.k, &*keys.k, keys.inverse_k[i], 1.0),
            ];
            for (column, gradient, unit, inverse, factor) in parts {
                let (gradient, unit) = (&gradient[i * p..][..p], &unit[i * p..][..p]);
                // SAFETY: this key head of this document belongs to this task alone.
                let row = unsafe { to.part((c.first + i) * width + column * p, p) };
                row.copy_from_slice(gradient);
                add_scaled(row, -dot_product(gradient, unit) / (factor * factor), unit);
                scale_slice(row, inverse * factor);
            }
        }
    }
}
