#include "plan/evaluate.h"

#include <algorithm>
#include <cstdio>

#include "cost/cluster_costs.h"
#include "cost/work.h"
#include "schedule/ready.h"

namespace disagmoe {

Evaluation Evaluate(const Job& job, const SimOptions& options) {
  CheckJob(job);
  Evaluation e;
  e.job = job;
  const Schedule schedule = ScheduleOf(job);
  const ClusterCosts costs(e.job, schedule);
  e.sim = Simulate(schedule, costs, options);
  e.round = schedule.round;
  e.parts = schedule.parts(1);
  e.classes = costs.classes();
  for (const WorkerClass& c : e.classes) e.class_names.push_back(ClassName(schedule, c));
  SumUp(&e);
  return e;
}

void SumUp(Evaluation* evaluation) {
  Evaluation& e = *evaluation;
  const Job& job = e.job;
  double workers = 0;
  e.compute = e.overlapped = e.exposed = e.bubble = 0;
  e.peak_bytes = 0;
  e.fits = true;
  for (size_t c = 0; c < e.classes.size(); ++c) {
    const ClassTimes& t = e.sim.times[c];
    const double n = e.classes[c].count;
    workers += n;
    e.compute += n * static_cast<double>(t.compute_ns);
    e.overlapped += n * static_cast<double>(t.overlapped_ns);
    e.exposed += n * static_cast<double>(t.exposed_ns);
    e.bubble += n * static_cast<double>(t.bubble_ns);
    if (e.sim.memory[c].peak_bytes > e.peak_bytes) {
      e.peak_bytes = e.sim.memory[c].peak_bytes;
      e.fullest = static_cast<int>(c);
    }
    e.fits = e.fits && e.sim.memory[c].fits();
  }
  const double all = workers * static_cast<double>(e.sim.step_ns);
  for (double* share : {&e.compute, &e.overlapped, &e.exposed, &e.bubble}) *share /= all;
  e.step_seconds = static_cast<double>(e.sim.step_ns) * 1e-9;
  const double tokens = static_cast<double>(job.global_batch) * static_cast<double>(job.seq_length);
  e.tokens_per_gpu = tokens / e.step_seconds / static_cast<double>(job.gpus());
  e.tflops_per_gpu = TrainFlopsPerToken(job.model, job.sequence()) * e.tokens_per_gpu * 1e-12;
  e.mfu = e.tflops_per_gpu / job.peak_tflops();
}

std::string LayoutText(const Evaluation& e) {
  const Job& j = e.job;
  std::string out;
  if (j.colocated()) {
    out = "PP " + std::to_string(j.p_a) + ", EP " + std::to_string(j.m);
    if (j.schedule != "dualpipe" && j.schedule != "dualpipe-v") out += ", v " + std::to_string(j.virtual_stages);
  } else {
    out = j.p_a == j.p_f ? "p " + std::to_string(j.p_a) : "p_A " + std::to_string(j.p_a) + ", p_F " + std::to_string(j.p_f);
    out += ", " + std::to_string(j.m) + " A + " + std::to_string(j.n) + " F";
  }
  if (j.replicas() > 1) out += ", x " + std::to_string(j.replicas());
  if (j.idle_gpus + j.idle_ffn_gpus > 0) {
    out += ", " + std::to_string(j.idle_gpus);
    if (j.ffn_cluster) out += " + " + std::to_string(j.idle_ffn_gpus);
    out += " idle";
  }
  out += ", b " + std::to_string(j.sequences) + ", M " + std::to_string(j.micro_batches());
  if (!j.colocated()) out += ", q " + std::to_string(e.round);
  if (e.parts > 1) out += ", " + std::to_string(e.parts) + " parts";
  if (!j.colocated() && j.head_on_attention) out += ", head on A";
  if (j.recompute) out += ", recompute";
  return out;
}

}  // namespace disagmoe
