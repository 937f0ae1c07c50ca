// Rotary embeddings as config.json files say them. Private to this folder.
#pragma once

#include "spec/json_reader.h"
#include "spec/model_config.h"

namespace disagmoe {

// rope_theta, rope_scaling (transformers 4) and rope_parameters (5), which must agree where both are there.
void ReadRope(JsonReader& reader, ModelConfig& model, double default_theta);
// rope_theta and rope_scaling (null: none) of a model.
Json RopeScaling(const ModelConfig& model);

}  // namespace disagmoe
