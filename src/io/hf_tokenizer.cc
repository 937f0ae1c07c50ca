#include "io/hf_tokenizer.h"

#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <mutex>
#include <nlohmann/json.hpp>
#include <thread>

#include "base/error.h"

namespace disagmoe {
namespace {

using nlohmann::json;
using Clock = std::chrono::steady_clock;

// Loading takes a second or two for 200 000 tokens; machines are sometimes busy. Encoding: a book takes a second.
constexpr std::chrono::seconds kPatience{300};
constexpr size_t kMaxReply = size_t{1} << 30;

Error CannotStart(const HfProgram& program, int error_number) {
  return Error({"cannot start Python, which runs Hugging Face tokenizers", program.python, std::strerror(error_number),
                {}, "./run setup makes .venv; DISAGMOE_PYTHON names another interpreter with the tokenizers wheel"});
}

std::vector<char*> Pointers(std::vector<std::string>& words) {
  std::vector<char*> pointers;
  for (std::string& word : words) pointers.push_back(word.data());
  pointers.push_back(nullptr);
  return pointers;
}

// The script as a child, our socket its standard input and output. Closing it ends the child.
class Child {
 public:
  Child(const HfProgram& program, std::vector<std::string> words) {
    words.insert(words.begin(), {program.python, program.script});
    int ends[2];
    if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) != 0) throw CannotStart(program, errno);
    socket_ = ends[0];
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_adddup2(&actions, ends[1], STDIN_FILENO);
    posix_spawn_file_actions_adddup2(&actions, ends[1], STDOUT_FILENO);
    const auto argv = Pointers(words);
    const int failed = ::posix_spawnp(&pid_, program.python.c_str(), &actions, nullptr, argv.data(), environ);
    posix_spawn_file_actions_destroy(&actions);
    ::close(ends[1]);
    if (failed != 0) {
      ::close(socket_);
      throw CannotStart(program, failed);
    }
  }

  ~Child() {
    ::close(socket_);
    for (int waited_ms = 0; ::waitpid(pid_, nullptr, WNOHANG) == 0; ++waited_ms) {
      if (waited_ms == 2000) ::kill(pid_, SIGKILL);
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  }

  Child(const Child&) = delete;
  Child& operator=(const Child&) = delete;

  void Write(const std::string& line) {
    const auto until = Clock::now() + kPatience;
    for (size_t at = 0; at < line.size();) {
      Await(POLLOUT, until, "takes no request");
      // No SIGPIPE: a child that ended is an Error of ours.
      const ssize_t n = ::send(socket_, line.data() + at, line.size() - at, MSG_NOSIGNAL | MSG_DONTWAIT);
      if (n < 0 && errno != EAGAIN && errno != EINTR) throw Ended();
      if (n > 0) at += static_cast<size_t>(n);
    }
  }

  std::string ReadLine() {
    const auto until = Clock::now() + kPatience;
    for (;;) {
      const size_t end = unread_.find('\n');
      if (end != std::string::npos) {
        std::string line = unread_.substr(0, end);
        unread_.erase(0, end + 1);
        return line;
      }
      if (unread_.size() > kMaxReply) throw Error({"the tokenizer's process answers without end", {}, {}, {}, {}});
      Await(POLLIN, until, "does not answer");
      char buffer[64 << 10];
      const ssize_t n = ::recv(socket_, buffer, sizeof buffer, MSG_DONTWAIT);
      if (n == 0 || (n < 0 && errno != EAGAIN && errno != EINTR)) throw Ended();
      if (n > 0) unread_.append(buffer, static_cast<size_t>(n));
    }
  }

 private:
  static Error Ended() { return Error({"the tokenizer's process ended", {}, {}, {}, "what it said is above"}); }

  void Await(short events, Clock::time_point until, const char* what) const {
    for (;;) {
      const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(until - Clock::now()).count();
      if (left <= 0) {
        throw Error({std::string("the tokenizer's process ") + what, {},
                     "nothing for " + std::to_string(kPatience.count()) + " s", {}, {}});
      }
      pollfd ready{socket_, events, 0};
      if (::poll(&ready, 1, static_cast<int>(left)) > 0) return;
    }
  }

  pid_t pid_ = -1;
  int socket_ = -1;
  std::string unread_;
};

class HfTokenizer : public Tokenizer {
 public:
  HfTokenizer(const std::string& path, const HfProgram& program)
      : path_(path), child_(program, {"serve", "--tokenizer", path}) {
    const json hello = Reply();
    vocab_size_ = hello.at("vocab_size");
    eod_ = hello.at("eod").is_null() ? -1 : hello.at("eod").get<int32_t>();
  }

  std::vector<int32_t> Encode(const std::string& text) const override {
    return Ask({{"encode", text}}).at("ids").get<std::vector<int32_t>>();
  }
  std::string Decode(const std::vector<int32_t>& tokens) const override {
    return Ask({{"decode", tokens}}).at("text").get<std::string>();
  }
  int64_t vocab_size() const override { return vocab_size_; }
  int32_t eod() const override {
    if (eod_ < 0) {
      throw Error({"which token ends a text?", path_, "no eos_token in tokenizer_config.json", {}, {}});
    }
    return eod_;
  }

 private:
  json Ask(const json& request) const {
    std::string line;
    try {
      line = request.dump() + "\n";
    } catch (const json::exception&) {
      throw Error({"not UTF-8", "text for " + path_, {}, "UTF-8 text", {}});
    }
    const std::lock_guard lock(mutex_);
    child_.Write(line);
    return Reply();
  }

  // The script's faults come as an object with the parts of an Error, or as a word about a request.
  json Reply() const {
    const json reply = json::parse(child_.ReadLine(), nullptr, /*allow_exceptions=*/false);
    if (!reply.is_object()) throw Error({"the tokenizer's process talks nonsense", path_, {}, {}, {}});
    const auto error = reply.find("error");
    if (error == reply.end()) return reply;
    if (!error->is_object()) throw Error({"the tokenizer refuses", path_, error->dump(), {}, {}});
    const auto part = [&](const char* key) { return error->value(key, std::string()); };
    throw Error({part("what"), part("where"), part("got"), part("expected"), part("hint")});
  }

  std::string path_;
  mutable std::mutex mutex_;
  mutable Child child_;
  int64_t vocab_size_ = 0;
  int32_t eod_ = -1;
};

}  // namespace

HfProgram FindHfProgram() {
  HfProgram program{"python3", {}};
  const char* named = std::getenv("DISAGMOE_PYTHON");
  if (named && *named) {
    program.python = named;
  } else if (std::filesystem::exists(DISAGMOE_VENV_PYTHON)) {
    program.python = DISAGMOE_VENV_PYTHON;
  }
  std::error_code ignored;
  const std::filesystem::path folder = std::filesystem::read_symlink("/proc/self/exe", ignored).parent_path();
  program.script = (folder / "hf_tokenizer.py").string();
  if (!std::filesystem::exists(program.script)) {
    throw Error({"a file of the program is missing", program.script, {}, "hf_tokenizer.py beside the program",
                 "copy it there from scripts/"});
  }
  return program;
}

bool IsHfTokenizer(const std::string& name) {
  return name.ends_with(".json") || std::filesystem::is_directory(name);
}

std::unique_ptr<Tokenizer> LoadHfTokenizer(const std::string& path, const HfProgram& program) {
  return std::make_unique<HfTokenizer>(path, program);
}

void ExecHfProgram(const HfProgram& program, const std::vector<std::string>& arguments) {
  std::vector<std::string> words = arguments;
  words.insert(words.begin(), {program.python, program.script});
  ::execvp(program.python.c_str(), Pointers(words).data());
  throw CannotStart(program, errno);
}

}  // namespace disagmoe
