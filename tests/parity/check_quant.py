"""By hand: transformers loads what `ft quantize --to nf4` wrote, with bitsandbytes on the CPU.

    ft quantize --model goldens/training/models/llama --to nf4 --out NF4
    python check_quant.py NF4 goldens/training/models/llama

The directory needs no tokenizer; ids are random. Compares every decoded projection with what bitsandbytes makes
of the original weights, and the logits of the loaded model with those of the original model holding decoded weights.
"""

import sys

import bitsandbytes
import bitsandbytes.functional as functional
import torch
import transformers


def main():
    coded, original = sys.argv[1:3]
    loaded = transformers.AutoModelForCausalLM.from_pretrained(coded, device_map="cpu", dtype=torch.float32)
    plain = transformers.AutoModelForCausalLM.from_pretrained(original, dtype=torch.float32)
    compared = 0
    weights = dict(plain.named_parameters())
    for name, module in loaded.named_modules():
        if isinstance(module, bitsandbytes.nn.Linear4bit):
            state = module.weight.quant_state
            ours = functional.dequantize_4bit(module.weight.data, state).reshape(state.shape)
            weight = weights[f"{name}.weight"]
            codes, theirs = functional.quantize_4bit(weight.data.contiguous(), blocksize=64,
                                                     compress_statistics=state.nested, quant_type="nf4")
            theirs = functional.dequantize_4bit(codes, theirs).reshape(weight.shape)
            away = (ours - theirs).abs().max().item()
            assert away < 1e-6 * theirs.abs().max().item(), (name, away)
            with torch.no_grad():
                weight.copy_(ours)
            compared += 1
    assert compared > 0
    ids = torch.randint(0, plain.config.vocab_size, (2, 20), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        a, b = loaded(ids).logits, plain(ids).logits
    print(compared, "projections agree; logits differ by", (a - b).abs().max().item(), "of", b.abs().max().item())
    assert (a - b).abs().max() < 1e-2 * b.abs().max()


if __name__ == "__main__":
    main()
