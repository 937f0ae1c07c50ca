// Executes a schedule on real tensors: one worker's part of one pass (a training step without its end, or an evaluation).
//
// Computations run in the order that the schedule gives, on the calling thread; transfers run on the transport's
// threads. Receives are posted ahead as far as their link has slots; sends are posted as soon as their message
// is made and never block. Nothing here asks whether a worker is "A" or "F": a stage's kind says what to compute.
#pragma once

#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <unordered_map>
#include <vector>

#include "io/batches.h"
#include "layers/blocks.h"
#include "layers/reference.h"
#include "runtime/exchange.h"
#include "runtime/topology.h"
#include "runtime/waits.h"

namespace disagmoe {

struct PassSpec {
  uint32_t id = 0;             // part of every message's key: different for each pass of a run
  int64_t step = 0;            // for messages to people
  bool held_out = false;
  int64_t first_sequence = 0;  // global number of the first sequence of all replicas' micro-batches
  int64_t first_micro_batch = 0;  // of this replica's share: micro-batch 0 of the schedule
  int64_t labels = 0;          // that count, of all replicas' micro-batches; 0: all
};

struct PassResult {
  double token_loss = 0;   // sum over this worker's tokens at the head
  double aux_loss = 0;     // weighted, this worker's share
  int64_t bad = kAllFinite;  // BadKey of the first non-finite values seen here
  int64_t row_bytes_sent = 0;  // rows alone, to other workers
  std::vector<int64_t> expert_tokens;  // pairs computed here, by layer * E + expert; for load figures
};

class Executor {
 public:
  // All references must outlive the executor. transport may be null with one worker.
  Executor(const RunConfig& config, const Topology& topology, const ParamStore& store, const Batches& batches,
           Transport* transport, int rank, at::Device device, Waits& waits, Status& status);
  ~Executor();
  PassResult Run(const Schedule& schedule, const PassSpec& pass);

 private:
  struct Attention;  // state of an attention stage between forward and backward
  struct Ffn;
  struct Head;
  struct LinkQueue;

  void Compute(const Op& op);
  void ForwardAttention(int layer, int mb);
  void ForwardFfn(int layer, int mb);
  void ForwardHead(int mb);
  void BackwardAttention(int layer, int mb);
  void BackwardFfn(int layer, int mb);
  void BackwardHead(int mb);
  // The second step of a backward: now, or at its W.
  void AddWeightGradients(int stage, int mb, std::function<void()> step);
  void Weights(int stage, int mb);

  struct Incoming {  // rows of a combine, and which tokens of this worker's share each source sent
    Tensor x;
    std::vector<Tensor> index;  // per source; undefined: all
    std::vector<int64_t> rows;
  };
  Incoming TakeCombine(int boundary, int mb, int64_t first_token, int64_t tokens);
  void SendCombineBackward(int boundary, int mb, const Tensor& d, const Incoming& in);
  Tensor Tokens(int mb, int64_t first_token, int64_t tokens, bool labels) const;
  // Of AttentionSaved.
  std::vector<int64_t> Documents(int mb, int64_t first_token, int64_t tokens) const;
  int64_t SequenceOf(int mb, int64_t token) const;  // by number in the run

  // Messages over a boundary, from or to worker i of the group at its other end.
  void Post(int boundary, int mb, bool backward, size_t peer_index, Buffer message, int64_t rows);
  Buffer Take(int boundary, int mb, bool backward, size_t peer_index);
  const std::vector<int>& PeersOut(int boundary, bool backward) const;
  const std::vector<int>& PeersIn(int boundary, bool backward) const;
  void StartReceives();
  void PostReceives(LinkQueue& queue);
  void Consumed(const Op& op);
  void SeeRstd(const Tensor& rstd, int stage, int mb);  // of the norm that reads this stage's output
  void SeeBad(int stage, int mb);
  AllocateFn allocator();
  int64_t Key(int stage, int mb) const { return int64_t{mb} * topology_.num_stages() + stage; }

  const RunConfig& config_;
  const ModelConfig& model_;
  const Topology& topology_;
  const ParamStore& store_;
  const Batches& batches_;
  Transport* transport_;
  const int rank_, replica_;
  const at::Device device_;
  const at::ScalarType dtype_;
  Waits& waits_;
  Status& status_;
  LossScale scale_;
  Rotary rotary_;
  BufferPool pool_;
  std::vector<std::unique_ptr<AttentionParams>> attention_params_;  // by layer, null if not here
  std::vector<std::unique_ptr<FfnParams>> ffn_params_;
  std::unique_ptr<HeadParams> head_params_;

  // Of the pass that runs.
  const Schedule* schedule_ = nullptr;
  PassSpec pass_;
  PassResult result_;
  std::unordered_map<int64_t, std::unique_ptr<Attention>> attention_;
  std::unordered_map<int64_t, std::unique_ptr<Ffn>> ffn_;
  std::unordered_map<int64_t, std::unique_ptr<Head>> head_;
  std::unordered_map<int64_t, std::function<void()>> weights_;  // second steps that wait, with the tensors they need
  std::vector<LinkQueue> links_;
  std::unordered_map<int64_t, std::vector<RequestPtr>> receives_;  // by transfer: a request a peer, null for oneself
  std::unordered_map<int64_t, Buffer> local_;                      // messages to oneself
  std::deque<std::pair<std::string, RequestPtr>> sends_;
};

}  // namespace disagmoe
