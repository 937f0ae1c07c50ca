// A rank's end: joins in the constructor, then one thread that sends heartbeats and takes what the server says.
#include <errno.h>
#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <condition_variable>
#include <map>
#include <mutex>
#include <thread>

#include "base/time.h"
#include "transport/control.h"
#include "transport/control_socket.h"
#include "transport/control_wire.h"

namespace disagmoe {
namespace {

using namespace control;

constexpr int64_t kMs = 1'000'000;
constexpr int64_t kAnswerTime = 1'000 * kMs;  // of a server on a port that may be somebody else's
constexpr int64_t kVerdictTime = 2'000 * kMs;

int PollFor(int fd, int events, int64_t until) {
  pollfd p = {fd, static_cast<short>(events), 0};
  int64_t left = std::max<int64_t>(0, until - NowNs());
  return poll(&p, 1, static_cast<int>(left / kMs) + 1);
}

// The handshake is short: sends one frame and takes the answer. False: why.
bool Exchange(Channel& channel, MessageType type, const std::string& body, MessageType answer_type, Frame* answer,
              int64_t until, std::string* why) {
  channel.Queue(type, body);
  for (;;) {
    bool open = channel.Flush() && channel.Fill();
    int got = channel.Next(answer, kMaxText);
    if (got == 1 && answer->type == answer_type) return true;
    if (got != 0) *why = "not a control server of this version";
    if (got == 0 && !open) *why = channel.reason();
    if (got != 0 || !open) return false;
    if (NowNs() >= until) {
      *why = "no answer";
      return false;
    }
    PollFor(channel.fd(), POLLIN | (channel.wants_write() ? POLLOUT : 0), until);
  }
}

}  // namespace

struct ControlClient::Impl {
  ControlOptions options;
  std::function<std::string()> status;
  std::function<void(const std::string&)> on_abort;
  std::string server;  // "127.0.0.1:29500"
  bool remote = false; // another host's clock
  std::unique_ptr<Channel> channel;
  Wakeup wakeup;
  std::thread thread;

  mutable std::mutex mutex;
  std::condition_variable changed;
  std::vector<FrameBytes> to_send;
  bool started = false, running = false, stop = false, left = false, aborted = false;  // running: constructed
  std::string refusal, reason;
  FailureKind kind = FailureKind::kUser;
  uint32_t gathers = 0;
  std::map<uint32_t, std::vector<std::string>> parts;
  int64_t offset_ns = 0;

  ClockFilter clock;             // of the thread
  int64_t next_heartbeat_ns = 0, heard_ns = 0;
  int probes = 0;                // heartbeats at once, for the first clock offset

  void Connect();
  bool TryPort(int port, int64_t until, std::string* why, bool* fatal);
  void WaitForStart();
  void Run();
  void Loop();
  void Send(int64_t now);
  void Receive(bool open);
  void TakeFrames();
  void OnFrame(const Frame& frame);
  void OnEcho(const std::string& body);
  void OnPart(const std::string& body);
  void Abort(const std::string& why, FailureKind how);
  void Post(MessageType type, const std::string& body);
  void Close();
  std::string Status() const;
};

void ControlClient::Impl::Connect() {
  const ControlOptions& o = options;
  int64_t end = NowNs() + o.times.join_timeout_ns;
  int64_t pause = 20 * kMs;
  std::string why;
  for (;;) {
    for (int i = 0; i < o.port_span; ++i) {
      bool fatal = false;
      std::string port_why;
      int64_t until = o.port_span == 1 ? end : std::min(end, NowNs() + kAnswerTime);
      if (TryPort(o.port + i, until, &port_why, &fatal)) return;
      server = HostPort(o.host, o.port + i);
      if (fatal && o.port_span == 1) {
        throw Error({"rank " + std::to_string(o.rank) + " was not taken by the control server", server, port_why,
                     "", "all ranks of a run need the same DISAGMOE_SECRET"});
      }
      if (fatal || why.empty() || i == 0) why = port_why;
    }
    if (NowNs() + pause >= end) break;
    std::this_thread::sleep_for(std::chrono::nanoseconds(pause));
    pause = std::min(2 * pause, 500 * kMs);
  }
  std::string where = HostPort(o.host, o.port) + (o.port_span > 1 ? "-" + std::to_string(o.port + o.port_span - 1) : "");
  throw Error({"rank " + std::to_string(o.rank) + " found no control server of this run", where,
               why + " for " + Seconds(o.times.join_timeout_ns), "",
               "is rank 0 (or the launcher) running, are MASTER_ADDR and MASTER_PORT its own, is DISAGMOE_SECRET the same?"});
}

// fatal: the server speaks our language, but has another secret.
bool ControlClient::Impl::TryPort(int port, int64_t until, std::string* why, bool* fatal) {
  const ControlOptions& o = options;
  int fd = control::Connect(o.host, port, std::min(until - NowNs(), 2 * kAnswerTime), why);
  if (fd < 0) return false;
  auto candidate = std::make_unique<Channel>(fd);
  std::string nonce = MakeNonce();
  Frame answer;
  std::string hello = Writer().Bytes(kMagic).U32(kVersion).Bytes(nonce).body();
  until = std::min(until, NowNs() + 5 * kAnswerTime);
  if (!Exchange(*candidate, MessageType::kHello, hello, MessageType::kNonce, &answer, until, why)) return false;
  Reader r(answer.body);
  bool ours = r.Bytes(kMagic.size()) == kMagic && r.U32() == kVersion;
  std::string server_nonce = r.Bytes(kNonceBytes);
  if (!ours || !r.AtEnd()) {
    *why = "not a control server of this version";
    return false;
  }
  std::string host(256, '\0');
  if (gethostname(host.data(), host.size() - 1) != 0) host = "unknown host";
  std::string process = "process " + std::to_string(getpid()) + " on " + host.c_str();
  std::string claim =
      Writer().U32(o.rank).U32(o.world).Text(OneLine(o.role, 100)).Text(OneLine(process, 100)).body();
  std::string proof = Prove(o.secret, "client", nonce, server_nonce, claim) + claim;
  if (!Exchange(*candidate, MessageType::kProof, proof, MessageType::kWelcome, &answer, until, why)) {
    *fatal = !candidate->reason().empty();
    if (*fatal) *why = "it did not accept the secret";
    return false;
  }
  std::string host_id = answer.body.substr(std::min<size_t>(32, answer.body.size()));
  std::string expected = Prove(o.secret, "server", nonce, server_nonce, claim + host_id);
  if (!SameBytes(answer.body.substr(0, 32), expected)) {
    *fatal = true;
    *why = "it does not know the secret";
    return false;
  }
  remote = host_id.empty() || host_id != (o.host_id.empty() ? HostId() : o.host_id);
  server = HostPort(o.host, port);
  channel = std::move(candidate);
  return true;
}

void ControlClient::Impl::WaitForStart() {
  // The server ends the rendezvous in time; this only bounds the wait for a server that forgets.
  int64_t limit = options.times.join_timeout_ns + options.times.silence_ns;
  std::unique_lock lock(mutex);
  changed.wait_for(lock, std::chrono::nanoseconds(limit), [this] {
    return (started && (!remote || probes == 0)) || aborted || !refusal.empty();
  });
  if (!refusal.empty()) throw Error(refusal);
  if (aborted) throw RunAborted(reason, kind);
  if (started) {
    running = true;
  } else {
    throw Error({"rank " + std::to_string(options.rank) + " waited " + Seconds(limit) + " for the other ranks to join",
                 server, "", "", ""});
  }
}

void ControlClient::Impl::Run() {
  try {
    Loop();
  } catch (const std::exception& e) {
    Abort(std::string("rank ") + std::to_string(options.rank) + ": its control thread failed: " + e.what(),
          FailureKind::kInternal);
  }
  channel.reset();
}

void ControlClient::Impl::Loop() {
  heard_ns = next_heartbeat_ns = NowNs();
  TakeFrames();  // what came in together with the welcome
  for (;;) {
    int64_t now = NowNs();
    Send(now);
    bool open = channel->Flush();
    int64_t until = std::min(next_heartbeat_ns, heard_ns + options.times.silence_ns);
    {
      std::lock_guard lock(mutex);
      if (stop || left || aborted || !refusal.empty()) return;
    }
    pollfd fds[2] = {{wakeup.fd(), POLLIN, 0},
                     {channel->fd(), static_cast<short>(POLLIN | (channel->wants_write() ? POLLOUT : 0)), 0}};
    if (open) poll(fds, 2, static_cast<int>(std::max<int64_t>(0, until - now) / kMs) + 1);
    int64_t overslept = NowNs() - until - kMs;
    if (overslept > options.times.heartbeat_ns) heard_ns += overslept;  // this process was stopped or starved
    if (fds[0].revents) wakeup.Clear();
    if (!open || (fds[1].revents & ~POLLOUT)) Receive(open);
    int64_t silent = NowNs() - heard_ns;
    if (silent >= options.times.silence_ns) {
      Abort("the control server at " + server + " stopped answering for " + Seconds(silent), FailureKind::kDeath);
    }
  }
}

void ControlClient::Impl::Send(int64_t now) {
  std::vector<FrameBytes> frames;
  {
    std::lock_guard lock(mutex);
    frames.swap(to_send);
  }
  for (FrameBytes& frame : frames) channel->Queue(std::move(frame));
  if (now < next_heartbeat_ns) return;
  // A server that takes nothing gets no second heartbeat, so that nothing piles up here.
  if (!channel->wants_write()) {
    std::string body = Writer().U64(static_cast<uint64_t>(NowNs())).Bytes(Status()).body();
    channel->Queue(MessageType::kHeartbeat, body);
  }
  next_heartbeat_ns = now + options.times.heartbeat_ns;
}

void ControlClient::Impl::Receive(bool open) {
  bool more = channel->Fill();
  TakeFrames();
  if (open && more) return;
  {
    std::lock_guard lock(mutex);
    if (left || stop || aborted || !refusal.empty()) return;
  }
  Abort("the control server at " + server + " is gone (" + channel->reason() + ")", FailureKind::kDeath);
}

void ControlClient::Impl::TakeFrames() {
  Frame frame;
  for (;;) {
    int got = channel->Next(&frame, kMaxBlob + 8);
    if (got < 0) Abort("the control server at " + server + " sent a malformed message", FailureKind::kInternal);
    if (got <= 0) return;
    heard_ns = NowNs();
    OnFrame(frame);
  }
}

void ControlClient::Impl::OnFrame(const Frame& frame) {
  switch (frame.type) {
    case MessageType::kStart: {
      std::lock_guard lock(mutex);
      started = true;
      break;
    }
    case MessageType::kRefuse: {
      std::lock_guard lock(mutex);
      refusal = OneLine(frame.body, kMaxText);
      break;
    }
    case MessageType::kLeaveAck: {
      std::lock_guard lock(mutex);
      left = true;
      break;
    }
    case MessageType::kEcho: OnEcho(frame.body); break;
    case MessageType::kAsk: next_heartbeat_ns = 0; break;
    case MessageType::kGatherPart: OnPart(frame.body); break;
    case MessageType::kAbort: {
      Reader r(frame.body);
      auto how = static_cast<FailureKind>(r.Integer(1));
      Abort(OneLine(r.Rest(), kMaxText), how);
      break;
    }
    default: break;
  }
  changed.notify_all();
}

void ControlClient::Impl::OnEcho(const std::string& body) {
  if (!remote) return;
  Reader r(body);
  int64_t sent = static_cast<int64_t>(r.U64()), theirs = static_cast<int64_t>(r.U64());
  if (!r.ok()) return;
  clock.Add(sent, theirs, NowNs());
  std::lock_guard lock(mutex);
  offset_ns = clock.offset_ns();
  if (probes > 0 && --probes > 0) next_heartbeat_ns = 0;
}

void ControlClient::Impl::OnPart(const std::string& body) {
  Reader r(body);
  uint32_t sequence = r.U32(), rank = r.U32();
  std::string blob = r.Rest();
  std::lock_guard lock(mutex);
  std::vector<std::string>& all = parts[sequence];
  if (!r.ok() || rank != all.size()) {  // in rank order
    parts.erase(sequence);
    return;
  }
  all.push_back(std::move(blob));
}

void ControlClient::Impl::Abort(const std::string& why, FailureKind how) {
  bool tell;
  {
    std::lock_guard lock(mutex);
    if (aborted) return;
    aborted = true;
    reason = why;
    kind = how;
    tell = running && !stop;
  }
  changed.notify_all();
  if (tell && on_abort) on_abort(why);
}

void ControlClient::Impl::Post(MessageType type, const std::string& body) {
  {
    std::lock_guard lock(mutex);
    to_send.push_back(MakeFrame(type, body));
  }
  wakeup.Set();
}

void ControlClient::Impl::Close() {
  {
    std::lock_guard lock(mutex);
    stop = true;
  }
  wakeup.Set();
  if (thread.joinable()) thread.join();
}

std::string ControlClient::Impl::Status() const {
  try {
    return status ? OneLine(status(), 300) : "";
  } catch (const std::exception& e) {
    return OneLine(std::string("unable to say what it does: ") + e.what(), 300);
  }
}

ControlClient::ControlClient(ControlOptions options, std::function<std::string()> status,
                             std::function<void(const std::string&)> on_abort)
    : impl_(std::make_unique<Impl>()) {
  DM_CHECK(options.world >= 1 && options.rank >= 0 && options.port_span >= 1, "rank, world size or ports out of range");
  if (options.secret.empty()) throw Error("rank " + std::to_string(options.rank) + " has no secret of the run");
  impl_->options = std::move(options);
  impl_->status = std::move(status);
  impl_->on_abort = std::move(on_abort);
  impl_->Connect();
  impl_->probes = impl_->remote ? 8 : 0;
  impl_->thread = std::thread([impl = impl_.get()] { impl->Run(); });
  try {
    impl_->WaitForStart();
  } catch (...) {
    impl_->Close();
    throw;
  }
}

ControlClient::~ControlClient() { impl_->Close(); }

std::vector<std::string> ControlClient::AllGather(const std::string& blob) {
  DM_CHECK(blob.size() <= kMaxBlob, "a blob of " + std::to_string(blob.size()) + " bytes is too long");
  Impl& c = *impl_;
  uint32_t sequence;
  {
    std::lock_guard lock(c.mutex);
    sequence = c.gathers++;
  }
  c.Post(MessageType::kGather, Writer().U32(sequence).Bytes(blob).body());
  int64_t limit = c.options.times.gather_timeout_ns + c.options.times.silence_ns;  // the server's own time-out is first
  std::unique_lock lock(c.mutex);
  auto complete = [&c, sequence] {
    auto at = c.parts.find(sequence);
    return at != c.parts.end() && static_cast<int>(at->second.size()) == c.options.world;
  };
  c.changed.wait_for(lock, std::chrono::nanoseconds(limit), [&] { return complete() || c.aborted || c.left; });
  if (complete()) {
    std::vector<std::string> all = std::move(c.parts[sequence]);
    c.parts.erase(sequence);
    return all;
  }
  if (c.aborted) throw RunAborted(c.reason, c.kind);
  throw Error({"all-gather " + std::to_string(sequence + 1) + " of the control channel did not complete",
               "rank " + std::to_string(c.options.rank), c.left ? "a call after leaving" : "nothing for " + Seconds(limit),
               "", ""});
}

std::string ControlClient::Fail(const std::string& message, FailureKind kind) {
  Impl& c = *impl_;
  c.Post(MessageType::kFail, std::string(1, static_cast<char>(kind)) + OneLine(message, kMaxText - 200));
  std::unique_lock lock(c.mutex);
  c.changed.wait_for(lock, std::chrono::nanoseconds(c.options.times.grace_ns + kVerdictTime),
                     [&c] { return c.aborted || c.left; });
  return c.aborted ? c.reason : message;
}

std::string ControlClient::abort_reason() const {
  std::lock_guard lock(impl_->mutex);
  return impl_->reason;
}

FailureKind ControlClient::abort_kind() const {
  std::lock_guard lock(impl_->mutex);
  return impl_->kind;
}

void ControlClient::Leave() {
  Impl& c = *impl_;
  c.Post(MessageType::kLeave, "");
  std::unique_lock lock(c.mutex);
  c.changed.wait_for(lock, std::chrono::nanoseconds(kVerdictTime), [&c] { return c.left || c.aborted; });
}

int64_t ControlClient::clock_offset_ns() const {
  std::lock_guard lock(impl_->mutex);
  return impl_->offset_ns;
}

}  // namespace disagmoe
