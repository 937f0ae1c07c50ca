#!/usr/bin/env python3
"""Trains two tiny SentencePiece models and writes what the public implementation makes of some texts with them.

Needs the wheel `sentencepiece` (0.2.3 was used) in an environment of its own; writes spm_bpe.model, spm_unigram.model and
spm_expected.json beside itself. The text to train on is the project's README.md.
"""
import json
import pathlib

import sentencepiece

FOLDER = pathlib.Path(__file__).resolve().parent
README = FOLDER.parents[2] / "README.md"
TEXTS = ["", "Train it with a schedule.", "  two  spaces, and\ttab\nand lines\n\n", "zebra Ünïcode €", "日本語 \U0001f600",
         "nul \x00 inside", "0123456789 0.95 a_b-c/d.e", "</s> <unk> <0x41>", "▁ the mark itself"]

expected = {"versions": {"sentencepiece": sentencepiece.__version__}, "models": {}}
for kind in ["bpe", "unigram"]:
    prefix = FOLDER / f"spm_{kind}"
    # No normalisation: its table alone would have 240 KB.
    sentencepiece.SentencePieceTrainer.train(
        input=str(README), model_prefix=str(prefix), model_type=kind, vocab_size=420, byte_fallback=True,
        normalization_rule_name="identity", character_coverage=0.995, num_threads=1, minloglevel=2)
    prefix.with_suffix(".vocab").unlink()
    model = sentencepiece.SentencePieceProcessor(model_file=f"{prefix}.model")
    cases = []
    for text in TEXTS:
        ids = model.encode(text)
        cases.append({"text": text, "ids": ids, "decoded": model.decode(ids)})
    expected["models"][kind] = {"vocab_size": model.vocab_size(), "eod": model.eos_id(), "cases": cases}
text = json.dumps(expected, ensure_ascii=True)
(FOLDER / "spm_expected.json").write_text(text.replace('{"text"', '\n{"text"') + "\n")
