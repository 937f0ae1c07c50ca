// The settings of a job by name: who uses them, and their values.
#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdio>
#include <functional>

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
      {"idle", "GPUs left unused", AnySchedule, "", SET { j->idle_gpus = Whole("idle", v, 0); }},
      {"idle_ffn", "GPUs of an FFN pool's own cluster left unused", HasFfnCluster, "two clusters only",
       SET { j->idle_ffn_gpus = Whole("idle_ffn", v, 0); }},
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
       SET {
         OfBoth(j, [x = Number("spine_oversubscription", v, 1, 100)](ClusterSpec* c) {
           if (c->topology == "rail") c->spine_oversubscription = x;
         });
       }},
      {"nic_gbytes_s", "of a NIC and direction", AnySchedule, "",
       SET { OfBoth(j, [x = Number("nic_gbytes_s", v, 1e-3, 1e5)](ClusterSpec* c) { c->nic_gbytes_s = x; }); }},
      {"m2n", "efficiency of the NIC in M2N", TwoPools, "two pools only",
       SET { OfBoth(j, [x = Number("m2n", v, 1e-3, 1)](ClusterSpec* c) { c->efficiency.m2n = x; }); }},
      {"all_to_all", "efficiency of the NIC in an all-to-all of a group", AnySchedule, "",
       SET { OfBoth(j, [x = Number("all_to_all", v, 1e-3, 1)](ClusterSpec* c) { c->efficiency.all_to_all = x; }); }},
  };
}
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

std::vector<KnobHelp> Knobs() {
  std::vector<KnobHelp> out;
  for (const Knob& knob : AllKnobs()) {
    const bool said = knob.unused.empty() || knob.name == "seed";
    out.push_back({knob.name, knob.meaning + (said ? "" : " (" + knob.unused + ")")});
  }
  return out;
}

}  // namespace disagmoe
