//! The gated delta rule on slices, forward. One task computes a document for one key head and its value heads. Letters
//! as in `crate::delta_rule`; c: tokens of a chunk.
//!
//! With γ the sums of g inside a chunk, G = K Kᵀ, and S the state before the chunk:
//!
//! ```text
//! A_il = β_i G_il e^(γ_i - γ_l), l < i       (I + A) D = β (V - e^γ K S)       P_il = (Q Kᵀ)_il e^(γ_i - γ_l), l <= i
//! O = e^γ Q S + P D                           S' = e^γ_c S + (e^(γ_c - γ) K)ᵀ D
//! ```

use super::attention::Cutter;
use super::math::{dot, exp, fma, scale_slice, vectorized};
use super::product::task_gemm::{OperandSide, OutputTile, TaskGemm};
use super::product::{CpuBackend, GemmSizes, Matrix, Rounding};
use super::{SharedSlice, with_scratch};
use crate::delta_rule::DeltaHeads;
use rayon::prelude::*;

/// Tokens of a chunk.
pub(crate) const CHUNK: usize = 64;
/// Added to the squared length of q and k.
const EPS: f32 = 1e-6;

/// The tensors of the operation.
pub(crate) struct DeltaSlices<'a> {
    pub qkv: &'a [f32],
    pub a: &'a [f32],
    pub b: &'a [f32],
    pub a_log: &'a [f32],
    pub dt_bias: &'a [f32],
}

/// The tokens of a chunk, counted over all documents.
#[derive(Clone, Copy)]
pub(crate) struct TokenChunk {
    pub first: usize,
    pub tokens: usize,
}

/// The chunks of a document.
pub(crate) fn chunks(start: usize, end: usize) -> impl DoubleEndedIterator<Item = TokenChunk> + ExactSizeIterator {
    let count = (end - start).div_ceil(CHUNK);
    (0..count).map(move |i| {
        let first = start + i * CHUNK;
        TokenChunk {
            first,
            tokens: CHUNK.min(end - first),
        }
    })
}

/// One key head of a document.
#[derive(Clone, Copy)]
pub(crate) struct HeadTask {
    pub document: usize,
    /// First token of the document, and the end of its tokens.
    pub start: usize,
    pub end: usize,
    pub key_head: usize,
}

/// The documents with tokens and the key heads.
pub(crate) fn tasks(heads: &DeltaHeads, documents: &[usize]) -> Vec<HeadTask> {
    let each = documents.windows(2).enumerate().filter(|(_, d)| d[1] > d[0]);
    each.flat_map(|(document, d)| {
        (0..heads.key_heads).map(move |key_head| HeadTask {
            document,
            start: d[0],
            end: d[1],
            key_head,
        })
    })
    .collect()
}

/// Products of a task, and the memory for their packed operands.
pub(crate) struct Products<'a> {
    pub gemm: TaskGemm,
    pub a: &'a mut [f32],
    pub b: &'a mut [f32],
}

/// Lengths of the memory of `Products` for matrices of these sides.
pub(crate) fn packed_lens(gemm: TaskGemm, widest: usize) -> [usize; 2] {
    [
        gemm.packed_len(OperandSide::A, widest, widest),
        gemm.packed_len(OperandSide::B, widest, widest),
    ]
}

impl Products<'_> {
    /// Computes `c [m, n] (+)= a · b`; the rows of c are `n` apart.
    pub(crate) fn product(&mut self, sizes: GemmSizes, c: &mut [f32], add: bool, a: Matrix, b: Matrix) {
        let (_, n, _) = sizes;
        let to = OutputTile {
            c: SharedSlice::new(c),
            at: 0,
            stride: n,
            add,
        };
        self.strided(sizes, to, a, b);
    }

    /// As `product`, into the rows of `to`, which belong to this task alone.
    pub(crate) fn strided(&mut self, (m, n, k): GemmSizes, to: OutputTile, a: Matrix, b: Matrix) {
        let a = self.gemm.pack_operand(OperandSide::A, a, (m, k), self.a);
        let b = self.gemm.pack_operand(OperandSide::B, b, (n, k), self.b);
        // SAFETY: the caller owns these elements of C; both operands were packed for their sides.
        unsafe { self.gemm.multiply((m, n, k), to, &a, &b) }
    }
}

/// q and k of a chunk with length 1, and the inverse lengths; q is divided by √P.
pub(crate) struct ChunkKeys<'a> {
    /// `[c, P]`
    pub q: &'a mut [f32],
    pub k: &'a mut [f32],
    /// `[c]`
    pub inverse_q: &'a mut [f32],
    pub inverse_k: &'a mut [f32],
    /// K Kᵀ and Q Kᵀ, `[c, c]`.
    pub kk: &'a mut [f32],
    pub qk: &'a mut [f32],
}

#[inline(always)]
fn unit_body<const FMA: bool>(from: &[f32], scale: f32, to: &mut [f32]) -> f32 {
    let inverse = 1.0 / (dot::<FMA>(from, from) + EPS).sqrt();
    for (to, from) in to.iter_mut().zip(from) {
        *to = from * inverse * scale;
    }
    inverse
}
vectorized!(fn unit(from: &[f32], scale: f32, to: &mut [f32]) -> f32 = unit_body);

impl ChunkKeys<'_> {
    pub(crate) fn lens(key_dim: usize) -> [usize; 6] {
        [
            CHUNK * key_dim,
            CHUNK * key_dim,
            CHUNK,
            CHUNK,
            CHUNK * CHUNK,
            CHUNK * CHUNK,
        ]
    }

    pub(crate) fn fill(
        &mut self,
        x: &DeltaSlices,
        heads: &DeltaHeads,
        head: usize,
        c: TokenChunk,
        products: &mut Products,
    ) {
        let (p, width) = (heads.key_dim, heads.channels());
        let scale = 1.0 / (p as f32).sqrt();
        for i in 0..c.tokens {
            let row = &x.qkv[(c.first + i) * width..][..width];
            let (q, k) = (&row[head * p..][..p], &row[(heads.key_heads + head) * p..][..p]);
            self.inverse_q[i] = unit(q, scale, &mut self.q[i * p..][..p]);
            self.inverse_k[i] = unit(k, 1.0, &mut self.k[i * p..][..p]);
        }
        let n = c.tokens;
        let k = || Matrix::k_inner(&*self.k, p);
        products.product((n, n, p), self.kk, false, k(), k());
        products.product((n, n, p), self.qk, false, Matrix::k_inner(&*self.q, p), k());
    }
}

/// g and β of a token.
pub(crate) fn gates(x: &DeltaSlices, token: usize, heads: &DeltaHeads, head: usize) -> (f32, f32) {
    let at = token * heads.value_heads + head;
    let rate = -x.a_log[head].exp();
    (
        rate * softplus(x.a[at] + x.dt_bias[head]),
        1.0 / (1.0 + (-x.b[at]).exp()),
    )
}

fn softplus(x: f32) -> f32 {
    if x > 20.0 { x } else { x.exp().ln_1p() }
}

/// The decays of a value head in a chunk.
pub(crate) struct Decays {
    /// Sums of g up to each token. Their differences need more bits than f32 has.
    pub sums: [f64; CHUNK],
    pub beta: [f32; CHUNK],
    /// `e^sums`
    pub from_start: [f32; CHUNK],
    /// `e^(last sum - sums)`
    pub to_end: [f32; CHUNK],
    /// Decay of the whole chunk.
    pub whole: f32,
}

impl Decays {
    pub(crate) fn new(x: &DeltaSlices, heads: &DeltaHeads, head: usize, c: TokenChunk) -> Self {
        let mut d = Self {
            sums: [0.0; CHUNK],
            beta: [0.0; CHUNK],
            from_start: [0.0; CHUNK],
            to_end: [0.0; CHUNK],
            whole: 0.0,
        };
        let mut sum = 0.0;
        for i in 0..c.tokens {
            let (g, beta) = gates(x, c.first + i, heads, head);
            sum += f64::from(g);
            (d.sums[i], d.beta[i], d.from_start[i]) = (sum, beta, (sum as f32).exp());
        }
        for i in 0..c.tokens {
            d.to_end[i] = ((sum - d.sums[i]) as f32).exp();
        }
        d.whole = (sum as f32).exp();
        d
    }
}

/// Fills the lower triangle of `to` `[c, c]`, with or without the diagonal, with `from_il · e^(γ_i - γ_l)`, the rest with 0.
#[inline(always)]
fn decayed_body<const FMA: bool>(from: &[f32], d: &Decays, n: usize, diagonal: bool, to: &mut [f32]) {
    for i in 0..n {
        let (row, from) = (&mut to[i * n..][..n], &from[i * n..][..n]);
        let end = i + usize::from(diagonal);
        let sum = d.sums[i];
        for ((to, from), before) in row[..end].iter_mut().zip(from).zip(&d.sums) {
            *to = from * exp::<FMA>((sum - before) as f32);
        }
        row[end..].fill(0.0);
    }
}
vectorized!(pub(crate) fn decayed(from: &[f32], d: &Decays, n: usize, diagonal: bool, to: &mut [f32]) = decayed_body);

/// Solves (I + A) X = R for `x` `[c, width]`, which holds R; `a` is strictly lower triangular, and A_il = β_i a_il.
#[inline(always)]
fn solve_body<const FMA: bool>(a: &[f32], beta: &[f32], x: &mut [f32], n: usize, width: usize) {
    for i in 1..n {
        let (before, row) = x.split_at_mut(i * width);
        let row = &mut row[..width];
        for (l, other) in before.chunks_exact(width).enumerate() {
            let factor = -(beta[i] * a[i * n + l]);
            for (x, other) in row.iter_mut().zip(other) {
                *x = fma::<FMA>(factor, *other, *x);
            }
        }
    }
}
vectorized!(fn solve(a: &[f32], beta: &[f32], x: &mut [f32], n: usize, width: usize) = solve_body);

/// Solves (I + A)ᵀ X = R.
#[inline(always)]
fn solve_transposed_body<const FMA: bool>(a: &[f32], beta: &[f32], x: &mut [f32], n: usize, width: usize) {
    for i in (1..n).rev() {
        let (before, row) = x.split_at_mut(i * width);
        let row = &row[..width];
        for (l, other) in before.chunks_exact_mut(width).enumerate() {
            let factor = -(beta[i] * a[i * n + l]);
            for (other, x) in other.iter_mut().zip(row) {
                *other = fma::<FMA>(factor, *x, *other);
            }
        }
    }
}
vectorized!(
    pub(crate) fn solve_transposed(a: &[f32], beta: &[f32], x: &mut [f32], n: usize, width: usize) =
        solve_transposed_body
);

/// A value head in a chunk.
#[derive(Clone, Copy)]
pub(crate) struct HeadChunk<'a> {
    pub x: &'a DeltaSlices<'a>,
    pub heads: &'a DeltaHeads,
    pub head: usize,
    pub c: TokenChunk,
    pub d: &'a Decays,
}

/// Memory of a value head in a chunk.
pub(crate) struct ChunkScratch<'a> {
    /// A without β, then P, `[c, c]`.
    pub triangle: &'a mut [f32],
    /// K S, `[c, Q]`.
    pub read: &'a mut [f32],
    /// D, `[c, Q]`.
    pub delta: &'a mut [f32],
    /// `[c, Q]`
    pub spare: &'a mut [f32],
}

impl ChunkScratch<'_> {
    pub(crate) fn lens(value_dim: usize) -> [usize; 4] {
        [CHUNK * CHUNK, CHUNK * value_dim, CHUNK * value_dim, CHUNK * value_dim]
    }

    /// Computes A, K S and D from the state `[P, Q]`.
    pub(crate) fn deltas(&mut self, of: &HeadChunk, k: &[f32], kk: &[f32], state: &[f32], products: &mut Products) {
        let HeadChunk { x, heads, head, c, d } = *of;
        let (n, p, q) = (c.tokens, heads.key_dim, heads.value_dim);
        products.product(
            (n, q, p),
            self.read,
            false,
            Matrix::k_inner(k, p),
            Matrix::k_outer(state, q),
        );
        let (width, at) = (heads.channels(), 2 * heads.key_heads * p + head * q);
        for i in 0..n {
            let v = &x.qkv[(c.first + i) * width + at..][..q];
            let rows = self.delta[i * q..][..q].iter_mut().zip(&self.read[i * q..][..q]);
            for ((delta, read), v) in rows.zip(v) {
                *delta = d.beta[i] * (v - d.from_start[i] * read);
            }
        }
        decayed(kk, d, n, false, self.triangle);
        solve(self.triangle, &d.beta, self.delta, n, q);
    }

    /// The state after the chunk.
    pub(crate) fn update(&mut self, of: &HeadChunk, k: &[f32], state: &mut [f32], products: &mut Products) {
        let HeadChunk { heads, c, d, .. } = *of;
        let n = c.tokens;
        let (p, q) = (heads.key_dim, heads.value_dim);
        self.spare[..n * q].copy_from_slice(&self.delta[..n * q]);
        for (row, decay) in self.spare.chunks_exact_mut(q).zip(&d.to_end).take(n) {
            scale_slice(row, *decay);
        }
        scale_slice(state, d.whole);
        products.product(
            (p, q, n),
            state,
            true,
            Matrix::k_outer(k, p),
            Matrix::k_outer(&*self.spare, q),
        );
    }
}

pub(crate) fn forward(
    backend: CpuBackend,
    x: &DeltaSlices,
    heads: &DeltaHeads,
    documents: &[usize],
    states: &mut [f32],
    o: &mut [f32],
) {
    let (given, states, o) = (!states.is_empty(), SharedSlice::new(states), SharedSlice::new(o));
    tasks(heads, documents)
        .into_par_iter()
        .with_max_len(1)
        .for_each(|task| {
            let HeadTask { document, key_head, .. } = task;
            let group = heads.value_heads / heads.key_heads;
            let per_head = heads.key_dim * heads.value_dim;
            // SAFETY: these heads of this document belong to this task alone.
            let given = given.then(|| unsafe {
                states.part(document * heads.state() + key_head * group * per_head, group * per_head)
            });
            run(backend, x, heads, task, given, o);
        });
}

fn run(
    backend: CpuBackend,
    x: &DeltaSlices,
    heads: &DeltaHeads,
    task: HeadTask,
    given: Option<&mut [f32]>,
    o: SharedSlice,
) {
    let key_head = task.key_head;
    let gemm = TaskGemm::new(backend, Rounding::Exact);
    let (p, q, group) = (heads.key_dim, heads.value_dim, heads.value_heads / heads.key_heads);
    let widest = CHUNK.max(p).max(q);
    let packed = packed_lens(gemm, widest);
    let (keys, work) = (ChunkKeys::lens(p), ChunkScratch::lens(q));
    let len = |lens: &[usize]| lens.iter().map(|len| len.next_multiple_of(super::LINE)).sum::<usize>();
    let total = len(&packed) + len(&keys) + len(&work) + len(&[group * p * q]);
    with_scratch(total, |scratch| {
        let mut cut = Cutter(scratch);
        let [a, b] = packed.map(|len| cut.take(len));
        let mut products = Products { gemm, a, b };
        let [q_rows, k, inverse_q, inverse_k, kk, qk] = keys.map(|len| cut.take(len));
        let mut keys = ChunkKeys {
            q: q_rows,
            k,
            inverse_q,
            inverse_k,
            kk,
            qk,
        };
        let [triangle, read, delta, spare] = work.map(|len| cut.take(len));
        let mut work = ChunkScratch {
            triangle,
            read,
            delta,
            spare,
        };
        let own = &mut cut.take(group * p * q)[..group * p * q];
        let states = match given {
            Some(given) => given,
            None => {
                own.fill(0.0);
                own
            }
        };
        for c in chunks(task.start, task.end) {
            keys.fill(x, heads, key_head, c, &mut products);
            for (j, state) in states.chunks_exact_mut(p * q).enumerate() {
                let (head, n) = (key_head * group + j, c.tokens);
                let d = Decays::new(x, heads, head, c);
                let d = &d;
                let of = HeadChunk { x, heads, head, c, d };
                work.deltas(&of, keys.k, keys.kk, state, &mut products);
                // e^γ Q S
                let (stride, at) = (heads.value_heads * q, (c.first * heads.value_heads + head) * q);
                let rows = Matrix::k_inner(&*keys.q, p);
                let to = OutputTile {
                    c: o,
                    at,
                    stride,
                    add: false,
                };
                products.strided((n, q, p), to, rows, Matrix::k_outer(&*state, q));
                for i in 0..n {
                    // SAFETY: these rows of this head belong to this task alone.
                    scale_slice(unsafe { o.part(at + i * stride, q) }, d.from_start[i]);
                }
                decayed(keys.qk, d, n, true, work.triangle);
                let p_rows = Matrix::k_inner(&*work.triangle, n);
                let to = OutputTile { add: true, ..to };
                products.strided((n, q, n), to, p_rows, Matrix::k_outer(&*work.delta, q));
                work.update(&of, keys.k, state, &mut products);
            }
        }
    });
}
