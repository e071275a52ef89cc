"""Errors of products with 8-bit operands, for docs/quantization.md: of y = x·Wᵀ and dx = dy·W in each linear, and of the
losses of LoRA. Everything is simulated in f32 with PyTorch; codes and scales as in crates/ft-ops/src/cuda/eight_bit.rs.

Usage: python tests/parity/measure_eight_bit.py
"""

import json
import math
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

ROOT = Path(__file__).resolve().parents[2]
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
# Products: the types of W and x, and of dy. `w8`: W in int8, dequantized; `bf16`: W as it is.
KINDS = {
    "w8": (None, None),
    "int8": ("int8", "int8"),
    "fp8": (E4M3, E4M3),
    "fp8, dy in e5m2": (E4M3, E5M2),
}


def codes(x, kind):
    """Codes as numbers, and the scale of each row."""
    most = 127.0 if kind == "int8" else torch.finfo(kind).max
    scale = x.abs().amax(-1, keepdim=True) / most
    scaled = torch.where(scale > 0, x / scale, torch.zeros_like(x))
    return (torch.round(scaled) if kind == "int8" else scaled.to(kind).float()), scale


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w, kind):
        ctx.kind, ctx.w = KINDS[kind], w
        code, scale = codes(w, "int8")
        ctx.code, ctx.scale = code, scale
        forward, _ = ctx.kind
        if forward is None:
            return x @ (code * scale).bfloat16().float().T
        a, row = codes(x, forward)
        b = code if forward == "int8" else code.to(forward).float()
        return a @ b.T * row * scale.T

    @staticmethod
    def backward(ctx, dy):
        forward, backward = ctx.kind
        if forward is None:
            return dy @ (ctx.code * ctx.scale).bfloat16().float(), None, None
        b = ctx.code if forward == "int8" else ctx.code.to(forward).float()
        a, row = codes(dy * ctx.scale.T, backward)
        return a @ b * row, None, None


def error(got, want):
    return ((got - want).norm() / want.norm()).item()


def measured(x, w, dy):
    """Errors of y and dx for each kind."""
    found = {}
    for kind in KINDS:
        a = x.clone().requires_grad_()
        y = Product.apply(a, w, kind)
        y.backward(dy)
        found[kind] = (error(y.detach(), x @ w.T), error(a.grad, dy @ w))
    return found


def row(name, found):
    cells = [f"{100 * value:.2f}" for kind in KINDS for value in found[kind]]
    print(f"| {name} | " + " | ".join(cells) + " |")


def batches(tokenizer, count, length=256):
    rows = [json.loads(line) for line in open(ROOT / "assets/world/train.jsonl")]
    texts = [tokenizer.apply_chat_template(r["messages"], tokenize=False) for r in rows]
    ids = tokenizer("".join(texts), return_tensors="pt", add_special_tokens=False)["input_ids"][0]
    return [ids[i * length : (i + 1) * length].reshape(1, -1) for i in range(count)]


class Linear(torch.nn.Module):
    """A frozen linear with a LoRA pair of rank 8; `kind` selects the products with W."""

    kind = "bf16"

    def __init__(self, inner, seed):
        super().__init__()
        self.w, self.seen = inner.weight.detach(), None
        random = torch.Generator().manual_seed(seed)
        a = torch.rand(8, self.w.shape[1], generator=random) * 2 - 1
        self.a = torch.nn.Parameter(a / math.sqrt(self.w.shape[1]))
        self.b = torch.nn.Parameter(torch.zeros(self.w.shape[0], 8))

    def forward(self, x):
        flat = x.reshape(-1, x.shape[-1])
        y = flat @ self.w.T if Linear.kind == "bf16" else Product.apply(flat, self.w, Linear.kind)
        y = y + 2.0 * (flat @ self.a.T) @ self.b.T
        if Linear.kind == "bf16":
            y.register_hook(lambda dy: setattr(self, "seen", (flat.detach(), dy.detach())))
        return y.reshape(*x.shape[:-1], -1)


def model():
    torch.manual_seed(0)
    net = AutoModelForCausalLM.from_pretrained(ROOT / "assets/tiny", dtype=torch.float32)
    net.requires_grad_(False)
    linears = {}
    for layer, block in enumerate(net.model.layers):
        for part in (block.self_attn, block.mlp):
            for name, inner in list(part.named_children()):
                if isinstance(inner, torch.nn.Linear):
                    linears[f"{layer}.{name}"] = Linear(inner, len(linears))
                    setattr(part, name, linears[f"{layer}.{name}"])
    return net, linears


def losses(kind, data):
    net, linears = model()
    Linear.kind = kind
    params = [p for l in linears.values() for p in (l.a, l.b)]
    adam = torch.optim.AdamW(params, lr=2e-3, weight_decay=0.0)
    found = []
    for ids in data:
        loss = net(input_ids=ids, labels=ids).loss
        adam.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(params, 1.0)
        adam.step()
        found.append(loss.item())
    return found, linears


def main():
    torch.set_num_threads(1)
    torch.manual_seed(0)
    print("| x, W, dy | " + " | ".join(f"{kind} y | {kind} dx" for kind in KINDS) + " |")
    n, i, o = 256, 1024, 1024
    x, w, dy = torch.randn(n, i), 0.02 * torch.randn(o, i), torch.randn(n, o)
    row("normal", measured(x, w, dy))
    outliers = x.clone()
    outliers[:, torch.randperm(i)[:6]] *= 40
    row("x with 6 columns 40 times as large", measured(outliers, w, dy))
    row("dy with a log-normal factor, sigma 1.5", measured(x, w, dy * torch.exp(1.5 * torch.randn(n, o))))
    row("W with rows of a log-normal size, sigma 1", measured(x, w * torch.exp(torch.randn(o, 1)), dy))
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "assets/tiny")
    data = batches(tokenizer, 60)
    exact, linears = losses("bf16", data)
    parts = {}
    for name, linear in linears.items():
        parts.setdefault(name.split(".")[1], []).append(measured(linear.seen[0], linear.w, linear.seen[1]))
    for name, found in parts.items():
        mean = {k: tuple(sum(f[k][j] for f in found) / len(found) for j in (0, 1)) for k in KINDS}
        row(f"assets/tiny, {name}", mean)
    for kind in KINDS:
        found, _ = losses(kind, data)
        apart = [abs(a - b) / a for a, b in zip(exact, found)]
        print(f"{kind}: losses {found[0]:.4f} {found[29]:.4f} {found[59]:.4f}, exact {exact[0]:.4f} {exact[29]:.4f} "
              f"{exact[59]:.4f}; apart at most {100 * max(apart):.2f} %, in the mean {100 * sum(apart) / len(apart):.2f} %")


if __name__ == "__main__":
    main()
