#include "base/error.h"
#include "io/tokenizer.h"

namespace disagmoe {

std::unique_ptr<Tokenizer> LoadSentencePiece(const std::string& path) {
  throw Error({"SentencePiece models cannot be read by this build", path, {}, {},
               "install libsentencepiece-dev, then build again"});
}

}  // namespace disagmoe
