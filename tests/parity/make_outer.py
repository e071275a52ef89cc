"""Replicas that train alone and are averaged by an outer optimizer, as a plain PyTorch loop: losses and change of each weight.

    python make_outer.py

Writes goldens/training/outer.json. Each of W replicas takes every W-th micro-batch of a window and makes its own steps
(loss: sum over its trained tokens / their number; clipping; AdamW whose moments stay with it). After every H steps, and
after the last one, the outer gradient is the mean over the replicas of (weights at the last average - weights), and
`torch.optim.SGD` steps on it (DiLoCo, arXiv 2311.08105, algorithm 1). FedAvg is the outer rate 1 without momentum, FedProx
has a proximal term besides. The loss of a step is that of all trained tokens of the window, each at its replica's weights.
"""

import copy

import torch

from common import GOLDENS, VERSIONS, Encoder, read_rows, trained_tokens, write_json
from make_training import TRAINING, learning_rates, load, micro_loss, optimizer_for, tokenizer_of

STEPS, ROWS = 8, 2
RECIPE = {"tune.method": "full", "optimizer.name": "adamw", "optimizer.weight_decay": 0.01, "optimizer.learning_rate": 5e-3,
          "schedule.name": "cosine", "schedule.warmup_steps": 2}
# Name: replicas, micro-batches of a window, keys.
RUNS = {
    "diloco": (2, 4, {"sync_every": 3}),
    "diloco_three": (3, 3, {"sync_every": 4, "outer_learning_rate": 0.5, "outer_momentum": 0.8, "outer_nesterov": False}),
    "fedavg": (2, 2, {"sync_every": 2, "outer_learning_rate": 1.0, "outer_momentum": 0.0}),
    "fedprox": (2, 2, {"sync_every": 4, "outer_learning_rate": 1.0, "outer_momentum": 0.0, "proximal": 10.0}),
}


def train(replicas, micros, keys, dtype):
    encoder = Encoder(tokenizer_of("llama"))
    rows = [encoder.row(row) for row in read_rows(GOLDENS / "data" / "messages.jsonl")]
    whole = load("llama", dtype)
    start = {n: p.detach().clone() for n, p in whole.named_parameters()}
    models = [copy.deepcopy(whole) for _ in range(replicas)]
    inner = [optimizer_for(list(model.named_parameters()), RECIPE) for model in models]
    momentum = keys.get("outer_momentum", 0.9)
    outer = torch.optim.SGD(whole.parameters(), lr=keys.get("outer_learning_rate", 0.7), momentum=momentum,
                            nesterov=momentum > 0 and keys.get("outer_nesterov", True))
    rates, place, losses = learning_rates(RECIPE, STEPS), 0, []
    for step in range(1, STEPS + 1):
        window = [[rows[(place + ROWS * m + i) % len(rows)] for i in range(ROWS)] for m in range(micros)]
        place += micros * ROWS
        tokens = lambda batches: sum(trained_tokens(labels) for batch in batches for _, labels in batch)
        total = 0.0
        for rank, (model, optimizer) in enumerate(zip(models, inner)):
            own = window[rank::replicas]
            optimizer.zero_grad()
            for batch in own:
                loss = micro_loss(model, batch, tokens(own))
                loss.backward()
                total += loss.item() * tokens(own)
            with torch.no_grad():
                for p, at in zip(model.parameters(), whole.parameters()):
                    p.grad.add_(p - at, alpha=keys.get("proximal", 0.0))
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for group in optimizer.param_groups:
                group["lr"] = rates[step - 1]
            optimizer.step()
        losses.append(total / tokens(window))
        if step % keys["sync_every"] == 0 or step == STEPS:
            with torch.no_grad():
                for at, *all in zip(whole.parameters(), *(model.parameters() for model in models)):
                    at.grad = torch.stack([at - p for p in all]).mean(0)
                outer.step()
                for model in models:
                    for p, at in zip(model.parameters(), whole.parameters()):
                        p.copy_(at)
    change = {n: float((p.detach().double() - start[n].double()).norm()) for n, p in whole.named_parameters()}
    return losses, change


def main():
    runs = {}
    for name, (replicas, micros, keys) in RUNS.items():
        losses, change = train(replicas, micros, keys, torch.float32)
        exact, changed = train(replicas, micros, keys, torch.float64)
        print(name, " ".join(f"{x:.4f}" for x in losses), "| noise", max(abs(a / b - 1) for a, b in zip(losses, exact)),
              max(abs(change[n] / changed[n] - 1) for n in change))
        runs[name] = dict(replicas=replicas, micro_batches=micros, keys=keys, losses=losses, change_norms=change)
    write_json(TRAINING / "outer.json", dict(recipe=RECIPE, steps=STEPS, rows=ROWS, runs=runs, versions=VERSIONS))


if __name__ == "__main__":
    main()
