#!/usr/bin/env python3
"""Predicts the efficiency of training on many GPUs: the table "Simulated" of docs/distributed.md. No measurement is in it.

Efficiency is the time of a step on one GPU divided by the time on W GPUs with W times the tokens. A machine has 8 GPUs.
Assumptions:
- a GPU computes at 156 TFLOP/s (half of the bf16 peak of an A100), all activations recomputed;
- each rank computes one micro-batch of 8,192 tokens in documents of 2,048 in a step;
- a rank sends 10 GB/s inside a machine, and no more to others: numbers go through host memory, so each crosses PCIe at least
  twice (PCIe 4: 25 GB/s); the network cards of a machine are shared by its ranks;
- a rank sends every part to every other rank itself, as ft does: nothing is added up inside a machine first;
- a call takes 5 microseconds for each other rank inside a machine, and 15 for each other machine;
- communication overlaps with computation, except a tenth of the shorter of both, the last gradients and the new values;
- the step ends with the slowest rank: computing times have a standard deviation of 1 %, and the slowest of W normal draws is
  about sqrt(2 ln W) deviations late. Nothing else slows down: no collision in switches, no lost machine.
"""

from dataclasses import dataclass
from math import log, sqrt

NODE, TOKENS, DOCUMENT = 8, 8192, 2048
RATE, INSIDE = 156e12, 10e9
CALL_INSIDE, CALL_BETWEEN = 5e-6, 15e-6
DEVIATION = 0.01


@dataclass
class Model:
    name: str
    layers: int
    hidden: int
    intermediate: int
    heads: int
    key_heads: int
    head: int
    vocab: int

    @property
    def layer(self):
        """Parameters of a layer."""
        attention = 2 * self.hidden * self.heads * self.head + 2 * self.hidden * self.key_heads * self.head
        return attention + 3 * self.hidden * self.intermediate

    @property
    def embedding(self):
        return self.vocab * self.hidden

    def trained(self, method, rank=16):
        if method == "block":
            return self.layer
        if method == "full":
            return self.layers * self.layer + 2 * self.embedding
        d, i, q, k = self.hidden, self.intermediate, self.heads * self.head, self.key_heads * self.head
        linears = [(d, q), (d, k), (d, k), (q, d), (d, i), (d, i), (i, d)]
        return self.layers * rank * sum(a + b for a, b in linears)

    def operations(self, method):
        """Operations for a token of a step, with causal attention. A block is a layer, in the middle on average."""
        attention = 2 * DOCUMENT * self.heads * self.head
        forward = 2 * self.layer + attention
        above = (self.layers + 1) / 2 if method == "block" else self.layers
        gradients = {"block": 2 * self.layer, "lora": 0, "full": 2 * self.layers * self.layer}[method]
        head = (6 if method == "full" else 4) * self.embedding
        return forward * (self.layers + above) + above * (2 * self.layer + 2 * attention) + gradients + head


MODELS = [
    Model("8B", 32, 4096, 14336, 32, 8, 128, 128256),
    Model("70B", 80, 8192, 28672, 64, 8, 128, 128256),
]


def others(ranks):
    return (ranks - 1) / ranks


def efficiency(model, ranks, method, weights, card):
    """`card`: bytes a second of all network cards of a machine."""
    inside, nodes = min(NODE, ranks), max(1, ranks // NODE)
    compute = model.operations(method) * TOKENS / RATE
    late = compute * DEVIATION * sqrt(2 * log(ranks))
    trained = model.trained(method)
    passes = 1 + (0.5 * (model.layers + 1) / model.layers if method == "block" else 1.0)
    collected, calls = 2 * model.layers * model.layer * passes, model.layers * passes
    latency = (inside - 1) * CALL_INSIDE + (nodes - 1) * CALL_BETWEEN

    def sent(length):
        """Seconds in which each rank sends its part of a list to every other rank, or the part of every other rank to it."""
        return length * (inside - 1) / ranks / INSIDE + length * (ranks - inside) / ranks / min(INSIDE, card / inside)

    # Gradients are f32; new values are bf16, of adapters f32.
    value = 4 if method == "lora" else 2
    gradients = sent(4 * trained) + latency
    if weights == "replicated":
        overlapped, values = 0.0, sent(value * trained) + latency
    elif weights == "sharded-in-node":
        overlapped = collected * others(inside) / INSIDE + calls * (inside - 1) * CALL_INSIDE
        # To the peer on each other machine.
        values = value * trained / ranks * (nodes - 1) / min(INSIDE, card / inside)
    else:
        overlapped, values = sent(collected) + calls * latency, 0.0
    if method == "full":
        # They leave layer by layer during the backward pass; those of the last layer come after it.
        overlapped, gradients = overlapped + gradients, gradients / model.layers
    step = max(compute, overlapped) + 0.1 * min(compute, overlapped) + late + gradients + values
    return compute / step


def gigabytes(model, ranks, method, weights):
    """GB that a rank of one machine sends in a step."""
    trained = model.trained(method)
    passes = 1 + (0.5 * (model.layers + 1) / model.layers if method == "block" else 1.0)
    collected = 0 if weights == "replicated" else 2 * model.layers * model.layer * passes
    values = (4 if method == "lora" else 2) * trained if weights == "replicated" else 0
    return (4 * trained + values + collected) * others(ranks) / 1e9


def main():
    sizes = [8, 64, 256, 1024]
    for name, card in [("one card of 100 Gb/s (11 GB/s)", 11e9), ("eight cards of 200 Gb/s (180 GB/s)", 180e9)]:
        print(f"\nEach machine has {name}:\n\n| model, method | `distributed.weights` | sent by a rank of 8 | {' | '.join(f'{w} GPUs' for w in sizes)} |")
        print("|---|---|---|" + "---|" * len(sizes))
        for model in MODELS:
            for method in ["block", "lora", "full"]:
                for weights in ["replicated", "sharded-in-node", "sharded"]:
                    # 140 GB of weights are on no GPU as a whole.
                    if weights == "replicated" and (model.name == "70B" or method == "full"):
                        continue
                    row = [f"{efficiency(model, w, method, weights, card):.2f}" for w in sizes]
                    sent = f"{gigabytes(model, NODE, method, weights):.2f} GB"
                    print(f"| {model.name}, {method} | {weights} | {sent} | {' | '.join(row)} |")


if __name__ == "__main__":
    main()
