#!/usr/bin/env python3
"""Writes testdata/hf/CASE/: tiny random models of every family, made and run by Hugging Face transformers.

    python3 -m venv VENV && VENV/bin/pip install -r scripts/hf_requirements.txt
    VENV/bin/python scripts/make_hf_fixtures.py [--out FOLDER] [CASE ...]

Only needed to make the files anew (the same bytes come out); the tests read them without Python. A case is a Hugging
Face folder as save_pretrained writes it, and expected.safetensors: what transformers computed (docs/formats.md).

The models run in fp64 (transformers itself does norms, softmax of the router and RoPE in fp32) from the stored weights.
Weights, gradients and updated weights go by the names of published checkpoints: the way back from the fused experts in
memory is transformers' own.
"""

import argparse
import copy
import json
import math
import os
import shutil
import sys
import tempfile

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import load_file, save_file

import hf_cases

SEQUENCES, LENGTH = 2, 19
# eps is of the size of clipped gradients, so that the update is not just their sign.
ADAM = {"lr": 1e-2, "betas": [0.8, 0.9], "eps": 1e-3, "weight_decay": 0.3, "clip_grad": 1.0, "steps": 3}
# Smallest difference in what a router compares where it decides: rounding may not change a choice.
MARGIN = 2e-4


class Unclear(Exception):
    """This seed does not do: a choice is too close, or something that the case is about does not happen."""


def demand(holds, what):
    if not holds:
        raise Unclear(what)


def decayed(name, parameter):
    """Weight decay is for matrices. Expert biases are [experts, width] in memory, and biases all the same."""
    return parameter.dim() > 1 and not name.endswith("bias")


def randomise(model, case, generator):
    for name, p in list(model.named_parameters()) + list(model.named_buffers()):
        if name.endswith(("inv_freq",)):
            continue
        value = torch.randn(p.shape, generator=generator) * 0.3
        if name.endswith("norm.weight"):
            value = torch.rand(p.shape, generator=generator) + 0.5
        elif name.endswith(("gate.weight", "router.weight")):
            value = value * 2
        elif name.endswith("e_score_correction_bias"):
            value = value * 2.5
        elif name.endswith("sinks"):
            value = value * 4
        p.data = (value * case.scale(name)).to(p.dtype)


def gaps(values, count, ordered):
    """Differences of the `count` largest and the next one: of all neighbours, or only at the border."""
    top = values.topk(min(count + 1, values.shape[-1]), dim=-1).values
    top = top[top[:, -1] > -1e30] if top.shape[-1] > count else top  # nothing left to choose from: no border
    differences = top[:, :-1] - top[:, 1:]
    return differences if ordered else differences[:, count - 1:count]


def compared(config, router, logits):
    """What the router compares: scores of groups (None without groups), and of experts in the chosen groups."""
    logits = logits.double()
    groups = getattr(config, "n_group", None)
    if config.model_type == "deepseek_v3":
        scores = logits.sigmoid() + router.e_score_correction_bias.double()
        of_groups = scores.view(-1, groups, scores.shape[-1] // groups).topk(2, dim=-1).values.sum(-1)
    elif getattr(config, "topk_method", "greedy") == "group_limited_greedy":
        scores = logits
        of_groups = scores.view(-1, groups, scores.shape[-1] // groups).amax(-1)
    else:
        return None, logits
    kept = torch.zeros_like(of_groups).scatter_(1, of_groups.topk(config.topk_group, dim=-1).indices, 1.0)
    kept = kept.repeat_interleave(scores.shape[-1] // groups, dim=-1)
    return of_groups, scores.masked_fill(kept == 0, float("-inf"))


def clear_choice(config, router, made):
    """The expert ids of a router's call, best gate first; Unclear if rounding might change them."""
    logits, weights, ids = made
    k = config.num_experts_per_tok
    of_groups, of_experts = compared(config, router, logits)
    if of_groups is not None:
        demand(gaps(of_groups, config.topk_group, ordered=False).min() > MARGIN, "groups too close")
    demand(gaps(of_experts, k, ordered=False).min() > MARGIN, "experts too close")
    # The order is that of the gates: logits unless a bias, which is no part of the gate, takes part in the choice.
    gates = logits.double().sigmoid() if config.model_type == "deepseek_v3" else logits.double()
    gates = gates.gather(1, ids)
    order = gates.argsort(dim=-1, descending=True)
    gates = gates.gather(1, order)
    demand(k == 1 or (gates[:, :-1] - gates[:, 1:]).min() > MARGIN, "gates too close")
    ids = ids.gather(1, order)
    same = of_experts.topk(k, dim=-1).indices.sort(dim=-1).values == ids.sort(dim=-1).values
    assert same.all(), "the script's idea of what is compared is wrong"
    assert (weights.gather(1, order).diff(dim=-1) <= 0).all(), "gates do not fall"
    return ids.to(torch.int32)


def forward(model, tokens, choices=None):
    """Mean token loss (and the weighted auxiliary loss where the configuration asks for it), and the outputs."""
    inputs, labels = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    hooks, made = [], {}
    for i, layer in enumerate(model.model.layers):
        router = getattr(layer.mlp, "gate", None) or getattr(layer.mlp, "router", None)
        if router is not None:
            hooks.append(router.register_forward_hook(
                lambda module, _, out, i=i: made.update({i: clear_choice(model.config, module, out)})))
    try:
        out = model(input_ids=inputs, labels=inputs, shift_labels=labels, use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    loss = F.cross_entropy(out.logits.flatten(0, 1), labels.flatten())
    if getattr(out, "aux_loss", None) is not None:
        loss = loss + model.config.router_aux_loss_coef * out.aux_loss
    assert math.isclose(loss.item(), out.loss.item(), rel_tol=1e-6), (loss.item(), out.loss.item())
    if choices is not None:
        choices.update(made)
    return loss, out


def published(model, values):
    """`values` by names in memory -> fp32 by names of a published checkpoint."""
    with tempfile.TemporaryDirectory() as folder:
        config = copy.deepcopy(model.config)
        model.save_pretrained(folder, state_dict={k: v.detach().float().contiguous() for k, v in values.items()})
        model.config = config
        return load_file(f"{folder}/model.safetensors")


def write_model(case, seed, folder):
    """The Hugging Face folder of a case, and the tokens."""
    generator = torch.Generator().manual_seed(seed)
    model = case.make()
    randomise(model, case, generator)
    tokens = torch.randint(0, case.config.vocab_size, (SEQUENCES, case.length + 1), generator=generator)
    model.to(case.dtype)
    for module in model.modules():  # published so: a bias of a few thousandths would be lost in bf16
        if hasattr(module, "e_score_correction_bias"):
            module.e_score_correction_bias.data = module.e_score_correction_bias.data.float()
    model.save_pretrained(folder, max_shard_size=case.shard)
    case.finish(folder)
    return tokens


def run(case, seed, folder):
    """Writes the folder; returns arrays and facts for expected.safetensors."""
    tokens = write_model(case, seed, folder)
    model = case.load(folder).double()
    named = dict(model.named_parameters())
    choices = {}
    loss, out = forward(model, tokens, choices)
    arrays = {"tokens": tokens, "logits": out.logits.detach().float()}
    arrays |= {f"choice.{i}": ids for i, ids in choices.items()}
    facts = {"loss": loss.item(), "grad_norms": [], "losses_after": []}
    if getattr(out, "aux_loss", None) is not None:
        facts["aux_loss"] = out.aux_loss.item()
    facts |= case.check(model, tokens[:, :-1], demand)

    groups = [{"params": [p for n, p in named.items() if decayed(n, p)], "weight_decay": ADAM["weight_decay"]},
              {"params": [p for n, p in named.items() if not decayed(n, p)], "weight_decay": 0.0}]
    adam = torch.optim.AdamW(groups, lr=ADAM["lr"], betas=ADAM["betas"], eps=ADAM["eps"])
    for step in range(ADAM["steps"]):
        adam.zero_grad()
        loss.backward()
        if step == 0:
            arrays |= {f"gradients.{k}": v for k, v in published(model, {k: p.grad for k, p in named.items()}).items()}
        norm = torch.nn.utils.clip_grad_norm_(named.values(), ADAM["clip_grad"])
        demand(norm > 1.1 * ADAM["clip_grad"], f"clipping would not show: {norm}")
        facts["grad_norms"].append(norm.item())
        adam.step()
        loss, _ = forward(model, tokens)
        facts["losses_after"].append(loss.item())
        if step == 0:
            arrays |= {f"one_step.{k}": v for k, v in published(model, named).items()}
    return arrays, facts


def make(case, folder):
    for seed in range(1000):
        shutil.rmtree(folder, ignore_errors=True)
        try:
            if case.weights_only:
                arrays, facts = case.make_weights(folder)
            else:
                arrays, facts = run(case, seed, folder)
            break
        except Unclear as why:
            last = why
    else:
        sys.exit(f"{case.name}: no seed does: {last}")
    facts = {"expected": facts, "adam": ADAM,
             "versions": {"torch": torch.__version__, "transformers": transformers.__version__}}
    # One entry: the order of several is not the same in every run.
    save_file(arrays, f"{folder}/expected.safetensors", metadata={"facts": json.dumps(facts, sort_keys=True)})
    size = sum(os.path.getsize(os.path.join(folder, f)) for f in os.listdir(folder))
    print(f"{case.name}: seed {seed}, {size} bytes, {facts['expected']}", flush=True)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", default=os.path.join(os.path.dirname(os.path.abspath(__file__)), "../testdata/hf"))
    parser.add_argument("cases", nargs="*")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    for case in hf_cases.all_cases(LENGTH):
        if not arguments.cases or case.name in arguments.cases:
            make(case, os.path.join(arguments.out, case.name))


if __name__ == "__main__":
    main()
