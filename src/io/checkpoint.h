// Checkpoints: a folder a step, one safetensors file a rank, a manifest, and `latest` moved last.
//
//   checkpoints/step-00000020/rank-00000.safetensors ... manifest.json
//   checkpoints/latest                       text file: "step-00000020"
// A rank writes its file under a temporary name, syncs and renames it. When all ranks have written, one of them
// writes the manifest (layout, step, size and SHA-256 of each file), renames the folder from its temporary name, then moves `latest`.
// Old ones are removed under a hidden name. What has a name without a dot is whole at every moment.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "io/safetensors.h"

namespace disagmoe {

struct CheckpointFile {
  std::string name;
  uint64_t bytes = 0;
  std::string sha256;
};

struct CheckpointManifest {
  int64_t step = 0;
  std::string layout;   // what must be equal to resume: model, layout and dtype, as text
  std::string config;   // the run's resolved configuration (TOML)
  std::vector<CheckpointFile> files;
};

// The folder that ranks write into, before it is published: root/.step-00000020.partial (created if it is not there).
std::string PartialFolder(const std::string& root, int64_t step);
// Removes what killed runs left in root. Optional, for rank 0 before any rank writes; no checkpoint may be in progress.
void RemoveLeftovers(const std::string& root);
// Removes all but the newest `keep` (at least 1) of those up to the one that `latest` names; that one stays, and so do
// later ones, which a run that went back has left, and folders with other names. Returns the names removed.
std::vector<std::string> PruneCheckpoints(const std::string& root, int64_t keep);
std::string RankFileName(int rank);
// Checks that the files of the manifest are there, removes all others, then manifest, folder rename, `latest`. An older
// checkpoint of the same step is replaced. Returns the folder's final path.
std::string PublishCheckpoint(const std::string& root, const CheckpointManifest& manifest);
// "latest" in root, the name of a folder in root, or the path of a folder or of a file `latest`. Verifies that all files are there with their sizes
// (not their hashes: each rank verifies its own). Throws Error.
std::string ResolveCheckpoint(const std::string& root, const std::string& which);
CheckpointManifest ReadManifest(const std::string& folder);

}  // namespace disagmoe
