#include "spec/config_keys.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <limits>

#include "schedule/schedule.h"
#include "spec/hf_config.h"
#include "spec/presets.h"

namespace disagmoe {
namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();

ConfigKey Number(ConfigKey key, double min, double max, std::string_view help) {
  key.min = min;
  key.max = max;
  key.help = help;
  return key;
}
ConfigKey Above(ConfigKey key, double min, std::string_view help) {
  key.min_excluded = true;
  return Number(key, min, kInf, help);
}
ConfigKey Fraction(ConfigKey key, std::string_view help) {
  key.max_excluded = true;
  return Number(key, 0, 1, help);
}
ConfigKey Flag(ConfigKey key, std::string_view help) {
  key.help = help;
  return key;
}
ConfigKey Choice(ConfigKey key, std::vector<std::string_view> choices, std::string_view help) {
  key.choices = std::move(choices);
  key.help = help;
  return key;
}
ConfigKey Text(ConfigKey key, bool may_be_empty, std::string_view help) {
  key.may_be_empty = may_be_empty;
  key.help = help;
  return key;
}

// Writes a key's name once, as TOML and as member.
#define KEY(path) \
  ConfigKey { .name = #path, .value = [](RunConfig& c) -> ConfigValue { return &c.path; }, .choices = {}, .help = {} }

std::vector<std::string_view> ModelTypes() {
  std::vector<std::string_view> types{""};
  types.insert(types.end(), HfFamilies().begin(), HfFamilies().end());
  return types;
}

// The upper limits keep products (rows x columns, tokens x steps, stages x micro-batches) far from overflow.
std::vector<ConfigKey> ModelKeys() {
  return {
      Text(KEY(model.from), true, "preset, config.json or folder to take this table from; with its weights, if it has some"),
      Choice(KEY(model.model_type), ModelTypes(), "Hugging Face family that it is exported as; empty: none"),
      Number(KEY(model.vocab_size), 2, 1 << 24, "tokens; 257 for the built-in byte tokenizer"),
      Number(KEY(model.hidden_size), 1, 1 << 17, "H"),
      Number(KEY(model.num_hidden_layers), 1, 4096, "L"),
      Above(KEY(model.rms_norm_eps), 0, "added to the mean square"),
      Number(KEY(model.initializer_range), 0, kInf, "standard deviation of the initial weights"),
      Flag(KEY(model.tie_word_embeddings), "output head and embedding are one parameter"),
      Number(KEY(model.num_attention_heads), 1, 4096, "query heads"),
      Number(KEY(model.num_key_value_heads), 1, 4096, "key/value heads; divides num_attention_heads"),
      Number(KEY(model.head_dim), 2, 4096, "width of a head; even"),
      Flag(KEY(model.qk_norm), "RMSNorm over each head's query and key"),
      Flag(KEY(model.qk_norm_all_heads), "that norm is over all heads together (OLMoE)"),
      Flag(KEY(model.attention_bias), "biases of queries, keys and values"),
      Flag(KEY(model.output_bias), "bias of the attention's output"),
      Flag(KEY(model.attention_sinks), "a learned logit a head in the softmax (gpt-oss)"),
      Number(KEY(model.sliding_window), 0, 1 << 30, "tokens that a query sees, itself included; 0: all"),
      Flag(KEY(model.layer_types), "\"full_attention\" or \"sliding_attention\", by layer; []: the window in all"),
      Number(KEY(model.kv_lora_rank), 0, 1 << 20, "latent attention (DeepSeek): width of keys and values; 0: none"),
      Number(KEY(model.q_lora_rank), 0, 1 << 20, "of queries; 0: not compressed"),
      Number(KEY(model.qk_nope_head_dim), 0, 4096, "latent attention: width without RoPE of a head's query and key"),
      Number(KEY(model.qk_rope_head_dim), 0, 4096, "and with it; even"),
      Number(KEY(model.v_head_dim), 0, 4096, "and of its value"),
      Above(KEY(model.latent_norm_eps), 0, "latent attention: added to the mean square of what is compressed"),
      Above(KEY(model.rope_theta), 0, "base of the rotary position embedding"),
      Choice(KEY(model.rope_type), {"default", "linear", "yarn"}, "how it is stretched for long sequences"),
      Above(KEY(model.rope_factor), 0, "by so much"),
      Above(KEY(model.rope_beta_fast), 0, "yarn: rotations in the original length above which pairs stay"),
      Above(KEY(model.rope_beta_slow), 0, "yarn: rotations below which they are stretched by the whole factor"),
      Number(KEY(model.rope_original_length), 0, 1 << 30, "yarn: length that the model was first trained with"),
      Flag(KEY(model.rope_truncate), "yarn: between these, from a whole pair to a whole pair"),
      Above(KEY(model.rope_attention_factor), 0, "yarn: factor of rotated queries and of keys"),
      Flag(KEY(model.rope_interleave), "published weights pair neighbours (DeepSeek); permuted on reading and writing"),
      Above(KEY(model.attention_scale_factor), 0, "factor of the attention's logits, beside 1 / sqrt(width)"),
      Number(KEY(model.num_experts), 1, 1 << 16, "E, of a layer"),
      Number(KEY(model.num_experts_per_tok), 1, 1024, "k"),
      Number(KEY(model.moe_intermediate_size), 1, 1 << 20, "De, hidden size of an expert"),
      Flag(KEY(model.norm_topk_prob), "renormalise the chosen gates to sum 1"),
      Above(KEY(model.routed_scaling_factor), 0, "factor of the gates"),
      Choice(KEY(model.scoring_func), {"softmax", "sigmoid"}, "from the router's logits to scores"),
      Choice(KEY(model.topk_method), {"greedy", "group_limited_greedy", "noaux_tc"}, "how experts are chosen by scores"),
      Number(KEY(model.n_group), 1, 1 << 16, "groups of experts; divides num_experts"),
      Number(KEY(model.topk_group), 1, 1 << 16, "groups in which a token's experts are"),
      Number(KEY(model.router_bias_update_rate), 0, 1, "noaux_tc: change of an expert's correction a step, by its load"),
      Flag(KEY(model.router_bias), "learned bias of the router's logits (gpt-oss)"),
      Flag(KEY(model.expert_bias), "biases in the experts (gpt-oss)"),
      Number(KEY(model.swiglu_limit), 0, kInf, "limit of gpt-oss's clamped SwiGLU; 0: plain SwiGLU"),
      Number(KEY(model.n_shared_experts), 0, 1024, "experts that every token visits"),
      Number(KEY(model.shared_expert_intermediate_size), 0, 1 << 20, "or the width of one such expert"),
      Flag(KEY(model.shared_expert_gate), "a learned gate of its result (Qwen2-MoE)"),
      Number(KEY(model.first_k_dense_replace), 0, 4096, "leading layers with a dense FFN"),
      Number(KEY(model.mlp_only_layers), 0, 4095, "other layers with a dense FFN, by number"),
      Number(KEY(model.intermediate_size), 1, 1 << 20, "hidden size of dense FFNs"),
      Number(KEY(model.router_aux_loss_coef), 0, kInf, "weight of the load-balancing loss"),
      Choice(KEY(model.router_aux_loss), {"none", "sequence", "global"}, "balance per sequence or per micro-batch"),
  };
}

std::vector<std::string_view> ScheduleChoices() {
  std::vector<std::string_view> names{"auto"};
  for (const ScheduleName& known : ScheduleNames()) names.push_back(known.name);
  return names;
}

std::vector<ConfigKey> LayoutKeys() {
  return {
      Number(KEY(layout.p_a), 1, 4096, "attention groups"),
      Number(KEY(layout.p_f), 1, 4096, "FFN groups"),
      Number(KEY(layout.m), 1, 4096, "workers in an attention group"),
      Number(KEY(layout.n), 1, 4096, "workers in an FFN group"),
      Flag(KEY(layout.colocated), "attention and experts on the same p_a groups of m workers"),
      Choice(KEY(layout.head), {"ffn", "attention"}, "which group computes output head and loss"),
      Number(KEY(layout.virtual_stages), 0, 4096, "colocated: chunks of layers a group holds; 0: one layer a chunk"),
      Number(KEY(layout.replicas), 1, 65536, "copies of the pipeline; divides train.micro_batches"),
      Number(KEY(layout.expert_counts), 0, 1 << 16,
             "experts of each worker of a group, [5, 3], or such a row a layer; []: equal"),
      Choice(KEY(schedule.name), ScheduleChoices(), "generator of the schedule; not all can be trained"),
      Number(KEY(schedule.round), 0, 1 << 20, "q, micro-batches a round; divides those of a replica; 0: chosen"),
      Number(KEY(schedule.slope), 0, 100, "e, warm-up forwards added per position"),
  };
}

std::vector<ConfigKey> TrainKeys() {
  return {
      Number(KEY(train.steps), 0, 1e9, "steps to train in all; 0: only load or initialise, evaluate and save"),
      Number(KEY(train.seq_length), 1, 1 << 22, "tokens of a sequence"),
      Number(KEY(train.micro_batch_size), 1, 1 << 20, "sequences of a micro-batch"),
      Number(KEY(train.micro_batches), 1, 1 << 20, "micro-batches of a step, of all replicas"),
      Choice(KEY(train.dtype), {"fp32", "bf16"}, "of computation; master weights are fp32"),
      Above(KEY(train.lr), 0, "peak learning rate"),
      Number(KEY(train.min_lr), 0, kInf, "learning rate at the end of the cosine"),
      Number(KEY(train.lr_warmup_steps), 0, 1e9, "linear warm-up"),
      Number(KEY(train.lr_decay_steps), 0, 1e9, "end of the cosine; 0: train.steps"),
      Number(KEY(train.weight_decay), 0, kInf, "AdamW, of matrices"),
      Fraction(KEY(train.adam_beta1), "AdamW, first moment"),
      Fraction(KEY(train.adam_beta2), "AdamW, second moment"),
      Above(KEY(train.adam_eps), 0, "AdamW"),
      Number(KEY(train.clip_grad), 0, kInf, "limit of the global gradient norm; 0: off"),
      Number(KEY(train.seed), 0, 9223372036854774784.0, "of weights and order of data"),
      Choice(KEY(train.recompute), {"none", "layer"}, "recompute a layer's activations in backward"),
      Flag(KEY(train.shard_optimizer), "divide optimizer state of replicated parameters over their holders"),
      Number(KEY(train.eval_interval), 0, 1e9, "steps between evaluations; 0: at the end only"),
      Number(KEY(train.eval_micro_batches), 0, 1 << 20, "held-out micro-batches an evaluation; 0: none"),
      Number(KEY(train.save_interval), 0, 1e9, "steps between checkpoints; 0: at the end only"),
      Flag(KEY(train.save), "write checkpoints"),
      Flag(KEY(train.async_save), "write them while training goes on, from a copy in host memory"),
      Number(KEY(train.keep_checkpoints), 0, 1e9, "so many of the newest are kept; 0: all"),
      Text(KEY(train.init), false, "\"random\"; a Hugging Face or checkpoint folder, for its weights; \"auto\": model.from's"),
      Text(KEY(train.resume), true, "checkpoint folder to go on from, or \"latest\" of this out folder"),
  };
}

std::vector<ConfigKey> OtherKeys() {
  return {
      Text(KEY(data.path), true, "prefix of a .bin/.idx pair, see `disagmoe data --help`"),
      Flag(KEY(data.blend), "instead of path: \"0.7 data/a 0.3 data/b\", weights and prefixes; or an array of such strings"),
      Choice(KEY(data.documents), {"join", "apart"}, "whether attention stays within a document, and its first token is no label"),
      Text(KEY(data.split), false, "weights of training and held-out data"),
      Choice(KEY(transport.kind), {"ucx", "inproc"}, "processes, or threads of one process"),
      Text(KEY(transport.tls), false, "UCX transports"),
      Text(KEY(transport.net_devices), true, "network interfaces; empty: lo on one host, all on several"),
      Text(KEY(transport.listen), false, "address of the rendezvous"),
      Number(KEY(transport.port), 0, 65535, "of the rendezvous; 0: any free"),
      Flag(KEY(transport.paced), "emulate a NIC of paced_gbps and paced_latency_us"),
      Above(KEY(transport.paced_gbps), 0, "Gbit/s of each direction"),
      Number(KEY(transport.paced_latency_us), 0, 1e9, "microseconds"),
      Number(KEY(transport.timeout_s), 0.001, 1e6, "seconds to wait for a message"),
      Number(KEY(transport.join_timeout_s), 0.001, 1e6, "seconds to wait for all workers to join"),
      Choice(KEY(device.type), {"auto", "cpu", "cuda"}, "auto: an accelerator if there is one"),
      Number(KEY(device.threads), 1, 1024, "CPU threads of a worker"),
      Number(KEY(trace.first_step), 1, 1e9, "first step that is traced, counted from 1"),
      Number(KEY(trace.steps), 0, 1e6, "steps traced; 0: no trace"),
      Text(KEY(plan.cluster), true, "what `disagmoe simulate` of this file simulates it on: \"h800x128\", or a .toml"),
      Flag(KEY(plan.settings), "of `disagmoe simulate --set`, such as \"mixed_nodes=true\""),
  };
}
#undef KEY

std::string TomlStrings(const Strings& strings) {
  std::string text;
  for (const std::string& s : strings) text += (text.empty() ? "" : ", ") + TomlString(s);
  return "[" + text + "]";
}

bool Near(int distance, std::string_view name) {
  const int size = static_cast<int>(name.size());
  return distance < size && distance <= 1 + size / 4;
}

std::string TomlInts(const Ints& row) {
  std::string text;
  for (int64_t x : row) text += (text.empty() ? "" : ", ") + std::to_string(x);
  return "[" + text + "]";
}

std::string TomlRows(const IntRows& rows) {
  if (rows.size() == 1) return TomlInts(rows[0]);
  std::string text;
  for (const auto& row : rows) text += (text.empty() ? "" : ", ") + TomlInts(row);
  return "[" + text + "]";
}

std::string Limit(const ConfigKey& key, double limit) {
  ConfigKey copy = key;
  RunConfig config;
  const bool real = std::holds_alternative<double*>(copy.value(config));
  if (real) {
    std::string text = TomlNumber(limit);
    return text.ends_with(".0") ? text.substr(0, text.size() - 2) : text;
  }
  return std::to_string(static_cast<int64_t>(limit));
}

}  // namespace

const std::vector<ConfigKey>& ConfigKeys() {
  static const std::vector<ConfigKey> keys = [] {
    std::vector<ConfigKey> all;
    ConfigKey out{.name = "out", .value = [](RunConfig& c) -> ConfigValue { return &c.out; }, .choices = {}, .help = {}};
    all.push_back(Text(out, false, "folder of the run's files"));
    for (auto&& part : {ModelKeys(), LayoutKeys(), TrainKeys(), OtherKeys()}) all.insert(all.end(), part.begin(), part.end());
    return all;
  }();
  return keys;
}

const ConfigKey* FindConfigKey(std::string_view name) {
  for (const ConfigKey& key : ConfigKeys())
    if (key.name == name) return &key;
  return nullptr;
}

std::string ExpectedValue(const ConfigKey& key) {
  RunConfig config;
  const ConfigValue value = key.value(config);
  if (std::holds_alternative<bool*>(value)) return "true or false";
  if (std::holds_alternative<Ints*>(value)) {
    return "an array of integers from " + Limit(key, key.min) + " to " + Limit(key, key.max);
  }
  if (std::holds_alternative<IntRows*>(value)) {
    return "an array of integers from " + Limit(key, key.min) + " to " + Limit(key, key.max) + ", or an array of such arrays";
  }
  if (std::holds_alternative<Strings*>(value)) return "an array of strings";
  if (std::holds_alternative<std::string*>(value)) {
    if (key.choices.empty()) return key.may_be_empty ? "a string" : "a string that is not empty";
    std::string text;
    for (size_t i = 0; i < key.choices.size(); ++i) {
      if (i > 0) text += i + 1 < key.choices.size() ? ", " : " or ";
      text += TomlString(key.choices[i]);
    }
    return text;
  }
  std::string text = std::holds_alternative<double*>(value) ? "a number" : "an integer";
  if (std::isinf(key.max)) return text + (key.min_excluded ? " above " : " of at least ") + Limit(key, key.min);
  text += " from " + Limit(key, key.min) + " to " + (key.max_excluded ? "below " : "") + Limit(key, key.max);
  return text;
}

std::string OutOfRange(const ConfigKey& key, RunConfig& config) {
  const ConfigValue value = key.value(config);
  if (std::holds_alternative<bool*>(value) || std::holds_alternative<Strings*>(value)) return "";
  if (auto* text = std::get_if<std::string*>(&value)) {
    const bool good = key.choices.empty() ? key.may_be_empty || !(*text)->empty()
                                          : std::find(key.choices.begin(), key.choices.end(), **text) != key.choices.end();
    return good ? "" : TomlString(**text);
  }
  const auto outside = [&](const Ints& row) -> std::string {
    for (int64_t x : row)
      if (static_cast<double>(x) < key.min || static_cast<double>(x) > key.max) return std::to_string(x);
    return "";
  };
  if (auto* row = std::get_if<Ints*>(&value)) return outside(**row);
  if (auto* rows = std::get_if<IntRows*>(&value)) {
    for (const Ints& row : **rows)
      if (const std::string got = outside(row); !got.empty()) return got;
    return "";
  }
  const double number = std::visit(
      [](auto* v) -> double {
        if constexpr (std::is_arithmetic_v<std::remove_pointer_t<decltype(v)>>) return static_cast<double>(*v);
        return 0;
      },
      value);
  const bool above = key.min_excluded ? number > key.min : number >= key.min;
  const bool below = key.max_excluded ? number < key.max : number <= key.max;
  return std::isfinite(number) && above && below ? "" : TomlValue(value);
}

std::string NearestKey(std::string_view name) {
  const std::string_view leaf = name.substr(name.rfind('.') + 1);
  const std::string_view table = name.substr(0, name.size() - leaf.size());
  int best = std::numeric_limits<int>::max();
  std::string_view nearest;
  for (const ConfigKey& key : ConfigKeys()) {
    // A right leaf in the wrong table counts as one mistake.
    const std::string_view key_table = key.name.substr(0, key.name.size() - key.leaf().size());
    const int distance = 2 * EditDistance(leaf, key.leaf()) + std::min(1, EditDistance(table, key_table));
    if (distance < best) best = distance, nearest = key.name;
  }
  return Near(best / 2, leaf) ? std::string(nearest) : "";
}

std::string NearestTable(std::string_view name) {
  int best = std::numeric_limits<int>::max();
  std::string_view nearest;
  for (const ConfigKey& key : ConfigKeys()) {
    if (key.table().empty()) continue;
    const int distance = EditDistance(name, key.table());
    if (distance < best) best = distance, nearest = key.table();
  }
  return Near(best, name) ? std::string(nearest) : "";
}

std::string TomlNumber(double value) {
  if (std::isnan(value)) return "nan";
  if (std::isinf(value)) return value < 0 ? "-inf" : "inf";
  char buffer[40];
  const auto end = std::to_chars(buffer, buffer + sizeof buffer, value).ptr;
  std::string text(buffer, end);
  return text.find_first_of(".e") == text.npos ? text + ".0" : text;
}

std::string TomlString(std::string_view text) {
  std::string out = "\"";
  for (unsigned char c : text) {
    if (c == '"' || c == '\\') {
      out += {'\\', static_cast<char>(c)};
    } else if (c < 0x20 || c == 0x7f) {
      constexpr char digits[] = "0123456789ABCDEF";
      out += {'\\', 'u', '0', '0', digits[c >> 4], digits[c & 15]};
    } else {
      out += static_cast<char>(c);
    }
  }
  return out + '"';
}

std::string TomlValue(const ConfigValue& value) {
  return std::visit(
      [](auto* v) -> std::string {
        using T = std::remove_pointer_t<decltype(v)>;
        if constexpr (std::is_same_v<T, bool>) return *v ? "true" : "false";
        else if constexpr (std::is_same_v<T, std::string>) return TomlString(*v);
        else if constexpr (std::is_same_v<T, double>) return TomlNumber(*v);
        else if constexpr (std::is_same_v<T, Ints>) return TomlInts(*v);
        else if constexpr (std::is_same_v<T, IntRows>) return TomlRows(*v);
        else if constexpr (std::is_same_v<T, Strings>) return TomlStrings(*v);
        else return std::to_string(*v);
      },
      value);
}

}  // namespace disagmoe
