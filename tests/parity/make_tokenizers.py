"""Trains the two byte-level BPE tokenizers of the goldens and writes the rows of data.

    python make_tokenizers.py

tokenizers/small      lower-case alphabet only, 128 tokens, GPT-2 splitting, no BOS, v4-style files by hand
tokenizers/small_bos  the same, but encoding adds <s> in front; the chat template stands in tokenizer_config.json
tokenizers/chat       all 256 bytes, NFC, the splitting rule of newer families, saved by transformers 5
data/                 rows of messages, text, prompt-completion (uneven lengths)
"""

import copy
import json

import transformers
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from common import END_OF_TEXT, END_OF_TURN, GOLDENS, TURN, Encoder, read_rows, write_json, write_rows

SPECIALS = [END_OF_TEXT, TURN, END_OF_TURN, "<s>"]
SPLIT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
TEMPLATE = """{%- for message in messages -%}
{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{ '<|im_start|>assistant\\n' }}
{%- endif -%}
"""

TEXTS = [
    "The mill by the river grinds rye in spring and oats in autumn.",
    "Ada keeps three hens; each hen lays five eggs a week, so Ada has fifteen eggs.",
    "Rain.",
    "A ferry crosses at dawn. It carries goats, salt, two drums of oil and whoever has a coin to spare. At noon it comes back empty.",
    "17 + 25 = 42",
    "The baker asked: \"Who took the last loaf?\" Nobody answered, but the cat looked very pleased with itself.",
    "Names of the hills, north to south: Orrin, Belva, Teck, Marrow.",
    "If the bell rings twice, close the gate.",
    "Snow fell on the café roof — naïve tourists called it “sugar”.",
    "One, two, three, four, five, six, seven, eight, nine, ten.",
    "Old maps show a road here; new maps show a lake. Both are right, for the road is under the lake, and in dry years carts still use it.",
    "sort: 9 4 7 1 -> 1 4 7 9",
    "The smith's daughter can't whistle, yet she sings.",
    "Blue paint costs more than red paint.",
    "\tindented line\n  and a second one\n\nand a third after a gap",
    "Copper turns green; iron turns red; gold stays as it is.",
    "reverse: lantern -> nretnal",
    "They built the bridge in 1374 and mended it in 1622, 1809 and 1951.",
    "Quiet, please.",
    "Every seventh day the market fills the square: cheese, rope, candles, boots, and one stall that sells only blue buttons.",
    "The answer is no.",
    "Wind from the east brings dust, wind from the west brings rain, and wind from the north brings the tax collector.",
]

SYSTEM = {"role": "system", "content": "You answer in few words."}


def turns(*texts, system=False):
    roles = ["user", "assistant"]
    rows = [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]
    return {"messages": ([SYSTEM] if system else []) + rows}


MESSAGES = [
    turns("What does the mill grind in spring?", "Rye."),
    turns("How many eggs has Ada in a week?", "Fifteen eggs, for three hens lay five each.", system=True),
    turns("Add 17 and 25.", "42", "And 8 more?", "50"),
    turns("Who took the last loaf?", "The cat looks pleased with itself, so I would ask the cat first."),
    turns("Sort 9 4 7 1.", "1 4 7 9"),
    turns("Name the hills from north to south, please.", "Orrin, Belva, Teck, Marrow.", "The last one again?", "Marrow.", "Thanks.", "You are welcome.", system=True),
    turns("Is it raining?", "No."),
    turns("Where is the old road?", "Under the lake. In dry years carts still use it, and the ferry stops."),
    turns("Reverse lantern.", "nretnal"),
    turns("What colour does copper turn?", "Green", system=True),
    turns("When was the bridge built?", "In 1374; it was mended in 1622, 1809 and 1951."),
    turns("Say the word assistant.", "assistant"),
    turns("What does the market sell?", "Cheese, rope, candles, boots and blue buttons.\nNothing else."),
    turns("Does the smith's daughter whistle?", "She can't, yet she sings."),
    turns("Who comes with the north wind?", "The tax collector."),
    turns("Write café.", "café — naïve “sugar”"),
    turns("What costs more, blue or red paint?", "Blue paint.", "By how much?", "I do not know."),
    turns("Close the gate?", "Only if the bell rings twice."),
    turns("Count to ten, and do it slowly, one word at a time, with commas in between, as we were taught in the old school by the river.", "One, two, three, four, five, six, seven, eight, nine, ten."),
    turns("What stays as it is?", "Gold.", system=True),
    turns("What does the ferry carry?", "Goats, salt, two drums of oil and whoever has a coin to spare."),
    turns("Quiet, please.", "Yes."),
    turns("Is the answer yes?", "The answer is no.", "Why?", "Because the road is under the lake."),
]

EVAL = {
    "eval_text": [
        {"text": "the mill by the river grinds rye in spring, oats in autumn and nothing at all in winter."},
        {"text": "rain."},
        {"text": "17 + 25 = 42"},
        {"text": "a ferry crosses at dawn, it carries goats and salt; at noon it comes back empty."},
    ],
    "eval_messages": [
        turns("what does the mill grind in spring?", "rye."),
        turns("add 17 and 25.", "42", "and 8 more?", "50, for 42 + 8 = 50."),
        {"messages": [{"role": "system", "content": "be short."}] + turns("is it raining?", "no, the wind is from the east.")["messages"]},
    ],
    "eval_prompt_completion": [
        {"prompt": "question: what does copper turn?\n", "completion": "green"},
        {"prompt": "sort 9 4 7 1\n", "completion": "1 4 7 9, and that is all there is to say."},
    ],
}

LOWER = " ".join(TEXTS).lower()
SMALL_CORPUS = ["".join(c for c in LOWER if c in "abcdefghijklmnopqrstuvwxyz0123456789 .,:;?!'+=->\n"),
                "abcdefghijklmnopqrstuvwxyz 0123456789 .,:;?!'+=->\nsystem user assistant question\n"]


def special_entry(index, content):
    return {"content": content, "lstrip": False, "normalized": False, "rstrip": False, "single_word": False, "special": True}


def config_v4(bos):
    return {
        "added_tokens_decoder": {str(i): special_entry(i, s) for i, s in enumerate(SPECIALS)},
        "bos_token": "<s>" if bos else None,
        "clean_up_tokenization_spaces": False,
        "eos_token": END_OF_TEXT,
        "pad_token": END_OF_TEXT,
        "model_max_length": 4096,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }


def small():
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=128, special_tokens=SPECIALS, initial_alphabet=[], show_progress=False)
    tokenizer.train_from_iterator(SMALL_CORPUS, trainer)
    assert tokenizer.get_vocab_size() == 128, tokenizer.get_vocab_size()

    plain = GOLDENS / "tokenizers" / "small"
    plain.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(plain / "tokenizer.json"))
    write_json(plain / "tokenizer_config.json", config_v4(bos=False))
    (plain / "chat_template.jinja").write_text(TEMPLATE)

    with_bos = GOLDENS / "tokenizers" / "small_bos"
    with_bos.mkdir(parents=True, exist_ok=True)
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
    )
    tokenizer.save(str(with_bos / "tokenizer.json"))
    write_json(with_bos / "tokenizer_config.json", config_v4(bos=True) | {"chat_template": "{{- bos_token -}}" + TEMPLATE})


def chat():
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320, special_tokens=SPECIALS[:3], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    corpus = TEXTS + [m["content"] for row in MESSAGES for m in row["messages"]] + ["system\nuser\nassistant\n"]
    tokenizer.train_from_iterator(corpus, trainer)
    assert tokenizer.get_vocab_size() == 320, tokenizer.get_vocab_size()
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=END_OF_TEXT, pad_token=END_OF_TEXT, clean_up_tokenization_spaces=False,
        additional_special_tokens=[TURN, END_OF_TURN],
    )
    fast.chat_template = TEMPLATE
    fast.save_pretrained(GOLDENS / "tokenizers" / "chat")


def check(name, rows):
    """The hand-written rendering and masks must be what transformers makes of the saved files."""
    directory = GOLDENS / "tokenizers" / name
    ours, theirs = Encoder(directory), transformers.AutoTokenizer.from_pretrained(directory)
    for row in rows:
        ids, labels = ours.row(row)
        if "messages" in row:
            got = theirs.apply_chat_template(row["messages"], tokenize=True, return_dict=True)["input_ids"]
            want = ids
            trained = [i for i, label in enumerate(labels) if label >= 0]
            assert trained and sum(1 for i in trained if ids[i] == ours.tokenizer.token_to_id(END_OF_TURN)) == sum(
                m["role"] == "assistant" for m in row["messages"])
        elif "text" in row:
            got, want = theirs(row["text"])["input_ids"], ids[:-1]
        else:
            got, want = theirs(row["prompt"])["input_ids"], [i for i, label in zip(ids, labels) if label < 0]
            joint = theirs(row["prompt"] + row["completion"])["input_ids"]
            assert joint == ids[:-1], "the seam between prompt and completion must not matter"
        assert got == want, (name, row, got, want)


def main():
    write_rows(GOLDENS / "data" / "text.jsonl", [{"text": text} for text in TEXTS])
    write_rows(GOLDENS / "data" / "messages.jsonl", MESSAGES)
    for name, rows in EVAL.items():
        write_rows(GOLDENS / "data" / f"{name}.jsonl", rows)
    small()
    chat()
    for name in EVAL:
        for tokenizer in ["small", "small_bos", "chat"]:
            check(tokenizer, read_rows(GOLDENS / "data" / f"{name}.jsonl"))
    encoder, tokens = Encoder(GOLDENS / "tokenizers" / "chat"), {}
    for name in ["text", "messages"]:
        rows = read_rows(GOLDENS / "data" / f"{name}.jsonl")
        check("chat", rows)
        tokens[name] = [{"ids": ids, "trained": [int(i > 0 and l >= 0) for i, l in enumerate(labels)]} for ids, labels in map(encoder.row, rows)]
    path = GOLDENS / "data" / "tokens.json"
    path.write_text(json.dumps(tokens) + "\n")


if __name__ == "__main__":
    main()
