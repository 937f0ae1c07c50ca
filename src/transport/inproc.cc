#include "transport/inproc.h"

#include <cstring>
#include <mutex>

#include "base/time.h"
#include "transport/match_table.h"

namespace disagmoe {
namespace {

struct Parcel {
  RequestPtr send;
  Buffer buffer;
  SendStamps stamps;
};

// What belongs to one rank and is touched by others. `mutex` guards the table and the reason of the abort.
struct Mailbox {
  std::mutex mutex;
  MatchTable<Parcel> table;
  std::string abort_reason;
  std::atomic<bool> aborted{false};  // set before a sweep of all mailboxes, read under the lock of each
  std::atomic<bool> left{false};
  BufferPool pool;
  TransportCounters counters;
};

struct Hub {
  explicit Hub(int ranks) : boxes(ranks) {}
  std::vector<Mailbox> boxes;

  std::string AbortReason(int rank) {
    std::lock_guard lock(boxes[rank].mutex);
    return boxes[rank].abort_reason;
  }

  void Deliver(int dst, Parcel parcel, const RequestPtr& receive) {
    Mailbox& box = boxes[dst];
    Buffer copy = box.pool.Allocate(parcel.buffer.size);
    if (copy.size > 0) std::memcpy(copy.data, parcel.buffer.data, copy.size);
    box.counters.bytes_received += copy.size;
    box.counters.messages_received += 1;
    receive->Complete(std::move(copy), parcel.stamps);
    parcel.send->Complete({}, parcel.stamps);
  }

  // Takes out everything that rank has to do with. `own` is told to its own requests, `others` to its peers'.
  void Sweep(int rank, const std::string& own, const std::string* others) {
    std::vector<std::pair<RequestPtr, const std::string*>> failed;
    for (int r = 0; r < static_cast<int>(boxes.size()); ++r) {
      std::lock_guard lock(boxes[r].mutex);
      boxes[r].table.SweepArrived([&](const SourceKey& key, Parcel& parcel) {
        const bool mine = key.src == rank;
        if (!mine && (r != rank || !others)) return false;
        failed.emplace_back(parcel.send, mine ? &own : others);
        return true;
      });
      boxes[r].table.SweepPosted([&](const SourceKey& key, RequestPtr& receive) {
        const bool mine = r == rank;
        if (!mine && (key.src != rank || !others)) return false;
        failed.emplace_back(receive, mine ? &own : others);
        return true;
      });
    }
    for (auto& [request, reason] : failed) request->Fail(*reason);
  }

  void Abort(int rank, const std::string& reason) {
    {
      std::lock_guard lock(boxes[rank].mutex);
      if (boxes[rank].aborted) return;
      boxes[rank].abort_reason = reason;
      boxes[rank].aborted = true;
    }
    Sweep(rank, reason, nullptr);
  }
};

class InprocTransport : public Transport {
 public:
  InprocTransport(std::shared_ptr<Hub> hub, int rank, const InprocOptions& options)
      : hub_(std::move(hub)), rank_(rank), options_(options) {}

  ~InprocTransport() override {
    if (!self().aborted) Flush();
    self().left = true;
    const std::string others = "rank " + std::to_string(rank_) + " has closed its transport";
    hub_->Sweep(rank_, "the transport was closed", &others);
  }

  int rank() const override { return rank_; }
  int size() const override { return static_cast<int>(hub_->boxes.size()); }

  RequestPtr PostSend(int dst, const MessageKey& key, Buffer buffer) override {
    return PostSendStamped(dst, key, std::move(buffer), {NowNs(), 0, 0});
  }

  RequestPtr PostSendStamped(int dst, const MessageKey& key, Buffer buffer, const SendStamps& stamps) override {
    CheckPeer(dst);
    auto send = std::make_shared<Request>(true, dst, key);
    if (self().aborted) return Failed(send);
    self().counters.bytes_sent += buffer.size;
    self().counters.messages_sent += 1;
    Parcel parcel{send, std::move(buffer), stamps};
    Mailbox& box = hub_->boxes[dst];
    RequestPtr receive;
    bool twice = false;
    {
      std::lock_guard lock(box.mutex);
      if (box.left) {
        send->Fail("rank " + std::to_string(dst) + " has closed its transport");
        return send;
      }
      receive = box.table.TakePosted({rank_, key});
      // An abort of this rank sweeps after it set the flag: what is stored without the flag is swept.
      if (!receive && !self().aborted) twice = !box.table.StoreArrived({rank_, key}, std::move(parcel));
    }
    if (receive) {
      hub_->Deliver(dst, std::move(parcel), receive);
    } else if (twice) {
      const std::string reason = "rank " + std::to_string(rank_) + " sent " + key.Describe() + " twice";
      send->Fail(reason);
      hub_->Abort(dst, reason);
    } else if (self().aborted) {
      return Failed(send);
    }
    return send;
  }

  RequestPtr PostRecv(int src, const MessageKey& key) override {
    CheckPeer(src);
    auto receive = std::make_shared<Request>(false, src, key);
    std::optional<Parcel> parcel;
    {
      std::lock_guard lock(self().mutex);
      if (self().aborted) {
        receive->Fail(self().abort_reason);
        return receive;
      }
      parcel = self().table.TakeArrived({src, key});
      if (!parcel && hub_->boxes[src].left) {
        receive->Fail("rank " + std::to_string(src) + " has closed its transport");
      } else if (!parcel && !self().table.StorePosted({src, key}, receive)) {
        receive->Fail("a receive for it is already posted");
      }
    }
    if (parcel) hub_->Deliver(rank_, std::move(*parcel), receive);
    return receive;
  }

  void Abort(const std::string& reason) override { hub_->Abort(rank_, reason); }
  const TransportCounters& counters() const override { return self().counters; }
  Buffer Allocate(size_t size) override { return self().pool.Allocate(size); }

 private:
  Mailbox& self() const { return hub_->boxes[rank_]; }

  void CheckPeer(int peer) const {
    DM_CHECK(peer >= 0 && peer < size() && peer != rank_,
             "rank " + std::to_string(rank_) + " exchanges with rank " + std::to_string(peer));
  }

  RequestPtr Failed(RequestPtr request) {
    request->Fail(hub_->AbortReason(rank_));
    return request;
  }

  void Flush() {
    std::vector<RequestPtr> pending;
    for (Mailbox& box : hub_->boxes) {
      std::lock_guard lock(box.mutex);
      box.table.SweepArrived([&](const SourceKey& key, Parcel& parcel) {
        if (key.src == rank_) pending.push_back(parcel.send);
        return false;
      });
    }
    const int64_t deadline = NowNs() + options_.close_timeout_ns;
    for (auto& send : pending) {
      try {
        send->Wait(std::max<int64_t>(0, deadline - NowNs()));
      } catch (const Error&) {  // what is not taken in time fails in the sweep
      }
    }
  }

  std::shared_ptr<Hub> hub_;
  int rank_;
  InprocOptions options_;
};

}  // namespace

std::vector<std::unique_ptr<Transport>> MakeInproc(int ranks, const InprocOptions& options) {
  DM_CHECK(ranks >= 1, std::to_string(ranks) + " ranks");
  auto hub = std::make_shared<Hub>(ranks);
  std::vector<std::unique_ptr<Transport>> all;
  for (int r = 0; r < ranks; ++r) all.push_back(std::make_unique<InprocTransport>(hub, r, options));
  return all;
}

}  // namespace disagmoe
