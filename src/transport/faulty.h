// For tests: a transport that goes wrong on purpose. Faults count the messages this rank sends, from 1.
#pragma once

#include <memory>
#include <vector>

#include "transport/transport.h"

namespace disagmoe {

struct Fault {
  enum class Kind {
    kDelay,  // the message goes out `delay_ns` later
    kDrop,   // the send is done, the message never arrives
    kFail,   // the send fails
    kHang,   // this message and everything posted after it, sends and receives, stay pending until the abort
  };
  Kind kind = Kind::kDrop;
  int message = 1;
  int64_t delay_ns = 0;
};

std::unique_ptr<Transport> MakeFaulty(std::unique_ptr<Transport> inner, std::vector<Fault> faults);

}  // namespace disagmoe
