"""LoRA by PEFT on the parameters of experts (`target_parameters`): logits, loss, and the gradient of every adapter tensor.

    python make_expert_adapters.py

Reads the models of goldens/families, writes goldens/expert_adapters/VARIANT/{adapter_config.json, adapter_model.safetensors,
golden.safetensors}; README.md says what is in it. The adapter is as PEFT saves it, with random values in A and B.
"""

import json
import shutil
import tempfile

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file

from common import GOLDENS, loss_sum
from make_families import in_files, load

BOTH = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
VARIANTS = {
    "qwen3_moe": dict(r=2, target_modules=["q_proj", "o_proj"], target_parameters=BOTH),
    "gpt_oss_plain": dict(r=2, target_modules=["v_proj"], target_parameters=BOTH),
    "mixtral": dict(r=3, target_modules=["k_proj"], target_parameters=["mlp.experts.down_proj"], use_rslora=True),
    "olmoe": dict(r=4, target_modules=[], target_parameters=["layers.1.mlp.experts.down_proj", "mlp.experts.gate_up_proj"],
                  rank_pattern={"gate_up_proj": 1}, alpha_pattern={r"layers\.0\.mlp\.experts\.gate_up_proj": 3}),
    "granitemoe": dict(r=2, target_modules=["q_proj"], target_parameters=["experts.gate_up_proj", "experts.down_proj"]),
    "qwen3_vl_moe": dict(r=2, target_modules=r"model\.language_model\..*q_proj", target_parameters=BOTH),
}


def main():
    for seed, (name, settings) in enumerate(VARIANTS.items()):
        directory = GOLDENS / "families" / name
        info = json.loads((directory / "golden.json").read_text())
        golden = load_file(directory / "golden.safetensors")
        docs = [(golden[f"input_ids.{i}"], golden[f"labels.{i}"]) for i in range(info["documents"])]
        kind = json.loads((directory / "config.json").read_text())["model_type"]
        model = get_peft_model(load(directory), LoraConfig(lora_alpha=5, task_type="CAUSAL_LM", **settings))
        generator = torch.Generator().manual_seed(100 + seed)
        trained = {k: p for k, p in model.named_parameters() if p.requires_grad}
        assert any("experts" in k for k in trained)
        with torch.no_grad():
            for key in sorted(trained):
                trained[key].copy_(0.3 * torch.randn(trained[key].shape, generator=generator))
        total = sum(int((labels[1:] != -100).sum()) for _, labels in docs)
        logits = [model(input_ids=ids[None], use_cache=False).logits[0] for ids, _ in docs]
        loss = sum(loss_sum(out, labels) for out, (_, labels) in zip(logits, docs)) / total
        loss.backward()
        tensors = {f"logits.{i}": out.detach() for i, out in enumerate(logits)} | {"loss": loss.detach().reshape(1)}
        tensors |= {f"grad.{k.replace('.default', '')}": p.grad.clone() for k, p in trained.items()}
        target = GOLDENS / "expert_adapters" / name
        shutil.rmtree(target, ignore_errors=True)
        with tempfile.TemporaryDirectory() as saved:
            model.peft_config["default"].base_model_name_or_path = directory.name
            model.save_pretrained(saved)
            target.mkdir(parents=True)
            for file in ["adapter_config.json", "adapter_model.safetensors"]:
                shutil.copy(f"{saved}/{file}", target / file)
        saved = set(load_file(target / "adapter_model.safetensors"))
        assert saved == {k.replace(".default", "") for k in trained}, "PEFT saves what it trains"
        # PEFT opens its own file with the same result.
        again = PeftModel.from_pretrained(load(directory), target).eval()
        assert torch.equal(again(input_ids=docs[0][0][None], use_cache=False).logits[0], logits[0].detach())
        before = load(directory)
        changed = {k: v for k, v in again.merge_and_unload().state_dict().items() if not torch.equal(v, before.state_dict()[k])}
        assert any("experts" in k for k in changed)
        tensors |= {f"merged.{k}": v for k, v in in_files(changed, kind).items()}
        assert not torch.allclose(before(input_ids=docs[0][0][None], use_cache=False).logits[0], logits[0], atol=1e-2)
        save_file({k: v.contiguous() for k, v in tensors.items()}, target / "golden.safetensors")
        print(name, float(loss.detach()), sorted(saved)[:3], len(changed))


if __name__ == "__main__":
    main()
