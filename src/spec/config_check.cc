// Checks of one key against another, and what follows from a checked configuration: placement and schedule.
#include <charconv>
#include <cmath>
#include <numeric>
#include <vector>

#include "base/error.h"
#include "spec/config_keys.h"
#include "spec/params.h"

namespace disagmoe {
namespace {

class Checker {
 public:
  Checker(RunConfig& config, const ConfigOrigin& origin) : config_(config), origin_(origin) {}

  void Run() {
    for (const ConfigKey& key : ConfigKeys()) {
      const std::string got = OutOfRange(key, config_);
      if (got.empty()) continue;
      throw Error({"value not allowed", origin_.Where(key.name), got, ExpectedValue(key), {}});
    }
    Model();
    Layout();
    ScheduleKeys();
    Train();
    Split();
    Sizes();
  }

 private:
  void Require(bool good, std::string_view key, const std::string& expected, const std::string& hint = "") {
    if (good) return;
    const ConfigKey* k = FindConfigKey(key);
    DM_CHECK(k != nullptr, std::string(key));
    throw Error({"contradiction", origin_.Where(key), TomlValue(k->value(config_)), expected, hint});
  }

  static std::string Of(const std::string& key, int64_t value) { return key + " = " + std::to_string(value); }

  void Model() {
    const ModelConfig& m = config_.model;
    Require(m.head_dim % 2 == 0, "model.head_dim", "an even number (rotary embedding turns pairs)");
    Require(m.num_attention_heads % m.num_key_value_heads == 0, "model.num_key_value_heads",
            "a divisor of " + Of("model.num_attention_heads", m.num_attention_heads));
    Require(!m.qk_norm_all_heads || m.qk_norm, "model.qk_norm_all_heads", "false with model.qk_norm = false");
    const int64_t types = std::ssize(m.layer_types);
    for (const std::string& type : m.layer_types) {
      Require(type == "full_attention" || type == "sliding_attention", "model.layer_types",
              "\"full_attention\" or \"sliding_attention\" for each layer");
      Require(type == "full_attention" || m.sliding_window > 0, "model.layer_types",
              "\"full_attention\" in all layers with model.sliding_window = 0");
    }
    Require(types == 0 || types == m.num_hidden_layers, "model.layer_types",
            "as many entries as " + Of("model.num_hidden_layers", m.num_hidden_layers));
    Latent();
    Require(m.rope_type != "yarn" || m.rope_original_length > 0, "model.rope_original_length",
            "above 0 with model.rope_type = \"yarn\"");
    Require(m.rope_beta_slow < m.rope_beta_fast || m.rope_type != "yarn", "model.rope_beta_slow",
            "below model.rope_beta_fast = " + TomlNumber(m.rope_beta_fast));
    Router();
    Require(m.first_k_dense_replace <= m.num_hidden_layers, "model.first_k_dense_replace",
            "at most " + Of("model.num_hidden_layers", m.num_hidden_layers));
    for (int64_t layer : m.mlp_only_layers) {
      Require(layer < m.num_hidden_layers, "model.mlp_only_layers",
              "numbers below " + Of("model.num_hidden_layers", m.num_hidden_layers));
    }
    Require(m.n_shared_experts == 0 || m.shared_expert_intermediate_size == 0, "model.shared_expert_intermediate_size",
            "0 with " + Of("model.n_shared_experts", m.n_shared_experts), "either says how wide shared experts are");
    Require(!m.shared_expert_gate || m.shared_intermediate() > 0, "model.shared_expert_gate",
            "false without shared experts", "set model.shared_expert_intermediate_size");
  }

  void Latent() {
    const ModelConfig& m = config_.model;
    for (const auto& [key, value] : {std::pair{"model.qk_nope_head_dim", m.qk_nope_head_dim},
                                     {"model.qk_rope_head_dim", m.qk_rope_head_dim},
                                     {"model.v_head_dim", m.v_head_dim}}) {
      Require((value > 0) == m.latent(), key, m.latent() ? "above 0 with model.kv_lora_rank" : "0 without model.kv_lora_rank",
              "these are widths of latent attention");
    }
    Require(m.latent() || m.q_lora_rank == 0, "model.q_lora_rank", "0 without model.kv_lora_rank");
    Require(m.qk_rope_head_dim % 2 == 0, "model.qk_rope_head_dim", "an even number (rotary embedding turns pairs)");
    if (!m.latent()) return;
    const std::string with = " with latent attention (model.kv_lora_rank)";
    Require(!m.qk_norm, "model.qk_norm", "false" + with);
    Require(!m.attention_bias, "model.attention_bias", "false" + with);
    Require(!m.output_bias, "model.output_bias", "false" + with);
    Require(!m.attention_sinks, "model.attention_sinks", "false" + with);
  }

  void Router() {
    const ModelConfig& m = config_.model;
    Require(m.num_experts_per_tok <= m.num_experts, "model.num_experts_per_tok",
            "at most " + Of("model.num_experts", m.num_experts));
    Require(m.num_experts % m.n_group == 0, "model.n_group", "a divisor of " + Of("model.num_experts", m.num_experts));
    Require(m.topk_group <= m.n_group, "model.topk_group", "at most " + Of("model.n_group", m.n_group));
    Require(m.topk_method != "greedy" || m.n_group == 1, "model.n_group", "1 with model.topk_method = \"greedy\"");
    const int64_t size = m.num_experts / m.n_group;
    Require(m.topk_group * size >= m.num_experts_per_tok, "model.topk_group",
            "groups with room for " + Of("model.num_experts_per_tok", m.num_experts_per_tok) + " experts");
    Require(!m.corrected_router() || m.n_group == 1 || size >= 2, "model.n_group",
            "groups of two experts at least with model.topk_method = \"noaux_tc\"");
  }

  void Layout() {
    const LayoutConfig& l = config_.layout;
    const std::string layers = "at most " + Of("model.num_hidden_layers", config_.model.num_hidden_layers);
    const std::string hint = "a group without a layer would idle; more workers go into layout.";
    Require(l.p_a <= config_.model.num_hidden_layers, "layout.p_a", layers, hint + "m");
    Require(l.p_f <= config_.model.num_hidden_layers, "layout.p_f", layers, hint + "n");
    const std::string colocated = "1 with layout.colocated = true";
    Require(!l.colocated || l.p_f == 1, "layout.p_f", colocated, "layout.p_a counts the groups");
    Require(!l.colocated || l.n == 1, "layout.n", colocated, "layout.m counts the workers of a group");
    VirtualStages();
    ExpertCounts();
    for (const ScheduleName& known : ScheduleNames()) {
      if (known.name != config_.schedule.name) continue;
      Require(known.colocated == l.colocated, "schedule.name",
              SchedulesOf(l.colocated) + " with layout.colocated = " + (l.colocated ? "true" : "false"));
    }
  }

  void VirtualStages() {
    const LayoutConfig& l = config_.layout;
    if (l.virtual_stages == 0) return;
    const std::string key = "layout.virtual_stages";
    Require(l.colocated, key, "0 with layout.colocated = false", "groups of two pools take layers in turn");
    Require(config_.schedule.name != "dualpipe-v", key, "0 with schedule.name = \"dualpipe-v\"",
            "a group holds two chunks of layers");
    Require(int64_t{l.virtual_stages} * l.p_a <= config_.model.num_hidden_layers, key,
            "at most " + std::to_string(config_.model.num_hidden_layers / l.p_a) + ", " +
                Of("model.num_hidden_layers", config_.model.num_hidden_layers) + " over " + Of("layout.p_a", l.p_a),
            "a chunk has at least one layer");
    Require(l.head == "ffn", "layout.head", "\"ffn\" with " + Of(key, l.virtual_stages),
            "the head is with the last chunk of layers");
  }

  void ExpertCounts() {
    const LayoutConfig& l = config_.layout;
    const ModelConfig& m = config_.model;
    if (l.expert_counts.empty()) return;
    const auto wrong = [&](const std::string& got, const std::string& expected, const std::string& hint) {
      throw Error({"contradiction", origin_.Where("layout.expert_counts"), got, expected, hint});
    };
    const int64_t rows = std::ssize(l.expert_counts);
    if (rows != 1 && rows != m.num_hidden_layers) {
      wrong(std::to_string(rows) + " arrays", "one for each of " + Of("model.num_hidden_layers", m.num_hidden_layers),
            "or one array of integers for all layers");
    }
    for (int64_t i = 0; i < rows; ++i) {
      const std::vector<int64_t>& row = l.expert_counts[i];
      const std::string of = rows == 1 ? "" : " for layer " + std::to_string(i);
      if (std::ssize(row) != l.expert_workers()) {
        const std::string workers = Of(l.colocated ? "layout.m" : "layout.n", l.expert_workers());
        wrong(std::to_string(row.size()) + " numbers" + of, "one for each of " + workers + " workers", "0 is allowed");
      }
      const int64_t sum = std::accumulate(row.begin(), row.end(), int64_t{0});
      if (sum != m.num_experts) {
        wrong("a sum of " + std::to_string(sum) + of, Of("model.num_experts", m.num_experts), "[] gives equal shares");
      }
    }
  }

  static std::string SchedulesOf(bool colocated) {
    std::string names = "\"auto\"";
    for (const ScheduleName& known : ScheduleNames()) {
      if (known.colocated == colocated) names += ", \"" + known.name + "\"";
    }
    return names.replace(names.rfind(", "), 2, " or ");
  }

  // What the generators would throw, in terms of keys.
  void ScheduleKeys() {
    const int64_t round = config_.schedule.round;
    const LayoutConfig& l = config_.layout;
    const int64_t all = config_.train.micro_batches, share = all / l.replicas;
    Require(share * l.replicas == all, "layout.replicas", "a divisor of " + Of("train.micro_batches", all),
            "each replica executes as many micro-batches of a step");
    const std::string each = l.replicas == 1 ? "" : " / " + Of("layout.replicas", l.replicas);
    Require(round == 0 || share % round == 0, "schedule.round", "a divisor of " + Of("train.micro_batches", all) + each,
            "0 chooses one");
    const std::string& name = config_.schedule.name;
    const std::string with = " with schedule.name = \"" + name + "\"";
    if (name == "megatron-overlap") {
      Require(l.p_a > 1 || round <= 1, "schedule.round", "0 or 1" + with + " and layout.p_a = 1",
              "one group has no rounds");
    }
    if (name != "dualpipe-v") return;
    Require(round == 0, "schedule.round", "0" + with, "it has no rounds");
    Require(l.head == "ffn", "layout.head", "\"ffn\"" + with);
    Require(2 * l.p_a <= config_.model.num_hidden_layers, "layout.p_a",
            "at most half of " + Of("model.num_hidden_layers", config_.model.num_hidden_layers) + with,
            "a group holds two chunks of layers");
    const std::string of_each = l.replicas == 1 ? "" : " for each of " + Of("layout.replicas", l.replicas);
    Require(share >= 2 * l.p_a, "train.micro_batches", "at least twice " + Of("layout.p_a", l.p_a) + of_each + with);
  }

  void Train() {
    const TrainConfig& t = config_.train;
    Require(t.min_lr <= t.lr, "train.min_lr", "at most train.lr = " + TomlNumber(t.lr));
    Require(t.lr_decay_steps == 0 || t.lr_decay_steps > t.lr_warmup_steps, "train.lr_decay_steps",
            "more than " + Of("train.lr_warmup_steps", t.lr_warmup_steps), "0 decays until train.steps");
    Require(t.eval_interval == 0 || t.eval_micro_batches > 0, "train.eval_interval",
            "0 without train.eval_micro_batches", "set train.eval_micro_batches");
    Require(t.save_interval == 0 || t.save, "train.save_interval", "0 with train.save = false");
  }

  void Split() {
    Require(config_.data.blend.empty() || config_.data.path.empty(), "data.blend",
            "[] with data.path = " + TomlString(config_.data.path), "data.path= clears the path");
    const std::vector<double> weights = ParseSplit(config_.data.split);
    Require(weights.size() >= 1 && weights.size() <= 3, "data.split",
            "weights of training and held-out data (a third is left unused), such as \"98,2\"");
    Require(weights[0] > 0, "data.split", "a share of training data above 0");
    Require(config_.train.eval_micro_batches == 0 || (weights.size() > 1 && weights[1] > 0), "data.split",
            "a held-out share above 0 with " + Of("train.eval_micro_batches", config_.train.eval_micro_batches));
  }

  // Empty if it is none.
  static std::vector<double> ParseSplit(const std::string& text) {
    std::vector<double> weights;
    const char* at = text.data();
    const char* end = at + text.size();
    auto skip_blanks = [&] {
      while (at < end && (*at == ' ' || *at == '\t')) ++at;
    };
    do {
      double weight = 0;
      skip_blanks();
      const auto result = std::from_chars(at, end, weight, std::chars_format::fixed);
      if (result.ec != std::errc() || !std::isfinite(weight) || weight < 0) return {};
      weights.push_back(weight);
      at = result.ptr;
      skip_blanks();
    } while (at < end && *at++ == ',');
    return at == end && text.back() != ',' ? weights : std::vector<double>{};
  }

  // Single keys are bounded so that these products stay within 64 bits.
  void Sizes() {
    const TrainConfig& t = config_.train;
    const ModelConfig& m = config_.model;
    constexpr int64_t kTokens = int64_t{1} << 31;
    Require(t.seq_length * t.micro_batch_size < kTokens, "train.micro_batch_size",
            "fewer than 2^31 tokens a micro-batch with " + Of("train.seq_length", t.seq_length));
    Require(t.seq_length * t.micro_batch_size * m.num_experts_per_tok < int64_t{1} << 29, "train.micro_batch_size",
            "fewer than 2^29 tokens x experts a micro-batch with " + Of("train.seq_length", t.seq_length) + " and " +
                Of("model.num_experts_per_tok", m.num_experts_per_tok));
    const int64_t micro_batches = std::max(t.micro_batches, t.eval_micro_batches);
    Require(micro_batches * (2 * m.num_hidden_layers + 1) <= 20'000'000, "train.micro_batches",
            "a schedule of at most 20000000 stages x micro-batches with " +
                Of("model.num_hidden_layers", m.num_hidden_layers));
    const int64_t sequences = t.micro_batch_size * t.micro_batches;
    Require(sequences <= (int64_t{1} << 60) / std::max<int64_t>(t.steps, 1), "train.micro_batches",
            "fewer than 2^60 sequences in " + Of("train.steps", t.steps));
    const bool many_attention = config_.layout.p_a * config_.layout.m > 32768;
    const int64_t pipeline = config_.layout.pipeline_workers();
    Require(pipeline <= 65536, many_attention ? "layout.m" : "layout.n", "at most 65536 workers in all");
    Require(pipeline * config_.layout.replicas <= 65536, "layout.replicas", "at most 65536 workers in all");
    auto weight = [&](std::string_view key, int64_t rows) {
      Require(rows <= (int64_t{1} << 40) / m.hidden_size, key, "a weight of at most 2^40 elements");
    };
    weight("model.moe_intermediate_size", 2 * m.num_experts * m.moe_intermediate_size);
    weight("model.n_shared_experts", 2 * m.shared_intermediate());
    weight("model.intermediate_size", 2 * m.intermediate_size);
    weight("model.head_dim", (m.num_attention_heads + 2 * m.num_key_value_heads) * m.qk_dim());
    weight("model.v_head_dim", m.num_attention_heads * m.value_dim());
  }

  RunConfig& config_;
  const ConfigOrigin& origin_;
};

}  // namespace

void CheckConfig(RunConfig config, const ConfigOrigin& origin) { Checker(config, origin).Run(); }

PlacementSpec PlacementOf(const RunConfig& config) {
  const LayoutConfig& l = config.layout;
  return {.num_layers = static_cast<int>(config.model.num_hidden_layers),
          .p_a = l.p_a,
          .p_f = l.p_f,
          .m = l.m,
          .n = l.n,
          .colocated = l.colocated,
          .head_on_attention = l.head == "attention",
          .virtual_stages = l.virtual_stages};
}

std::vector<std::string> WorkerNames(const RunConfig& config) {
  const LayoutConfig& l = config.layout;
  std::vector<std::string> names;
  auto add = [&](const std::string& kind, int groups, int workers) {
    for (int g = 0; g < groups; ++g)
      for (int w = 0; w < workers; ++w) names.push_back(kind + std::to_string(g) + "." + std::to_string(w));
  };
  for (int r = 0; r < l.replicas; ++r) {
    const std::string replica = r == 0 ? "" : "r" + std::to_string(r) + ".";
    add(replica + (l.colocated ? "C" : "A"), l.p_a, l.m);
    if (!l.colocated) add(replica + "F", l.p_f, l.n);
  }
  return names;
}

namespace {

// What is left of a forward-only order when the micro-batches from `count` on are taken out: as free of deadlock.
void TakeFirst(Schedule* schedule, int count) {
  for (GroupSchedule& group : schedule->groups) {
    for (std::vector<Op>* list : {&group.compute, &group.comm}) {
      std::erase_if(*list, [&](const Op& op) { return op.micro_batch >= count; });
    }
  }
  schedule->num_micro_batches = schedule->round = count;
}

}  // namespace

Schedule ScheduleOf(const RunConfig& config, int64_t micro_batches, bool backward) {
  std::string name = config.schedule.name;
  if (name == "auto") name = config.layout.colocated ? "megatron-1f1b" : "af-pipe";
  GenerateOptions options;
  options.num_micro_batches = static_cast<int>(micro_batches);
  options.slope = config.schedule.slope;
  options.backward = backward;
  // An evaluation has its own number of micro-batches: a round that does not divide it is chosen anew.
  if (config.schedule.round > 0 && micro_batches % config.schedule.round == 0) options.round = config.schedule.round;
  // dualpipe-v needs as many micro-batches as fill its groups, an evaluation may have fewer.
  const bool fewer = !backward && name == "dualpipe-v" && micro_batches < 2 * config.layout.p_a;
  if (fewer) options.num_micro_batches = 2 * config.layout.p_a;
  Schedule schedule = Generate(name, PlacementOf(config), options);
  if (fewer) TakeFirst(&schedule, static_cast<int>(micro_batches));
  ValidateSchedule(schedule);
  return schedule;
}

}  // namespace disagmoe
