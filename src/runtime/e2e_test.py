"""Runs of the real programs, with real processes: layouts over UCX, restart, launchers, deaths.

usage: e2e_test.py BUILD_FOLDER [unittest arguments]
"""
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
import unittest

BUILD = os.path.abspath(sys.argv.pop(1))
ROOT = os.path.abspath(os.path.join(os.path.dirname(__file__), "..", ".."))
PROGRAM = os.path.join(BUILD, "disagmoe")
TINY = os.path.join(ROOT, "configs", "tiny.toml")
SMALL = ["train.seq_length=32", "train.micro_batch_size=3", "train.micro_batches=4", "model.hidden_size=32", "model.head_dim=8",
         "model.num_experts=7", "model.moe_intermediate_size=24", "model.num_hidden_layers=4", "train.eval_micro_batches=1"]


def setUpModule():
    global FOLDER, DATA
    FOLDER = tempfile.TemporaryDirectory()
    DATA = os.path.join(FOLDER.name, "text")
    text = os.path.join(FOLDER.name, "source.txt")
    # Always the same: with other text another token's choice of experts may be so near that rounding decides it.
    rng = random.Random(1)
    words = ["".join(rng.choice("etaoinshrdlu") for _ in range(rng.randrange(2, 9))) for _ in range(400)]
    with open(text, "w") as f:
        for _ in range(4000):
            f.write(" ".join(rng.choice(words) for _ in range(rng.randrange(4, 16))) + (".\n\n" if rng.random() < 0.2 else "\n"))
    subprocess.run([PROGRAM, "data", "--out", DATA, "--document-bytes", "512", text], check=True, stdout=subprocess.DEVNULL)


def tearDownModule():
    FOLDER.cleanup()


def out(name):
    return os.path.join(FOLDER.name, name)


def command(what, name, *overrides):
    return [PROGRAM, what, TINY, f"data.path={DATA}", f"out={out(name)}", *SMALL, *overrides]


def run(what, name, *overrides, env=None, timeout=120):
    return subprocess.run(command(what, name, *overrides), capture_output=True, text=True, timeout=timeout,
                          env={**os.environ, **(env or {})})


def metrics(name):
    steps, held_out = {}, {}
    for line in open(os.path.join(out(name), "metrics.jsonl")):
        record = json.loads(line)
        if "held_out_loss" in record:
            held_out[record["step"]] = record["held_out_loss"]
        elif "loss" in record:
            steps[record["step"]] = record
    return steps, held_out


def processes():
    """Worker processes on this machine that belong to this test."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            line = open(f"/proc/{pid}/cmdline", "rb").read().decode().split("\0")
        except OSError:
            continue
        if line[0].endswith("disagmoe-worker") and any(FOLDER.name in word for word in line):
            found.append(int(pid))
    return found


class Base(unittest.TestCase):
    def assert_same(self, a, b, loss=1e-5, norm=1e-4):
        (a, a_held), (b, b_held) = metrics(a), metrics(b)
        self.assertEqual(a.keys(), b.keys())
        for step in a:
            for key, tolerance in (("loss", loss), ("grad_norm", norm), ("aux_loss", loss)):
                self.assertLessEqual(abs(a[step][key] - b[step][key]), tolerance * abs(b[step][key]), f"step {step} {key}")
        for step in b_held:
            self.assertLessEqual(abs(a_held[step] - b_held[step]), loss * b_held[step])

    def assert_ok(self, result):
        self.assertEqual(result.returncode, 0, result.stdout + result.stderr)
        self.assertEqual(result.stderr, "")


class Layouts(Base):
    STEPS = ("train.steps=20", "train.save=false")

    @classmethod
    def setUpClass(cls):
        cls.reference = run("reference", "reference", *cls.STEPS)

    def layout(self, name, *overrides):
        self.assert_ok(run("train", name, *self.STEPS, *overrides))
        self.assert_same(name, "reference")

    def test_reference(self):
        self.assert_ok(self.reference)

    def test_one_and_one(self):
        self.layout("l1111")

    def test_two_groups(self):
        self.layout("l2212", "layout.p_a=2", "layout.p_f=2", "layout.n=2")

    def test_uneven(self):
        self.layout("l1221", "layout.p_a=1", "layout.p_f=2", "layout.m=2")

    def test_three(self):
        self.layout("l3111", "layout.p_a=3")

    def test_many_workers(self):
        self.layout("l1124", "layout.m=2", "layout.n=4")

    def test_tcp(self):
        self.layout("ltcp", "transport.tls=tcp,self", "layout.n=2")

    def test_paced(self):
        self.layout("lpaced", "transport.paced=true", "transport.paced_gbps=2", "layout.n=2")

    def test_colocated(self):
        self.layout("lcolo", "layout.colocated=true", "layout.m=2")

    def test_colocated_alone(self):
        self.layout("lalone", "layout.colocated=true")

    def test_head_on_attention(self):
        self.layout("lhead", "layout.p_a=3", "layout.p_f=2", "layout.m=2", "layout.head=attention")

    def test_colocated_groups(self):
        self.layout("lcolo2", "layout.colocated=true", "layout.p_a=2", "layout.m=3")

    def test_split_backward(self):
        self.layout("lzb", "schedule.name=af-pipe-zb", "layout.p_a=2", "layout.n=2")

    def test_split_backward_colocated(self):
        self.layout("ldpv", "schedule.name=dualpipe-v", "layout.colocated=true", "layout.p_a=2", "layout.m=2")

    def test_chunks(self):
        self.layout("lchunks", "layout.colocated=true", "layout.p_a=2", "layout.m=2", "layout.virtual_stages=1")

    def test_uneven_experts(self):
        self.layout("lcounts", "layout.n=3", "layout.expert_counts=[[3, 0, 4], [0, 7, 0], [2, 2, 3], [1, 0, 6]]")

    def test_replicas(self):
        self.layout("lreplicas", "layout.replicas=2", "layout.n=2", "layout.expert_counts=[5, 2]", "train.shard_optimizer=true")

    def test_replicas_colocated(self):
        self.layout("lrcolo", "layout.replicas=2", "layout.colocated=true", "layout.p_a=2", "layout.virtual_stages=1",
                    "schedule.name=megatron-overlap")

    def test_sharded_recompute(self):
        self.layout("lshard", "layout.m=2", "layout.n=2", "train.shard_optimizer=true", "train.recompute=layer")


class Models(Base):
    """Other models and empty slices, each beside its own reference."""

    def model(self, name, *overrides, layout=("layout.p_a=2", "layout.p_f=2", "layout.m=2", "layout.n=2")):
        steps = ("train.steps=8", "train.save=false", *overrides)
        self.assert_ok(run("reference", name + "r", *steps))
        self.assert_ok(run("train", name, *steps, *layout))
        self.assert_same(name, name + "r")

    def test_dense_shared_global(self):
        self.model("mdense", "model.first_k_dense_replace=2", "model.n_shared_experts=1", "model.router_aux_loss=global")

    def test_qk_norm_with_empty_slices(self):
        self.model("mqk", "model.qk_norm=true", "train.micro_batch_size=1", layout=("layout.m=3", "layout.p_f=3"))

    def test_long_sequence(self):
        self.model("mlong", "train.seq_length=1024", "train.micro_batch_size=1", "train.micro_batches=2", "train.eval_micro_batches=0")


class Files(Base):
    def test_metrics_trace_config(self):
        self.assert_ok(run("train", "files", "train.steps=4", "layout.n=2"))
        steps, held_out = metrics("files")
        self.assertEqual(sorted(steps), [1, 2, 3, 4])
        self.assertEqual(sorted(held_out), [0, 4])
        for record in steps.values():
            self.assertEqual([w["worker"] for w in record["workers"]], ["A0.0", "F0.0", "F0.1"])
            sent = sum(w["bytes_sent"] for w in record["workers"])
            first = record["workers"][0]  # its own step is the one recorded
            self.assertAlmostEqual(first["compute_seconds"] + first["exposed_seconds"] + first["bubble_seconds"], record["step_seconds"], delta=1e-9)
            for w in record["workers"]:
                parts = w["compute_seconds"] + w["exposed_seconds"] + w["bubble_seconds"]
                self.assertAlmostEqual(parts, record["step_seconds"], delta=0.2 * record["step_seconds"])
                self.assertGreater(w["peak_memory_bytes"], 1e6)
            self.assertGreater(sent, 0)
        trace = json.load(open(os.path.join(out("files"), "trace.json")))
        names = {e["args"]["name"] for e in trace["traceEvents"] if e.get("name") == "process_name"}
        self.assertEqual(len(names), 3)
        # Every token picks k experts in every layer.
        loads = json.load(open(os.path.join(out("files"), "expert_load.json")))
        config = tomllib.load(open(os.path.join(out("files"), "config.toml"), "rb"))
        model, train = config["model"], config["train"]
        pairs = 4 * train["micro_batches"] * train["micro_batch_size"] * train["seq_length"] * model["num_experts_per_tok"]
        self.assertEqual([len(layer) for layer in loads], [model["num_experts"]] * model["num_hidden_layers"])
        for layer in loads:
            self.assertEqual(sum(layer), pairs)
        again = run("train", "files2", "train.steps=4")
        self.assert_ok(again)
        config = os.path.join(out("files"), "config.toml")
        check = subprocess.run([PROGRAM, "schedule", config, "--check"], capture_output=True, text=True)
        self.assertEqual(check.returncode, 0, check.stderr)

    def test_trace_of_weight_gradients(self):
        self.assert_ok(run("train", "weights", "train.steps=4", "schedule.name=af-pipe-zb"))
        stages = {0: (0, 2, 4, 6), 1: (1, 3, 5, 7, 8)}  # of 4 layers: attention; experts and the head
        for rank, held in stages.items():
            events = [json.loads(line) for line in open(os.path.join(out("weights"), "trace", f"rank-{rank:05}.jsonl"))]
            for step in (2, 3, 4):
                mine = [e for e in events if e["step"] == step]
                weights = sorted(e["name"] for e in mine if e["stream"] == "backward" and e["name"].startswith("W"))
                self.assertEqual(weights, sorted(f"W{stage}.{b}" for stage in held for b in range(4)))
                ends = {e["name"]: e["end_ns"] for e in mine if e["stream"] == "backward"}
                for e in mine:
                    if e["name"].startswith("W"):
                        self.assertGreaterEqual(e["begin_ns"], ends["B" + e["name"][1:]])
        result = subprocess.run([PROGRAM, "timeline", out("weights"), "--svg", out("weights.svg")], capture_output=True, text=True)
        self.assertEqual(result.returncode, 0, result.stderr)
        self.assertRegex(open(out("weights.svg")).read(), r"<title>W\d\.\d, ")

    def test_same_bits(self):
        for name in ("bits1", "bits2"):
            self.assert_ok(run("train", name, "train.steps=6", "layout.n=2", "layout.p_a=2"))
        self.assert_same("bits1", "bits2", 0, 0)

    def test_resume(self):
        decay = "train.lr_decay_steps=8"
        self.assert_ok(run("train", "whole", "train.steps=8", "layout.n=2", decay))
        self.assert_ok(run("train", "parts", "train.steps=4", "layout.n=2", decay))
        self.assert_ok(run("train", "parts", "train.steps=8", "layout.n=2", decay, "train.resume=latest"))
        whole, held = metrics("whole")
        parts, parts_held = metrics("parts")
        self.assertEqual(sorted(parts), list(range(1, 9)))
        for step in whole:
            for key in ("loss", "grad_norm", "aux_loss", "lr"):
                self.assertEqual(whole[step][key], parts[step][key], f"step {step} {key}")
        self.assertEqual(held[8], parts_held[8])

    def test_resume_in_another_layout(self):
        decay = "train.lr_decay_steps=8"
        self.assert_ok(run("train", "moved0", "train.steps=8", decay))
        self.assert_ok(run("train", "moved", "train.steps=4", "layout.m=2", "layout.n=3", "train.shard_optimizer=true", decay))
        self.assert_ok(run("train", "moved", "train.steps=8", "layout.p_a=2", "layout.p_f=2", decay, "train.resume=latest"))
        self.assert_same("moved", "moved0")

    def test_resume_with_other_replicas_and_counts(self):
        decay = "train.lr_decay_steps=9"
        two = ("layout.replicas=2", "layout.n=2", "layout.expert_counts=[[5, 2], [0, 7], [7, 0], [3, 4]]")
        self.assert_ok(run("train", "there0", "train.steps=9", decay))
        self.assert_ok(run("train", "there", "train.steps=3", *two, "train.shard_optimizer=true", decay))
        # Each value once: of its size a replica's weights and two moments, not twice.
        folder = os.path.join(out("there"), "checkpoints", "step-00000003")
        size = sum(os.path.getsize(os.path.join(folder, f)) for f in os.listdir(folder) if f.endswith("safetensors"))
        folder = os.path.join(out("there0"), "checkpoints", "step-00000009")
        whole = sum(os.path.getsize(os.path.join(folder, f)) for f in os.listdir(folder) if f.endswith("safetensors"))
        self.assertLess(size, 1.2 * whole)
        self.assert_ok(run("train", "there", "train.steps=6", "layout.n=3", "layout.expert_counts=[1, 6, 0]", decay,
                           "train.resume=latest"))
        self.assert_ok(run("train", "there", "train.steps=9", *two, decay, "train.resume=latest"))
        self.assert_same("there", "there0")

    def test_resume_without_younger_keys(self):
        self.assert_ok(run("train", "younger", "train.steps=2"))
        path = os.path.join(out("younger"), "checkpoints", "step-00000002", "manifest.json")
        manifest = json.load(open(path))
        self.assertIn("replicas = 1\n", manifest["layout"])
        del manifest["sha256"]  # as in older ones
        manifest["layout"] = manifest["layout"].replace("replicas = 1\n", "")
        json.dump(manifest, open(path, "w"))
        self.assert_ok(run("train", "younger", "train.steps=3", "train.resume=latest"))

    def test_files_of_replicas(self):
        self.assert_ok(run("train", "copies", "train.steps=4", "layout.replicas=2", "layout.n=2"))
        names = ["A0.0", "F0.0", "F0.1", "r1.A0.0", "r1.F0.0", "r1.F0.1"]
        steps, _ = metrics("copies")
        self.assertEqual([w["worker"] for w in steps[4]["workers"]], names)
        loads = json.load(open(os.path.join(out("copies"), "expert_load.json")))
        for layer in loads:  # 4 steps of 4 micro-batches of 3 sequences of 32 tokens, 2 experts a token
            self.assertEqual(sum(layer), 4 * 4 * 3 * 32 * 2)
        for command in (["timeline", out("copies"), "--json"], ["verify", out("copies"), "--sample", "0"],
                        ["schedule", os.path.join(out("copies"), "config.toml"), "--check"]):
            result = subprocess.run([PROGRAM, *command], capture_output=True, text=True)
            self.assertEqual(result.returncode, 0, result.stdout + result.stderr)
            if command[0] == "timeline":
                workers = json.loads(result.stdout)["workers"]
                self.assertEqual([w["name"] for w in workers], names)
                self.assertTrue(all(w["compute_ns"] > 0 for w in workers))
            if command[0] == "schedule":
                self.assertIn("2 micro-batches", result.stdout)  # of a replica

    def test_a_new_run_leaves_earlier_checkpoints(self):
        self.assert_ok(run("train", "twice", "train.steps=2", "layout.n=2"))
        self.assert_ok(run("train", "twice", "train.steps=3"))
        self.assertEqual(open(os.path.join(out("twice"), "checkpoints.1", "latest")).read().strip(), "step-00000002")
        self.assertEqual(open(os.path.join(out("twice"), "checkpoints", "latest")).read().strip(), "step-00000003")
        trace = json.load(open(os.path.join(out("twice"), "trace.json")))
        self.assertEqual(len({e["pid"] for e in trace["traceEvents"]}), 2)

    def test_verify_of_a_longer_run(self):
        self.assert_ok(run("train", "longer", "train.steps=3"))
        self.assert_ok(run("train", "longer", "train.steps=6", "train.resume=latest"))
        result = subprocess.run([PROGRAM, "verify", out("longer"), "--sample", "0"], capture_output=True, text=True)
        self.assertEqual(result.returncode, 0, result.stdout + result.stderr)

    def test_bytes_of_a_step(self):
        self.assert_ok(run("train", "bytes", "train.steps=4", "train.eval_interval=2", "layout.n=2"))
        sent = [sum(w["bytes_sent"] for w in r["workers"]) for r in metrics("bytes")[0].values()]
        # Routes differ from step to step, an evaluation in between must not count.
        self.assertLess(max(sent) / min(sent), 1.1)

    def test_resume_of_another_model_is_refused(self):
        self.assert_ok(run("train", "other", "train.steps=2"))
        result = run("train", "other", "train.steps=4", "model.num_experts=6", "train.resume=latest")
        self.assertEqual(result.returncode, 2)
        self.assertRegex(result.stderr, r"(?s)^disagmoe: error: .*the checkpoint is of another run .*num_experts = 6.*num_experts = 7")
        self.assertEqual(result.stderr.count("\n"), 1)

    def test_damaged_checkpoint_is_refused(self):
        self.assert_ok(run("train", "damaged", "train.steps=2"))
        path = os.path.join(out("damaged"), "checkpoints", "step-00000002", "rank-00001.safetensors")
        with open(path, "r+b") as f:
            f.seek(-100, os.SEEK_END)
            f.write(b"\x01\x02\x03\x04")
        result = run("train", "damaged", "train.steps=4", "train.resume=latest")
        self.assertEqual(result.returncode, 2)
        self.assertRegex(result.stderr, r"^disagmoe: error: .*a checkpoint file is corrupt .*rank-00001.*\n$")

    def test_verify(self):
        self.assert_ok(run("train", "verify", "train.steps=5", "layout.n=2"))
        result = subprocess.run([PROGRAM, "verify", out("verify"), "--json", "--sample", "20"], capture_output=True, text=True)
        self.assertEqual(result.returncode, 0, result.stderr)
        report = json.loads(result.stdout)
        self.assertTrue(report["ok"])
        self.assertEqual(len(report["comparisons"]), 5)
        # A run that is not what the reference says.
        path = os.path.join(out("verify"), "metrics.jsonl")
        lines = open(path).read().splitlines()
        record = json.loads(lines[2])
        record["loss"] *= 1.001
        lines[2] = json.dumps(record)
        open(path, "w").write("\n".join(lines) + "\n")
        result = subprocess.run([PROGRAM, "verify", out("verify"), "--sample", "0"], capture_output=True, text=True)
        self.assertEqual(result.returncode, 1)
        self.assertIn("DIFFERS", result.stdout)


class Launchers(Base):
    STEPS = ("train.steps=3", "train.save=false")

    def ranks(self, name, environments, *overrides):
        children = [subprocess.Popen(command("train", name, *self.STEPS, *overrides), stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                                     text=True, env={**os.environ, **env}) for env in environments]
        results = [c.communicate(timeout=60) for c in children]
        return [(c.returncode, o, e) for c, (o, e) in zip(children, results)]

    def test_torchrun(self):
        torchrun = os.path.join(ROOT, ".venv", "bin", "torchrun")
        if not os.path.exists(torchrun):
            self.skipTest("no torchrun")
        env = {**os.environ, "DISAGMOE_SECRET": "0123456789abcdef0123456789abcdef"}
        result = subprocess.run([torchrun, "--standalone", "--nproc-per-node", "2", "--no-python",
                                 *command("train", "torchrun", *self.STEPS)], capture_output=True, text=True, env=env, timeout=120)
        self.assertEqual(result.returncode, 0, result.stderr)
        self.assertEqual(len(metrics("torchrun")[0]), 3)

    def test_slurm_variables(self):
        env = [{"SLURM_PROCID": str(i), "SLURM_NTASKS": "2", "SLURM_LOCALID": str(i), "SLURM_JOB_NODELIST": "localhost",
                "SLURM_STEP_ID": "0", "SLURM_JOB_ID": "77", "SLURM_NNODES": "1", "DISAGMOE_SECRET": "s" * 32} for i in range(2)]
        for code, _, err in self.ranks("slurm", env):
            self.assertEqual((code, err), (0, ""))
        self.assertEqual(len(metrics("slurm")[0]), 3)

    def test_openmpi_variables(self):
        env = [{"OMPI_COMM_WORLD_RANK": str(i), "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": str(i),
                "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29811", "DISAGMOE_SECRET": "s" * 32}
               for i in range(2)]
        for code, _, err in self.ranks("ompi", env):
            self.assertEqual((code, err), (0, ""))

    def test_missing_rank_is_named(self):
        env = [{"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": "29821", "DISAGMOE_SECRET": "s" * 32}]
        begin = time.time()
        (code, _, err), = self.ranks("missing", env, "transport.join_timeout_s=2")
        self.assertLess(time.time() - begin, 10)
        self.assertNotEqual(code, 0)
        self.assertRegex(err, r"^disagmoe: error: .*missing.*1.*\n$")

    def test_no_secret(self):
        env = [{"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29831"}]
        (code, _, err), = self.ranks("nosecret", env)
        self.assertEqual(code, 2)
        self.assertIn("DISAGMOE_SECRET", err)

    def test_wrong_world(self):
        env = [{"RANK": "0", "WORLD_SIZE": "3", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": "29841", "DISAGMOE_SECRET": "s" * 32}]
        (code, _, err), = self.ranks("world", env)
        self.assertEqual(code, 2)
        self.assertRegex(err, r"^disagmoe: error: the number of ranks does not fit the layout .*got 3 ranks, expected 2 .*\n$")


class Failures(Base):
    def broken(self, name, what, *overrides):
        """Starts a long run of three workers, does `what` to the process of one, and waits for the end."""
        child = subprocess.Popen(command("train", name, "train.steps=100000", "train.save_interval=5", "layout.n=2", *overrides),
                                 stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        latest = os.path.join(out(name), "checkpoints", "latest")
        deadline = time.time() + 60
        while not os.path.exists(latest) and time.time() < deadline:
            time.sleep(0.05)
        time.sleep(0.3)
        victim = [pid for pid in processes() if f"out={out(name)}" in open(f"/proc/{pid}/cmdline").read() and
                  b"\0RANK=1\0" in b"\0" + open(f"/proc/{pid}/environ", "rb").read()][0]
        begin = time.time()
        what(victim)
        _, err = child.communicate(timeout=30)
        self.assertLess(time.time() - begin, 10)
        self.assertNotEqual(child.returncode, 0)
        self.assertEqual(err.count("disagmoe: error:"), 1, err)
        self.assertEqual([p for p in processes() if f"out={out(name)}" in open(f"/proc/{p}/cmdline").read()], [])
        # The last checkpoint is good.
        step = int(open(latest).read().strip().split("-")[1])
        self.assert_ok(run("train", name, f"train.steps={step + 2}", "train.lr_decay_steps=100000", "layout.n=2", "train.resume=latest"))
        return err

    def test_killed(self):
        err = self.broken("killed", lambda pid: os.kill(pid, signal.SIGKILL))
        self.assertRegex(err, r"rank 1 \(F-group 0 worker 0\).*killed by signal 9")
        self.assertRegex(err, r"(micro-batch|gradients|weights|checkpoint|joining|loss)")

    def test_stopped(self):
        err = self.broken("stopped", lambda pid: os.kill(pid, signal.SIGSTOP))
        self.assertRegex(err, r"rank 1 \(F-group 0 worker 0\).*stopped answering")

    def test_fault_in_a_worker(self):
        child = subprocess.Popen(command("train", "fault", "train.steps=100000", "train.save_interval=5", "layout.n=2"),
                                 stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        while not os.path.exists(os.path.join(out("fault"), "checkpoints", "latest")):
            time.sleep(0.02)
        folder = os.path.join(out("fault"), "checkpoints")  # the next checkpoint cannot be written: a worker throws
        os.rename(folder, folder + ".kept")
        open(folder, "w").close()
        begin = time.time()
        _, err = child.communicate(timeout=30)
        self.assertLess(time.time() - begin, 10)
        self.assertEqual(child.returncode, 2)
        self.assertRegex(err, r"^disagmoe: error: rank \d \(.*\): .*checkpoints.*\n$")

    def test_segmentation_fault(self):
        err = self.broken("segv", lambda pid: os.kill(pid, signal.SIGSEGV))
        self.assertRegex(err, r"rank 1 \(F-group 0 worker 0\).*killed by signal 11.*(micro-batch|step) \d+")

    def test_launcher_killed(self):
        child = subprocess.Popen(command("train", "orphans", "train.steps=100000"), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        while not os.path.exists(os.path.join(out("orphans"), "metrics.jsonl")):
            time.sleep(0.05)
        child.kill()
        child.wait()
        deadline = time.time() + 10
        while time.time() < deadline and [p for p in processes() if "orphans" in open(f"/proc/{p}/cmdline").read()]:
            time.sleep(0.1)
        self.assertEqual([p for p in processes() if "orphans" in open(f"/proc/{p}/cmdline").read()], [])

    def test_nan(self):
        self.assert_ok(run("train", "nan", "train.steps=3", "train.lr_decay_steps=60"))
        result = run("train", "nan", "train.steps=50", "train.resume=latest", "train.lr=1e30", "train.min_lr=1e30", "train.clip_grad=0",
                     "train.lr_warmup_steps=0")
        self.assertEqual(result.returncode, 2)
        self.assertRegex(result.stderr, r"^disagmoe: error: .* not finite .*step \d+, first seen in .*\n$")
        self.assertEqual(open(os.path.join(out("nan"), "checkpoints", "latest")).read().strip(), "step-00000003")
        self.assert_ok(run("train", "nan", "train.steps=5", "train.lr_decay_steps=60", "train.resume=latest"))

    def test_interrupt(self):
        child = subprocess.Popen(command("train", "interrupt", "train.steps=100000"), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        while not os.path.exists(os.path.join(out("interrupt"), "metrics.jsonl")):
            time.sleep(0.05)
        child.send_signal(signal.SIGINT)
        _, err = child.communicate(timeout=15)
        self.assertNotEqual(child.returncode, 0)
        self.assertEqual(err.count("disagmoe: error:"), 1, err)

    def test_vocabulary(self):
        result = run("train", "vocabulary", "model.vocab_size=100", "layout.m=2")
        self.assertEqual(result.returncode, 2)
        self.assertRegex(result.stderr, r"^disagmoe: error: .*token outside of the vocabulary .*\n$")


if __name__ == "__main__":
    unittest.main(verbosity=2, warnings="ignore")
