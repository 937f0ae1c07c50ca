#include "plan/plan_file.h"

#include <algorithm>
#include <filesystem>

#include "base/error.h"
#include "spec/config_keys.h"
#include "spec/hf_config.h"
#include "spec/trainable.h"

namespace disagmoe {
namespace {

// Others have a layer, or with two directions a chunk of each, at a time.
bool HasChunks(const Job& job) { return job.colocated() && job.schedule != "dualpipe" && job.schedule != "dualpipe-v"; }

// What the tables of a run say of a job. b and the batch are of a worker and of the cluster there, of a micro-batch and
// of a step here.
void FillTables(const Job& job, RunConfig* c) {
  c->layout.colocated = job.colocated();
  c->layout.p_a = job.p_a;
  c->layout.m = job.m;
  c->layout.p_f = job.colocated() ? 1 : job.p_f;
  c->layout.n = job.colocated() ? 1 : job.n;
  c->layout.virtual_stages = HasChunks(job) ? job.virtual_stages : 0;
  c->layout.replicas = job.replicas();
  c->layout.expert_counts.clear();
  for (const std::vector<int>& row : job.expert_counts) c->layout.expert_counts.emplace_back(row.begin(), row.end());
  c->layout.head = !job.colocated() && job.head_on_attention ? "attention" : "ffn";
  c->schedule.name = job.schedule;
  c->schedule.round = job.round;
  c->schedule.slope = job.slope;
  c->train.seq_length = job.seq_length;
  c->train.micro_batch_size = int64_t{job.m} * job.sequences;
  c->train.micro_batches = job.micro_batches() * job.replicas();
  c->train.recompute = job.recompute ? "layer" : "none";
  c->train.shard_optimizer = job.shard_optimizer;
}

// GPUs of a cluster that its part of the replicas leaves.
int Idle(const RunConfig& c, const ClusterSpec& cluster, int64_t workers, const std::string& path) {
  const int64_t used = workers * c.layout.replicas;
  if (used <= cluster.gpus) return static_cast<int>(cluster.gpus - used);
  throw Error({"more workers than GPUs", path + ", layout", std::to_string(used),
               "at most the " + std::to_string(cluster.gpus) + " of " + cluster.name,
               "layout.replicas = " + std::to_string(c.layout.replicas) + " of " + std::to_string(workers)});
}

// 0, a layer a chunk, as a number.
int VirtualStages(const RunConfig& c, const std::string& path) {
  const int64_t layers = c.model.num_hidden_layers;
  if (c.layout.virtual_stages > 0) return c.layout.virtual_stages;
  if (layers % c.layout.p_a == 0) return static_cast<int>(layers / c.layout.p_a);
  throw Error({"contradiction", path + ", layout.virtual_stages", "0",
               "1 or more, where layout.p_a = " + std::to_string(c.layout.p_a) + " does not divide " +
                   std::to_string(layers) + " layers",
               "the cost model has as many chunks in each group"});
}

// The job of the tables, with no setting yet.
Job FromTables(const RunConfig& c, const std::string& path) {
  Job job;
  job.model = ShapeOfRun(c, path);
  const std::vector<ClusterSpec> clusters = LoadClusters(c.plan.cluster);
  job.cluster = clusters[0];
  if (clusters.size() == 2) job.ffn_cluster = clusters[1];
  job.schedule = c.schedule.name != "auto" ? c.schedule.name : c.layout.colocated ? "megatron-1f1b" : "af-pipe";
  SetScheduleDefaults(&job);
  job.p_a = c.layout.p_a;
  job.m = c.layout.m;
  job.p_f = c.layout.p_f;
  job.n = c.layout.n;
  const int64_t attention = int64_t{job.p_a} * job.m, ffn = job.workers() - attention;
  job.idle_gpus = Idle(c, job.cluster, attention + (job.ffn_cluster ? 0 : ffn), path);
  if (job.ffn_cluster) job.idle_ffn_gpus = Idle(c, *job.ffn_cluster, ffn, path);
  if (HasChunks(job)) job.virtual_stages = VirtualStages(c, path);
  for (const std::vector<int64_t>& row : c.layout.expert_counts) job.expert_counts.emplace_back(row.begin(), row.end());
  job.head_on_attention = !c.layout.colocated && c.layout.head == "attention";
  job.round = c.schedule.round;
  job.slope = c.schedule.slope;
  job.seq_length = c.train.seq_length;
  if (c.train.micro_batch_size % c.layout.m != 0) {
    throw Error({"contradiction", path + ", train.micro_batch_size", std::to_string(c.train.micro_batch_size),
                 "a multiple of layout.m = " + std::to_string(c.layout.m),
                 "an attention worker has as many sequences as the others in the cost model"});
  }
  job.sequences = static_cast<int>(c.train.micro_batch_size / c.layout.m);
  job.global_batch = c.train.micro_batch_size * c.train.micro_batches;
  job.recompute = c.train.recompute == "layer";
  job.shard_optimizer = c.train.shard_optimizer;
  return job;
}

void Apply(const std::string& setting, const std::string& where, Job* job) {
  const size_t equal = setting.find('=');
  if (equal == std::string::npos) throw Error({"not a setting", where, "\"" + setting + "\"", "\"key=value\"", ""});
  try {
    SetKnob(job, setting.substr(0, equal), setting.substr(equal + 1));
  } catch (const Error& error) {
    ErrorParts parts = error.parts();
    parts.where = where;
    if (parts.got.find(setting) == std::string::npos) parts.got = "\"" + setting + "\"";
    throw Error(parts);
  }
}

// A setting may not say what a table says.
void CheckTables(const Job& job, RunConfig given, const std::string& path) {
  RunConfig own = given;
  FillTables(job, &own);
  given.schedule.name = own.schedule.name;  // "auto"
  if (given.layout.virtual_stages == 0) given.layout.virtual_stages = own.layout.virtual_stages;
  for (const ConfigKey& key : ConfigKeys()) {
    const std::string got = TomlValue(key.value(given)), meant = TomlValue(key.value(own));
    if (got == meant) continue;
    throw Error({"contradiction", path + ", " + std::string(key.name), got, meant + ", as the rest of the plan has it",
                 "plan.settings are for what no other table says"});
  }
}

std::string Comment(const std::string& text) {
  std::string out = "# ";
  for (char c : text) out += c == '\n' ? "\n# " : std::string(1, c);
  return out + "\n";
}

// Keys of [train] that a plan decides; the others are the user's.
bool IsPlanned(std::string_view key) {
  static constexpr std::string_view keys[] = {"train.seq_length", "train.micro_batch_size", "train.micro_batches",
                                              "train.dtype",      "train.recompute",        "train.shard_optimizer"};
  return std::find(std::begin(keys), std::end(keys), key) != std::end(keys);
}

bool IsWritten(const ConfigKey& key, const RunConfig& c) {
  if (key.table() == "model") return (key.name == "model.from") != c.model.from.empty();
  if (key.name == "plan.settings") return !c.plan.settings.empty();
  return key.table() == "layout" || key.table() == "schedule" || key.table() == "plan" || IsPlanned(key.name);
}

std::string Print(RunConfig c) {
  std::string text;
  std::string_view table;
  for (const ConfigKey& key : ConfigKeys()) {
    if (!IsWritten(key, c)) continue;
    if (key.table() != table) text += "\n[" + std::string(key.table()) + "]\n";
    table = key.table();
    text += std::string(key.leaf()) + " = " + TomlValue(key.value(c)) + "\n";
  }
  return text;
}

// [model]: by name, or all of that of a run's .toml. Says where it is from.
std::string SetModel(const std::string& argument, RunConfig* c) {
  if (argument.ends_with(".toml")) {
    c->model = LoadConfig(argument, {}).model;
    c->model.from.clear();  // the file may have changed keys of it
    return "[model] is that of " + argument + ".";
  }
  c->model = LoadHfModel(argument).hf.model;
  c->model.from = argument;
  return "[model] is read from there" + std::string(std::filesystem::is_directory(argument) ? ", and the weights if it has some." : ".");
}

}  // namespace

Job JobOf(const RunConfig& config, const std::string& path) {
  if (config.plan.cluster.empty()) {
    throw Error({"no cluster to simulate on", path + ", plan.cluster", "\"\"", "such as \"h800x128\", or a .toml file",
                 "or `disagmoe simulate " + path + " CLUSTER`, which searches its own layouts"});
  }
  Job job = FromTables(config, path);
  for (const std::string& setting : config.plan.settings) Apply(setting, path + ", plan.settings", &job);
  CheckJob(job);
  CheckTables(job, config, path);
  return job;
}

Job ReadPlanFile(const std::string& path, const std::vector<std::string>& overrides) {
  return JobOf(LoadConfig(path, overrides), path);
}

std::string PlanFile(const Job& job, const std::string& model_argument, const std::string& cluster_argument,
                     const std::string& made_by) {
  CheckJob(job);
  RunConfig c;
  c.plan.cluster = cluster_argument;
  const std::string model = SetModel(model_argument, &c);
  c.train.dtype = "bf16";
  FillTables(job, &c);
  Job read = FromTables(c, "plan");
  c.plan.settings = SettingsOf(job, read);
  for (const std::string& setting : c.plan.settings) Apply(setting, "plan", &read);
  // No setting says these, and nobody changes them.
  DM_CHECK(read.weight_bytes == job.weight_bytes && read.gradient_bytes == job.gradient_bytes, "bytes a parameter");
  const auto clusters = [](const Job& j) {
    return PrintCluster(j.cluster) + (j.ffn_cluster ? PrintCluster(*j.ffn_cluster) : "");
  };
  DM_CHECK(clusters(read) == clusters(job), "not of " + cluster_argument);
  CheckConfig(c, "plan");
  return Comment(made_by) +
         Comment("`disagmoe simulate FILE` simulates it" +
                 std::string(MissingForSchedule(job.schedule).empty()
                                 ? ", `disagmoe train FILE data.path=PREFIX` trains it."
                                 : ".")) +
         Comment(model) + Print(c);
}

}  // namespace disagmoe
