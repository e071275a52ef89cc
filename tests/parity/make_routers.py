"""The balance loss and the z-loss of routers, with the gradient of every parameter.

    python make_routers.py

Reads the models of goldens/families, writes goldens/routers/VARIANT.safetensors; README.md says what is in it.
One document: the loss of the model itself with `output_router_logits=True`. All documents of the golden: the balance loss of
transformers over the router logits of all of them, as one batch without padding has. The z-loss is the mean of the squared
logsumexp of the same logits. Letters: T tokens of a document, E experts.
"""

import importlib
import json

import torch
from safetensors.torch import load_file, save_file

from common import GOLDENS, loss_sum
from make_families import in_files, load

VARIANTS = ["qwen3_moe", "qwen3_moe_sparse_step", "qwen2_moe", "olmoe", "mixtral", "qwen3_next_experts"]
BALANCE, Z = 0.7, 0.3


def balance_loss(model, logits):
    """`logits`: [T, E] of each layer with experts."""
    config = model.config
    kind = config.model_type
    module = importlib.import_module(f"transformers.models.{kind}.modeling_{kind}")
    experts = config.num_local_experts if kind == "mixtral" else config.num_experts
    return module.load_balancing_loss_func(tuple(logits), experts, config.num_experts_per_tok)


def main():
    for name in VARIANTS:
        directory = GOLDENS / "families" / name
        info = json.loads((directory / "golden.json").read_text())
        golden = load_file(directory / "golden.safetensors")
        docs = [(golden[f"input_ids.{i}"], golden[f"labels.{i}"]) for i in range(info["documents"])]
        model = load(directory, router_aux_loss_coef=BALANCE)
        assert model.router_aux_loss_coef == BALANCE
        # The loss of the model itself.
        ids, labels = docs[0]
        labels = labels.clone()
        labels[0] = -100
        out = model(ids[None], labels=labels[None], output_router_logits=True, use_cache=False)
        model.zero_grad(set_to_none=True)
        out.loss.backward()
        # A layer without experts has no logits; some models name it with a None.
        routed = [each for each in out.router_logits if each is not None]
        assert torch.allclose(out.aux_loss, balance_loss(model, routed))
        tensors = {"one.loss": out.loss.detach().reshape(1), "one.aux_loss": out.aux_loss.detach().reshape(1)}
        grads = {k: p.grad.clone() for k, p in model.named_parameters()}
        tensors |= {f"one.grad.{k}": g for k, g in in_files(grads, info_type(directory)).items()}
        # All documents, with both losses.
        model.zero_grad(set_to_none=True)
        trained = sum(int((each[1:] != -100).sum()) for _, each in docs)
        outs = [model(each[None], output_router_logits=True, use_cache=False) for each, _ in docs]
        loss = sum(loss_sum(o.logits[0], each) for o, (_, each) in zip(outs, docs)) / trained
        by_layer = [torch.cat(layer) for layer in zip(*[[r for r in o.router_logits if r is not None] for o in outs])]
        aux = balance_loss(model, by_layer)
        z = torch.cat(by_layer).float().logsumexp(-1).square().mean()
        (loss + BALANCE * aux + Z * z).backward()
        grads = {k: p.grad.clone() for k, p in model.named_parameters()}
        tensors |= {"all.loss": loss.detach().reshape(1), "all.aux_loss": aux.detach().reshape(1), "all.z_loss": z.detach().reshape(1)}
        tensors |= {f"all.grad.{k}": g for k, g in in_files(grads, info_type(directory)).items()}
        plain = golden["grad." + next(k for k in in_files(grads, info_type(directory)) if k.endswith("gate.weight") and "shared" not in k)]
        key = next(k for k in tensors if k.startswith("all.grad.") and k.endswith("gate.weight") and "shared" not in k)
        assert (tensors[key] - plain).abs().max() > 1e-2 * plain.abs().max(), "the losses must matter"
        target = GOLDENS / "routers" / f"{name}.safetensors"
        target.parent.mkdir(parents=True, exist_ok=True)
        save_file({k: v.contiguous() for k, v in tensors.items()}, target)
        print(name, {k: float(v) for k, v in tensors.items() if "loss" in k})


def info_type(directory):
    return json.loads((directory / "config.json").read_text())["model_type"]


if __name__ == "__main__":
    main()
