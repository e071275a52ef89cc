"""Adapters by PEFT on every linear of Gemma 3n and Gemma 4, those of AltUp and those outside of the layers included: logits, loss,
and the gradient of every adapter tensor.

    python make_outside_adapters.py [NAME ...]

Reads the models of goldens/families, writes goldens/outside_adapters/NAME/{adapter_config.json, adapter_model.safetensors,
golden.json, golden.safetensors}; README.md says what is in it. The adapter is as PEFT saves it, with random values.
"""

import json
import shutil
import sys
import tempfile

import torch
from peft import (AdaLoraConfig, IA3Config, LoHaConfig, LoKrConfig, LoraConfig, OFTConfig, PeftModel, VeraConfig,
                  get_peft_model)
from safetensors.torch import load_file, save_file

from common import GOLDENS, VERSIONS, loss_sum, write_json
from make_families import load

ALL = dict(target_modules="all-linear", task_type="CAUSAL_LM")
STREAMS = ["modality_router", "prediction_coefs", "correction_coefs", "altup_projections.0", "altup_unembed_projections.0",
           "per_layer_model_projection"]
SOME = dict(target_modules=[*STREAMS, "down_proj"], task_type="CAUSAL_LM")
# name: (model, config, deviation of the numbers that fill it)
VARIANTS = {
    "gemma3n_lora": ("gemma3n_text", LoraConfig(r=2, lora_alpha=3, **ALL), 0.15),
    "gemma3n_active": ("gemma3n_text_active", LoraConfig(r=3, lora_alpha=3, use_rslora=True, **SOME), 0.2),
    "gemma3n_dora": ("gemma3n_text", LoraConfig(r=2, lora_alpha=3, use_dora=True, **SOME), 0.2),
    "gemma3n_adalora": ("gemma3n_text", AdaLoraConfig(init_r=2, target_r=1, lora_alpha=4, total_step=10, **SOME), 0.4),
    "gemma3n_ia3": ("gemma3n_text", IA3Config(feedforward_modules=["down_proj", "altup_projections.0"], **SOME), 0.2),
    "gemma3n_vera": ("gemma3n_text", VeraConfig(r=4, **SOME), 0.4),
    "gemma3n_loha": ("gemma3n_text", LoHaConfig(r=2, alpha=3, **SOME), 0.4),
    # The inputs of the coefficients are 3 wide: no block divides them and 24.
    "gemma3n_oft": ("gemma3n_text", OFTConfig(r=0, oft_block_size=3, use_cayley_neumann=False, **SOME | dict(
        target_modules=STREAMS)), 0.1),
    "gemma3n_lokr": ("gemma3n_text", LoKrConfig(r=1, alpha=1, decompose_factor=8, **SOME), 0.4),
    "gemma4_lora": ("gemma4_text_shared", LoraConfig(r=2, lora_alpha=3, **ALL), 0.2),
    "gemma4_whole": ("gemma4", LoraConfig(r=2, lora_alpha=3, task_type="CAUSAL_LM",
                                          target_modules=r"model\.language_model\.(.*q_proj|per_layer_model_projection)"), 0.2),
}


def fill(model, deviation, seed):
    generator = torch.Generator().manual_seed(seed)
    trained = {k: p for k, p in model.named_parameters() if p.requires_grad}
    with torch.no_grad():
        for key in sorted(trained):
            noise = deviation * torch.randn(trained[key].shape, generator=generator)
            near = "magnitude" in key or "ia3_l" in key
            trained[key].copy_(trained[key] * (1 + noise) if near else noise)
    return trained


def loss_of(model, docs):
    total = sum(int((labels[1:] != -100).sum()) for _, labels in docs)
    logits = [model(input_ids=ids[None], use_cache=False).logits[0] for ids, _ in docs]
    return sum(loss_sum(out, labels) for out, (_, labels) in zip(logits, docs)) / total, logits


def rounding(model, trained, docs):
    """The largest difference between the gradients and those with weights that differ by a rounding error, relative to the
    largest number of each tensor."""
    found = {k: p.grad.clone() for k, p in trained.items()}
    weights = {k: v.clone() for k, v in model.state_dict().items()}
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1 + 1e-7 * torch.randn(parameter.shape, generator=generator))
            parameter.grad = None
    loss_of(model, docs)[0].backward()
    noise = max(float((p.grad - found[k]).abs().max() / found[k].abs().max()) for k, p in trained.items())
    model.load_state_dict(weights)
    for key, parameter in trained.items():
        parameter.grad = found[key]
    return noise


def main():
    for seed, (name, (family, config, deviation)) in enumerate(VARIANTS.items()):
        if sys.argv[1:] and name not in sys.argv[1:]:
            continue
        directory = GOLDENS / "families" / family
        info = json.loads((directory / "golden.json").read_text())
        golden = load_file(directory / "golden.safetensors")
        docs = [(golden[f"input_ids.{i}"], golden[f"labels.{i}"]) for i in range(info["documents"])]
        model = get_peft_model(load(directory), config).eval()
        trained = fill(model, deviation, 200 + seed)
        outside = [k for k in trained if "altup" in k or "per_layer_model" in k]
        assert outside, "linears outside of the layers have adapters"
        loss, logits = loss_of(model, docs)
        loss.backward()
        noise = rounding(model, trained, docs)
        assert noise < 3e-5, f"{name}: rounding alone changes a gradient by {noise:.1e}"
        tensors = {f"logits.{i}": out.detach() for i, out in enumerate(logits)} | {"loss": loss.detach().reshape(1)}
        # The names of the file.
        own = {k: k.replace("magnitude_vector.default.weight", "magnitude_vector").replace(".default", "") for k in trained}
        tensors |= {f"grad.{own[k]}": p.grad.clone() for k, p in trained.items()}
        assert all(trained[k].grad.abs().max() > 0 for k in outside)
        target = GOLDENS / "outside_adapters" / name
        shutil.rmtree(target, ignore_errors=True)
        with tempfile.TemporaryDirectory() as saved:
            model.peft_config["default"].base_model_name_or_path = family
            model.save_pretrained(saved)
            target.mkdir(parents=True)
            for file in ["adapter_config.json", "adapter_model.safetensors"]:
                shutil.copy(f"{saved}/{file}", target / file)
        # PEFT opens its own file with the same result.
        again = PeftModel.from_pretrained(load(directory), target).eval()
        assert torch.equal(again(input_ids=docs[0][0][None], use_cache=False).logits[0], logits[0].detach())
        before = load(directory)(input_ids=docs[0][0][None], use_cache=False).logits[0]
        assert not torch.allclose(before, logits[0], atol=1e-2), "the adapter must matter"
        merged = again.merge_and_unload()
        out = [merged(input_ids=ids[None], use_cache=False).logits[0].detach() for ids, _ in docs]
        apart = max(float((a - b.detach()).abs().max()) for a, b in zip(out, logits))
        save_file({k: v.contiguous() for k, v in tensors.items()}, target / "golden.safetensors")
        write_json(target / "golden.json", dict(model=family, versions=VERSIONS))
        print(name, float(loss.detach()), len(trained), len(outside), f"merged {apart:.1e}, rounding {noise:.1e}")


if __name__ == "__main__":
    main()
