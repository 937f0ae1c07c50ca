// R received rows, H hidden, P (row, expert) pairs, e experts held here, D expert hidden size.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <algorithm>
#include <cstring>

#include "base/error.h"
#include "layers/blocks.h"
#include "layers/router_logits.h"

namespace disagmoe {
namespace {

Tensor Empty(std::vector<int64_t> shape, const Tensor& like) { return at::empty(shape, like.options()); }

Tensor IntTensor(const std::vector<int32_t>& v, at::Device device) {
  Tensor t = at::empty({static_cast<int64_t>(v.size())}, at::kInt);
  if (!v.empty()) std::memcpy(t.data_ptr<int32_t>(), v.data(), v.size() * sizeof(int32_t));
  return device.is_cpu() ? t : t.to(device);
}

Tensor FloatTensor(const std::vector<float>& v, at::Device device) {
  Tensor t = at::empty({static_cast<int64_t>(v.size())}, at::kFloat);
  std::copy(v.begin(), v.end(), t.data_ptr<float>());
  return t.to(device);
}

// Sorts the pairs by expert (stable, so by row within an expert) and fills what follows from that.
void SortPairs(FfnSaved& saved, int64_t experts) {
  const RowPairs& in = saved.pairs;
  const int64_t P = in.pairs(), R = in.rows();
  saved.begin.assign(experts + 1, 0);
  for (int32_t e : in.expert) {
    DM_CHECK(e >= 0 && e < experts, "expert not held here");
    ++saved.begin[e + 1];
  }
  for (int64_t e = 0; e < experts; ++e) saved.begin[e + 1] += saved.begin[e];
  std::vector<int64_t> next(saved.begin.begin(), saved.begin.end() - 1);
  std::vector<int32_t> row(P), position(P), order(P);
  Tensor gate = at::empty({P}, at::kFloat);
  for (int64_t r = 0; r < R; ++r) {
    for (int32_t j = in.offsets[r]; j < in.offsets[r + 1]; ++j) {
      const int64_t at = next[in.expert[j]]++;
      row[at] = static_cast<int32_t>(r);
      position[j] = static_cast<int32_t>(at);
      order[at] = j;
      gate.data_ptr<float>()[at] = in.gate[j];
    }
  }
  const auto device = saved.h.device();
  saved.row = IntTensor(row, device);
  saved.position = IntTensor(position, device);
  saved.order = IntTensor(order, device);
  saved.offsets = IntTensor(in.offsets, device);
  saved.gate = gate.to(device);
  if (static_cast<int64_t>(in.home.size()) != R) saved.home = IntTensor(in.home, device);
}

// out_e = x_e w_e^T (or x_e w_e), plus bias_e if there is one; one GEMM a non-empty expert, into preallocated rows.
void Grouped(const std::vector<int64_t>& begin, const Tensor& x, const Tensor& w, bool transpose, Tensor& out,
             const Tensor& bias = {}) {
  for (size_t e = 0; e + 1 < begin.size(); ++e) {
    const int64_t n = begin[e + 1] - begin[e];
    if (n == 0) continue;
    Tensor rows = out.narrow(0, begin[e], n);
    const Tensor we = w.select(0, static_cast<int64_t>(e)), operand = transpose ? we.t() : we;
    if (bias.defined()) {
      at::addmm_out(rows, bias.select(0, static_cast<int64_t>(e)), x.narrow(0, begin[e], n), operand);
    } else {
      at::mm_out(rows, x.narrow(0, begin[e], n), operand);
    }
  }
}

void GroupedGrad(const std::vector<int64_t>& begin, const Tensor& a, const Tensor& b, const Tensor& grad) {
  for (size_t e = 0; e + 1 < begin.size(); ++e) {
    const int64_t n = begin[e + 1] - begin[e];
    if (n > 0) AddGrad(grad.select(0, static_cast<int64_t>(e)), a.narrow(0, begin[e], n), b.narrow(0, begin[e], n));
  }
}

Tensor Gather(const Tensor& src, const Tensor& index) {
  if (!index.defined()) return src;  // all rows
  Tensor out = Empty({index.size(0), src.size(1)}, src);
  GatherRows(src, index, out);
  return out;
}

Tensor Normed(const ModelConfig& c, const FfnParams& p, FfnSaved& saved) {
  Tensor u = Empty({saved.h.size(0), saved.h.size(1)}, saved.h);
  saved.rstd = at::empty({saved.h.size(0)}, saved.h.options().dtype(at::kFloat));
  RmsNorm(saved.h, p.norm2.value, c.rms_norm_eps, u, saved.rstd);
  return u;
}

// Pre-activations of experts and of the FFN at home, from norm2(h).
void Project(const FfnParams& p, const Tensor& u, FfnSaved& saved) {
  if (p.gate_up.defined()) {
    saved.gate_up = Empty({saved.pairs.pairs(), p.gate_up.value.size(1)}, u);
    Grouped(saved.begin, Gather(u, saved.row), p.gate_up.value, true, saved.gate_up, p.gate_up_bias.value);
  }
  if (p.home_gate_up.defined()) {
    const Tensor x = Gather(u, saved.home);
    saved.home_gate_up = Empty({x.size(0), p.home_gate_up.value.size(0)}, u);
    at::mm_out(saved.home_gate_up, x, p.home_gate_up.value.t());
    if (p.home_gate.defined()) {
      Tensor logit = at::empty({x.size(0), 1}, x.options().dtype(at::kFloat));
      RouterLogits(x, p.home_gate.value.to(at::kFloat), logit);
      saved.home_gate = logit.squeeze(1).sigmoid_();
    }
  }
}

}  // namespace

FfnParams::FfnParams(const ParamStore& store, const ModelConfig& model, int64_t layer) {
  const std::string name = "layers." + std::to_string(layer) + ".";
  norm2 = store.Get(name + "norm2");
  if (model.is_dense(layer)) {
    home_gate_up = store.Get(name + "dense.gate_up");
    home_down = store.Get(name + "dense.down");
    return;
  }
  gate_up = store.Get(name + "experts.gate_up");
  down = store.Get(name + "experts.down");
  limit = model.swiglu_limit;
  if (model.expert_bias) {
    gate_up_bias = store.Get(name + "experts.gate_up_bias");
    down_bias = store.Get(name + "experts.down_bias");
  }
  if (model.shared_intermediate() > 0) {
    home_gate_up = store.Get(name + "shared.gate_up");
    home_down = store.Get(name + "shared.down");
    if (model.shared_expert_gate) home_gate = store.Get(name + "shared.gate");
  }
}

void FfnForward(const ModelConfig& c, const FfnParams& p, const Tensor& h, RowPairs pairs, FfnSaved& saved, Tensor& out) {
  saved.h = h;
  saved.pairs = std::move(pairs);
  DM_CHECK(saved.pairs.rows() == h.size(0), "rows and pairs disagree");
  SortPairs(saved, p.gate_up.defined() ? p.gate_up.value.size(0) : 0);
  Project(p, Normed(c, p, saved), saved);
  const int64_t P = saved.pairs.pairs(), H = h.size(1);
  if (p.gate_up.defined()) {
    Tensor act = Empty({P, p.down.value.size(2)}, h), y = Empty({P, H}, h);
    SwiGlu(saved.gate_up, saved.gate, p.limit, act);
    Grouped(saved.begin, act, p.down.value, true, y);
    SumRows(y, saved.position, saved.offsets, out, false);
    if (p.down_bias.defined()) {  // act has the gates in it, the bias has not
      SumRows(p.down_bias.value, IntTensor(saved.pairs.expert, h.device()), saved.offsets, out, true,
              FloatTensor(saved.pairs.gate, h.device()));
    }
  } else {
    out.zero_();
  }
  AddRows(out, saved.home, Gather(h, saved.home));
  if (p.home_gate_up.defined()) {
    Tensor act = Empty({saved.home_gate_up.size(0), p.home_down.value.size(1)}, h);
    SwiGlu(saved.home_gate_up, saved.home_gate, 0, act);
    if (saved.home.defined()) {
      AddRows(out, saved.home, at::mm(act, p.home_down.value.t()));
    } else {
      at::addmm_out(out, out, act, p.home_down.value.t());
    }
  }
}

void FfnForget(FfnSaved& saved) {
  saved.rstd.reset();
  saved.gate_up.reset();
  saved.home_gate_up.reset();
  saved.home_gate.reset();
}

void FfnRecompute(const ModelConfig& c, const FfnParams& p, FfnSaved& saved) { Project(p, Normed(c, p, saved), saved); }

void FfnBackward(const ModelConfig& c, const FfnParams& p, FfnSaved& saved, Tensor& d, std::vector<float>& d_gates) {
  FfnBackwardInputs(p, saved, d, d_gates);
  FfnBackwardWeights(c, p, saved);
}

namespace {

// Drops what only the first step of a backward needs.
void KeepForWeights(const FfnParams& p, FfnSaved& saved) {
  saved.pairs = {};
  for (Tensor* t : {&saved.position, &saved.offsets, &saved.order, &saved.rstd, &saved.home_gate}) t->reset();
  if (!p.down_bias.defined()) saved.gate.reset();
}

// Adds gradient by the gates of a bias that they multiply, in order of pairs.
void AddBiasGateGradients(const FfnParams& p, const FfnSaved& saved, const Tensor& d, std::vector<float>& d_gates) {
  Tensor dots = at::zeros({saved.pairs.pairs()}, d.options().dtype(at::kFloat));
  AddRowDots(d, p.down_bias.value, IntTensor(saved.pairs.expert, d.device()), saved.offsets, dots);
  const Tensor host = dots.cpu();
  for (size_t i = 0; i < d_gates.size(); ++i) d_gates[i] += host.const_data_ptr<float>()[i];
}

// Back through the FFN at home: dr [rows at home, H] is the gradient of its result; adds that of norm2(h) to du.
void HomeBackward(const FfnParams& p, FfnSaved& saved, const Tensor& dr, Tensor& du) {
  Tensor d_act = at::mm(dr, p.home_down.value), d_gate;
  if (p.home_gate.defined()) d_gate = at::empty_like(saved.home_gate);
  saved.home_act = Empty({dr.size(0), d_act.size(1)}, dr);
  SwiGluBackward(d_act, saved.home_gate_up, saved.home_gate, 0, saved.home_gate_up, saved.home_act, d_gate);
  Tensor rows = at::mm(saved.home_gate_up, p.home_gate_up.value);
  if (p.home_gate.defined()) {
    saved.home_d_gate = d_gate * saved.home_gate * (1 - saved.home_gate);
    rows.addcmul_(saved.home_d_gate.unsqueeze(1).to(rows.scalar_type()), p.home_gate.value);
  }
  AddRows(du, saved.home, rows);
  saved.home_d_out = dr;
}

}  // namespace

void FfnBackwardInputs(const FfnParams& p, FfnSaved& saved, Tensor& d, std::vector<float>& d_gates) {
  const Tensor& h = saved.h;
  const int64_t P = saved.pairs.pairs(), H = h.size(1);
  Tensor du = Empty({h.size(0), H}, h);
  d_gates.assign(P, 0);
  if (p.gate_up.defined()) {
    saved.d_out = Gather(d, saved.row);
    Tensor d_act = Empty({P, p.down.value.size(2)}, h), d_gate = at::empty({P}, h.options().dtype(at::kFloat));
    Grouped(saved.begin, saved.d_out, p.down.value, false, d_act);
    saved.act = Empty({P, d_act.size(1)}, h);
    SwiGluBackward(d_act, saved.gate_up, saved.gate, p.limit, saved.gate_up, saved.act, d_gate);  // gate_up now its gradient
    Tensor rows = Empty({P, H}, h);
    Grouped(saved.begin, saved.gate_up, p.gate_up.value, false, rows);
    SumRows(rows, saved.position, saved.offsets, du, false);
    const Tensor host_gate = d_gate.cpu(), order = saved.order.cpu();
    for (int64_t i = 0; i < P; ++i) d_gates[order.data_ptr<int32_t>()[i]] = host_gate.data_ptr<float>()[i];
    if (p.down_bias.defined()) AddBiasGateGradients(p, saved, d, d_gates);
  } else {
    du.zero_();
  }
  const Tensor dr = Gather(d, saved.home);
  if (p.home_gate_up.defined()) HomeBackward(p, saved, dr, du);
  // The residual: at home the gradient goes through, elsewhere only what comes from the experts.
  if (saved.home.defined()) {
    d.zero_();
    AddRows(d, saved.home, dr);
  } else if (p.home_gate_up.defined()) {
    d = d.clone();  // the weights at home need it as it is
  }
  Tensor dw = p.norm2.grad;
  RmsNormBackward(du, h, p.norm2.value, saved.rstd, d, /*add_dx=*/true, dw);
  KeepForWeights(p, saved);
}

void FfnBackwardWeights(const ModelConfig& c, const FfnParams& p, FfnSaved& saved) {
  const Tensor u = Normed(c, p, saved);
  if (p.gate_up.defined()) {
    GroupedGrad(saved.begin, saved.d_out, saved.act, p.down.grad);
    if (p.down_bias.defined()) {
      Tensor d_down = p.down_bias.grad, d_gate_up = p.gate_up_bias.grad;
      AddSegments(saved.d_out, saved.gate, saved.begin, d_down);
      AddSegments(saved.gate_up, {}, saved.begin, d_gate_up);
    }
    Tensor rows = saved.d_out;  // of no more use itself
    GatherRows(u, saved.row, rows);
    GroupedGrad(saved.begin, saved.gate_up, rows, p.gate_up.grad);
  }
  if (p.home_gate_up.defined()) {
    AddGrad(p.home_down.grad, saved.home_d_out, saved.home_act);
    const Tensor x = Gather(u, saved.home);
    AddGrad(p.home_gate_up.grad, saved.home_gate_up, x);
    if (p.home_gate.defined()) {
      Tensor d_gate = p.home_gate.grad;
      AddSegments(x, saved.home_d_gate, {0, x.size(0)}, d_gate);
    }
  }
  saved = {};
}

void AddRows(Tensor& dst, const Tensor& index, const Tensor& src) {
  if (!index.defined()) {
    dst.add_(src);
  } else if (!dst.is_cpu() || dst.scalar_type() != at::kFloat) {
    dst.index_add_(0, index, src);
  } else {  // five times index_add_
    const int64_t H = dst.size(1);
    const int32_t* at = index.const_data_ptr<int32_t>();
    const float* from = src.const_data_ptr<float>();
    float* to = dst.data_ptr<float>();
    at::parallel_for(0, index.size(0), 64, [&](int64_t first, int64_t last) {
      for (int64_t i = first; i < last; ++i) {
        for (int64_t j = 0; j < H; ++j) to[at[i] * H + j] += from[i * H + j];
      }
    });
  }
}

RowPairs AllPairs(const Tensor& ids, const Tensor& gates, int64_t tokens) {
  RowPairs out;
  out.home.resize(tokens);
  for (int64_t t = 0; t < tokens; ++t) out.home[t] = static_cast<int32_t>(t);
  out.offsets.assign(tokens + 1, 0);
  if (!ids.defined()) return out;
  const int64_t K = ids.size(1);
  const Tensor i = ids.cpu(), g = gates.cpu();
  out.expert.assign(i.data_ptr<int32_t>(), i.data_ptr<int32_t>() + tokens * K);
  out.gate.assign(g.data_ptr<float>(), g.data_ptr<float>() + tokens * K);
  for (int64_t t = 0; t <= tokens; ++t) out.offsets[t] = static_cast<int32_t>(t * K);
  return out;
}

}  // namespace disagmoe
