"""Learning-rate tables from transformers and ten steps of one tensor from torch.optim.

    python make_tables.py

goldens/tables/schedules.json   cases: name, warmup_steps, max_steps, decay_ratio, min_lr_ratio, multipliers
                                (multiplier of step k, k from 1, stands at index k-1)
goldens/tables/optimizers.json  cases: rule, options, start, gradients, after each step the weights (and moments)
                                (AdamW and SGD of torch, Adafactor of transformers, Lion of `reference.py`)
"""

import math

import torch
import transformers

from common import GOLDENS, VERSIONS, write_json
from reference import Lion, adafactor

CASES = [
    ("constant", 0, 10, {}), ("constant", 4, 10, {}),
    ("linear", 0, 10, {}), ("linear", 3, 17, {}), ("linear", 1, 1, {}),
    ("cosine", 0, 10, {}), ("cosine", 2, 10, {}), ("cosine", 5, 23, {}), ("cosine", 10, 10, {}),
    ("wsd", 0, 20, dict(decay_ratio=0.25, min_lr_ratio=0.0)),
    ("wsd", 4, 20, dict(decay_ratio=0.5, min_lr_ratio=0.1)),
    ("wsd", 3, 16, dict(decay_ratio=0.25, min_lr_ratio=0.5)),
]


def multipliers(name, warmup, steps, options):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    if name == "constant":
        schedule = transformers.get_constant_schedule_with_warmup(optimizer, warmup)
    elif name == "linear":
        schedule = transformers.get_linear_schedule_with_warmup(optimizer, warmup, steps)
    elif name == "cosine":
        schedule = transformers.get_cosine_schedule_with_warmup(optimizer, warmup, steps)
    else:
        schedule = transformers.get_wsd_schedule(optimizer, warmup, math.ceil(options["decay_ratio"] * steps),
                                                 num_training_steps=steps, min_lr_ratio=options["min_lr_ratio"])
    out = []
    for _ in range(steps):
        out.append(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()
    return out


RULES = [
    ("adamw", dict(lr=1e-2, betas=[0.9, 0.999], eps=1e-8, weight_decay=0.0)),
    ("adamw", dict(lr=3e-2, betas=[0.8, 0.95], eps=1e-3, weight_decay=0.1)),
    ("sgd", dict(lr=0.1, momentum=0.0, weight_decay=0.0)),
    ("sgd", dict(lr=0.05, momentum=0.9, weight_decay=0.0)),
    ("sgd", dict(lr=0.05, momentum=0.9, weight_decay=0.1)),
]


# Rules that came later: twenty steps.
LATER = [
    ("lion", dict(lr=1e-2, betas=[0.9, 0.99], weight_decay=0.0)),
    ("lion", dict(lr=1e-2, betas=[0.95, 0.98], weight_decay=0.1)),
    ("adafactor", dict(lr=1e-2, weight_decay=0.0)),
    ("adafactor", dict(lr=3e-2, weight_decay=0.1)),
]


def optimizer(rule, parameter, options):
    if rule == "adafactor":
        return adafactor([dict(params=[parameter], weight_decay=options["weight_decay"])], options["lr"])
    keywords = options if rule == "sgd" else dict(options, betas=tuple(options["betas"]))
    return {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD, "lion": Lion}[rule]([parameter], **keywords)


def steps_of(rule, options, steps=10):
    generator = torch.Generator().manual_seed(7)
    parameter = torch.nn.Parameter(torch.randn(3, 4, generator=generator))
    # Gradients over several orders of magnitude, one of them exactly zero.
    gradients = torch.randn(steps, 3, 4, generator=generator) * 10.0 ** torch.randint(-6, 2, (3, 4), generator=generator)
    gradients[:, 1, 2] = 0.0
    start = parameter.detach().clone()
    stepper = optimizer(rule, parameter, options)
    states = []
    for gradient in gradients:
        parameter.grad = gradient.clone()
        stepper.step()
        state = stepper.state[parameter]
        names = ["exp_avg", "exp_avg_sq", "momentum_buffer", "exp_avg_sq_row", "exp_avg_sq_col"]
        kept = {key: state[key].flatten().tolist() for key in names if state.get(key) is not None}
        states.append(dict(weights=parameter.detach().flatten().tolist(), **kept))
    return dict(rule=rule, options=options, shape=[3, 4], start=start.flatten().tolist(),
                gradients=[g.flatten().tolist() for g in gradients], steps=states)


def main():
    write_json(GOLDENS / "tables" / "schedules.json", dict(versions=VERSIONS, cases=[
        dict(name=n, warmup_steps=w, max_steps=t, **o, multipliers=multipliers(n, w, t, o)) for n, w, t, o in CASES]))
    write_json(GOLDENS / "tables" / "optimizers.json", dict(versions=VERSIONS, cases=[steps_of(r, o) for r, o in RULES] + [steps_of(r, o, 20) for r, o in LATER]))


if __name__ == "__main__":
    main()
