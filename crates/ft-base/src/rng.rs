//! Counter-based random numbers: a number depends on (seed, stream, index) only.
//!
//! Nothing has to be saved to resume, the order of calls does not matter, and a recomputed layer uses the same dropout
//! mask. The mixing function is SplitMix64 (Steele, Lea, Flood 2014, "Fast Splittable Pseudorandom Number Generators",
//! section 4), applied twice over the key words.

/// One stream of random numbers, e.g. `Rng::new(seed, &[STREAM_SHUFFLE, epoch])`.
#[derive(Debug, Clone, Copy)]
pub struct Rng {
    key: u64,
}

#[inline]
fn mix(mut z: u64) -> u64 {
    z = z.wrapping_add(0x9E37_79B9_7F4A_7C15);
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

/// Purpose of a stream: separates the streams of one seed.
#[derive(Debug, Clone, Copy)]
#[repr(u64)]
pub enum Stream {
    /// Order of rows.
    Shuffle = 1,
    /// Order of blocks.
    Blocks = 2,
    /// Dropout masks.
    Dropout = 3,
    /// Initial values of parameters.
    Init = 4,
    /// Tokens of a generation.
    Sampling = 5,
    /// Split into training and evaluation rows.
    Split = 6,
    /// Stochastic rounding.
    Rounding = 7,
    /// Trained elements inside a matrix.
    Mask = 8,
    /// Noise on embeddings.
    Noise = 9,
}

impl Rng {
    /// The stream of `seed` for one purpose and one position, such as `[step, layer]`. Equal arguments give equal
    /// numbers.
    pub fn new(seed: u64, stream: Stream, path: &[u64]) -> Self {
        let mut key = mix(mix(seed) ^ (stream as u64));
        for &word in path {
            key = mix(key ^ mix(word));
        }
        Self { key }
    }

    /// Key of this stream, for generators elsewhere (a GPU).
    pub fn key(&self) -> u64 {
        self.key
    }

    /// The `index`-th 64 random bits.
    #[inline]
    pub fn bits(&self, index: u64) -> u64 {
        mix(mix(self.key ^ index.wrapping_mul(0xD134_2543_DE82_EF95)))
    }

    /// Uniform in [0, 1), 24 bits.
    #[inline]
    pub fn uniform(&self, index: u64) -> f32 {
        (self.bits(index) >> 40) as f32 * (1.0 / (1u64 << 24) as f32)
    }

    /// Uniform in [0, 1), 53 bits.
    #[inline]
    pub fn uniform64(&self, index: u64) -> f64 {
        (self.bits(index) >> 11) as f64 * (1.0 / (1u64 << 53) as f64)
    }

    /// Standard normal (Box-Muller on two words of one index).
    pub fn normal(&self, index: u64) -> f32 {
        let u1 = 1.0 - self.uniform64(index.wrapping_mul(2));
        let u2 = self.uniform64(index.wrapping_mul(2).wrapping_add(1));
        ((-2.0 * u1.ln()).sqrt() * (std::f64::consts::TAU * u2).cos()) as f32
    }

    /// Uniform in 0..n; `n` > 0.
    pub fn below(&self, index: u64, n: u64) -> u64 {
        ((self.bits(index) as u128 * n as u128) >> 64) as u64
    }

    /// A permutation of 0..n (Fisher-Yates).
    pub fn permutation(&self, n: usize) -> Vec<usize> {
        let mut p: Vec<usize> = (0..n).collect();
        for i in (1..n).rev() {
            p.swap(i, self.below(i as u64, i as u64 + 1) as usize);
        }
        p
    }
}

/// A permutation of 0..n that is computed, not stored: a Feistel network of four rounds over the next power of four,
/// applied again while the result is outside 0..n (Black & Rogaway 2002, "Ciphers with Arbitrary Finite Domains",
/// section 4).
#[derive(Debug, Clone, Copy)]
pub struct Permutation {
    rng: Rng,
    n: u64,
    half: u32,
}

impl Permutation {
    /// `n` > 0.
    pub fn new(rng: Rng, n: u64) -> Self {
        let bits = 64 - (n - 1).leading_zeros();
        Self {
            rng,
            n,
            half: bits.div_ceil(2).max(1),
        }
    }

    /// Key of the random numbers, and half the number of bits of an index: for generators elsewhere (a GPU).
    pub fn network(&self) -> (u64, u32) {
        (self.rng.key(), self.half)
    }

    /// Image of `i` < n.
    pub fn at(&self, i: u64) -> u64 {
        let mask = (1u64 << self.half) - 1;
        let mut x = i;
        loop {
            let (mut left, mut right) = (x >> self.half, x & mask);
            for round in 0..4 {
                (left, right) = (right, left ^ (self.rng.bits(right << 2 | round) & mask));
            }
            x = left << self.half | right;
            if x < self.n {
                return x;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn same_key_same_numbers_other_key_other_numbers() {
        let a = Rng::new(42, Stream::Shuffle, &[0]);
        assert_eq!(a.bits(7), Rng::new(42, Stream::Shuffle, &[0]).bits(7));
        assert_ne!(a.bits(7), Rng::new(42, Stream::Shuffle, &[1]).bits(7));
        assert_ne!(a.bits(7), Rng::new(42, Stream::Blocks, &[0]).bits(7));
        assert_ne!(a.bits(7), Rng::new(43, Stream::Shuffle, &[0]).bits(7));
    }

    #[test]
    fn a_computed_permutation_meets_every_place_once() {
        for n in [1, 2, 3, 4, 5, 17, 64, 1000, 4097] {
            let p = Permutation::new(Rng::new(3, Stream::Mask, &[n]), n);
            let mut places: Vec<u64> = (0..n).map(|i| p.at(i)).collect();
            let mixed = places.windows(2).filter(|w| w[1] == w[0] + 1).count();
            assert!(n < 64 || mixed < n as usize / 10);
            places.sort_unstable();
            assert_eq!(places, (0..n).collect::<Vec<_>>());
        }
    }

    #[test]
    fn permutation_is_one_and_moments_are_right() {
        let r = Rng::new(1, Stream::Init, &[]);
        let mut p = r.permutation(1000);
        assert_ne!(p[..10], (0..10).collect::<Vec<_>>()[..]);
        p.sort_unstable();
        assert_eq!(p, (0..1000).collect::<Vec<_>>());
        let n = 100_000u64;
        let (mut m, mut v) = (0f64, 0f64);
        for i in 0..n {
            let x = r.normal(i) as f64;
            m += x;
            v += x * x;
        }
        assert!((m / n as f64).abs() < 0.02 && (v / n as f64 - 1.0).abs() < 0.02);
    }
}
