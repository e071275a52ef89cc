"""Writes goldens/loss_scale.json: what torch.amp.GradScaler decides in sequences of steps with and without overflow.

Usage: python tests/parity/make_loss_scale.py   (torch 2.13)
"""

import json
from pathlib import Path

import torch

# Initial scale, growth interval, and the steps: "." is finite, "i" has an infinite gradient, "n" a NaN.
CASES = [
    (65536.0, 2000, "ii...n..i"),
    (65536.0, 3, ".........i...i.i......"),
    (1.5, 1, "...n.i....."),
    (2.0**127, 2, "....i......"),
    (2.0**-10, 4, "iiiii........i"),
]


def run(initial, interval, steps):
    weight = torch.nn.Parameter(torch.zeros(3))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=initial, growth_interval=interval)
    rows = []
    for kind in steps:
        before = weight.detach().clone()
        weight.grad = None
        # The gradient is the factor times the scale: 1e-30 is finite at every scale here.
        factor = {".": 1e-30, "i": float("inf"), "n": float("nan")}[kind]
        scaler.scale((weight * factor).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        state = scaler.state_dict()
        rows.append(
            {
                "overflow": kind != ".",
                "stepped": not torch.equal(before, weight.detach()),
                "scale": state["scale"],
                "growth_tracker": state["_growth_tracker"],
            }
        )
    return {"initial": initial, "growth_interval": interval, "steps": rows}


if __name__ == "__main__":
    path = Path(__file__).parent / "goldens" / "loss_scale.json"
    cases = [run(*case) for case in CASES]
    path.write_text("[\n" + ",\n".join(json.dumps(case) for case in cases) + "\n]\n")
