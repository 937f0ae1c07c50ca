#!/usr/bin/env python3
"""Writes the .bin/.idx fixtures of the tests from the published description of the format, with struct alone.

three_docs: i32, three documents with 2, 1 and 3 sequences (Megatron makes several with --split-sentences), with modes,
    all those of text.
i64_tokens: i64, one document, values around the limits of 32 bits.
"""
import pathlib
import struct

FOLDER = pathlib.Path(__file__).resolve().parent


def write(name, code, letter, documents, modes=None):
    sequences = [s for d in documents for s in d]
    width = struct.calcsize("<" + letter)
    ends = [0]
    for document in documents:
        ends.append(ends[-1] + len(document))
    pointers = []
    at = 0
    for s in sequences:
        pointers.append(at)
        at += len(s) * width
    index = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, code, len(sequences), len(ends))
    index += struct.pack(f"<{len(sequences)}i", *[len(s) for s in sequences])
    index += struct.pack(f"<{len(sequences)}q", *pointers)
    index += struct.pack(f"<{len(ends)}q", *ends)
    if modes is not None:
        index += struct.pack(f"<{len(modes)}b", *modes)
    tokens = [t for s in sequences for t in s]
    (FOLDER / f"{name}.idx").write_bytes(index)
    (FOLDER / f"{name}.bin").write_bytes(struct.pack(f"<{len(tokens)}{letter}", *tokens))


write("three_docs", 4, "i", [[[70000, 1, 2], [3]], [[4, 5]], [[6], [], [7, 8, 9, 123456789]]], modes=[0] * 6)
write("i64_tokens", 5, "q", [[[-1, 0, 2**31, 2**40]]])
