// Which schedules the runtime executes, of all that can be simulated.
#pragma once

#include <string>

#include "spec/config.h"

namespace disagmoe {

// What a schedule needs that the runtime does not do; empty: it executes it.
std::string MissingForSchedule(const std::string& name);
// Throws Error where only the simulator can do what the configuration, read from the file `path`, says.
void RequireTrainable(const RunConfig& config, const std::string& path);

}  // namespace disagmoe
