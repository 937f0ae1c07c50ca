// The server's end: one thread that polls the listening socket and a connection per rank.
#include <errno.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <condition_variable>
#include <list>
#include <map>
#include <mutex>
#include <thread>

#include "base/time.h"
#include "transport/control.h"
#include "transport/control_socket.h"
#include "transport/control_state.h"
#include "transport/control_wire.h"

namespace disagmoe {
namespace {

using namespace control;

constexpr int64_t kMs = 1'000'000;
constexpr int64_t kLingerTime = 1'000 * kMs;  // Stop() delivers a failure for so long
constexpr size_t kMaxStrangers = 256;         // unproven connections at a time, besides one per rank

struct Connection {
  explicit Connection(int fd) : channel(fd), peer(PeerOf(fd)), since_ns(NowNs()) {}
  Channel channel;
  AddressText peer;
  int64_t since_ns;
  std::string client_nonce, server_nonce;
  int rank = -1;           // of a joined rank
  bool refused = false;    // has been told why; the peer is to close
  bool closed = false;
  uint32_t gathers = 0;    // blobs that this rank has given
};

struct Gather {
  std::vector<std::string> blobs;
  std::vector<bool> have;
  int count = 0;
};

}  // namespace

struct ControlServer::Impl {
  Impl(int world_size, std::string key, const ControlTimes& t)
      : world(world_size), secret(std::move(key)), times(t), state(world_size, t, NowNs()) {}

  void Run();
  void Serve();
  void Turn(int64_t now);
  int64_t NextDeadline(int64_t now) const;
  void Poll(int64_t until);
  void Accept();
  void Handle(Connection& c, bool readable);
  bool OnFrame(Connection& c, const Frame& frame);
  bool OnHello(Connection& c, const Frame& frame);
  bool OnProof(Connection& c, const Frame& frame);
  void OnJoin(Connection& c, Reader claim);
  bool OnRankFrame(Connection& c, const Frame& frame);
  bool OnGather(Connection& c, const std::string& body);
  void Refuse(Connection& c, const std::string& reason);
  void Close(Connection& c, const std::string& why);
  void Broadcast(const FrameBytes& frame);
  void Linger();
  FrameBytes AbortFrame() const;

  const int world;
  const std::string secret;
  const ControlTimes times;
  int listener = -1;
  int port = 0;
  Wakeup wakeup;

  mutable std::mutex mutex;  // guards state, stop, told
  std::condition_variable changed;
  RunState state;
  bool stop = false;
  bool told = false;         // the failure has been broadcast

  // Of the thread alone:
  std::list<Connection> connections;
  std::map<uint32_t, Gather> gathers;
  bool started = false;
  bool asked = false;
  int64_t accept_again_ns = 0;  // out of descriptors: leave the listener alone until then
  std::thread thread;
};

void ControlServer::Impl::Run() {
  try {
    Serve();
    Linger();
  } catch (const std::exception& e) {
    std::lock_guard lock(mutex);
    state.Abort(std::string("the control server failed: ") + e.what(), FailureKind::kInternal);
  }
  connections.clear();
  changed.notify_all();
}

void ControlServer::Impl::Serve() {
  for (;;) {
    int64_t until;
    {
      std::lock_guard lock(mutex);
      if (stop) return;
      int64_t now = NowNs();
      Turn(now);
      until = NextDeadline(now);
    }
    changed.notify_all();
    Poll(until);
  }
}

// Whatever time or another thread has brought about. Under the mutex.
void ControlServer::Impl::Turn(int64_t now) {
  state.Tick(now);
  if (state.failed() && !told) {
    told = true;
    Broadcast(AbortFrame());
  }
  if (state.pending() && !asked) {  // fresh status lines for the message
    asked = true;
    Broadcast(MakeFrame(MessageType::kAsk, ""));
  }
  if (!started && state.all_joined() && !state.pending() && !state.failed()) {
    started = true;
    Broadcast(MakeFrame(MessageType::kStart, ""));
  }
  for (Connection& c : connections) {
    if (c.rank < 0 && now - c.since_ns > times.proof_timeout_ns) {
      if (!c.refused) state.DroppedStranger(c.peer.host);
      c.closed = true;
    }
    if (!c.closed && !c.channel.Flush()) Close(c, c.channel.reason());
  }
  connections.remove_if([](const Connection& c) { return c.closed; });
}

int64_t ControlServer::Impl::NextDeadline(int64_t now) const {
  // At least as often as heartbeats come, so that Poll() notices when this process does not run.
  int64_t next = std::min(state.NextDeadline(), now + times.heartbeat_ns);
  for (const Connection& c : connections) {
    if (c.rank < 0) next = std::min(next, c.since_ns + times.proof_timeout_ns + kMs);
  }
  return accept_again_ns > now ? std::min(next, accept_again_ns) : next;
}

void ControlServer::Impl::Poll(int64_t until) {
  std::vector<pollfd> fds = {{wakeup.fd(), POLLIN, 0}};
  fds.push_back({accept_again_ns > NowNs() ? -1 : listener, POLLIN, 0});
  std::vector<Connection*> polled;
  for (Connection& c : connections) {
    fds.push_back({c.channel.fd(), static_cast<short>(POLLIN | (c.channel.wants_write() ? POLLOUT : 0)), 0});
    polled.push_back(&c);
  }
  int64_t wait = std::max<int64_t>(0, until - NowNs());
  int n = poll(fds.data(), fds.size(), static_cast<int>(wait / kMs) + 1);
  int64_t overslept = NowNs() - until - kMs;
  std::lock_guard lock(mutex);
  // This process was stopped or starved: what ranks sent meanwhile is read in this very turn, but may be old.
  if (overslept > times.heartbeat_ns) state.Excuse(overslept);
  if (n <= 0) return;
  if (fds[0].revents) wakeup.Clear();
  for (size_t i = 0; i < polled.size(); ++i) {
    if (fds[i + 2].revents) Handle(*polled[i], fds[i + 2].revents & ~POLLOUT);
  }
  if (fds[1].revents) Accept();
}

void ControlServer::Impl::Accept() {
  for (int i = 0; i < 64; ++i) {
    int fd = accept4(listener, nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC);
    if (fd < 0) {
      bool full = errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM;
      if (full) accept_again_ns = NowNs() + 100 * kMs;
      return;
    }
    size_t strangers = std::count_if(connections.begin(), connections.end(), [](auto& c) { return c.rank < 0; });
    if (strangers >= kMaxStrangers + world) {  // the oldest makes room
      for (Connection& c : connections) {
        if (c.rank >= 0 || c.closed) continue;
        c.closed = true;
        break;
      }
    }
    SetNoDelay(fd);
    connections.emplace_back(fd);
  }
}

void ControlServer::Impl::Handle(Connection& c, bool readable) {
  if (c.closed) return;
  bool open = !readable || c.channel.Fill();
  std::string why = c.channel.reason();
  Frame frame;
  while (!c.closed && !c.refused) {
    size_t limit = c.rank < 0 ? kMaxBeforeProof : kMaxBlob + 8;
    int got = c.channel.Next(&frame, limit);
    if (got == 0) break;
    if (got < 0 || !OnFrame(c, frame)) {
      open = false;
      why = "it sent a malformed message";
      break;
    }
  }
  if (!open && !c.closed) Close(c, why);
}

// False: the peer does not follow the protocol.
bool ControlServer::Impl::OnFrame(Connection& c, const Frame& frame) {
  if (c.rank >= 0) return OnRankFrame(c, frame);
  if (c.client_nonce.empty()) return OnHello(c, frame);
  return OnProof(c, frame);
}

bool ControlServer::Impl::OnHello(Connection& c, const Frame& frame) {
  Reader r(frame.body);
  if (frame.type != MessageType::kHello || r.Bytes(kMagic.size()) != kMagic) return false;
  if (r.U32() != kVersion) return false;
  std::string nonce = r.Bytes(kNonceBytes);
  if (!r.AtEnd()) return false;
  c.client_nonce = nonce;
  c.server_nonce = MakeNonce();
  c.channel.Queue(MessageType::kNonce, Writer().Bytes(kMagic).U32(kVersion).Bytes(c.server_nonce).body());
  return true;
}

bool ControlServer::Impl::OnProof(Connection& c, const Frame& frame) {
  Reader r(frame.body);
  std::string proof = r.Bytes(32);
  std::string claim = r.Rest();
  if (frame.type != MessageType::kProof || !r.ok()) return false;
  if (!SameBytes(proof, Prove(secret, "client", c.client_nonce, c.server_nonce, claim))) return false;
  std::string host = HostId();
  c.channel.Queue(MessageType::kWelcome, Prove(secret, "server", c.client_nonce, c.server_nonce, claim + host) + host);
  OnJoin(c, Reader(claim));
  return true;
}

// A proven peer is told why it is not taken; before the start that also ends the run, which could not complete.
void ControlServer::Impl::OnJoin(Connection& c, Reader claim) {
  int64_t rank = claim.U32(), their_world = claim.U32();
  std::string role = OneLine(claim.Text(), 100);
  std::string from = OneLine(claim.Text(), 100) + ", " + c.peer.host;
  std::string why;
  if (!claim.AtEnd()) {
    why = "a rank joined with a malformed message";
  } else if (their_world != world) {
    why = "rank " + std::to_string(rank) + " (" + from + ") was started with world size " +
          std::to_string(their_world) + ", but the control server expects " + std::to_string(world);
  } else if (rank >= world) {
    why = "rank " + std::to_string(rank) + " (" + from + ") is outside of the world of " + std::to_string(world);
  } else if (state.failed()) {
    c.channel.Queue(AbortFrame());
    c.refused = true;
    return;
  } else if (!state.Joined(static_cast<int>(rank), role, from, NowNs())) {
    why = "rank " + std::to_string(rank) + " joined twice: " + state.from(static_cast<int>(rank)) + ", and " + from +
          ". Hint: two processes have the same RANK";
  }
  if (why.empty()) {
    c.rank = static_cast<int>(rank);
    return;
  }
  if (!started) state.Misjoined(why, NowNs());
  Refuse(c, why);
}

void ControlServer::Impl::Refuse(Connection& c, const std::string& reason) {
  c.channel.Queue(MessageType::kRefuse, OneLine(reason, kMaxText));
  c.refused = true;
}

bool ControlServer::Impl::OnRankFrame(Connection& c, const Frame& frame) {
  if (frame.type != MessageType::kGather && frame.body.size() > kMaxText) return false;
  int64_t now = NowNs();
  state.Heard(c.rank, now);
  Reader r(frame.body);
  switch (frame.type) {
    case MessageType::kHeartbeat: {
      uint64_t sent = r.U64();
      state.SetStatus(c.rank, OneLine(r.Rest(), 300));
      c.channel.Queue(MessageType::kEcho, Writer().U64(sent).U64(static_cast<uint64_t>(now)).body());
      return r.ok();
    }
    case MessageType::kGather:
      return OnGather(c, frame.body);
    case MessageType::kFail: {
      uint64_t kind = r.Integer(1);
      if (!r.ok() || kind > static_cast<uint64_t>(FailureKind::kDeath)) return false;
      state.Reported(c.rank, static_cast<FailureKind>(kind), OneLine(r.Rest(), kMaxText - 200), now);
      return true;
    }
    case MessageType::kLeave:
      state.Left(c.rank);
      c.channel.Queue(MessageType::kLeaveAck, "");
      return true;
    default:
      return false;
  }
}

bool ControlServer::Impl::OnGather(Connection& c, const std::string& body) {
  if (!started || body.size() < 4) return false;
  uint32_t sequence = Reader(body).U32();
  if (sequence != c.gathers) return false;
  ++c.gathers;
  Gather& g = gathers[sequence];
  if (g.have.empty()) {
    g.blobs.resize(world);
    g.have.resize(world);
  }
  g.blobs[c.rank] = body.substr(4);
  g.have[c.rank] = true;
  if (++g.count < world) {
    state.GatherWaits(sequence, g.have, NowNs());
    return true;
  }
  for (int rank = 0; rank < world; ++rank) {
    Broadcast(MakeFrame(MessageType::kGatherPart, Writer().U32(sequence).U32(rank).Bytes(g.blobs[rank]).body()));
  }
  gathers.erase(sequence);
  state.GatherDone(sequence);
  return true;
}

void ControlServer::Impl::Close(Connection& c, const std::string& why) {
  c.closed = true;
  if (c.rank >= 0) {
    state.ConnectionLost(c.rank, why, NowNs());
  } else if (!c.refused) {
    state.DroppedStranger(c.peer.host);
  }
}

void ControlServer::Impl::Broadcast(const FrameBytes& frame) {
  for (Connection& c : connections) {
    if (c.rank >= 0 && !c.closed) c.channel.Queue(frame);
  }
}

FrameBytes ControlServer::Impl::AbortFrame() const {
  return MakeFrame(MessageType::kAbort, std::string(1, static_cast<char>(state.kind())) + state.reason());
}

// After a failure: the ranks close once they have read it. Closing first could lose it (a reset).
void ControlServer::Impl::Linger() {
  int64_t end = NowNs() + kLingerTime;
  for (;;) {
    {
      std::lock_guard lock(mutex);
      int64_t now = NowNs();
      if (!state.failed()) return;
      Turn(now);
      connections.remove_if([](const Connection& c) { return c.rank < 0; });
      if (connections.empty() || now >= end) return;
    }
    Poll(end);
  }
}

ControlServer::ControlServer(const std::string& host, int port, int world, std::string secret, ControlTimes times,
                             int port_span) {
  DM_CHECK(world >= 1, "a run has at least one rank");
  if (secret.empty()) throw Error("the control server has no secret");
  impl_ = std::make_unique<Impl>(world, std::move(secret), times);
  impl_->listener = Listen(host, port, port_span, &impl_->port);
  impl_->thread = std::thread([this] { impl_->Run(); });
}

ControlServer::~ControlServer() { Stop(); }

int ControlServer::port() const { return impl_->port; }

void ControlServer::ReportDeath(int rank, const std::string& how) {
  DM_CHECK(rank >= 0 && rank < impl_->world, "no such rank: " + std::to_string(rank));
  {
    std::lock_guard lock(impl_->mutex);
    impl_->state.Died(rank, how, NowNs());
  }
  impl_->wakeup.Set();
}

void ControlServer::Abort(const std::string& reason, FailureKind kind) {
  {
    std::lock_guard lock(impl_->mutex);
    impl_->state.Abort(OneLine(reason, kMaxText - 8), kind);
  }
  impl_->wakeup.Set();
}

std::string ControlServer::failure() const {
  std::lock_guard lock(impl_->mutex);
  return impl_->state.failed() ? impl_->state.reason() : "";
}

FailureKind ControlServer::failure_kind() const {
  std::lock_guard lock(impl_->mutex);
  return impl_->state.kind();
}

bool ControlServer::all_left() const {
  std::lock_guard lock(impl_->mutex);
  return impl_->state.all_left();
}

bool ControlServer::WaitAllLeft(int64_t timeout_ns) {
  std::unique_lock lock(impl_->mutex);
  impl_->changed.wait_for(lock, std::chrono::nanoseconds(timeout_ns), [this] {
    return impl_->state.all_left() || impl_->state.failed() || impl_->stop;
  });
  return impl_->state.all_left();
}

void ControlServer::Stop() {
  {
    std::lock_guard lock(impl_->mutex);
    impl_->stop = true;
  }
  impl_->wakeup.Set();
  if (impl_->thread.joinable()) impl_->thread.join();
  if (impl_->listener >= 0) close(impl_->listener);
  impl_->listener = -1;
}

}  // namespace disagmoe
