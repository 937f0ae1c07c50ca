#include "io/checkpoint.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <filesystem>
#include <set>

#include <nlohmann/json.hpp>

#include "base/error.h"
#include "io/file.h"

namespace disagmoe {
namespace {

namespace fs = std::filesystem;

constexpr char kFormat[] = "disagmoe-checkpoint";
constexpr int kVersion = 1;
constexpr uint64_t kMaxManifest = 256 << 20;

std::string StepName(int64_t step) {
  DM_CHECK(step >= 0, "step " + std::to_string(step));
  const std::string digits = std::to_string(step);
  return "step-" + std::string(digits.size() < 8 ? 8 - digits.size() : 0, '0') + digits;
}

bool PlainName(const std::string& name) {
  return !name.empty() && name[0] != '.' && name.find('/') == std::string::npos && name.find('\0') == std::string::npos;
}

// The step of a published checkpoint's folder name, or -1.
int64_t StepOf(const std::string& name) {
  int64_t step = -1;
  const char* end = name.data() + name.size();
  if (!name.starts_with("step-") || std::from_chars(name.data() + 5, end, step).ptr != end || step < 0) return -1;
  return StepName(step) == name ? step : -1;
}

// An older checkpoint of the same step, while the new one takes its name.
std::string OldFolder(const std::string& folder) { return ParentFolder(folder) + "/." + BaseName(folder) + ".old"; }

// One that is being removed.
std::string PrunedFolder(const std::string& root, const std::string& name) { return root + "/." + name + ".pruned"; }

void CreateFolder(const std::string& folder) {
  std::error_code error;
  fs::create_directories(folder, error);
  if (error) throw Error({"cannot create the folder", folder, error.message(), {}, {}});
}

void RemoveAll(const std::string& path) {
  std::error_code error;
  fs::remove_all(path, error);
  if (error) throw Error({"cannot remove", path, error.message(), {}, {}});
}

std::vector<std::string> Names(const std::string& folder) {
  std::vector<std::string> names;
  std::error_code error;
  for (fs::directory_iterator it(folder, error), end; !error && it != end; it.increment(error)) {
    names.push_back(it->path().filename().string());
  }
  if (error) throw Error({"cannot list the folder", folder, error.message(), {}, {}});
  std::sort(names.begin(), names.end());
  return names;
}

void Rename(const std::string& from, const std::string& to) {
  if (::rename(from.c_str(), to.c_str()) != 0) throw SystemError("cannot rename " + from + " to this", to, errno);
}

// `partial` takes the name `folder`. The kernel swaps two folders in one step where the file system can; otherwise the
// older one is set aside first, where ResolveCheckpoint finds it.
void MoveIntoPlace(const std::string& partial, const std::string& folder) {
  std::error_code error;
  const std::string old = OldFolder(folder);
  if (!fs::exists(folder, error)) {
    Rename(partial, folder);
    SyncFolder(ParentFolder(folder));
    return RemoveAll(old);
  }
  if (::renameat2(AT_FDCWD, partial.c_str(), AT_FDCWD, folder.c_str(), RENAME_EXCHANGE) == 0) {
    SyncFolder(ParentFolder(folder));
    return RemoveAll(partial);
  }
  if (errno != EINVAL && errno != ENOSYS && errno != ENOTSUP) throw SystemError("cannot replace the folder", folder, errno);
  RemoveAll(old);
  Rename(folder, old);
  Rename(partial, folder);
  SyncFolder(ParentFolder(folder));
  RemoveAll(old);
}

void CheckFiles(const std::string& folder, const std::vector<CheckpointFile>& files) {
  std::error_code error;
  for (const CheckpointFile& file : files) {
    const std::string path = folder + "/" + file.name;
    const uint64_t bytes = fs::file_size(path, error);
    if (error) throw Error({"incomplete checkpoint", path, error.message(), std::to_string(file.bytes) + " bytes", {}});
    if (bytes != file.bytes) {
      throw Error({"incomplete checkpoint", path, std::to_string(bytes) + " bytes", std::to_string(file.bytes) + " bytes", {}});
    }
  }
}

std::string Sha256Text(const std::string& text) {
  Sha256 sha;
  sha.Update(text.data(), text.size());
  return sha.Hex();
}

// Ends with its own hash: of the text without that entry.
std::string ManifestText(const CheckpointManifest& manifest) {
  nlohmann::ordered_json json;
  json["format"] = kFormat;
  json["version"] = kVersion;
  json["step"] = manifest.step;
  json["layout"] = manifest.layout;
  json["config"] = manifest.config;
  json["files"] = nlohmann::ordered_json::array();
  for (const CheckpointFile& file : manifest.files) {
    json["files"].push_back({{"name", file.name}, {"bytes", file.bytes}, {"sha256", file.sha256}});
  }
  try {
    json["sha256"] = Sha256Text(json.dump(2));
    return json.dump(2) + "\n";
  } catch (const nlohmann::json::exception& e) {
    throw Error({"the checkpoint's layout or configuration is not UTF-8", StepName(manifest.step), e.what(), {}, {}});
  }
}

// The checkpoint that was there before, if a replacement was interrupted between its two renames.
std::string VerifiedFolder(const std::string& folder) {
  std::error_code error;
  const std::string usable = !fs::exists(folder, error) && fs::exists(OldFolder(folder), error) ? OldFolder(folder) : folder;
  CheckFiles(usable, ReadManifest(usable).files);
  return usable;
}

// Newest complete checkpoint in root other than `but`, or "".
std::string AnotherUsable(const std::string& root, const std::string& but) {
  std::vector<std::string> names;
  try {
    names = Names(root);
  } catch (const Error&) {
    return "";
  }
  std::reverse(names.begin(), names.end());
  for (const std::string& name : names) {
    if (!name.starts_with("step-") || name == but) continue;
    try {
      return VerifiedFolder(root + "/" + name);
    } catch (const Error&) {
    }
  }
  return "";
}

std::string ReadLatest(const std::string& root) {
  const std::string path = root + "/latest";
  std::error_code error;
  if (!fs::exists(path, error)) {
    const std::string other = AnotherUsable(root, "");
    throw Error({"no checkpoint", path, "no such file", {}, other.empty() ? "" : "load " + other + " by its name"});
  }
  std::string name = ReadTextFile(path, 4096);
  name.erase(name.find_last_not_of(" \t\r\n") + 1);
  if (!PlainName(name) || !name.starts_with("step-")) {
    throw Error({"damaged tracker file", path, "\"" + name.substr(0, 40) + "\"", "the name of a folder, step-00000020", {}});
  }
  return name;
}

}  // namespace

std::string PartialFolder(const std::string& root, int64_t step) {
  const std::string folder = root + "/." + StepName(step) + ".partial";
  CreateFolder(folder);
  return folder;
}

void RemoveLeftovers(const std::string& root) {
  CreateFolder(root);
  std::error_code error;
  for (const std::string& name : Names(root)) {
    const std::string path = root + "/" + name;
    if (name.starts_with(".step-") && (name.ends_with(".partial") || name.ends_with(".pruned"))) RemoveAll(path);
    // Not while it stands in for the folder that it was.
    if (name.starts_with(".step-") && name.ends_with(".old") &&
        fs::exists(root + "/" + name.substr(1, name.size() - 5), error)) {
      RemoveAll(path);
    }
  }
}

std::vector<std::string> PruneCheckpoints(const std::string& root, int64_t keep) {
  DM_CHECK(keep >= 1, "keep " + std::to_string(keep));
  const int64_t latest = StepOf(ReadLatest(root));
  std::vector<std::string> names;
  std::error_code error;
  for (const std::string& name : Names(root)) {
    const int64_t step = StepOf(name);
    if (step >= 0 && step < latest && fs::exists(root + "/" + name + "/manifest.json", error)) names.push_back(name);
  }
  std::sort(names.begin(), names.end(), [](const auto& a, const auto& b) { return StepOf(a) < StepOf(b); });
  names.resize(std::max<int64_t>(std::ssize(names) - (keep - 1), 0));
  for (const std::string& name : names) {
    RemoveAll(PrunedFolder(root, name));
    Rename(root + "/" + name, PrunedFolder(root, name));
  }
  if (!names.empty()) SyncFolder(root);  // no power failure may undo a rename and keep the removals
  for (const std::string& name : names) RemoveAll(PrunedFolder(root, name));
  return names;
}

std::string RankFileName(int rank) {
  DM_CHECK(rank >= 0, "rank " + std::to_string(rank));
  const std::string digits = std::to_string(rank);
  return "rank-" + std::string(digits.size() < 5 ? 5 - digits.size() : 0, '0') + digits + ".safetensors";
}

std::string PublishCheckpoint(const std::string& root, const CheckpointManifest& manifest) {
  const std::string partial = root + "/." + StepName(manifest.step) + ".partial";
  std::set<std::string> listed;
  for (const CheckpointFile& file : manifest.files) {
    DM_CHECK(PlainName(file.name) && file.name != "manifest.json" && listed.insert(file.name).second, file.name);
  }
  CheckFiles(partial, manifest.files);
  for (const std::string& name : Names(partial)) {
    if (listed.count(name) == 0) RemoveAll(partial + "/" + name);
  }
  WriteTextFile(partial + "/manifest.json", ManifestText(manifest));  // syncs the folder's names too

  const std::string folder = root + "/" + StepName(manifest.step);
  MoveIntoPlace(partial, folder);
  WriteTextFile(root + "/latest", StepName(manifest.step) + "\n");
  return folder;
}

std::string ResolveCheckpoint(const std::string& root, const std::string& which) {
  std::error_code error;
  if (which == "latest") {
    const std::string name = ReadLatest(root);
    try {
      return VerifiedFolder(root + "/" + name);
    } catch (const Error& e) {
      ErrorParts parts = e.parts();
      const std::string other = AnotherUsable(root, name);
      if (!other.empty()) parts.hint = "load " + other + ", which is complete, by its name";
      throw Error(parts);
    }
  }
  if (PlainName(which) && (fs::exists(root + "/" + which, error) || fs::exists(OldFolder(root + "/" + which), error))) {
    return VerifiedFolder(root + "/" + which);
  }
  std::string folder = which;
  while (folder.size() > 1 && folder.back() == '/') folder.pop_back();
  if (BaseName(folder) == "latest" && fs::is_regular_file(folder, error)) {
    return ResolveCheckpoint(ParentFolder(folder), "latest");
  }
  if (!fs::is_directory(folder, error)) {
    throw Error({"no such checkpoint", root, which,
                 "\"latest\", the name of a folder there (step-00000020), or the path of one", {}});
  }
  return VerifiedFolder(folder);
}

CheckpointManifest ReadManifest(const std::string& folder) {
  const std::string path = folder + "/manifest.json";
  const std::string text = ReadTextFile(path, kMaxManifest);
  CheckpointManifest manifest;
  try {
    nlohmann::ordered_json json = nlohmann::ordered_json::parse(text);
    if (json.at("format") != kFormat || json.at("version") != kVersion) {
      throw Error({"not a checkpoint of this version", path, "another format or version",
                   std::string(kFormat) + " " + std::to_string(kVersion), {}});
    }
    if (json.contains("sha256")) {  // older ones have none
      const std::string expected = json["sha256"].get<std::string>();
      json.erase("sha256");
      const std::string got = Sha256Text(json.dump(2));
      if (got != expected) throw Error({"damaged manifest", path, "SHA-256 " + got, expected, {}});
    }
    manifest.step = json.at("step").get<int64_t>();
    manifest.layout = json.at("layout").get<std::string>();
    manifest.config = json.at("config").get<std::string>();
    for (const auto& file : json.at("files")) {
      manifest.files.push_back({file.at("name").get<std::string>(), file.at("bytes").get<uint64_t>(),
                                file.at("sha256").get<std::string>()});
      if (!PlainName(manifest.files.back().name)) {
        throw Error({"damaged manifest", path, "a file name with a folder or a leading dot", "a plain name", {}});
      }
    }
  } catch (const nlohmann::json::exception& e) {
    throw Error({"damaged manifest", path, e.what(), {}, {}});
  }
  return manifest;
}

}  // namespace disagmoe
