// In place of ucx.cc where CMake found no UCX.
#include "transport/ucx.h"

namespace disagmoe {
namespace {

[[noreturn]] void Refuse() {
  throw Error({"this build has no UCX, so ranks cannot be processes",
               {}, {}, {},
               "./run setup installs it; or configure with -DDISAGMOE_UCX=PREFIX; or run the ranks as threads"});
}

}  // namespace

class UcxTransport::Engine {};

UcxTransport::UcxTransport(UcxOptions) { Refuse(); }
UcxTransport::~UcxTransport() = default;
std::string UcxTransport::address() const { Refuse(); }
void UcxTransport::Connect(const std::vector<std::string>&) { Refuse(); }
void UcxTransport::Leave() { Refuse(); }
int UcxTransport::rank() const { Refuse(); }
int UcxTransport::size() const { Refuse(); }
RequestPtr UcxTransport::PostSend(int, const MessageKey&, Buffer) { Refuse(); }
RequestPtr UcxTransport::PostSendStamped(int, const MessageKey&, Buffer, const SendStamps&) { Refuse(); }
RequestPtr UcxTransport::PostRecv(int, const MessageKey&) { Refuse(); }
void UcxTransport::Abort(const std::string&) { Refuse(); }
const TransportCounters& UcxTransport::counters() const { Refuse(); }
Buffer UcxTransport::Allocate(size_t) { Refuse(); }
bool UcxAvailable() { return false; }

}  // namespace disagmoe
