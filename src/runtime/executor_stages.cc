// What each stage does with its messages. T tokens of this worker's slice, R rows received, H hidden, K a token.
#include <ATen/ATen.h>

#include <algorithm>
#include <cstring>

#include "base/error.h"
#include "runtime/executor_state.h"

namespace disagmoe {

int64_t Executor::SequenceOf(int mb, int64_t token) const {
  const TrainConfig& t = config_.train;
  return pass_.first_sequence + (pass_.first_micro_batch + mb) * t.micro_batch_size + token / t.seq_length;
}

Tensor Executor::Tokens(int mb, int64_t first_token, int64_t tokens, bool labels) const {
  const int64_t s = config_.train.seq_length;
  Tensor out = at::empty({tokens}, at::kLong);
  std::vector<int64_t> sequence(s + 1), begins;
  for (int64_t t = first_token; t < first_token + tokens;) {
    const int64_t in_sequence = t % s, n = std::min(s - in_sequence, first_token + tokens - t), g = SequenceOf(mb, t);
    pass_.held_out ? batches_.HeldOut(g, sequence.data(), &begins) : batches_.Train(g, sequence.data(), &begins);
    if (labels) {
      for (int64_t begin : begins) {
        if (begin > 0) sequence[begin] = kNoLabel;
      }
    }
    std::copy_n(sequence.data() + in_sequence + (labels ? 1 : 0), n, out.data_ptr<int64_t>() + (t - first_token));
    t += n;
  }
  return device_.is_cpu() ? out : out.to(device_);
}

std::vector<int64_t> Executor::Documents(int mb, int64_t first_token, int64_t tokens) const {
  std::vector<int64_t> rows;
  if (config_.data.documents == "join") return rows;
  const int64_t s = config_.train.seq_length;
  for (int64_t t = first_token; t < first_token + tokens; t += s) {  // an attention worker's slice is whole sequences
    for (int64_t begin : batches_.Begins(pass_.held_out, SequenceOf(mb, t))) {
      if (begin < s) rows.push_back(t - first_token + begin);
    }
  }
  if (static_cast<int64_t>(rows.size()) * s == tokens) rows.clear();  // one a sequence needs no mask
  return rows;
}

Executor::Incoming Executor::TakeCombine(int boundary, int mb, int64_t first_token, int64_t tokens) {
  Incoming in;
  const size_t sources = PeersIn(boundary, false).size();
  for (size_t j = 0; j < sources; ++j) {
    const Combine c = UnpackCombine(Take(boundary, mb, false, j), model_.hidden_size, dtype_, device_);
    const int64_t n = static_cast<int64_t>(c.token.size());
    in.rows.push_back(n);
    if (n == tokens) {  // ascending and distinct, so these are all of them
      in.index.emplace_back();
      if (!in.x.defined()) {
        in.x = c.rows;
      } else {
        in.x.add_(c.rows);
      }
      continue;
    }
    Tensor index = at::empty({n}, at::kInt);
    for (int64_t i = 0; i < n; ++i) index.data_ptr<int32_t>()[i] = static_cast<int32_t>(c.token[i] - first_token);
    in.index.push_back(device_.is_cpu() ? index : index.to(device_));
    if (!in.x.defined()) in.x = at::zeros({tokens, model_.hidden_size}, at::TensorOptions().dtype(dtype_).device(device_));
    AddRows(in.x, in.index.back(), c.rows);
  }
  return in;
}

void Executor::SendCombineBackward(int boundary, int mb, const Tensor& d, const Incoming& in) {
  for (size_t j = 0; j < in.index.size(); ++j) {
    Post(boundary, mb, true, j, PackRows(d, in.index[j], allocator()), in.rows[j]);
  }
}

void Executor::ForwardAttention(int layer, int mb) {
  const int stage = 2 * layer, me = topology_.index_in_group(rank_);
  const Partition& slices = topology_.partition(stage);
  const int64_t first = slices[me], T = slices[me + 1] - first;
  auto state = std::make_unique<Attention>();
  Tensor x;
  if (layer == 0) {
    state->tokens = Tokens(mb, first, T, false);
    x = at::empty({T, model_.hidden_size}, at::TensorOptions().dtype(dtype_).device(device_));
    EmbedForward(store_.Get("embed"), state->tokens, x);
  } else {
    state->in = TakeCombine(stage - 1, mb, first, T);
    x = std::move(state->in.x);
  }
  state->saved.documents = Documents(mb, first, T);
  const AttentionOutput a = AttentionForward(model_, *attention_params_[layer], x, state->saved);
  SeeRstd(state->saved.rstd1, stage - 1, mb);
  state->routes = MakeRoutes(topology_, layer, a.ids, a.gates, T, first);
  for (size_t j = 0; j < state->routes.size(); ++j) {
    const Route& route = state->routes[j];
    Post(stage, mb, false, j, PackDispatch(route, first, a.h, allocator()), static_cast<int64_t>(route.token.size()));
  }
  if (!schedule_->backward) return;
  if (config_.train.recompute == "layer") AttentionForget(state->saved);
  attention_[Key(stage, mb)] = std::move(state);
}

void Executor::ForwardFfn(int layer, int mb) {
  const int stage = 2 * layer + 1;
  auto state = std::make_unique<Ffn>();
  std::vector<int32_t> token;
  std::vector<Tensor> parts;
  RowPairs pairs;
  pairs.offsets = {0};
  state->row_begin = {0};
  state->pair_begin = {0};
  for (size_t i = 0; i < PeersIn(stage - 1, false).size(); ++i) {
    const Dispatch d = UnpackDispatch(Take(stage - 1, mb, false, i), model_.hidden_size, dtype_, device_);
    const int32_t row0 = static_cast<int32_t>(token.size()), pair0 = static_cast<int32_t>(pairs.expert.size());
    token.insert(token.end(), d.token.begin(), d.token.end());
    for (size_t r = 1; r < d.pairs.offsets.size(); ++r) pairs.offsets.push_back(d.pairs.offsets[r] + pair0);
    pairs.expert.insert(pairs.expert.end(), d.pairs.expert.begin(), d.pairs.expert.end());
    pairs.gate.insert(pairs.gate.end(), d.pairs.gate.begin(), d.pairs.gate.end());
    for (int32_t r : d.pairs.home) pairs.home.push_back(r + row0);
    parts.push_back(d.rows);
    state->row_begin.push_back(static_cast<int64_t>(token.size()));
    state->pair_begin.push_back(static_cast<int64_t>(pairs.expert.size()));
  }
  const int64_t first_expert = model_.is_dense(layer) ? 0 : topology_.experts(layer)[topology_.index_in_group(rank_)];
  for (int32_t e : pairs.expert) ++result_.expert_tokens[layer * model_.num_experts + first_expert + e];
  const Tensor h = parts.size() == 1 ? parts[0] : at::cat(parts, 0);
  Tensor out = at::empty_like(h);
  FfnForward(model_, *ffn_params_[layer], h, std::move(pairs), state->saved, out);
  SeeRstd(state->saved.rstd, stage - 1, mb);
  // Rows are in order of tokens, so each destination's are neighbours.
  const Partition& owner = topology_.partition(stage + 1);
  state->out_begin = {0};
  for (size_t i = 0; i + 1 < owner.size(); ++i) {
    const int64_t begin = state->out_begin.back();
    const int64_t end = std::lower_bound(token.begin() + begin, token.end(), owner[i + 1]) - token.begin();
    Post(stage, mb, false, i, PackCombine(token, out, begin, end, allocator()), end - begin);
    state->out_begin.push_back(end);
  }
  if (!schedule_->backward) return;
  if (config_.train.recompute == "layer") FfnForget(state->saved);
  ffn_[Key(stage, mb)] = std::move(state);
}

void Executor::ForwardHead(int mb) {
  const int stage = 2 * schedule_->num_layers, me = topology_.index_in_group(rank_);
  const Partition& share = topology_.partition(stage);
  const int64_t first = share[me], T = share[me + 1] - first;
  auto state = std::make_unique<Head>();
  state->in = TakeCombine(stage - 1, mb, first, T);
  const Tensor x = std::move(state->in.x), labels = Tokens(mb, first, T, true);
  if (schedule_->backward) state->dx = at::empty_like(x);
  bool finite = true;
  HeadSaved saved;
  const double loss =
      HeadForwardBackward(model_, *head_params_, x, labels, scale_.token, schedule_->backward ? &state->dx : nullptr,
                          &finite, schedule_->split_backward ? &saved : nullptr);
  if (schedule_->split_backward) {
    AddWeightGradients(stage, mb, [this, saved]() mutable { HeadBackwardWeights(*head_params_, saved); });
  }
  result_.token_loss += loss;
  if (!finite) SeeBad(stage - 1, mb);
  if (!std::isfinite(loss)) SeeBad(stage, mb);
  if (schedule_->backward) head_[Key(stage, mb)] = std::move(state);
}

void Executor::AddWeightGradients(int stage, int mb, std::function<void()> step) {
  if (!schedule_->split_backward) return step();
  DM_CHECK(weights_.emplace(Key(stage, mb), std::move(step)).second, "two backwards of one stage and micro-batch");
}

void Executor::Weights(int stage, int mb) {
  auto node = weights_.extract(Key(stage, mb));
  DM_CHECK(!node.empty(), "weight gradients without their backward");
  node.mapped()();
}

void Executor::BackwardHead(int mb) {
  const int stage = 2 * schedule_->num_layers;
  auto node = head_.extract(Key(stage, mb));
  DM_CHECK(!node.empty(), "backward of the head without its forward");
  SendCombineBackward(stage - 1, mb, node.mapped()->dx, node.mapped()->in);
}

void Executor::BackwardFfn(int layer, int mb) {
  const int stage = 2 * layer + 1;
  auto node = ffn_.extract(Key(stage, mb));
  DM_CHECK(!node.empty(), "backward of experts without their forward");
  Ffn& state = *node.mapped();
  const FfnParams& params = *ffn_params_[layer];
  std::vector<Tensor> parts;
  for (size_t i = 0; i + 1 < state.out_begin.size(); ++i) {
    parts.push_back(UnpackRows(Take(stage, mb, true, i), state.out_begin[i + 1] - state.out_begin[i], model_.hidden_size,
                               dtype_, device_));
  }
  Tensor d = parts.size() == 1 ? parts[0] : at::cat(parts, 0);
  if (config_.train.recompute == "layer") FfnRecompute(model_, params, state.saved);
  std::vector<float> d_gates, counts;
  if (scale_.global_aux && !model_.is_dense(layer)) {
    counts.assign(params.gate_up.value.size(0), 0);
    for (int32_t e : state.saved.pairs.expert) counts[e] += 1;
  }
  FfnBackwardInputs(params, state.saved, d, d_gates);
  AddWeightGradients(stage, mb, [this, &params, saved = std::move(state.saved)]() mutable {
    FfnBackwardWeights(model_, params, saved);
  });
  for (size_t i = 0; i + 1 < state.row_begin.size(); ++i) {
    const int64_t begin = state.row_begin[i], end = state.row_begin[i + 1], pair0 = state.pair_begin[i];
    Post(stage - 1, mb, true, i,
         PackDispatchGradient(d, begin, end, d_gates.data() + pair0, state.pair_begin[i + 1] - pair0, counts, allocator()),
         end - begin);
  }
}

void Executor::BackwardAttention(int layer, int mb) {
  const int stage = 2 * layer;
  auto node = attention_.extract(Key(stage, mb));
  DM_CHECK(!node.empty(), "backward of attention without its forward");
  Attention& state = *node.mapped();
  const AttentionParams& params = *attention_params_[layer];
  const int64_t T = state.saved.x.size(0), K = model_.num_experts_per_tok;
  const bool dense = model_.is_dense(layer);
  Tensor dh, d_gates = at::zeros({dense ? 0 : T, K}, at::kFloat);
  AuxLoss aux;
  aux.weight = dense ? 0 : scale_.aux;
  aux.tokens = config_.train.micro_batch_size * config_.train.seq_length;
  if (scale_.global_aux && !dense) aux.counts = at::zeros({model_.num_experts}, at::kFloat);
  for (size_t j = 0; j < state.routes.size(); ++j) {
    const Route& route = state.routes[j];
    const DispatchGradient g = UnpackDispatchGradient(Take(stage, mb, true, j), model_.hidden_size, dtype_, device_);
    DM_CHECK(g.rows.size(0) == static_cast<int64_t>(route.token.size()) && g.d_gates.size() == route.slot.size(),
             "gradients do not match the rows sent");
    for (size_t p = 0; p < route.slot.size(); ++p) d_gates.data_ptr<float>()[route.slot[p]] = g.d_gates[p];
    if (!g.counts.empty()) {
      std::copy(g.counts.begin(), g.counts.end(), aux.counts.data_ptr<float>() + topology_.experts(layer)[j]);
    }
    if (!route.token_index.defined() && !dh.defined()) {
      dh = g.rows;
    } else {
      if (!dh.defined()) dh = at::zeros({T, model_.hidden_size}, at::TensorOptions().dtype(dtype_).device(device_));
      AddRows(dh, route.token_index, g.rows);
    }
  }
  if (config_.train.recompute == "layer") AttentionRecompute(model_, params, state.saved);
  AttentionBackwardInputs(model_, params, state.saved, dh, dense ? Tensor() : d_gates.to(device_), &aux);
  AddWeightGradients(stage, mb, [this, &params, saved = std::move(state.saved)]() mutable {
    AttentionBackwardWeights(model_, params, saved);
  });
  result_.aux_loss += aux.value;
  if (layer == 0) {
    EmbedBackward(store_.Get("embed"), state.tokens, dh);
  } else {
    SendCombineBackward(stage - 1, mb, dh, state.in);
  }
}

}  // namespace disagmoe
