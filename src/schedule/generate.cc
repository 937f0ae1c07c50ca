#include "base/error.h"
#include "schedule/order.h"

namespace disagmoe {
namespace {

struct Generator {
  ScheduleName name;
  Schedule (*generate)(const PlacementSpec&, const GenerateOptions&);
};

const std::vector<Generator>& Generators() {
  static const std::vector<Generator> generators{
      {{"af-pipe", "two pools; every transfer is a stage of its own (schedule.md)", false}, GenerateAfPipe},
      {{"megatron-1f1b", "colocated; interleaved 1F1B, all-to-alls exposed", true}, GenerateMegatron},
      {{"megatron-overlap", "colocated; a forward merged with another's backward, delayed weight gradients", true},
       GenerateMegatronOverlap},
      {{"tutel", "colocated; experts in 1, 2, 4 or 8 chunks (parts), exchanges overlap within the layer", true},
       GenerateTutel},
      {{"comet", "colocated; as tutel, in tiles (parts)", true}, GenerateComet},
      {{"fastermoe", "colocated; exchanges by groups of workers (parts), expert shadowing", true}, GenerateFasterMoe},
      {{"lancet", "colocated; attention and experts in parts, weight gradients under the exchanges", true},
       GenerateLancet},
      {{"af-pipe-zb", "af-pipe with the backward split; weight gradients fill the waits", false}, GenerateAfPipeZb},
      {{"dualpipe", "colocated; two directions, forwards merged with backwards of the other, 2x parameters", true},
       GenerateDualPipe},
      {{"dualpipe-v", "colocated; dualpipe folded to one direction, out and back over the groups", true},
       GenerateDualPipeV},
      {{"hetermoe", "one group a pool; layer by layer, experts over both pools (zebra parallelism)", false},
       GenerateHeterMoe},
  };
  return generators;
}

}  // namespace

const std::vector<ScheduleName>& ScheduleNames() {
  static const std::vector<ScheduleName> names = [] {
    std::vector<ScheduleName> out;
    for (const Generator& g : Generators()) out.push_back(g.name);
    return out;
  }();
  return names;
}

Schedule Generate(const std::string& name, const PlacementSpec& placement, const GenerateOptions& options) {
  std::string known;
  for (const Generator& g : Generators()) {
    if (g.name.name == name) return g.generate(placement, options);
    known += (known.empty() ? "" : ", ") + g.name.name;
  }
  throw Error({"unknown schedule", "schedule.name", "\"" + name + "\"", "one of " + known, ""});
}

std::vector<Op> StreamOf(const GroupSchedule& group, OpKind kind) {
  std::vector<Op> stream;
  for (const Op& op : IsCompute(kind) ? group.compute : group.comm) {
    if (op.kind == kind) stream.push_back(op);
  }
  return stream;
}

}  // namespace disagmoe
