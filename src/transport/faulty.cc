#include "transport/faulty.h"

#include <condition_variable>
#include <map>
#include <mutex>
#include <thread>

#include "base/time.h"

namespace disagmoe {
namespace {

class FaultyTransport : public Transport {
 public:
  FaultyTransport(std::unique_ptr<Transport> inner, std::vector<Fault> faults)
      : inner_(std::move(inner)), faults_(std::move(faults)), thread_([this] { Run(); }) {}

  ~FaultyTransport() override {
    {
      std::lock_guard lock(mutex_);
      stop_ = true;
    }
    wake_.notify_all();
    thread_.join();
    FailHeld("the transport was closed");
    inner_.reset();
  }

  int rank() const override { return inner_->rank(); }
  int size() const override { return inner_->size(); }
  const TransportCounters& counters() const override { return inner_->counters(); }
  Buffer Allocate(size_t size) override { return inner_->Allocate(size); }

  RequestPtr PostSend(int dst, const MessageKey& key, Buffer buffer) override {
    return PostSendStamped(dst, key, std::move(buffer), {NowNs(), 0, 0});
  }

  RequestPtr PostSendStamped(int dst, const MessageKey& key, Buffer buffer, const SendStamps& stamps) override {
    std::unique_lock lock(mutex_);
    const Fault* fault = nullptr;
    ++sent_;
    for (const Fault& f : faults_) {
      if (f.message == sent_) fault = &f;
    }
    if (fault && fault->kind == Fault::Kind::kHang) hanging_ = true;
    if ((!fault && !hanging_) || aborted_) {
      lock.unlock();
      return inner_->PostSendStamped(dst, key, std::move(buffer), stamps);
    }
    auto request = std::make_shared<Request>(true, dst, key);
    if (hanging_) {
      held_.push_back(request);
    } else if (fault->kind == Fault::Kind::kDrop) {
      request->Complete({}, stamps);
    } else if (fault->kind == Fault::Kind::kFail) {
      request->Fail("injected fault");
    } else {
      delayed_.emplace(NowNs() + fault->delay_ns, Delayed{request, std::move(buffer), stamps});
      lock.unlock();
      wake_.notify_all();
    }
    return request;
  }

  RequestPtr PostRecv(int src, const MessageKey& key) override {
    {
      std::lock_guard lock(mutex_);
      if (hanging_ && !aborted_) {
        held_.push_back(std::make_shared<Request>(false, src, key));
        return held_.back();
      }
    }
    return inner_->PostRecv(src, key);
  }

  void Abort(const std::string& reason) override {
    {
      std::lock_guard lock(mutex_);
      aborted_ = true;
    }
    inner_->Abort(reason);
    FailHeld(reason);
  }

 private:
  struct Delayed {
    RequestPtr outer;
    Buffer buffer;
    SendStamps stamps;
  };

  void Run() {
    std::unique_lock lock(mutex_);
    while (!stop_) {
      if (delayed_.empty()) {
        wake_.wait(lock);
        continue;
      }
      const auto due = std::chrono::steady_clock::time_point(std::chrono::nanoseconds(delayed_.begin()->first));
      if (std::chrono::steady_clock::now() < due) {
        wake_.wait_until(lock, due);
        continue;
      }
      Delayed message = std::move(delayed_.begin()->second);
      delayed_.erase(delayed_.begin());
      lock.unlock();
      Forward(std::move(message));
      lock.lock();
    }
  }

  void Forward(Delayed message) {
    RequestPtr outer = message.outer;
    RequestPtr inner =
        inner_->PostSendStamped(outer->peer(), outer->key(), std::move(message.buffer), message.stamps);
    inner->OnDone([outer, inner] {
      if (inner->state() == Request::State::kFailed) {
        outer->Fail(inner->reason());
      } else {
        outer->Complete({}, inner->stamps());
      }
    });
  }

  void FailHeld(const std::string& reason) {
    std::vector<RequestPtr> failed;
    {
      std::lock_guard lock(mutex_);
      failed.swap(held_);
      for (auto& [due, message] : delayed_) failed.push_back(message.outer);
      delayed_.clear();
    }
    for (auto& request : failed) request->Fail(reason);
  }

  std::unique_ptr<Transport> inner_;
  const std::vector<Fault> faults_;
  std::mutex mutex_;
  std::condition_variable wake_;
  int sent_ = 0;
  bool hanging_ = false;
  bool aborted_ = false;
  bool stop_ = false;
  std::vector<RequestPtr> held_;
  std::multimap<int64_t, Delayed> delayed_;
  std::thread thread_;  // last: it uses all of the above
};

}  // namespace

std::unique_ptr<Transport> MakeFaulty(std::unique_ptr<Transport> inner, std::vector<Fault> faults) {
  return std::make_unique<FaultyTransport>(std::move(inner), std::move(faults));
}

}  // namespace disagmoe
