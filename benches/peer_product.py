#!/usr/bin/env python3
"""Times PyTorch's bf16 products in the three forms of training, at the shapes of benches/product.rs.

One line of JSON a product, with the same keys. Operands and results are bf16, as in a bf16 model.
"""
import argparse
import json
import os
import statistics
import time

parser = argparse.ArgumentParser()
parser.add_argument("--threads", type=int, default=2)
parser.add_argument("--repeats", type=int, default=7)
options = parser.parse_args()
os.environ["OMP_NUM_THREADS"] = str(options.threads)

import torch  # noqa: E402

torch.set_num_threads(options.threads)
torch.manual_seed(0)
for n, i, out in [(512, 896, 4864), (2048, 896, 4864), (512, 4864, 896), (2048, 4864, 896), (2048, 4096, 4096)]:
    x, dy, w = (torch.randn(*shape).bfloat16() for shape in ((n, i), (n, out), (out, i)))
    for form, f in (("x·Wᵀ", lambda: x @ w.t()), ("dy·W", lambda: dy @ w), ("dyᵀ·x", lambda: dy.t() @ x)):
        f()
        seconds = []
        for _ in range(options.repeats):
            start = time.perf_counter()
            f()
            seconds.append(time.perf_counter() - start)
        rate = 2 * n * i * out / statistics.median(seconds) / 1e9
        print(json.dumps({"impl": "torch", "cpu": "torch " + torch.__version__, "shape": [n, i, out], "form": form,
                          "gflops": round(rate, 1)}, ensure_ascii=False))
