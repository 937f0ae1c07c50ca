#include "transport/ucx.h"

#include "base/time.h"
#include "transport/ucx_engine.h"

namespace disagmoe {
namespace {

void CheckPeer(const UcxOptions& options, int peer) {
  DM_CHECK(peer >= 0 && peer < options.size && peer != options.rank,
           "rank " + std::to_string(options.rank) + " exchanges with rank " + std::to_string(peer));
}

}  // namespace

UcxTransport::UcxTransport(UcxOptions options) : engine_(std::make_unique<Engine>(std::move(options))) {}
UcxTransport::~UcxTransport() = default;

std::string UcxTransport::address() const { return engine_->address(); }
void UcxTransport::Connect(const std::vector<std::string>& addresses) { engine_->Connect(addresses); }
void UcxTransport::Leave() { engine_->Leave(); }
int UcxTransport::rank() const { return engine_->options().rank; }
int UcxTransport::size() const { return engine_->options().size; }

RequestPtr UcxTransport::PostSend(int dst, const MessageKey& key, Buffer buffer) {
  return PostSendStamped(dst, key, std::move(buffer), {NowNs(), 0, 0});
}

RequestPtr UcxTransport::PostSendStamped(int dst, const MessageKey& key, Buffer buffer, const SendStamps& stamps) {
  CheckPeer(engine_->options(), dst);
  return engine_->Post(std::make_shared<Request>(true, dst, key), std::move(buffer), stamps);
}

RequestPtr UcxTransport::PostRecv(int src, const MessageKey& key) {
  CheckPeer(engine_->options(), src);
  return engine_->Post(std::make_shared<Request>(false, src, key), {}, {});
}

void UcxTransport::Abort(const std::string& reason) { engine_->Abort(reason); }
const TransportCounters& UcxTransport::counters() const { return engine_->counters(); }
Buffer UcxTransport::Allocate(size_t size) { return engine_->pool().Allocate(size); }
bool UcxAvailable() { return true; }

}  // namespace disagmoe
