#include "spec/trainable.h"

#include <algorithm>

#include "base/error.h"
#include "spec/config_keys.h"

namespace disagmoe {
std::string MissingForSchedule(const std::string& name) {
  if (name == "dualpipe") return "two routes at once, with every layer in two groups";
  if (name == "hetermoe") return "experts of one layer in both pools";
  if (name == "tutel" || name == "comet" || name == "fastermoe" || name == "lancet") return "stages cut into parts";
  return "";
}

void RequireTrainable(const RunConfig& config, const std::string& path) {
  const std::string simulate = "`disagmoe simulate` does";
  const std::string& name = config.schedule.name;
  const std::string missing = MissingForSchedule(name);
  if (!missing.empty()) {
    std::string known = "\"auto\"";
    for (const ScheduleName& s : ScheduleNames()) {
      if (MissingForSchedule(s.name).empty()) known += ", \"" + s.name + "\"";
    }
    throw Error({"the runtime does not execute this schedule", path + ", schedule.name", TomlString(name),
                 known.replace(known.rfind(", "), 2, " or "), name + " needs " + missing + "; " + simulate});
  }
  for (const std::string& setting : config.plan.settings) {
    if (!setting.starts_with("delay_weights=") || setting == "delay_weights=true") continue;
    throw Error({"the runtime does not execute this schedule", path + ", plan.settings", TomlString(setting),
                 "weight gradients as operations of their own", simulate});
  }
}

}  // namespace disagmoe
