// disagmoe reproduce: published claims beside the simulator.
#include <cstdio>

#include "cli/commands.h"
#include "plan/reproduce.h"

namespace disagmoe {

int ReproduceCommand(const ReproduceArguments& a) {
  const auto progress = [](const std::string& line) { std::fprintf(stderr, "%s\n", line.c_str()); };
  const std::vector<ClaimTable> tables = Reproduce(a.tables, progress);
  const std::string text = a.json ? ClaimsJson(tables) : a.markdown ? ClaimsMarkdown(tables) : PrintClaims(tables);
  std::fputs(text.c_str(), stdout);
  return 0;
}

}  // namespace disagmoe
