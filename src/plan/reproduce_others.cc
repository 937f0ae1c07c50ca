// Formulas, and published runs that are not about this system.
#include <algorithm>
#include <cmath>

#include "plan/reproduce_tables.h"
#include "schedule/closed_forms.h"
#include "schedule/ready.h"

namespace disagmoe {
namespace {

std::string Seconds(double x) { return Format("%.2f", x); }

struct OtherRun {
  const char* name;
  Dedup dedup;
  const char* dispatch;
  double plain, overlap;  // published; seconds a step or TFLOP/s per GPU
  bool tflops;
};

void AddRun(const OtherRun& run, const Job& base, const Fixed& fixed, ClaimTable* t) {
  Job job = base;
  job.dedup = run.dedup;
  const Evaluation plain = Best(job, fixed);
  job.schedule = "megatron-overlap";
  const Evaluation overlap = Best(job, fixed);
  const auto value = [&](const Evaluation& e) { return run.tflops ? Format("%.0f", e.tflops_per_gpu) : Seconds(e.step_seconds); };
  const double published = run.tflops ? run.overlap / run.plain : run.plain / run.overlap;
  const auto off = [&](const Evaluation& e, double was) {
    if (was <= 0) return std::string("-");
    const double x = run.tflops ? e.tflops_per_gpu / was : was / e.step_seconds;  // speed relative to the published
    return Format("%+.0f %%", 100 * (x - 1));
  };
  const char* format = run.tflops ? "%.0f" : "%.2f";
  t->rows.push_back({run.name, run.dispatch, run.plain > 0 ? Format(format, run.plain) : "-", value(plain), off(plain, run.plain),
                     run.overlap > 0 ? Format(format, run.overlap) : "-", value(overlap), off(overlap, run.overlap),
                     run.plain > 0 && run.overlap > 0 ? Seconds(published) : "-",
                     Seconds(overlap.tokens_per_gpu / plain.tokens_per_gpu)});
}

// Times of a page of formulas: attention and FFN a unit forward and two backward, no head, a transfer of its own length.
class UnitCosts : public StepCosts {
 public:
  static constexpr int64_t kUnit = 1'000'000;
  UnitCosts(const Schedule& s, double transfer) : s_(s), transfer_ns_(static_cast<int64_t>(transfer * kUnit)) {
    for (size_t g = 0; g < s.groups.size(); ++g) classes_.push_back({static_cast<int>(g), 1, 0});
  }
  const std::vector<WorkerClass>& classes() const override { return classes_; }
  int64_t ComputeNs(const Op& op, int) const override {
    return op.stage == s_.num_stages() - 1 ? 0 : op.kind == OpKind::kForward ? kUnit : 2 * kUnit;
  }
  TransferCost Transfer(const Op& send, int, bool) const override {
    // A colocated pipeline's point-to-point sends cost nothing, its exchanges do.
    const bool head = send.stage == s_.num_stages() - 2;
    if (head || HasLocalPhase(send)) return {};
    return {.nic_ns = transfer_ns_};
  }
  bool HasLocalPhase(const Op& send) const override {
    return s_.sync_exchange && SenderOf(s_, send) != ReceiverOf(s_, send);
  }
  TransferCost LocalPhase(const Op&, int, bool) const override { return {.nic_ns = transfer_ns_}; }

 private:
  const Schedule& s_;
  int64_t transfer_ns_;
  std::vector<WorkerClass> classes_;
};

// When the last position first computes, in units.
double LastStart(const Schedule& s, double transfer) {
  const SimResult r = Simulate(s, UnitCosts(s, transfer), {.trace = true});
  int64_t first = r.step_ns;
  const int rank = s.groups[s.stage_group[s.num_stages() - 2]].ranks[0];
  for (const TraceEvent& e : r.events) {
    if (e.rank == rank && e.stream == Stream::kForward) first = std::min(first, e.begin_ns);
  }
  return static_cast<double>(first) / UnitCosts::kUnit;
}

}  // namespace

ClaimTable BubbleTable(const Progress&) {
  ClaimTable t;
  t.title = "Warm-up bubble (published: B_AF a quarter of B_base with L = 1, T_a = T_f, T_M2N = T_a2a, T_p2p = 0)";
  t.calibration = "v = 1, T_a = T_f = 1, T_M2N = T_a2a = x; formulas of system.md section 5 as printed, and when "
                  "the last position of the schedules starts in the simulator (af-pipe: p = PP / 2 groups of each "
                  "pool; 1F1B: PP groups with a layer each, its exchanges exposed)";
  t.columns = {"PP", "x", "B_base printed", "B_AF printed", "ratio", "1F1B starts", "af-pipe starts", "(R-1)(T+x)", "ratio"};
  for (const int pp : {4, 8}) {
    for (const double x : {0.0, 0.5, 1.0}) {
      const LayerTimes times{.all_to_all = x, .m2n = x};
      const double base = WarmUpBase(pp, 1, 1, times);
      const double af = WarmUpAfPrinted(pp, 1, times);
      GenerateOptions options;
      options.num_micro_batches = 4 * pp;
      options.transfer_ratio = x;
      const double one = LastStart(Generate("megatron-1f1b", {.num_layers = pp, .p_a = pp, .colocated = true}, options), x);
      const double two = LastStart(Generate("af-pipe", {.num_layers = pp / 2, .p_a = pp / 2, .p_f = pp / 2}, options), x);
      t.rows.push_back({std::to_string(pp), Format("%.1f", x), Format("%.1f", base), Format("%.1f", af), Format("%.2f", af / base),
                        Format("%.1f", one), Format("%.1f", two), Format("%.1f", WarmUpAf(pp, times)), Format("%.2f", two / one)});
    }
  }
  t.verdict = "as printed the ratio is 1/4; the schedules give 1/2: an af-pipe position is half a layer, and each "
              "costs its transfer whole. No "
              "event model yields the further factor 1/2 of B_AF.";
  return t;
}

ClaimTable OtherRunsTable(const Progress& progress) {
  ClaimTable t;
  t.title = "Published runs of Megatron on H100 (not about this system)";
  t.calibration = Efficiencies(MakeJob("qwen3-30b-a3b", "h100x16", "megatron-1f1b", 4096)) +
                  "; nothing fitted. Both kinds of dispatch are shown where the run's is not published. Sources: "
                  "Megatron-Bridge pulls 5094 "
                  "(HybridEP: a row per node; seconds a step) and 3862 (all-to-all dispatcher, permutation not "
                  "fused; seconds a step); Megatron-Core's Qwen3-235B on 256 H100 (TFLOP/s per GPU).";
  t.columns = {"run", "a row per", "plain", "ours", "speed off", "overlap", "ours", "speed off", "gain", "ours"};
  progress("  qwen3-30b-a3b on 16 H100");
  Job job = MakeJob("qwen3-30b-a3b", "h100x16", "megatron-1f1b", 4096);
  job.p_a = 1, job.m = 16, job.sequences = 1;
  const Fixed all{"p", "ep", "b", "recompute", "batch", "v"};
  AddRun({"Qwen3-30B-A3B, 16 H100, EP 16, step s", Dedup::kNode, "node", 24.714, 20.992, false}, job, all, &t);
  job.dedup = Dedup::kNode;
  job.schedule = "megatron-overlap";
  const double delayed = Best(job, all).step_seconds;
  job.delay_weights = false;
  const double direct = Best(job, all).step_seconds;
  job.delay_weights = true;
  job.schedule = "megatron-1f1b";
  AddRun({"the same, early stack (pull 3862)", Dedup::kExpert, "expert", 41.25, 31.31, false}, job, all, &t);
  progress("  qwen3-235b-a22b on 256 H100");
  job = MakeJob("qwen3-235b-a22b", "h100x256", "megatron-1f1b", 4096);
  job.p_a = 8, job.m = 32, job.sequences = 1, job.virtual_stages = 4, job.global_batch = 2048;
  for (const bool node : {false, true}) {
    AddRun({"Qwen3-235B, 256 H100, EP 32 PP 8, TFLOP/s", node ? Dedup::kNode : Dedup::kExpert, node ? "node" : "expert", 245, 276, true}, job, all, &t);
  }
  t.verdict = Format("delaying weight gradients gains %.1f %% in the first run (published: nothing). The gain of "
                   "overlap comes out there; speeds are ours high: ",
                   100 * (direct / delayed - 1)) +
              "see \"speed off\". The second run's permutation kernels were not fused, which is not modelled; "
              "tensor parallelism 2 of the third (halved slices and more sends) neither.";
  return t;
}

}  // namespace disagmoe
