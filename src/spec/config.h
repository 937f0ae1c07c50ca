// The resolved configuration of a run. One struct a TOML table, field names equal to the TOML keys.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "schedule/schedule.h"
#include "spec/model_config.h"

namespace disagmoe {

struct LayoutConfig {
  int p_a = 1;  // A-groups
  int p_f = 1;  // F-groups
  int m = 1;    // workers in an A-group
  int n = 1;    // workers in an F-group
  bool colocated = false;     // p_a groups of m workers hold attention and experts; p_f and n must stay 1
  std::string head = "ffn";   // "ffn": with the last layer's F-group; "attention": with the next A-group
  int virtual_stages = 0;     // colocated: chunks of consecutive layers that a group holds; 0 = one layer a chunk
  int replicas = 1;           // copies of the pipeline, each with its share of train.micro_batches: see layout.h
  std::vector<std::vector<int64_t>> expert_counts;  // of the workers of a group: see layout.h; empty: equal shares
  int pipeline_workers() const { return colocated ? p_a * m : p_a * m + p_f * n; }
  int expert_workers() const { return colocated ? m : n; }  // of a group
  int workers() const { return replicas * pipeline_workers(); }
};

struct ScheduleConfig {
  // "auto": af-pipe, or megatron-1f1b for a colocated layout. Others that train, with backwards split: af-pipe-zb (two
  // pools); megatron-overlap, dualpipe-v (colocated).
  std::string name = "auto";
  int round = 0;  // q; 0 = chosen
  int slope = 2;  // e
};

struct TrainConfig {
  int64_t steps = 100;              // 0: load or initialise, evaluate, save
  int64_t seq_length = 256;         // s
  int64_t micro_batch_size = 1;     // b, sequences
  int64_t micro_batches = 4;        // a step has b * micro_batches sequences, whatever the layout
  std::string dtype = "fp32";       // "fp32", "bf16": of computation; master weights are fp32
  double lr = 1e-3;
  double min_lr = 1e-4;
  int64_t lr_warmup_steps = 10;
  int64_t lr_decay_steps = 0;       // cosine from the end of warm-up to here; 0 = steps
  double weight_decay = 0.1;        // matrices; not norms
  double adam_beta1 = 0.9, adam_beta2 = 0.95;
  double adam_eps = 1e-8;
  double clip_grad = 1.0;           // global norm; 0 = off
  uint64_t seed = 1234;
  std::string recompute = "none";   // "none", "layer": keep a layer's input and its router's choice, recompute the rest
  bool shard_optimizer = false;     // optimizer state of replicated parameters divided over their holders
  int64_t eval_interval = 0;        // steps; 0 = only at the end if eval_micro_batches > 0
  int64_t eval_micro_batches = 0;   // held-out micro-batches an evaluation
  int64_t save_interval = 0;        // steps; 0 = only at the end if save
  bool save = true;
  bool async_save = true;           // write while training goes on, from a copy
  int64_t keep_checkpoints = 0;     // the newest of out/checkpoints; 0 = all
  // Weights at the start: "random", a Hugging Face folder, or a checkpoint's (its optimizer state is not read). "auto": of
  // model.from if that is a folder with weights (then a loaded configuration has its name here), else random.
  std::string init = "auto";
  std::string resume;               // "": start anew; "latest": from out/checkpoints/latest; or a checkpoint folder
};

struct DataConfig {
  std::string path;              // prefix of a .bin/.idx pair
  std::vector<std::string> blend;  // instead: weights and prefixes, {"0.7 data/a", "0.3 data/b"}
  // "join": a sample is one text, whatever is in it; "apart": attention stays within a document, and its first token is
  // no label.
  std::string documents = "join";
  std::string split = "98,2";    // weights of training and held-out data, by tokens in order, of each pair
};

struct TransportConfig {
  std::string kind = "ucx";      // "ucx": processes; "inproc": ranks as threads of one process
  std::string tls = "posix,cma,tcp,self";
  std::string net_devices;       // "" = lo for a run on one host, all for others
  std::string listen = "127.0.0.1";  // address of the rendezvous
  int port = 0;                  // 0 = any free (own launcher)
  bool paced = false;            // emulate a NIC:
  double paced_gbps = 10, paced_latency_us = 5;  //   Gbit/s of each direction
  double timeout_s = 300;        // a wait for a message (deaths and silence are seen in seconds, without it)
  double join_timeout_s = 60;
};

struct DeviceConfig {
  std::string type = "auto";     // "cpu", "cuda", "auto": an accelerator where libtorch finds one
  int threads = 1;               // intra-op threads of a worker on the CPU
};

struct TraceConfig {
  int64_t first_step = 2;        // steps are counted from 1
  int64_t steps = 3;             // 0 = no trace
};

// What only the cost model knows. With a cluster the file is a plan: `simulate` takes it as it is (plan/plan_file.h).
struct PlanConfig {
  std::string cluster;  // "h800x128", or a .toml file
  std::vector<std::string> settings;  // "nics_a=1.5": those of `simulate --set` that no other table says
};

struct RunConfig {
  ModelConfig model;
  LayoutConfig layout;
  ScheduleConfig schedule;
  TrainConfig train;
  DataConfig data;
  TransportConfig transport;
  DeviceConfig device;
  TraceConfig trace;
  PlanConfig plan;
  std::string out = "out";       // folder for metrics.jsonl, trace.json, config.toml, checkpoints/
};

// Reads a TOML file and applies overrides of the form "table.key=value" (or "out=DIR"). Unknown keys, wrong types,
// values out of range and contradictions throw Error with file, line and key, and the nearest known key as a hint.
RunConfig LoadConfig(const std::string& path, const std::vector<std::string>& overrides);
// The same of a text; `where` is its name in messages.
RunConfig ParseConfig(const std::string& text, const std::string& where);
// Cross-checks that do not need the data (called by LoadConfig).
void CheckConfig(const RunConfig& config, const std::string& where);
// The resolved configuration as TOML that LoadConfig reads back to an equal one. [plan] only where it says something.
std::string PrintConfig(const RunConfig& config);
// Every key with its default, choices and meaning, for --help.
std::string ConfigHelp();

// Of one replica's pipeline.
PlacementSpec PlacementOf(const RunConfig& config);
// By rank: "A0.1" is worker 1 of group A0; F for FFN, C for colocated groups; "r1.A0.1" in replica 1, bare in replica 0.
std::vector<std::string> WorkerNames(const RunConfig& config);
// The training (or, with backward = false, evaluation) schedule of a pipeline; layout.h: what a replica executes.
Schedule ScheduleOf(const RunConfig& config, int64_t micro_batches, bool backward);

}  // namespace disagmoe
