#!/usr/bin/env python3
"""Measures the ceilings of a GPU with PyTorch: matrix products, attention, copies. Prints one line of JSON.

TFLOP/s count useful operations: a causal attention counts half of the products.
"""
import json
import statistics

import torch
import torch.nn.functional as F

DEVICE = torch.device("cuda")


def seconds(work, repeats=20):
    for _ in range(3):
        work()
    times = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        work()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return statistics.median(times)


def random(*shape):
    return torch.randn(*shape, device=DEVICE, dtype=torch.bfloat16)


result = {"torch": torch.__version__, "gpu": torch.cuda.get_device_name()}
for m, n, k in [(2048, 4096, 4096), (2048, 14336, 4096), (2048, 4096, 14336), (16384, 896, 896), (16384, 4864, 896),
                (8192, 8192, 8192)]:
    x, w = random(m, k), random(n, k)
    result[f"product {m}x{n}x{k} TFLOP/s"] = round(2 * m * n * k / seconds(lambda: x @ w.T) / 1e12, 1)
for tokens, heads, size in [(2048, 32, 128), (8192, 32, 128), (2048, 14, 64)]:
    q, k, v = (random(1, heads, tokens, size).requires_grad_() for _ in range(3))
    g = random(1, heads, tokens, size)
    flops = 4 * heads * tokens * tokens * size / 2
    forward = seconds(lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True))
    both = seconds(lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True).backward(g))
    result[f"attention {heads}x{tokens}x{size} forward TFLOP/s"] = round(flops / forward / 1e12, 1)
    result[f"attention {heads}x{tokens}x{size} backward TFLOP/s"] = round(2.5 * flops / (both - forward) / 1e12, 1)
a, b = torch.empty(1 << 30, dtype=torch.uint8, device=DEVICE), torch.empty(1 << 30, dtype=torch.uint8, device=DEVICE)
result["copy on the device GB/s (read + written)"] = round(2 * (1 << 30) / seconds(lambda: b.copy_(a)) / 1e9)
host = torch.empty(1 << 28, dtype=torch.uint8, pin_memory=True)
result["pinned host to device GB/s"] = round((1 << 28) / seconds(lambda: a[: 1 << 28].copy_(host, non_blocking=True)) / 1e9, 1)
result["device to pinned host GB/s"] = round((1 << 28) / seconds(lambda: host.copy_(a[: 1 << 28], non_blocking=True)) / 1e9, 1)
tiny = torch.zeros(1, device=DEVICE)
torch.cuda.synchronize()
result["launch us"] = round(seconds(lambda: [tiny.add_(1) for _ in range(1000)]) * 1e3, 2)
print(json.dumps(result))
