// What the runtime trains, of all that can be simulated: which models, which schedules.
#pragma once

#include <string>

#include "spec/config.h"
#include "spec/model_shape.h"

namespace disagmoe {

// The runtime's model of these dimensions. What it lacks ("attention sinks, sliding windows") is in `missing`, if that is
// given: empty = its shape is the given one, but for name and source. Keys that decide no cost have their defaults.
ModelConfig ModelOf(const ModelShape& shape, std::string* missing);
// What a schedule needs that the runtime does not do; empty: it executes it.
std::string MissingForSchedule(const std::string& name);
// Throws Error where only the simulator can do what the configuration, read from the file `path`, says.
void RequireTrainable(const RunConfig& config, const std::string& path);

}  // namespace disagmoe
