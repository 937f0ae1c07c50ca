// UCX between processes: what happens when one dies, leaves or aborts. The parent never starts UCX (contexts must be
// made after fork); it passes addresses around, kills, and judges what the ranks say.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <mutex>
#include <thread>

#include "base/time.h"
#include "transport/ucx.h"

namespace disagmoe {
namespace {

using testing::HasSubstr;

constexpr int64_t kMs = 1'000'000;
constexpr int64_t kPatience = 20'000 * kMs;
constexpr size_t kBig = 4 << 20;

void WriteLine(int fd, const std::string& text) {
  const uint32_t size = static_cast<uint32_t>(text.size());
  const std::string framed = std::string(reinterpret_cast<const char*>(&size), 4) + text;
  if (write(fd, framed.data(), framed.size()) != static_cast<ssize_t>(framed.size())) _exit(9);
}

std::string ReadLine(int fd) {
  uint32_t size = 0;
  if (recv(fd, &size, 4, MSG_WAITALL) != 4) return "(nothing)";
  std::string text(size, 0);
  if (size > 0 && recv(fd, text.data(), size, MSG_WAITALL) != static_cast<ssize_t>(size)) return "(nothing)";
  return text;
}

MessageKey Key(int micro_batch) { return {1, MessageKind::kForward, 0, micro_batch}; }

std::string FailureOf(const RequestPtr& request, int64_t timeout_ns = kPatience) {
  try {
    request->Wait(timeout_ns);
  } catch (const Error& e) {
    return e.what();
  }
  return "ok";
}

// What a rank's code sees in its process.
struct Rank {
  int rank;
  int fd;
  std::unique_ptr<UcxTransport> transport;
  std::mutex mutex;
  std::string lost;  // what on_peer_lost said
  void Say(const std::string& text) { WriteLine(fd, text); }
  void AwaitParent() { ReadLine(fd); }
  std::string Lost() {
    std::lock_guard lock(mutex);
    return lost;
  }
  RequestPtr Send(int dst, int m, size_t size) {
    Buffer buffer = transport->Allocate(size);
    if (size > 0) std::memset(buffer.data, dst, size);
    return transport->PostSend(dst, Key(m), std::move(buffer));
  }
  RequestPtr Recv(int src, int m) { return transport->PostRecv(src, Key(m)); }
  // A message there and one back.
  std::string Exchange(int peer, int m, size_t size) {
    RequestPtr send = Send(peer, m, size), recv = Recv(peer, m);
    const std::string a = FailureOf(send), b = FailureOf(recv);
    return a != "ok" ? a : b;
  }
};

using Body = std::function<void(Rank&)>;

class UcxProcesses : public testing::TestWithParam<std::string> {
 protected:
  void SetUp() override {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
    // No single-copy reads there (ucx_context.cc), and without them a death may wedge shared memory.
    if (GetParam() == "shm") GTEST_SKIP();
#endif
  }

  void Start(int ranks, const Body& body, int odd_token_rank = -1) {
    for (int r = 0; r < ranks; ++r) {
      int fds[2];
      ASSERT_EQ(socketpair(AF_UNIX, SOCK_STREAM, 0, fds), 0);
      const timeval timeout{30, 0};
      setsockopt(fds[0], SOL_SOCKET, SO_RCVTIMEO, &timeout, sizeof timeout);
      pids_.push_back(fork());
      if (pids_.back() == 0) {
        close(fds[0]);
        Child(r, ranks, fds[1], body, r == odd_token_rank);
      }
      close(fds[1]);
      fds_.push_back(fds[0]);
    }
    std::string all;
    std::vector<std::string> addresses;
    for (int fd : fds_) addresses.push_back(ReadLine(fd));
    for (int fd : fds_) {
      for (auto& address : addresses) WriteLine(fd, address);
    }
  }

  [[noreturn]] void Child(int rank, int ranks, int fd, const Body& body, bool odd_token) {
    Rank me{rank, fd, nullptr, {}, {}};
    try {
      UcxOptions options;
      options.rank = rank;
      options.size = ranks;
      options.token = odd_token ? 2 : 1;
      options.tls = GetParam() == "shm" ? "posix,cma,self" : "tcp,self";
      options.net_devices = GetParam() == "shm" ? "" : "lo";
      options.max_unexpected_bytes = 16 << 20;
      options.on_peer_lost = [&me](int peer, const std::string& reason) {
        std::lock_guard lock(me.mutex);
        me.lost += "[" + std::to_string(peer) + ": " + reason + "]";
      };
      me.transport = std::make_unique<UcxTransport>(options);
      me.Say(me.transport->address());
      std::vector<std::string> addresses;
      for (int r = 0; r < ranks; ++r) addresses.push_back(ReadLine(fd));
      me.transport->Connect(addresses);
      body(me);
      me.transport.reset();
      me.Say("closed" + me.Lost());
      _exit(0);
    } catch (const std::exception& e) {
      me.Say(std::string("exception: ") + e.what());
      _exit(1);
    }
  }

  std::string Hear(int rank) { return ReadLine(fds_[rank]); }
  void Tell(int rank) { WriteLine(fds_[rank], ""); }
  // Reaped at once, as a launcher must: on shared memory UCX takes a zombie for alive.
  void Kill(int rank) {
    kill(pids_[rank], SIGKILL);
    waitpid(pids_[rank], nullptr, 0);
    pids_[rank] = -1;
  }

  void TearDown() override {
    for (int pid : pids_) {
      if (pid <= 0) continue;
      kill(pid, SIGKILL);
      waitpid(pid, nullptr, 0);
    }
    for (int fd : fds_) close(fd);
  }

  std::vector<int> pids_, fds_;
};

TEST_P(UcxProcesses, DeathOfAPeerFailsItsRequestsAndNoOthers) {
  Start(3, [](Rank& me) {
    for (int peer = 0; peer < 3; ++peer) {
      if (peer != me.rank && me.Exchange(peer, 0, kBig) != "ok") me.Say("first exchange failed");
    }
    RequestPtr recv, send, recv_other;
    if (me.rank == 0) {
      recv = me.Recv(2, 1);
      send = me.Send(2, 2, kBig);  // rank 2 never receives it
      recv_other = me.Recv(1, 5);
    }
    me.Say("ready");
    me.AwaitParent();  // for rank 2 this is the end
    if (me.rank == 0) {
      me.Say(FailureOf(recv));
      me.Say(FailureOf(send));
      me.Say(FailureOf(me.Send(2, 3, 10)));
      me.Say(FailureOf(me.Recv(2, 3)));
      me.Say(me.Lost());
    } else {
      me.Send(0, 5, 1000)->Wait(kPatience);
    }
    me.Say(me.Exchange(1 - me.rank, 4, kBig));
    if (me.rank == 0) me.Say(FailureOf(recv_other));
  });
  for (int r = 0; r < 3; ++r) ASSERT_EQ(Hear(r), "ready");
  const int64_t before = NowNs();
  Kill(2);
  Tell(0);
  EXPECT_THAT(Hear(0), HasSubstr("rank 2 was lost"));
  EXPECT_THAT(Hear(0), HasSubstr("rank 2 was lost"));
  EXPECT_LT(NowNs() - before, 3'000 * kMs);  // measured 20 ms on TCP, up to 600 on shared memory
  EXPECT_THAT(Hear(0), HasSubstr("rank 2 was lost"));
  EXPECT_THAT(Hear(0), HasSubstr("rank 2 was lost"));
  const std::string lost = Hear(0);
  EXPECT_THAT(lost, HasSubstr("[2: rank 2 was lost ("));
  EXPECT_EQ(std::count(lost.begin(), lost.end(), '['), 1) << lost;
  Tell(1);
  EXPECT_EQ(Hear(0), "ok");
  EXPECT_EQ(Hear(1), "ok");
  EXPECT_EQ(Hear(0), "ok");
  EXPECT_THAT(Hear(0), HasSubstr("closed"));
  EXPECT_THAT(Hear(1), HasSubstr("closed"));
}

TEST_P(UcxProcesses, DeathInTheMiddleOfAStream) {
  for (bool victim_sends : {true, false}) {
    Start(3, [victim_sends](Rank& me) {
      std::string failure = "ok";
      if (me.rank != 1) {
        for (int m = 0; failure == "ok"; ++m) {
          const bool sends = (me.rank == 2) == victim_sends;
          RequestPtr request = sends ? me.Send(2 - me.rank, m, 16 << 20) : me.Recv(2 - me.rank, m);
          failure = FailureOf(request);
          if (m == 3) me.Say("streaming");
        }
        me.Say(failure);
      }
      me.Say(me.Exchange(1 - me.rank, 0, kBig));
    });
    ASSERT_EQ(Hear(0), "streaming");
    ASSERT_EQ(Hear(2), "streaming");
    Kill(2);
    EXPECT_THAT(Hear(0), HasSubstr("rank 2 was lost"));
    EXPECT_EQ(Hear(0), "ok");
    EXPECT_EQ(Hear(1), "ok");
    EXPECT_THAT(Hear(0), HasSubstr("closed"));
    EXPECT_EQ(Hear(1), "closed");  // it had nothing to do with rank 2
    TearDown();
    pids_.clear();
    fds_.clear();
  }
}

TEST_P(UcxProcesses, LeavingInOrderIsNoLoss) {
  Start(3, [](Rank& me) {
    for (int peer = 0; peer < 3; ++peer) {
      if (peer != me.rank) me.Say(me.Exchange(peer, 0, kBig));
    }
    if (me.rank == 0) return;
    me.AwaitParent();
    std::this_thread::sleep_for(std::chrono::milliseconds(1000));  // longer than UCX needs to notice
    me.Say(FailureOf(me.Recv(0, 1)));
    me.Say(me.Exchange(3 - me.rank, 2, kBig));
  });
  for (int r = 0; r < 3; ++r) {
    for (int i = 0; i < 2; ++i) EXPECT_EQ(Hear(r), "ok");
  }
  EXPECT_EQ(Hear(0), "closed");
  waitpid(pids_[0], nullptr, 0);
  pids_[0] = -1;
  for (int r : {1, 2}) Tell(r);
  for (int r : {1, 2}) {
    EXPECT_THAT(Hear(r), HasSubstr("rank 0 has closed its transport"));
    EXPECT_EQ(Hear(r), "ok");
    EXPECT_EQ(Hear(r), "closed");
  }
}

TEST_P(UcxProcesses, AbortIsToldToThePeers) {
  Start(2, [](Rank& me) {
    me.Say(me.Exchange(1 - me.rank, 0, kBig));
    if (me.rank == 1) {
      me.transport->Abort("out of memory");
      me.Say(FailureOf(me.Recv(0, 1)));
    } else {
      me.Say(FailureOf(me.Recv(1, 1)));
    }
  });
  EXPECT_EQ(Hear(0), "ok");
  EXPECT_EQ(Hear(1), "ok");
  EXPECT_THAT(Hear(1), HasSubstr("out of memory"));
  EXPECT_THAT(Hear(0), HasSubstr("rank 1 has aborted"));
  EXPECT_EQ(Hear(0), "closed[1: rank 1 has aborted]");
  EXPECT_EQ(Hear(1), "closed");
}

TEST_P(UcxProcesses, NoLossIsReportedAfterLeave) {
  Start(2, [](Rank& me) {
    RequestPtr recv = me.Recv(1 - me.rank, 1);
    me.Say(me.Exchange(1 - me.rank, 0, kBig));
    me.transport->Leave();
    me.AwaitParent();
    me.Say(FailureOf(recv));
  });
  EXPECT_EQ(Hear(0), "ok");
  EXPECT_EQ(Hear(1), "ok");
  Kill(1);
  Tell(0);
  EXPECT_THAT(Hear(0), HasSubstr("rank 1 was lost"));
  EXPECT_EQ(Hear(0), "closed");
}

TEST_P(UcxProcesses, MessagesOfAnotherRunAreDropped) {
  Start(3, [](Rank& me) {
    if (me.rank == 2) {  // has another token
      for (int m : {0, 1}) me.Send(0, m, m == 0 ? 100 : kBig);
      me.AwaitParent();
      return;
    }
    if (me.rank == 0) {
      me.Say(FailureOf(me.Recv(2, 0), 300 * kMs));
      me.Say(FailureOf(me.Recv(2, 1), 50 * kMs));
    }
    me.Say(me.Exchange(1 - me.rank, 0, kBig));
  }, 2);
  EXPECT_THAT(Hear(0), HasSubstr("timed out"));
  EXPECT_THAT(Hear(0), HasSubstr("timed out"));
  EXPECT_EQ(Hear(0), "ok");
  EXPECT_EQ(Hear(1), "ok");
}

TEST_P(UcxProcesses, FloodOfSmallMessagesEndsInAnError) {
  Start(2, [](Rank& me) {
    if (me.rank == 0) {
      me.Say(FailureOf(me.Recv(1, 0)));
      return;
    }
    Buffer buffer = me.transport->Allocate(8192);
    std::memset(buffer.data, 0, buffer.size);
    std::string failure = "ok";
    for (int m = 1; failure == "ok" && m < 40'000; ++m) failure = FailureOf(me.transport->PostSend(0, Key(m), buffer));
  });
  EXPECT_THAT(Hear(0), HasSubstr("bytes of small messages that nobody receives"));
}

INSTANTIATE_TEST_SUITE_P(Wires, UcxProcesses, testing::Values("shm", "tcp"),
                         [](const auto& info) { return info.param; });

}  // namespace
}  // namespace disagmoe
