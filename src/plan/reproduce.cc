#include "plan/reproduce.h"

#include <algorithm>
#include <cstdio>
#include <map>

#include "base/error.h"
#include "cost/cluster_costs.h"
#include "cost/work.h"
#include "plan/evaluate.h"
#include "plan/reproduce_tables.h"

namespace disagmoe {
namespace {

struct Entry {
  const char* id;
  ClaimTable (*make)(const Progress&);
};

constexpr Entry kTables[] = {
    {"speed-up", SpeedUpTable},           {"speed-up-equal", SpeedUpEqualTable}, {"needed", NeededTable},
    {"best-layouts", BestLayoutsTable},   {"exposed", ExposedTable},
    {"split", SplitTable},                {"topk-ep", TopkTable},                {"virtual-stages", VirtualStagesTable},
    {"all-to-all", AllToAllShareTable},   {"shares", SharesTable},               {"bubble", BubbleTable},
    {"memory", MemoryTable},              {"other-runs", OtherRunsTable},
};

}  // namespace

std::vector<std::string> ClaimIds() {
  std::vector<std::string> ids;
  for (const Entry& e : kTables) ids.emplace_back(e.id);
  return ids;
}

std::vector<ClaimTable> Reproduce(const std::vector<std::string>& ids, const Progress& progress) {
  for (const std::string& id : ids) {
    if (std::any_of(std::begin(kTables), std::end(kTables), [&](const Entry& e) { return id == e.id; })) continue;
    std::string known;
    for (const Entry& e : kTables) known += (known.empty() ? "" : ", ") + std::string(e.id);
    throw Error({"unknown table", "disagmoe reproduce", "\"" + id + "\"", known, ""});
  }
  std::vector<ClaimTable> out;
  for (const Entry& e : kTables) {
    if (!ids.empty() && std::find(ids.begin(), ids.end(), e.id) == ids.end()) continue;
    progress(std::string("simulating: ") + e.id);
    out.push_back(e.make(progress));
    out.back().id = e.id;
  }
  return out;
}

}  // namespace disagmoe
