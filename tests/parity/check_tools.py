"""By hand: files that the quantization tools themselves write, opened by transformers and by ft, have the same loss.

    pip install torch==2.13 transformers==5.23 compressed-tensors==0.20 llmcompressor==0.14.0.1 bitsandbytes==0.50.2
    pip install --no-deps gptqmodel==7.7.0 torchao==0.18.0 logbar tokenicer device-smi defuser pypcre threadpoolctl
    python check_tools.py FOLDER FT [CASE ...]

FT is the `ft` program. Makes a random Llama with hidden states of 256 in FOLDER, quantizes it with each tool (one folder per
case), and compares the loss per token of short texts: transformers with f32 arithmetic against `ft eval`. Everything runs on
a CPU. Activations are not quantized in ft, so transformers gets decoded weights. With one core, gptqmodel needs
`"model_loader:cpu": 1` in its `__init__.py`.
"""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import torch
import transformers

from common import GOLDENS, Encoder, mean_loss, read_rows

TOKENIZER = GOLDENS / "tokenizers" / "small"
DATA = GOLDENS / "data" / "eval_text.jsonl"


def base(folder, kind):
    sizes = dict(vocab_size=128, hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
                 head_dim=64, max_position_embeddings=256, tie_word_embeddings=False)
    if folder.exists():
        return folder
    torch.manual_seed(1)
    config = transformers.AutoConfig.for_model(kind, **sizes)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" not in name:
                parameter.copy_(torch.randn(parameter.shape) * 0.08)
    model.to(torch.bfloat16).save_pretrained(folder)
    finish(folder)
    return folder


def finish(folder):
    for file in TOKENIZER.iterdir():
        shutil.copy(file, folder)


def llmcompressor(out, source, modifier):
    from llmcompressor import oneshot

    model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
    settings = dict(model=model, recipe=modifier)
    if "Quantization" not in type(modifier).__name__:
        from datasets import Dataset

        generator = torch.Generator().manual_seed(3)
        ids = [torch.randint(4, 128, (64,), generator=generator).tolist() for _ in range(32)]
        rows = Dataset.from_dict(dict(input_ids=ids, attention_mask=[[1] * 64] * 32))
        settings |= dict(dataset=rows, max_seq_length=64, num_calibration_samples=32, tokenizer=str(source))
    oneshot(**settings)
    model.save_pretrained(out, save_compressed=True)


def scheme(name, **more):
    def make(out, source):
        from llmcompressor.modifiers.quantization import QuantizationModifier

        llmcompressor(out, source, QuantizationModifier(targets="Linear", scheme=name, ignore=["lm_head"], **more))

    return make


def gptq(out, source, **more):
    from llmcompressor.modifiers.gptq import GPTQModifier

    llmcompressor(out, source, GPTQModifier(targets="Linear", scheme="W4A16", ignore=["lm_head"], **more))


def awq(out, source):
    from llmcompressor.modifiers.transform.awq import AWQModifier
    from llmcompressor.modifiers.quantization import QuantizationModifier

    llmcompressor(out, source, [AWQModifier(), QuantizationModifier(targets="Linear", scheme="W4A16_ASYM", ignore=["lm_head"])])


def bitsandbytes(**settings):
    def make(out, source):
        config = transformers.BitsAndBytesConfig(**settings)
        model = transformers.AutoModelForCausalLM.from_pretrained(source, quantization_config=config, device_map="cpu", dtype=torch.bfloat16)
        model.save_pretrained(out)

    return make


def gptqmodel(**settings):
    def make(out, source):
        from gptqmodel import GPTQModel, QuantizeConfig

        model = GPTQModel.load(str(source), QuantizeConfig(**settings), device="cpu")
        generator = torch.Generator().manual_seed(3)
        rows = [dict(input_ids=torch.randint(4, 128, (64,), generator=generator).tolist(), attention_mask=[1] * 64) for _ in range(16)]
        model.quantize(rows, batch_size=1)
        model.save(str(out))

    return make


def torchao(out, source):
    from torchao.quantization import Int8WeightOnlyConfig

    config = transformers.TorchAoConfig(Int8WeightOnlyConfig())
    model = transformers.AutoModelForCausalLM.from_pretrained(source, quantization_config=config, device_map="cpu", dtype=torch.bfloat16)
    model.save_pretrained(out)


CASES = {
    "llmcompressor-w4a16": scheme("W4A16"),
    "llmcompressor-w4a16-asym": scheme("W4A16_ASYM"),
    "llmcompressor-w8a16": scheme("W8A16"),
    "llmcompressor-w8a8": scheme("W8A8"),
    "llmcompressor-fp8": scheme("FP8_DYNAMIC"),
    "llmcompressor-fp8-block": scheme("FP8_BLOCK"),
    "llmcompressor-gptq": gptq,
    "llmcompressor-gptq-actorder": lambda out, source: gptq(out, source, actorder="static"),
    "llmcompressor-awq": awq,
    "bitsandbytes-int8": bitsandbytes(load_in_8bit=True),
    "bitsandbytes-fp4": bitsandbytes(load_in_4bit=True, bnb_4bit_quant_type="fp4"),
    "bitsandbytes-nf4-double": bitsandbytes(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True),
    "gptqmodel-4": gptqmodel(bits=4, group_size=128),
    "gptqmodel-4-desc-act": gptqmodel(bits=4, group_size=64, desc_act=True),
    "gptqmodel-8": gptqmodel(bits=8, group_size=128, sym=False),
    "gptqmodel-awq": gptqmodel(bits=4, group_size=128, sym=False, method="awq", format="gemm"),
    "torchao-int8": torchao,
}


def decoded(folder):
    """The model of transformers with f32 weights, none of whose activations are quantized."""
    raw = json.loads((folder / "config.json").read_text())
    settings = raw["quantization_config"]
    if settings["quant_method"] == "compressed-tensors":
        from transformers.utils.quantization_config import CompressedTensorsConfig

        config = CompressedTensorsConfig(run_compressed=False)
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, quantization_config=config, dtype=torch.bfloat16)
        for module in model.modules():
            if hasattr(module, "quantization_enabled"):
                module.quantization_enabled = False
        return model.float()
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, device_map="cpu", dtype=torch.float32)
    for name, module in list(model.named_modules()):
        weight = dense(module)
        if weight is not None:
            linear = torch.nn.Linear(*reversed(weight.shape), bias=False)
            linear.weight.data = weight.float()
            model.set_submodule(name, linear)
    return torch.nn.Module.float(model).eval()


def dense(module):
    """The decoded weight of a module of bitsandbytes or gptqmodel: LLM.int8() also rounds the inputs, ft does not."""
    import bitsandbytes

    if isinstance(module, bitsandbytes.nn.Linear8bitLt):
        return bitsandbytes.functional.int8_vectorwise_dequant(module.weight.data, module.weight.SCB)
    if isinstance(module, bitsandbytes.nn.Linear4bit):
        module.weight.quant_state.dtype = torch.float32
        return bitsandbytes.functional.dequantize_4bit(module.weight.data, module.weight.quant_state)
    if hasattr(module, "awq_weight_dequantize"):
        from gptqmodel.quantization.awq.utils.packing_utils import dequantize_gemm

        # The scales of the file are bf16, as ft uses them; the module converts them to f16.
        scales = module.scales.bfloat16()
        return dequantize_gemm(module.qweight, module.qzeros, scales, module.bits, module.group_size).T.contiguous()
    if hasattr(module, "dequantize_weight"):
        return module.dequantize_weight().T.contiguous()
    return None


def check(name, folder, ft, rows):
    said = subprocess.run([ft, "eval", "--model", folder, "--data", DATA, "--json", "--dtype", "f32"], capture_output=True, text=True)
    if said.returncode != 0:
        return f"{name}: refused: {said.stderr.strip()[-400:]}"
    got = json.loads(said.stdout)["loss"]
    want, _ = mean_loss(decoded(folder), rows)
    return f"{name}: transformers {want:.6f}, ft {got:.6f}, relative {abs(got - want) / want:.1e}"


def main():
    folder, ft, chosen = Path(sys.argv[1]), sys.argv[2], sys.argv[3:] or list(CASES)
    source = base(folder / "base", "llama")
    encoder = Encoder(TOKENIZER)
    rows = [encoder.row(row) for row in read_rows(DATA)]
    plain, _ = mean_loss(transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32), rows)
    print(f"not quantized: {plain:.6f}", flush=True)
    for name in chosen:
        out = folder / name
        try:
            if not out.exists():
                CASES[name](out, source)
                finish(out)
            print(check(name, out, ft, rows), flush=True)
        except Exception as error:
            print(f"{name}: {type(error).__name__}: {str(error)[:400]}", flush=True)


if __name__ == "__main__":
    main()
