// The settings of a job by name: who uses them, and their values.
#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdio>
#include <functional>
#include <sstream>

#include "base/error.h"
#include "cost/job.h"
#include "spec/presets.h"

namespace disagmoe {
namespace {

struct Knob {
  std::string name, meaning;
  // Whether the schedule (already set) reads it; for a refusal also why not.
  std::function<bool(const Job&)> used;
  std::string unused;  // "two pools only"
  std::function<void(Job*, const std::string&)> set;
  std::function<std::string(const Job&)> get;  // that `set` takes
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
bool HasFfnCluster(const Job& j) { return j.ffn_cluster.has_value(); }
bool HasSpine(const Job& j) {
  if (j.ffn_cluster) return j.cluster.topology == "rail" || j.ffn_cluster->topology == "rail";
  return j.cluster.topology == "rail" && j.cluster.gpus > j.cluster.gpus_per_node;
}
// A setting of the network is one of both pools.
template <typename Change>
void OfBoth(Job* j, Change change) {
  change(&j->cluster);
  if (j->ffn_cluster) change(&*j->ffn_cluster);
}
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

std::string Text(double x) {
  char text[40];
  return {text, std::to_chars(text, text + sizeof text, x).ptr};  // the shortest that reads back equal
}
std::string Text(int x) { return std::to_string(x); }
std::string Text(int64_t x) { return std::to_string(x); }
std::string Text(bool x) { return x ? "true" : "false"; }
std::string Text(Dedup x) { return x == Dedup::kExpert ? "expert" : x == Dedup::kWorker ? "worker" : "node"; }
// One setting each, joined by blanks.
std::string Text(const std::vector<Straggler>& stragglers) {
  std::string text;
  for (const Straggler& s : stragglers) {
    text += (text.empty() ? "" : " ") + s.worker + ":compute=" + Text(s.compute) + ",nic=" + Text(s.nic);
  }
  return text;
}

using Loads = std::vector<std::vector<double>>;
Loads ParseLoads(const std::string& text) {
  Loads layers(1);
  for (size_t at = 0; at < text.size();) {
    const size_t end = std::min(text.find_first_of(",;", at), text.size());
    if (end > at) layers.back().push_back(Number("expert_load", text.substr(at, end - at), 0, 1e300));
    if (end < text.size() && text[end] == ';') layers.emplace_back();
    at = end + 1;
  }
  return layers;
}
std::string Text(const Loads& layers) {
  std::string text;
  for (size_t l = 0; l < layers.size(); ++l) {
    if (l > 0) text += ";";
    for (size_t e = 0; e < layers[l].size(); ++e) text += (e > 0 ? "," : "") + Text(layers[l][e]);
  }
  return text;
}

// Two numbers where the pools' machines differ: no setting made them so.
template <typename Member>
std::string TextOfBoth(const Job& j, Member member) {
  const double a = member(j.cluster), f = j.ffn_cluster ? member(*j.ffn_cluster) : a;
  return a == f ? Text(a) : Text(a) + "+" + Text(f);
}

bool ParseHead(const std::string& text) {
  if (text == "attention" || text == "ffn") return text == "attention";
  throw Error({"value not allowed", "--set head", "\"" + text + "\"", "ffn or attention", ""});
}

#define SET [](Job * j, const std::string& v)
#define GET(member) [](const Job& j) { return Text(j.member); }
#define GET_BOTH(member) [](const Job& j) { return TextOfBoth(j, [](const ClusterSpec& c) { return c.member; }); }
std::vector<Knob> MakeKnobs() {
  const std::vector<std::string> cut{"tutel", "comet", "fastermoe", "lancet"};
  return {
      {"p", "groups of each pool; colocated: pipeline groups (PP)", AnySchedule, "",
       SET { j->p_a = Whole("p", v, 1), j->p_f = j->colocated() ? 1 : j->p_a; },
       GET(p_a)},
      {"p_a", "attention groups", TwoPools, "two pools only", SET { j->p_a = Whole("p_a", v, 1); },
       GET(p_a)},
      {"p_f", "FFN groups", TwoPools, "two pools only", SET { j->p_f = Whole("p_f", v, 1); },
       GET(p_f)},
      {"m", "workers of an attention group", TwoPools, "two pools only", SET { j->m = Whole("m", v, 1); },
       GET(m)},
      {"n", "workers of an FFN group", TwoPools, "two pools only", SET { j->n = Whole("n", v, 1); },
       GET(n)},
      {"ep", "workers of a colocated group (expert parallel)", Colocated, "colocated schedules only",
       SET { j->m = Whole("ep", v, 1); },
       GET(m)},
      {"idle", "GPUs left unused", AnySchedule, "", SET { j->idle_gpus = Whole("idle", v, 0); },
       GET(idle_gpus)},
      {"idle_ffn", "GPUs of an FFN pool's own cluster left unused", HasFfnCluster, "two clusters only",
       SET { j->idle_ffn_gpus = Whole("idle_ffn", v, 0); },
       GET(idle_ffn_gpus)},
      {"v", "virtual stages: chunks of layers a group holds", HasVirtualStages,
       "two pools hold a layer a chunk, dualpipe a chunk a direction", SET { j->virtual_stages = Whole("v", v, 1); },
       GET(virtual_stages)},
      {"b", "sequences of an attention worker in a micro-batch", AnySchedule, "",
       SET { j->sequences = Whole("b", v, 1); },
       GET(sequences)},
      {"batch", "sequences a step, on the whole cluster", AnySchedule, "",
       SET { j->global_batch = Whole("batch", v, 1); },
       GET(global_batch)},
      {"round", "micro-batches per round q; 0 = chosen", HasRounds, "its order has no rounds",
       SET { j->round = Whole("round", v, 0); },
       GET(round)},
      {"slope", "slope e of the warm-up", HasSlope, "its order has no warm-up of that kind",
       SET { j->slope = Whole("slope", v, 0, 100); },
       GET(slope)},
      {"parts", "pieces that overlap within a layer (Tutel's degree); 0 = the schedule's choice", OneOf(cut),
       "it does not cut layers", SET { j->parts = Whole("parts", v, 0, 64); },
       GET(parts)},
      {"delay_weights", "weight gradients later, as operations of their own", OneOf({"megatron-overlap"}),
       "megatron-overlap only", SET { j->delay_weights = YesNo("delay_weights", v); },
       GET(delay_weights)},
      {"head", "\"ffn\": with the last FFN group; \"attention\": with an attention group", TwoPools, "two pools only",
       SET { j->head_on_attention = ParseHead(v); },
       [](const Job& j) { return std::string(j.head_on_attention ? "attention" : "ffn"); }},
      {"nics_a", "NICs of an attention worker; 0 = an equal share", TwoPools, "two pools only",
       SET { j->nics_a = Number("nics_a", v, 0, 64); },
       GET(nics_a)},
      {"nics_f", "NICs of an FFN worker; 0 = an equal share", TwoPools, "two pools only",
       SET { j->nics_f = Number("nics_f", v, 0, 64); },
       GET(nics_f)},
      {"nics", "NICs of a worker; 0 = an equal share", Colocated, "colocated schedules only",
       SET { j->nics_a = Number("nics", v, 0, 64); },
       GET(nics_a)},
      {"mixed_nodes", "both pools on the same nodes", TwoPools, "two pools only",
       SET { j->mixed_nodes = YesNo("mixed_nodes", v); },
       GET(mixed_nodes)},
      {"dedup", "rows of a token: one per \"expert\", \"worker\" or \"node\"", AnySchedule, "",
       SET { j->dedup = ParseDedup(v); },
       GET(dedup)},
      {"overlap_slowdown", "computation is slower beside communication kernels", Overlaps, "nothing overlaps in it",
       SET { j->overlap_slowdown = YesNo("overlap_slowdown", v); },
       GET(overlap_slowdown)},
      {"recompute", "keep a layer's inputs and routing, recompute the rest", AnySchedule, "",
       SET { j->recompute = YesNo("recompute", v); },
       GET(recompute)},
      {"shard_optimizer", "optimizer state over all that hold a parameter", AnySchedule, "",
       SET { j->shard_optimizer = YesNo("shard_optimizer", v); },
       GET(shard_optimizer)},
      {"reserved_gb", "memory of each GPU for the rest", AnySchedule, "",
       SET { j->reserved_gb = Number("reserved_gb", v, 0, 1e4); },
       GET(reserved_gb)},
      {"state_bytes", "master weight and optimizer state, bytes a parameter", AnySchedule, "",
       SET { j->state_bytes = Number("state_bytes", v, 0, 64); },
       GET(state_bytes)},
      {"routing_skew", "popularity of the r-th expert is as 1 / r^skew", AnySchedule, "",
       SET { j->routing_skew = Number("routing_skew", v, 0, 10); },
       GET(routing_skew)},
      {"expert_load", "relative loads of the experts, as --expert-load: 5,3,1,1 of all layers, or of each: 5,3,1,1;2,4,4,0",
       AnySchedule, "", SET { j->expert_loads = ParseLoads(v); }, GET(expert_loads)},
      {"shadow_experts", "hottest experts of a layer, copied to every worker", OneOf({"fastermoe"}), "fastermoe only",
       SET { j->shadow_experts = Whole("shadow_experts", v, 0, 1000); },
       GET(shadow_experts)},
      {"attention_expert_share", "share of the experts on attention workers", OneOf({"hetermoe"}), "hetermoe only",
       SET { j->attention_expert_share = Number("attention_expert_share", v, 0, 0.99); },
       GET(attention_expert_share)},
      {"straggler", "WORKER:compute=X,nic=Y: a worker or group whose computations, transfers take X, Y times as long",
       AnySchedule, "", SET { j->stragglers.push_back(ParseStraggler(v)); },
       GET(stragglers)},
      {"jitter", "relative standard deviation of each computation's time", AnySchedule, "",
       SET { j->jitter = Number("jitter", v, 0, 0.28); },
       GET(jitter)},
      {"seed", "of jitter and of the order of uneven experts", IsRandom,
       "nothing is random without jitter or uneven routing (set before it)",
       SET { j->seed = static_cast<uint64_t>(Whole("seed", v, 0)); },
       [](const Job& j) { return std::to_string(j.seed); }},
      {"spine_oversubscription", "2 = the spine carries half of what the leaves could send", HasSpine,
       "one node or one switch has no spine",
       SET {
         OfBoth(j, [x = Number("spine_oversubscription", v, 1, 100)](ClusterSpec* c) {
           if (c->topology == "rail") c->spine_oversubscription = x;
         });
       },
       GET_BOTH(spine_oversubscription)},
      {"nic_gbytes_s", "of a NIC and direction", AnySchedule, "",
       SET { OfBoth(j, [x = Number("nic_gbytes_s", v, 1e-3, 1e5)](ClusterSpec* c) { c->nic_gbytes_s = x; }); },
       GET_BOTH(nic_gbytes_s)},
      {"m2n", "efficiency of the NIC in M2N", TwoPools, "two pools only",
       SET { OfBoth(j, [x = Number("m2n", v, 1e-3, 1)](ClusterSpec* c) { c->efficiency.m2n = x; }); },
       GET_BOTH(efficiency.m2n)},
      {"all_to_all", "efficiency of the NIC in an all-to-all of a group", AnySchedule, "",
       SET { OfBoth(j, [x = Number("all_to_all", v, 1e-3, 1)](ClusterSpec* c) { c->efficiency.all_to_all = x; }); },
       GET_BOTH(efficiency.all_to_all)},
  };
}
#undef GET_BOTH
#undef GET
#undef SET

const std::vector<Knob>& AllKnobs() {
  static const std::vector<Knob> knobs = MakeKnobs();
  return knobs;
}

}  // namespace

void SetKnob(Job* job, const std::string& name, const std::string& value) {
  const Knob* nearest = nullptr;
  for (const Knob& knob : AllKnobs()) {
    if (knob.name == name) {
      if (!knob.used(*job)) {
        throw Error({"a setting that is not used", "--set " + name, name + "=" + value, "nothing: " + knob.unused,
                     "schedule " + job->schedule});
      }
      knob.set(job, value);
      return;
    }
    if (!nearest || EditDistance(knob.name, name) < EditDistance(nearest->name, name)) nearest = &knob;
  }
  throw Error({"unknown setting", "--set", "\"" + name + "\"", "see disagmoe simulate --help",
               "did you mean " + nearest->name + "?"});
}

bool KnobIsUsed(const Job& job, const std::string& name) {
  const auto at = std::find_if(AllKnobs().begin(), AllKnobs().end(), [&](const Knob& k) { return k.name == name; });
  return at != AllKnobs().end() && at->used(job);
}

std::vector<std::string> SettingsOf(const Job& job, const Job& base) {
  std::vector<std::string> settings;
  for (const Knob& knob : AllKnobs()) {
    if (!knob.used(job) || knob.get(job) == knob.get(base)) continue;
    // Only a straggler's setting adds to what there is, and only its value has blanks.
    std::istringstream values(knob.get(job));
    for (std::string value; values >> value;) settings.push_back(knob.name + "=" + value);
  }
  return settings;
}

std::vector<KnobHelp> Knobs() {
  std::vector<KnobHelp> out;
  for (const Knob& knob : AllKnobs()) {
    const bool said = knob.unused.empty() || knob.name == "seed";
    out.push_back({knob.name, knob.meaning + (said ? "" : " (" + knob.unused + ")")});
  }
  return out;
}

}  // namespace disagmoe
