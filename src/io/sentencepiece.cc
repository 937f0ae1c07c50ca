#include <sentencepiece_processor.h>

#include <algorithm>

#include "base/error.h"
#include "io/file.h"
#include "io/tokenizer.h"

namespace disagmoe {
namespace {

constexpr uint64_t kMaxModelBytes = uint64_t{1} << 30;

// The library says on which of its source lines a check failed, perhaps in several lines.
std::string Said(const sentencepiece::util::Status& status) {
  std::string text = status.ToString();
  std::replace_if(text.begin(), text.end(), [](char c) { return c < ' '; }, ' ');
  return text;
}

class SentencePieceTokenizer : public Tokenizer {
 public:
  explicit SentencePieceTokenizer(const std::string& path) : path_(path) {
    const std::string model = ReadTextFile(path, kMaxModelBytes);
    // An empty one parses, as a model without pieces.
    const auto status = model.empty() ? sentencepiece::util::Status() : processor_.LoadFromSerializedProto(model);
    if (model.empty() || !status.ok() || processor_.GetPieceSize() == 0) {
      throw Error({"not a SentencePiece model", path, status.ok() ? "no pieces" : Said(status), {}, {}});
    }
    if (processor_.eos_id() < 0) {
      throw Error({"the tokenizer has no end of document", path, "a model without </s>", "one trained with eos_id", {}});
    }
  }

  std::vector<int32_t> Encode(const std::string& text) const override {
    std::vector<int> ids;
    const auto status = processor_.Encode(text, &ids);
    if (!status.ok()) throw Error({"the text cannot be encoded", path_, Said(status), {}, {}});
    return ids;
  }

  std::string Decode(const std::vector<int32_t>& tokens) const override {
    std::vector<int> known;
    std::copy_if(tokens.begin(), tokens.end(), std::back_inserter(known),
                 [&](int32_t t) { return t >= 0 && t < processor_.GetPieceSize(); });
    std::string text;
    const auto status = processor_.Decode(known, &text);
    if (!status.ok()) throw Error({"the tokens cannot be decoded", path_, Said(status), {}, {}});
    return text;
  }

  int64_t vocab_size() const override { return processor_.GetPieceSize(); }
  int32_t eod() const override { return processor_.eos_id(); }

 private:
  std::string path_;
  sentencepiece::SentencePieceProcessor processor_;
};

}  // namespace

std::unique_ptr<Tokenizer> LoadSentencePiece(const std::string& path) {
  return std::make_unique<SentencePieceTokenizer>(path);
}

}  // namespace disagmoe
