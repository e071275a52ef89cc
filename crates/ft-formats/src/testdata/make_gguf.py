"""Blocks of GGUF files and their values, from the package `gguf` (0.19.0): python make_gguf.py > gguf_blocks.json"""

import json
import numpy as np
from gguf import GGMLQuantizationType as T
from gguf.constants import GGML_QUANT_SIZES
from gguf.quants import dequantize, quantize

rng = np.random.default_rng(11)
hexed = lambda a: np.ascontiguousarray(a).tobytes().hex()
decoded = {}
# Offsets of the f16 factors in a block: random bytes there could be infinite.
factors = {T.Q8_0: [0], T.Q4_0: [0], T.Q4_K: [0, 2], T.Q6_K: [208]}
for kind in (T.Q8_0, T.Q4_0, T.Q4_K, T.Q6_K, T.BF16, T.F16):
    if kind in factors:
        blocks = rng.integers(0, 256, (3, GGML_QUANT_SIZES[kind][1]), dtype=np.uint8)
        for at in factors[kind]:
            blocks[:, at : at + 2] = (rng.standard_normal(3) * 0.01).astype(np.float16).view(np.uint8).reshape(3, 2)
    elif kind == T.BF16:
        blocks = (rng.standard_normal((3, 8)).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
    else:
        blocks = rng.standard_normal((3, 8)).astype(np.float16)
    values = dequantize(blocks, kind).astype(np.float32)
    decoded[kind.name] = {"bytes": hexed(blocks), "values": hexed(values)}
values = (rng.standard_normal(96) * 0.05).astype(np.float32)
encoded = {kind.name: hexed(quantize(values, kind)) for kind in (T.Q8_0, T.Q4_0, T.BF16, T.F16)}
print(json.dumps({"decoded": decoded, "values": hexed(values), "encoded": encoded}, indent=0))
