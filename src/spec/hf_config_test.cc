// What the keys of config.json mean, by family, and what is said about files that cannot be right.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "base/error.h"
#include "spec/hf_config.h"
#include "spec/model_shape.h"
#include "spec/presets.h"

namespace disagmoe {
namespace {

using nlohmann::json;
using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;

json PresetJson(const std::string& name) { return json::parse(FindPreset(ModelPresetFiles(), name)->text); }
ModelConfig Model(const json& config) { return ReadHfModel(config.dump(), "config.json").model; }
ModelShape Read(const json& config) { return ShapeOf(Model(config), "x"); }
std::string ErrorOf(const std::string& text) {
  try {
    ReadHfModel(text, "config.json");
  } catch (const Error& error) {
    return error.what();
  }
  return "no error";
}
std::string ErrorOf(const json& config) { return ErrorOf(config.dump()); }

// A preset with changes; a change to `discarded` takes the key away.
const json kAway = json(json::value_t::discarded);
json Changed(const std::string& preset, const std::vector<std::pair<std::string, json>>& changes) {
  json config = PresetJson(preset);
  for (const auto& [key, value] : changes) {
    if (value.is_discarded()) config.erase(key);
    else config[key] = value;
  }
  return config;
}

// Four layers of a family, to see which are what.
json Small(const std::string& preset, std::vector<std::pair<std::string, json>> changes) {
  changes.insert(changes.begin(), {"num_hidden_layers", 4});
  return Changed(preset, changes);
}

// transformers, Qwen3MoeDecoderLayer: experts where (l + 1) % decoder_sparse_step == 0 and l is not in mlp_only_layers.
TEST(HfConfig, QwenDenseLayers) {
  const ModelShape step = Read(Small("qwen3-30b-a3b", {{"decoder_sparse_step", 2}}));
  EXPECT_THAT(step.dense, ElementsAre(true, false, true, false));
  EXPECT_EQ(step.dense_hidden, 6144);
  EXPECT_EQ(step.FfnParams(0), 3 * 2048 * 6144);
  EXPECT_EQ(step.AttentionParams(1) - step.AttentionParams(0), 128 * 2048);  // the router
  const ModelShape only = Read(Small("qwen3-30b-a3b", {{"mlp_only_layers", {0, 3}}}));
  EXPECT_THAT(only.dense, ElementsAre(true, false, false, true));
  EXPECT_EQ(Read(PresetJson("qwen3-30b-a3b")).dense_hidden, 0);  // no dense layer: the key is a leftover
}

// modeling_deepseek.py, DeepseekDecoderLayer: experts where l >= first_k_dense_replace and l % moe_layer_freq == 0.
TEST(HfConfig, DeepseekDenseLayers) {
  EXPECT_THAT(Read(Small("deepseek-moe-16b", {})).dense, ElementsAre(true, false, false, false));
  EXPECT_THAT(Read(Small("deepseek-v3", {})).dense, ElementsAre(true, true, true, false));
  EXPECT_THAT(Read(Small("deepseek-v3", {{"first_k_dense_replace", 1}, {"moe_layer_freq", 2}})).dense,
              ElementsAre(true, true, false, true));
}

TEST(HfConfig, Windows) {
  EXPECT_THAT(Read(Small("gpt-oss-20b", {{"layer_types", kAway}})).window, ElementsAre(128, 0, 128, 0));
  EXPECT_THAT(Read(Small("gpt-oss-20b", {{"layer_types", {"full_attention", "sliding_attention", "full_attention",
                                                          "full_attention"}}})).window, ElementsAre(0, 128, 0, 0));
  EXPECT_THAT(Read(Small("mixtral-8x7b", {})).window, ElementsAre(0, 0, 0, 0));
  EXPECT_THAT(Read(Small("mixtral-8x7b", {{"sliding_window", 4096}})).window, ElementsAre(4096, 4096, 4096, 4096));
  // Qwen: a window that is not in use is none.
  EXPECT_THAT(Read(Small("qwen2-57b-a14b", {{"max_window_layers", 0}})).window, ElementsAre(0, 0, 0, 0));
  // In use, layer_types say where: releases of transformers differ in what they make of max_window_layers.
  EXPECT_THAT(ErrorOf(Small("qwen2-57b-a14b", {{"use_sliding_window", true}})), HasSubstr("expected layer_types with it"));
  const json types = {"full_attention", "sliding_attention", "full_attention", "full_attention"};
  EXPECT_THAT(Read(Small("qwen2-57b-a14b", {{"use_sliding_window", true}, {"layer_types", types}})).window,
              ElementsAre(0, 65536, 0, 0));
}

TEST(HfConfig, Heads) {
  const ModelShape gpt = Read(Changed("gpt-oss-20b", {{"head_dim", kAway}}));
  EXPECT_EQ(gpt.head_dim, 64);  // the class's default; 2880 / 64 heads would be 45
  EXPECT_TRUE(gpt.sinks && gpt.attention_bias && gpt.output_bias && gpt.expert_bias && gpt.router_bias);
  EXPECT_EQ(Read(PresetJson("mixtral-8x7b")).head_dim, 128);  // 4096 / 32
  EXPECT_EQ(Read(PresetJson("qwen3-30b-a3b")).head_dim, 128);  // said; 2048 / 32 = 64
  EXPECT_EQ(Read(Changed("olmoe-1b-7b", {{"num_key_value_heads", nullptr}})).num_kv_heads, 16);
  const ModelShape v3 = Read(PresetJson("deepseek-v3"));
  EXPECT_EQ(v3.head_dim, 192);  // 128 without, 64 with RoPE
  EXPECT_EQ(v3.rope_dim, 64);
  EXPECT_EQ(v3.value_dim, 128);
  EXPECT_EQ(v3.q_lora_rank, 1536);
  EXPECT_EQ(Read(PresetJson("deepseek-v2-lite")).q_lora_rank, 0);
}

// H = 2048 = 16 heads of 128: OLMoE's norms span all heads of queries and of keys, 4096 parameters instead of 256.
TEST(HfConfig, OlmoeNormSpansHeads) {
  const ModelShape s = Read(PresetJson("olmoe-1b-7b"));
  EXPECT_EQ(s.AttentionParams(0), 4 * 2048 * 2048 + 2 * 2048 + 2 * 2048 + 64 * 2048);
}

TEST(HfConfig, SharedExperts) {
  EXPECT_EQ(Read(PresetJson("deepseek-moe-16b")).shared_hidden, 2 * 1408);
  EXPECT_EQ(Read(PresetJson("deepseek-moe")).shared_hidden, 0);  // null
  const ModelShape qwen2 = Read(PresetJson("qwen2-57b-a14b"));
  EXPECT_EQ(qwen2.shared_hidden, 20480);
  EXPECT_TRUE(qwen2.shared_gate && qwen2.attention_bias);
  EXPECT_FALSE(qwen2.output_bias);
}

TEST(HfConfig, GroupsOfExperts) {
  const ModelShape v3 = Read(PresetJson("deepseek-v3"));
  EXPECT_EQ(v3.expert_groups, 8);
  EXPECT_EQ(v3.groups_per_token, 4);
  EXPECT_EQ(Read(PresetJson("deepseek-v2-lite")).expert_groups, 0);  // greedy
  EXPECT_EQ(Read(Changed("deepseek-v3", {{"topk_group", 8}})).expert_groups, 0);
  EXPECT_THAT(ErrorOf(Changed("deepseek-v3", {{"n_group", 7}})), HasSubstr("n_group): got 7, expected a divisor of"));
  EXPECT_THAT(ErrorOf(Changed("deepseek-v3", {{"topk_group", 9}})),
              HasSubstr("topk_group): got 9, expected at most n_group = 8"));
  EXPECT_THAT(ErrorOf(Changed("deepseek-v3", {{"n_group", 128}, {"topk_group", 3}})), HasSubstr("with room for"));
}

// transformers: DeepseekV2TopkRouter, DeepseekV3TopkRouter, GptOssTopKRouter; modeling_deepseek.py for the first.
TEST(HfConfig, Routers) {
  const ModelConfig v1 = Model(PresetJson("deepseek-moe-16b"));
  EXPECT_EQ(v1.scoring_func + " " + v1.topk_method, "softmax greedy");
  EXPECT_FALSE(v1.norm_topk_prob);
  const ModelConfig v3 = Model(PresetJson("deepseek-v3"));
  EXPECT_EQ(v3.scoring_func + " " + v3.topk_method, "sigmoid noaux_tc");
  EXPECT_TRUE(v3.norm_topk_prob && v3.corrected_router() && !v3.router_bias);
  EXPECT_EQ(v3.routed_scaling_factor, 2.5);
  const ModelConfig gpt = Model(PresetJson("gpt-oss-20b"));
  EXPECT_TRUE(gpt.norm_topk_prob && gpt.router_bias && gpt.expert_bias && gpt.attention_sinks);
  EXPECT_EQ(gpt.swiglu_limit, 7);
  EXPECT_TRUE(Model(PresetJson("mixtral-8x7b")).norm_topk_prob);  // built in
  EXPECT_FALSE(Model(PresetJson("olmoe-1b-7b")).norm_topk_prob);
  EXPECT_THAT(ErrorOf(Changed("deepseek-v2-lite", {{"norm_topk_prob", true}})), HasSubstr("releases of its code differ"));
  EXPECT_THAT(ErrorOf(Changed("deepseek-v3", {{"scoring_func", "softmax"}})), HasSubstr("not computed here"));
}

// transformers, modeling_rope_utils.py: 0.1 ln(32) + 1 for gpt-oss; for DeepSeek-V3 mscale over mscale_all_dim = 1, and the
// square of 0.1 ln(40) + 1 on the logits.
TEST(HfConfig, Rope) {
  const ModelConfig gpt = Model(PresetJson("gpt-oss-20b"));
  EXPECT_EQ(gpt.rope_type, "yarn");
  EXPECT_EQ(gpt.rope_theta, 150000);
  EXPECT_EQ(gpt.rope_original_length, 4096);
  EXPECT_FALSE(gpt.rope_truncate);
  EXPECT_NEAR(gpt.rope_attention_factor, 1.3465735902799727, 1e-15);
  EXPECT_EQ(gpt.attention_scale_factor, 1);
  const ModelConfig v3 = Model(PresetJson("deepseek-v3"));
  EXPECT_EQ(v3.rope_attention_factor, 1);
  EXPECT_NEAR(v3.attention_scale_factor, 1.3688879454113936 * 1.3688879454113936, 1e-15);
  EXPECT_TRUE(v3.rope_interleave && v3.rope_truncate);
  // The newer place, beside the older ones and alone.
  const json parameters = {{"rope_type", "default"}, {"rope_theta", 500.0}};
  EXPECT_THAT(ErrorOf(Changed("olmoe-1b-7b", {{"rope_parameters", parameters}})),
              HasSubstr("expected the same as rope_theta and rope_scaling"));
  EXPECT_EQ(Model(Changed("olmoe-1b-7b", {{"rope_parameters", parameters}, {"rope_theta", kAway}})).rope_theta, 500);
  EXPECT_EQ(Model(Changed("mixtral-8x7b", {{"rope_theta", kAway}})).rope_theta, 1e6);  // the class's default
  EXPECT_THAT(ErrorOf(Changed("olmoe-1b-7b", {{"rope_scaling", {{"type", "dynamic"}, {"factor", 2.0}}}})),
              HasSubstr("not computed here (config.json, rope_scaling, rope_type): got \"dynamic\""));
  EXPECT_THAT(ErrorOf(Changed("olmoe-1b-7b", {{"rope_scaling", {{"type", "yarn"}, {"factr", 2.0}}}})),
              HasSubstr("missing key (config.json, rope_scaling, original_max_position_embeddings)"));
}

// transformers has the loss of load where output_router_logits is on: K times ours, of which every layer adds one.
TEST(HfConfig, AuxiliaryLoss) {
  EXPECT_EQ(Model(PresetJson("qwen3-30b-a3b")).router_aux_loss, "none");
  const ModelConfig on = Model(Small("qwen3-30b-a3b", {{"output_router_logits", true}, {"router_aux_loss_coef", 0.01}}));
  EXPECT_EQ(on.router_aux_loss, "global");
  EXPECT_DOUBLE_EQ(on.router_aux_loss_coef, 0.01 * 8 / 4);
  const ModelConfig v1 = Model(Changed("deepseek-moe-16b", {{"aux_loss_alpha", 0.003}, {"seq_aux", true}}));
  EXPECT_EQ(v1.router_aux_loss, "sequence");
  EXPECT_EQ(v1.router_aux_loss_coef, 0.003);
}

// What would be computed otherwise than the file says.
TEST(HfConfig, RefusesWhatIsNotComputed) {
  for (const auto& [key, value] : std::vector<std::pair<std::string, json>>{{"attention_dropout", 0.1},
                                                                            {"hidden_act", "gelu"},
                                                                            {"clip_qkv", 8.0},
                                                                            {"router_jitter_noise", 0.01}}) {
    EXPECT_THAT(ErrorOf(Changed("olmoe-1b-7b", {{key, value}})), HasSubstr("not computed here (config.json, " + key + ")"));
  }
  EXPECT_THAT(ErrorOf(Changed("deepseek-v3", {{"attention_bias", true}})), HasSubstr("not computed here"));
  EXPECT_THAT(ErrorOf(Changed("gpt-oss-20b", {{"swiglu_alpha", 1.5}})), HasSubstr("expected 1.702"));
}

// Other names for the number of experts that files written by newer transformers use.
TEST(HfConfig, OtherNames) {
  EXPECT_EQ(Read(Changed("qwen3-30b-a3b", {{"num_experts", kAway}, {"num_local_experts", 128}})).num_experts, 128);
  EXPECT_THAT(
      ErrorOf(Changed("gpt-oss-20b", {{"experts_per_token", 5}})),
      AllOf(HasSubstr("contradiction"), HasSubstr("experts_per_token): got 5, expected num_experts_per_tok = 4")));
}

// Keys as in the files on huggingface.co that the presets leave out.
TEST(HfConfig, AcceptsWholePublishedFiles) {
  const json common = {{"architectures", {"A"}},
                       {"attention_dropout", 0.0},
                       {"bos_token_id", 1},
                       {"eos_token_id", {1, 2}},
                       {"initializer_range", 0.02},
                       {"output_router_logits", false},
                       {"pad_token_id", nullptr},
                       {"torch_dtype", "bfloat16"},
                       {"dtype", "bfloat16"},
                       {"transformers_version", "4.51.0"},
                       {"use_cache", true},
                       {"auto_map", {{"AutoConfig", "x"}}},
                       {"pretraining_tp", 1},
                       {"ep_size", 1},
                       {"quantization_config", {{"quant_method", "fp8"}}},
                       {"router_jitter_noise", 0.0},
                       {"_name_or_path", "x"}};
  for (const PresetFile& preset : ModelPresetFiles()) {
    json config = json::parse(preset.text);
    const int64_t total = Read(config).TotalParams();
    config.update(common);
    EXPECT_EQ(Read(config).TotalParams(), total) << preset.name;
  }
}

TEST(HfConfig, RefusesUnknownKeys) {
  EXPECT_THAT(ErrorOf(Changed("qwen3-30b-a3b", {{"num_expert", 64}})),
              AllOf(HasSubstr("unknown key (config.json, num_expert)"), HasSubstr("did you mean 'num_experts'?")));
  EXPECT_THAT(ErrorOf(Changed("olmoe-1b-7b", {{"attention_every", 2}})), HasSubstr("begin its name with '_'"));
  // A key that another family reads is not known here: nothing would happen to it.
  EXPECT_THAT(ErrorOf(Changed("olmoe-1b-7b", {{"sliding_window", 128}})),
              HasSubstr("unknown key (config.json, sliding_window)"));
  EXPECT_THAT(ErrorOf(Changed("qwen3-30b-a3b", {{"kv_lora_rank", 512}})),
              HasSubstr("unknown key (config.json, kv_lora_rank)"));
  EXPECT_EQ(ErrorOf(Changed("olmoe-1b-7b", {{"_note", "mine"}})), "no error");
}

// Every key that a preset needs: without it, its name is in the message.
TEST(HfConfig, MissingKeys) {
  for (const char* key :
       {"vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "num_experts",
        "num_experts_per_tok", "moe_intermediate_size", "model_type"}) {
    EXPECT_THAT(ErrorOf(Changed("qwen3-235b-a22b", {{key, kAway}})),
                HasSubstr(std::string("missing key (config.json, ") + key + ")"));
  }
  for (const char* key : {"first_k_dense_replace", "intermediate_size", "kv_lora_rank", "qk_nope_head_dim",
                          "qk_rope_head_dim", "v_head_dim", "n_routed_experts"}) {
    EXPECT_THAT(ErrorOf(Changed("deepseek-v3", {{key, kAway}})),
                HasSubstr(std::string("missing key (config.json, ") + key + ")"));
  }
  EXPECT_THAT(ErrorOf(Changed("qwen2-57b-a14b", {{"shared_expert_intermediate_size", kAway}})),
              HasSubstr("missing key"));
}

TEST(HfConfig, Contradictions) {
  EXPECT_THAT(ErrorOf(Changed("qwen3-30b-a3b", {{"num_experts_per_tok", 129}})),
              HasSubstr("num_experts_per_tok): got 129, expected at most num_experts = 128"));
  EXPECT_THAT(ErrorOf(Changed("qwen3-30b-a3b", {{"num_key_value_heads", 5}})),
              HasSubstr("expected a divisor of num_attention_heads = 32"));
  EXPECT_THAT(ErrorOf(Changed("mixtral-8x7b", {{"num_attention_heads", 24}})), HasSubstr("or give head_dim"));
  EXPECT_THAT(ErrorOf(Changed("gpt-oss-20b", {{"num_hidden_layers", 25}})),
              HasSubstr("layer_types): got 24 entries, expected num_hidden_layers = 25 entries"));
  EXPECT_THAT(ErrorOf(Changed("gpt-oss-20b", {{"sliding_window", nullptr}})), HasSubstr("no sliding_window is in use"));
  EXPECT_THAT(
      ErrorOf(Small("gpt-oss-20b",
                    {{"layer_types", {"full_attention", "linear_attention", "full_attention", "full_attention"}}})),
      HasSubstr("layer_types[1]): got \"linear_attention\""));
  EXPECT_THAT(ErrorOf(Changed("deepseek-v3", {{"num_key_value_heads", 8}})),
              HasSubstr("latent attention has no groups"));
  EXPECT_THAT(ErrorOf(Changed("deepseek-v3", {{"first_k_dense_replace", 62}})),
              HasSubstr("at most num_hidden_layers = 61"));
  EXPECT_THAT(ErrorOf(Changed("deepseek-v3", {{"qk_head_dim", 128}})),
              HasSubstr("qk_nope_head_dim + qk_rope_head_dim = 192"));
  EXPECT_THAT(ErrorOf(Changed("qwen3-30b-a3b", {{"mlp_only_layers", {48}}})), HasSubstr("from 0 to 47"));
  EXPECT_THAT(ErrorOf(Changed("qwen3-30b-a3b", {{"use_sliding_window", true}})), HasSubstr("a sliding_window with it"));
}

TEST(HfConfig, WrongValues) {
  EXPECT_THAT(ErrorOf(Changed("olmoe-1b-7b", {{"hidden_size", "2048"}})),
              HasSubstr("wrong type (config.json, hidden_size): got \"2048\", expected an integer from 1"));
  EXPECT_THAT(ErrorOf(Changed("olmoe-1b-7b", {{"num_experts", 64.5}})), HasSubstr("wrong type"));
  EXPECT_THAT(ErrorOf(Changed("olmoe-1b-7b", {{"num_experts", -1}})), HasSubstr("value not allowed"));
  EXPECT_THAT(ErrorOf(Changed("olmoe-1b-7b", {{"vocab_size", 18446744073709551615u}})), HasSubstr("value not allowed"));
  EXPECT_THAT(ErrorOf(Changed("olmoe-1b-7b", {{"tie_word_embeddings", 1}})), HasSubstr("expected true or false"));
  EXPECT_THAT(ErrorOf(Changed("olmoe-1b-7b", {{"model_type", "llama"}})),
              HasSubstr("unknown model family (config.json, model_type): got \"llama\", expected qwen3_moe"));
  EXPECT_THAT(ErrorOf(Changed("deepseek-v3", {{"topk_method", "random"}})), HasSubstr("got \"random\""));
  EXPECT_THAT(ErrorOf(Changed("olmoe-1b-7b", {{"num_experts", 65536},
                                              {"intermediate_size", 1 << 20},
                                              {"hidden_size", 1 << 17},
                                              {"num_hidden_layers", 4096}})),
              HasSubstr("more than 1e16 parameters"));
  EXPECT_THAT(ErrorOf(std::string("{\"a\": 1,\n \"b\" }")),
              AllOf(HasSubstr("not valid JSON (config.json)"), HasSubstr("line 2")));
  EXPECT_THAT(ErrorOf(std::string("[1]")), HasSubstr("expected an object"));
}

}  // namespace
}  // namespace disagmoe
