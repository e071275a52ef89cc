"""NF4 by bitsandbytes' functions, around two faults of its CPU kernels (seen with 0.50.2):

- `dequantize_4bit` reads wrong scales where a row is not a multiple of 64 wide: weights are given to it flat.
- the f32 kernel that codes the absmax goes through a table of 16 bits and misses the nearest code by one step close to
  the middle of two: the generic code of the library (which its other types take) is used; `state` counts the difference.
"""

import bitsandbytes.functional as functional
import torch


def state(weight, double):
    """Codes and state of a weight, double quantization by the generic code; and how many absmax the f32 kernel codes
    otherwise."""
    flat = weight.detach().float().reshape(-1).contiguous()
    codes, result = functional.quantize_4bit(flat, blocksize=64, compress_statistics=double, quant_type="nf4")
    others = 0
    if double:
        absmax = functional.quantize_4bit(flat, blocksize=64, compress_statistics=False, quant_type="nf4")[1].absmax
        # f64 takes the generic code, which computes in f32.
        exact, outer = torch.ops.bitsandbytes.quantize_blockwise((absmax - result.offset).double(), result.state2.code, 256)
        assert torch.equal(outer, result.state2.absmax)
        others = int((exact != result.absmax).sum())
        assert (exact.int() - result.absmax.int()).abs().max() <= 1
        result.absmax = exact
    return codes, result, others


def decoded(weight, double):
    """The weight through NF4 and back, f32."""
    codes, result, _ = state(weight, double)
    return functional.dequantize_4bit(codes, result).reshape(weight.shape)
