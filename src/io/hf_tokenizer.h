// A Hugging Face tokenizer.json, through scripts/hf_tokenizer.py: a Python process beside ours, which has the
// `tokenizers` wheel. Lines of JSON there and back (docs/formats.md).
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "io/tokenizer.h"

namespace disagmoe {

struct HfProgram {
  std::string python;
  std::string script;
};
// The interpreter that DISAGMOE_PYTHON names, else that of .venv when we were built, else python3; the script in the
// folder of this executable. Throws Error if the script is not there.
HfProgram FindHfProgram();

// Whether a tokenizer's name is one for LoadHfTokenizer: FILE.json, or a folder.
bool IsHfTokenizer(const std::string& name);

// Starts the process and waits until it has loaded the tokenizer; it ends with the object. Throws Error: no Python, no
// wheel, no such file, not a tokenizer; later, if the process ended or does not answer. eod() throws if the folder does
// not say which token ends a text.
std::unique_ptr<Tokenizer> LoadHfTokenizer(const std::string& path, const HfProgram& program);

// Becomes the script, which goes on as `arguments` (docs/formats.md) say, with its own output and exit code. Throws
// Error if there is no Python.
[[noreturn]] void ExecHfProgram(const HfProgram& program, const std::vector<std::string>& arguments);

}  // namespace disagmoe
