#!/usr/bin/env python3
"""Training speed, side by side in one run: what disaggregation gains and what a slow network costs.

usage: bench/train_bench.py [--build build] [--rounds 3] [--json]

All runs train the same small model on the same batches, in turn, so that a machine that speeds up or slows down does so
for all. A run's figure is its fastest step after the first (what else runs on the machine only ever adds time); shown are
medians over rounds, ratios are taken round by round, and the spread is (max - min) / median.
  reference-1   one process, one thread
  reference-2   one process, two threads, which spin at barriers (faster on a quiet machine than to sleep, our default)
  1A+1F         an attention and an FFN worker, one thread each (processes, shared memory)
  paced         the same behind an emulated NIC on which one layer's transfer takes as long as its computation, with
                q = 4: the rule of the schedule, q >= R (1 + T_M2N / T), for that ratio
  gemm          one thread's rate of fp32 matrix products of the experts' shape: the limit of reference-1
"""
import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile

ROOT = os.path.abspath(os.path.join(os.path.dirname(__file__), ".."))
# Attention and FFN take equally long here: see the shares that are printed.
MODEL = """
[model]
vocab_size = 257
hidden_size = 512
num_hidden_layers = 4
num_attention_heads = 8
num_key_value_heads = 4
head_dim = 64
num_experts = 8
num_experts_per_tok = 2
moe_intermediate_size = {de}
[train]
steps = 6
seq_length = 512
micro_batch_size = 1
micro_batches = {micro_batches}
save = false
[trace]
steps = 0
[data]
path = "{data}"
"""


def parse():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", default=os.path.join(ROOT, "build"))
    parser.add_argument("--data", default=os.path.join(ROOT, "build", "data", "text"))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--expert-hidden", type=int, default=432)
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


def train(args, config, out, command, *overrides):
    env = {**os.environ, "OMP_WAIT_POLICY": "active"} if "device.threads=2" in overrides else None
    subprocess.run([os.path.join(args.build, "disagmoe"), command, config, f"out={out}", *overrides], check=True, stdout=subprocess.DEVNULL, env=env)
    steps = [json.loads(line) for line in open(os.path.join(out, "metrics.jsonl"))]
    steps = [s for s in steps if "loss" in s][1:]  # the first one warms up
    return min(steps, key=lambda s: s["step_seconds"])


def gemm_rate(de):
    """GFLOP/s of one thread, fp32, 128 rows an expert: the library that the program uses."""
    code = f"""
import torch, time
torch.set_num_threads(1)
x, w = torch.randn(128, 512), torch.randn(2 * {de}, 512)
out = torch.empty(128, 2 * {de})
best = 0
for _ in range(40):
    t = time.perf_counter()
    for _ in range(20): torch.mm(x, w.t(), out=out)
    best = max(best, 20 * 2 * 128 * 512 * 2 * {de} / (time.perf_counter() - t))
print(best)
"""
    return float(subprocess.run([os.path.join(ROOT, ".venv", "bin", "python"), "-c", code], check=True, capture_output=True, text=True).stdout)


def flops(de, micro_batches):
    h, q, kv, s = 512, 512, 256, 512
    per_token = 4 * (2 * h * (2 * q + 2 * kv) + 4 * q * (s + 1) / 2 + 2 * h * 8 + 6 * h * 2 * de) + 2 * h * 257
    return 3 * per_token * s * micro_batches


def main():
    args = parse()
    if not os.path.exists(args.data + ".idx"):
        sys.exit(f"train_bench: error: no data at {args.data}: ./run demo makes it, or name another with --data")
    with tempfile.TemporaryDirectory() as folder:
        config = os.path.join(folder, "bench.toml")
        with open(config, "w") as f:
            f.write(MODEL.format(de=args.expert_hidden, micro_batches=args.micro_batches, data=os.path.abspath(args.data)))
        out = os.path.join(folder, "out")
        # One layer's transfer as long as its computation: bytes of a micro-batch's rows over the time of F of a layer.
        probe = train(args, config, out, "train")
        layer_s = probe["workers"][0]["compute_seconds"] / (args.micro_batches * 4) / 3  # a third of F + B
        row_bytes = 512 * 512 * 4
        gbps = row_bytes * 8 / layer_s / 1e9
        runs = {
            "reference-1": ("reference", "device.threads=1"),
            "1A+1F": ("train",),
            "reference-2": ("reference", "device.threads=2"),
            "paced": ("train", "schedule.round=4", "transport.paced=true", f"transport.paced_gbps={gbps:.4f}"),
        }
        results = {name: [] for name in runs}
        gemm = []
        for r in range(args.rounds):
            for name, (command, *overrides) in runs.items():
                results[name].append(train(args, config, out, command, *overrides))
            gemm.append(gemm_rate(args.expert_hidden))
            print(f"round {r + 1}/{args.rounds} done", file=sys.stderr)
    seconds = {n: statistics.median(x["step_seconds"] for x in v) for n, v in results.items()}
    spread = {n: (max(x["step_seconds"] for x in v) - min(x["step_seconds"] for x in v)) / seconds[n] for n, v in results.items()}

    def ratio(a, b):  # pair by pair
        return statistics.median(x["step_seconds"] / y["step_seconds"] for x, y in zip(results[a], results[b]))

    shares = results["1A+1F"][-1]["workers"]
    rate = flops(args.expert_hidden, args.micro_batches) / seconds["reference-1"]
    report = {
        "step_seconds": seconds, "spread": spread,
        "compute_seconds": {w["worker"]: w["compute_seconds"] for w in shares},
        "exposed_seconds": {w["worker"]: w["exposed_seconds"] for w in shares},
        "bubble_seconds": {w["worker"]: w["bubble_seconds"] for w in shares},
        "paced_gbps": gbps,
        "speedup_over_reference_1": ratio("reference-1", "1A+1F"),
        "speedup_over_reference_2": ratio("reference-2", "1A+1F"),
        "loss_by_pacing": ratio("paced", "1A+1F") - 1,
        "reference_gflops": rate / 1e9, "gemm_gflops": max(gemm) / 1e9, "reference_mfu": rate / max(gemm),
    }
    if args.json:
        print(json.dumps(report))
        return
    print(f"{'run':<14}{'s / step':>10}{'spread':>9}")
    for name in runs:
        print(f"{name:<14}{seconds[name]:>10.3f}{spread[name]:>8.0%}")
    print("1A+1F, last round: " + "; ".join(f"{w['worker']} computes {w['compute_seconds']:.3f} s, exposed {w['exposed_seconds']:.3f}, "
                                            f"bubble {w['bubble_seconds']:.3f}" for w in shares))
    print(f"(a) 1A+1F against the reference: {report['speedup_over_reference_1']:.2f}x one thread (limit 2), "
          f"{report['speedup_over_reference_2']:.2f}x two threads")
    print(f"(b) behind a NIC of {gbps:.2f} Gbit/s: step {report['loss_by_pacing']:+.1%}")
    print(f"(d) reference, one thread: {report['reference_gflops']:.1f} of {report['gemm_gflops']:.1f} GFLOP/s = "
          f"{report['reference_mfu']:.0%} of the GEMM rate")


if __name__ == "__main__":
    main()
