#!/usr/bin/env python3
"""Writes testdata/tokenizers/: two small tokenizers, trained with the `tokenizers` wheel, and texts that it encoded.

    VENV/bin/python scripts/make_tokenizer_fixtures.py [FOLDER]      (VENV: scripts/hf_requirements.txt)

byte_level is built as Qwen's: bytes, split by an expression first, no beginning-of-text token, one for its end.
metaspace is built as Llama's: words with a mark for the space before them, bytes for what it does not know, <s> before
each text if asked for.
"""

import json
import os
import sys

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

TEXT = """A tokenizer cuts a text into pieces that a model has numbers for. The pieces are not words: they are what a
count of pairs in much text found to be worth a number of its own. Common words are one piece, rare words are several,
and numbers like 1998, 2024 or 31415 are cut into digits. It isn't obvious that this is enough, but it's what all do.
def count(words):
    return {word: words.count(word) for word in set(words)}
Les mots français ont des accents; die deutschen Wörter haben Umlaute. 東京は日本の首都です。 Что это такое?
"""
SPLIT = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
         r"\s*[\r\n]+|\s+(?!\S)|\s+")
SAMPLES = [
    "The pieces are not words.", "  two spaces, a tab\tand\n\na blank line \n", "it's 2024: They'LL see", "",
    "naïve façade, e\u0301 (two code points)", "東京 Что 🙂 \U0001f468\u200d\U0001f469",
    "<|endoftext|> in the text </s>", "\r\n\x00\x7f",
]


def byte_level():
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator([TEXT], trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False))
    special = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
    tokenizer.add_special_tokens([AddedToken(t, normalized=False) for t in special])
    return tokenizer, {"bos_token": None, "eos_token": "<|endoftext|>", "pad_token": "<|endoftext|>",
                       "tokenizer_class": "Qwen2Tokenizer"}


def metaspace():
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(),
                                           decoders.Strip(" ", 1, 0)])
    special = ["<unk>", "<s>", "</s>"] + [f"<0x{b:02X}>" for b in range(256)]
    words = [line.replace(" ", " ▁") for line in TEXT.splitlines() if line.isascii()]
    trainer = trainers.BpeTrainer(vocab_size=450, special_tokens=special, show_progress=False)
    splitting = Tokenizer(models.BPE(unk_token="<unk>"))  # words apart while it learns, as sentencepiece has them
    splitting.pre_tokenizer = pre_tokenizers.Metaspace()
    splitting.train_from_iterator([w.replace("▁", "") for w in words], trainer)
    learnt = json.loads(splitting.to_str())["model"]
    tokenizer.model = models.BPE(vocab=learnt["vocab"], merges=[tuple(m) for m in learnt["merges"]], unk_token="<unk>",
                                 fuse_unk=True, byte_fallback=True)
    tokenizer.add_special_tokens([AddedToken(t, normalized=False) for t in special[:3]])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))])
    return tokenizer, {"bos_token": "<s>", "eos_token": {"__type": "AddedToken", "content": "</s>", "special": True},
                       "tokenizer_class": "LlamaTokenizer"}


def main():
    here = os.path.dirname(os.path.abspath(__file__))
    out = sys.argv[1] if len(sys.argv) > 1 else os.path.join(here, "../testdata/tokenizers")
    for name, make in (("byte_level", byte_level), ("metaspace", metaspace)):
        folder = os.path.join(out, name)
        os.makedirs(folder, exist_ok=True)
        tokenizer, config = make()
        tokenizer.save(f"{folder}/tokenizer.json", pretty=False)
        samples = []
        for text in SAMPLES:
            ids = tokenizer.encode(text, add_special_tokens=False).ids
            samples.append({"text": text, "ids": ids, "decoded": tokenizer.decode(ids, skip_special_tokens=False)})
        for file, value in (("tokenizer_config.json", config), ("samples.json", samples)):
            with open(f"{folder}/{file}", "w", encoding="utf-8") as f:
                f.write(json.dumps(value, indent=1, sort_keys=True) + "\n")
        print(name, tokenizer.get_vocab_size(), os.path.getsize(f"{folder}/tokenizer.json"),
              [len(s["ids"]) for s in samples], [s["text"] == s["decoded"] for s in samples])


if __name__ == "__main__":
    main()
