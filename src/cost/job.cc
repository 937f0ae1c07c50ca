#include "cost/job.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdio>
#include <functional>
#include <numeric>

#include "base/error.h"
#include "cost/cluster_costs.h"
#include "cost/work.h"
#include "spec/presets.h"

namespace disagmoe {
namespace {

struct Knob {
  std::string name, meaning;
  // Whether the schedule (already set) reads it; for a refusal also why not.
  std::function<bool(const Job&)> used;
  std::string unused;  // "two pools only"
  std::function<void(Job*, const std::string&)> set;
};

double Number(const std::string& name, const std::string& text, double least, double most) {
  double value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error == std::errc() && end == text.data() + text.size() && value >= least && value <= most) return value;
  char range[80];
  std::snprintf(range, sizeof range, "a number from %g to %g", least, most);
  throw Error({"value not allowed", "--set " + name, "\"" + text + "\"", range, ""});
}

int Whole(const std::string& name, const std::string& text, int least, int most = 1'000'000'000) {
  const double value = Number(name, text, least, most);
  if (value == std::floor(value)) return static_cast<int>(value);
  throw Error({"value not allowed", "--set " + name, text, "a whole number", ""});
}

bool YesNo(const std::string& name, const std::string& text) {
  if (text == "true" || text == "yes" || text == "1") return true;
  if (text == "false" || text == "no" || text == "0") return false;
  throw Error({"value not allowed", "--set " + name, "\"" + text + "\"", "true or false", ""});
}

bool TwoPools(const Job& j) { return !j.colocated(); }
bool Colocated(const Job& j) { return j.colocated(); }
bool AnySchedule(const Job&) { return true; }
bool HasRounds(const Job& j) { return j.schedule != "dualpipe" && j.schedule != "dualpipe-v"; }
bool HasSlope(const Job& j) { return HasRounds(j) && j.schedule != "hetermoe"; }
bool HasVirtualStages(const Job& j) { return j.colocated() && HasRounds(j); }
bool Overlaps(const Job& j) { return j.overlaps(); }
bool IsRandom(const Job& j) { return j.jitter > 0 || j.uneven(); }
bool HasSpine(const Job& j) { return j.cluster.topology == "rail" && j.cluster.gpus > j.cluster.gpus_per_node; }
std::function<bool(const Job&)> OneOf(std::vector<std::string> names) {
  return [names = std::move(names)](const Job& j) {
    return std::find(names.begin(), names.end(), j.schedule) != names.end();
  };
}

Straggler ParseStraggler(const std::string& text) {
  // "A0.3:compute=1.2,nic=2"
  const auto bad = [&] {
    return Error({"value not allowed", "--set straggler", "\"" + text + "\"",
                  "WORKER:compute=X,nic=Y such as A0.3:compute=1.2", ""});
  };
  const size_t colon = text.find(':');
  if (colon == std::string::npos || colon == 0) throw bad();
  Straggler s{text.substr(0, colon), 1, 1};
  for (size_t at = colon + 1; at < text.size();) {
    const size_t end = std::min(text.find(',', at), text.size());
    const std::string item = text.substr(at, end - at);
    const size_t equal = item.find('=');
    if (equal == std::string::npos) throw bad();
    const double x = Number("straggler", item.substr(equal + 1), 1e-3, 1e6);
    if (item.substr(0, equal) == "compute") {
      s.compute = x;
    } else if (item.substr(0, equal) == "nic") {
      s.nic = x;
    } else {
      throw bad();
    }
    at = end + 1;
  }
  if (colon + 1 == text.size()) throw bad();
  return s;
}

Dedup ParseDedup(const std::string& text) {
  if (text == "expert") return Dedup::kExpert;
  if (text == "worker") return Dedup::kWorker;
  if (text == "node") return Dedup::kNode;
  throw Error({"value not allowed", "--set dedup", "\"" + text + "\"", "expert, worker or node", ""});
}

bool ParseHead(const std::string& text) {
  if (text == "attention" || text == "ffn") return text == "attention";
  throw Error({"value not allowed", "--set head", "\"" + text + "\"", "ffn or attention", ""});
}

#define SET [](Job * j, const std::string& v)
std::vector<Knob> MakeKnobs() {
  const std::vector<std::string> cut{"tutel", "comet", "fastermoe", "lancet"};
  return {
      {"p", "groups of each pool; colocated: pipeline groups (PP)", AnySchedule, "",
       SET { j->p_a = Whole("p", v, 1), j->p_f = j->colocated() ? 1 : j->p_a; }},
      {"p_a", "attention groups", TwoPools, "two pools only", SET { j->p_a = Whole("p_a", v, 1); }},
      {"p_f", "FFN groups", TwoPools, "two pools only", SET { j->p_f = Whole("p_f", v, 1); }},
      {"m", "workers of an attention group", TwoPools, "two pools only", SET { j->m = Whole("m", v, 1); }},
      {"n", "workers of an FFN group", TwoPools, "two pools only", SET { j->n = Whole("n", v, 1); }},
      {"ep", "workers of a colocated group (expert parallel)", Colocated, "colocated schedules only",
       SET { j->m = Whole("ep", v, 1); }},
      {"v", "virtual stages: chunks of layers a group holds", HasVirtualStages,
       "two pools hold a layer a chunk, dualpipe a chunk a direction", SET { j->virtual_stages = Whole("v", v, 1); }},
      {"b", "sequences of an attention worker in a micro-batch", AnySchedule, "",
       SET { j->sequences = Whole("b", v, 1); }},
      {"batch", "sequences a step, on the whole cluster", AnySchedule, "",
       SET { j->global_batch = Whole("batch", v, 1); }},
      {"round", "micro-batches per round q; 0 = chosen", HasRounds, "its order has no rounds",
       SET { j->round = Whole("round", v, 0); }},
      {"slope", "slope e of the warm-up", HasSlope, "its order has no warm-up of that kind",
       SET { j->slope = Whole("slope", v, 0, 100); }},
      {"parts", "pieces that overlap within a layer (Tutel's degree); 0 = the schedule's choice", OneOf(cut),
       "it does not cut layers", SET { j->parts = Whole("parts", v, 0, 64); }},
      {"delay_weights", "weight gradients later, as operations of their own", OneOf({"megatron-overlap"}),
       "megatron-overlap only", SET { j->delay_weights = YesNo("delay_weights", v); }},
      {"head", "\"ffn\": with the last FFN group; \"attention\": with an attention group", TwoPools, "two pools only",
       SET { j->head_on_attention = ParseHead(v); }},
      {"nics_a", "NICs of an attention worker; 0 = an equal share", TwoPools, "two pools only",
       SET { j->nics_a = Number("nics_a", v, 0, 64); }},
      {"nics_f", "NICs of an FFN worker; 0 = an equal share", TwoPools, "two pools only",
       SET { j->nics_f = Number("nics_f", v, 0, 64); }},
      {"nics", "NICs of a worker; 0 = an equal share", Colocated, "colocated schedules only",
       SET { j->nics_a = Number("nics", v, 0, 64); }},
      {"mixed_nodes", "both pools on the same nodes", TwoPools, "two pools only",
       SET { j->mixed_nodes = YesNo("mixed_nodes", v); }},
      {"dedup", "rows of a token: one per \"expert\", \"worker\" or \"node\"", AnySchedule, "",
       SET { j->dedup = ParseDedup(v); }},
      {"overlap_slowdown", "computation is slower beside communication kernels", Overlaps, "nothing overlaps in it",
       SET { j->overlap_slowdown = YesNo("overlap_slowdown", v); }},
      {"recompute", "keep a layer's inputs and routing, recompute the rest", AnySchedule, "",
       SET { j->recompute = YesNo("recompute", v); }},
      {"shard_optimizer", "optimizer state over all that hold a parameter", AnySchedule, "",
       SET { j->shard_optimizer = YesNo("shard_optimizer", v); }},
      {"reserved_gb", "memory of each GPU for the rest", AnySchedule, "",
       SET { j->reserved_gb = Number("reserved_gb", v, 0, 1e4); }},
      {"state_bytes", "master weight and optimizer state, bytes a parameter", AnySchedule, "",
       SET { j->state_bytes = Number("state_bytes", v, 0, 64); }},
      {"routing_skew", "popularity of the r-th expert is as 1 / r^skew", AnySchedule, "",
       SET { j->routing_skew = Number("routing_skew", v, 0, 10); }},
      {"shadow_experts", "hottest experts of a layer, copied to every worker", OneOf({"fastermoe"}), "fastermoe only",
       SET { j->shadow_experts = Whole("shadow_experts", v, 0, 1000); }},
      {"attention_expert_share", "share of the experts on attention workers", OneOf({"hetermoe"}), "hetermoe only",
       SET { j->attention_expert_share = Number("attention_expert_share", v, 0, 0.99); }},
      {"straggler", "WORKER:compute=X,nic=Y: a worker or group whose computations, transfers take X, Y times as long",
       AnySchedule, "", SET { j->stragglers.push_back(ParseStraggler(v)); }},
      {"jitter", "relative standard deviation of each computation's time", AnySchedule, "",
       SET { j->jitter = Number("jitter", v, 0, 0.28); }},
      {"seed", "of jitter and of the order of uneven experts", IsRandom,
       "nothing is random without jitter or uneven routing (set before it)",
       SET { j->seed = static_cast<uint64_t>(Whole("seed", v, 0)); }},
      {"spine_oversubscription", "2 = the spine carries half of what the leaves could send", HasSpine,
       "one node or one switch has no spine",
       SET { j->cluster.spine_oversubscription = Number("spine_oversubscription", v, 1, 100); }},
      {"nic_gbytes_s", "of a NIC and direction", AnySchedule, "",
       SET { j->cluster.nic_gbytes_s = Number("nic_gbytes_s", v, 1e-3, 1e5); }},
      {"m2n", "efficiency of the NIC in M2N", TwoPools, "two pools only",
       SET { j->cluster.efficiency.m2n = Number("m2n", v, 1e-3, 1); }},
      {"all_to_all", "efficiency of the NIC in an all-to-all of a group", AnySchedule, "",
       SET { j->cluster.efficiency.all_to_all = Number("all_to_all", v, 1e-3, 1); }},
  };
}
#undef SET

const std::vector<Knob>& AllKnobs() {
  static const std::vector<Knob> knobs = MakeKnobs();
  return knobs;
}

[[noreturn]] void Refuse(const std::string& what, const std::string& where, const std::string& got,
                         const std::string& expected, const std::string& hint = "") {
  throw Error({what, where, got, expected, hint});
}

}  // namespace

bool Job::colocated() const {
  for (const ScheduleName& name : ScheduleNames()) {
    if (name.name == schedule) return name.colocated;
  }
  return false;
}

bool Job::overlaps() const { return schedule != "megatron-1f1b"; }

void CheckName(const Job& job) {
  std::string names;
  for (const ScheduleName& n : ScheduleNames()) {
    if (n.name == job.schedule) return;
    names += (names.empty() ? "" : ", ") + n.name;
  }
  Refuse("unknown schedule", "--schedule", "\"" + job.schedule + "\"", names);
}

namespace {

void CheckLoads(const Job& job) {
  if (job.expert_load.empty()) return;
  if (static_cast<int64_t>(job.expert_load.size()) != job.model.num_experts) {
    Refuse("wrong number of expert loads", "expert loads", std::to_string(job.expert_load.size()),
           std::to_string(job.model.num_experts));
  }
  int64_t used = 0;
  for (double x : job.expert_load) {
    if (!(x >= 0) || x > 1e300) Refuse("value out of range", "expert loads", std::to_string(x), "at least 0");
    used += x > 0;
  }
  if (used < job.model.experts_per_token) {
    Refuse("fewer experts with a load than a token has", "expert loads", std::to_string(used),
           "at least " + std::to_string(job.model.experts_per_token));
  }
  if (job.routing_skew > 0) {
    Refuse("two ways to route", "routing_skew", "a skew and recorded loads", "one of them");
  }
}

// All workers' NICs are those of the cluster; which of them are on whose node is not looked at.
void CheckNics(const Job& job) {
  const ClusterSpec& c = job.cluster;
  const double equal = static_cast<double>(c.nics_per_node) / c.gpus_per_node;
  const double a = job.nics_a > 0 ? job.nics_a : equal;
  const double f = job.nics_f > 0 ? job.nics_f : equal;
  const double used = job.replicas() * (a * job.p_a * job.m + (job.colocated() ? 0 : f * job.p_f * job.n));
  const double there = equal * c.gpus;
  char got[120], most[40];
  if (used > there * (1 + 1e-9)) {
    std::snprintf(got, sizeof got, "%g", used);
    std::snprintf(most, sizeof most, "at most the cluster's %g", there);
    Refuse("more NICs than there are", job.colocated() ? "nics" : "nics_a, nics_f", got, most);
  }
  if (c.topology != "rail" && c.spine_oversubscription != 1) {
    std::snprintf(got, sizeof got, "%g", c.spine_oversubscription);
    Refuse("one switch has no spine", "spine_oversubscription of " + c.name, got, "1, or topology rail");
  }
}

// A step of weeks at the peak would not fit nanoseconds with shares of it; the operations must fit memory.
void CheckSize(const Job& job) {
  constexpr double kMostSeconds = 1e6;
  constexpr int64_t kMostForwards = 10'000'000;
  char got[120];
  const double tokens = static_cast<double>(job.global_batch) * static_cast<double>(job.seq_length);
  const double seconds = tokens * TrainFlopsPerToken(job.model, job.seq_length) /
                         (job.cluster.gpu.peak_tflops * 1e12 * job.cluster.gpus);
  if (seconds > kMostSeconds) {
    std::snprintf(got, sizeof got, "%g s at the peak of all GPUs", seconds);
    Refuse("a step that takes too long", "batch, --seq", got, "at most 1e+06 s", "");
  }
  const int64_t forwards = job.micro_batches() * (2 * job.model.num_layers + 1) * std::max(1, job.parts);
  if (forwards > kMostForwards) {
    Refuse("too many operations to simulate", "batch, b", std::to_string(job.micro_batches()) + " micro-batches",
           "at most " + std::to_string(kMostForwards / (2 * job.model.num_layers + 1) / std::max(1, job.parts)),
           "a smaller batch says the same");
  }
}

}  // namespace

void CheckJob(const Job& job) {
  CheckName(job);
  const std::string layout = job.colocated() ? "p * ep = " : "p_a * m + p_f * n = ";
  const int64_t workers = job.workers();
  if (job.cluster.gpus % workers != 0) {
    Refuse("a pipeline's workers do not divide the GPUs", "layout of " + job.schedule, layout + std::to_string(workers),
           "a divisor of the cluster's " + std::to_string(job.cluster.gpus),
           "the rest of the cluster holds replicas of it");
  }
  const int64_t wave = int64_t{job.replicas()} * job.m * job.sequences;
  if (job.global_batch % wave != 0) {
    Refuse("the batch does not divide into micro-batches", "batch", std::to_string(job.global_batch),
           "a multiple of " + std::to_string(wave) + " = replicas " + std::to_string(job.replicas()) +
               " * attention workers " + std::to_string(job.m) + " * sequences " + std::to_string(job.sequences));
  }
  const int holders = job.colocated() ? job.m : job.n;
  if (job.model.num_experts > 0 && holders > job.model.num_experts) {
    Refuse("more workers than experts", job.colocated() ? "ep" : "n", std::to_string(holders),
           "at most " + std::to_string(job.model.num_experts));
  }
  const int parts = job.parts > 0 ? job.parts : 2;
  if (job.schedule == "lancet" && job.sequences % parts != 0) {
    Refuse("lancet cuts a worker's micro-batch by sequences", "b", std::to_string(job.sequences),
           "a multiple of its parts, " + std::to_string(parts));
  }
  if (job.shadow_experts > job.model.num_experts) {
    Refuse("more shadowed experts than there are", "shadow_experts", std::to_string(job.shadow_experts),
           "at most " + std::to_string(job.model.num_experts));
  }
  CheckLoads(job);
  CheckNics(job);
  CheckSize(job);
  if (job.seq_length < 1) Refuse("value out of range", "--seq", std::to_string(job.seq_length), "at least 1");
}

void SetKnob(Job* job, const std::string& name, const std::string& value) {
  const Knob* nearest = nullptr;
  for (const Knob& knob : AllKnobs()) {
    if (knob.name == name) {
      if (!knob.used(*job)) {
        Refuse("a setting that is not used", "--set " + name, name + "=" + value, "nothing: " + knob.unused,
               "schedule " + job->schedule);
      }
      knob.set(job, value);
      return;
    }
    if (!nearest || EditDistance(knob.name, name) < EditDistance(nearest->name, name)) nearest = &knob;
  }
  Refuse("unknown setting", "--set", "\"" + name + "\"", "see disagmoe simulate --help",
         "did you mean " + nearest->name + "?");
}

std::vector<KnobHelp> Knobs() {
  std::vector<KnobHelp> out;
  for (const Knob& knob : AllKnobs()) {
    const bool said = knob.unused.empty() || knob.name == "seed";
    out.push_back({knob.name, knob.meaning + (said ? "" : " (" + knob.unused + ")")});
  }
  return out;
}

void SetScheduleDefaults(Job* job) {
  // AF-Pipe packs one row a worker (system.md section 4). DeepSeek's library, with which DualPipe runs, one a node. The
  // others one for each expert, as Megatron-Core's all-to-all dispatcher.
  const std::string& s = job->schedule;
  const bool dualpipe = s == "dualpipe" || s == "dualpipe-v";
  job->dedup = !job->colocated() ? Dedup::kWorker : dualpipe ? Dedup::kNode : Dedup::kExpert;
  if (s == "hetermoe") job->parts = 1;
}

PlacementSpec PlacementOf(const Job& job) {
  PlacementSpec p;
  p.num_layers = static_cast<int>(job.model.num_layers);
  p.p_a = job.p_a;
  p.m = job.m;
  p.colocated = job.colocated();
  if (!p.colocated) p.p_f = job.p_f, p.n = job.n;
  p.head_on_attention = !p.colocated && job.head_on_attention;
  if (p.colocated && job.schedule != "dualpipe" && job.schedule != "dualpipe-v") p.virtual_stages = job.virtual_stages;
  return p;
}

std::vector<int> NodesOf(const Job& job) {
  const auto workers = static_cast<int>(job.workers());
  std::vector<int> place(workers);
  std::iota(place.begin(), place.end(), 0);
  if (!job.colocated() && job.mixed_nodes) {
    // Both pools evenly along the line of GPUs: worker i of A at (i + 1/2) / |A|, of F likewise; A first where equal.
    const int a = job.p_a * job.m;
    const int f = workers - a;
    std::vector<int> order(workers);
    std::iota(order.begin(), order.end(), 0);
    const auto at = [&](int r) { return r < a ? int64_t{2 * r + 1} * f : int64_t{2 * (r - a) + 1} * a; };
    std::stable_sort(order.begin(), order.end(), [&](int x, int y) { return at(x) < at(y); });
    for (int i = 0; i < workers; ++i) place[order[i]] = i;
  }
  for (int& x : place) x /= job.cluster.gpus_per_node;
  return place;
}

Schedule ScheduleOf(const Job& job) {
  const PlacementSpec placement = PlacementOf(job);
  GenerateOptions options;
  options.parts = job.schedule == "hetermoe" && job.attention_expert_share > 0 ? 2 : job.parts;
  options.slope = job.slope;
  options.delay_weights = job.delay_weights;
  if (!job.colocated()) {
    // Times of a layer in the middle decide the round, and what list scheduling goes by: planned for balanced routing
    // and workers that are all alike.
    Job calm = job;
    calm.jitter = calm.routing_skew = 0;
    calm.expert_load.clear();
    calm.stragglers.clear();
    const Schedule sketch = Generate(job.schedule, placement, options);
    const ClusterCosts costs(calm, sketch);
    const int layer = static_cast<int>(job.model.num_layers) / 2;
    const auto first = [&](int stage) {
      int c = 0;
      while (costs.classes()[c].group != sketch.group(stage, 0)) ++c;
      return c;
    };
    const int a = first(2 * layer);
    const int f = first(2 * layer + 1);
    const auto attention = static_cast<double>(costs.ComputeNs({OpKind::kForward, 2 * layer, 0}, a));
    const auto ffn = static_cast<double>(costs.ComputeNs({OpKind::kForward, 2 * layer + 1, 0}, f));
    double transfer = 0;
    for (const bool sending : {true, false}) {
      const TransferCost cost = costs.Transfer({OpKind::kSendForward, 2 * layer, 0}, sending ? a : f, sending);
      transfer = std::max(transfer, static_cast<double>(std::max(cost.nic_ns, cost.nvlink_ns) + cost.latency_ns));
    }
    const double longest = std::max({attention, ffn, 1.0});
    options.transfer_ratio = transfer / longest;
    options.attention_time = attention / longest;
    options.ffn_time = ffn / longest;
  }
  options.num_micro_batches = static_cast<int>(job.micro_batches());
  options.round = job.round;
  return Generate(job.schedule, placement, options);
}

}  // namespace disagmoe
