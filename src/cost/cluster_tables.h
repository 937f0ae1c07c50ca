// Behind ClusterCosts: every number that it answers with, computed once. A file each fills the stages, the transfers
// and the end of a step.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <map>
#include <utility>
#include <vector>

#include "base/error.h"
#include "cost/cluster_costs.h"
#include "cost/traffic.h"
#include "cost/work.h"
#include "schedule/ready.h"

namespace disagmoe {

// What one stage, or one part of it, is for one worker class.
struct StageCost {
  int64_t forward_ns = 0, backward_ns = 0, weight_ns = 0;
  double forward_scores_ns = 0, backward_scores_ns = 0;  // of these, attention's scores and values
  int64_t kept_bytes = 0, kept_for_weight_bytes = 0;
  int64_t forward_workspace_bytes = 0, backward_workspace_bytes = 0;
};

struct ClusterCosts::Tables {
  const Job& job;
  const Schedule& s;
  const ModelShape& model;
  const bool colocated;
  const int stages, parts;
  const OpIds ids;
  Job keeps_all;                           // the job without recomputation
  Routing by_rank;
  std::vector<WorkerClass> classes;
  std::vector<int> first_class;            // by group
  std::vector<int> members_of;             // by rank: its class
  std::vector<double> slow_compute, slow_nic;  // by class
  std::vector<int> nodes;                  // by rank
  int stride = 1;                          // most classes of a group
  // Of drawn documents: by layer the row of document_factors; of it [micro-batch * m + worker].
  std::vector<int> factors_of;
  std::vector<std::vector<double>> document_factors;
  std::vector<double> beside;              // by group: share of its computation that runs beside transfers
  // By layer (-1: all dense ones; 0: all others, where routing is even), and by group and part.
  std::map<std::pair<int, int>, std::vector<Holder>> holders_of;

  std::vector<StageCost> stage;            // [(route * stages + stage) * parts + part][local class]
  // [(route * stages + boundary) * parts + part][local class]
  std::vector<TransferCost> owner, holder;
  std::vector<int64_t> owner_bytes, holder_bytes;             // of one message to one worker, over both fabrics
  std::vector<TransferCost> local_owner[2], local_holder[2];  // [backward]: in the group that sends; colocated only
  std::vector<char> two_phases;            // by route and boundary
  std::vector<StepEndCost> ends;           // by class
  std::vector<StaticMemory> static_parts;

  Tables(const Job& j, const Schedule& schedule);

  size_t Row(int route, int stage_or_boundary, int part) const {
    return (static_cast<size_t>(route * stages + stage_or_boundary) * parts + part) * stride;
  }
  size_t At(const Op& op, int c) const {
    return Row(s.route(op.micro_batch), op.stage, op.part) + static_cast<size_t>(c - first_class[classes[c].group]);
  }
  int LocalClass(int group, size_t worker) const { return members_of[Ranks(group)[worker]] - first_class[group]; }
  // A micro-batch of each route.
  int MicroBatchOf(int route) const { return route == 0 ? 0 : s.num_micro_batches - 1; }
  const std::vector<int>& Ranks(int group) const { return s.groups[group].ranks; }
  std::vector<int> NodesOfGroup(int group) const;
  double TokensOfOwner() const { return static_cast<double>(job.sequences) * static_cast<double>(job.seq_length); }
  double TokensOfMicroBatch() const { return TokensOfOwner() * job.m; }
  bool Routed(int layer) const { return model.num_experts > 0 && !model.dense[layer]; }
  // Parts of a stage that live in different groups have experts of their own (hetermoe): [first, last) of a part.
  bool OwnExperts() const { return !s.part_group.empty(); }
  std::pair<int64_t, int64_t> ExpertsOfPart(int part) const;
  std::vector<int> CountsOf(int layer) const;  // by worker; empty: equal shares
  const std::vector<Holder>& Holders(int layer, int group, int part);
  double RowsOfToken(const std::vector<Holder>& holders) const;
  double NicsOf(int group) const;

  bool DrawsDocuments() const { return !job.documents.empty() && !job.same_documents; }
  double ScoresBeyondMean(const Op& op, int c) const;  // nanoseconds

  void MakeClasses();
  void DrawDocuments();
  void FillStages();
  void FillTransfers();
  void FillEnds();

 private:
  Straggler SlownessOf(const GroupSchedule& group, size_t worker, bool* named, std::vector<char>* used) const;
  StageCost AttentionCost(int group, int layer, int route, double slower);
  StageCost FfnCost(int group, int layer, const Holder& h, double equal, double all_pairs, int part,
                    double slower) const;
  StageCost HeadCost(int group, double slower) const;
  StageCost Timed(int group, const Work& work, const Work& again, double rows_per_expert, double launches,
                  double slower) const;
  void FillBeside();
  double SlowerBy(int at, int group) const;
  TransferCost Cost(int group, int peer, const SideRows& rows, double rate, double row_bytes, int cut,
                    double slow) const;
  void FillBoundary(int route, int boundary, int part);
  void FillExchange(int route, int boundary, int part, int owner_group, int holder_group,
                    std::vector<TransferCost>* owner_costs, std::vector<TransferCost>* holder_costs, bool local);
  void FillSend(int route, int boundary, int part, int from, int to);
  // Parameters of a group: replicated on its workers, and experts by part.
  struct GroupParams {
    double shared = 0;
    std::vector<double> experts;  // by worker
  };
  GroupParams ParamsOf(int group) const;
};

// Nanoseconds or bytes: an operation of eleven days, a petabyte, or infinity would overflow a step's sums.
inline int64_t RoundToInt(double x) {
  if (std::abs(x) <= 1e15) return static_cast<int64_t>(std::llround(x));
  throw Error({"an operation too slow or too large to simulate", "model, cluster or settings", "",
               "at most 1e15 ns and 1e15 bytes each", "a bandwidth or a share of one that is nearly 0?"});
}

}  // namespace disagmoe
