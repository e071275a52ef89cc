"""Golden tensors of the quantized layouts of other tools: codes, scales, and the values to which the tool decodes them.

    pip install torch==2.13 transformers==5.23 compressed-tensors==0.20 bitsandbytes==0.50.2 safetensors
    pip download --no-deps --no-binary :all: gptqmodel==7.7.0 && tar xzf gptqmodel-7.7.0.tar.gz
    python make_quantfiles.py gptqmodel-7.7.0

One folder per case: `config.json` with `quantization_config`, `model.safetensors` with the tensors of the weight
`a.weight`, and `decoded`: the values of the reference in its own type. References, all on a CPU:

- fp8: `Fp8Dequantize` of transformers; a grid that does not divide the weight: the same product, block by block.
- GPTQ: `dequantize_weight` of gptqmodel, taken out of its source (the package needs a GPU toolchain to install).
- AWQ: `dequantize_gemm` of gptqmodel, which has the layout of autoawq (no longer installable).
- compressed-tensors: `decompress` of its compressors. Version 0.20 does not apply `weight_g_idx`: those cases select the
  scale of each column by its group, as versions before 0.12 do.
- bitsandbytes: `dequantize_4bit`, `int8_vectorwise_dequant`.
- MXFP4: `convert_moe_packed_tensors` of transformers.
"""

import ast
import importlib.util
import json
import sys
import types
from pathlib import Path

import torch
from safetensors.torch import save_file

OUT = Path(__file__).parent / "goldens" / "quantfiles"
GENERATOR = torch.Generator().manual_seed(7)
F16, BF16, F32, I32, I8, F8 = torch.float16, torch.bfloat16, torch.float32, torch.int32, torch.int8, torch.float8_e4m3fn


def normal(*shape, dtype=F32, scale=0.02):
    return (scale * torch.randn(*shape, generator=GENERATOR)).to(dtype)


def integers(low, high, *shape, dtype=I32):
    return torch.randint(low, high, shape, generator=GENERATOR).to(dtype)


def case(name, config, tensors, decoded):
    folder = OUT / name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"quantization_config": config}) + "\n")
    tensors = {key: value.contiguous() for key, value in tensors.items()}
    save_file({**tensors, "decoded": decoded.contiguous()}, folder / "model.safetensors")


def fp8():
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    decode = Fp8Dequantize(None)._dequantize_one
    config = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3"}
    for name, shape, grid, block, kind in [
        ("fp8-block", (64, 96), (2, 3), [32, 32], F32),
        ("fp8-block-bf16", (32, 64), (1, 2), [32, 32], BF16),
        ("fp8-channel", (24, 50), (24, 1), None, F32),
        ("fp8-tensor", (7, 33), (1, 1), None, F32),
    ]:
        weight, scale = normal(*shape, scale=60.0).clamp(-448, 448).to(F8), normal(*grid).abs().to(kind)
        decoded = decode(weight, scale, output_dtype=F32)
        case(name, {**config, "weight_block_size": block}, {"a.weight": weight, "a.weight_scale_inv": scale}, decoded)
    weight, scale = normal(40, 70, scale=60.0).to(F8), normal(2, 3).abs()
    blocks = scale.repeat_interleave(32, 0)[:40].repeat_interleave(32, 1)[:, :70]
    tensors = {"a.weight": weight, "a.weight_scale_inv": scale}
    case("fp8-block-odd", {**config, "weight_block_size": [32, 32]}, tensors, weight.to(F32) * blocks)
    weight, scale = normal(16, 40, scale=60.0).to(F8), torch.tensor(0.0123)
    tensors = {"a.weight": weight, "a.weight_scale": scale, "a.input_scale": torch.tensor(1.0)}
    case("modelopt-fp8", {"quant_method": "modelopt", "quant_algo": "FP8"}, tensors, weight.to(F32) * scale)


def functions(path, names):
    """Functions and methods of a source file, without the rest of it."""
    found = [n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.FunctionDef) and n.name in names]
    module = {"t": torch, "torch": torch, "_torch_right_shift": torch.bitwise_right_shift}
    for node in found:
        node.decorator_list, node.returns = [], None
        for argument in node.args.args:
            argument.annotation = None
    exec(compile(ast.Module(body=found, type_ignores=[]), str(path), "exec"), module)
    return module


def packed_rows(codes, bits):
    """Codes [n, m] to words [n · bits / 32, m]."""
    each = 32 // bits
    parts = codes.to(torch.int64).reshape(-1, each, codes.shape[1])
    words = (parts << (bits * torch.arange(each)).view(1, -1, 1)).sum(1)
    return words.to(torch.int32) if words.max() < 2**31 else (words - (words >= 2**31).to(torch.int64) * 2**32).to(I32)


def gptq(source):
    methods = functions(source / "gptqmodel/nn_modules/qlinear/__init__.py", {"dequantize_weight", "_dequantize_from_codes"})
    for name, bits, (rows, columns), group, act, version, sym, kind in [
        ("gptq-4", 4, (24, 128), 32, False, "gptq", False, F16),
        ("gptq-4-v2", 4, (16, 128), 64, False, "gptq_v2", False, F16),
        ("gptq-4-sym", 4, (40, 256), 128, False, "gptq", True, F16),
        ("gptq-4-channel", 4, (16, 72), -1, False, "gptq", True, F16),
        ("gptq-4-order", 4, (24, 128), 32, True, "gptq", False, F16),
        ("gptq-4-bf16", 4, (16, 64), 32, False, "gptq_v2", True, BF16),
        ("gptq-8", 8, (12, 96), 32, False, "gptq", True, F16),
        ("gptq-8-order", 8, (12, 128), 64, True, "gptq_v2", False, F16),
    ]:
        groups = 1 if group == -1 else columns // group
        codes = integers(0, 2**bits, columns, rows)
        zeros = integers(0, 2**bits, groups, rows) if not sym else torch.full((groups, rows), 2 ** (bits - 1))
        if version == "gptq":
            zeros = zeros.clamp(min=1)
        scales = normal(groups, rows, dtype=kind, scale=0.01)
        order = torch.arange(columns) // (columns if group == -1 else group)
        if act:
            order = order[torch.randperm(columns, generator=GENERATOR)]
        qweight, qzeros = packed_rows(codes, bits), packed_rows(zeros.T, bits).T.contiguous()
        stored = qzeros - (0x11111111 if bits == 4 else 0x01010101) if version == "gptq" else qzeros
        shifts = torch.arange(0, 32, bits, dtype=I32)
        layer = types.SimpleNamespace(
            planar=False, bits=bits, maxq=2**bits - 1, pack_factor=32 // bits, in_features=columns,
            dequant_dtype=torch.int16 if bits == 8 else I8, qweight=qweight, qzeros=qzeros, scales=scales, g_idx=order,
            wf_unsqueeze_zero=shifts.view(1, 1, -1), wf_unsqueeze_neg_one=shifts.view(1, -1, 1),
            _init_wf_unsqueeze_buffers=lambda: None,
        )
        layer._dequantize_from_codes = lambda w, z, num_itr=1: methods["_dequantize_from_codes"](layer, w, z, num_itr)
        decoded = methods["dequantize_weight"](layer).T
        assert decoded.dtype == kind
        config = {"quant_method": "gptq", "bits": bits, "group_size": group, "desc_act": act, "sym": sym,
                  "checkpoint_format": version}
        tensors = {"a.qweight": qweight, "a.qzeros": stored, "a.scales": scales, "a.g_idx": order.to(I32)}
        case(name, config, tensors, decoded)


def awq(source):
    module = functions(source / "gptqmodel/quantization/awq/utils/packing_utils.py",
                       {"dequantize_gemm", "unpack_awq", "_unpack_columnwise", "_unpack_contiguous", "reverse_awq_order"})
    module["AWQ_REVERSE_ORDER"] = [0, 4, 1, 5, 2, 6, 3, 7]
    for name, (rows, columns), group in [("awq", (24, 64), 32), ("awq-128", (16, 256), 128), ("awq-channel", (8, 50), -1)]:
        size = columns if group == -1 else group
        groups = columns // size
        qweight, qzeros = (integers(-(2**31), 2**31, n, rows // 8, dtype=torch.int64).to(I32) for n in (columns, groups))
        scales = normal(groups, rows, dtype=F16, scale=0.01)
        decoded = module["dequantize_gemm"](qweight, qzeros, scales, 4, size).T
        assert decoded.dtype == F16
        config = {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True, "version": "gemm"}
        case(name, config, {"a.qweight": qweight, "a.qzeros": qzeros, "a.scales": scales}, decoded)


def compressed():
    from compressed_tensors.compressors.naive_quantized.base import NaiveQuantizationCompressor
    from compressed_tensors.compressors.pack_quantized.base import PackedQuantizationCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    def one(name, format, bits, shape, strategy, symmetric, kind, group=None, type="int", block=None, order=None):
        rows, columns = shape
        args = dict(num_bits=bits, type=type, symmetric=symmetric, strategy=strategy)
        args.update({"group_size": group} if group else {}, **({"block_structure": block} if block else {}))
        scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**args))
        grid = {"tensor": (1,), "channel": (rows, 1), "group": (rows, columns // (group or 1))}.get(strategy)
        grid = grid or (-(-rows // block[0]), -(-columns // block[1]))
        state = {"weight": normal(*shape), "weight_scale": normal(*grid).abs().clamp(min=1e-3).to(kind)}
        if type == "float":
            state["weight_scale"] = (state["weight_scale"].float() / 50).to(kind)
        if not symmetric:
            state["weight_zero_point"] = integers(-(2 ** (bits - 1)), 2 ** (bits - 1), *grid, dtype=I8)
        compressor = PackedQuantizationCompressor if format == "pack-quantized" else NaiveQuantizationCompressor
        state = compressor.compress(state, scheme)
        decoded = compressor.decompress(dict(state), scheme)["weight"]
        if order is not None:
            # The codes and zero points of the columns are those of the file; each column takes the scale of its group.
            from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32

            codes = unpack_from_int32(state["weight_packed"], bits, torch.Size(shape)).to(kind)
            decoded = codes * state["weight_scale"][:, order.long()]
            state["weight_g_idx"] = order
        assert decoded.dtype == kind, decoded.dtype
        config = {"quant_method": "compressed-tensors", "format": format, "ignore": ["lm_head"],
                  "config_groups": {"group_0": {"targets": ["Linear"], "weights": json.loads(scheme.weights.model_dump_json())}}}
        tensors = {f"a.{key}": value for key, value in state.items()}
        if "a.weight_shape" in tensors:
            tensors["a.weight_shape"] = tensors["a.weight_shape"].to(torch.int64)
        case(name, config, tensors, decoded)

    one("ct-pack-4-group", "pack-quantized", 4, (24, 96), "group", True, BF16, group=32)
    one("ct-pack-4-asym", "pack-quantized", 4, (20, 128), "group", False, BF16, group=64)
    one("ct-pack-4-channel", "pack-quantized", 4, (9, 50), "channel", True, F16)
    one("ct-pack-8-group", "pack-quantized", 8, (12, 96), "group", True, BF16, group=32)
    one("ct-pack-8-asym", "pack-quantized", 8, (10, 51), "channel", False, F32)
    order = (torch.arange(128) // 32)[torch.randperm(128, generator=GENERATOR)].to(I32)
    one("ct-pack-4-order", "pack-quantized", 4, (16, 128), "group", True, BF16, group=32, order=order)
    one("ct-int8", "int-quantized", 8, (12, 50), "channel", True, BF16)
    one("ct-int8-asym", "int-quantized", 8, (12, 50), "channel", False, BF16)
    one("ct-int8-tensor", "int-quantized", 8, (7, 33), "tensor", True, F32)
    one("ct-naive-group", "naive-quantized", 8, (12, 96), "group", True, F16, group=32)
    one("ct-float-channel", "float-quantized", 8, (12, 50), "channel", True, BF16, type="float")
    one("ct-float-tensor", "float-quantized", 8, (12, 50), "tensor", True, F32, type="float")
    one("ct-float-block", "float-quantized", 8, (40, 70), "block", True, BF16, type="float", block=[32, 32])


def bitsandbytes():
    import bitsandbytes.functional as bnb

    weight = normal(24, 50, dtype=F32)
    scb = weight.abs().amax(1)
    codes = torch.round(weight * (127.0 / scb).view(-1, 1)).to(I8)
    tensors = {"a.weight": codes, "a.SCB": scb, "a.weight_format": torch.tensor(0, dtype=torch.uint8)}
    config = {"quant_method": "bitsandbytes", "load_in_8bit": True}
    case("bnb-int8", config, tensors, bnb.int8_vectorwise_dequant(codes, scb))
    for name, nested, shape, kind in [("bnb-fp4", False, (10, 50), F32), ("bnb-fp4-double", True, (48, 130), BF16)]:
        weight = normal(*shape, dtype=kind)
        packed, state = bnb.quantize_4bit(weight, blocksize=64, quant_type="fp4", compress_statistics=nested)
        tensors = {"a.weight": packed, **{f"a.weight.{k}": v for k, v in state.as_dict(packed=True).items()}}
        config = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "fp4"}
        state.dtype = F32
        case(name, config, tensors, bnb.dequantize_4bit(packed, state))


def bitsandbytes_double():
    """Double quantization, the way transformers writes it: blocks of several sizes, and codes stored as another type."""
    import bitsandbytes.functional as bnb

    generator = torch.Generator().manual_seed(11)
    for name, kind, block, shape, storage in [
        ("bnb-nf4-double", "nf4", 64, (130, 140), torch.uint8),
        ("bnb-nf4-double-128", "nf4", 128, (128, 264), torch.uint8),
        ("bnb-nf4-double-512", "nf4", 512, (48, 130), torch.uint8),
        ("bnb-fp4-double-256", "fp4", 256, (48, 130), torch.uint8),
        ("bnb-fp4-double-4096", "fp4", 4096, (70, 100), torch.uint8),
        ("bnb-nf4-double-stored-bf16", "nf4", 64, (24, 50), BF16),
    ]:
        # Rows of several magnitudes: an even absmax would have one code.
        weight = 0.02 * torch.randn(*shape, generator=generator) * torch.exp(torch.randn(shape[0], 1, generator=generator))
        packed, state = bnb.quantize_4bit(weight.to(BF16), blocksize=block, quant_type=kind, compress_statistics=True, quant_storage=storage)
        tensors = {"a.weight": packed, **{f"a.weight.{k}": v for k, v in state.as_dict(packed=True).items()}}
        config = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": kind,
                  "bnb_4bit_use_double_quant": True, "bnb_4bit_quant_storage": str(storage).removeprefix("torch.")}
        narrow = bnb.dequantize_4bit(packed, state)
        state.dtype = F32
        decoded = bnb.dequantize_4bit(packed, state)
        assert torch.equal(narrow, decoded.to(BF16))
        case(name, config, tensors, decoded)


def mxfp4():
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    blocks, scales = integers(0, 256, 2, 12, 3, 16, dtype=torch.uint8), integers(110, 135, 2, 12, 3, dtype=torch.uint8)
    # The result is transposed for the experts of gpt_oss.
    decoded = convert_moe_packed_tensors(blocks, scales).transpose(1, 2).reshape(24, 96)
    case("mxfp4", {"quant_method": "mxfp4"}, {"a.weight_blocks": blocks, "a.weight_scales": scales}, decoded)


if __name__ == "__main__":
    source = Path(sys.argv[1])
    fp8()
    gptq(source)
    awq(source)
    compressed()
    bitsandbytes()
    mxfp4()
    bitsandbytes_double()
