#!/usr/bin/env python3
"""Proof of use: models that transformers made are trained further by disagmoe, in separate processes, and go back.

    VENV/bin/python scripts/prove_hf.py --build build [--out FOLDER] [FAMILY ...]
                                                                  (VENV: scripts/hf_requirements.txt)

For each family: a tiny model with random weights is saved by transformers with a tokenizer beside it; `disagmoe data`
prepares text with that tokenizer; `disagmoe train` trains on it with attention and experts apart; `disagmoe export`
writes a folder, which transformers loads. Meanwhile transformers and torch.optim.AdamW train the same model on the same
batches, in fp64, in this process. Compared are the loss of every step, the held-out loss, the weights, and what both
generate. Ends with 1 if a difference is above its limit.
"""

import argparse
import copy
import glob
import json
import os
import shutil
import subprocess
import sys

os.environ["HF_HUB_OFFLINE"] = "1"

import numpy
import torch
import torch.nn.functional as F
import transformers

import hf_cases
from make_hf_fixtures import decayed

HERE = os.path.dirname(os.path.abspath(__file__))
TOKENIZER = os.path.join(HERE, "../testdata/tokenizers/byte_level")
TEXTS = sorted(glob.glob(os.path.join(HERE, "../docs/*.md")))
VOCABULARY = 448  # above the tokenizer's 403, as published models have theirs
GENERATED = 16
STEPS, SEQUENCE, MICRO_BATCH, MICRO_BATCHES, EVALUATIONS, SEED = 12, 48, 2, 3, 4, 1234
ADAM = {"lr": 3e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
CLIP = 1.0
LIMITS = {"training loss": 1e-5, "held-out loss": 1e-5, "theirs": 1e-5, "weights": 1e-2}
FAMILIES = ("qwen3_moe", "qwen3_moe_tied", "qwen2_moe", "gpt_oss", "deepseek", "deepseek_v2_lite", "deepseek_v2",
            "deepseek_v3", "mixtral_window", "olmoe")


class Failed(Exception):
    pass


def disagmoe(build, *words):
    done = subprocess.run([os.path.join(build, "disagmoe"), *words], capture_output=True, text=True, timeout=600)
    if done.returncode != 0:
        raise Failed(f"disagmoe {' '.join(words)}\n{done.stderr.strip()[-2000:]}")
    return done.stdout


def mix64(z):
    """SplitMix64, as in src/base/rng.h."""
    mask = (1 << 64) - 1
    z = (z + 0x9E3779B97F4A7C15) & mask
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & mask
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & mask
    return z ^ (z >> 31)


def permuted(i, n, key):
    """Sample i of an epoch of n: docs/formats.md, "Samples drawn from it"."""
    half = max(1, ((n - 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    while True:
        left, right = i >> half, i & mask
        for turn in range(8):
            left, right = right, left ^ (mix64(key ^ mix64(right * 8 + turn)) & mask)
        i = left << half | right
        if i < n:
            return i


class Data:
    """The batches of a run, drawn here again."""

    def __init__(self, prefix):
        with open(prefix + ".idx", "rb") as f:
            code = f.read(18)[17]
        self.tokens = numpy.fromfile(prefix + ".bin", {4: "<i4", 8: "<u2"}[code]).astype("int64")
        self.end = len(self.tokens) * 98 // 100  # data.split = "98,2"
        self.samples = (self.end - 1) // SEQUENCE
        name = 0xCBF29CE484222325
        for c in b"batches":
            name = (name ^ c) * 0x100000001B3 & (1 << 64) - 1
        self.seed = mix64(SEED ^ mix64(name))

    def at(self, begin):
        return torch.from_numpy(self.tokens[begin:begin + SEQUENCE + 1])

    def training(self, step):
        count = MICRO_BATCH * MICRO_BATCHES
        rows = []
        for g in range(step * count, (step + 1) * count):
            epoch, i = divmod(g, self.samples)
            rows.append(self.at(permuted(i, self.samples, mix64((self.seed + epoch) & (1 << 64) - 1)) * SEQUENCE))
        return torch.stack(rows)

    def held_out(self):
        samples = (len(self.tokens) - self.end - 1) // SEQUENCE
        return torch.stack([self.at(self.end + g % samples * SEQUENCE) for g in range(EVALUATIONS * MICRO_BATCH)])


def loss_of(model, tokens):
    logits = model(tokens[:, :-1], use_cache=False).logits
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def train_with_transformers(model, data):
    named = list(model.named_parameters())
    groups = [{"params": [p for n, p in named if decayed(n, p)], "weight_decay": ADAM["weight_decay"]},
              {"params": [p for n, p in named if not decayed(n, p)], "weight_decay": 0.0}]
    adam = torch.optim.AdamW(groups, **{k: v for k, v in ADAM.items() if k != "weight_decay"})
    losses = []
    for step in range(STEPS):
        adam.zero_grad()
        loss = loss_of(model, data.training(step))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        adam.step()
        losses.append(loss.item())
    with torch.no_grad():
        return losses, loss_of(model, data.held_out()).item()


def make_model(case, folder):
    """As a stranger would: a configuration, random weights, save_pretrained, tokenizer files beside it."""
    case.config.vocab_size, case.config.eos_token_id, case.config.initializer_range = VOCABULARY, 400, 0.1
    torch.manual_seed(1)
    model = case.make()
    for module in model.modules():  # zero where a model is new
        if hasattr(module, "e_score_correction_bias"):
            module.e_score_correction_bias.data.normal_(std=0.2)
        if hasattr(module, "sinks"):
            module.sinks.data.normal_()
    model.save_pretrained(folder)
    case.finish(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(os.path.join(TOKENIZER, name), folder)
    return sum(p.numel() for p in model.parameters())


def settings(folder, prefix, run, layout):
    return [f"model.from={folder}", f"data.path={prefix}", f"out={run}", *layout, "model.router_aux_loss=none",
            "model.router_bias_update_rate=0",
            f"train.steps={STEPS}", f"train.seq_length={SEQUENCE}", f"train.micro_batch_size={MICRO_BATCH}",
            f"train.micro_batches={MICRO_BATCHES}", f"train.lr={ADAM['lr']}", f"train.min_lr={ADAM['lr']}",
            "train.lr_warmup_steps=0", f"train.weight_decay={ADAM['weight_decay']}", f"train.adam_eps={ADAM['eps']}",
            f"train.adam_beta1={ADAM['betas'][0]}", f"train.adam_beta2={ADAM['betas'][1]}", f"train.clip_grad={CLIP}",
            f"train.seed={SEED}", f"train.eval_micro_batches={EVALUATIONS}",
            "transport.join_timeout_s=600", "data.split=98,2"]  # also on a machine with much else to do


def metrics(run):
    with open(os.path.join(run, "metrics.jsonl")) as f:
        lines = [json.loads(line) for line in f]
    losses = [line["loss"] for line in lines if "loss" in line]
    held_out = [line["held_out_loss"] for line in lines if "held_out_loss" in line]
    return losses, held_out[-1]


def relative(a, b):
    return abs(a - b) / abs(b)


def distance(a, b):
    """Of all parameters of two models."""
    b = dict(b.named_parameters())
    return torch.stack([((p - b[n]) ** 2).sum() for n, p in a.named_parameters()]).sum().sqrt().item()


def likeliest(model, prompt, count):
    tokens = list(prompt)
    for _ in range(count):
        with torch.no_grad():
            tokens.append(model(torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax().item())
    return tokens[len(prompt):]


def same_tokens(arguments, model, folder, data):
    """How many of the likeliest next tokens `disagmoe generate` and transformers have in common, from the first on."""
    prompt = data.held_out()[0][:8].tolist()
    made = json.loads(disagmoe(arguments.build, "generate", folder, "--prompt-tokens", ",".join(map(str, prompt)),
                               "--tokens", str(GENERATED), "--temperature", "0", "--json"))["tokens"]
    theirs = likeliest(model, prompt, GENERATED)
    return next((i for i, (a, b) in enumerate(zip(made, theirs)) if a != b), len(made))


def prove(case, arguments, prefix, data):
    """A row of the table."""
    base = os.path.join(arguments.out, case.name)
    shutil.rmtree(base, ignore_errors=True)
    folder, run, back = (os.path.join(base, name) for name in ("model", "run", "exported"))
    parameters = make_model(case, folder)
    with open(os.path.join(base, "run.toml"), "w") as f:
        f.write("# All settings are given on the command line.\n")
    disagmoe(arguments.build, "train", f.name, *settings(folder, prefix, run, arguments.layout))
    losses, held_out = metrics(run)
    disagmoe(arguments.build, "export", run, "--out", back, "--dtype", "fp32")

    start, theirs = case.load(folder).double(), case.load(folder).double()
    their_losses, their_held_out = train_with_transformers(theirs, data)
    ours = case.load(back).double()  # refuses a folder with a tensor too few or too many
    with torch.no_grad():
        loaded = loss_of(ours, data.held_out()).item()
    assert len(losses) == STEPS, losses
    return {"family": case.name, "parameters": parameters, "first": losses[0], "last": losses[-1], "held out": held_out,
            "training loss": max(relative(a, b) for a, b in zip(losses, their_losses)),
            "held-out loss": relative(loaded, held_out), "theirs": relative(their_held_out, held_out),
            "generated": same_tokens(arguments, ours, back, data),
            "weights": distance(theirs, ours) / distance(theirs, start)}


HEAD = ("family", "parameters", "loss of step 1", f"of step {STEPS}", "a step's loss, run and transformers",
        "held-out loss of the run", "of the exported folder in transformers", "of the model trained in transformers",
        "distance of the trained weights", f"of {GENERATED} tokens the same")


def line(row):
    return (f"| `{row['family']}` | {row['parameters']} | {row['first']:.4f} | {row['last']:.4f} | "
            f"{row['training loss']:.1e} | {row['held out']:.6f} | {row['held-out loss']:.1e} | {row['theirs']:.1e} | "
            f"{row['weights']:.1e} | {row['generated']} |")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", default="build")
    parser.add_argument("--out", default="out/prove_hf")
    parser.add_argument("--layout", nargs="*", default=["layout.m=2", "layout.n=2"])
    parser.add_argument("families", nargs="*", default=FAMILIES)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    os.makedirs(arguments.out, exist_ok=True)
    prefix = os.path.join(arguments.out, "text")
    print(disagmoe(arguments.build, "data", "--tokenizer", TOKENIZER, "--out", prefix, *TEXTS), end="")
    data = Data(prefix)
    print(f"\n| {' | '.join(HEAD)} |\n|{'---|' * len(HEAD)}")
    failed, told = [], 0
    for case in hf_cases.all_cases(0):
        if case.name not in arguments.families:
            continue
        try:
            row = prove(case, arguments, prefix, data)
            print(line(row), flush=True)
            failed += [f"{case.name}: {key} differs by {row[key]:.1e}, more than {limit}"
                       for key, limit in LIMITS.items() if not row[key] <= limit]
            if row["generated"] < GENERATED:
                failed.append(f"{case.name}: other tokens are generated after {row['generated']}")
        except Failed as why:
            print(f"| `{case.name}` | failed |", flush=True)
            failed.append(f"{case.name}: {why}")
        for words in failed[told:]:
            print(words, file=sys.stderr, flush=True)
        told = len(failed)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
