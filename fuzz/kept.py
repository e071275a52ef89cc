#!/usr/bin/env python3
"""Files of fuzz/kept: one input a line, in Rust's escapes.

kept.py files kept/TARGET.txt DIRECTORY: each input as a file, with the name that libFuzzer gives it
kept.py add kept/TARGET.txt CONTROL: prints the lines of the file, then inputs that reach more, while all are at most 64 KiB

CONTROL is the control file of a merge of the files of `kept.py files` with a corpus: it has what each input reaches that none
before it does.
"""

import hashlib
import pathlib
import sys

MOST = 64 << 10
PLAIN = {9: "\\t", 10: "\\n", 13: "\\r", 92: "\\\\"}
ESCAPES = {"t": 9, "n": 10, "r": 13}


def line_of(data):
    return "".join(PLAIN.get(b) or (chr(b) if 32 <= b < 127 else f"\\x{b:02x}") for b in data)


def input_of(line):
    out, at = bytearray(), 0
    while at < len(line):
        size = 1
        if line[at] != "\\":
            out += line[at].encode()
        elif line[at + 1] == "x":
            out.append(int(line[at + 2 : at + 4], 16))
            size = 4
        else:
            out += bytes([ESCAPES.get(line[at + 1]) or ord(line[at + 1])])
            size = 2
        at += size
    return bytes(out)


def lines_of(path):
    # Only "\n" ends a line: `splitlines` knows more ends.
    path = pathlib.Path(path)
    return path.read_text(encoding="utf-8").removesuffix("\n").split("\n") if path.exists() else []


def files(kept, directory):
    for line in lines_of(kept):
        data = input_of(line)
        (pathlib.Path(directory) / hashlib.sha1(data).hexdigest()).write_bytes(data)


def found(control):
    """Inputs of the corpus and the number of things that each reaches first."""
    lines = pathlib.Path(control).read_text().split("\n")
    count, known = int(lines[0]), int(lines[1])
    names = lines[2 : 2 + count]
    for line in lines[2 + count :]:
        words = line.split()
        # FT, the number of the file, what it reaches first.
        if words[:1] == ["FT"] and len(words) > 2 and int(words[1]) >= known:
            yield pathlib.Path(names[int(words[1])]).read_bytes(), len(words) - 2


def add(kept, control):
    lines = lines_of(kept)
    left = MOST - sum(len(line.encode()) + 1 for line in lines)
    # What is most for its size first.
    new = sorted(((line_of(data), gain) for data, gain in found(control)), key=lambda n: (-n[1] / (len(n[0]) + 1), n[0]))
    chosen = []
    for line, _ in new:
        if line not in lines and len(line) < left:
            chosen.append(line)
            left -= len(line) + 1
    lines += sorted(chosen, key=lambda line: (len(line), line))
    if lines:
        print("\n".join(lines))


{"files": files, "add": add}[sys.argv[1]](*sys.argv[2:])
