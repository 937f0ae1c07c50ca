#include "transport/launch_env.h"

#include <algorithm>
#include <cctype>
#include <charconv>
#include <cstdint>
#include <optional>
#include <string_view>

#include "base/error.h"

namespace disagmoe {
namespace {

constexpr int kDefaultPort = 29500;
constexpr int kPortSpan = 16;

class Variables {
 public:
  explicit Variables(const GetEnvFunction& get_env) : get_env_(get_env) {}

  std::optional<std::string> Text(const char* name) const {
    const char* value = get_env_(name);
    if (!value || !*value) return std::nullopt;
    return value;
  }
  std::optional<int> Integer(const char* name, int min, int max) const {
    std::optional<std::string> text = Text(name);
    if (!text) return std::nullopt;
    int value = 0;
    const char* end = text->data() + text->size();
    auto [stop, error] = std::from_chars(text->data(), end, value);
    if (error != std::errc() || stop != end || value < min || value > max) {
      throw Error({"malformed environment variable", name, "'" + *text + "'",
                   "an integer from " + std::to_string(min) + " to " + std::to_string(max), ""});
    }
    return value;
  }

 private:
  const GetEnvFunction& get_env_;
};

constexpr int kMaxRanks = 1 << 20;

// rank and world size from the two variables that must be there together.
bool ReadRanks(const Variables& v, const char* rank_name, const char* world_name, RankEnv* env) {
  std::optional<int> rank = v.Integer(rank_name, 0, kMaxRanks);
  std::optional<int> world = v.Integer(world_name, 1, kMaxRanks);
  if (!rank && !world) return false;
  if (!rank || !world) {
    throw Error({"contradictory environment", std::string(rank ? rank_name : world_name) + " is set", "",
                 std::string(rank ? world_name : rank_name) + " beside it",
                 "set both, or unset both to let disagmoe start the ranks"});
  }
  if (*rank >= *world) {
    throw Error({"contradictory environment", rank_name, std::to_string(*rank),
                 std::string("less than ") + world_name + " = " + std::to_string(*world), ""});
  }
  env->present = true;
  env->rank = *rank;
  env->world = *world;
  return true;
}

// The default is one host: rank in it = rank.
void ReadLocal(const Variables& v, const char* rank_name, const char* world_name, RankEnv* env) {
  std::optional<int> world = v.Integer(world_name, 1, kMaxRanks);
  std::optional<int> rank = v.Integer(rank_name, 0, kMaxRanks);
  env->local_world = world.value_or(env->world);
  env->local_rank = rank.value_or(world && *world < env->world ? env->rank % *world : env->rank);
  if (env->local_world > env->world) {
    throw Error({"contradictory environment", world_name, std::to_string(env->local_world),
                 "at most the world size " + std::to_string(env->world), ""});
  }
  if (env->local_rank >= env->local_world) {
    throw Error({"contradictory environment", rank_name, std::to_string(env->local_rank),
                 "less than the ranks of this host, " + std::to_string(env->local_world), ""});
  }
}

// MASTER_ADDR and MASTER_PORT; `address` and `port` where they are not set. An empty address is an error.
void ReadMaster(const Variables& v, const std::string& address, int port, const std::string& hint, RankEnv* env) {
  env->master_addr = v.Text("MASTER_ADDR").value_or(env->one_host() && address.empty() ? "127.0.0.1" : address);
  if (env->master_addr.empty()) {
    throw Error({"the environment does not say where rank 0 is", env->source, "no MASTER_ADDR",
                 "MASTER_ADDR, since the ranks are on several hosts", hint});
  }
  std::optional<int> given = v.Integer("MASTER_PORT", 1, 65535 - kPortSpan);
  env->master_port = given.value_or(port);
  env->control_port = env->master_port + (env->agent_store ? 1 : 0);
  env->port_span = env->agent_store || !given ? kPortSpan : 1;
}

bool DetectTorchrun(const Variables& v, RankEnv* env) {
  if (!ReadRanks(v, "RANK", "WORLD_SIZE", env)) return false;
  env->source = v.Text("DISAGMOE_LAUNCHER") ? "launcher" : "torchrun";
  ReadLocal(v, "LOCAL_RANK", "LOCAL_WORLD_SIZE", env);
  std::string agent = v.Text("TORCHELASTIC_USE_AGENT_STORE").value_or("");
  std::transform(agent.begin(), agent.end(), agent.begin(), [](unsigned char c) { return std::tolower(c); });
  env->agent_store = agent == "true" || agent == "1";
  ReadMaster(v, "", kDefaultPort, "start with torchrun, or export MASTER_ADDR=<host of rank 0>", env);
  return true;
}

bool DetectOpenMpi(const Variables& v, RankEnv* env) {
  if (!ReadRanks(v, "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", env)) return false;
  env->source = "OpenMPI";
  ReadLocal(v, "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE", env);
  ReadMaster(v, "", kDefaultPort, "mpirun -x MASTER_ADDR=<host of rank 0> -x DISAGMOE_SECRET ...", env);
  return true;
}

// Tasks on node number `node` from SLURM's "4(x2),3": 4, 4, 3. Nothing where it does not say.
std::optional<int> TasksOnNode(const std::string& name, const std::string& text, int node) {
  const char* at = text.data();
  const char* end = at + text.size();
  auto malformed = [&] {
    return Error({"malformed environment variable", name, "'" + text + "'", "a list such as 4(x2),3", ""});
  };
  while (at < end) {
    int tasks = 0, times = 1;
    auto [stop, error] = std::from_chars(at, end, tasks);
    if (error != std::errc() || tasks < 1) throw malformed();
    at = stop;
    if (end - at > 2 && at[0] == '(' && at[1] == 'x') {
      auto [stop2, error2] = std::from_chars(at + 2, end, times);
      if (error2 != std::errc() || times < 1 || stop2 == end || *stop2 != ')') throw malformed();
      at = stop2 + 1;
    }
    if (node < times) return tasks;
    node -= times;
    if (at < end && *at++ != ',') throw malformed();
  }
  return std::nullopt;
}

// As SLURM says it; else an even spread over the nodes.
int SlurmLocalWorld(const Variables& v, const RankEnv& env, const std::string& nodes) {
  int node = v.Integer("SLURM_NODEID", 0, kMaxRanks).value_or(0);
  for (const char* name : {"SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"}) {
    std::optional<std::string> text = v.Text(name);
    std::optional<int> tasks = text ? TasksOnNode(name, *text, node) : std::nullopt;
    if (tasks && *tasks <= env.world && *tasks > env.local_rank) return *tasks;
  }
  int hosts = nodes.empty() ? 1 : static_cast<int>(ExpandHostList(nodes).size());
  return std::max((env.world + hosts - 1) / hosts, env.local_rank + 1);
}

Error MalformedList(const std::string& list) {
  return Error({"malformed SLURM node list", "SLURM_JOB_NODELIST", "'" + list.substr(0, 200) + "'",
                "a list such as node[01-03,7],gpu-b", ""});
}

// One item such as "rack[1-2]node[01-03,7]", its part before `rest` expanded already into `done`.
void ExpandItem(const std::string& list, const std::string& done, std::string_view rest,
                std::vector<std::string>* hosts) {
  size_t open = rest.find('[');
  if (open == std::string_view::npos) {
    if (hosts->size() >= 65536) throw MalformedList(list);
    hosts->push_back(done + std::string(rest));
    return;
  }
  size_t close = rest.find(']', open);
  std::string prefix = done + std::string(rest.substr(0, open));
  std::string_view ranges = rest.substr(open + 1, close - open - 1);
  std::string_view suffix = rest.substr(close + 1);
  while (true) {
    std::string_view range = ranges.substr(0, ranges.find(','));
    std::string_view first = range.substr(0, range.find('-'));
    std::string_view last = first.size() < range.size() ? range.substr(first.size() + 1) : first;
    uint32_t from = 0, to = 0;
    auto a = std::from_chars(first.data(), first.data() + first.size(), from);
    auto b = std::from_chars(last.data(), last.data() + last.size(), to);
    bool whole = a.ptr == first.data() + first.size() && b.ptr == last.data() + last.size();
    if (first.empty() || last.empty() || a.ec != std::errc() || b.ec != std::errc() || !whole || to < from ||
        to - from >= 65536) {
      throw MalformedList(list);
    }
    for (uint64_t n = from; n <= to; ++n) {
      std::string number = std::to_string(n);
      if (number.size() < first.size()) number.insert(0, first.size() - number.size(), '0');  // node[01-03]
      ExpandItem(list, prefix + number, suffix, hosts);
    }
    if (range.size() == ranges.size()) return;
    ranges.remove_prefix(range.size() + 1);
  }
}

bool DetectSlurm(const Variables& v, RankEnv* env) {
  if (!v.Text("SLURM_PROCID") || !v.Text("SLURM_NTASKS")) return false;
  // In an interactive step SLURM_NTASKS may be the whole job's; a batch script has no step of its own.
  const char* tasks = v.Text("SLURM_STEP_NUM_TASKS") ? "SLURM_STEP_NUM_TASKS" : "SLURM_NTASKS";
  if (v.Integer(tasks, 1, kMaxRanks).value_or(1) == 1) return false;
  bool step = v.Text("SLURM_STEP_ID") || v.Text("SLURM_STEPID");
  if (!step && v.Text("ENVIRONMENT").value_or("") == "BATCH") return false;
  ReadRanks(v, "SLURM_PROCID", tasks, env);
  env->source = "SLURM";
  env->local_rank = v.Integer("SLURM_LOCALID", 0, env->world - 1).value_or(0);
  std::string nodes = v.Text("SLURM_STEP_NODELIST").value_or(v.Text("SLURM_JOB_NODELIST").value_or(""));
  env->local_world = SlurmLocalWorld(v, *env, nodes);
  std::string address = nodes.empty() ? "" : ExpandHostList(nodes).front();
  // Jobs that share a node: each its own block of ports, below the ones that the kernel hands out.
  int job = v.Integer("SLURM_JOB_ID", 0, 2'147'483'647).value_or(0);
  ReadMaster(v, address, kDefaultPort + kPortSpan * (job % 200), "export MASTER_ADDR=<host of rank 0>", env);
  return true;
}

}  // namespace

RankEnv DetectRanks(const GetEnvFunction& get_env) {
  Variables v(get_env);
  RankEnv env;
  if (DetectTorchrun(v, &env) || DetectOpenMpi(v, &env) || DetectSlurm(v, &env)) return env;
  return RankEnv();
}

std::string SecretFromEnv(const GetEnvFunction& get_env) {
  std::optional<std::string> secret = Variables(get_env).Text("DISAGMOE_SECRET");
  if (secret && secret->size() >= 16) return *secret;
  throw Error({"the ranks of a run need a common secret", "environment variable DISAGMOE_SECRET",
               secret ? std::to_string(secret->size()) + " characters" : "none", "at least 16 characters",
               "before torchrun, srun or mpirun: export DISAGMOE_SECRET=$(openssl rand -hex 16)"});
}

std::string ControlHost(const RankEnv& env, const std::string& listen) {
  if (env.one_host()) return "127.0.0.1";
  bool any = listen == "0.0.0.0" || listen == "::";
  return any || IsLoopback(listen) ? env.master_addr : listen;
}

std::string ListenHost(const RankEnv& env, const std::string& listen) {
  if (env.one_host()) return "127.0.0.1";
  if (IsLoopback(listen) && !IsLoopback(env.master_addr)) {
    throw Error({"the control server listens on loopback unless told otherwise", "transport.listen", "'" + listen + "'",
                 "an address of rank 0's host that the others reach (MASTER_ADDR is " + env.master_addr + ")",
                 "set transport.listen=" + env.master_addr});
  }
  return listen;
}

bool IsLoopback(const std::string& host) {
  return host.empty() || host == "localhost" || host == "::1" || host.rfind("127.", 0) == 0;
}

std::vector<std::string> ExpandHostList(const std::string& list) {
  std::vector<std::string> hosts;
  size_t start = 0;
  int depth = 0;
  for (size_t i = 0; i <= list.size(); ++i) {
    char c = i < list.size() ? list[i] : ',';
    depth += c == '[' ? 1 : c == ']' ? -1 : 0;
    if (depth < 0 || depth > 1 || (depth == 1 && i == list.size())) throw MalformedList(list);
    if (c != ',' || depth > 0) continue;
    if (i == start) throw MalformedList(list);
    ExpandItem(list, "", std::string_view(list).substr(start, i - start), &hosts);
    start = i + 1;
  }
  return hosts;
}

}  // namespace disagmoe
