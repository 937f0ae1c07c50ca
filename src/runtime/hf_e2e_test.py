"""Hugging Face folders through the real programs: trained by real processes, exported, trained again, and faults.

usage: hf_e2e_test.py BUILD_FOLDER [unittest arguments]
"""
import json
import os
import pathlib
import random
import shutil
import struct
import subprocess
import sys
import tempfile
import unittest

BUILD = os.path.abspath(sys.argv.pop(1))
ROOT = os.path.abspath(os.path.join(os.path.dirname(__file__), "..", ".."))
PROGRAM = os.path.join(BUILD, "disagmoe")
CASES = os.path.join(ROOT, "testdata", "hf")
BASE = ["train.steps=3", "train.seq_length=24", "train.micro_batches=4", "train.micro_batch_size=2", "train.eval_micro_batches=2",
        "train.lr=1e-3", "train.lr_warmup_steps=0", "data.split=90,10", "device.type=cpu"]


def write_data(prefix, vocabulary):
    """A .bin/.idx pair (docs/formats.md) of random tokens, u16."""
    rng = random.Random(7)
    documents = [[rng.randrange(vocabulary) for _ in range(rng.randrange(20, 200))] for _ in range(40)]
    with open(prefix + ".bin", "wb") as f:
        for d in documents:
            f.write(struct.pack(f"<{len(d)}H", *d))
    n = len(documents)
    with open(prefix + ".idx", "wb") as f:
        f.write(b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 8, n, n + 1))
        f.write(struct.pack(f"<{n}i", *map(len, documents)))
        starts = [2 * sum(map(len, documents[:i])) for i in range(n)]
        f.write(struct.pack(f"<{n}q", *starts) + struct.pack(f"<{n + 1}q", *range(n + 1)))


def setUpModule():
    global FOLDER
    FOLDER = tempfile.TemporaryDirectory()
    write_data(path("data"), 41)
    pathlib.Path(path("run.toml")).touch()


def tearDownModule():
    FOLDER.cleanup()


def path(name):
    return os.path.join(FOLDER.name, name)


def run(*words, timeout=120):
    return subprocess.run([PROGRAM, *words], capture_output=True, text=True, timeout=timeout)


def train(out, model, *overrides):
    return run("train", path("run.toml"), f"out={path(out)}", f"data.path={path('data')}", f"model.from={model}", *BASE, *overrides)


def held_out(out):
    losses = {}
    for line in pathlib.Path(path(out), "metrics.jsonl").read_text().splitlines():
        record = json.loads(line)
        if "held_out_loss" in record:
            losses[record["step"]] = record["held_out_loss"]
    return losses


class Families(unittest.TestCase):
    """Pools of unequal size, then another layout from what the first exported: it begins where that ended."""

    def round_trip(self, case):
        model = os.path.join(CASES, case)
        first = train("first", model, "layout.m=2", "layout.n=3")
        self.assertEqual(first.returncode, 0, first.stdout + first.stderr)
        self.assertIn(f"weights of {model} (", first.stdout)
        verified = run("verify", path("first"), "--steps", "3", "--sample", "0")
        self.assertEqual(verified.returncode, 0, verified.stdout + verified.stderr)
        exported = run("export", path("first"), "--out", path("exported"), "--dtype", "fp32", "--json")
        self.assertEqual(exported.returncode, 0, exported.stdout + exported.stderr)
        report = json.loads(exported.stdout)
        self.assertEqual((report["step"], report["inexact"]), (3, 0))
        self.assertIn("config.json", report["copied"])
        second = train("second", path("exported"), "layout.colocated=true", "layout.m=2", "train.steps=1")
        self.assertEqual(second.returncode, 0, second.stdout + second.stderr)
        end, begin = held_out("first")[3], held_out("second")[0]
        self.assertLessEqual(abs(end - begin), 1e-5 * end)
        self.assertGreater(abs(held_out("first")[0] - end), 1e-4)  # it did learn something
        for name in ("first", "second", "exported"):
            shutil.rmtree(path(name))


for case in ("qwen3_moe_dense_middle", "qwen3_moe_tied", "qwen2_moe", "mixtral_window", "olmoe", "gpt_oss", "deepseek", "deepseek_v2",
             "deepseek_v3"):
    setattr(Families, f"test_{case}", lambda self, case=case: self.round_trip(case))


class Faults(unittest.TestCase):
    """One line, exit code 2, before any worker starts; what was there stays."""

    def copy(self, case="qwen3_moe"):
        shutil.rmtree(path("copy"), ignore_errors=True)
        shutil.copytree(os.path.join(CASES, case), path("copy"))
        return path("copy")

    def config(self, model):
        return json.loads(pathlib.Path(model, "config.json").read_text())

    def write_config(self, model, config):
        pathlib.Path(model, "config.json").write_text(json.dumps(config))

    def assert_refused(self, result, *parts):
        self.assertEqual(result.returncode, 2, result.stdout + result.stderr)
        lines = result.stderr.splitlines()
        self.assertEqual(len(lines), 1, result.stderr)
        for part in parts:
            self.assertIn(part, lines[0])

    def test_truncated_weights(self):
        model = self.copy()
        file = os.path.join(model, "model.safetensors")
        os.truncate(file, os.path.getsize(file) - 100)
        self.assert_refused(train("run", model), "model.safetensors")

    def test_weights_of_another_model(self):
        model = self.copy()
        config = self.config(model)
        config["num_hidden_layers"] += 1
        self.write_config(model, config)
        self.assert_refused(train("run", model), "a weight is missing", "model.layers.2.")

    def test_unknown_key(self):
        model = self.copy()
        config = self.config(model)
        config["num_expert"] = 3
        self.write_config(model, config)
        self.assert_refused(train("run", model), "unknown key", "num_expert", "did you mean")

    def test_no_weights(self):
        model = self.copy()
        os.remove(os.path.join(model, "model.safetensors"))
        self.assert_refused(train("run", model), "no weights", "train.init=random")
        started = train("run", model, "train.init=random", "train.steps=1")
        self.assertEqual(started.returncode, 0, started.stderr)

    def test_changed_beside_weights(self):
        self.assert_refused(train("run", self.copy(), "model.rope_theta=5"), "contradiction", "model.rope_theta", "train.init=random")

    def test_weights_that_are_not_finite(self):
        model = self.copy()
        file = pathlib.Path(model, "model.safetensors")
        data = bytearray(file.read_bytes())
        data[-4:] = struct.pack("<f", float("nan"))
        file.write_bytes(data)
        result = train("run", model, "transport.kind=inproc")
        self.assertEqual(result.returncode, 2, result.stdout + result.stderr)
        self.assertIn("weights that are not finite", result.stderr)

    def test_a_run_does_not_begin_from_its_own_folder(self):
        self.assertEqual(train("own", self.copy(), "train.steps=1").returncode, 0)
        again = run("train", path("own/config.toml"), f"train.init={path('own')}", "train.resume=")
        self.assert_refused(again, "train.init", "out=DIR names another")
        self.assertTrue(os.path.exists(path("own/checkpoints/latest")))

    def test_companions_follow_the_checkpoint(self):
        """Also to another folder, where an earlier run left others."""
        self.assertEqual(train("from", self.copy(), "train.steps=1").returncode, 0)
        os.makedirs(path("to/hf"))
        pathlib.Path(path("to/hf/tokenizer.json")).write_text("{}")
        moved = run("train", path("from/config.toml"), f"out={path('to')}", f"train.resume={path('from/checkpoints/step-00000001')}",
                    "train.steps=0", "layout.colocated=true")
        self.assertEqual(moved.returncode, 0, moved.stdout + moved.stderr)
        self.assertEqual(sorted(os.listdir(path("to/hf"))), sorted(os.listdir(path("from/hf"))))
        self.assert_refused(run("export", path("to"), "--out", path("to/hf")), "cannot export here")
        exported = run("export", path("to"), "--out", path("moved"), "--json")
        self.assertEqual(json.loads(exported.stdout)["dtype"], "F32")

    def test_export_does_not_overwrite(self):
        started = train("run", self.copy(), "train.steps=1")
        self.assertEqual(started.returncode, 0, started.stderr)
        weights = pathlib.Path(path("copy"), "model.safetensors")
        before = weights.read_bytes()
        self.assert_refused(run("export", path("run"), "--out", path("copy")), path("copy"))
        self.assertEqual(weights.read_bytes(), before)
        self.assert_refused(run("export", path("run"), "--out", path("new"), "--dtype", "int8"), "--dtype")
        self.assert_refused(run("export", path("none"), "--out", path("new")), "no such folder")


if __name__ == "__main__":
    unittest.main(verbosity=2)
