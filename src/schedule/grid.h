// Drawing, for DrawGrid and for the validator's message.
#pragma once

#include <string>

#include "schedule/schedule.h"

namespace disagmoe {

// The last `columns` units of time before a schedule comes to a stop, and what each group waits for.
std::string DrawStuck(const Schedule& schedule, int columns);

}  // namespace disagmoe
