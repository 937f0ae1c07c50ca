// What the two files of the executor share.
#pragma once

#include "runtime/executor.h"

namespace disagmoe {

struct Executor::Attention {
  AttentionSaved saved;
  std::vector<Route> routes;
  Incoming in;   // layer 0: empty
  Tensor tokens; // layer 0
};

struct Executor::Ffn {
  FfnSaved saved;
  std::vector<int64_t> row_begin;   // per source, one more: rows of the source
  std::vector<int64_t> pair_begin;
  std::vector<int64_t> out_begin;   // per destination, one more
};

struct Executor::Head {
  Incoming in;
  Tensor dx;
};

struct Executor::LinkQueue {
  std::vector<Op> ops;  // receives in order of use
  size_t posted = 0, consumed = 0;
  int slots = 2;
};

inline void FinishSend(const std::string& name, Request& request, Waits& waits) {
  waits.Wait(request);
  if (waits.tracing() && !name.empty()) {
    waits.Record(Stream::kSend, name, request.posted_ns(), request.done_ns(),
                 static_cast<int64_t>(request.buffer().size), request.peer());
  }
}

}  // namespace disagmoe
