// Who executes and holds what share in a layout: replicas, experts.
//
// Replicas: layout.replicas copies of the pipeline; rank = replica * pipeline_workers() + rank in the pipeline. Each
// executes a contiguous share of a step's micro-batches, in a schedule of its own share, so a step's tokens do not
// depend on the layout. Every parameter is held in each replica.
// layout.expert_counts: how many experts the first, second, ... worker of an FFN (or colocated) group holds: one row
// for all layers, or a row a layer (of a dense layer: unused). 0 is allowed; a row adds up to num_experts.
#pragma once

#include <cstdint>
#include <vector>

#include "spec/config.h"

namespace disagmoe {

// First expert of each worker of a layer's group, and num_experts at the end.
std::vector<int64_t> ExpertBegins(const RunConfig& config, int64_t layer);
// A replica executes micro-batches [ReplicaBegin(.., replica), ReplicaBegin(.., replica + 1)) of so many in all. Of a
// training step all replicas have as many; of an evaluation some may have one fewer, or none.
int64_t ReplicaBegin(const RunConfig& config, int64_t micro_batches, int replica);
// What every replica executes in a training step.
Schedule TrainingSchedule(const RunConfig& config);

}  // namespace disagmoe
