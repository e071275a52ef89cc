//! Keys or values of some tokens of a KV cache on a GPU, as int8: one scale for each head of a token, absmax / 127. On the
//! CPU a KV cache has pages (`paged`), with the same bytes and scales.
//!
//! Letters: K heads of E elements, W = K·E.

use candle_core::Tensor;
use ft_base::{Error, Result};

/// Room for the keys or the values of some tokens of one layer.
#[cfg_attr(not(feature = "cuda"), allow(dead_code))]
pub struct KvBlock {
    /// u8 `[room, W]`: signed bytes.
    pub(crate) codes: Tensor,
    /// f32 `[room, K]`
    pub(crate) scales: Tensor,
    /// E
    pub(crate) head_dim: usize,
}

impl KvBlock {
    /// Room for `room` tokens, on the device of `x` `[tokens, W]`, with heads of `head_dim` elements.
    ///
    /// # Errors
    /// `x` is not on a GPU.
    pub fn new(x: &Tensor, room: usize, head_dim: usize) -> Result<Self> {
        on_gpu!(x, super::cuda::kv_block::empty(x, room, head_dim));
        let _ = (room, head_dim);
        gpu_only()
    }

    /// The number of tokens for which there is room.
    pub fn room(&self) -> usize {
        self.codes.dims()[0]
    }

    /// Bytes of a block of `tokens` tokens with `heads` heads of `head_dim` elements.
    pub fn bytes(tokens: usize, heads: usize, head_dim: usize) -> u64 {
        (tokens * heads * (head_dim + 4)) as u64
    }

    /// Quantizes `x` `[tokens, W]`, f32 or bf16, as the tokens from index `first` on.
    ///
    /// # Errors
    /// Tokens for which there is no room; another width.
    pub fn put(&self, first: usize, x: &Tensor) -> Result<()> {
        self.check(first, x)?;
        on_gpu!(x, super::cuda::kv_block::put(self, first, x));
        gpu_only()
    }

    /// Dequantizes the first tokens into `y` `[tokens, W]`, f32 or bf16.
    ///
    /// # Errors
    /// As `put`.
    pub fn get(&self, y: &Tensor) -> Result<()> {
        self.check(0, y)?;
        on_gpu!(y, super::cuda::kv_block::get(self, y));
        gpu_only()
    }

    fn check(&self, first: usize, x: &Tensor) -> Result<()> {
        let ([room, width], (tokens, found)) = ([self.room(), self.codes.dims()[1]], x.dims2()?);
        if found == width && first + tokens <= room {
            return Ok(());
        }
        Err(Error::shape("tokens do not fit into a block of the KV cache")
            .found(format!("tokens {first} to {}, width {found}", first + tokens))
            .expected(format!("at most {room} tokens of width {width}")))
    }
}

fn gpu_only<T>() -> Result<T> {
    Err(Error::unsupported("this form of the KV cache exists on a GPU only"))
}
