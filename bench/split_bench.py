#!/usr/bin/env python3
"""af-pipe against af-pipe-zb (backward split, weight gradients in the waits) on the demo's model: runs in turn, the medians
of each run's steps, ratios above 1 mean that the split is faster. Two minutes on two quiet cores.

usage: bench/split_bench.py [--build build] [--rounds 4]      (needs build/data/text: ./run demo makes it)
"""
import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile

ROOT = os.path.abspath(os.path.join(os.path.dirname(__file__), ".."))
NIC = ["transport.paced=true", "transport.paced_gbps=0.626"]
CASES = [
    ("M = 4", []),
    ("M = 4, NIC 0.626 Gbit/s, q = 4", [*NIC, "schedule.round=4"]),
    ("M = 4, NIC 0.626 Gbit/s, q = 2", [*NIC, "schedule.round=2"]),
    ("M = 1, NIC 0.626 Gbit/s", [*NIC, "train.micro_batches=1"]),
]
SHORT = ["train.steps=16", "train.save=false", "train.save_interval=0", "train.eval_interval=0", "train.eval_micro_batches=0", "trace.steps=0"]


def step_seconds(build, out, schedule, settings):
    command = [os.path.join(build, "disagmoe"), "train", "configs/demo.toml", f"out={out}", f"schedule.name={schedule}", *SHORT, *settings]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(done.stderr)
    with open(os.path.join(out, "metrics.jsonl")) as lines:
        steps = [json.loads(line) for line in lines]
    return statistics.median([s["step_seconds"] for s in steps if "step_seconds" in s][3:])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", default="build")
    parser.add_argument("--rounds", type=int, default=4)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for name, settings in CASES:
            times = {"af-pipe": [], "af-pipe-zb": []}
            for turn in range(options.rounds):
                for schedule in sorted(times, reverse=turn % 2 == 1):
                    times[schedule].append(step_seconds(options.build, os.path.join(folder, schedule), schedule, settings))
            ratios = [whole / split for whole, split in zip(times["af-pipe"], times["af-pipe-zb"])]
            print(f"{name}: {statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})", flush=True)


if __name__ == "__main__":
    main()
