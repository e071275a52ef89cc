//! Alternating updates (AltUp, arXiv:2301.13310, as in Gemma 3n): the hidden state of a token has A streams, of which a
//! layer computes one; the others are predicted from all streams, and corrected with what the layer found. f32, on a GPU also bf16.
//!
//! ```text
//! predicted_i = h_i + Σ_p c[i·A + p] · h_p
//! corrected_i = predicted_i + f_i · (y - predicted_a)        a: the stream that the layer computes, y its output
//! matched     = p · rms(like) / sqrt(max(mean(p²), 1e-5))
//! ```
//!
//! Letters: N tokens, A streams, D width of a stream. Streams h `[N, A·D]`, coefficients c `[N, A²]`, factors f `[N, A]`.

use super::cpu::storage::{dims2, expect_dims, floats, tensor, unwritten};
use super::update::with_slice_mut;
use candle_core::Tensor;
use ft_base::Result;
use rayon::prelude::*;

/// Most streams on a GPU.
pub const DEVICE_STREAMS: usize = 8;

/// Smallest mean square of what `matched` divides by.
const SMALLEST: f32 = 1e-5;

/// N and D of streams.
fn sizes(h: &Tensor, streams: usize) -> Result<(usize, usize)> {
    let (n, wide) = dims2(h, "the streams of AltUp")?;
    let d = wide / streams.max(1);
    expect_dims(h, "the streams of AltUp", &[n, streams * d])?;
    Ok((n, d))
}

fn axpy(y: &mut [f32], a: f32, x: &[f32]) {
    for (y, x) in y.iter_mut().zip(x) {
        *y += a * x;
    }
}

fn dot(a: &[f32], b: &[f32]) -> f32 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

fn mean_square(x: &[f32]) -> f32 {
    dot(x, x) / x.len() as f32
}

/// The predictions `[N, A·D]` of all streams, from streams h `[N, A·D]` and coefficients c `[N, A²]`.
///
/// # Errors
/// Shapes that do not fit; tensors of different types.
pub fn predict(h: &Tensor, c: &Tensor, streams: usize) -> Result<Tensor> {
    predicted(h, c, streams, 0..streams)
}

/// As `predict`, of stream `stream` alone: `[N, D]`.
///
/// # Errors
/// As `predict`.
pub fn predict_one(h: &Tensor, c: &Tensor, streams: usize, stream: usize) -> Result<Tensor> {
    predicted(h, c, streams, stream..stream + 1)
}

fn predicted(h: &Tensor, c: &Tensor, streams: usize, wanted: std::ops::Range<usize>) -> Result<Tensor> {
    let (n, d) = sizes(h, streams)?;
    expect_dims(c, "the coefficients of AltUp", &[n, streams * streams])?;
    on_gpu!(h, super::cuda::altup::predict(h, c, streams, wanted, (n, d)));
    let width = wanted.len() * d;
    let mut y = unwritten(n * width);
    floats(h, "the streams of AltUp", |h| {
        floats(c, "the coefficients of AltUp", |c| {
            y.par_chunks_mut(width.max(1)).enumerate().for_each(|(t, y)| {
                let h = &h[t * streams * d..][..streams * d];
                let c = &c[t * streams * streams..][..streams * streams];
                for (i, y) in wanted.clone().zip(y.chunks_mut(d)) {
                    y.copy_from_slice(&h[i * d..][..d]);
                    for (p, h) in h.chunks(d).enumerate() {
                        axpy(y, c[i * streams + p], h);
                    }
                }
            });
            Ok(())
        })
    })?;
    tensor(y, (n, width))
}

/// Backward of `predict`: the gradients `dy` `[N, A·D]` become those of h in place; returns those of c, `[N, A²]`.
///
/// # Errors
/// As `predict`.
pub fn predict_backward(h: &Tensor, c: &Tensor, dy: &Tensor, streams: usize) -> Result<Tensor> {
    let (n, d) = sizes(h, streams)?;
    expect_dims(c, "the coefficients of AltUp", &[n, streams * streams])?;
    expect_dims(dy, "the gradients of streams", h.dims())?;
    on_gpu!(h, super::cuda::altup::predict_backward(h, c, dy, streams, (n, d)));
    let mut dc = unwritten(n * streams * streams);
    let all = (h, c);
    floats(all.0, "the streams of AltUp", |h| {
        floats(all.1, "the coefficients of AltUp", |c| {
            let dc = &mut dc;
            with_slice_mut(dy, move |dy| {
                let rows = dy.par_chunks_mut((streams * d).max(1));
                rows.zip(dc.par_chunks_mut(streams * streams))
                    .enumerate()
                    .for_each(|(t, (dy, dc))| {
                        let h = &h[t * streams * d..][..streams * d];
                        let c = &c[t * streams * streams..][..streams * streams];
                        for (i, dy) in dy.chunks(d).enumerate() {
                            for (p, h) in h.chunks(d).enumerate() {
                                dc[i * streams + p] = dot(dy, h);
                            }
                        }
                        let before = dy.to_vec();
                        for (p, dh) in dy.chunks_mut(d).enumerate() {
                            for (i, dy) in before.chunks(d).enumerate() {
                                axpy(dh, c[i * streams + p], dy);
                            }
                        }
                    });
            })
        })
    })?;
    tensor(dc, (n, streams * streams))
}

/// Corrects the predictions `[N, A·D]` in place with the output y `[N, D]` of the layer and the factors f `[N, A]`.
///
/// # Errors
/// As `predict`.
pub fn correct_assign(predictions: &Tensor, y: &Tensor, f: &Tensor, active: usize) -> Result<()> {
    let streams = dims2(f, "the factors of AltUp")?.1;
    let (n, d) = sizes(predictions, streams)?;
    expect_dims(y, "the output of a layer", &[n, d])?;
    on_gpu!(y, super::cuda::altup::correct(predictions, y, f, active, (n, d)));
    floats(y, "the output of a layer", |y| {
        floats(f, "the factors of AltUp", |f| {
            with_slice_mut(predictions, move |all| {
                all.par_chunks_mut((streams * d).max(1))
                    .enumerate()
                    .for_each(|(t, all)| {
                        let of_active = all[active * d..][..d].iter();
                        let found: Vec<f32> = y[t * d..][..d].iter().zip(of_active).map(|(y, p)| y - p).collect();
                        for (i, stream) in all.chunks_mut(d).enumerate() {
                            axpy(stream, f[t * streams + i], &found);
                        }
                    });
            })
        })
    })
}

/// The corrected stream that the layer computes, `[N, D]`, from its prediction p and y `[N, D]`, and the factors f.
///
/// # Errors
/// As `predict`.
pub fn corrected(p: &Tensor, y: &Tensor, f: &Tensor, active: usize) -> Result<Tensor> {
    let (streams, (n, d)) = (dims2(f, "the factors of AltUp")?.1, dims2(p, "a prediction")?);
    expect_dims(y, "the output of a layer", &[n, d])?;
    on_gpu!(p, super::cuda::altup::corrected(p, y, f, active, (n, d)));
    let mut out = unwritten(n * d);
    floats(p, "a prediction", |p| {
        floats(y, "the output of a layer", |y| {
            floats(f, "the factors of AltUp", |f| {
                out.par_chunks_mut(d.max(1)).enumerate().for_each(|(t, out)| {
                    let f = f[t * streams + active];
                    let pairs = p[t * d..].iter().zip(&y[t * d..]);
                    out.iter_mut()
                        .zip(pairs)
                        .for_each(|(out, (p, y))| *out = p + f * (y - p));
                });
                Ok(())
            })
        })
    })?;
    tensor(out, (n, d))
}

/// Backward of `correct_assign`, with p `[N, D]` the prediction of the active stream: the gradients `dy` `[N, A·D]` become
/// those of the predictions in place; returns those of y, `[N, D]`, and of f, `[N, A]`.
///
/// # Errors
/// As `predict`.
pub fn correct_backward(dy: &Tensor, p: &Tensor, y: &Tensor, f: &Tensor, active: usize) -> Result<(Tensor, Tensor)> {
    let streams = dims2(f, "the factors of AltUp")?.1;
    let (n, d) = sizes(dy, streams)?;
    expect_dims(y, "the output of a layer", &[n, d])?;
    expect_dims(p, "a prediction", &[n, d])?;
    on_gpu!(dy, super::cuda::altup::correct_backward(dy, p, y, f, active, (n, d)));
    let (mut found, mut df) = (unwritten(n * d), unwritten(n * streams));
    floats(p, "a prediction", |p| {
        floats(y, "the output of a layer", |y| {
            floats(f, "the factors of AltUp", |f| {
                let (found, df) = (&mut found, &mut df);
                with_slice_mut(dy, move |dy| {
                    let rows = dy.par_chunks_mut((streams * d).max(1));
                    let rows = rows.zip(found.par_chunks_mut(d)).zip(df.par_chunks_mut(streams));
                    rows.enumerate().for_each(|(t, ((dy, found), df))| {
                        let pairs = y[t * d..].iter().zip(&p[t * d..]);
                        found.iter_mut().zip(pairs).for_each(|(found, (y, p))| *found = y - p);
                        for (df, dy) in df.iter_mut().zip(dy.chunks(d)) {
                            *df = dot(dy, found);
                        }
                        found.fill(0.0);
                        for (f, dy) in f[t * streams..].iter().zip(dy.chunks(d)) {
                            axpy(found, *f, dy);
                        }
                        axpy(&mut dy[active * d..][..d], -1.0, found);
                    });
                })
            })
        })
    })?;
    Ok((tensor(found, (n, d))?, tensor(df, (n, streams))?))
}

/// Adds x `[N, D]` to the streams `which` of h `[N, A·D]`.
///
/// # Errors
/// As `predict`.
pub fn add_to(h: &Tensor, x: &Tensor, which: std::ops::Range<usize>) -> Result<()> {
    let (n, d) = dims2(x, "what is added to streams")?;
    let wide = dims2(h, "the streams of AltUp")?.1;
    expect_dims(h, "the streams of AltUp", &[n, wide / d.max(1) * d])?;
    on_gpu!(h, super::cuda::altup::add_to(h, x, which, (n, d)));
    floats(x, "what is added to streams", |x| {
        with_slice_mut(h, move |h| {
            h.par_chunks_mut(wide.max(1))
                .zip(x.par_chunks(d.max(1)))
                .for_each(|(h, x)| {
                    for i in which.clone() {
                        axpy(&mut h[i * d..][..d], 1.0, x);
                    }
                });
        })
    })
}

/// The sum `[N, D]` of the streams `which` of h `[N, A·D]`, times `factor`.
///
/// # Errors
/// As `predict`.
pub fn sum(h: &Tensor, streams: usize, which: std::ops::Range<usize>, factor: f32) -> Result<Tensor> {
    let (n, d) = sizes(h, streams)?;
    on_gpu!(h, super::cuda::altup::sum(h, which, factor, (n, d)));
    let mut out = unwritten(n * d);
    floats(h, "the streams of AltUp", |h| {
        out.par_chunks_mut(d.max(1)).enumerate().for_each(|(t, out)| {
            out.fill(0.0);
            for i in which.clone() {
                axpy(out, factor, &h[(t * streams + i) * d..][..d]);
            }
        });
        Ok(())
    })?;
    tensor(out, (n, d))
}

/// p `[N, D]` with the root mean square of the rows of `like` `[N, D]`.
///
/// # Errors
/// As `predict`.
pub fn matched(p: &Tensor, like: &Tensor) -> Result<Tensor> {
    let (n, d) = dims2(p, "a projected stream")?;
    expect_dims(like, "a stream", &[n, d])?;
    on_gpu!(p, super::cuda::altup::matched(p, like, (n, d)));
    let mut y = unwritten(n * d);
    floats(p, "a projected stream", |p| {
        floats(like, "a stream", |like| {
            let rows = y.par_chunks_mut(d.max(1)).zip(p.par_chunks(d.max(1)));
            rows.zip(like.par_chunks(d.max(1))).for_each(|((y, p), like)| {
                let factor = mean_square(like).sqrt() / mean_square(p).max(SMALLEST).sqrt();
                y.iter_mut().zip(p).for_each(|(y, p)| *y = factor * p);
            });
            Ok(())
        })
    })?;
    tensor(y, (n, d))
}

/// Backward of `matched` from dy `[N, D]`: returns dp `[N, D]`, and adds the gradient of `like` to `d_like` `[N, D]`.
///
/// # Errors
/// As `predict`.
pub fn matched_backward(p: &Tensor, like: &Tensor, dy: &Tensor, d_like: &Tensor) -> Result<Tensor> {
    let (n, d) = dims2(p, "a projected stream")?;
    for (t, name) in [
        (like, "a stream"),
        (dy, "the gradient of a stream"),
        (d_like, "the gradient of a stream"),
    ] {
        expect_dims(t, name, &[n, d])?;
    }
    on_gpu!(p, super::cuda::altup::matched_backward(p, like, dy, d_like, (n, d)));
    let mut dp = unwritten(n * d);
    floats(p, "a projected stream", |p| {
        floats(like, "a stream", |like| {
            floats(dy, "the gradient of a stream", |dy| {
                let dp = &mut dp;
                with_slice_mut(d_like, move |d_like| {
                    let rows = dp.par_chunks_mut(d.max(1)).zip(d_like.par_chunks_mut(d.max(1)));
                    rows.enumerate().for_each(|(t, (dp, d_like))| {
                        let row = |x: &'_ [f32]| -> Vec<f32> { x[t * d..][..d].to_vec() };
                        let (p, like, dy) = (row(p), row(like), row(dy));
                        let (target, own) = (mean_square(&like).sqrt(), mean_square(&p));
                        let root = own.max(SMALLEST).sqrt();
                        let along = dot(&dy, &p);
                        let down = if own >= SMALLEST {
                            along * target / (root * root * root * d as f32)
                        } else {
                            0.0
                        };
                        for ((dp, dy), p) in dp.iter_mut().zip(&dy).zip(&p) {
                            *dp = target / root * dy - down * p;
                        }
                        if target > 0.0 {
                            axpy(d_like, along / (root * target * d as f32), &like);
                        }
                    });
                })
            })
        })
    })?;
    tensor(dp, (n, d))
}

#[cfg(test)]
mod tests;
