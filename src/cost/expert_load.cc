#include "cost/expert_load.h"

#include <cmath>
#include <fstream>
#include <nlohmann/json.hpp>
#include <numeric>

#include "base/error.h"

namespace disagmoe {
namespace {

[[noreturn]] void Refuse(const std::string& path, const std::string& got, const std::string& expected) {
  throw Error({"cannot read expert loads", path, got, expected, ""});
}

}  // namespace

std::vector<std::vector<double>> ReadExpertLoads(const std::string& path) {
  std::ifstream in(path);
  if (!in) Refuse(path, "", "a JSON array of numbers, one an expert");
  std::vector<std::vector<double>> layers;
  try {
    const auto json = nlohmann::json::parse(in);
    if (json.is_array() && !json.empty() && json[0].is_array()) {
      layers = json.get<std::vector<std::vector<double>>>();
    } else {
      layers.push_back(json.get<std::vector<double>>());
    }
  } catch (const nlohmann::json::exception& e) {
    Refuse(path, e.what(), "a JSON array of numbers, one an expert");
  }
  double all = 0;
  for (const std::vector<double>& loads : layers) {
    bool good = !loads.empty() && loads.size() == layers[0].size();
    for (double x : loads) good = good && x >= 0;
    if (!good) Refuse(path, "", "as many loads in each layer, none below zero");
    all += std::accumulate(loads.begin(), loads.end(), 0.0);
  }
  if (!std::isfinite(all)) Refuse(path, "", "loads whose sum is a number");
  if (all <= 0) Refuse(path, "zeros alone", "the load of some experts");
  return layers;
}

}  // namespace disagmoe
