#include "runtime/local_run.h"

#include <c10/util/Exception.h>

#include <exception>
#include <mutex>
#include <stdexcept>
#include <thread>

#include "base/error.h"
#include "transport/inproc.h"
#include "transport/paced.h"

namespace disagmoe {

std::unique_ptr<Transport> Paced(std::unique_ptr<Transport> transport, const TransportConfig& config) {
  if (!config.paced) return transport;
  PacedOptions options;
  options.send_bytes_per_s = options.recv_bytes_per_s = config.paced_gbps * 1e9 / 8;
  options.latency_ns = static_cast<int64_t>(config.paced_latency_us * 1e3);
  return MakePaced(std::move(transport), options);
}

RunResult RunThreads(const RunConfig& config, const RankContext& base) {
  const int world = config.layout.workers();
  auto transports = MakeInproc(world);
  for (auto& t : transports) t = Paced(std::move(t), config.transport);
  std::mutex mutex;
  std::exception_ptr first;
  RunResult result;
  // The first to fail is the cause; what the others then report is its effect.
  auto failed = [&](std::exception_ptr error) {
    std::lock_guard lock(mutex);
    if (!first) first = error;
    for (auto& t : transports) t->Abort("another rank of this run has failed");
  };
  auto rank_main = [&](int rank) {
    Status status;
    RankContext context = base;
    context.rank = rank;
    context.local_rank = rank;
    context.status = &status;
    context.transport = world > 1 ? transports[rank].get() : nullptr;
    context.clock_offsets.assign(world, 0);
    try {
      RunResult mine = TrainRank(config, context);
      if (rank == 0) result = std::move(mine);
    } catch (const c10::Error& e) {
      failed(std::make_exception_ptr(std::runtime_error(e.what_without_backtrace() + (" (rank " + std::to_string(rank) + " while " + status.Line() + ")"))));
    } catch (...) {
      failed(std::current_exception());
    }
  };
  std::vector<std::thread> threads;
  for (int r = 0; r < world; ++r) threads.emplace_back(rank_main, r);
  for (auto& t : threads) t.join();
  if (first) std::rethrow_exception(first);
  if (base.write_files) WriteRunTrace(config);
  return result;
}

}  // namespace disagmoe
