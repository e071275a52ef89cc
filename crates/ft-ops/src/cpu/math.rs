//! Branch-free f32 functions that the compiler vectorizes, and the run-time dispatch between instruction sets.

/// Defines `$name` as `$body` compiled for each instruction set; the best one is selected at run time. `$body` is
/// `#[inline(always)] fn body<const FMA: bool>(..)`; FMA is true if `mul_add` is one instruction.
macro_rules! vectorized {
    ($vis:vis fn $name:ident($($arg:ident: $ty:ty),* $(,)?) $(-> $ret:ty)? = $body:ident) => {
        $vis fn $name($($arg: $ty),*) $(-> $ret)? {
            #[cfg(target_arch = "x86_64")]
            {
                #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
                fn avx512($($arg: $ty),*) $(-> $ret)? { $body::<true>($($arg),*) }
                #[target_feature(enable = "avx2,fma")]
                fn avx2($($arg: $ty),*) $(-> $ret)? { $body::<true>($($arg),*) }
                use $crate::cpu::product::CpuBackend;
                match CpuBackend::current() {
                    // SAFETY: `CpuBackend` detected these instructions on this machine.
                    CpuBackend::Amx | CpuBackend::Avx512Bf16 | CpuBackend::Avx512 => unsafe { avx512($($arg),*) },
                    // SAFETY: as above.
                    CpuBackend::Avx2 => unsafe { avx2($($arg),*) },
                    CpuBackend::Portable => $body::<false>($($arg),*),
                }
            }
            #[cfg(not(target_arch = "x86_64"))]
            { $body::<{ cfg!(target_arch = "aarch64") }>($($arg),*) }
        }
    };
}
pub(crate) use vectorized;

/// Computes `a * b + c`, fused if that is one instruction.
#[inline(always)]
pub(crate) fn fma<const FMA: bool>(a: f32, b: f32, c: f32) -> f32 {
    if FMA { a.mul_add(b, c) } else { a * b + c }
}

/// Adding and then subtracting this constant rounds to an integer; after the addition it is in the low bits.
pub(crate) const ROUND: f32 = 12_582_912.0;
// ln 2 in two parts; the first has few bits, so that n * LN2_HI is exact for |n| < 2^9.
const LN2_HI: f32 = 0.693_359_4;
const LN2_LO: f32 = -2.121_944_4e-4;

/// Splits `x = n ln 2 + r` with `|r| <= ln 2 / 2`. Returns `n`, `r` and `q(r)`, where `e^r = 1 + r + r² q(r)`.
#[inline(always)]
fn reduce<const FMA: bool>(x: f32) -> (i32, f32, f32) {
    let shifted = fma::<FMA>(x, std::f32::consts::LOG2_E, ROUND);
    let n = shifted - ROUND;
    let r = fma::<FMA>(n, -LN2_LO, fma::<FMA>(n, -LN2_HI, x));
    // Taylor series; the first term left out is r^8 / 8!, below 1e-8.
    let q = fma::<FMA>(r, 1.0 / 5040.0, 1.0 / 720.0);
    let q = fma::<FMA>(q, r, 1.0 / 120.0);
    let q = fma::<FMA>(q, r, 1.0 / 24.0);
    let q = fma::<FMA>(q, r, 1.0 / 6.0);
    let q = fma::<FMA>(q, r, 0.5);
    let n = (shifted.to_bits() as i32).wrapping_sub(ROUND.to_bits() as i32);
    (n, r, q)
}

/// Computes `2^n` for -126 <= n <= 127.
#[inline(always)]
fn power_of_two(n: i32) -> f32 {
    f32::from_bits((n.wrapping_add(127) as u32) << 23)
}

/// Computes `e^x`, relative error below 2e-7; NaN stays NaN.
#[inline(always)]
pub(crate) fn exp<const FMA: bool>(x: f32) -> f32 {
    // Outside this range the result is 0 or infinity. Written such that NaN stays NaN.
    let x = if x < -104.0 { -104.0 } else { x };
    let x = if x > 89.0 { 89.0 } else { x };
    let (n, r, q) = reduce::<FMA>(x);
    let e = fma::<FMA>(r * r, q, r) + 1.0;
    // Two factors, because n itself may be outside the exponent range of normal numbers.
    let half = n >> 1;
    e * power_of_two(half) * power_of_two(n.wrapping_sub(half))
}

/// Computes `tanh x`, relative error below 5e-7; NaN stays NaN.
#[inline(always)]
pub(crate) fn tanh<const FMA: bool>(x: f32) -> f32 {
    let a = 2.0 * x.abs();
    let a = if a > 40.0 { 40.0 } else { a };
    let (n, r, q) = reduce::<FMA>(a);
    let p = power_of_two(n);
    // e^a - 1 without cancellation near 0.
    let e = fma::<FMA>(fma::<FMA>(r * r, q, r), p, p - 1.0);
    (e / (e + 2.0)).copysign(x)
}

/// Computes `1 / (1 + e^-x)`.
#[inline(always)]
pub(crate) fn sigmoid<const FMA: bool>(x: f32) -> f32 {
    1.0 / (1.0 + exp::<FMA>(-x))
}

pub(crate) const LANES: usize = 32;

/// Returns the sum of the lanes in a fixed tree order. Not inlined: with the tree at its end the compiler divides the loop that
/// fills the lanes into vectors of two (three to five times slower).
#[inline(never)]
pub(crate) fn sum_lanes(lanes: &[f32; LANES]) -> f32 {
    let mut lanes = *lanes;
    let mut width = LANES / 2;
    while width > 0 {
        for i in 0..width {
            lanes[i] += lanes[i + width];
        }
        width /= 2;
    }
    lanes[0]
}

/// Returns the sum of `x`.
#[inline(always)]
pub(crate) fn sum<const FMA: bool>(x: &[f32]) -> f32 {
    let mut lanes = [0f32; LANES];
    let (blocks, rest) = x.as_chunks::<LANES>();
    for block in blocks {
        for i in 0..LANES {
            lanes[i] += block[i];
        }
    }
    if !rest.is_empty() {
        let rest = padded(rest);
        for i in 0..LANES {
            lanes[i] += rest[i];
        }
    }
    sum_lanes(&lanes)
}

/// Returns the largest lane. Not inlined, as `sum_lanes`.
#[inline(never)]
pub(crate) fn max_lanes(lanes: &[f32; LANES]) -> f32 {
    let mut lanes = *lanes;
    let mut width = LANES / 2;
    while width > 0 {
        for i in 0..width {
            let other = lanes[i + width];
            lanes[i] = if other > lanes[i] { other } else { lanes[i] };
        }
        width /= 2;
    }
    lanes[0]
}

/// Returns the end of a row with zeros behind it. To add them, or their products, changes no lane: a sum that begins with 0 is
/// never -0.
#[inline(always)]
pub(crate) fn padded(rest: &[f32]) -> [f32; LANES] {
    let mut block = [0f32; LANES];
    block[..rest.len()].copy_from_slice(rest);
    block
}

#[inline(always)]
pub(crate) fn dot<const FMA: bool>(a: &[f32], b: &[f32]) -> f32 {
    sum_lanes(&dot_lanes::<FMA>([0f32; LANES], a, b))
}

/// Adds the products to the lanes. A dot product may be cut at multiples of `LANES` without a change of the bits.
#[inline(always)]
pub(crate) fn dot_lanes<const FMA: bool>(mut lanes: [f32; LANES], a: &[f32], b: &[f32]) -> [f32; LANES] {
    let (a_blocks, a_rest) = a.as_chunks::<LANES>();
    let (b_blocks, b_rest) = b.as_chunks::<LANES>();
    for (a, b) in a_blocks.iter().zip(b_blocks) {
        for i in 0..LANES {
            lanes[i] = fma::<FMA>(a[i], b[i], lanes[i]);
        }
    }
    if !a_rest.is_empty() {
        let (a, b) = (padded(a_rest), padded(b_rest));
        for i in 0..LANES {
            lanes[i] = fma::<FMA>(a[i], b[i], lanes[i]);
        }
    }
    lanes
}

#[inline(always)]
pub(crate) fn widen(x: half::bf16) -> f32 {
    f32::from_bits((x.to_bits() as u32) << 16)
}

/// The mask of the first `n` of 16 elements.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
pub(crate) fn mask16(n: usize) -> u16 {
    if n >= 16 { u16::MAX } else { (1 << n) - 1 }
}

/// The mask of the first `n` of 32 elements.
#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
#[inline(always)]
pub(crate) fn mask32(n: usize) -> u32 {
    if n >= 32 { u32::MAX } else { (1 << n) - 1 }
}

/// How far ahead a weight of few rows is prefetched, in bytes. The hardware prefetcher stops at each page of 4 KiB
/// (docs/lab-book.md, 2026-11-28).
#[cfg(target_arch = "x86_64")]
const PREFETCH_BYTES: usize = 8192;

/// Prefetches the cache line `PREFETCH_BYTES` after `at`; the address may be invalid.
#[inline(always)]
pub(crate) fn prefetch<T>(at: *const T) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: every x86-64 CPU has SSE, and the instruction accepts any address.
    unsafe {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        _mm_prefetch::<_MM_HINT_T0>(at.wrapping_byte_add(PREFETCH_BYTES).cast());
    }
    let _ = at;
}

#[inline(always)]
pub(crate) fn dot_bf16<const FMA: bool>(a: &[f32], b: &[half::bf16]) -> f32 {
    let mut lanes = [0f32; LANES];
    let (a_blocks, a_rest) = a.as_chunks::<LANES>();
    let (b_blocks, b_rest) = b.as_chunks::<LANES>();
    for (a, b) in a_blocks.iter().zip(b_blocks) {
        prefetch(b);
        for i in 0..LANES {
            lanes[i] = fma::<FMA>(a[i], widen(b[i]), lanes[i]);
        }
    }
    if !a_rest.is_empty() {
        let (a, mut b) = (padded(a_rest), [half::bf16::ZERO; LANES]);
        b[..b_rest.len()].copy_from_slice(b_rest);
        for i in 0..LANES {
            lanes[i] = fma::<FMA>(a[i], widen(b[i]), lanes[i]);
        }
    }
    sum_lanes(&lanes)
}

#[inline(always)]
fn widen_slice_body<const FMA: bool>(to: &mut [f32], from: &[half::bf16]) {
    for (to, from) in to.iter_mut().zip(from) {
        *to = widen(*from);
    }
}
vectorized!(pub(crate) fn widen_slice(to: &mut [f32], from: &[half::bf16]) = widen_slice_body);

/// Returns the nearest bf16, ties to even; NaN stays NaN. The same bits as `half::bf16::from_f32`, except for NaN.
#[inline(always)]
pub(crate) fn nearest_bf16(x: f32) -> f32 {
    let bits = x.to_bits();
    // The addition does not change infinity, but it could turn a NaN into infinity or a number.
    let rounded = bits.wrapping_add(0x7FFF + (bits >> 16 & 1)) & 0xFFFF_0000;
    f32::from_bits(if x.is_nan() { 0x7FC0_0000 } else { rounded })
}

#[inline(always)]
fn round_to_bf16_body<const FMA: bool>(to: &mut [f32], from: &[f32]) {
    for (to, from) in to.iter_mut().zip(from) {
        *to = nearest_bf16(*from);
    }
}
vectorized!(pub(crate) fn round_to_bf16(to: &mut [f32], from: &[f32]) = round_to_bf16_body);

/// Rounds to the nearest bf16, as `nearest_bf16`.
#[inline(always)]
fn to_bf16_slice_body<const FMA: bool>(to: &mut [half::bf16], from: &[f32]) {
    for (to, from) in to.iter_mut().zip(from) {
        *to = half::bf16::from_bits((nearest_bf16(*from).to_bits() >> 16) as u16);
    }
}
vectorized!(pub(crate) fn to_bf16_slice(to: &mut [half::bf16], from: &[f32]) = to_bf16_slice_body);

#[inline(always)]
fn scale_slice_body<const FMA: bool>(x: &mut [f32], factor: f32) {
    x.iter_mut().for_each(|x| *x *= factor);
}
vectorized!(pub(crate) fn scale_slice(x: &mut [f32], factor: f32) = scale_slice_body);

/// Writes `factor from`.
#[inline(always)]
fn write_scaled_body<const FMA: bool>(to: &mut [f32], factor: f32, from: &[f32]) {
    for (to, from) in to.iter_mut().zip(from) {
        *to = factor * from;
    }
}
vectorized!(pub(crate) fn write_scaled(to: &mut [f32], factor: f32, from: &[f32]) = write_scaled_body);

#[inline(always)]
fn add_scaled_body<const FMA: bool>(to: &mut [f32], factor: f32, from: &[f32]) {
    for (to, from) in to.iter_mut().zip(from) {
        *to = fma::<FMA>(factor, *from, *to);
    }
}
vectorized!(pub(crate) fn add_scaled(to: &mut [f32], factor: f32, from: &[f32]) = add_scaled_body);

#[inline(always)]
fn add_slice_body<const FMA: bool>(to: &mut [f32], from: &[f32]) {
    for (to, from) in to.iter_mut().zip(from) {
        *to += from;
    }
}
vectorized!(pub(crate) fn add_slice(to: &mut [f32], from: &[f32]) = add_slice_body);

#[cfg(test)]
mod tests {
    use super::*;

    #[inline(always)]
    fn map_body<const FMA: bool>(x: &mut [f32], e: &mut [f32], t: &mut [f32]) {
        for ((x, e), t) in x.iter().zip(e).zip(t) {
            *e = exp::<FMA>(*x);
            *t = tanh::<FMA>(*x);
        }
    }
    vectorized!(fn map(x: &mut [f32], e: &mut [f32], t: &mut [f32]) = map_body);

    fn check(map: impl Fn(&mut [f32], &mut [f32], &mut [f32])) {
        let mut x: Vec<f32> = (0..400_000).map(|i| -87.0 + i as f32 * 4.4e-4).collect();
        x.extend((0..1000).map(|i| (i as f32 - 500.0) * 1e-5));
        let (mut e, mut t) = (vec![0f32; x.len()], vec![0f32; x.len()]);
        map(&mut x, &mut e, &mut t);
        for i in 0..x.len() {
            let (we, wt) = ((x[i] as f64).exp(), (x[i] as f64).tanh());
            if x[i] < 88.7 {
                assert!((e[i] as f64 - we).abs() <= 2e-7 * we, "exp {}", x[i]);
            }
            assert!(
                (t[i] as f64 - wt).abs() <= 5e-7 * wt.abs(),
                "tanh {} {} {wt}",
                x[i],
                t[i]
            );
        }
        let mut x = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, -120.0, 0.0, 95.0];
        let (mut e, mut t) = ([0f32; 6], [0f32; 6]);
        map(&mut x, &mut e, &mut t);
        assert!(e[0].is_nan() && t[0].is_nan());
        assert_eq!(&e[1..], &[f32::INFINITY, 0.0, 0.0, 1.0, f32::INFINITY]);
        assert_eq!(&t[1..], &[1.0, -1.0, -1.0, 0.0, 1.0]);
    }

    #[test]
    fn exp_and_tanh_are_accurate_with_every_instruction_set() {
        check(map);
        check(map_body::<false>);
        check(map_body::<true>);
    }

    #[test]
    fn rounding_is_that_of_bf16() {
        // Every exponent, every pattern around the tie, both signs.
        let mut x: Vec<f32> = (0..1u32 << 18)
            .map(|i| f32::from_bits((i >> 2) << 16 | [0x7FFF, 0x8000, 0x8001, 0xFFFF][i as usize & 3]))
            .collect();
        x.extend([0.0, -0.0, f32::INFINITY, f32::NEG_INFINITY, f32::MAX, f32::MIN]);
        let mut got = vec![0f32; x.len()];
        round_to_bf16(&mut got, &x);
        for (x, got) in x.into_iter().zip(got) {
            let want = half::bf16::from_f32(x).to_f32();
            let same = got.to_bits() == want.to_bits() || (got.is_nan() && want.is_nan());
            assert!(
                same && got.to_bits() == nearest_bf16(x).to_bits(),
                "{x:e}: {got:e} {want:e}"
            );
        }
    }

    #[test]
    fn dots_match_f64() {
        for n in [0, 1, 31, 32, 33, 1000] {
            let a: Vec<f32> = (0..n).map(|i| (i as f32 * 0.37).sin()).collect();
            let b: Vec<half::bf16> = (0..n).map(|i| half::bf16::from_f32((i as f32 * 0.11).cos())).collect();
            let wide: Vec<f32> = b.iter().map(|x| x.to_f32()).collect();
            let want: f64 = a.iter().zip(&wide).map(|(a, b)| *a as f64 * *b as f64).sum();
            assert!((dot::<false>(&a, &wide) as f64 - want).abs() < 1e-5);
            assert_eq!(dot::<true>(&a, &wide), dot_bf16::<true>(&a, &b));
        }
    }
}
