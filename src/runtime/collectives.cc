#include "runtime/collectives.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cstring>

#include "base/error.h"

namespace disagmoe {
namespace {

enum Phase : int32_t { kReduce = 0, kGather = 1 };

size_t IndexOf(const std::vector<int>& ranks, int rank) {
  const auto it = std::find(ranks.begin(), ranks.end(), rank);
  DM_CHECK(it != ranks.end(), "not a member of the collective");
  return static_cast<size_t>(it - ranks.begin());
}

at::Tensor Floats(const Buffer& b) {
  return at::from_blob(b.data, {static_cast<int64_t>(b.size / sizeof(float))}, [owner = b.owner](void*) {}, at::kFloat);
}

}  // namespace

Range PartOf(const Range& range, size_t parts, size_t i) {
  auto cut = [&](size_t k) { return range.begin + PartBegin((range.size() + 15) / 16, parts, k) * 16; };
  return {std::min(cut(i), range.end), std::min(cut(i + 1), range.end)};
}

RequestPtr Collectives::Send(int peer, uint32_t pass, int32_t id, int32_t phase, const void* data, size_t bytes, MessageKind kind) {
  Buffer b = transport_->Allocate(bytes);
  if (bytes > 0) std::memcpy(b.data, data, bytes);
  return transport_->PostSend(peer, {pass, kind, id, phase}, std::move(b));
}

void Collectives::ReduceScatter(const at::Tensor& flat, const std::vector<Bucket>& buckets, uint32_t pass) {
  std::vector<RequestPtr> sends;
  std::vector<std::vector<RequestPtr>> receives(buckets.size());
  for (size_t b = 0; b < buckets.size(); ++b) {
    const auto& ranks = buckets[b].ranks;
    if (ranks.size() == 1) continue;
    for (size_t i = 0; i < ranks.size(); ++i) {
      if (ranks[i] == rank_) {
        receives[b].push_back(nullptr);
        continue;
      }
      receives[b].push_back(transport_->PostRecv(ranks[i], {pass, MessageKind::kCollective, buckets[b].id, kReduce}));
      const Range part = PartOf(buckets[b].range, ranks.size(), i);
      const at::Tensor host = flat.narrow(0, part.begin, part.size()).cpu();
      sends.push_back(Send(ranks[i], pass, buckets[b].id, kReduce, host.const_data_ptr<float>(), part.size() * sizeof(float), MessageKind::kCollective));
    }
  }
  for (size_t b = 0; b < buckets.size(); ++b) {
    const auto& ranks = buckets[b].ranks;
    if (ranks.size() == 1) continue;
    const Range part = PartOf(buckets[b].range, ranks.size(), IndexOf(ranks, rank_));
    at::Tensor mine = flat.narrow(0, part.begin, part.size());
    at::Tensor sum = at::zeros_like(mine);
    for (size_t i = 0; i < ranks.size(); ++i) {  // in rank order: the same bits every time
      if (ranks[i] == rank_) {
        sum.add_(mine);
      } else {
        waits_.Wait(*receives[b][i]);
        sum.add_(Floats(receives[b][i]->buffer()).to(sum.device()));
      }
    }
    mine.copy_(sum);
  }
  for (auto& s : sends) waits_.Wait(*s);
}

void Collectives::AllGather(const at::Tensor& flat, const std::vector<Bucket>& buckets, uint32_t pass) {
  std::vector<RequestPtr> sends;
  std::vector<std::pair<Range, RequestPtr>> receives;
  for (const auto& bucket : buckets) {
    const auto& ranks = bucket.ranks;
    if (ranks.size() == 1) continue;
    const Range mine = PartOf(bucket.range, ranks.size(), IndexOf(ranks, rank_));
    const at::Tensor host = flat.narrow(0, mine.begin, mine.size()).cpu();
    Buffer shared = transport_->Allocate(mine.size() * sizeof(float));
    if (mine.size() > 0) std::memcpy(shared.data, host.const_data_ptr<float>(), shared.size);
    for (size_t i = 0; i < ranks.size(); ++i) {
      if (ranks[i] == rank_) continue;
      const MessageKey key{pass, MessageKind::kCollective, bucket.id, kGather};
      receives.emplace_back(PartOf(bucket.range, ranks.size(), i), transport_->PostRecv(ranks[i], key));
      sends.push_back(transport_->PostSend(ranks[i], key, shared));
    }
  }
  for (auto& [part, request] : receives) {
    waits_.Wait(*request);
    flat.narrow(0, part.begin, part.size()).copy_(Floats(request->buffer()));
  }
  for (auto& s : sends) waits_.Wait(*s);
}

std::vector<std::vector<double>> Collectives::Gather(const std::vector<double>& mine, int world, uint32_t pass, int32_t id) {
  if (rank_ != 0) {
    auto send = Send(0, pass, id, kGather, mine.data(), mine.size() * sizeof(double), MessageKind::kControl);
    waits_.Wait(*send);
    return {};
  }
  std::vector<RequestPtr> receives;
  for (int r = 1; r < world; ++r) receives.push_back(transport_->PostRecv(r, {pass, MessageKind::kControl, id, kGather}));
  std::vector<std::vector<double>> all{mine};
  for (auto& request : receives) {
    waits_.Wait(*request);
    const Buffer& b = request->buffer();
    std::vector<double> values(b.size / sizeof(double));
    if (b.size > 0) std::memcpy(values.data(), b.data, b.size);
    all.push_back(std::move(values));
  }
  return all;
}

std::vector<double> Collectives::Broadcast(const std::vector<double>& values, int world, uint32_t pass, int32_t id) {
  if (rank_ != 0) {
    auto request = transport_->PostRecv(0, {pass, MessageKind::kControl, id, kReduce});
    waits_.Wait(*request);
    const Buffer& b = request->buffer();
    std::vector<double> out(b.size / sizeof(double));
    if (b.size > 0) std::memcpy(out.data(), b.data, b.size);
    return out;
  }
  std::vector<RequestPtr> sends;
  for (int r = 1; r < world; ++r) sends.push_back(Send(r, pass, id, kReduce, values.data(), values.size() * sizeof(double), MessageKind::kControl));
  for (auto& s : sends) waits_.Wait(*s);
  return values;
}

}  // namespace disagmoe
