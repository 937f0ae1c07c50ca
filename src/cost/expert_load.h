// Loads of experts that a run recorded.
#pragma once

#include <string>
#include <vector>

namespace disagmoe {

// Of a run's expert_load.json: relative loads, [layer][expert]; of a single JSON array of numbers that one row. What
// Job.expert_loads takes. Throws Error: no such file, no such array, rows of different lengths, a number below zero or
// none, zeros alone.
std::vector<std::vector<double>> ReadExpertLoads(const std::string& path);

}  // namespace disagmoe
