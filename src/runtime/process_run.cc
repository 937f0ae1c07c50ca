#include "runtime/process_run.h"

#include <c10/util/Exception.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <thread>

#include "base/error.h"
#include "base/rng.h"
#include "base/time.h"
#include "runtime/local_run.h"
#include "runtime/topology.h"
#include "transport/control.h"
#include "transport/launch_env.h"
#include "transport/ucx.h"

namespace disagmoe {
namespace {

const char* Env(const char* name) { return std::getenv(name); }

std::string RoleOf(const Topology& topology, const Schedule& schedule, int rank) {
  const std::string& group = schedule.groups[topology.group_of_rank(rank)].name;
  const std::string kind = group[0] == 'A' ? "A-group " : group[0] == 'F' ? "F-group " : "group ";
  const int replica = topology.replica_of_rank(rank);
  return (replica == 0 ? "" : "replica " + std::to_string(replica) + " ") + kind + group.substr(1) + " worker " +
         std::to_string(topology.index_in_group(rank));
}

// The run is over by somebody's failure. Waits end at once; a computation that does not is not waited for.
void EndSoon(FailureKind kind) {
  std::thread([kind] {
    std::this_thread::sleep_for(std::chrono::seconds(3));
    _exit(ExitCode(kind));
  }).detach();
}

struct Rank {
  RunConfig config;
  RankEnv env;
  std::string secret;
  bool own_launcher = false;
  bool json = false;
  Status status;
  // In order of construction; destroyed from the last.
  std::unique_ptr<ControlServer> server;  // in rank 0, where others launched
  std::unique_ptr<ControlClient> control;
  std::unique_ptr<Transport> transport;
  UcxTransport* ucx = nullptr;  // inside of `transport`
};

ControlTimes TimesOf(const RunConfig& config) {
  ControlTimes times;
  times.join_timeout_ns = static_cast<int64_t>(config.transport.join_timeout_s * 1e9);
  return times;
}

void Join(Rank& r, std::shared_ptr<std::atomic<Transport*>> abort_target) {
  const int world = r.config.layout.workers();
  if (r.env.world != world) {
    const std::string formula = r.config.layout.replicas > 1 ? "replicas * (p_a * m + p_f * n)" : "p_a * m + p_f * n";
    throw Error({"the number of ranks does not fit the layout", r.env.source, std::to_string(r.env.world) + " ranks",
                 std::to_string(world) + " (layout: " + formula + ")", "start as many ranks, or change layout.*"});
  }
  const Schedule schedule = TrainingSchedule(r.config);
  const Topology topology(r.config, schedule);
  if (!r.own_launcher && r.env.rank == 0) {
    r.server = std::make_unique<ControlServer>(ListenHost(r.env, r.config.transport.listen), r.env.control_port, world,
                                               r.secret, TimesOf(r.config), r.env.port_span);
  }
  ControlOptions options;
  options.host = ControlHost(r.env, r.config.transport.listen);
  options.port = r.env.control_port;
  options.port_span = r.env.port_span;
  options.rank = r.env.rank;
  options.world = world;
  options.secret = r.secret;
  options.role = RoleOf(topology, schedule, r.env.rank);
  options.times = TimesOf(r.config);
  r.status.Doing("joining");
  r.control = std::make_unique<ControlClient>(options, [&r] { return r.status.Line(); },
                                              [abort_target](const std::string& reason) {
                                                if (Transport* t = abort_target->load()) t->Abort(reason);
                                                EndSoon(FailureKind::kDeath);
                                              });
}

void Connect(Rank& r, std::shared_ptr<std::atomic<Transport*>> abort_target) {
  UcxOptions options;
  options.rank = r.env.rank;
  options.size = r.env.world;
  options.token = SeedFor(0x6d32, r.secret);
  options.tls = r.config.transport.tls;
  options.net_devices = r.config.transport.net_devices;
  // UCX would use several interfaces of a host at once, among them slow ones.
  if (options.net_devices.empty() && r.env.one_host()) options.net_devices = "lo";
  auto ucx = std::make_unique<UcxTransport>(options);
  r.ucx = ucx.get();
  r.status.Doing("exchanging addresses");
  ucx->Connect(r.control->AllGather(ucx->address()));
  r.transport = Paced(std::move(ucx), r.config.transport);
  abort_target->store(r.transport.get());
}

std::vector<int64_t> ClockOffsets(Rank& r) {
  std::vector<int64_t> offsets;
  for (const std::string& text : r.control->AllGather(std::to_string(r.control->clock_offset_ns()))) {
    offsets.push_back(std::strtoll(text.c_str(), nullptr, 10));
  }
  return offsets;
}

// Nobody closes its transport before all have finished: closing is not a failure then.
void Finish(Rank& r) {
  r.status.Doing("finishing");
  r.control->AllGather("");
  if (r.env.rank == 0) WriteRunTrace(r.config);
  r.ucx->Leave();
  r.control->Leave();
  if (r.server) r.server->WaitAllLeft(10'000'000'000);
}

// One process tells the reason. Our launcher does, of all that the server knows; elsewhere rank 0, which hosts the server,
// or everybody if that is gone. Who never reached the server speaks for himself.
bool Speaks(const Rank& r, bool told_by_server, const std::string& reason) {
  if (!told_by_server) return !r.control;
  if (r.own_launcher) return false;
  return r.env.rank == 0 || reason.starts_with("the control server");
}

int Failed(Rank& r, const std::string& message, FailureKind kind, bool told = false) {
  std::string verdict = message;
  if (r.control) {
    told = true;
    if (r.control->abort_reason().empty()) {
      verdict = r.control->Fail(message, kind);
    } else {
      verdict = r.control->abort_reason();
      kind = r.control->abort_kind();
    }
  }
  if (r.transport) r.transport->Abort(verdict);
  if (Speaks(r, told, verdict)) {
    std::fprintf(stderr, "disagmoe: error: %s\n", verdict.c_str());
    if (r.json) std::puts(ErrorJson(Error(verdict).parts()).c_str());
  }
  if (r.server) r.server->Stop();
  std::fflush(nullptr);
  _exit(ExitCode(kind));  // destructors of a broken run could wait for peers
}

}  // namespace

int RunProcess(const RunConfig& config, bool json) {
  Rank r;
  r.config = config;
  r.json = json;
  auto abort_target = std::make_shared<std::atomic<Transport*>>(nullptr);
  try {
    r.env = DetectRanks(Env);
    r.own_launcher = r.env.source == "launcher";
    r.secret = SecretFromEnv(Env);
    Join(r, abort_target);
    Connect(r, abort_target);
    RankContext context;
    context.rank = r.env.rank;
    context.local_rank = r.env.local_rank;
    context.transport = r.env.world > 1 ? r.transport.get() : nullptr;
    context.clock_offsets = ClockOffsets(r);
    context.status = &r.status;
    context.json = json;
    TrainRank(r.config, context);
    Finish(r);
    abort_target->store(nullptr);
    return 0;
  } catch (const RunAborted& e) {
    return Failed(r, e.what(), e.kind(), /*told=*/true);
  } catch (const WaitFailed& e) {
    return Failed(r, e.what(), FailureKind::kPeerLost);
  } catch (const Error& e) {
    return Failed(r, e.what(), FailureKind::kUser);
  } catch (const c10::Error& e) {
    return Failed(r, std::string(e.what_without_backtrace()) + " (while " + r.status.Line() + ")", FailureKind::kInternal);
  } catch (const std::exception& e) {
    return Failed(r, std::string(e.what()) + " (while " + r.status.Line() + ")", FailureKind::kInternal);
  }
}

}  // namespace disagmoe
