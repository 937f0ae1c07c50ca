#include "spec/model_shape.h"

#include <gtest/gtest.h>

namespace disagmoe {
namespace {

TEST(ModelShape, PublishedTotal) {
  // safetensors metadata of huggingface.co/Qwen/Qwen3-235B-A22B.
  EXPECT_EQ(LoadModelShape("qwen3-235b-a22b").TotalParams(), 235093634560);
}

}  // namespace
}  // namespace disagmoe
