#include "io/tokenizer.h"

#include "base/error.h"
#include "io/hf_tokenizer.h"

namespace disagmoe {
namespace {

class ByteTokenizer : public Tokenizer {
 public:
  std::vector<int32_t> Encode(const std::string& text) const override { return EncodeBytes(text, false); }
  std::string Decode(const std::vector<int32_t>& tokens) const override { return DecodeBytes(tokens); }
  int64_t vocab_size() const override { return kByteVocab; }
  int32_t eod() const override { return kByteEod; }
  bool by_byte() const override { return true; }
};

}  // namespace

std::unique_ptr<Tokenizer> LoadTokenizer(const std::string& name) {
  if (name == kByteTokenizer) return std::make_unique<ByteTokenizer>();
  if (name.ends_with(".model")) return LoadSentencePiece(name);
  if (IsHfTokenizer(name)) return LoadHfTokenizer(name, FindHfProgram());
  throw Error({"unknown tokenizer", name.empty() ? "\"\"" : name, {},
               "\"bytes\", a SentencePiece FILE.model, a Hugging Face tokenizer.json or its folder", {}});
}

std::vector<int32_t> EncodeBytes(const std::string& text, bool add_eod) {
  std::vector<int32_t> tokens;
  tokens.reserve(text.size() + 1);
  for (unsigned char c : text) tokens.push_back(c);
  if (add_eod) tokens.push_back(kByteEod);
  return tokens;
}

std::string DecodeBytes(const std::vector<int32_t>& tokens) {
  std::string text;
  for (int32_t token : tokens) {
    if (token >= 0 && token < 256) text += static_cast<char>(token);
  }
  return text;
}

}  // namespace disagmoe
