#include "plan/roofline.h"

#include <algorithm>
#include <cmath>
#include <set>

#include "base/error.h"
#include "cost/traffic.h"
#include "cost/work.h"

namespace disagmoe {
namespace {

constexpr double kBf16 = 2;
constexpr Pass kForward = {.forward = true};
constexpr Pass kStep = {.forward = true, .input_gradient = true, .weight_gradient = true};
constexpr int64_t kLongest = int64_t{1} << 40;

// Of a token in an MoE layer.
struct Rows {
  double sent = 0;     // over the NIC
  double visited = 0;  // that FFN workers receive
};

void Check(const RooflineRequest& r) {
  const ModelShape& m = r.model;
  if (m.num_experts == 0 || std::find(m.dense.begin(), m.dense.end(), false) == m.dense.end()) {
    throw Error({"a model without experts has no FFN pool", "model", m.name, "a model with MoE layers", ""});
  }
  if (r.seq_length < 1) throw Error({"no tokens", "seq_length", std::to_string(r.seq_length), "1 or more", ""});
  if (r.ffn_workers < 1 || r.ffn_workers > m.num_experts) {
    throw Error({"FFN workers that have no expert each", "n", std::to_string(r.ffn_workers),
                 "1 to " + std::to_string(m.num_experts), ""});
  }
  for (const double x : {r.nics_a, r.nics_f, r.tokens}) {
    if (x >= 0 && std::isfinite(x)) continue;
    throw Error({"a number that cannot be", x == r.tokens ? "tokens" : "NICs of a GPU", std::to_string(x),
                 "0 (chosen) or more", ""});
  }
}

Rows RowsOfToken(const RooflineRequest& r) {
  Job job;
  job.model = r.model;
  std::vector<int> nodes;
  for (int i = 0; i < r.ffn_workers; ++i) nodes.push_back(i / r.ffn.gpus_per_node);
  Rows out;
  double node_visits = 0;
  int node = -1;
  for (const Holder& h : HoldersOf(RankRouting(job), 0, r.model.num_experts, nodes)) {
    out.visited += r.dedup == Dedup::kExpert ? h.pairs : h.visit;
    if (h.node != node) node_visits += h.node_visit;
    node = h.node;
  }
  out.sent = r.dedup == Dedup::kNode ? node_visits : out.visited;
  return out;
}

// One token through all layers.
struct Through {
  Work attention, ffn;
  double rows = 0;  // over the NIC, one way
};

bool Routed(const ModelShape& m, int64_t layer) { return !m.dense[layer]; }

Through ThroughLayer(const ModelShape& m, int64_t layer, const Sequence& sequence, const Rows& rows) {
  const Rows own = Routed(m, layer) ? rows : Rows{1, 1};
  Through out;
  out.attention = AttentionWork(m, layer, sequence, own.visited);
  out.ffn = CommonFfnWork(m, layer);
  out.ffn += FfnRowWork(m) * own.visited;
  if (Routed(m, layer)) out.ffn += ExpertPairWork(m) * static_cast<double>(m.experts_per_token);
  out.rows = own.sent;
  return out;
}

Through ThroughAll(const ModelShape& m, const Sequence& sequence, const Rows& rows) {
  Through out;
  for (int64_t l = 0; l < m.num_layers; ++l) {
    const Through layer = ThroughLayer(m, l, sequence, rows);
    out.attention += layer.attention;
    out.ffn += layer.ffn;
    out.rows += layer.rows;
  }
  return out;
}

double Flops(const Work& w, const Pass& pass) {
  const double products = pass.forward + pass.input_gradient + pass.weight_gradient;
  const double attention = pass.forward + 2.5 * pass.input_gradient;
  return attention * w.attention_flops + products * (w.gemm_flops + w.expert_flops);
}

RoofPoint Point(const Work& work, double bytes, const ClusterSpec& cluster, const Pass& pass, double rows_per_expert) {
  RoofPoint out;
  out.flops = Flops(work, pass);
  out.bytes = bytes * (pass.forward + pass.input_gradient);  // activations, and as many gradients
  out.compute_ns = TimeNs(work, pass, cluster, rows_per_expert);
  out.network_ns = out.bytes / (cluster.nic_gbytes_s * cluster.efficiency.m2n);
  return out;
}

OperationRoof Roof(const ClusterSpec& c, double nics) {
  OperationRoof out;
  out.gpu = c.gpu.name;
  out.peak_tflops = c.gpu.peak_tflops;
  out.nic_gbytes_s = c.nic_gbytes_s;
  out.m2n = c.efficiency.m2n;
  out.nics = nics > 0 ? nics : static_cast<double>(c.nics_per_node) / c.gpus_per_node;
  out.nominal_turning_point = out.peak_tflops * 1e3 / out.nic_gbytes_s;
  return out;
}

int64_t TypicalLayer(const ModelShape& m) {
  int64_t first = -1;
  for (int64_t l = 0; l < m.num_layers; ++l) {
    if (!Routed(m, l)) continue;
    if (m.window[l] == 0) return l;
    if (first < 0) first = l;
  }
  return first;
}

// The first length that has it. A longer sequence has more keys a query, in each layer at least as many.
template <typename Has>
std::optional<int64_t> First(const Has& has) {
  if (!has(kLongest)) return std::nullopt;
  int64_t no = 0, yes = kLongest;
  while (yes - no > 1) {
    const int64_t middle = no + (yes - no) / 2;
    (has(middle) ? yes : no) = middle;
  }
  return yes;
}

// The sizes of the pools. head_ns: of a token on a GPU of the FFN pool; both_on: attention and FFN of a token on one
// GPU of either pool.
void Size(Roofline* r, double head_ns, double both_on_a, double both_on_f) {
  const RoofPoint &a = r->attention.step, &f = r->ffn.step;
  const double nics_a = r->attention.nics, nics_f = r->ffn.nics;
  r->ratio_compute = a.compute_ns / f.compute_ns;
  r->ratio_compute_with_head = a.compute_ns / (f.compute_ns + head_ns);
  r->ratio_both = a.ns(nics_a) / f.ns(nics_f);
  const double share_a = r->ratio_compute / (1 + r->ratio_compute), share_f = 1 / (1 + r->ratio_compute);
  r->nics_needed = share_a * a.nics_needed() + share_f * f.nics_needed();
  r->nics_had = share_a * nics_a + share_f * nics_f;
  r->split_ns = SplitNs(a.compute_ns, f.compute_ns, share_a, share_f);
  r->colocated_ns = 1 / (share_a / both_on_a + share_f / both_on_f);
  // max(a / M, f / N) is at its least where both are equal, and then (a + f) / (M + N).
  r->hidden_ns = a.ns(nics_a) + f.ns(nics_f);
  r->waiting_ns = a.compute_ns + a.network_ns / nics_a + f.compute_ns + f.network_ns / nics_f;
}

void FillSequences(Roofline* r, const RooflineRequest& request, const Rows& rows, double row_bytes) {
  const ModelShape& m = request.model;
  const ClusterSpec& c = request.attention;
  const auto point = [&](int64_t s, const Pass& pass) {
    const Through t = ThroughAll(m, s, rows);
    return Point(t.attention, t.rows * row_bytes, c, pass, 0);
  };
  for (int64_t s : std::set<int64_t>{4096, 8192, 16384, 32768, r->seq_length}) {
    const RoofPoint p = point(s, kForward);
    r->sequences.push_back({s, p.intensity(), p.attainable_tflops(r->attention.nics)});
  }
  const double nominal = r->attention.nominal_turning_point, nics = r->attention.nics;
  r->crossing.nominal = First([&](int64_t s) { return point(s, kForward).intensity() >= nominal; });
  r->crossing.forward = First([&](int64_t s) { return point(s, kForward).over(nics) >= 1; });
  r->crossing.step = First([&](int64_t s) { return point(s, kStep).over(nics) >= 1; });
}

}  // namespace

double SplitNs(double attention_ns, double ffn_ns, double attention_gpus, double ffn_gpus) {
  return std::max(attention_ns / attention_gpus, ffn_ns / ffn_gpus);
}

Roofline MakeRoofline(const RooflineRequest& request) {
  Check(request);
  const ModelShape& m = request.model;
  const Rows rows = RowsOfToken(request);
  const double row_bytes = kBf16 * static_cast<double>(m.hidden_size);
  Roofline r;
  r.model = m.name;
  r.seq_length = request.seq_length;
  r.ffn_workers = request.ffn_workers;
  r.dedup = request.dedup;
  r.typical_layer = TypicalLayer(m);
  r.rows = rows.sent;
  const double tokens =
      request.tokens > 0 ? request.tokens : static_cast<double>(request.seq_length) * request.ffn_workers;
  r.rows_per_expert = tokens * static_cast<double>(m.experts_per_token) / static_cast<double>(m.num_experts);

  const Sequence sequence(r.seq_length, request.documents);
  const Through all = ThroughAll(m, sequence, rows);
  const double bytes = all.rows * row_bytes;
  const auto fill = [&](OperationRoof* roof, const Work& work, const ClusterSpec& cluster) {
    roof->forward = Point(work, bytes, cluster, kForward, r.rows_per_expert);
    roof->step = Point(work, bytes, cluster, kStep, r.rows_per_expert);
  };
  r.attention = Roof(request.attention, request.nics_a);
  r.ffn = Roof(request.ffn, request.nics_f);
  fill(&r.attention, all.attention, request.attention);
  fill(&r.ffn, all.ffn, request.ffn);
  const Intensities layer = ExactIntensities(m, r.typical_layer, sequence, rows.sent);
  const Intensities printed = PrintedIntensities(m, r.seq_length);
  r.attention.layer_intensity = layer.attention, r.ffn.layer_intensity = layer.ffn;
  r.attention.printed = printed.attention, r.ffn.printed = printed.ffn;
  FillSequences(&r, request, rows, row_bytes);

  Work both = all.attention;
  both += all.ffn;
  // HeadWork has the memory traffic of forward and backward.
  const double head_ns = TimeNs(HeadWork(m), {.forward = true, .weight_gradient = true}, request.ffn, 0) +
                         TimeNs(HeadWork(m), {.weight_gradient = true}, request.ffn, 0);
  Size(&r, head_ns, TimeNs(both, kStep, request.attention, r.rows_per_expert),
       TimeNs(both, kStep, request.ffn, r.rows_per_expert));
  return r;
}

}  // namespace disagmoe
