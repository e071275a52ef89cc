"""Plain reference code that no library has: Lion, and the masks of the ratio partition.

The permutation of scattered masks is the program's own (`base::rng::Permutation`): a Feistel network keyed by
SplitMix64 over (seed, stream, name). It is written out here so that both take the same elements.
"""

import torch
import transformers

WORD = (1 << 64) - 1
MASK_STREAM = 8
WHOLE = 100


class Lion(torch.optim.Optimizer):
    """Chen et al. 2023 (arXiv 2302.06675), algorithm 2."""

    def __init__(self, params, lr, betas, weight_decay=0.0):
        super().__init__(params, dict(lr=lr, betas=betas, weight_decay=weight_decay))

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            b1, b2 = group["betas"]
            for p in group["params"]:
                state = self.state[p]
                momentum = state.setdefault("exp_avg", torch.zeros_like(p))
                update = (b1 * momentum + (1 - b1) * p.grad).sign()
                p.mul_(1 - group["lr"] * group["weight_decay"]).sub_(group["lr"] * update)
                momentum.mul_(b2).add_((1 - b2) * p.grad)


def adafactor(params, lr):
    """The learning rate as it is: nothing relative to the weights or the step."""
    return transformers.optimization.Adafactor(params, lr=lr, scale_parameter=False, relative_step=False, warmup_init=False)


def mix(z):
    z = (z + 0x9E3779B97F4A7C15) & WORD
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & WORD
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & WORD
    return z ^ (z >> 31)


def fnv(name):
    h = 0xCBF29CE484222325
    for byte in name.encode():
        h = ((h ^ byte) * 0x0100000001B3) & WORD
    return h


def permutation(seed, name, n):
    """Where 0..n-1 go."""
    key = mix(mix(mix(seed) ^ MASK_STREAM) ^ mix(fnv(name)))
    bits = lambda index: mix(mix(key ^ (index * 0xD1342543DE82EF95 & WORD)))
    half = max(((n - 1).bit_length() + 1) // 2, 1)
    mask, places = (1 << half) - 1, []
    for i in range(n):
        x = i
        while True:
            left, right = x >> half, x & mask
            for turn in range(4):
                left, right = right, left ^ (bits(right << 2 | turn) & mask)
            x = left << half | right
            if x < n:
                break
        places.append(x)
    assert sorted(places) == list(range(n))
    return places


def window_indices(name, n, ratio, window, seed, shape):
    """Indices into the flat parameter that are active in window number `window`."""
    length = n if n < WHOLE else max(n * round(ratio * 1e6) // 10**6, 1)
    if length == n:
        return torch.arange(n)
    numbers = [(window * length + i) % n for i in range(length)]
    if shape == "scattered":
        places = permutation(seed, name, n)
        numbers = [places[i] for i in numbers]
    return torch.tensor(numbers)
