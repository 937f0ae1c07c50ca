#!/usr/bin/env python3
"""Writes src/layers/testdata/hf_*.safetensors: tiny random models run by Hugging Face transformers, for hf_test.cc.

    python3 -m venv VENV && VENV/bin/pip install -r scripts/hf_requirements.txt
    VENV/bin/python scripts/make_hf_fixtures.py [FOLDER]

Only needed to make the files anew; the tests read them without Python. docs/formats.md says what is in them.

The models run in fp64 (transformers itself does norms, router softmax and loss in fp32), from weights that are exact in
fp32. Weights and gradients are stored under the names of published checkpoints, as save_pretrained writes them: the way
back from the fused experts in memory is transformers' own.
"""

import json
import os
import sys
import tempfile

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import MixtralConfig, MixtralForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

SEQUENCES, LENGTH, VOCABULARY = 2, 19, 41
# eps is of the size of clipped gradients, so that the update is not just their sign.
ADAM = {"lr": 1e-2, "betas": [0.8, 0.9], "eps": 1e-3, "weight_decay": 0.3, "clip_grad": 1.0, "steps": 3}
# Smallest difference of neighbours among a token's K + 1 largest logits: rounding may not change a choice.
MARGIN = 2e-4

# The auxiliary loss has no weight unless a case gives it one.
SMALL = dict(vocab_size=VOCABULARY, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
             output_router_logits=True, router_aux_loss_coef=0.0, attn_implementation="sdpa",
             experts_implementation="eager")
QWEN = dict(SMALL, hidden_size=24, head_dim=8, num_experts=6, moe_intermediate_size=20, intermediate_size=36)


def rope(theta):
    return {"rope_parameters": {"rope_type": "default", "rope_theta": theta}}


def cases():
    yield "qwen3_moe_renormalised", Qwen3MoeForCausalLM, Qwen3MoeConfig(
        **QWEN, **rope(1000.0), num_hidden_layers=2, num_experts_per_tok=3, norm_topk_prob=True)
    yield "qwen3_moe_plain_dense_first", Qwen3MoeForCausalLM, Qwen3MoeConfig(
        **QWEN, **rope(10000.0), num_hidden_layers=3, num_experts_per_tok=2, norm_topk_prob=False, mlp_only_layers=[0],
        rms_norm_eps=1e-3)
    yield "mixtral", MixtralForCausalLM, MixtralConfig(
        **SMALL, **rope(100.0), hidden_size=32, num_hidden_layers=2, intermediate_size=16, num_local_experts=6,
        num_experts_per_tok=2, rms_norm_eps=1e-5)
    # With several layers there is no constant factor between the auxiliary losses: see docs/formats.md.
    yield "qwen3_moe_aux_one_layer", Qwen3MoeForCausalLM, Qwen3MoeConfig(
        **QWEN | {"router_aux_loss_coef": 0.3}, **rope(1000.0), num_hidden_layers=1, num_experts_per_tok=2,
        norm_topk_prob=True)


def randomise(model, generator):
    for name, p in model.named_parameters():
        value = torch.randn(p.shape, generator=generator) * 0.3
        if p.dim() == 1:  # norms
            value = torch.rand(p.shape, generator=generator) + 0.5
        elif name.endswith("mlp.gate.weight"):
            value = value * 2
        p.data = value.double()


def forward(model, tokens):
    """Loss and outputs on tokens [b, s + 1]; the router sees s positions, as in our model."""
    inputs, labels = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    out = model(input_ids=inputs, labels=inputs, shift_labels=labels, use_cache=False)
    for logits in out.router_logits:
        top = logits.topk(model.config.num_experts_per_tok + 1, dim=-1).values
        if (top[:, :-1] - top[:, 1:]).min() < MARGIN:
            return None
    return out


def published(model, values):
    """`values` by names in memory -> fp32 by names of a published checkpoint."""
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder, state_dict={k: v.detach().float().contiguous() for k, v in values.items()})
        with open(f"{folder}/config.json") as f:
            return load_file(f"{folder}/model.safetensors"), json.load(f)


def run(model, seed):
    """Arrays and expected numbers, or None if a router's choice is too close."""
    generator = torch.Generator().manual_seed(seed)
    randomise(model, generator)
    tokens = torch.randint(0, VOCABULARY, (SEQUENCES, LENGTH + 1), generator=generator)
    named = dict(model.named_parameters())
    before, config = published(model, named)
    choices = {}
    hooks = [layer.mlp.gate.register_forward_hook(lambda _, __, made, i=i: choices.update({i: made[2]}))
             for i, layer in enumerate(model.model.layers) if hasattr(layer.mlp, "experts")]
    out = forward(model, tokens)
    for hook in hooks:
        hook.remove()
    if out is None:
        return None
    arrays = {"tokens": tokens, "logits": out.logits.detach().float()}
    arrays |= {f"weights.{k}": v for k, v in before.items()}
    arrays |= {f"choice.{i}": ids.to(torch.int32) for i, ids in choices.items()}
    expected = {"loss": out.loss.item(), "aux_loss": out.aux_loss.item()}

    groups = [{"params": [p for p in named.values() if p.dim() > 1], "weight_decay": ADAM["weight_decay"]},
              {"params": [p for p in named.values() if p.dim() == 1], "weight_decay": 0.0}]
    adam = torch.optim.AdamW(groups, lr=ADAM["lr"], betas=ADAM["betas"], eps=ADAM["eps"])
    expected["grad_norms"], expected["losses_after"] = [], []
    for step in range(ADAM["steps"]):
        adam.zero_grad()
        out.loss.backward()
        if step == 0:
            gradients, _ = published(model, {k: p.grad for k, p in named.items()})
            arrays |= {f"gradients.{k}": v for k, v in gradients.items()}
        norm = torch.nn.utils.clip_grad_norm_(named.values(), ADAM["clip_grad"])
        assert norm > 1.1 * ADAM["clip_grad"], f"clipping would not show: {norm}"
        expected["grad_norms"].append(norm.item())
        adam.step()
        out = forward(model, tokens)
        if out is None:
            return None
        expected["losses_after"].append(out.loss.item())
        if step == 0:
            after, _ = published(model, named)
            arrays |= {f"one_step.{k}": after[k] for k in ("model.norm.weight", "lm_head.weight")}
    after, _ = published(model, named)
    arrays |= {f"all_steps.{k}": after[k] for k in ("model.norm.weight", "lm_head.weight")}
    return arrays, {"config": config, "adam": ADAM, "expected": expected}


def main():
    here = os.path.dirname(os.path.abspath(__file__))
    folder = sys.argv[1] if len(sys.argv) > 1 else os.path.join(here, "../src/layers/testdata")
    torch.set_num_threads(1)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    for name, make, config in cases():
        model = make(config)
        for seed in range(1000):
            result = run(model, seed)
            if result is not None:
                break
        else:
            sys.exit(f"{name}: no seed with clear choices")
        arrays, facts = result
        facts["versions"] = {"torch": torch.__version__, "transformers": transformers.__version__}
        path = os.path.join(folder, f"hf_{name}.safetensors")
        # One entry: the order of several is not the same in every run.
        save_file(arrays, path, metadata={"facts": json.dumps(facts, sort_keys=True)})
        print(f"{path}: seed {seed}, {os.path.getsize(path)} bytes, {facts['expected']}")


if __name__ == "__main__":
    main()
