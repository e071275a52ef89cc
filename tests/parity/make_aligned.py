"""Distillation from a teacher with another tokenizer, by TRL's own ULD and GOLD losses.

    python make_aligned.py

goldens/distill/aligned.json  hidden states and heads of both models, next ids, spans, shared ids; cases: comparison, beta,
                              temperature, alpha, caps; for each the loss (mean over the trained tokens) and its gradients
                              at the student's hidden states and head

The distributions of a span are merged by `ULDLoss._merge_probabilities_with_alignment_groups` of TRL 1.16.0 with the
strategy "bayesian" (the chain rule), and compared by sorting, or by `ULDLoss._compute_hybrid_uld_loss`. A span counts as
many times as it has student tokens; the cross-entropy is over all trained tokens at temperature 1.
"""

from types import SimpleNamespace

import torch
import trl
from trl.experimental.gold.gold_trainer import ULDLoss

from common import GOLDENS, IGNORE, VERSIONS, relative, write_json

VERSIONS = VERSIONS | {"trl": trl.__version__}
F = torch.nn.functional

CASES = [dict(comparison=comparison, beta=beta, temperature=temperature, alpha=alpha, softcap=cap, teacher_softcap=other)
         for comparison, betas in (("uld", [0.5]), ("gold", [0.0, 0.5, 0.9, 1.0]))
         for beta in betas
         for temperature, alpha, cap, other in [(1.0, 0.0, None, None), (0.7, 0.3, None, 4.0), (2.5, 0.5, 3.0, None)]]


def loss_of_trl(beta, shared, device="cpu"):
    config = SimpleNamespace(
        uld_crossentropy_weight=0.0, uld_distillation_weight=1.0, uld_student_temperature=1.0,
        uld_teacher_temperature=1.0, uld_skip_student_eos=False, uld_skip_teacher_eos=False, use_extended_uld=True,
        uld_token_merge_strategy="bayesian", uld_use_hybrid_loss=True, uld_hybrid_matched_weight=None,
        uld_hybrid_unmatched_weight=None, beta=beta)
    loss = ULDLoss(config)
    loss._vocab_mapping = {t: s for s, t in shared}
    loss._teacher_matched_ids = {t for _, t in shared}
    loss._student_matched_ids = {s for s, _ in shared}
    loss.mapping_tensor = torch.full((max(loss._vocab_mapping) + 1,), -1, dtype=torch.long)
    for t, s in loss._vocab_mapping.items():
        loss.mapping_tensor[t] = s
    return loss


def capped(logits, cap):
    return logits if cap is None else cap * torch.tanh(logits / cap)


def distance(loss, comparison, q, p):
    if comparison == "gold":
        return loss._compute_hybrid_uld_loss(q, p)
    size = max(q.size(-1), p.size(-1))
    q, p = (F.pad(x.sort(dim=-1, descending=True).values, (0, size - x.size(-1))) for x in (q, p))
    return F.l1_loss(q, p, reduction="sum")


def main():
    generator = torch.Generator().manual_seed(3)
    draw = lambda *shape: torch.randn(shape, generator=generator)
    out = dict(versions=VERSIONS, sets=[])
    # Each span: first and last + 1 row of the student, then of the teacher. Tokens outside of them have no teacher.
    layouts = [
        ((10, 6, 19, 12, 4, 23), [(0, 1, 1, 2), (1, 3, 2, 3), (5, 6, 5, 8), (6, 9, 9, 11)]),
        ((7, 8, 13, 6, 5, 11), [(0, 2, 0, 1), (3, 4, 1, 2), (4, 6, 3, 6)]),
    ]
    for (n, d, v, nt, dt, vt), spans in layouts:
        data = dict(h=draw(n, d), head=draw(v, d), teacher_h=draw(nt, dt), teacher_head=draw(vt, dt))
        labels = torch.randint(0, v, (n,), generator=generator)
        teacher_labels = torch.randint(0, vt, (nt,), generator=generator)
        covered = {i for a, b, _, _ in spans for i in range(a, b)}
        free = [i for i in range(n) if i not in covered]
        labels[free[-1]] = IGNORE
        order = torch.randperm(min(v, vt), generator=generator).tolist()
        shared = sorted((s, t) for s, t in zip(order[:8], torch.randperm(vt, generator=generator).tolist()))
        cases = []
        for case in CASES:
            both = []
            for dtype in (torch.float32, torch.float64):
                x = {name: value.to(dtype) for name, value in data.items()}
                h, head = x["h"].clone().requires_grad_(), x["head"].clone().requires_grad_()
                z = capped(h @ head.T, case["softcap"])
                t = capped(x["teacher_h"] @ x["teacher_head"].T, case["teacher_softcap"])
                q, p = ((y / case["temperature"]).softmax(-1) for y in (z, t))
                loss, total = loss_of_trl(case["beta"], shared), 0
                for a, b, c, e in spans:
                    own = loss._merge_probabilities_with_alignment_groups(q, [list(range(a, b))], labels.tolist())
                    other = loss._merge_probabilities_with_alignment_groups(p, [list(range(c, e))], teacher_labels.tolist())
                    total = total + (b - a) * distance(loss, case["comparison"], own, other)
                hard = F.cross_entropy(z, labels, ignore_index=IGNORE, reduction="sum")
                total = (case["alpha"] * hard + (1 - case["alpha"]) * total) / (labels != IGNORE).sum()
                total.backward()
                both.append([total.detach(), h.grad, head.grad])
            assert all(relative(a, b) < 1e-5 for a, b in zip(*both)), case
            total, dh, dw = both[1]
            cases.append(case | dict(loss=total.item(), dh=dh.flatten().tolist(), dw=dw.flatten().tolist()))
        out["sets"].append(dict(sizes=[n, d, v, nt, dt, vt], labels=labels.tolist(), teacher_labels=teacher_labels.tolist(),
                                spans=spans, shared=shared, cases=cases,
                                **{name: value.flatten().tolist() for name, value in data.items()}))
    write_json(GOLDENS / "distill" / "aligned.json", out)


if __name__ == "__main__":
    main()
