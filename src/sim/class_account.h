// Where the time of one worker class goes, and its memory over time. Calls come in order of time.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "schedule/schedule.h"
#include "sim/simulate.h"

namespace disagmoe {

enum class MemoryUse : uint8_t { kActivation, kMessage, kWorkspace };

class ClassAccount {
 public:
  // events: where to record, null = nowhere, and no memory over time either.
  void Begin(int rank, const StaticMemory& parts, int64_t limit_bytes, std::vector<TraceEvent>* events);

  void StartComputing(int64_t now) { Change(now, &computing_, 1); }
  void EndComputing(int64_t begin, int64_t now, const Op& op);
  // One of its four link ends begins or ends to move data.
  void StartLink(int64_t now, bool nvlink, bool receive, int64_t ns);
  void EndLink(int64_t now) { Change(now, &links_, -1); }
  // It waited from `from` to `to`: held by an exchange until `held`, for a message posted at `posted`.
  void Waited(int64_t from, int64_t held, int64_t posted, int64_t to);
  void EndStep(int64_t now, const StepEndCost& cost);
  void Transferred(Stream stream, const std::string& name, int64_t begin, int64_t end, int64_t bytes, int peer);
  void CountBytes(int64_t nic, int64_t nvlink);
  int64_t end_ns() const { return end_; }
  // The times of a step that took step_ns, for all classes together.
  ClassTimes Finish(int64_t step_ns);

  // Memory is looked at when all changes of a moment are known. Take returns whether to call Look then: it has not been
  // said before for this moment. After a Give alone Look need be called only for the timeline.
  bool Take(MemoryUse use, int64_t bytes, const Op& op);
  void Give(MemoryUse use, int64_t bytes) { bytes_[static_cast<int>(use)] -= bytes; }
  void Look(int64_t now);
  ClassMemory TakeMemory();
  int64_t bytes_in_use() const { return bytes_[0] + bytes_[1] + bytes_[2]; }

 private:
  void Change(int64_t now, int* counter, int by);
  void Wait(int64_t from, int64_t to, bool exposed);
  void RecordMemory(int64_t now);
  void Record(Stream stream, const std::string& name, int64_t begin, int64_t end, int64_t bytes = 0, int peer = -1);

  int rank_ = 0;
  std::vector<TraceEvent>* events_ = nullptr;
  int computing_ = 0, links_ = 0;
  int64_t since_ = 0;  // of the last change of the two
  int64_t busy_ = 0;   // computing, overlapped or not
  int64_t end_ = 0;
  ClassTimes times_;
  ClassMemory memory_;
  int64_t bytes_[3] = {0, 0, 0};
  bool changed_ = false;
  Op changed_by_;
  std::optional<Op> peak_by_, over_by_;  // none: the static part
};

}  // namespace disagmoe
