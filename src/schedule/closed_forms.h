// Published closed forms: what a schedule's bubble or warm-up should be. Tests compare them with what event models of
// the schedules do; `disagmoe reproduce` prints them. All times in one unit, whichever.
#pragma once

namespace disagmoe {

// Of one chunk (what a pipeline position computes at once for a micro-batch); transfers and head take no time.
struct ChunkTimes {
  double forward = 1;   // F
  double backward = 2;  // B, the whole one: input and weight gradients
  double weight = 1;    // W, the weight gradients within B
};

// Bubble: time in a step in which a position does not compute. PP: pipeline stages.
// (PP - 1)(F + B). 1F1B; PP micro-batches' activations of a chunk at most.
double BubbleOneForwardOneBackward(int pp, const ChunkTimes& t);
// (PP - 1)(F + B - 2 W). ZB1P, which is ZB-H1 of arXiv 2401.10241, table 2: (p - 1)(T_F + T_B - T_W) with T_B = B - W.
// Memory as 1F1B.
double BubbleZeroBubble(int pp, const ChunkTimes& t);
// (PP/2 - 1)(F&B + B - 3 W), F&B a merged forward and backward (F + B where merging hides no computation). DualPipe on
// PP devices and DualPipe-V on PP/2; parameters twice, PP + 1 activations. arXiv 2412.19437, table 2, and DualPipe's
// README.
double BubbleDualPipe(int pp, double pair, const ChunkTimes& t);

// Interleaved 1F1B, and AF-Pipe without transfer time: R positions of v chunks each, M micro-batches, R <= q.
// (M v + R - 1)(F + B); the bubble is (R - 1)/(M v) of the work.
double StepInterleaved(int positions, int chunks, int micro_batches, const ChunkTimes& t);
double BubbleRatioInterleaved(int positions, int chunks, int micro_batches);

// Of one layer and micro-batch.
struct LayerTimes {
  double attention = 1;   // T_a
  double ffn = 1;         // T_f
  double all_to_all = 0;  // T_a2a, dispatch or combine within a colocated group
  double m2n = 0;         // T_M2N, from pool to pool
  double p2p = 0;         // T_p2p, from one pipeline stage to the next
};

// Warm-up bubbles as DisagMoE prints them (arXiv 2605.11005): PP stages in all, v virtual stages, L layers a stage.
// ((PP - 1)/v) [L (T_a + T_f + 2 T_a2a) + T_p2p]: interleaved 1F1B with exposed all-to-alls.
double WarmUpBase(int pp, int virtual_stages, int layers, const LayerTimes& t);
// ((PP - 1)/(2 v)) [max(T_a, T_f) + T_M2N]: AF-Pipe. With L = 1, T_a = T_f, T_M2N = T_a2a, T_p2p = 0 a quarter of it.
double WarmUpAfPrinted(int pp, int virtual_stages, const LayerTimes& t);
// When AF-Pipe's last position starts, which the schedule shows: (R - 1)[(T_a + T_f)/2 + T_M2N] for an even R = 2p: R -
// 1 transfers, R/2 attention and R/2 - 1 FFN stages before it (exactly so for T_a = T_f). With R = PP, v = 1 and the
// assumptions above it is a half of WarmUpBase: the printed form has a further factor of a half.
double WarmUpAf(int positions, const LayerTimes& t);

}  // namespace disagmoe
