"""Checkpoints of the real programs: killed at random moments, full disks, moved between layouts.

usage: checkpoints_e2e_test.py BUILD_FOLDER [unittest arguments]
DISAGMOE_KILLS: how many kills (default: 40, or those of 45 seconds); DISAGMOE_SEED: of their moments (default: drawn, and printed).
"""
import fcntl
import hashlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
import unittest

import e2e_test as e2e

tearDownModule = e2e.tearDownModule


def setUpModule():
    if os.access("/dev/shm", os.W_OK):  # thousands of syncs
        e2e.tempfile.tempdir = "/dev/shm"
    e2e.setUpModule()


QUICK = ("train.eval_micro_batches=0", "trace.steps=0", "train.lr_decay_steps=1000")


def losses(name):
    """By step: what must be the same bits. The last line may be cut off."""
    found = {}
    try:
        lines = open(os.path.join(e2e.out(name), "metrics.jsonl")).read().split("\n")
    except FileNotFoundError:
        return found
    for line in lines[:-1]:
        record = json.loads(line)
        if "loss" in record:
            found[record["step"]] = (record["loss"], record["aux_loss"], record["grad_norm"], record["lr"])
    return found


def forget_after(name, step):
    path = os.path.join(e2e.out(name), "metrics.jsonl")
    lines = [line for line in open(path).read().split("\n")[:-1] if json.loads(line)["step"] <= step]
    open(path, "w").write("\n".join(lines) + "\n")


class Base(e2e.Base):
    def assert_good(self, root):
        """`latest` and all that has a checkpoint's name are complete, with the hashes that the manifest says. The step of `latest`."""
        latest = open(os.path.join(root, "latest")).read().strip()
        names = [n for n in os.listdir(root) if n.startswith("step-")]
        self.assertIn(latest, names)
        for name in names:
            manifest = json.load(open(os.path.join(root, name, "manifest.json")))
            self.assertEqual(manifest["step"], int(name[5:]))
            self.assertEqual(sorted(f["name"] for f in manifest["files"]) + ["manifest.json"],
                             sorted(os.listdir(os.path.join(root, name)), key=lambda n: (n == "manifest.json", n)))
            for f in manifest["files"]:
                data = open(os.path.join(root, name, f["name"]), "rb").read()
                self.assertEqual((len(data), hashlib.sha256(data).hexdigest()), (f["bytes"], f["sha256"]), name)
        return int(latest[5:])


def wait_unlocked(name):
    """A process that was killed gives up its memory, and with it its name, before its files."""
    deadline = time.time() + 10
    with open(os.path.join(e2e.out(name), ".lock")) as lock:
        while True:
            try:
                return fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.time() > deadline:
                    raise
                time.sleep(0.01)


class Kills(Base):
    def test_killed_at_random_moments(self):
        seed = int(os.environ.get("DISAGMOE_SEED", random.randrange(10**6)))
        kills, until = int(os.environ.get("DISAGMOE_KILLS", 40)), None if "DISAGMOE_KILLS" in os.environ else time.time() + 45
        print(f"at most {kills} kills, DISAGMOE_SEED={seed}", flush=True)
        rng = random.Random(seed)
        layout = ("layout.n=2", "train.shard_optimizer=true", "train.keep_checkpoints=2", "train.save_interval=1", *QUICK)
        root = os.path.join(e2e.out("kills"), "checkpoints")
        self.assert_ok(e2e.run("train", "kills", "train.steps=1", *layout))
        seen, in_progress, step, done = losses("kills"), 0, 1, 0
        while done < kills and (until is None or time.time() < until):
            done += 1
            forget_after("kills", step)  # as the run will: what comes then is of this one
            child = subprocess.Popen(e2e.command("train", "kills", "train.steps=100000", "train.resume=latest", *layout),
                                     stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
            if rng.random() < 0.8:  # else while it starts
                deadline = time.time() + 60
                while max(losses("kills"), default=0) <= step and time.time() < deadline:
                    time.sleep(0.01)
            time.sleep(rng.random() * 0.4)
            if rng.random() < 0.8:
                os.killpg(child.pid, signal.SIGKILL)
            else:  # one of the three workers; the others end by themselves
                mine = [p for p in e2e.processes() if os.getpgid(p) == child.pid]
                os.kill(rng.choice(mine + [child.pid]), signal.SIGKILL)
            child.wait(timeout=30)
            while e2e.processes():
                time.sleep(0.01)
            wait_unlocked("kills")
            in_progress += any(n.startswith(".step-") for n in os.listdir(root))
            now = losses("kills")
            for s, values in now.items():
                self.assertEqual(seen.setdefault(s, values), values, f"step {s}")
            newer = self.assert_good(root)
            self.assertGreaterEqual(newer, step)
            self.assertLessEqual(len([n for n in os.listdir(root) if n.startswith("step-")]), 3)
            step = newer
        print(f"{done} kills, {in_progress} met a checkpoint in progress; step {step}", flush=True)
        self.assertGreater(step, 1)
        self.assert_ok(e2e.run("train", "kills", f"train.steps={step + 2}", "train.resume=latest", *layout))
        self.assertEqual(sorted(os.listdir(root)), ["latest", f"step-{step + 1:08}", f"step-{step + 2:08}"])
        seen.update(losses("kills"))
        # The run that was never interrupted.
        last = max(seen)
        self.assert_ok(e2e.run("train", "whole", f"train.steps={last}", "train.save=false", "layout.n=2", "train.shard_optimizer=true", *QUICK))
        self.assertEqual(losses("whole"), seen)
        # And in one process, from the last checkpoint: no kill has left anything that only this layout reads.
        shutil.copytree(root, os.path.join(e2e.out("alone"), "checkpoints"))
        self.assert_ok(e2e.run("reference", "alone", f"train.steps={step + 4}", "train.resume=latest", *QUICK))
        self.assert_ok(e2e.run("train", "kills", f"train.steps={step + 4}", "train.resume=latest", *layout))
        alone, together = losses("alone"), losses("kills")
        for s in (step + 3, step + 4):
            self.assertLessEqual(abs(alone[s][0] - together[s][0]), 1e-5 * together[s][0])


class Disks(Base):
    """A file system of three MB, seen by the run alone; a checkpoint has one."""

    def full(self, name, *overrides):
        if subprocess.run(["unshare", "-m", "true"], capture_output=True).returncode != 0:
            self.skipTest("mounting is not permitted")
        folder = e2e.out(name)
        os.makedirs(folder)
        train = e2e.command("train", name, "train.steps=100000", "train.save_interval=20", "layout.n=2", *QUICK, *overrides)
        script = f'mount -t tmpfs -o size=3m tmpfs {folder} || exit 99; "$@"; code=$?; cp -r {folder} {folder}.kept; exit $code'
        result = subprocess.run(["unshare", "-m", "sh", "-c", script, "sh", *train], capture_output=True, text=True, timeout=120)
        self.assertEqual(result.returncode, 2, result.stderr)
        self.assertRegex(result.stderr, r"^disagmoe: error: rank \d \(.*\): [^\n]*(No space left on device)[^\n]*\n$")
        self.assertRegex(result.stderr, r"\d+ bytes are free there: remove something or choose another folder")
        os.rmdir(folder)
        os.rename(folder + ".kept", folder)
        step = self.assert_good(os.path.join(folder, "checkpoints"))
        self.assertIn(f"checkpoint  {folder}/checkpoints/step-{step:08} (", result.stdout)
        self.assert_ok(e2e.run("train", name, f"train.steps={step + 2}", "layout.n=2", "train.resume=latest", *QUICK, *overrides))
        self.assertEqual([n for n in os.listdir(os.path.join(folder, "checkpoints")) if n.startswith(".")], [])

    def test_full(self):
        self.full("full")

    def test_full_synchronous(self):
        self.full("fullsync", "train.async_save=false")

    def test_full_while_pruning(self):
        # One is kept, and the next one: they fit. Twice the sequence of checkpoints does not.
        self.full("fullpruned", "train.keep_checkpoints=2")

    def test_unwritable(self):
        child = subprocess.Popen(e2e.command("train", "denied", "train.steps=100000", "train.save_interval=5", "layout.n=2", *QUICK),
                                 stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        root = os.path.join(e2e.out("denied"), "checkpoints")
        while not os.path.exists(os.path.join(root, "latest")):
            time.sleep(0.02)
        os.rename(root, root + ".kept")
        open(root, "w").close()
        _, err = child.communicate(timeout=30)
        self.assertEqual(child.returncode, 2)
        self.assertRegex(err, r"^disagmoe: error: rank \d \(.*\): .*checkpoints.*\n$")
        self.assert_good(root + ".kept")


class Moves(Base):
    def test_told(self):
        result = e2e.run("train", "told", "train.steps=4", "train.save_interval=2", "layout.n=2", *QUICK)
        self.assert_ok(result)
        root = os.path.join(e2e.out("told"), "checkpoints")
        for step, figures in ((2, r" \(\d+\.\d\d s, \d+ MB/s; training waited 0\.\d{3} s\)"), (4, r" \(\d+\.\d\d s, \d+ MB/s\)")):
            self.assertRegex(result.stdout, re.escape(f"checkpoint  {root}/step-0000000{step}") + figures + "\n")
        records = [json.loads(line) for line in open(os.path.join(e2e.out("told"), "metrics.jsonl"))]
        records = [r for r in records if "checkpoint" in r]
        self.assertEqual([r["step"] for r in records], [2, 4])
        for r in records:
            manifest = json.load(open(os.path.join(r["checkpoint"], "manifest.json")))
            self.assertEqual(r["bytes"], sum(f["bytes"] for f in manifest["files"]))
            self.assertLessEqual(r["held_up_seconds"], r["seconds"])
        self.assertEqual([r["async"] for r in records], [True, False])

    def test_reference_there_and_back(self):
        self.assert_ok(e2e.run("reference", "moves", "train.steps=4", *QUICK))
        self.assert_ok(e2e.run("train", "moves", "train.steps=8", "layout.p_a=2", "layout.n=2", "train.resume=latest", *QUICK))
        self.assert_ok(e2e.run("reference", "moves", "train.steps=12", "train.resume=latest", *QUICK))
        self.assert_ok(e2e.run("train", "still", "train.steps=12", *QUICK))
        self.assert_same("moves", "still")

    def test_without_steps(self):
        self.assert_ok(e2e.run("train", "from", "train.steps=4", *QUICK))
        source = os.path.join(e2e.out("from"), "checkpoints", "step-00000004")
        result = e2e.run("train", "to", "train.steps=0", "layout.m=2", "layout.p_f=2", f"train.resume={source}", *QUICK)
        self.assert_ok(result)
        self.assertEqual(self.assert_good(os.path.join(e2e.out("to"), "checkpoints")), 4)
        self.assertEqual(len(os.listdir(os.path.join(e2e.out("to"), "checkpoints", "step-00000004"))), 5)  # 4 workers
        self.assert_ok(e2e.run("train", "to", "train.steps=6", "train.resume=latest", *QUICK))
        self.assert_ok(e2e.run("train", "from", "train.steps=6", "train.resume=latest", *QUICK))
        a, b = losses("to"), losses("from")
        for step in (5, 6):
            self.assertLessEqual(abs(a[step][0] - b[step][0]), 1e-5 * b[step][0])
        result = e2e.run("train", "from", "train.steps=3", "train.resume=latest", *QUICK)
        self.assertEqual(result.returncode, 2)
        self.assertRegex(result.stderr, r"beyond the last step .*raise train.steps; 0 only loads, evaluates and saves\n$")


if __name__ == "__main__":
    unittest.main(verbosity=2, warnings="ignore")
