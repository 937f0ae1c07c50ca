#include "transport/paced.h"

#include <sys/prctl.h>

#include <algorithm>
#include <cmath>
#include <condition_variable>
#include <limits>
#include <mutex>
#include <thread>
#include <vector>

#include "base/time.h"

namespace disagmoe {
namespace {

constexpr int64_t kNever = std::numeric_limits<int64_t>::max();

int64_t HoldNs(size_t bytes, double bytes_per_s) {
  return bytes_per_s > 0 ? std::llround(static_cast<double>(bytes) * 1e9 / bytes_per_s) : 0;
}

// Waits for one side of the NIC.
struct Item {
  RequestPtr outer;
  Buffer buffer;      // of a send
  RequestPtr inner;   // of a receive
  SendStamps stamps;
  int64_t ready_ns = 0;
};

struct Ending {
  int64_t at_ns = 0;
  RequestPtr outer;
  Buffer buffer;
  SendStamps stamps;
};

// One direction of the NIC, in model time: late wake-ups of the thread do not add up.
struct Side {
  double bytes_per_s = 0;
  int64_t free_ns = 0;
  std::vector<Item> queue;  // in order of arrival here

  // When the next transfer starts.
  int64_t NextStart() const {
    int64_t first = kNever;
    for (const Item& item : queue) first = std::min(first, item.ready_ns);
    return first == kNever ? kNever : std::max(first, free_ns);
  }

  Item TakeFor(int64_t start) {
    auto before = [](const Item& a, const Item& b) {
      const bool a_back = a.outer->key().kind == MessageKind::kBackward;
      const bool b_back = b.outer->key().kind == MessageKind::kBackward;
      return a_back != b_back ? a_back : a.ready_ns < b.ready_ns;
    };
    auto best = queue.end();
    for (auto it = queue.begin(); it != queue.end(); ++it) {
      if (it->ready_ns <= start && (best == queue.end() || before(*it, *best))) best = it;
    }
    Item item = std::move(*best);
    queue.erase(best);
    return item;
  }
};

// Shared with the hooks of the inner requests, which may outlive the wrapper.
struct Nic {
  std::mutex mutex;
  std::condition_variable wake;
  Side send, recv;
  std::vector<Ending> endings;
  std::string abort_reason;
  bool aborted = false;
  bool stop = false;
  bool sending = false;  // the thread hands a message to the wire

  void EndAt(Ending ending) {
    {
      std::lock_guard lock(mutex);
      if (!stop) endings.push_back(std::move(ending));
    }
    // Not moved from: nobody is there to wait any more.
    if (ending.outer) ending.outer->Complete(std::move(ending.buffer), ending.stamps);
    wake.notify_all();
  }
};

class PacedTransport : public Transport {
 public:
  PacedTransport(std::unique_ptr<Transport> inner, const PacedOptions& options)
      : inner_(std::move(inner)), options_(options), nic_(std::make_shared<Nic>()) {
    nic_->send.bytes_per_s = options.send_bytes_per_s;
    nic_->recv.bytes_per_s = options.recv_bytes_per_s;
    thread_ = std::thread([this] { Run(); });
  }

  ~PacedTransport() override {
    {
      std::unique_lock lock(nic_->mutex);
      nic_->wake.wait_for(lock, std::chrono::nanoseconds(options_.close_timeout_ns), [&] {
        return nic_->aborted || (nic_->send.queue.empty() && !nic_->sending);
      });
      nic_->stop = true;
    }
    nic_->wake.notify_all();
    thread_.join();
    inner_.reset();  // ends what it still has, through the hooks
    for (Ending& ending : nic_->endings) {
      if (ending.outer->is_send()) ending.outer->Complete({}, ending.stamps);  // it is with the receiver
    }
    FailQueued("the transport was closed");
  }

  int rank() const override { return inner_->rank(); }
  int size() const override { return inner_->size(); }
  const TransportCounters& counters() const override { return counters_; }
  Buffer Allocate(size_t size) override { return inner_->Allocate(size); }

  RequestPtr PostSend(int dst, const MessageKey& key, Buffer buffer) override {
    DM_CHECK(dst >= 0 && dst < size() && dst != rank(), "a send to rank " + std::to_string(dst));
    auto outer = std::make_shared<Request>(true, dst, key);
    counters_.bytes_sent += buffer.size;
    counters_.messages_sent += 1;
    const int64_t now = outer->posted_ns();
    std::unique_lock lock(nic_->mutex);
    if (nic_->aborted) {
      outer->Fail(nic_->abort_reason);
      return outer;
    }
    nic_->send.queue.push_back({outer, std::move(buffer), nullptr, {now, 0, 0}, now});
    lock.unlock();
    nic_->wake.notify_all();
    return outer;
  }

  RequestPtr PostRecv(int src, const MessageKey& key) override {
    auto outer = std::make_shared<Request>(false, src, key);
    RequestPtr inner = inner_->PostRecv(src, key);
    inner->OnDone([nic = nic_, outer, inner] {
      if (inner->state() == Request::State::kFailed) {
        outer->Fail(inner->reason());
        return;
      }
      Item item{outer, {}, inner, inner->stamps(), 0};
      if (item.stamps.start_ns == 0) item.stamps.start_ns = item.stamps.end_ns = NowNs();  // a wire without stamps
      item.ready_ns = item.stamps.start_ns;
      {
        std::lock_guard lock(nic->mutex);
        if (!nic->aborted && !nic->stop) nic->recv.queue.push_back(std::move(item));
      }
      if (item.outer) outer->Fail("the transport was closed or aborted");
      nic->wake.notify_all();
    });
    return outer;
  }

  void Abort(const std::string& reason) override {
    {
      std::lock_guard lock(nic_->mutex);
      if (nic_->aborted) return;
      nic_->aborted = true;
      nic_->abort_reason = reason;
    }
    inner_->Abort(reason);
    FailQueued(reason);
    nic_->wake.notify_all();
  }

 private:
  void Run() {
    prctl(PR_SET_TIMERSLACK, 1000UL);  // wake-ups within microseconds, not the default 50
    std::unique_lock lock(nic_->mutex);
    while (!nic_->stop) {
      const int64_t now = NowNs();
      int64_t next = kNever;
      if (RunSend(lock, now, next) || RunEndings(lock, now, next)) continue;
      RunRecv(now, next);
      if (next == kNever) {
        nic_->wake.wait(lock);
      } else if (next > now) {
        nic_->wake.wait_until(lock, std::chrono::steady_clock::time_point(std::chrono::nanoseconds(next)));
      }
    }
  }

  // Hands the next message to the wire where its time has come. Unlocks while it does.
  bool RunSend(std::unique_lock<std::mutex>& lock, int64_t now, int64_t& next) {
    const int64_t start = nic_->send.NextStart();
    next = std::min(next, start);
    if (start > now) return false;
    Item item = nic_->send.TakeFor(start);
    item.stamps.start_ns = start;
    item.stamps.end_ns = nic_->send.free_ns = start + HoldNs(item.buffer.size, nic_->send.bytes_per_s);
    nic_->sending = true;
    lock.unlock();
    RequestPtr outer = item.outer;
    RequestPtr inner = inner_->PostSendStamped(outer->peer(), outer->key(), std::move(item.buffer), item.stamps);
    inner->OnDone([nic = nic_, outer, inner, stamps = item.stamps] {
      if (inner->state() == Request::State::kFailed) {
        outer->Fail(inner->reason());
      } else {
        nic->EndAt({stamps.end_ns, outer, {}, stamps});
      }
    });
    lock.lock();
    nic_->sending = false;
    nic_->wake.notify_all();
    return true;
  }

  void RunRecv(int64_t now, int64_t& next) {
    Side& side = nic_->recv;
    for (int64_t start; (start = side.NextStart()) <= now;) {
      Item item = side.TakeFor(start);
      side.free_ns = start + HoldNs(item.inner->buffer().size, side.bytes_per_s);
      const int64_t end = std::max(side.free_ns, item.stamps.end_ns) + options_.latency_ns;
      nic_->endings.push_back({end, item.outer, item.inner->buffer(), item.stamps});
      next = std::min(next, end);
    }
    next = std::min(next, side.NextStart());
  }

  bool RunEndings(std::unique_lock<std::mutex>& lock, int64_t now, int64_t& next) {
    auto due = std::partition(nic_->endings.begin(), nic_->endings.end(),
                              [now](const Ending& ending) { return ending.at_ns > now; });
    std::vector<Ending> ended(std::make_move_iterator(due), std::make_move_iterator(nic_->endings.end()));
    nic_->endings.erase(due, nic_->endings.end());
    for (const Ending& ending : nic_->endings) next = std::min(next, ending.at_ns);
    if (ended.empty()) return false;
    lock.unlock();
    for (Ending& ending : ended) {
      if (!ending.outer->is_send()) {
        counters_.bytes_received += ending.buffer.size;
        counters_.messages_received += 1;
      }
      ending.outer->Complete(std::move(ending.buffer), ending.stamps);
    }
    lock.lock();
    return true;
  }

  void FailQueued(const std::string& reason) {
    std::vector<RequestPtr> failed;
    {
      std::lock_guard lock(nic_->mutex);
      for (Side* side : {&nic_->send, &nic_->recv}) {
        for (Item& item : side->queue) failed.push_back(item.outer);
        side->queue.clear();
      }
      for (Ending& ending : nic_->endings) failed.push_back(ending.outer);
      nic_->endings.clear();
    }
    for (auto& request : failed) request->Fail(reason);
  }

  std::unique_ptr<Transport> inner_;
  PacedOptions options_;
  TransportCounters counters_;
  std::shared_ptr<Nic> nic_;
  std::thread thread_;
};

}  // namespace

std::unique_ptr<Transport> MakePaced(std::unique_ptr<Transport> inner, const PacedOptions& options) {
  return std::make_unique<PacedTransport>(std::move(inner), options);
}

}  // namespace disagmoe
