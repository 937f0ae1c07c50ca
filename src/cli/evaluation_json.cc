#include "cli/evaluation_json.h"

#include <nlohmann/json.hpp>

namespace disagmoe {

nlohmann::ordered_json EvaluationJson(const Evaluation& e) {
  const Job& j = e.job;
  return {{"schedule", j.schedule},
          {"seq_length", j.seq_length},
          {"global_batch", j.global_batch},
          {"layout", LayoutText(e)},
          {"p_a", j.p_a},
          {"p_f", j.colocated() ? 0 : j.p_f},
          {"m", j.m},
          {"n", j.colocated() ? 0 : j.n},
          {"virtual_stages", j.colocated() ? j.virtual_stages : 0},
          {"replicas", j.replicas()},
          {"sequences", j.sequences},
          {"micro_batches", j.micro_batches()},
          {"round", e.round},
          {"slope", j.slope},
          {"parts", e.parts},
          {"recompute", j.recompute},
          {"head", j.head_on_attention ? "attention" : "ffn"},
          {"mixed_nodes", j.mixed_nodes},
          {"nics_a", j.nics_a},
          {"nics_f", j.nics_f},
          {"idle_gpus", j.idle_gpus},
          {"step_ns", e.sim.step_ns},
          {"tokens_per_second", e.tokens_per_second()},
          {"tokens_per_second_per_gpu", e.tokens_per_gpu},
          {"tflops_per_gpu", e.tflops_per_gpu},
          {"mfu", e.mfu},
          {"compute", e.compute},
          {"overlapped", e.overlapped},
          {"exposed", e.exposed},
          {"bubble", e.bubble},
          {"peak_bytes", e.peak_bytes},
          {"fits", e.fits},
          {"limit", e.sim.limit},
          {"limit_ns", e.sim.limit_ns}};
}

}  // namespace disagmoe
