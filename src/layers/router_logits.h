// Router logits whose bits depend on the token's row and the expert's row alone.
#pragma once

#include <ATen/core/Tensor.h>

namespace disagmoe {

// logits [T, E] fp32 = u [T, H] (fp32 or bf16) times w [E, H] fp32, transposed.
//
// A library GEMM takes its sums in an order that depends on the number of rows and on the column, so equal router rows
// would give unequal logits, another layout another choice. Here every dot product is summed in one fixed order: exact
// ties stay exact, and go to the lower expert. On other devices than the CPU it is a GEMM.
void RouterLogits(const at::Tensor& u, const at::Tensor& w, at::Tensor& logits);

}  // namespace disagmoe
