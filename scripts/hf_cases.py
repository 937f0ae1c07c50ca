"""The models of scripts/make_hf_fixtures.py: their configurations, and what each must show to be worth having."""

import copy
import json
import os

import torch
import transformers
from safetensors.torch import save_file
from transformers.conversion_mapping import get_checkpoint_conversion_mapping, register_checkpoint_conversion_mapping
from transformers.integrations.finegrained_fp8 import _dequantize_fp8_weight
from transformers.integrations.mxfp4 import convert_moe_packed_tensors
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2Experts, DeepseekV2Moe, DeepseekV2TopkRouter

VOCABULARY = 41
BASE = dict(vocab_size=VOCABULARY, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
            bos_token_id=0, eos_token_id=1, pad_token_id=None)
# Pairs turn by 1 / (theta ^ (2 i / d)): low bases, so that every pair turns within a short sequence.
ROPE = {"rope_type": "default", "rope_theta": 1000.0}
YARN = {"rope_type": "yarn", "rope_theta": 100.0, "beta_fast": 32.0, "beta_slow": 1.0,
        "original_max_position_embeddings": 64}
MLA = dict(BASE | {"num_key_value_heads": 4, "max_position_embeddings": 2560}, hidden_size=20, intermediate_size=28,
           kv_lora_rank=12, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=12)

# Keys of the published config.json files that are not the configuration's own: what they are there, and what
# transformers' native classes take for granted.
DEEPSEEK_EXTRA = {"aux_loss_alpha": 0.001, "moe_layer_freq": 1, "pretraining_tp": 1, "seq_aux": True}
PUBLISHED_EXTRA = {
    "deepseek_v2": DEEPSEEK_EXTRA | {"ep_size": 1, "scoring_func": "softmax"},
    "deepseek_v3": {"moe_layer_freq": 1, "pretraining_tp": 1, "ep_size": 1, "scoring_func": "sigmoid",
                    "topk_method": "noaux_tc"},
}
REMOTE = {"deepseek": "deepseek.Deepseek", "deepseek_v2": "deepseek.DeepseekV2", "deepseek_v3": "deepseek.DeepseekV3"}


def published_config(config, saved):
    """The older form of config.json, that of the published models: rope_theta and rope_scaling, torch_dtype."""
    keys = copy.deepcopy(saved)
    rope = keys.pop("rope_parameters")
    keys["rope_theta"] = rope.pop("rope_theta")
    keys["rope_scaling"] = rope if rope["rope_type"] != "default" else None
    if config.model_type.startswith("deepseek"):
        keys.pop("head_dim", None)
        keys.pop("qk_head_dim", None)
        keys.pop("mlp_bias", None)
        keys.pop("rope_interleave", None)
        if keys["rope_scaling"]:
            keys["rope_scaling"]["type"] = keys["rope_scaling"].pop("rope_type")
        module, name = REMOTE[config.model_type].split(".")
        keys["auto_map"] = {"AutoConfig": f"configuration_{module}.{name}Config",
                            "AutoModel": f"modeling_{module}.{name}Model",
                            "AutoModelForCausalLM": f"modeling_{module}.{name}ForCausalLM"}
    if config.model_type == "gpt_oss":
        keys.pop("swiglu_alpha")
        keys["experts_per_token"] = keys["num_experts_per_tok"]
        keys["initial_context_length"] = keys["rope_scaling"]["original_max_position_embeddings"]
    keys["torch_dtype"] = keys.pop("dtype")
    keys["transformers_version"] = "4.46.0"
    return keys | PUBLISHED_EXTRA.get(config.model_type, {})


class Case:
    weights_only = False

    def __init__(self, name, length, architecture, config, dtype=torch.float32, shard="1GB", scales=None,
                 attention="sdpa"):
        self.name, self.length, self.architecture, self.config = name, length, architecture, config
        self.dtype, self.shard, self.scales = dtype, shard, scales or {}
        self.how = {"attn_implementation": attention, "experts_implementation": "eager"}

    def make(self):
        return self.architecture._from_config(copy.deepcopy(self.config), **self.how)

    def scale(self, name):
        return next((s for end, s in self.scales.items() if name.endswith(end)), 1.0)

    def load(self, folder, config=None):
        model, info = self.architecture.from_pretrained(folder, config=config, dtype=torch.float64,
                                                        output_loading_info=True, **self.how)
        assert not any(info.values()), info
        return model

    def finish(self, folder):
        """Beside config.json, the same in the form of published models."""
        with open(f"{folder}/config.json") as f:
            saved = json.load(f)
        with open(f"{folder}/published_config.json", "w") as f:
            f.write(json.dumps(published_config(self.config, saved), indent=2, sort_keys=True) + "\n")

    def check(self, model, inputs, demand):
        """Numbers for facts; demands that what the case is about happens."""
        with open(os.path.join(model.config._name_or_path, "published_config.json")) as f:
            config = type(self.config).from_dict(json.load(f))
        other = self.load(model.config._name_or_path, config).double()
        assert torch.equal(other(inputs).logits, model(inputs).logits), "the two forms of config.json differ"
        return {}

    def changes(self, model, inputs, attribute, value, modules):
        """How many numbers of the logits' rows change when `attribute` of `modules` is another."""
        before = model(inputs).logits
        found = [m for m in model.modules() if isinstance(m, modules) and hasattr(m, attribute)]
        kept = [getattr(m, attribute) for m in found]
        for m in found:
            setattr(m, attribute, value(m))
        after = model(inputs).logits
        for m, old in zip(found, kept):
            setattr(m, attribute, old)
        return int(((before - after).abs().amax(-1) > 1e-3).sum())


class GptOss(Case):
    def check(self, model, inputs, demand):
        facts = super().check(model, inputs, demand)
        experts = type(model.model.layers[0].mlp.experts)
        facts["rows_changed_without_clamp"] = self.changes(model, inputs, "limit", lambda m: 1e9, experts)
        attention = type(model.model.layers[0].self_attn)
        nothing = torch.nn.Parameter(torch.full((model.config.num_attention_heads,), -1e9, dtype=torch.float64))
        facts["rows_changed_without_sinks"] = self.changes(model, inputs, "sinks", lambda m: nothing, attention)
        demand(min(facts.values()) > inputs.numel() // 2, f"clamp or sinks hardly matter: {facts}")
        return facts


class Grouped(Case):
    def check(self, model, inputs, demand):
        facts = super().check(model, inputs, demand)
        router = type(next(l.mlp.gate for l in model.model.layers if hasattr(l.mlp, "gate")))
        facts["rows_changed_without_groups"] = self.changes(model, inputs, "topk_group", lambda m: m.num_group, router)
        if self.config.model_type == "deepseek_v3":
            facts["rows_changed_without_bias"] = self.changes(
                model, inputs, "e_score_correction_bias", lambda m: torch.zeros_like(m.e_score_correction_bias), router)
            # The published code masks the other groups with 0, which a negative score (bias below it) loses against.
            facts["tokens_with_negative_scores_chosen"] = self.negative(model, inputs, router)
            demand(facts["tokens_with_negative_scores_chosen"] > 0, "no negative score chosen")
        rows = [v for k, v in facts.items() if k.startswith("rows")]
        demand(min(rows) > inputs.numel() // 4, f"groups or bias hardly matter: {facts}")
        return facts


    @staticmethod
    def negative(model, inputs, router):
        found = []

        def look(module, _, out):
            scores = out[0].sigmoid() + module.e_score_correction_bias
            found.append((scores.gather(1, out[2]) < 0).any(-1).sum().item())

        hooks = [m.register_forward_hook(look) for m in model.modules() if isinstance(m, router)]
        model(inputs)
        for hook in hooks:
            hook.remove()
        return sum(found)


class DeepseekConfig(transformers.LlamaConfig):
    """DeepSeek-MoE (the first), which transformers does not have: keys as published, defaults of nothing."""
    model_type = "deepseek"


class DeepseekForCausalLM(transformers.LlamaForCausalLM):
    """Llama's attention and dense layers, DeepSeek-V2's mixture with softmax gates that are neither scaled nor
    normalised: what the model's published code computes where norm_topk_prob is false."""
    config_class = DeepseekConfig

    def __init__(self, config):
        super().__init__(config)
        for layer in self.model.layers[config.first_k_dense_replace:]:
            layer.mlp = DeepseekV2Moe(self.routed(config))
        self.post_init()

    @staticmethod
    def routed(config):
        keys = ("hidden_size", "hidden_act", "moe_intermediate_size", "n_routed_experts", "n_shared_experts",
                "num_experts_per_tok")
        made = transformers.DeepseekV2Config(**{k: getattr(config, k) for k in keys}, num_attention_heads=1,
                                             routed_scaling_factor=1.0, topk_method="greedy", mlp_bias=False)
        made._experts_implementation = "eager"
        return made


class FirstDeepseek(Case):
    def make(self):
        """Llama's class leaves experts and routers as they are."""
        model = super().make()
        for module in model.modules():
            if isinstance(module, (DeepseekV2Experts, DeepseekV2TopkRouter)):
                for p in module.parameters(recurse=False):
                    p.data.normal_(std=self.config.initializer_range)
        return model

    def finish(self, folder):
        """transformers has no such model: config.json is the published form."""
        super().finish(folder)
        os.replace(f"{folder}/published_config.json", f"{folder}/config.json")

    def check(self, model, inputs, demand):
        return {}


class PackedGptOss(Case):
    """gpt-oss as published: experts in MXFP4. Weights, and what transformers makes of them."""
    weights_only = True

    def make_weights(self, folder):
        generator = torch.Generator().manual_seed(1)
        model = self.make()
        weights = {}
        for name, p in model.state_dict().items():
            value = (torch.randn(p.shape, generator=generator) * 0.3).to(self.dtype)
            if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
                weights[name] = value
        c, arrays = self.config, {}
        for layer in range(c.num_hidden_layers):
            for name, rows, columns in (("gate_up_proj", 2 * c.intermediate_size, c.hidden_size),
                                        ("down_proj", c.hidden_size, c.intermediate_size)):
                prefix = f"model.layers.{layer}.mlp.experts.{name}"
                shape = (c.num_local_experts, rows, columns // 32)
                blocks = torch.randint(0, 256, shape + (16,), generator=generator, dtype=torch.uint8)
                scales = torch.randint(118, 131, shape, generator=generator, dtype=torch.uint8)
                weights[prefix + "_blocks"], weights[prefix + "_scales"] = blocks, scales
                arrays[prefix] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
        os.makedirs(folder)
        save_file(weights, f"{folder}/model.safetensors", metadata={"format": "pt"})
        saved = published_config(c, json.loads(c.to_json_string(use_diff=False)) | {"dtype": "bfloat16"})
        for key in [k for k in saved if k.startswith("_")]:
            del saved[key]
        saved["architectures"] = ["GptOssForCausalLM"]
        saved["quantization_config"] = {
            "quant_method": "mxfp4",
            "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens",
                                       "lm_head"]}
        with open(f"{folder}/config.json", "w") as f:
            f.write(json.dumps(saved, indent=2, sort_keys=True) + "\n")
        loaded = self.architecture.from_pretrained(
            folder, dtype=torch.float32, quantization_config=transformers.Mxfp4Config(dequantize=True), **self.how)
        for name, value in arrays.items():
            assert torch.equal(loaded.state_dict()[name], value), name
        tokens = torch.randint(0, VOCABULARY, (2, self.length + 1), generator=generator)
        with torch.no_grad():
            arrays["logits"] = loaded.double()(tokens[:, :-1]).logits.float()
        return arrays | {"tokens": tokens}, {}


class BlockedFp8(Case):
    """Two matrices as DeepSeek-V3 publishes them: float8_e4m3fn, and a factor for each block of 128 x 128."""
    weights_only = True

    def make_weights(self, folder):
        generator = torch.Generator().manual_seed(1)
        weights, arrays = {}, {}
        for name, rows, columns in (("model.layers.0.self_attn.o_proj.weight", 129, 131),
                                    ("model.layers.0.mlp.down_proj.weight", 3, 257)):
            value = torch.randn(rows, columns, generator=generator) * 40
            value[0, :6] = torch.tensor([448.0, -448.0, 0.0, -0.0, 2.0**-9, -7 * 2.0**-9])  # largest, zeros, subnormal
            weights[name] = value.clamp(-448, 448).to(torch.float8_e4m3fn)
            scale = torch.rand((rows + 127) // 128, (columns + 127) // 128, generator=generator) * 1e-3 + 1e-5
            weights[name + "_scale_inv"] = scale
            arrays[name] = _dequantize_fp8_weight(weights[name], scale, [128, 128], torch.float32)
        os.makedirs(folder)
        save_file(weights, f"{folder}/model.safetensors", metadata={"format": "pt"})
        return arrays, {}


def qwen(name, length, tied=False, **more):
    keys = dict(hidden_size=24, head_dim=8, num_experts=6, moe_intermediate_size=12, intermediate_size=28,
                rope_parameters=dict(ROPE), num_hidden_layers=2, num_experts_per_tok=3, norm_topk_prob=True)
    return Case(name, length, transformers.Qwen3MoeForCausalLM,
                transformers.Qwen3MoeConfig(**BASE | keys | more, tie_word_embeddings=tied))


def gpt_oss_config(**more):
    keys = dict(hidden_size=20, intermediate_size=12, head_dim=8, num_local_experts=4, num_experts_per_tok=3,
                num_hidden_layers=3, sliding_window=5, swiglu_limit=2.5,
                rope_parameters=YARN | {"factor": 32.0, "truncate": False})
    return transformers.GptOssConfig(**BASE | keys | more)


def all_cases(length):
    yield qwen("qwen3_moe", length)
    yield qwen("qwen3_moe_dense_middle", length, num_hidden_layers=3, mlp_only_layers=[1], num_experts_per_tok=2,
               norm_topk_prob=False, rms_norm_eps=1e-3, moe_intermediate_size=8)
    # With several layers there is no constant factor between the auxiliary losses: see docs/formats.md.
    yield qwen("qwen3_moe_aux_one_layer", length, num_hidden_layers=1, num_experts_per_tok=2,
               output_router_logits=True, router_aux_loss_coef=0.3)
    yield qwen("qwen3_moe_tied", length, tied=True, num_hidden_layers=2, num_experts=5, moe_intermediate_size=8)
    yield Case("qwen2_moe", length, transformers.Qwen2MoeForCausalLM, transformers.Qwen2MoeConfig(
        **BASE, hidden_size=24, num_hidden_layers=2, num_experts=6, num_experts_per_tok=3, moe_intermediate_size=8,
        shared_expert_intermediate_size=20, intermediate_size=28, norm_topk_prob=False, qkv_bias=True,
        rope_parameters=dict(ROPE)), shard="20KB")
    yield GptOss("gpt_oss", length, transformers.GptOssForCausalLM, gpt_oss_config(), dtype=torch.bfloat16,
                 scales={"experts.gate_up_proj": 3.0}, attention="eager")
    yield FirstDeepseek("deepseek", length, DeepseekForCausalLM, DeepseekConfig(
        **BASE | {"num_key_value_heads": 4}, hidden_size=24, intermediate_size=28, num_hidden_layers=2,
        first_k_dense_replace=1, moe_intermediate_size=8, n_routed_experts=6, n_shared_experts=2,
        num_experts_per_tok=3, norm_topk_prob=False, scoring_func="softmax", rope_parameters=dict(ROPE),
        **DEEPSEEK_EXTRA))
    yield Case("deepseek_v2_lite", length, transformers.DeepseekV2ForCausalLM, transformers.DeepseekV2Config(
        **MLA, q_lora_rank=None, num_hidden_layers=2, first_k_dense_replace=1, n_routed_experts=6, n_shared_experts=2,
        num_experts_per_tok=3, moe_intermediate_size=12, topk_method="greedy", n_group=1, topk_group=1,
        routed_scaling_factor=1.0, rope_parameters=YARN | {"factor": 40.0, "mscale": 0.707, "mscale_all_dim": 0.707}))
    # mscale and mscale_all_dim differ, so that both scale: the published models have them equal.
    yield Grouped("deepseek_v2", length, transformers.DeepseekV2ForCausalLM, transformers.DeepseekV2Config(
        **MLA, q_lora_rank=16, num_hidden_layers=2, first_k_dense_replace=0, n_routed_experts=8, n_shared_experts=2,
        num_experts_per_tok=3, moe_intermediate_size=8, topk_method="group_limited_greedy", n_group=4, topk_group=2,
        routed_scaling_factor=4.0, rope_parameters=YARN | {"factor": 40.0, "mscale": 1.0, "mscale_all_dim": 0.707}))
    yield Grouped("deepseek_v3", length, transformers.DeepseekV3ForCausalLM, transformers.DeepseekV3Config(
        **MLA, q_lora_rank=16, num_hidden_layers=2, first_k_dense_replace=1, n_routed_experts=12, n_shared_experts=1,
        num_experts_per_tok=4, moe_intermediate_size=8, n_group=3, topk_group=2, norm_topk_prob=True,
        routed_scaling_factor=2.5, num_nextn_predict_layers=0,
        rope_parameters=YARN | {"factor": 40.0, "mscale": 1.0, "mscale_all_dim": 1.0}), dtype=torch.bfloat16)
    mixtral = dict(BASE, hidden_size=24, num_hidden_layers=2, intermediate_size=12, num_local_experts=6,
                   num_experts_per_tok=2, rope_parameters={"rope_type": "default", "rope_theta": 100.0})
    yield Case("mixtral", length, transformers.MixtralForCausalLM, transformers.MixtralConfig(
        **mixtral, sliding_window=None), dtype=torch.float16)
    yield Case("mixtral_window", 33, transformers.MixtralForCausalLM, transformers.MixtralConfig(
        **mixtral | {"num_hidden_layers": 1}, sliding_window=7))
    yield Case("olmoe", length, transformers.OlmoeForCausalLM, transformers.OlmoeConfig(
        **BASE | {"num_key_value_heads": 4}, hidden_size=24, num_hidden_layers=2, intermediate_size=12, num_experts=6,
        num_experts_per_tok=3, norm_topk_prob=False, clip_qkv=None, rope_parameters=dict(ROPE)))
    yield PackedGptOss("gpt_oss_mxfp4", length, transformers.GptOssForCausalLM, gpt_oss_config(
        hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_local_experts=2, num_experts_per_tok=1,
        num_attention_heads=2, num_key_value_heads=1), dtype=torch.bfloat16, attention="eager")
    yield BlockedFp8("deepseek_fp8", length, None, None)


register_checkpoint_conversion_mapping("deepseek", get_checkpoint_conversion_mapping("qwen2_moe"))
