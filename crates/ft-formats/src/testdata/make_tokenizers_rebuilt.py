"""Token ids of tokenizers whose class transformers builds anew, beside what `tokenizer.json` says.

Run: python make_rebuilt.py > tokenizers_rebuilt.json
Made with transformers 5.23.0 and tokenizers 0.23.3; no network. Two small vocabularies are trained here: one as sentencepiece
makes them, one of bytes. Each case is one of them with other files beside it, read by `AutoTokenizer`.
"""

import json
import os
import tempfile

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

os.environ["HF_HUB_OFFLINE"] = "1"
from transformers import AutoTokenizer  # noqa: E402

CORPUS = [
    "The river Corra runs past Brinfell and its old mill.",
    "the tailor mends 12 coats, then 345 more; isn't it odd?",
    "A river, a mill, a tailor: we'll see 2024 of them.",
    "def add(a, b):\n    return a + b\n",
    "naïve café über straße",
] * 4
TEXTS = [
    "The river runs",
    " The river",
    "a  tailor   mends\n\n  coats",
    "<s>The mill</s> the mill<end>the mill",
    "<end> river <end>river",
    "it isn't 12345, we'LL see",
    "cafe\u0301 über ﬁne 漢字 \U0001f600",
    "def add(a, b):\n    return a + b",
    "",
    "  ",
]


def spm():
    """BPE with byte fallback; blanks are written as in sentencepiece."""
    t = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    t.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    specials = ["<unk>", "<s>", "</s>"] + [f"<0x{i:02X}>" for i in range(256)]
    t.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=420, special_tokens=specials, show_progress=False))
    raw = json.loads(t.to_str())
    raw["added_tokens"] = [a for a in raw["added_tokens"] if a["id"] < 3]
    end = len(raw["model"]["vocab"])
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    raw["added_tokens"].append({"id": end, "content": "<end>", **flags})
    raw["post_processor"] = json.loads(template("<s>", 1))
    raw["decoder"] = {
        "type": "Sequence",
        "decoders": [
            {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
            {"type": "ByteFallback"},
            {"type": "Fuse"},
            {"type": "Strip", "content": " ", "start": 1, "stop": 0},
        ],
    }
    return raw


def template(token, id):
    t = Tokenizer(models.BPE())
    t.post_processor = processors.TemplateProcessing(
        single=f"{token} $A", pair=f"{token} $A {token} $B", special_tokens=[(token, id)]
    )
    return json.dumps(json.loads(t.to_str())["post_processor"])


def level():
    """BPE on bytes, digits apart."""
    t = Tokenizer(models.BPE())
    t.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    t.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330, initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()), show_progress=False
    )
    t.train_from_iterator(CORPUS + ["12345 12 345 2024 12345"] * 4, trainer)
    t.add_special_tokens([AddedToken(x, special=True, normalized=False) for x in ["<s>", "</s>", "<end>"]])
    return json.loads(t.to_str())


BASES = {"spm": spm(), "level": level()}
NAMED = {"bos_token": "<s>", "eos_token": "</s>"}
LLAMA = {**NAMED, "unk_token": "<unk>"}
GEMMA = {
    "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
    "pre_tokenizer": {"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": False},
}
# Name, base, what is other in tokenizer.json, tokenizer_config.json, config.json.
CASES = [
    ("llama, legacy absent", "spm", {}, {"tokenizer_class": "LlamaTokenizer", **LLAMA}, {"model_type": "llama"}),
    ("llama, legacy false", "spm", {}, {"tokenizer_class": "LlamaTokenizerFast", "legacy": False, **LLAMA}, {"model_type": "llama"}),
    ("llama, legacy true", "spm", {}, {"tokenizer_class": "LlamaTokenizer", "legacy": True, **LLAMA}, {"model_type": "llama"}),
    ("llama, legacy null", "spm", {}, {"tokenizer_class": "LlamaTokenizer", "legacy": None, **LLAMA}, {"model_type": "llama"}),
    ("llama, no prefix space", "spm", {}, {"tokenizer_class": "LlamaTokenizer", "add_prefix_space": False, **LLAMA}, {"model_type": "llama"}),
    ("llama, class of config.json", "spm", {}, LLAMA, {"model_type": "llama", "tokenizer_class": "LlamaTokenizer"}),
    ("llama, no class", "spm", {}, LLAMA, {"model_type": "llama"}),
    ("llama, plain class", "spm", {}, {"tokenizer_class": "PreTrainedTokenizerFast", **LLAMA}, {"model_type": "llama"}),
    ("llama, no model", "spm", {}, {"tokenizer_class": "LlamaTokenizer", **LLAMA}, {}),
    ("code llama", "spm", {}, {"tokenizer_class": "CodeLlamaTokenizer", **LLAMA}, {"model_type": "llama"}),
    ("mistral", "spm", {}, {"tokenizer_class": "LlamaTokenizer", "legacy": False, **LLAMA}, {"model_type": "mistral"}),
    ("phi3", "spm", {}, {"tokenizer_class": "LlamaTokenizer", "legacy": False, **LLAMA}, {"model_type": "phi3"}),
    ("gemma", "spm", GEMMA, {"tokenizer_class": "GemmaTokenizer", **LLAMA}, {"model_type": "gemma2"}),
    ("gemma, another pipeline", "spm", {}, {"tokenizer_class": "GemmaTokenizerFast", **LLAMA}, {"model_type": "gemma3_text"}),
    ("gemma, no class", "spm", {}, LLAMA, {"model_type": "gemma2"}),
    ("llama class in gemma", "spm", {}, {"tokenizer_class": "LlamaTokenizer", **LLAMA}, {"model_type": "gemma2"}),
    ("llama class on bytes", "level", {}, {"tokenizer_class": "LlamaTokenizer", **NAMED}, {"model_type": "llama"}),
    ("qwen2", "level", {}, {"tokenizer_class": "Qwen2Tokenizer", **NAMED}, {"model_type": "qwen2"}),
    ("qwen2, another class", "level", {}, {"tokenizer_class": "LlamaTokenizerFast", **NAMED}, {"model_type": "qwen2"}),
    ("qwen2, plain class", "level", {}, {"tokenizer_class": "PreTrainedTokenizerFast", **NAMED}, {"model_type": "qwen2"}),
    ("qwen3, plain class", "level", {}, {"tokenizer_class": "PreTrainedTokenizerFast", **NAMED}, {"model_type": "qwen3"}),
    ("qwen3, no class", "level", {}, NAMED, {"model_type": "qwen3"}),
    ("gpt2 in llama", "level", {}, {"tokenizer_class": "GPT2Tokenizer", **NAMED}, {"model_type": "llama"}),
    ("gpt2, prefix space", "level", {}, {"tokenizer_class": "GPT2TokenizerFast", "add_prefix_space": True, **NAMED}, {"model_type": "llama"}),
    ("gpt neox in llama", "level", {}, {"tokenizer_class": "GPTNeoXTokenizerFast", **NAMED}, {"model_type": "llama"}),
    ("qwen2 in llama", "level", {}, {"tokenizer_class": "Qwen2TokenizerFast", **NAMED}, {"model_type": "llama"}),
    ("unknown class", "level", {}, {"tokenizer_class": "SomeTokenizer", **NAMED}, {"model_type": "llama"}),
]


def ids(base, other, config, model):
    with tempfile.TemporaryDirectory() as d:
        for name, value in [("tokenizer.json", {**BASES[base], **other}), ("tokenizer_config.json", config), ("config.json", model)]:
            with open(os.path.join(d, name), "w") as f:
                json.dump(value, f)
        t = AutoTokenizer.from_pretrained(d)
        rows = [t(text)["input_ids"] for text in TEXTS]
        return {"ids": rows, "texts": [t.decode(r) for r in rows], "class": type(t).__name__}


if __name__ == "__main__":
    cases = []
    for name, base, other, config, model in CASES:
        case = {"name": name, "base": base, "other": other, "tokenizer_config": config, "config": model}
        cases.append({**case, **ids(base, other, config, model)})
    out = {"texts": TEXTS, "bases": BASES, "cases": cases}
    print(json.dumps(out, ensure_ascii=False, separators=(",", ":")))
