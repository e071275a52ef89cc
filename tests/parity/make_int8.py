"""Eight-bit optimizer states as bitsandbytes codes them, on the CPU.

    python make_int8.py

goldens/tables/int8.json   signed, unsigned: the code tables; block: elements of a block; tensors: values, signed,
                           codes, scales; adamw: options, start, and the weights after some of 20 steps; gradients of
                           step k stand at k - 1. Values, start and gradients are integers / 2^20; long lists are
                           one text of numbers with spaces between
Versions: torch 2.13.0, bitsandbytes as in the file.
"""

import bitsandbytes
import bitsandbytes.functional as functional
import torch

from common import GOLDENS, VERSIONS, write_json

BLOCK = 256
TABLES = {signed: functional.create_dynamic_map(signed=signed) for signed in (True, False)}
N = 600  # two blocks and a part of one


def exact(t):
    """Rounded to multiples of 2^-20."""
    return (t * 2**20).round() / 2**20


def numbers(t):
    return text(int(x) for x in (t.double() * 2**20).round())


def text(values):
    return " ".join(map(repr, values))


def coded(t, signed):
    return functional.quantize_blockwise(t, code=TABLES[signed].clone(), blocksize=BLOCK)


def through(t, signed):
    codes, state = coded(t, signed)
    return functional.dequantize_blockwise(codes, state)


def main():
    generator = torch.Generator().manual_seed(5)
    normal = lambda: torch.randn(N, generator=generator)
    wide = exact(normal() * 10.0 ** torch.randint(-3, 2, (N,), generator=generator))
    tensors = []
    for values, signed in [(wide, True), (exact(normal() ** 2), False)]:
        codes, state = coded(values, signed)
        tensors.append(dict(signed=signed, values=numbers(values), codes=text(codes.tolist()), scales=state.absmax.tolist()))

    options = dict(lr=1e-2, betas=[0.9, 0.99], eps=1e-8)
    start, target = exact(normal()), exact(normal())
    b1, b2 = options["betas"]
    w, m, v = start.clone(), torch.zeros(N), torch.zeros(N)
    gradients, weights = [], {}
    for step in range(1, 21):
        g = exact((w - target) + 0.3 * normal())
        gradients.append(numbers(g))
        # The update uses the moments before they are coded, as bitsandbytes' kernels do.
        m = b1 * through(m, True) + (1 - b1) * g if step > 1 else (1 - b1) * g
        v = b2 * through(v, False) + (1 - b2) * g * g if step > 1 else (1 - b2) * g * g
        w = w - options["lr"] / (1 - b1**step) * (m / ((v / (1 - b2**step)).sqrt() + options["eps"]))
        if step in (1, 5, 10, 20):
            weights[step] = text(w.tolist())
    write_json(GOLDENS / "tables" / "int8.json", dict(
        versions=VERSIONS | {"bitsandbytes": bitsandbytes.__version__}, block=BLOCK, signed=text(TABLES[True].tolist()),
        unsigned=text(TABLES[False].tolist()), tensors=tensors,
        adamw=dict(options=options, start=numbers(start), gradients=gradients, weights=weights)))


if __name__ == "__main__":
    main()
