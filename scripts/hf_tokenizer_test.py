#!/usr/bin/env python3
"""Tests of hf_tokenizer.py. The interpreter must have the wheel: .venv/bin/python scripts/hf_tokenizer_test.py

Expected ids are those that the wheel gave when testdata/tokenizers was made; expected files are put together here from
the description of the format, with struct. Megatron's own IndexedDatasetBuilder is compared where it is installed.
"""

import contextlib
import gzip
import io
import json
import os
import pathlib
import random
import signal
import struct
import subprocess
import sys
import tempfile
import time
import unittest

import hf_tokenizer

HERE = os.path.dirname(os.path.abspath(__file__))
TOKENIZERS = os.path.join(HERE, "../testdata/tokenizers")
SCRIPT = os.path.join(HERE, "hf_tokenizer.py")
NAMES = ("byte_level", "metaspace")


def tokenizer(name):
    return os.path.join(TOKENIZERS, name)


def samples(name):
    with open(os.path.join(tokenizer(name), "samples.json"), encoding="utf-8") as f:
        return json.load(f)


def run(*words):
    """Exit code, standard output, standard error; in this process."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = hf_tokenizer.main([str(w) for w in words])
    return code, out.getvalue(), err.getvalue()


def megatron_files(documents, letter, code):
    """(bin, idx) of documents of tokens, a sequence each."""
    width = struct.calcsize("<" + letter)
    starts = [width * sum(map(len, documents[:i])) for i in range(len(documents))]
    index = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, code, len(documents), len(documents) + 1)
    index += struct.pack(f"<{len(documents)}i", *map(len, documents))
    index += struct.pack(f"<{len(documents)}q", *starts)
    index += struct.pack(f"<{len(documents) + 1}q", *range(len(documents) + 1))
    return struct.pack(f"<{starts[-1] // width + len(documents[-1])}{letter}", *sum(documents, [])), index


class Folder(unittest.TestCase):
    def setUp(self):
        self.folder = self.enterContext(tempfile.TemporaryDirectory())

    def path(self, name):
        return os.path.join(self.folder, name)

    def write(self, name, data):
        opening = gzip.open if name.endswith(".gz") else open
        with opening(self.path(name), "wb") as f:
            f.write(data if isinstance(data, bytes) else data.encode())
        return self.path(name)

    def files(self, prefix):
        return tuple(pathlib.Path(f"{prefix}.{end}").read_bytes() for end in ("bin", "idx"))

    def prepare(self, name, inputs, *more, expect=0):
        code, out, err = run("prepare", "--tokenizer", tokenizer(name), "--out", self.path("data"), *more, *inputs)
        self.assertEqual(code, expect, err)
        return out if expect == 0 else err

    def refused(self, inputs, *more, name="byte_level"):
        err = self.prepare(name, inputs, "--workers", 2, *more, expect=2)
        self.assertEqual(err.count("\n"), 1, err)
        self.assertEqual([f for f in os.listdir(self.folder) if f.startswith(".")], [])
        return err


class Prepare(Folder):
    def test_samples_become_megatron_files(self):
        for name, eod in (("byte_level", 400), ("metaspace", 2)):
            lines = "\n".join(json.dumps({"text": s["text"]}) for s in samples(name)) + "\n"
            inputs = [self.write("a.jsonl", lines), self.write("b.jsonl.gz", lines)]
            out = json.loads(self.prepare(name, inputs, "--json"))
            documents = [s["ids"] + [eod] for s in samples(name) if s["ids"]] * 2
            self.assertEqual(self.files(self.path("data")), megatron_files(documents, "H", 8))
            self.assertEqual(out, {"path": self.path("data"), "documents": len(documents), "eod": eod,
                                   "tokens": sum(map(len, documents)), "bytes_in": 2 * len(lines.encode()),
                                   "vocab_size": {"byte_level": 403, "metaspace": 450}[name]})

    def test_same_bytes_for_any_number_of_workers(self):
        text = "".join(f"line {i}: {s['text']}\n" for i in range(300) for s in samples("byte_level"))
        inputs = [self.write("a.txt", text), self.write("b.jsonl", "\n".join(
            json.dumps({"text": text[i:i + i % 977]}) for i in range(0, len(text), 501)))]
        files = set()
        for workers, batch in ((1, 1 << 20), (2, 5000), (5, 999), (3, 1)):
            self.enterContext(unittest.mock.patch.object(hf_tokenizer, "BATCH_BYTES", batch))
            self.prepare("byte_level", inputs, "--workers", workers, "--document-bytes", 3000)
            files.add(self.files(self.path("data")))
        self.assertEqual(len(files), 1)

    def test_text_is_cut_as_the_byte_tokenizer_cuts_it(self):
        # After the first blank line that finds 10 bytes or more before it; the blank line belongs to the document.
        pieces = ["short\n\nno\n \t\r\n", "\n\nsecond one, long\n\n", "9 bytes:\n\nthe rest\n\n"]
        self.prepare("byte_level", [self.write("a.txt", "".join(pieces)), self.write("b.txt", "alone")],
                     "--document-bytes", 10)
        one = hf_tokenizer.load_tokenizer(tokenizer("byte_level"))
        documents = [one.encode(p, add_special_tokens=False).ids + [400] for p in pieces + ["alone"]]
        self.assertEqual(self.files(self.path("data")), megatron_files(documents, "H", 8))

    def test_large_vocabularies_are_written_in_32_bits(self):
        with open(os.path.join(tokenizer("byte_level"), "tokenizer.json"), encoding="utf-8") as f:
            large = json.load(f)
        ids = samples("byte_level")[0]["ids"][:1]
        text = self.write("a.txt", "The")
        for last, letter, code in ((65498, "H", 8), (65499, "i", 4)):  # vocabularies of 65499 and 65500
            large["model"]["vocab"]["last"] = last
            path = self.write("tokenizer.json", json.dumps(large))
            out = run("prepare", "--tokenizer", path, "--eod", "last", "--out", self.path("data"), text)
            self.assertEqual(out[0], 0, out)
            self.assertEqual(self.files(self.path("data")), megatron_files([ids + [last]], letter, code))

    def test_end_of_document(self):
        text = self.write("a.txt", "The")
        ids = samples("byte_level")[0]["ids"][:1]
        for wanted, eod in (("<|im_end|>", 402), ("7", 7), ("401", 401)):
            found = hf_tokenizer.load_tokenizer(tokenizer("byte_level")).token_to_id(wanted)
            self.prepare("byte_level", [text], "--eod", wanted)
            expected = eod if found is None else found  # "7" is a token of its own
            self.assertEqual(self.files(self.path("data")), megatron_files([ids + [expected]], "H", 8))
        self.assertIn("no such token (--eod): got <none>", self.refused([text], "--eod", "<none>"))
        with open(os.path.join(tokenizer("byte_level"), "tokenizer.json"), encoding="utf-8") as f:
            self.write("tokenizer.json", f.read())
        words = ["prepare", "--tokenizer", self.folder, "--out", self.path("data"), text]
        self.assertIn("which token ends a document?", run(*words)[2])
        self.write("config.json", json.dumps({"eos_token_id": [401, 400]}))
        self.assertEqual(json.loads(run(*words, "--json")[1])["eod"], 401)
        self.write("tokenizer_config.json", json.dumps({"eos_token": {"content": "<|im_end|>"}}))
        self.assertEqual(json.loads(run(*words, "--json")[1])["eod"], 402)

    def test_special_tokens_of_the_tokenizer(self):
        text = self.write("a.txt", "The")
        self.prepare("metaspace", [text], "--special-tokens")
        ids = hf_tokenizer.load_tokenizer(tokenizer("metaspace")).encode("The", add_special_tokens=False).ids
        self.assertEqual(self.files(self.path("data")), megatron_files([[1] + ids + [2]], "H", 8))

    def test_bad_input_is_one_line(self):
        good = '{"text": "x"}\n'
        for name, data, what in (
                ("a.jsonl", good + '{"text": 1}\n', "a.jsonl:2"),
                ("a.jsonl", good + '{"text": "x"\n', "not JSON"),
                ("a.jsonl", good + "[" * 100000 + "\n", "not JSON"),
                ("a.jsonl", good + '{"text": "\\ud800"}\n', "half of a surrogate pair"),
                ("a.jsonl", good.encode() + b'{"text": "\xff"}\n', "not UTF-8"),
                ("a.txt", b"abc\xff", "byte 0xff at 3"),
                ("a.txt", "", "no text in the input"),
                ("a.jsonl", '{"text": ""}\n', "no text in the input")):
            self.assertIn(what, self.refused([self.write(name, data)]))
        with open(self.write("b.txt.gz", "text " * 1000), "r+b") as f:
            f.truncate(os.path.getsize(f.name) - 5)
        self.assertIn("damaged or incomplete gzip", self.refused([self.path("b.txt.gz")]))
        os.rename(self.write("c", "text"), self.path("c.gz"))
        self.assertIn("not a gzip file", self.refused([self.path("c.gz")]))
        self.assertIn("cannot open", self.refused([self.path("none")]))
        self.assertIn("a folder", self.refused([self.folder]))
        for words in (["--workers", "0"], ["--document-bytes", "-1"], ["--workers", "x"], ["--unknown"]):
            self.refused([self.write("d.txt", "text")], *words)

    def test_bad_tokenizers_are_one_line(self):
        text = self.write("a.txt", "text")
        for data, what in (("{", "not a tokenizer"), ("{}", "not a tokenizer"), (None, "no such file")):
            if data is not None:
                self.write("tokenizer.json", data)
            elif os.path.exists(self.path("tokenizer.json")):
                os.unlink(self.path("tokenizer.json"))
            code, _, err = run("prepare", "--tokenizer", self.folder, "--out", self.path("data"), text)
            self.assertEqual((code, err.count("\n")), (2, 1))
            self.assertIn(what, err)

    def test_garbage_never_is_more_than_one_line(self):
        generator = random.Random(1)
        good = "".join(json.dumps({"text": s["text"]}) + "\n" for s in samples("byte_level")).encode()
        for _ in range(25):
            data = bytearray(good)
            for _ in range(generator.randrange(1, 6)):
                data[generator.randrange(len(data))] = generator.randrange(256)
            code, _, err = run("prepare", "--tokenizer", tokenizer("byte_level"), "--workers", 1, "--out",
                               self.path("data"), self.write("a.jsonl", bytes(data)))
            self.assertIn(code, (0, 2))
            self.assertEqual(err.count("\n"), 0 if code == 0 else 1, err)

    def test_killed_it_leaves_the_old_pair_and_no_process(self):
        self.prepare("byte_level", [self.write("a.txt", "The pieces")])
        before = self.files(self.path("data"))
        slow = ("import sys, time, hf_tokenizer as h; h.BATCH_BYTES = 1; h.text_of = lambda *_: time.sleep(60); "
                "sys.exit(h.main(sys.argv[1:]))")
        child = subprocess.Popen([sys.executable, "-c", slow, "prepare", "--tokenizer", tokenizer("byte_level"),
                                  "--out", self.path("data"), "--workers", "2", "--document-bytes", "1",
                                  self.write("b.txt", "some text\n\n" * 20)], cwd=HERE)
        deadline, workers = time.monotonic() + 40, []
        while len(workers) < 2 and time.monotonic() < deadline:
            found = subprocess.run(["ps", "-o", "pid=", "--ppid", str(child.pid)], capture_output=True, text=True)
            workers = found.stdout.split()
            time.sleep(0.05)
        self.addCleanup(lambda: [os.kill(int(pid), signal.SIGKILL) for pid in workers if alive(pid)])
        self.assertEqual(len(workers), 2)
        child.kill()
        child.wait(timeout=20)
        while any(alive(pid) for pid in workers) and time.monotonic() < deadline:
            time.sleep(0.05)
        self.assertFalse([pid for pid in workers if alive(pid)])
        self.assertEqual(self.files(self.path("data")), before)
        self.prepare("byte_level", [self.path("a.txt")])  # what was left is in nobody's way

    def test_two_writers_of_one_name(self):
        other = hf_tokenizer.Atomic(self.path("data.bin"))
        self.addCleanup(other.discard)
        err = self.prepare("byte_level", [self.write("a.txt", "x")], expect=2)
        self.assertIn("another program is writing", err)

    def test_megatron_writes_the_same(self):
        try:
            from megatron.core.datasets.indexed_dataset import DType, IndexedDataset, IndexedDatasetBuilder
        except ImportError:
            self.skipTest("megatron-core is not installed")
        import torch
        lines = "\n".join(json.dumps({"text": s["text"]}) for s in samples("byte_level"))
        self.prepare("byte_level", [self.write("a.jsonl", lines)])
        builder = IndexedDatasetBuilder(self.path("theirs.bin"), dtype=DType.optimal_dtype(403))
        documents = [s["ids"] + [400] for s in samples("byte_level") if s["ids"]]
        for ids in documents:
            builder.add_document(torch.tensor(ids), [len(ids)])
        builder.finalize(self.path("theirs.idx"))
        self.assertEqual(self.files(self.path("data")), self.files(self.path("theirs")))
        ours = IndexedDataset(self.path("data"))
        self.assertEqual([ours[i].tolist() for i in range(len(ours))], documents)


def alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as f:
            return f.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


class Serve(unittest.TestCase):
    def talk(self, name, lines, *more):
        data = b"".join(line if isinstance(line, bytes) else json.dumps(line).encode() + b"\n" for line in lines)
        done = subprocess.run([sys.executable, SCRIPT, "serve", "--tokenizer", tokenizer(name), *more], input=data,
                              capture_output=True, timeout=60)
        return done.returncode, [json.loads(line) for line in done.stdout.splitlines()], done.stderr.decode()

    def test_samples_go_there_and_back(self):
        for name, size, eod in (("byte_level", 403, 400), ("metaspace", 450, 2)):
            hello = {"vocab_size": size, "eod": eod}
            requests = [{"encode": s["text"]} for s in samples(name)] + [{"decode": s["ids"]} for s in samples(name)]
            expected = [{"ids": s["ids"]} for s in samples(name)] + [{"text": s["decoded"]} for s in samples(name)]
            self.assertEqual(self.talk(name, requests), (0, [hello] + expected, ""))

    def test_special_tokens(self):
        requests = [{"encode": "a", "special": True}, {"decode": [1, 2]}, {"decode": [1, 2], "skip_special": True}]
        _, replies, _ = self.talk("metaspace", requests)
        self.assertEqual(replies[1]["ids"][0], 1)
        self.assertEqual(replies[2:], [{"text": "<s></s>"}, {"text": ""}])

    def test_a_bad_request_is_answered_and_the_next_one_too(self):
        bad = [b"\n", b"{\n", b"\xff\n", b"[" * 100000 + b"\n", [], {}, {"encode": 1}, {"decode": "x"},
               {"decode": [-1]}, {"decode": [1 << 40]}, {"encode": "a", "decode": []}, {"encode": "\ud800"}]
        code, replies, err = self.talk("byte_level", bad + [{"decode": samples("byte_level")[0]["ids"]}])
        self.assertEqual((code, err, len(replies)), (0, "", len(bad) + 2))
        self.assertEqual([list(r) for r in replies[1:-1]], [["error"]] * len(bad))
        self.assertEqual(replies[-1], {"text": samples("byte_level")[0]["text"]})

    def test_without_the_wheel(self):
        for words, lines in ((["prepare", "--json", "--out", "x", "x"], 1), (["serve"], 0)):
            done = subprocess.run([sys.executable, "-S", "-I", SCRIPT] + words + ["--tokenizer", "x"],
                                  capture_output=True, text=True, timeout=60)
            self.assertEqual((done.returncode, done.stderr.count("\n")), (2, lines))
            self.assertIn("the tokenizers wheel is missing", json.loads(done.stdout)["error"]["what"])


if __name__ == "__main__":
    import unittest.mock
    unittest.main()
