// Hugging Face's config.json and the runtime's [model] table.
#pragma once

#include <string_view>
#include <vector>

namespace disagmoe {

// model_type of the families that are known.
const std::vector<std::string_view>& HfFamilies();

}  // namespace disagmoe
