"""gpt-oss with experts in MXFP4, as published: logits of transformers, which decodes them.

    python make_mxfp4.py

Writes goldens/mxfp4/{config.json, model.safetensors, golden.safetensors}; the tokenizer is that of goldens/tokenizers/small.
Letters: E experts, G groups of 32 inputs.
"""

import shutil

import torch
import transformers
from safetensors.torch import save_file

from common import GOLDENS, Encoder, randomize, write_json
from make_families import EXPERTS, YARN, config_v4, documents

CONFIG = EXPERTS | dict(
    model_type="gpt_oss", hidden_size=32, intermediate_size=64, head_dim=8, num_local_experts=3, sliding_window=8, attention_bias=True,
    rope_scaling=YARN | dict(beta_fast=4.0, beta_slow=1.0, truncate=False))


def main():
    directory = GOLDENS / "mxfp4"
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    encoder = Encoder(GOLDENS / "tokenizers" / "small")
    raw = config_v4(CONFIG, "bf16", encoder)
    model = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model(**raw), attn_implementation="eager", dtype=torch.float32)
    randomize(model, seed=99)
    generator = torch.Generator().manual_seed(98)
    tensors = {}
    for name, value in model.state_dict().items():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            experts, inputs, outputs = value.shape
            draw = lambda low, high, *shape: torch.randint(low, high, shape, generator=generator, dtype=torch.uint8)
            # Scales of 2^-5 to 2^-3: values of the usual size.
            tensors[f"{name}_blocks"] = draw(0, 256, experts, outputs, inputs // 32, 16)
            tensors[f"{name}_scales"] = draw(122, 125, experts, outputs, inputs // 32)
        else:
            tensors[name] = value.to(torch.bfloat16).contiguous()
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    raw["quantization_config"] = dict(
        quant_method="mxfp4", modules_to_not_convert=["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"])
    write_json(directory / "config.json", raw)
    # Decoded to bf16, which holds every MXFP4 value; the computation is in f32.
    decoded = transformers.AutoModelForCausalLM.from_pretrained(
        directory, attn_implementation="eager", experts_implementation="eager", dtype=torch.bfloat16, local_files_only=True,
        quantization_config=transformers.Mxfp4Config(dequantize=True)).float().eval()
    docs = documents(seed=97)
    golden = {}
    for i, (ids, _) in enumerate(docs):
        golden |= {f"input_ids.{i}": ids, f"labels.{i}": ids.clone(), f"logits.{i}": decoded(ids[None], use_cache=False).logits[0].detach().contiguous()}
    golden["gate_up"] = decoded.model.layers[0].mlp.experts.gate_up_proj.detach()[1].contiguous()
    save_file(golden, directory / "golden.safetensors")
    print("largest logit", golden["logits.0"].abs().max(), golden["gate_up"].abs().max())


if __name__ == "__main__":
    main()
