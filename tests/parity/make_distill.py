"""Distillation by TRL's own divergence and a plain PyTorch loop.

    python make_distill.py

goldens/distill/divergences.json  hidden states, heads, labels; cases: beta, temperature, alpha, caps; for each the loss
                                  (mean over the trained tokens) and its gradients at the student's hidden states and head
goldens/distill/hidden.json       states, a projection; loss and gradients of mean square and cosine distance
goldens/distill/runs/*.json       losses and gradient norms of 8 steps: qwen3 learns from llama (models of make_training.py)

The divergence is `GKDTrainer.generalized_jsd_loss` of TRL 1.16.0 on logits of the common ids; the cross-entropy is over
the student's whole vocabulary at temperature 1; alpha mixes them. Hidden states are those of transformers
(`hidden_states[l]`), each projected by a matrix that starts as the identity and is trained too.
"""

import torch
import trl
from trl.experimental.gkd import GKDTrainer

from common import GOLDENS, IGNORE, VERSIONS, Encoder, read_rows, relative, trained_tokens, write_json
from make_training import load, tokenizer_of

OUT = GOLDENS / "distill"
VERSIONS = VERSIONS | {"trl": trl.__version__}
STEPS, BATCH, ACCUMULATION = 8, 2, 2
F = torch.nn.functional


def capped(logits, cap):
    return logits if cap is None else cap * torch.tanh(logits / cap)


def mixed(student, teacher, labels, case):
    """Sum over the trained tokens; logits [N, V] and [N, Vt], labels [N] with IGNORE."""
    common = min(student.shape[-1], teacher.shape[-1])
    divergence = GKDTrainer.generalized_jsd_loss(student[None, :, :common], teacher[None, :, :common], labels[None],
                                                 beta=case["beta"], temperature=case["temperature"], reduction="sum")
    hard = F.cross_entropy(student, labels, ignore_index=IGNORE, reduction="sum")
    return case["alpha"] * hard + (1 - case["alpha"]) * divergence


CASES = [dict(beta=beta, temperature=temperature, alpha=alpha, softcap=cap, teacher_softcap=other)
         for beta in (0.0, 1.0, 0.5, 0.1, 0.9)
         for temperature, alpha, cap, other in [(1.0, 0.0, None, None), (0.7, 0.3, None, 4.0), (2.5, 0.5, 3.0, None)]]


def divergences():
    generator = torch.Generator().manual_seed(1)
    draw = lambda *shape: torch.randn(shape, generator=generator)
    out = dict(versions=VERSIONS, sets=[])
    for n, d, v, dt, vt in [(7, 6, 19, 9, 19), (5, 8, 13, 4, 17), (6, 5, 21, 7, 16)]:
        data = dict(h=draw(n, d), head=draw(v, d), teacher_h=draw(n, dt), teacher_head=draw(vt, dt))
        labels = torch.randint(0, v, (n,), generator=generator)
        labels[1] = labels[3] = IGNORE
        cases = []
        for case in CASES:
            both = []
            for dtype in (torch.float32, torch.float64):
                t = {name: value.to(dtype) for name, value in data.items()}
                h, head = t["h"].clone().requires_grad_(), t["head"].clone().requires_grad_()
                student = capped(h @ head.T, case["softcap"])
                teacher = capped(t["teacher_h"] @ t["teacher_head"].T, case["teacher_softcap"])
                loss = mixed(student, teacher, labels, case) / (labels != IGNORE).sum()
                loss.backward()
                both.append([loss.detach(), h.grad, head.grad])
            assert all(relative(a, b) < 1e-5 for a, b in zip(*both)), case
            loss, dh, dw = both[1]
            cases.append(case | dict(loss=loss.item(), dh=dh.flatten().tolist(), dw=dw.flatten().tolist()))
        out["sets"].append(dict(sizes=[n, d, v, dt, vt], labels=labels.tolist(), cases=cases,
                                **{name: value.flatten().tolist() for name, value in data.items()}))
    write_json(OUT / "divergences.json", out)


def distance(y, t, kind):
    """Sum over the rows."""
    if kind == "mse":
        return F.mse_loss(y, t, reduction="none").mean(-1).sum()
    return (1 - F.cosine_similarity(y, t, dim=-1)).sum()


def hidden():
    generator = torch.Generator().manual_seed(2)
    draw = lambda *shape: torch.randn(shape, generator=generator, dtype=torch.float64)
    n, d, dt = 6, 5, 8
    x, t, projection = draw(n, d), draw(n, dt), draw(dt, d)
    labels = [3, IGNORE, 1, 1, IGNORE, 0]
    rows = torch.tensor([label != IGNORE for label in labels])
    out = dict(versions=VERSIONS, sizes=[n, d, dt], labels=labels, weight=0.7, x=x.float().flatten().tolist(),
               teacher=t.float().flatten().tolist(), projection=projection.float().flatten().tolist(), cases=[])
    for kind in ("mse", "cosine"):
        a, p = x.float().double().requires_grad_(), projection.float().double().requires_grad_()
        loss = 0.7 * distance((a @ p.T)[rows], t.float().double()[rows], kind)
        loss.backward()
        out["cases"].append(dict(distance=kind, loss=loss.item(), dx=a.grad.flatten().tolist(), dw=p.grad.flatten().tolist()))
    write_json(OUT / "hidden.json", out)


PLAIN = {"tune.method": "full", "optimizer.name": "sgd", "optimizer.learning_rate": 0.1, "schedule.name": "constant",
         "schedule.warmup_ratio": 0.0, "optimizer.weight_decay": 0.0, "train.stage": "distill"}
RUNS = {
    "forward": {"distill.beta": 0.0},
    "reverse": {"distill.beta": 1.0, "distill.temperature": 2.0},
    "jsd": {"distill.beta": 0.5, "distill.alpha": 0.25},
    "jsd_clipped": {"distill.beta": 0.1, "distill.temperature": 0.8, "train.max_grad_norm": 0.5},
    "hidden": {"distill.beta": 0.5, "distill.hidden_weight": 0.5, "distill.layer_map": [[1, 2], [2, 4], [0, 1]]},
    "hidden_cosine": {"distill.beta": 0.0, "distill.alpha": 0.5, "distill.hidden_weight": 2.0, "distill.hidden_loss": "cosine"},
}
# `auto` for a student of 3 layers and a teacher of 4.
AUTO = [[1, 1], [2, 3]]


def run(recipe, dtype):
    rows = [Encoder(tokenizer_of("qwen3")).row(row) for row in read_rows(GOLDENS / "data" / "messages.jsonl")]
    student, teacher = load("qwen3", dtype), load("llama", dtype).eval()
    case = dict(beta=recipe.get("distill.beta", 0.5), temperature=recipe.get("distill.temperature", 1.0),
                alpha=recipe.get("distill.alpha", 0.0))
    weight, pairs = recipe.get("distill.hidden_weight", 0.0), recipe.get("distill.layer_map", AUTO)
    size = student.config.hidden_size
    assert size == teacher.config.hidden_size
    projections = [torch.eye(size, dtype=dtype).requires_grad_() for _ in pairs] if weight else []
    parameters = list(student.parameters()) + projections
    optimizer = torch.optim.SGD(parameters, lr=recipe["optimizer.learning_rate"])
    clip, place = recipe.get("train.max_grad_norm", 1.0), 0
    out = dict(losses=[], grad_norms=[])
    for _ in range(STEPS):
        window = [rows[(place + i) % len(rows)] for i in range(BATCH * ACCUMULATION)]
        place += len(window)
        trained = sum(trained_tokens(labels) for _, labels in window)
        optimizer.zero_grad()
        total = 0.0
        for ids, labels in window:
            ids, labels = torch.tensor([ids]), torch.tensor(labels[1:])
            own = student(ids, use_cache=False, output_hidden_states=True)
            with torch.no_grad():
                other = teacher(ids, use_cache=False, output_hidden_states=True)
            loss = mixed(own.logits[0, :-1], other.logits[0, :-1], labels, case)
            kept = labels != IGNORE
            for (s, t), projection in zip(pairs, projections):
                y = own.hidden_states[s][0, :-1][kept] @ projection.T
                loss = loss + weight / len(pairs) * distance(y, other.hidden_states[t][0, :-1][kept],
                                                             recipe.get("distill.hidden_loss", "mse"))
            (loss / trained).backward()
            total += loss.item() / trained
        out["losses"].append(total)
        out["grad_norms"].append(float(torch.nn.utils.clip_grad_norm_(parameters, clip)))
        optimizer.step()
    return out


def runs():
    for name, recipe in RUNS.items():
        recipe = PLAIN | {"train.max_steps": STEPS, "train.batch_size": BATCH,
                          "train.gradient_accumulation_steps": ACCUMULATION} | recipe
        single, double = run(recipe, torch.float32), run(recipe, torch.float64)
        away = {key: relative(single[key], double[key]) for key in double}
        assert max(away.values()) < 2e-5, (name, away)
        write_json(OUT / "runs" / f"{name}.json", dict(versions=VERSIONS, model="qwen3", teacher="llama", data="messages",
                                                       recipe=recipe, f32_against_f64=away, **double))


if __name__ == "__main__":
    divergences()
    hidden()
    runs()
