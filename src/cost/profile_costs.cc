#include "cost/profile_costs.h"

#include <algorithm>
#include <cmath>

#include "base/error.h"
#include "schedule/ready.h"
#include "spec/layout.h"
#include "spec/params.h"

namespace disagmoe {
namespace {

int64_t Aligned(int64_t bytes) { return (bytes + 63) / 64 * 64; }

// C(n - e, k) / C(n, k): none of k distinct of n are among e.
double NoneOf(int64_t n, int64_t e, int64_t k) {
  double p = 1;
  for (int64_t i = 0; i < k; ++i)
    p *= static_cast<double>(std::max<int64_t>(0, n - e - i)) / static_cast<double>(n - i);
  return p;
}

// On the straight line through two points, or the value of the one.
double Line(double x0, double y0, double x1, double y1, double x) {
  return x0 == x1 ? y0 : y0 + (y1 - y0) * (x - x0) / (x1 - x0);
}

}  // namespace

ProfileCosts::ProfileCosts(const Profile& profile, const RunConfig& config, const Schedule& schedule,
                           const std::string& where)
    : profile_(profile), config_(config), schedule_(schedule), where_(where) {
  if (!schedule.plain()) {
    throw Error({"a profile knows whole stages and whole backwards only", where, "schedule " + schedule.name, "",
                 "schedules of models on clusters: disagmoe simulate MODEL CLUSTER"});
  }
  CheckModel();
  CheckSizes();
  const int64_t rows = std::max<int64_t>(1, std::ssize(config.layout.expert_counts));
  for (int64_t row = 0; row < rows; ++row) expert_begins_.push_back(ExpertBegins(config, row));
  for (size_t g = 0; g < schedule.groups.size(); ++g) {
    for (size_t i = 0; i < schedule.groups[g].ranks.size(); ++i)
      classes_.push_back({static_cast<int>(g), 1, static_cast<int>(i)});
  }
  for (int backward = 0; backward < 2; ++backward) {
    for (int stage = 0; stage < schedule.num_stages(); ++stage) {
      std::vector<int64_t>& workers = stage_ns_[backward].emplace_back();
      for (size_t w = 0; w < Ranks(stage).size(); ++w) {
        const double ns = StageNs(stage, static_cast<int>(w), backward != 0);
        workers.push_back(std::llround(ns) + profile.gap_ns);
      }
    }
  }
  MakeEnds();
}

void ProfileCosts::CheckModel() const {
  auto differ = [&](const std::string& key, const std::string& got, const std::string& expected) {
    throw Error({"the profile is of other runs", where_ + ", " + key, got, expected + " (the configuration's)",
                 "disagmoe profile CONFIG.toml --out FILE makes one"});
  };
  auto same = [&](const char* key, int64_t got, int64_t expected) {
    if (got != expected) differ(key, std::to_string(got), std::to_string(expected));
  };
  const ModelConfig &p = profile_.model, &c = config_.model;
  same("vocab_size", p.vocab_size, c.vocab_size);
  same("hidden_size", p.hidden_size, c.hidden_size);
  same("num_attention_heads", p.num_attention_heads, c.num_attention_heads);
  same("num_key_value_heads", p.num_key_value_heads, c.num_key_value_heads);
  same("head_dim", p.head_dim, c.head_dim);
  same("qk_norm", p.qk_norm, c.qk_norm);
  same("num_experts", p.num_experts, c.num_experts);
  same("num_experts_per_tok", p.num_experts_per_tok, c.num_experts_per_tok);
  same("moe_intermediate_size", p.moe_intermediate_size, c.moe_intermediate_size);
  same("n_shared_experts", p.n_shared_experts, c.n_shared_experts);
  same("first_k_dense_replace", p.first_k_dense_replace, c.first_k_dense_replace);
  if (c.first_k_dense_replace > 0) same("intermediate_size", p.intermediate_size, c.intermediate_size);
  const auto got = LaterModelKeys(p), expected = LaterModelKeys(c);
  for (size_t i = 0; i < got.size(); ++i) {
    if (got[i].second != expected[i].second) differ(got[i].first, got[i].second, expected[i].second);
  }
  same("threads", profile_.threads, config_.device.threads);
  if (profile_.dtype != config_.train.dtype) differ("dtype", profile_.dtype, config_.train.dtype);
}

// Lines that go on far beyond what was measured are guesses.
void ProfileCosts::CheckSizes() const {
  const int64_t s = config_.train.seq_length;
  int64_t shortest = s, longest = 0, tokens = 0;
  for (const StageTimes* t : Tables(StageKind::kFirstAttention)) {
    shortest = longest == 0 ? t->seq_length : std::min(shortest, t->seq_length);
    longest = std::max(longest, t->seq_length);
    tokens = std::max(tokens, t->forward.x.back());
  }
  if (s < shortest || s > longest) {
    throw Error({"the profile does not reach this sequence length", where_, std::to_string(s),
                 std::to_string(shortest) + " to " + std::to_string(longest),
                 "disagmoe profile ... --seq " + std::to_string(s)});
  }
  int64_t most = 0;
  for (size_t w = 0; w < Ranks(0).size(); ++w) most = std::max(most, Tokens(0, static_cast<int>(w)));
  if (most > 2 * tokens) {
    throw Error({"the profile does not reach this size of a micro-batch", where_,
                 std::to_string(most) + " tokens a worker", "at most " + std::to_string(2 * tokens),
                 "profile with a larger train.micro_batch_size"});
  }
}

std::vector<const StageTimes*> ProfileCosts::Tables(StageKind kind) const {
  const bool recompute = config_.train.recompute == "layer";
  std::vector<const StageTimes*> tables;
  for (const StageTimes& t : profile_.stages) {
    if (t.kind == kind && t.recompute == recompute && !t.forward.x.empty()) tables.push_back(&t);
  }
  if (tables.empty()) {
    throw Error({"the profile lacks a kind of computation", where_,
                 std::string(StageKindName(kind)) + (recompute ? " with recompute" : ""), "",
                 "profile this configuration"});
  }
  return tables;
}

int64_t ProfileCosts::Experts(int layer, int worker) const {
  const std::vector<int64_t>& begin = expert_begins_[expert_begins_.size() == 1 ? 0 : layer];
  return begin[worker + 1] - begin[worker];
}

double ProfileCosts::Visits(int layer, int worker) const {
  return 1 - NoneOf(config_.model.num_experts, Experts(layer, worker), config_.model.num_experts_per_tok);
}

ProfileCosts::Load ProfileCosts::ExpertLoad(int layer, int worker) const {
  const double tokens = static_cast<double>(config_.train.micro_batch_size * config_.train.seq_length);
  const double experts = static_cast<double>(Experts(layer, worker));
  const double pairs =
      static_cast<double>(config_.model.num_experts_per_tok) / static_cast<double>(config_.model.num_experts);
  return {tokens * Visits(layer, worker), tokens * pairs * experts, experts};
}

// As src/runtime/topology.cc: attention cuts between sequences, all others between any two tokens.
int64_t ProfileCosts::TokenBegin(int stage, int worker) const {
  const int64_t b = config_.train.micro_batch_size, s = config_.train.seq_length;
  const int64_t workers = static_cast<int64_t>(Ranks(stage).size());
  const bool attention = stage % 2 == 0 && stage + 1 < schedule_.num_stages();
  return attention ? PartBegin(b, workers, worker) * s : PartBegin(b * s, workers, worker);
}

// That cross a boundary between two workers.
double ProfileCosts::Rows(int boundary, int lower, int upper) const {
  const int ffn_stage = boundary % 2 == 0 ? boundary + 1 : boundary,
            token_stage = boundary % 2 == 0 ? boundary : boundary + 1;
  const int ffn = boundary % 2 == 0 ? upper : lower, owner = boundary % 2 == 0 ? lower : upper;
  const int layer = ffn_stage / 2;
  if (!config_.model.is_dense(layer)) return static_cast<double>(Tokens(token_stage, owner)) * Visits(layer, ffn);
  const int64_t begin = std::max(TokenBegin(token_stage, owner), TokenBegin(ffn_stage, ffn));
  const int64_t end = std::min(TokenBegin(token_stage, owner + 1), TokenBegin(ffn_stage, ffn + 1));
  return static_cast<double>(std::max<int64_t>(0, end - begin));
}

// The layouts of src/runtime/exchange.cc.
int64_t ProfileCosts::BytesBetween(int boundary, bool backward, int lower, int upper) const {
  if (Ranks(boundary)[lower] == Ranks(boundary + 1)[upper]) return 0;
  const int64_t n = std::llround(Rows(boundary, lower, upper));
  const int64_t rows = n * config_.model.hidden_size * (config_.train.dtype == "bf16" ? 2 : 4);
  if (boundary % 2 == 1) return backward ? rows : 64 + Aligned(4 * n) + rows;
  int64_t pairs = 0, home = n;
  if (!config_.model.is_dense(boundary / 2)) {
    const double share =
        static_cast<double>(Experts(boundary / 2, upper)) / static_cast<double>(config_.model.num_experts);
    const double tokens = static_cast<double>(Tokens(boundary, lower));
    pairs = std::llround(tokens * static_cast<double>(config_.model.num_experts_per_tok) * share);
    home = std::llround(tokens * share);
  }
  if (!backward) return 64 + Aligned(4 * n) + Aligned(4 * (n + 1)) + 2 * Aligned(4 * pairs) + Aligned(4 * home) + rows;
  const bool counts = config_.model.router_aux_loss == "global" && pairs > 0;
  return 64 + Aligned(4 * pairs) + Aligned(counts ? 4 * Experts(boundary / 2, upper) : 0) + rows;
}

double ProfileCosts::AttentionNs(StageKind kind, double tokens, bool backward) const {
  // A token's time grows in proportion to the length of its sequence, beside a constant.
  const StageTimes *below = nullptr, *above = nullptr;
  const int64_t s = config_.train.seq_length;
  for (const StageTimes* t : Tables(kind)) {
    if (t->seq_length <= s && (below == nullptr || t->seq_length > below->seq_length)) below = t;
    if (t->seq_length >= s && (above == nullptr || t->seq_length < above->seq_length)) above = t;
  }
  if (below == nullptr) below = above;
  if (above == nullptr) above = below;
  auto time = [&](const StageTimes* t) { return (backward ? t->backward : t->forward).At(tokens); };
  return Line(static_cast<double>(below->seq_length), time(below), static_cast<double>(above->seq_length), time(above),
              static_cast<double>(s));
}

// Measured with k pairs a row, at some numbers of experts; a table with one pair a row tells what a row costs by
// itself.
double ProfileCosts::ExpertsNs(const Load& load, bool backward) const {
  std::vector<const StageTimes*> tables;
  const StageTimes* single = nullptr;
  const int64_t k = config_.model.num_experts_per_tok;
  for (const StageTimes* t : Tables(StageKind::kExperts)) {
    if (t->per_row == k) tables.push_back(t);
    if (t->per_row == 1 && k > 1) single = t;
  }
  DM_CHECK(!tables.empty(), where_ + ": no experts with the model's own number of them a token");
  std::sort(tables.begin(), tables.end(),
            [](const StageTimes* a, const StageTimes* b) { return a->experts < b->experts; });
  auto curve = [&](const StageTimes* t) -> const Curve& { return backward ? t->backward : t->forward; };
  double per_row = 0;
  for (const StageTimes* t : tables) {
    if (single == nullptr || t->experts != single->experts) continue;
    const double rows = static_cast<double>(curve(single).x.back()), kd = static_cast<double>(k);
    per_row = std::max(0.0, (curve(single).At(rows) - curve(t).At(rows / kd)) / (rows - rows / kd));
  }
  // The two tables whose numbers of experts are around, or the nearest two.
  size_t i = 1;
  while (i + 1 < tables.size() && load.experts > static_cast<double>(tables[i]->experts)) ++i;
  const StageTimes *a = tables[i >= tables.size() ? 0 : i - 1], *b = tables[std::min(i, tables.size() - 1)];
  const double full_rows = load.pairs / static_cast<double>(k);
  return std::max(0.0, Line(static_cast<double>(a->experts), curve(a).At(full_rows), static_cast<double>(b->experts),
                            curve(b).At(full_rows), load.experts)) +
         (load.rows - full_rows) * per_row;
}

double ProfileCosts::StageNs(int stage, int worker, bool backward) const {
  const StageKind kind = StageKindOf(config_.model, stage);
  if (kind == StageKind::kExperts) return ExpertsNs(ExpertLoad(stage / 2, worker), backward);
  const double tokens = static_cast<double>(Tokens(stage, worker));
  if (kind <= StageKind::kDenseAttention) return tokens > 0 ? AttentionNs(kind, tokens, backward) : 0;
  const StageTimes* t = Tables(kind)[0];
  return (backward ? t->backward : t->forward).At(tokens);
}

int64_t ProfileCosts::ComputeNs(const Op& op, int worker_class) const {
  return stage_ns_[op.kind == OpKind::kBackward][op.stage][classes_[worker_class].first_worker];
}

TransferCost ProfileCosts::Transfer(const Op& send, int worker_class, bool sending) const {
  const int me = classes_[worker_class].first_worker;
  const bool backward = send.kind == OpKind::kSendBackward;
  const bool lower = sending != backward;  // this side computes stage `boundary`
  int64_t bytes = 0, largest = 0;
  bool remote = false;  // a message without rows travels too
  const int peers = static_cast<int>(Ranks(lower ? send.stage + 1 : send.stage).size());
  for (int peer = 0; peer < peers; ++peer) {
    const int64_t n =
        lower ? BytesBetween(send.stage, backward, me, peer) : BytesBetween(send.stage, backward, peer, me);
    remote |= Ranks(send.stage)[lower ? me : peer] != Ranks(send.stage + 1)[lower ? peer : me];
    bytes += n;
    largest = std::max(largest, n);
  }
  TransferCost cost;
  if (!remote) return cost;
  cost.nic_bytes = bytes;
  const TransportConfig& t = config_.transport;
  if (t.paced) {
    // The emulated NIC holds back a message that is there: the wire below shows only where it is the slower.
    cost.nic_ns = std::llround(static_cast<double>(bytes) * 8 / t.paced_gbps);
    const double wire = profile_.paced_message.At(static_cast<double>(largest));
    const double latency = t.paced_latency_us * 1e3 + static_cast<double>(profile_.late_ns);
    cost.latency_ns = std::llround(std::max(latency, wire - static_cast<double>(cost.nic_ns))) + profile_.wake_ns;
    return cost;
  }
  // The receiver pulls; the sender only posts.
  const double first = profile_.message.At(0);
  cost.latency_ns = std::llround(first) + profile_.wake_ns;
  if (!sending) cost.nic_ns = std::llround(std::max(0.0, profile_.message.At(static_cast<double>(bytes)) - first));
  return cost;
}

// Nobody updates before all have summed, and a step begins when all have updated: the slowest counts for all.
void ProfileCosts::MakeEnds() {
  const std::vector<StepEndWork> work = StepEndWorkOf(config_, schedule_);
  double reduce = 0;
  int64_t slowest = 0;
  for (const WorkerClass& c : classes_) {
    const StepEndWork& w = work[schedule_.groups[c.group].ranks[c.first_worker]];
    const bool alone = config_.layout.workers() == 1;
    reduce = std::max(reduce, alone ? 0 : profile_.sums.At(static_cast<double>(w.sent_bytes)));
    ends_.push_back({0, std::llround(profile_.optimizer.At(static_cast<double>(w.elements)))});
    slowest = std::max(slowest, ends_.back().optimizer_ns);
  }
  const int64_t all = std::llround(reduce) + slowest + profile_.report_ns;
  for (StepEndCost& end : ends_) end.reduce_ns = all - end.optimizer_ns;
}

}  // namespace disagmoe
