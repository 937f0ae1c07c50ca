// Text to tokens and back.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace disagmoe {

// Any number of threads may use one at a time.
class Tokenizer {
 public:
  virtual ~Tokenizer() = default;
  // Without an end of document. Throws Error if the text cannot be encoded.
  virtual std::vector<int32_t> Encode(const std::string& text) const = 0;
  // Tokens that stand for no text, or that the tokenizer does not know, are left out.
  virtual std::string Decode(const std::vector<int32_t>& tokens) const = 0;
  virtual int64_t vocab_size() const = 0;  // above every token, eod() included
  virtual int32_t eod() const = 0;         // ends a document
  // Whether the tokens of a text are those of its parts, wherever it is cut: it need not be in memory as a whole then.
  virtual bool by_byte() const { return false; }
};

inline constexpr const char* kByteTokenizer = "bytes";

// "bytes", a SentencePiece model FILE.model, or a Hugging Face tokenizer.json or its folder. Throws Error: unreadable,
// damaged, no end of document, not built in.
std::unique_ptr<Tokenizer> LoadTokenizer(const std::string& name);

// Bytes 0..255 are tokens 0..255; 256 ends a document.
inline constexpr int32_t kByteVocab = 257;
inline constexpr int32_t kByteEod = 256;
std::vector<int32_t> EncodeBytes(const std::string& text, bool add_eod);
// Tokens that are no bytes are left out.
std::string DecodeBytes(const std::vector<int32_t>& tokens);

// One of sentencepiece.cc and no_sentencepiece.cc. The end of a document is </s>.
std::unique_ptr<Tokenizer> LoadSentencePiece(const std::string& path);

}  // namespace disagmoe
