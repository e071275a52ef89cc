#!/usr/bin/env python3
"""Writes the smallest files of a directory as lines of Rust's escapes, at most 12 KiB: kept.py DIRECTORY > kept/TARGET.txt"""

import pathlib
import sys

left = 12 << 10
lines = []
for data in sorted((p.read_bytes() for p in pathlib.Path(sys.argv[1]).iterdir()), key=lambda b: (len(b), b)):
    plain = {9: "\\t", 10: "\\n", 13: "\\r", 92: "\\\\"}
    line = "".join(plain.get(b) or (chr(b) if 32 <= b < 127 else f"\\x{b:02x}") for b in data)
    left -= len(line) + 1
    if left < 0:
        break
    lines.append(line)
print("\n".join(lines))
