#include "schedule/closed_forms.h"

#include <algorithm>

namespace disagmoe {

double BubbleOneForwardOneBackward(int pp, const ChunkTimes& t) { return (pp - 1) * (t.forward + t.backward); }

double BubbleZeroBubble(int pp, const ChunkTimes& t) { return (pp - 1) * (t.forward + t.backward - 2 * t.weight); }

double BubbleDualPipe(int pp, double pair, const ChunkTimes& t) {
  return (pp / 2.0 - 1) * (pair + t.backward - 3 * t.weight);
}

double StepInterleaved(int positions, int chunks, int micro_batches, const ChunkTimes& t) {
  return (1.0 * micro_batches * chunks + positions - 1) * (t.forward + t.backward);
}

double BubbleRatioInterleaved(int positions, int chunks, int micro_batches) {
  return (positions - 1.0) / (1.0 * micro_batches * chunks);
}

double WarmUpBase(int pp, int virtual_stages, int layers, const LayerTimes& t) {
  return (pp - 1.0) / virtual_stages * (layers * (t.attention + t.ffn + 2 * t.all_to_all) + t.p2p);
}

double WarmUpAfPrinted(int pp, int virtual_stages, const LayerTimes& t) {
  return (pp - 1.0) / (2.0 * virtual_stages) * (std::max(t.attention, t.ffn) + t.m2n);
}

double WarmUpAf(int positions, const LayerTimes& t) { return (positions - 1) * ((t.attention + t.ffn) / 2 + t.m2n); }

}  // namespace disagmoe
