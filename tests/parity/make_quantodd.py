"""Odd variants of the quantized layouts of other tools, decoded here by the formulas of the formats: an independent second
reference beside make_quantfiles.py, which asks the tools.

    python make_quantodd.py

Writes folders of the form of make_quantfiles.py to goldens/quantfiles, named `odd-NAME`. Needs torch and safetensors only.

- GPTQ: w = s[g] · (q - z[g]) in f16 or bf16, g = g_idx[column]; columns in words from the low bits up; files of version 1
  have z - 1.
- AWQ: the same, eight codes of a word in the order 0 2 4 6 1 3 5 7.
- FP8: w = code · s of the block, row or tensor, in f32; the last blocks may be cut.
- compressed-tensors: w = (q - z) · s in the type of s; packed codes have an offset of half their range.
- bitsandbytes: w = level[code] · absmax of the block, the first element in the high bits; a nested absmax is
  level₂[code₂] · absmax₂ + offset. int8: w = q · (SCB / 127).
- MXFP4: w = level · 2^(e - 127).
"""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

OUT = Path(__file__).parent / "goldens" / "quantfiles"
G = torch.Generator().manual_seed(11)
F16, BF16, F32, I32, I8, U8, F8 = (torch.float16, torch.bfloat16, torch.float32, torch.int32, torch.int8, torch.uint8,
                                   torch.float8_e4m3fn)
FP4 = [0.0, 0.0052083333, 0.66666667, 1.0, 0.33333333, 0.5, 0.16666667, 0.25]
E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def ints(low, high, *shape):
    return torch.randint(low, high, shape, generator=G)


def scales(*shape, dtype=F16):
    return (0.002 + 0.02 * torch.rand(shape, generator=G)).to(dtype)


def words(codes, bits, order=None):
    """[..., n] unsigned codes to int32 [..., n · bits / 32], `order`: the code at each place of a word."""
    if bits == 3:
        # One stream of bits, the low ones first, cut into words.
        stream = ((codes[..., None] >> torch.arange(3)) & 1).reshape(*codes.shape[:-1], -1, 32)
        total = (stream << torch.arange(32)).sum(-1)
        return torch.where(total >= 2**31, total - 2**32, total).to(I32)
    each = 32 // bits
    parts = codes.reshape(*codes.shape[:-1], -1, each)[..., order or list(range(each))]
    total = (parts << (bits * torch.arange(each))).sum(-1)
    return torch.where(total >= 2**31, total - 2**32, total).to(I32)


def save(name, config, tensors, decoded):
    folder = OUT / f"odd-{name}"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"quantization_config": config}) + "\n")
    tensors = {f"a.{key}": value.contiguous() for key, value in tensors.items()}
    save_file({**tensors, "decoded": decoded.contiguous()}, folder / "model.safetensors")


def gptq(name, bits, rows, columns, group, *, act=False, sym=False, version="gptq", dtype=F16, uneven=False):
    groups = 1 if group == -1 else columns // group
    q = ints(0, 2**bits, columns, rows)
    z = torch.full((groups, rows), 2 ** (bits - 1)) if sym else ints(1 if version == "gptq" else 0, 2**bits, groups, rows)
    s = scales(groups, rows, dtype=dtype)
    g = torch.arange(columns) // (columns if group == -1 else group)
    if act:
        g = g[torch.randperm(columns, generator=G)]
    if uneven:
        g = ints(0, groups, columns)
    decoded = (s[g] * (q - z[g]).to(dtype)).T
    stored = z - 1 if version == "gptq" else z
    config = dict(quant_method="gptq", bits=bits, group_size=group, desc_act=act, sym=sym, checkpoint_format=version)
    save(name, config, {"qweight": words(q.T, bits).T, "qzeros": words(stored, bits), "scales": s, "g_idx": g.to(I32)}, decoded)


def awq(name, rows, columns, group, zero_point=True):
    order = [0, 2, 4, 6, 1, 3, 5, 7]
    groups = 1 if group == -1 else columns // group
    q, z, s = ints(0, 16, columns, rows), ints(0, 16, groups, rows), scales(groups, rows)
    if not zero_point:
        z = torch.full_like(z, 8)
    g = torch.arange(columns) // (columns if group == -1 else group)
    decoded = (s[g] * (q - z[g]).to(F16)).T
    config = dict(quant_method="awq", bits=4, group_size=group, zero_point=zero_point, version="GEMM")
    save(name, config, {"qweight": words(q, 4, order), "qzeros": words(z, 4, order), "scales": s}, decoded)


def fp8(name, rows, columns, block, *, shape=None, dtype=F32, suffix="weight_scale_inv"):
    code = (60 * torch.randn(rows, columns, generator=G)).clamp(-448, 448).to(F8)
    if block is None:
        s = scales(*shape, dtype=dtype)
        wide = s.to(F32).reshape(-1, 1) if s.numel() > 1 else s.to(F32).reshape(1, 1)
    else:
        s = scales(-(-rows // block[0]), -(-columns // block[1]), dtype=dtype)
        wide = s.to(F32)[torch.arange(rows) // block[0]][:, torch.arange(columns) // block[1]]
    config = dict(quant_method="fp8", activation_scheme="dynamic", fmt="e4m3", weight_block_size=block)
    save(name, config, {"weight": code, suffix: s}, code.to(F32) * wide)


def compressed(name, format, bits, rows, columns, *, group=None, sym=True, order=False, dtype=BF16):
    groups = columns // group if group else 1
    half = 2 ** (bits - 1)
    q, s = ints(-half, half, rows, columns), scales(rows, groups, dtype=dtype)
    z = torch.zeros(rows, groups, dtype=torch.int64) if sym else ints(-half, half, rows, groups)
    g = torch.arange(columns) // (group or columns)
    if order:
        g = g[torch.randperm(columns, generator=G)]
    decoded = (q - z[:, g]).to(dtype) * s[:, g]
    tensors = {"weight_scale": s}
    if format == "pack-quantized":
        pad = -columns % (32 // bits)
        tensors["weight_packed"] = words(torch.nn.functional.pad(q + half, (0, pad)), bits)
        tensors["weight_shape"] = torch.tensor([rows, columns])
        if not sym:
            pad = -rows % (32 // bits)
            tensors["weight_zero_point"] = words(torch.nn.functional.pad((z + half).T, (0, pad)), bits).T
    else:
        tensors["weight"] = q.to(I8)
        if not sym:
            tensors["weight_zero_point"] = z.to(I8)
    if order:
        tensors["weight_g_idx"] = g.to(I32)
    weights = dict(num_bits=bits, type="int", symmetric=sym, strategy="group" if group else "channel", group_size=group,
                   actorder="group" if order else None)
    config = dict(quant_method="compressed-tensors", format=format, ignore=["lm_head"],
                  config_groups={"group_0": {"targets": ["Linear"], "weights": weights}})
    save(name, config, tensors, decoded)


def dynamic_map():
    """The 256 levels of dynamic 8-bit quantization (arXiv:2110.02861): 7 decades, of which decade i has 2^i values per sign."""
    levels = [0.0, 1.0]
    for i in range(7):
        edges = torch.linspace(0.1, 1, 2**i + 1)
        for middle in ((edges[:-1] + edges[1:]) / 2).tolist():
            levels += [10.0 ** (i - 6) * middle, -(10.0 ** (i - 6)) * middle]
    return torch.tensor(sorted(levels))


def four_bit(name, rows, columns, block, kind, nested):
    levels = torch.tensor(FP4 + [-x for x in FP4]) if kind == "fp4" else torch.tensor(
        [-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
         -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
         0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0])
    n = rows * columns
    code, blocks = ints(0, 16, n), -(-n // block)
    padded = torch.nn.functional.pad(code, (0, n % 2))
    packed = ((padded[0::2] << 4) | padded[1::2]).to(U8).reshape(-1, 1)
    state = dict(quant_type=kind, blocksize=block, dtype="float32", shape=[rows, columns])
    tensors = {"weight.quant_map": levels}
    if nested:
        map2 = dynamic_map()
        code2, absmax2, offset = ints(0, 256, blocks), scales(-(-blocks // 256), dtype=F32), 0.375
        absmax = map2[code2] * absmax2[torch.arange(blocks) // 256] + offset
        tensors |= {"weight.absmax": code2.to(U8), "weight.nested_absmax": absmax2, "weight.nested_quant_map": map2}
        state |= dict(nested_blocksize=256, nested_dtype="float32", nested_offset=offset)
    else:
        absmax = scales(blocks, dtype=F32)
        tensors["weight.absmax"] = absmax
    decoded = (levels[code] * absmax[torch.arange(n) // block]).reshape(rows, columns)
    tensors |= {"weight": packed,
                f"weight.quant_state.bitsandbytes__{kind}": torch.tensor(list(json.dumps(state).encode()), dtype=U8)}
    save(name, dict(quant_method="bitsandbytes", load_in_4bit=True, bnb_4bit_quant_type=kind,
                    bnb_4bit_use_double_quant=nested), tensors, decoded)


def int8(name, rows, columns):
    q, scb = ints(-127, 128, rows, columns).to(I8), scales(rows, dtype=F32)
    # As the tool: codes times absmax, then times the rounded 1 / 127.
    decoded = q.to(F32) * scb.view(-1, 1) * (1 / 127)
    save(name, dict(quant_method="bitsandbytes", load_in_8bit=True, llm_int8_threshold=6.0),
         {"weight": q, "SCB": scb, "weight_format": torch.tensor(0, dtype=U8)}, decoded)


def mxfp4(name, experts, rows, groups, low, high):
    blocks, exponents = ints(0, 256, experts, rows, groups, 16), ints(low, high, experts, rows, groups)
    levels = torch.tensor(E2M1 + [-x for x in E2M1])
    values = levels[torch.stack([blocks & 15, blocks >> 4], -1).reshape(experts, rows, groups, 32)]
    decoded = (values * torch.exp2((exponents - 127).to(F32)).unsqueeze(-1)).to(BF16)
    save(name, dict(quant_method="mxfp4"), {"weight_blocks": blocks.to(U8), "weight_scales": exponents.to(U8)},
         decoded.reshape(experts * rows, groups * 32))


def main():
    gptq("gptq-4-order-asym", 4, 40, 256, 32, act=True)
    gptq("gptq-4-order-sym-v2", 4, 8, 128, 64, act=True, sym=True, version="gptq_v2", dtype=BF16)
    gptq("gptq-4-uneven", 4, 16, 96, 32, act=True, uneven=True)
    gptq("gptq-4-whole-asym", 4, 24, 88, -1)
    gptq("gptq-8-sym-v1", 8, 12, 64, 64, sym=True)
    gptq("gptq-8-whole-order", 8, 4, 40, -1, act=True, dtype=BF16)
    awq("awq-64", 40, 192, 64)
    awq("awq-whole", 8, 72, -1)
    fp8("fp8-blocks", 130, 200, [64, 128])
    fp8("fp8-wide-block", 33, 65, [128, 128], dtype=BF16)
    fp8("fp8-rows", 9, 31, None, shape=(9, 1), dtype=BF16)
    fp8("fp8-scalar", 5, 17, None, shape=())
    compressed("ct-4-group-order-asym", "pack-quantized", 4, 20, 128, group=32, sym=False, order=True)
    compressed("ct-8-group-order", "pack-quantized", 8, 12, 128, group=64, order=True, dtype=F16)
    compressed("ct-4-channel-asym", "pack-quantized", 4, 13, 51, sym=False, dtype=F32)
    compressed("ct-int8-group-asym", "naive-quantized", 8, 7, 96, group=32, sym=False)
    four_bit("nf4-cut", 9, 37, 64, "nf4", False)
    four_bit("nf4-nested", 48, 300, 64, "nf4", True)
    four_bit("fp4-nested-64", 130, 140, 64, "fp4", True)
    int8("int8", 11, 51)
    mxfp4("mxfp4-edges", 1, 4, 2, 1, 250)
    # After the others: each variant continues the stream of random numbers.
    gptq("gptq-2-asym", 2, 32, 96, 32)
    gptq("gptq-3-order", 3, 64, 128, 32, act=True)
    gptq("gptq-3-whole-v2", 3, 32, 96, -1, version="gptq_v2", dtype=BF16)
    awq("awq-middle", 16, 64, 32, zero_point=False)
    four_bit("nf4-128", 9, 100, 128, "nf4", False)
    four_bit("nf4-nested-1024", 65, 80, 1024, "nf4", True)
    four_bit("fp4-4096", 70, 100, 4096, "fp4", False)


if __name__ == "__main__":
    main()
