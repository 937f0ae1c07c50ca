// What train.init names: weights at the start of a run.
#pragma once

#include <string>
#include <vector>

#include "spec/config.h"

namespace disagmoe {

enum class InitialWeights { kRandom, kCheckpoint, kHuggingFace };
// A folder with a manifest, or of a run, is a checkpoint. Throws Error if it is no folder.
InitialWeights KindOfInit(const std::string& init);
// The folder of the checkpoint.
std::string InitialCheckpoint(const std::string& init);

// Throws Error where there is nothing that can be read, or another model. Reads headers alone. Returns lines for the user:
// where the weights are from, what is left out.
std::vector<std::string> CheckInitialWeights(const RunConfig& config);
// Rank 0, before it trains: the files beside the weights (config.json, tokenizer) into OUT/hf, for export and generate.
// resumed: the checkpoint that the run goes on from, whose run may have them, or "".
void KeepCompanions(const RunConfig& config, const std::string& resumed);

}  // namespace disagmoe
