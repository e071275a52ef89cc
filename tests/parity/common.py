"""What the golden scripts share: threads, paths, reading rows, encoding, the loss.

Versions: see requirements.txt. The goldens in the repository were made with torch 2.13.0,
transformers 5.23.0, peft 0.21.2, tokenizers 0.23.3 on an x86-64 CPU, one thread.
Letters: T tokens of a document, V vocabulary.
"""

import json
import pathlib
import shutil
import tempfile

import numpy
import peft
import tokenizers
import torch
import transformers

torch.set_num_threads(1)
torch.use_deterministic_algorithms(True)
transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

HERE = pathlib.Path(__file__).resolve().parent
GOLDENS = HERE / "goldens"
IGNORE = -100
END_OF_TEXT = "<|endoftext|>"
TURN = "<|im_start|>"
END_OF_TURN = "<|im_end|>"
VERSIONS = {
    "torch": torch.__version__,
    "transformers": transformers.__version__,
    "peft": peft.__version__,
    "tokenizers": tokenizers.__version__,
}


def write_json(path, value):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def write_rows(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")


def read_rows(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


class Encoder:
    """Rows to (ids, labels). `labels[t]` is `ids[t]` where that token is trained, else IGNORE;
    they are shifted in `loss_sum`, so a row's first label never counts."""

    def __init__(self, directory):
        self.tokenizer = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
        self.eos = self.tokenizer.token_to_id(END_OF_TEXT)
        # The template of `small_bos` writes the BOS itself; nothing adds a second one.
        self.opening = "<s>" if directory.name == "small_bos" else ""

    def as_loaded(self, directory, model):
        """The tokenizer that transformers makes of these files beside the config of a model: some classes are built anew."""
        with tempfile.TemporaryDirectory() as both:
            shutil.copytree(directory, both, dirs_exist_ok=True)
            shutil.copy(model / "config.json", both)
            self.tokenizer = transformers.AutoTokenizer.from_pretrained(both).backend_tokenizer
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()
        return self

    def ids(self, text, special):
        return self.tokenizer.encode(text, add_special_tokens=special).ids

    def row(self, row):
        if "messages" in row:
            return self.messages(row["messages"])
        if "completion" in row:
            return self.prompt_completion(row["prompt"], row["completion"])
        return self.text(row["text"])

    def text(self, text):
        ids = self.ids(text, True)
        if ids[-1] != self.eos:
            ids.append(self.eos)
        return ids, list(ids)

    def prompt_completion(self, prompt, completion):
        before = self.ids(prompt, True)
        after = self.ids(completion, False) + [self.eos]
        return before + after, [IGNORE] * len(before) + after

    def messages(self, messages):
        """ChatML written out by hand (not through the template) and masked by character position."""
        text, trained = self.opening, []
        for message in messages:
            text += f"{TURN}{message['role']}\n"
            start = len(text)
            text += f"{message['content']}{END_OF_TURN}"
            if message["role"] == "assistant":
                trained.append((start, len(text)))
            text += "\n"
        encoding = self.tokenizer.encode(text, add_special_tokens=False)
        labels = [
            token if any(a <= left and right <= b for a, b in trained) else IGNORE
            for token, (left, right) in zip(encoding.ids, encoding.offsets)
        ]
        return encoding.ids, labels


def trained_tokens(labels):
    return sum(label != IGNORE for label in labels[1:])


def loss_sum(logits, labels):
    """Cross-entropy summed over the trained tokens; logits [T, V], labels [T] (not shifted)."""
    return torch.nn.functional.cross_entropy(
        logits[:-1], labels[1:], ignore_index=IGNORE, reduction="sum"
    )


def mean_loss(model, rows):
    """Sum over trained tokens / their number, one document at a time; returns (loss, tokens)."""
    total, count = 0.0, 0
    with torch.no_grad():
        for ids, labels in rows:
            logits = model(torch.tensor([ids]), use_cache=False).logits[0]
            total += loss_sum(logits, torch.tensor(labels)).item()
            count += trained_tokens(labels)
    return total / count, count


def randomize(model, seed, matrix=0.15, attention=0.3, embedding=0.4, norm=0.1, bias=0.2):
    """Random weights with a spread that makes every gradient matter. Norm weights get 1 + noise,
    or only noise where the family adds the 1 itself (gemma)."""
    generator = torch.Generator().manual_seed(seed)
    gemma = model.config.model_type.startswith("gemma")
    gemma4 = model.config.model_type.startswith(("gemma4", "gemma3n"))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if "norm" in name:
                # Gemma 4 and Gemma 3n multiply their scores by nothing else than the norms.
                scores = gemma4 and ("q_norm" in name or "k_norm" in name)
                parameter.copy_(noise * norm + (0.0 if gemma and not gemma4 else 0.6 if scores else 1.0))
            elif name.endswith("altup.correct_output_scale"):
                parameter.copy_(noise * norm + 1.0)
            elif "altup.modality_router" in name:
                # Its input is divided by the hidden size.
                parameter.copy_(noise * 3.0)
            elif name.endswith(".bias"):
                parameter.copy_(noise * bias)
            elif "embed" in name:
                parameter.copy_(noise * (embedding / model.config.get_text_config().hidden_size**0.5 if gemma else embedding))
            elif "lm_head" in name or "q_proj" in name or "k_proj" in name or "qkv_proj" in name:
                parameter.copy_(noise * attention)
            else:
                parameter.copy_(noise * matrix)
        for name, buffer in model.named_buffers():
            if name.endswith("layer_scalar"):
                buffer.copy_(0.6 + 0.8 * torch.rand(buffer.shape, generator=generator))
            elif name.endswith("e_score_correction_bias"):
                buffer.copy_(torch.randn(buffer.shape, generator=generator) * 0.1)


def relative(a, b):
    """Largest difference over the largest value of b."""
    a, b = numpy.asarray(a, dtype=numpy.float64), numpy.asarray(b, dtype=numpy.float64)
    return float(numpy.abs(a - b).max() / max(numpy.abs(b).max(), 1e-30))
