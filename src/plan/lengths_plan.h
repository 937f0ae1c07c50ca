// Layouts for sequences of changing length, where each step has sequences of one length (buckets, rollouts, a
// curriculum) and all steps about as many tokens: the layout that is best in expectation, and the changes of layout
// that would pay.
//
// A layout is who holds which parameters. Sequences a micro-batch, micro-batches, rounds and recomputation are chosen
// for each length: changing them moves nothing. Layouts come from searches at each length and at the mean length (time
// a token grows with the length, so the mean is nearly what counts in expectation), the best of each first. They are
// estimated at every length; the best of them are searched again at every length with their GPUs fixed.
#pragma once

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <vector>

#include "plan/lengths.h"
#include "plan/moving.h"
#include "plan/resize.h"
#include "plan/search.h"

namespace disagmoe {

struct LengthsRequest {
  // One for each schedule; batches are those for sequences of base.seq_length, tokens a step are the same at others.
  std::vector<GridRequest> schedules;
  Lengths lengths;
  std::vector<Phase> phases;  // in order; then lengths are as frequent as in these. Empty: lengths come at random
  double restart_seconds = kRestartSeconds;
  // A batch of a length may be off by this share, else few layouts divide it; times are compared for equal tokens.
  double batch_slack = 0.1;
  size_t most_layouts = 24;  // that are estimated
};

// A layout at a length.
struct LayoutAt {
  bool fits = false;
  Job job;                  // with what is chosen for the length
  std::string text;         // LayoutText
  double step_seconds = kCannot;  // of tokens_a_step
  double tokens_per_gpu = 0;      // a second
  int64_t peak_bytes = 0;
};

struct LayoutRow {
  std::string schedule;
  std::string text;          // the part of LayoutText that no length changes
  std::vector<LayoutAt> at;  // by length
  double expected = kCannot; // seconds a step, over the lengths; kCannot where it cannot do one of them
};

struct LengthsPlan {
  std::vector<int64_t> lengths;  // ascending; with the longest, also where nothing is as long in expectation
  std::vector<double> shares;    // of steps
  double tokens_a_step = 0;
  std::vector<LayoutRow> layouts;  // the best in expectation first
  std::vector<std::vector<MoveCost>> moves;  // [from][to]
  std::vector<int> best;           // layout, by length; -1: nothing fits
  double ideal = kCannot;          // expected seconds a step if changes were free
  std::vector<Phase> phases;
  std::optional<ResizePlan> resizes;  // with phases, unless one of them has no layout
  // With phases: of each but the first, from the layout before it. Else of each length from the best in expectation,
  // there and back; expected_run: steps that a length lasts when lengths come at random.
  std::vector<BreakEven> break_even;
  std::vector<double> expected_run;
  SearchCounts counts;
  bool stopped = false;
  std::optional<ErrorParts> mistake;  // if nothing fits anywhere: why not, of one of them

  const LayoutRow* single() const { return layouts.empty() || layouts[0].expected == kCannot ? nullptr : &layouts[0]; }
  LayoutCosts Costs() const;
  int LengthOf(int64_t tokens) const;
};

// Throws Error for a request that nothing can fulfil.
LengthsPlan PlanForLengths(const LengthsRequest& request, const SearchControl& control);

std::string PrintLengthsPlan(const LengthsPlan& plan);
nlohmann::ordered_json LengthsPlanJson(const LengthsPlan& plan);

}  // namespace disagmoe
