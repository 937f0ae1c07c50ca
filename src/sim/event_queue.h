// What happens when: a binary heap by time, then by the order in which the events were made.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace disagmoe {

struct Event {
  int64_t time = 0;
  uint64_t number = 0;
  int32_t who = 0;
  int32_t flight = 0;
};

class EventQueue {
 public:
  bool empty() const { return heap_.empty(); }
  int64_t next_time() const { return heap_.front().time; }
  void Push(int64_t time, int32_t who, int32_t flight = 0) {
    heap_.push_back({time, number_++, who, flight});
    std::push_heap(heap_.begin(), heap_.end(), Later);
  }
  Event Pop() {
    std::pop_heap(heap_.begin(), heap_.end(), Later);
    const Event event = heap_.back();
    heap_.pop_back();
    return event;
  }

 private:
  static bool Later(const Event& a, const Event& b) {
    return a.time != b.time ? a.time > b.time : a.number > b.number;
  }
  std::vector<Event> heap_;
  uint64_t number_ = 0;
};

}  // namespace disagmoe
