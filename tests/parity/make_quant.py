"""NF4 as bitsandbytes codes it.

    python make_quant.py

Writes goldens/quant/nf4.safetensors and nf4.json, from bitsandbytes' own functions on the CPU. The weight is made
from whole numbers, so that the test makes the same bits without a file: see `weight`.
"""

import bitsandbytes
import bitsandbytes.functional as functional
import numpy
import torch
from safetensors.torch import save_file

import nf4
from common import GOLDENS, VERSIONS, write_json

# Rows and columns: the blocks of 64 run over the ends of rows, and the blocks of 256 absmax do not come out even.
SHAPES = {"even": (96, 192), "ragged": (30, 150)}


def weight(rows, columns, seed):
    """Sums of four numbers of 16 bits from a linear congruential generator, times 2^-20; a row is 8 times larger."""
    state, values = seed, []
    for _ in range(rows * columns):
        total = -2 * 65535
        for _ in range(4):
            state = (state * 6364136223846793005 + 1442695040888963407) % 2**64
            total += state >> 48
        values.append(total)
    w = torch.tensor(numpy.array(values, dtype=numpy.float32) * numpy.float32(2.0**-20)).reshape(rows, columns)
    w[rows // 2] *= 8
    return w


def main():
    tensors, info = {}, {}
    for seed, (name, (rows, columns)) in enumerate(SHAPES.items(), 1):
        w = weight(rows, columns, seed)
        plain, state, _ = nf4.state(w, False)
        tensors[f"{name}.codes"] = plain.reshape(-1)
        tensors[f"{name}.absmax"] = state.absmax
        tensors[f"{name}.decoded"] = functional.dequantize_4bit(plain, state)
        double, nested, others = nf4.state(w, True)
        assert torch.equal(plain, double)
        tensors[f"{name}.nested_codes"] = nested.absmax
        tensors[f"{name}.nested_absmax"] = nested.state2.absmax
        tensors[f"{name}.decoded_double"] = functional.dequantize_4bit(double, nested)
        assert nested.state2.blocksize == 256 and nested.state2.code.numel() == 256
        tensors["nested_table"], tensors["table"] = nested.state2.code, state.code
        # As it decodes for a bf16 model.
        narrow = nf4.state(w, True)[1]
        narrow.dtype = torch.bfloat16
        tensors[f"{name}.decoded_bf16"] = functional.dequantize_4bit(double, narrow).float()
        info[name] = dict(rows=rows, columns=columns, seed=seed, offset=float(nested.offset))
        print(name, "offset", float(nested.offset), "mean error", float((tensors[f"{name}.decoded"] - w.reshape(-1)).abs().mean()),
              "absmax coded otherwise by the f32 kernel", others)
    directory = GOLDENS / "quant"
    directory.mkdir(parents=True, exist_ok=True)
    save_file({k: v.contiguous().clone() for k, v in tensors.items()}, directory / "nf4.safetensors")
    write_json(directory / "nf4.json", dict(weights=info, versions=VERSIONS | {"bitsandbytes": bitsandbytes.__version__}))


if __name__ == "__main__":
    main()
