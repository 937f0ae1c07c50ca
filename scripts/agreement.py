#!/usr/bin/env python3
"""Does the simulator agree with the runtime on this machine? Profiles the real layers, simulates a set of runs from the
profile, runs them, compares operation by operation, and writes the table.

usage: scripts/agreement.py [--build build] [--out docs/agreement.md] [--repeats 3] [--patience 300] [--only EXPRESSION] [--profiles DIR]

One profile a model and dtype, made before all runs; nothing is fitted to a configuration. A run's figure is the median of
its traced steps, and of the repeats the fastest; the profile's figures are made alike. Spread: (slowest - fastest) /
fastest of the repeats. A run beside which other programs took more than 3 % of the processors is made again (twice at
most); one that never was quiet is marked. Use it on a quiet machine: about ten minutes.
"""
import argparse
import json
import os
import random
import re
import resource
import subprocess
import sys
import tempfile
import time

ROOT = os.path.abspath(os.path.join(os.path.dirname(__file__), ".."))
MODEL = """
[model]
vocab_size = 257
hidden_size = 256
num_hidden_layers = 4
num_attention_heads = 4
num_key_value_heads = 2
head_dim = 64
num_experts = 8
num_experts_per_tok = 2
moe_intermediate_size = 256
initializer_range = 0.001
[train]
steps = 14
seq_length = 256
micro_batch_size = 2
micro_batches = 4
lr = 1e-9
min_lr = 0.0
save = false
[trace]
first_step = 3
steps = 12
[data]
path = "{folder}/random"
"""
# Settings of each profile: a model and a dtype.
PROFILES = {
    "small": [],
    "large experts": ["model.moe_intermediate_size=768"],
    "small experts": ["model.moe_intermediate_size=64", "model.num_experts=16"],
    "bf16": ["train.dtype=bf16"],
}
ONE = "train.micro_batch_size=1"
NIC = ["transport.paced=true", "transport.paced_latency_us=20"]


def nic(gbps, *more):
    return [*NIC, f"transport.paced_gbps={gbps}", *more]


# name, profile, settings
CONFIGURATIONS = [
    ("1A+1F, q = 2", "small", [ONE]),
    ("q = 1", "small", [ONE, "schedule.round=1"]),
    ("q = 4", "small", [ONE, "schedule.round=4"]),
    ("M = 8", "small", [ONE, "train.micro_batches=8"]),
    ("M = 6, q = 3, L = 6", "small", [ONE, "train.micro_batches=6", "schedule.round=3", "model.num_hidden_layers=6"]),
    ("L = 2", "small", [ONE, "model.num_hidden_layers=2"]),
    ("b = 2", "small", []),
    ("s = 128", "small", ["train.seq_length=128", ONE]),
    ("s = 128, b = 4", "small", ["train.seq_length=128", "train.micro_batch_size=4"]),
    ("s = 192, between the profile's lengths", "small", ["train.seq_length=192"]),
    ("head on attention", "small", [ONE, "layout.head=attention"]),
    ("recompute", "small", [ONE, "train.recompute=layer"]),
    ("NIC 2 Gbit/s, q = 4", "small", nic(2, ONE, "train.micro_batches=8", "schedule.round=4")),
    ("NIC 1 Gbit/s, q = 4", "small", nic(1, ONE, "train.micro_batches=8", "schedule.round=4")),
    ("NIC 0.5 Gbit/s, q = 4", "small", nic(0.5, ONE, "train.micro_batches=8", "schedule.round=4")),
    ("NIC 1 Gbit/s, q = 2", "small", nic(1, ONE)),
    ("NIC 10 Gbit/s, latency 2 ms", "small", [*nic(10, ONE), "transport.paced_latency_us=2000"]),
    ("colocated, 1 worker", "small", [ONE, "layout.colocated=true"]),
    ("colocated, 2 groups", "small", [ONE, "layout.colocated=true", "layout.p_a=2"]),
    ("colocated, 2 groups, NIC 1 Gbit/s", "small", nic(1, ONE, "layout.colocated=true", "layout.p_a=2", "train.micro_batches=8")),
    ("colocated, experts over 2 workers", "small", ["layout.colocated=true", "layout.m=2"]),
    ("... NIC 1 Gbit/s", "small", nic(1, "layout.colocated=true", "layout.m=2")),
    ("... optimizer sharded", "small", ["layout.colocated=true", "layout.m=2", "train.shard_optimizer=true"]),
    ("De = 768", "large experts", [ONE]),
    ("De = 768, colocated, experts over 2 workers", "large experts", ["layout.colocated=true", "layout.m=2"]),
    ("De = 64, E = 16", "small experts", [ONE]),
    ("De = 64, E = 16, NIC 1 Gbit/s, q = 4", "small experts", nic(1, ONE, "train.micro_batches=8", "schedule.round=4")),
    ("bf16", "bf16", [ONE]),
]
# More workers than cores, and uneven routing: not modelled, for the record.
TEXT = ["data.path={folder}/text", "model.initializer_range=0.02", "train.lr=1e-3", "layout.colocated=true", "layout.m=2"]
OUTSIDE = [
    ("experts over 2 workers, learning from text", "small", TEXT),
    ("2A+1F", "small", ["layout.m=2"]),
    ("1A+2F", "small", ["layout.n=2"]),
    ("2A+2F", "small", ["layout.m=2", "layout.n=2"]),
]
PAGE = """# Does the simulator agree with the runtime?

Made by `scripts/agreement.py`, on the machine that it names. `disagmoe profile` measures the real layers once a model and dtype; `disagmoe simulate
--profile` predicts each run from it; `disagmoe train` runs it as processes over UCX; `--against` compares every operation. Nothing is fitted to a
configuration.

@FACTS@

@TABLE@

Random tokens, small weights (a token's embedding decides its experts) and a learning rate of next to nothing, so that routing is even. Model, unless a row says otherwise: H = 256, 4 heads of 64 (2 KV), E = 8, k = 2, De = 256, L = 4, M = 4, b = 2, s = 256; rows with `1A+1F` and below it have
b = 1 until one says b = 2, colocated ones over 2 workers b = 2. Columns after `same order`: predicted over measured time of each kind of operation, summed
over workers. Bold: off by more than 10 %. †: never quiet, other programs took more than 3 % of the processors.

Even random tokens do not spread evenly (messages of a layer were 182 to 225 KB where even routing gives 206): behind a slow NIC every exchange between
two expert workers waits for the fuller message.

What is *not* modelled, for the record: more workers than cores (the simulator gives each a core of its own, as a cluster would), and uneven routing (on text, a
router that learns sends most of a layer's tokens to a few experts at first; with several FFN workers each exchange then waits for the fuller one):

@OUTSIDE@

## What is modelled

| | how |
|---|---|
| order of computations, transfers, receive slots | the schedule that the runtime executes, the same object |
| a computation | measured as a whole in the runtime (unpacking, layer, packing, posting), interpolated by tokens; attention by sequence length too; experts by rows, pairs and experts held, at uniform routing |
| a message | its exact bytes (uniform routing over several FFN workers); time from posted to there as measured, plus waking up |
| the emulated NIC | each direction of each worker holds bytes / bandwidth; latency; never faster than the wire below |
| end of a step | all sum, then all update; the slowest counts. A step is as long as its slowest worker's, which includes the pause before the next |

Not modelled: workers that share cores, uneven routing, the processor time that transport threads take from computations beyond what the profile saw,
checkpoints, evaluation, memory.
"""
QUIET, TRIES = 0.03, 3


def parse():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", default=os.path.join(ROOT, "build"))
    parser.add_argument("--out", default=os.path.join(ROOT, "docs", "agreement.md"))
    parser.add_argument("--patience", type=float, default=300, help="seconds, in all, to wait for other programs to pause")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", default="", help="configurations whose name this expression matches; prints, writes no page")
    parser.add_argument("--profiles", help="folder to keep the profiles in, and to take them from where they are there")
    return parser.parse_args()


class Machine:
    """Runs the program, and knows what share of the processors others took meanwhile."""

    def __init__(self, build, patience):
        self.patience = patience  # seconds in all
        self.program = os.path.join(build, "disagmoe")

    def run(self, *words, **kwargs):
        return subprocess.run([self.program, *words], check=True, **kwargs)

    @staticmethod
    def busy():
        fields = [float(x) for x in open("/proc/stat").readline().split()[1:9]]
        children = resource.getrusage(resource.RUSAGE_CHILDREN)
        everybody = (sum(fields) - fields[3] - fields[4]) / os.sysconf("SC_CLK_TCK")
        return everybody - children.ru_utime - children.ru_stime

    def wait(self):
        """Until nobody else computes, as long as patience lasts."""
        while self.patience > 0:
            busy = self.busy()
            time.sleep(0.3)
            self.patience -= 0.3
            if self.busy() - busy <= QUIET * 0.3 * len(os.sched_getaffinity(0)):
                return

    def quiet_run(self, *words):
        """The share that others took in the last of some tries, the first that was quiet."""
        for _ in range(TRIES):
            self.wait()
            begin, busy = time.monotonic(), self.busy()
            self.run(*words, stdout=subprocess.DEVNULL)
            share = (self.busy() - busy) / ((time.monotonic() - begin) * len(os.sched_getaffinity(0)))
            if share <= QUIET:
                break
        return share


def profile(machine, config, folder, name):
    path = os.path.join(folder, name.replace(" ", "-") + ".json")
    if not os.path.exists(path):
        print(f"profile: {name}", file=sys.stderr, flush=True)
        machine.run("profile", config, *PROFILES[name], "--out", path, "--patience", str(max(0, machine.patience)),
                    stdout=subprocess.DEVNULL)
    return path


def measure(machine, config, out, settings, profile_path):
    """One repeat: simulated and measured, from `simulate --against`."""
    share = machine.quiet_run("train", config, f"out={out}", *settings)
    text = machine.run("simulate", config, *settings, "--profile", profile_path, "--against", out, "--json",
                       capture_output=True, text=True).stdout
    return {**json.loads(text), "others": share}


def kinds(repeat):
    """Simulated and measured time of each kind of operation, over all workers."""
    sums = {}
    for worker in repeat["against"]["workers"]:
        for kind, times in worker["kinds"].items():
            old = sums.get(kind, (0, 0))
            sums[kind] = (old[0] + times["simulated_ns"], old[1] + times["measured_ns"])
    return sums


def row(name, repeats):
    best = min(repeats, key=lambda r: r["against"]["measured_ns"])
    worst = max(r["against"]["measured_ns"] for r in repeats)
    measured = best["against"]["measured_ns"]
    return {
        "name": name,
        "simulated_ms": best["step_ns"] / 1e6,
        "measured_ms": measured / 1e6,
        "spread": worst / measured - 1,
        "ratio": best["step_ns"] / measured,
        "same_order": all(r["against"]["same_order"] for r in repeats),
        "differences": [w["difference"] for r in repeats for w in r["against"]["workers"] if w["difference"]],
        "kinds": kinds(best),
        "noisy": best["others"] > QUIET,
    }


KINDS = ["attention forward", "attention backward", "FFN forward", "FFN backward", "head forward", "optimizer"]


def table(rows):
    lines = ["| configuration | predicted ms | measured ms | spread | predicted / measured | same order | " +
             " | ".join(KINDS) + " |", "|---|---|---|---|---|---|" + "---|" * len(KINDS)]
    for r in rows:
        def of(kind):
            simulated, measured = r["kinds"].get(kind, (0, 0))
            return f"{simulated / measured:.2f}" if measured > 0 else "–"
        mark = " †" if r["noisy"] else ""
        off = "**" if abs(r["ratio"] - 1) > 0.1 else ""
        lines.append(f"| {r['name']}{mark} | {r['simulated_ms']:.1f} | {r['measured_ms']:.1f} | {r['spread']:.1%} | "
                     f"{off}{r['ratio']:.3f}{off} | {'yes' if r['same_order'] else 'no'} | " + " | ".join(of(k) for k in KINDS) + " |")
    return "\n".join(lines)


def page(rows, over, machine_facts):
    within = sum(abs(r["ratio"] - 1) <= 0.1 for r in rows)
    ordered = sum(r["same_order"] for r in rows + over)
    worst = max(rows, key=lambda r: abs(r["ratio"] - 1))
    facts = (f"{within} of {len(rows)} steps within 10 %, the worst {worst['ratio'] - 1:+.1%} ({worst['name']}); the same operations in "
             f"the same order on every worker and stream in {ordered} of {len(rows) + len(over)} runs. Measured on {machine_facts}.")
    return (PAGE.replace("@FACTS@", facts).replace("@TABLE@", table(rows)).replace("@OUTSIDE@", table(over)))


def make_data(machine, folder):
    """Random bytes, which small weights route evenly; and text, our own sources."""
    with open(os.path.join(folder, "random.txt"), "wb") as f:
        f.write(random.Random(1).randbytes(1 << 20))
    with open(os.path.join(folder, "text.txt"), "w") as f:
        for base, _, names in sorted(os.walk(os.path.join(ROOT, "src"))):
            f.writelines(open(os.path.join(base, n), errors="replace").read() for n in sorted(names) if n.endswith(".cc"))
    for name in ("random", "text"):
        path = os.path.join(folder, name)
        machine.run("data", "--out", path, path + ".txt", stdout=subprocess.DEVNULL)


def main():
    args = parse()
    machine = Machine(args.build, args.patience)
    with tempfile.TemporaryDirectory() as folder:
        make_data(machine, folder)
        config = os.path.join(folder, "agreement.toml")
        with open(config, "w") as f:
            f.write(MODEL.format(folder=folder))
        profiles = args.profiles or folder
        os.makedirs(profiles, exist_ok=True)
        chosen = [c for c in CONFIGURATIONS + OUTSIDE if re.search(args.only, c[0])]
        paths = {name: profile(machine, config, profiles, name) for name in dict.fromkeys(c[1] for c in chosen)}
        results = {c[0]: [] for c in chosen}
        for repeat in range(args.repeats):
            for name, which, settings in chosen:
                out = os.path.join(folder, "out")
                words = [word.format(folder=folder) for word in [*PROFILES[which], *settings]]
                r = measure(machine, config, out, words, paths[which])
                results[name].append(r)
                print(f"{repeat + 1}/{args.repeats} {name}: {r['against']['ratio']:.3f}", file=sys.stderr, flush=True)
        rows = [row(c[0], results[c[0]]) for c in chosen]
        over = [r for r in rows if r["name"] in [c[0] for c in OUTSIDE]]
        rows = [r for r in rows if r not in over]
        for r in rows + over:
            for difference in r["differences"][:1]:
                print(f"{r['name']}: {difference}", file=sys.stderr)
        if args.only:
            print(table(rows + over))
            return
        facts = json.load(open(next(iter(paths.values()))))["machine"]
        with open(args.out, "w") as f:
            f.write(page(rows, over, f"{facts['cores']} cores, {facts['cpu']}"))
        print(args.out)


if __name__ == "__main__":
    main()
