#!/usr/bin/env python3
"""What saving costs a step: without checkpoints, written while training waits, written while it goes on.

Runs in turn; medians over the rounds. A save's cost is what the steps since the one before took longer than without
checkpoints, and the time in which training waited for it. The last checkpoint of a run is not counted.

usage: bench/save_bench.py [--build DIR] [--rounds N] [--interval STEPS] [KEY=VALUE ...]
"""
import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile

ROOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..")
MODEL = ["model.hidden_size=256", "model.head_dim=32", "model.num_attention_heads=8", "model.num_hidden_layers=4", "model.num_experts=16",
         "model.moe_intermediate_size=512", "train.micro_batches=4", "train.eval_micro_batches=0", "trace.steps=0"]
WAYS = {"none": ["train.save=false"], "waiting": ["train.async_save=false"], "going on": ["train.async_save=true"]}


def run(options, out, settings):
    command = [os.path.join(options.build, "disagmoe"), "train", "configs/tiny.toml", f"data.path={options.data}", f"out={out}", *MODEL, *settings]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(done.stderr)
    records = [json.loads(line) for line in open(os.path.join(out, "metrics.jsonl"))]
    last = max(r["step"] for r in records)
    steps = [r["step_seconds"] for r in records if "step_seconds" in r][1:]  # the first one warms up
    saves = [r for r in records if "checkpoint" in r and r["step"] < last]
    return statistics.mean(steps), saves


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", default=os.path.join(ROOT, "build"))
    parser.add_argument("--data", default=os.path.join(ROOT, "build", "data", "text"))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--interval", type=int, default=10)
    parser.add_argument("keys", nargs="*")
    options = parser.parse_args()
    options.build = os.path.abspath(options.build)
    options.data = os.path.abspath(options.data)
    found = {way: [] for way in WAYS}
    for _ in range(options.rounds):
        for way, keys in WAYS.items():
            saving = [] if way == "none" else [f"train.save_interval={options.interval}", "train.keep_checkpoints=1"]
            with tempfile.TemporaryDirectory() as out:
                found[way].append(run(options, out, [f"train.steps={4 * options.interval + 1}", *keys, *saving, *options.keys]))
    without = statistics.median(step for step, _ in found["none"])
    print(f"a step without checkpoints {without:.3f} s; a save every {options.interval} steps")
    print(f"{'training is':12} {'MB':>6} {'written in s':>13} {'waited s':>9} {'steps longer by s':>18} {'a save costs s':>15}")
    for way in ("waiting", "going on"):
        saves = [s for _, of_run in found[way] for s in of_run]
        waited = statistics.median(s["held_up_seconds"] for s in saves)
        longer = (statistics.median(step for step, _ in found[way]) - without) * options.interval
        print(f"{way:12} {saves[0]['bytes'] / 1e6:6.0f} {statistics.median(s['seconds'] for s in saves):13.3f} {waited:9.3f} {longer:18.3f} "
              f"{waited + longer:15.3f}")


if __name__ == "__main__":
    main()
