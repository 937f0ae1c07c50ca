// Published claims beside what the simulator says: every row of system.md section 8, and runs that are not about this
// system. One calibration a table, stated; nothing is fitted to a cell.
#pragma once

#include <functional>
#include <string>
#include <vector>

namespace disagmoe {

struct ClaimTable {
  std::string id;           // "speed-up"
  std::string title;
  std::string calibration;  // cluster, efficiencies, layouts, batch
  std::vector<std::string> columns;
  std::vector<std::vector<std::string>> rows;
  std::string verdict;      // comes out, partly, does not; and why
};

// All tables, or those whose id is given. `progress` gets a line now and then. Throws Error for an unknown id.
std::vector<ClaimTable> Reproduce(const std::vector<std::string>& ids, const std::function<void(const std::string&)>& progress);
std::vector<std::string> ClaimIds();

std::string PrintClaims(const std::vector<ClaimTable>& tables);          // aligned text
std::string ClaimsMarkdown(const std::vector<ClaimTable>& tables);
std::string ClaimsJson(const std::vector<ClaimTable>& tables);

}  // namespace disagmoe
