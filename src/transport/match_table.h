// Which message belongs to which receive: by source and key. Not thread-safe; the owner locks.
#pragma once

#include <iterator>
#include <optional>
#include <unordered_map>
#include <utility>

#include "base/rng.h"
#include "transport/transport.h"

namespace disagmoe {

struct SourceKey {
  int src = 0;
  MessageKey key;
  friend bool operator==(const SourceKey&, const SourceKey&) = default;
};

struct SourceKeyHash {
  size_t operator()(const SourceKey& k) const {
    uint64_t h = Mix64((static_cast<uint64_t>(static_cast<uint32_t>(k.src)) << 32) | k.key.step);
    h = Mix64(h ^ ((static_cast<uint64_t>(static_cast<uint32_t>(k.key.stage)) << 32) |
                   static_cast<uint32_t>(k.key.micro_batch)));
    return Mix64(h ^ static_cast<uint64_t>(k.key.kind));
  }
};

// Parcel: what has arrived before its receive was posted.
template <class Parcel>
class MatchTable {
 public:
  RequestPtr TakePosted(const SourceKey& key) {
    auto it = posted_.find(key);
    if (it == posted_.end()) return nullptr;
    RequestPtr request = std::move(it->second);
    posted_.erase(it);
    return request;
  }
  std::optional<Parcel> TakeArrived(const SourceKey& key) {
    auto it = arrived_.find(key);
    if (it == arrived_.end()) return std::nullopt;
    std::optional<Parcel> parcel(std::move(it->second));
    arrived_.erase(it);
    return parcel;
  }
  // False, and nothing stored, where one with this key is there already.
  bool StorePosted(const SourceKey& key, RequestPtr request) {
    return posted_.try_emplace(key, std::move(request)).second;
  }
  bool StoreArrived(const SourceKey& key, Parcel&& parcel) {
    return arrived_.try_emplace(key, std::move(parcel)).second;
  }
  // visit(key, request or parcel) returns true to take the entry out.
  template <class Visit>
  void SweepPosted(Visit visit) {
    Sweep(posted_, visit);
  }
  template <class Visit>
  void SweepArrived(Visit visit) {
    Sweep(arrived_, visit);
  }

 private:
  template <class Map, class Visit>
  static void Sweep(Map& map, Visit& visit) {
    for (auto it = map.begin(); it != map.end();) it = visit(it->first, it->second) ? map.erase(it) : std::next(it);
  }

  std::unordered_map<SourceKey, RequestPtr, SourceKeyHash> posted_;
  std::unordered_map<SourceKey, Parcel, SourceKeyHash> arrived_;
};

}  // namespace disagmoe
