"""Writes goldens/smoothing.json: loss and gradients with label smoothing, by torch.nn.functional.cross_entropy; those of
LabelSmoother of transformers must agree.

Usage: python tests/parity/make_smoothing.py   (torch 2.13, transformers 5.23)
"""

import json
from pathlib import Path

import torch
from transformers.trainer_pt_utils import LabelSmoother

N, D, V = 7, 8, 45
# Smoothing, soft cap of the logits (0: none), divisor of the loss.
CASES = [(0.1, 0.0, 5), (0.1, 3.0, 5), (0.6, 0.0, 11)]


def run(hidden, head, labels, smoothing, cap, items):
    hidden, head = hidden.clone().requires_grad_(), head.clone().requires_grad_()
    logits = hidden @ head.T
    if cap:
        logits = cap * torch.tanh(logits / cap)
    output = {"logits": logits}
    loss = LabelSmoother(epsilon=smoothing)(output, labels, num_items_in_batch=items)
    plain = torch.nn.functional.cross_entropy(logits, labels, label_smoothing=smoothing, reduction="sum") / items
    # LabelSmoother sums the log-probabilities in f32.
    assert torch.allclose(loss, plain, rtol=1e-7, atol=0), (loss, plain)
    theirs = torch.autograd.grad(loss, [hidden, head], retain_graph=True)
    plain.backward()
    for a, b in zip(theirs, [hidden.grad, head.grad]):
        assert torch.allclose(a, b, rtol=0, atol=1e-7 * b.abs().max().item())
    return {
        "smoothing": smoothing,
        "cap": cap,
        "items": items,
        "loss": plain.item(),
        "hidden_gradient": hidden.grad.flatten().tolist(),
        "head_gradient": head.grad.flatten().tolist(),
    }


if __name__ == "__main__":
    torch.manual_seed(3)
    # Values of f32, computed in f64.
    hidden = torch.randn(N, D).double()
    head = torch.randn(V, D).double()
    labels = torch.tensor([3, -100, 44, 0, 17, -100, 29])
    golden = {
        "sizes": [N, D, V],
        "hidden": hidden.flatten().tolist(),
        "head": head.flatten().tolist(),
        "labels": labels.tolist(),
        "cases": [run(hidden, head, labels, *case) for case in CASES],
    }
    path = Path(__file__).parent / "goldens" / "smoothing.json"
    path.write_text(json.dumps(golden) + "\n")
