#include "base/error.h"
#include "schedule/schedule.h"

namespace disagmoe {

Schedule Generate(const std::string& name, const PlacementSpec& placement, const GenerateOptions& options) {
  if (name == "af-pipe") return GenerateAfPipe(placement, options);
  if (name == "colocated-1f1b") return GenerateColocated(placement, options);
  throw Error({"unknown schedule", "schedule.name", "\"" + name + "\"", "\"af-pipe\" or \"colocated-1f1b\"", ""});
}

std::vector<Op> StreamOf(const GroupSchedule& group, OpKind kind) {
  std::vector<Op> stream;
  for (const Op& op : IsCompute(kind) ? group.compute : group.comm) {
    if (op.kind == kind) stream.push_back(op);
  }
  return stream;
}

}  // namespace disagmoe
