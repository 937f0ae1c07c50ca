// Server and clients over real sockets; the ranks are threads. Real processes: cli/launch_test.cc.
#include "transport/control.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <future>
#include <thread>

#include "base/time.h"
#include "transport/control_socket.h"
#include "transport/control_test_rank.h"
#include "transport/control_wire.h"

namespace disagmoe {
namespace {

using namespace control;
using namespace control_test;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::StartsWith;

TEST(Control, JoinGatherLeave) {
  ControlServer server("127.0.0.1", 0, 3, kSecret, ShortTimes());
  auto body = [](int rank) {
    return [rank](ControlClient& client) {
      std::string large(1 << 20, static_cast<char>('a' + rank));
      std::vector<std::string> first = client.AllGather(rank == 1 ? "" : "blob of " + std::to_string(rank));
      EXPECT_EQ(first, (std::vector<std::string>{"blob of 0", "", "blob of 2"}));
      std::vector<std::string> second = client.AllGather(large);
      ASSERT_EQ(second.size(), 3u);
      for (int r = 0; r < 3; ++r) EXPECT_EQ(second[r], std::string(1 << 20, static_cast<char>('a' + r)));
      EXPECT_EQ(client.clock_offset_ns(), 0);
      client.Leave();
    };
  };
  Rank r2(Options(server, 2, 3), body(2)), r0(Options(server, 0, 3), body(0)), r1(Options(server, 1, 3), body(1));
  EXPECT_TRUE(server.WaitAllLeft(5000 * kMs));
  for (Rank* r : {&r0, &r1, &r2}) {
    r->Join();
    EXPECT_EQ(r->error, "");
    EXPECT_EQ(r->aborts, 0);
  }
  EXPECT_TRUE(server.all_left());
  EXPECT_EQ(server.failure(), "");
}

TEST(Control, ClientsMayStartBeforeTheServer) {
  int port = 0;
  close(Listen("127.0.0.1", 0, 1, &port));
  ControlOptions o;
  o.port = port;
  o.secret = kSecret;
  o.times = ShortTimes();
  Rank early(o, [](ControlClient& c) { c.Leave(); });
  std::this_thread::sleep_for(std::chrono::milliseconds(300));
  ControlServer server("127.0.0.1", port, 1, kSecret, ShortTimes());
  early.Join();
  EXPECT_EQ(early.error, "");
}

TEST(Control, NoServer) {
  int port = 0;
  close(Listen("127.0.0.1", 0, 1, &port));
  ControlOptions o;
  o.port = port;
  o.rank = 1;
  o.world = 2;
  o.secret = kSecret;
  o.times = ShortTimes();
  o.times.join_timeout_ns = 300 * kMs;
  Rank rank(o, [](ControlClient&) {});
  rank.Join();
  EXPECT_THAT(rank.error, HasSubstr("rank 1 found no control server of this run (127.0.0.1:" + std::to_string(port) +
                                    "): got Connection refused for 0.3 s"));
}

TEST(Control, JoinTimeoutNamesTheMissing) {
  ControlTimes times = ShortTimes();
  times.join_timeout_ns = 500 * kMs;
  ControlServer server("127.0.0.1", 0, 4, kSecret, times);
  Rank rank(Options(server, 1, 4), [](ControlClient&) {});
  rank.Join();
  std::string expected = "rendezvous timed out after 0.5 s: missing ranks 0, 2, 3 of 4";
  EXPECT_EQ(rank.error, "aborted: " + expected);
  EXPECT_EQ(rank.aborts, 0);  // the constructor threw
  EXPECT_EQ(server.failure(), expected);
  EXPECT_EQ(server.failure_kind(), FailureKind::kUser);
  Rank late(Options(server, 2, 4), [](ControlClient&) {});
  late.Join();
  EXPECT_EQ(late.error, "aborted: " + expected);
}

TEST(Control, WrongSecretIsRefusedAndDoesNotEndTheRun) {
  ControlTimes times = ShortTimes();
  times.join_timeout_ns = 600 * kMs;
  ControlServer server("127.0.0.1", 0, 2, kSecret, times);
  ControlOptions o = Options(server, 1, 2);
  o.secret = "another secret of a run";
  int64_t start = NowNs();
  Rank wrong(o, [](ControlClient&) {});
  wrong.Join();
  EXPECT_LT(NowNs() - start, 500 * kMs);
  EXPECT_THAT(wrong.error, StartsWith("rank 1 was not taken by the control server (127.0.0.1:"));
  EXPECT_THAT(wrong.error, HasSubstr("DISAGMOE_SECRET"));
  EXPECT_THAT(wrong.error, Not(HasSubstr("another secret of a run")));
  EXPECT_EQ(server.failure(), "");
  ASSERT_TRUE(WaitFor([&] { return server.failure() != ""; }));
  EXPECT_THAT(server.failure(), HasSubstr("dropped 1 connection without the secret of this run, the last from 127.0.0.1"));
}

TEST(Control, SameRankTwice) {
  ControlServer server("127.0.0.1", 0, 3, kSecret, ShortTimes());
  Rank a(Options(server, 1, 3), [](ControlClient&) {}), b(Options(server, 1, 3), [](ControlClient&) {});
  a.Join();
  b.Join();
  EXPECT_THAT(server.failure(), StartsWith("rank 1 joined twice: process "));
  EXPECT_THAT(server.failure(), HasSubstr("127.0.0.1"));
  EXPECT_THAT(a.error, HasSubstr("rank 1 joined twice"));
  EXPECT_THAT(b.error, HasSubstr("rank 1 joined twice"));
}

TEST(Control, StrayRankDoesNotDisturbARunThatHasStarted) {
  ControlServer server("127.0.0.1", 0, 1, kSecret, ShortTimes());
  std::promise<void> go;
  Rank rank(Options(server, 0, 1), [&](ControlClient& c) {
    go.set_value();
    std::this_thread::sleep_for(std::chrono::milliseconds(400));
    c.Leave();
  });
  go.get_future().wait();
  Rank stray(Options(server, 0, 1), [](ControlClient&) {});
  stray.Join();
  EXPECT_THAT(stray.error, HasSubstr("rank 0 joined twice"));
  rank.Join();
  EXPECT_EQ(rank.error, "");
  EXPECT_EQ(server.failure(), "");
}

TEST(Control, WrongWorldSize) {
  ControlServer server("127.0.0.1", 0, 2, kSecret, ShortTimes());
  Rank good(Options(server, 0, 2), [](ControlClient&) {});
  Rank bad(Options(server, 1, 3), [](ControlClient&) {});
  bad.Join();
  good.Join();
  EXPECT_THAT(bad.error, HasSubstr("world size 3, but the control server expects 2"));
  EXPECT_THAT(good.error, StartsWith("aborted: rank 1 (process "));
  EXPECT_THAT(good.error, HasSubstr("world size 3, but the control server expects 2"));
}

TEST(Control, OneReportEndsTheRunForAll) {
  ControlServer server("127.0.0.1", 0, 3, kSecret, ShortTimes());
  std::string verdict;
  std::string expected = "rank 1 (F-group 0 worker 0): loss is not a number in step 7";
  std::atomic<int> joined{0};
  Rank r0(Options(server, 0, 3), [&](ControlClient& c) {
    ++joined;
    c.AllGather("x");
  });
  Rank r1(Options(server, 1, 3), [&](ControlClient& c) {
    ++joined;
    WaitFor([&] { return joined == 3; });
    verdict = c.Fail("loss is not a number in step 7", FailureKind::kInternal);
    EXPECT_EQ(c.abort_kind(), FailureKind::kInternal);
    EXPECT_EQ(c.Fail("again"), expected);
  });
  Rank r2(Options(server, 2, 3), [&](ControlClient& c) {
    ++joined;
    EXPECT_TRUE(WaitFor([&] { return c.abort_reason() != ""; }));
  });
  EXPECT_EQ(r0.WaitAbort(), expected);
  EXPECT_EQ(r1.WaitAbort(), expected);
  EXPECT_EQ(r2.WaitAbort(), expected);
  r0.Join(), r1.Join(), r2.Join();
  EXPECT_EQ(verdict, expected);
  EXPECT_EQ(r0.error, "aborted: " + expected);
  EXPECT_EQ(r0.aborts + r1.aborts + r2.aborts, 3);
  EXPECT_EQ(server.failure(), expected);
  EXPECT_EQ(ExitCode(server.failure_kind()), 3);
}

TEST(Control, DeathWinsOverWhatPeersSawOfIt) {
  ControlServer server("127.0.0.1", 0, 3, kSecret, ShortTimes());
  std::atomic<int> joined{0};
  auto stay = [&](ControlClient& c) {
    ++joined;
    WaitFor([&] { return c.abort_reason() != ""; });
  };
  Rank r0(Options(server, 0, 3), [&](ControlClient& c) {
    ++joined;
    WaitFor([&] { return joined == 3; });
    c.Fail("lost rank 1", FailureKind::kPeerLost);
  });
  Rank r1(Options(server, 1, 3), stay, "in forward of experts layer 3 micro-batch 2 step 7");
  Rank r2(Options(server, 2, 3), stay, "awaiting gradients from rank 1");
  ASSERT_TRUE(WaitFor([&] { return joined == 3; }));
  std::this_thread::sleep_for(std::chrono::milliseconds(60));  // within the grace, after a heartbeat
  server.ReportDeath(1, "killed by signal 9");
  EXPECT_EQ(r2.WaitAbort(),
            "rank 1 (F-group 0 worker 0) was killed by signal 9 while in forward of experts layer 3 micro-batch 2 step 7; "
            "rank 2 (A-group 0 worker 0) was awaiting gradients from rank 1");
}

// Heartbeats are seconds apart; what the message says of the waiter is newer than the last one.
TEST(Control, StatusIsAskedForWhenARankFails) {
  ControlTimes times = ShortTimes();
  times.heartbeat_ns = 5000 * kMs;
  times.silence_ns = 20'000 * kMs;
  ControlServer server("127.0.0.1", 0, 2, kSecret, times);
  ControlOptions o = Options(server, 0, 2), o1 = Options(server, 1, 2);
  o.times = o1.times = times;
  std::atomic<bool> awaiting{false};
  std::promise<std::string> reason;
  std::thread thread([&] {
    ControlClient client(o, [&] { return std::string(awaiting ? "awaiting gradients from rank 1" : "in forward"); },
                         [&](const std::string& why) { reason.set_value(why); });
    WaitFor([&] { return client.abort_reason() != ""; });
  });
  Rank r1(o1, [&](ControlClient& c) {
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
    awaiting = true;
    server.ReportDeath(1, "killed by signal 9");
    WaitFor([&] { return c.abort_reason() != ""; });
  });
  EXPECT_THAT(reason.get_future().get(), HasSubstr("; rank 0 (A-group 0 worker 0) was awaiting gradients from rank 1"));
  thread.join();
}

TEST(Control, GatherThatNeverCompletes) {
  ControlTimes times = ShortTimes();
  times.gather_timeout_ns = 300 * kMs;
  ControlServer server("127.0.0.1", 0, 2, kSecret, times);
  Rank r0(Options(server, 0, 2), [](ControlClient& c) { WaitFor([&] { return c.abort_reason() != ""; }); },
          "loading weights");
  Rank r1(Options(server, 1, 2), [](ControlClient& c) { c.AllGather(""); });
  r1.Join();
  EXPECT_EQ(r1.error,
            "aborted: all-gather 1 of the control channel timed out after 0.3 s: missing rank 0 of 2; "
            "rank 0 (A-group 0 worker 0) is loading weights");
}

TEST(Control, ClosingWithoutLeavingEndsTheRun) {
  ControlServer server("127.0.0.1", 0, 2, kSecret, ShortTimes());
  Rank r0(Options(server, 0, 2), [](ControlClient& c) { WaitFor([&] { return c.abort_reason() != ""; }); });
  Rank r1(Options(server, 1, 2), [](ControlClient&) { std::this_thread::sleep_for(std::chrono::milliseconds(100)); },
          "in forward");
  EXPECT_THAT(r0.WaitAbort(), StartsWith("rank 1 (F-group 0 worker 0) was lost (connection closed) while in forward"));
  EXPECT_EQ(server.failure_kind(), FailureKind::kDeath);
}

TEST(Control, ServerAbort) {
  ControlServer server("127.0.0.1", 0, 1, kSecret, ShortTimes());
  Rank rank(Options(server, 0, 1), [&](ControlClient& c) {
    server.Abort("interrupted by signal 2", FailureKind::kDeath);
    server.Abort("later", FailureKind::kUser);
    WaitFor([&] { return c.abort_reason() != ""; });
    EXPECT_EQ(c.abort_reason(), "interrupted by signal 2");
  });
  EXPECT_EQ(rank.WaitAbort(), "interrupted by signal 2");
}

TEST(Control, StopDeliversTheFailureFirst) {
  for (int round = 0; round < 20; ++round) {
    auto server = std::make_unique<ControlServer>("127.0.0.1", 0, 2, kSecret, ShortTimes());
    std::atomic<int> joined{0};
    auto stay = [&](ControlClient& c) {
      ++joined;
      WaitFor([&] { return c.abort_reason() != ""; });
    };
    Rank r0(Options(*server, 0, 2), stay), r1(Options(*server, 1, 2), stay);
    ASSERT_TRUE(WaitFor([&] { return joined == 2; }));
    server->Abort("the reason", FailureKind::kUser);
    server.reset();
    ASSERT_EQ(r0.WaitAbort(), "the reason");
    ASSERT_EQ(r1.WaitAbort(), "the reason");
  }
}

TEST(Control, ServerGone) {
  auto server = std::make_unique<ControlServer>("127.0.0.1", 0, 1, kSecret, ShortTimes());
  std::atomic<bool> joined{false};
  Rank rank(Options(*server, 0, 1), [&](ControlClient& c) {
    joined = true;
    WaitFor([&] { return c.abort_reason() != ""; });
    EXPECT_EQ(c.abort_kind(), FailureKind::kDeath);
  });
  ASSERT_TRUE(WaitFor([&] { return joined.load(); }));
  server.reset();
  EXPECT_THAT(rank.WaitAbort(), HasSubstr("is gone (connection closed)"));
}

TEST(Control, ServerStopped) {
  int port_pipe[2];
  ASSERT_EQ(pipe(port_pipe), 0);
  pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    ControlServer server("127.0.0.1", 0, 1, kSecret, ShortTimes());
    int port = server.port();
    if (write(port_pipe[1], &port, sizeof port) != sizeof port) _exit(1);
    server.WaitAllLeft(20'000 * kMs);
    _exit(0);
  }
  ControlOptions o;
  ASSERT_EQ(read(port_pipe[0], &o.port, sizeof o.port), static_cast<ssize_t>(sizeof o.port));
  o.secret = kSecret;
  o.times = ShortTimes();
  std::atomic<bool> joined{false};
  Rank rank(o, [&](ControlClient& c) {
    joined = true;
    WaitFor([&] { return c.abort_reason() != ""; });
  });
  ASSERT_TRUE(WaitFor([&] { return joined.load(); }));
  kill(child, SIGSTOP);
  EXPECT_THAT(rank.WaitAbort(), HasSubstr("stopped answering for 1.0 s"));
  kill(child, SIGKILL);
  waitpid(child, nullptr, 0);
  close(port_pipe[0]), close(port_pipe[1]);
}

// Sends bytes to the server and reads until it closes, at most 5 s; what it answered, or "open".
std::string Talk(int port, const std::string& bytes) {
  std::string why;
  int fd = Connect("127.0.0.1", port, 1000 * kMs, &why);
  EXPECT_GE(fd, 0) << why;
  EXPECT_EQ(send(fd, bytes.data(), bytes.size(), MSG_NOSIGNAL), static_cast<ssize_t>(bytes.size()));
  std::string answer;
  int64_t end = NowNs() + 5000 * kMs;
  while (NowNs() < end) {
    pollfd p = {fd, POLLIN, 0};
    if (poll(&p, 1, 100) == 0) continue;
    char chunk[4096];
    ssize_t n = recv(fd, chunk, sizeof chunk, 0);
    if (n <= 0) {
      close(fd);
      return answer;
    }
    answer.append(chunk, n);
  }
  close(fd);
  return "open";
}

TEST(Control, StrangersGetNothing) {
  ControlTimes times = ShortTimes();
  times.join_timeout_ns = 1300 * kMs;
  times.proof_timeout_ns = 700 * kMs;
  ControlServer server("127.0.0.1", 0, 1, kSecret, times);
  int port = server.port();
  std::string hello = *MakeFrame(MessageType::kHello, Writer().Bytes(kMagic).U32(kVersion).Bytes(MakeNonce()).body());
  int64_t start = NowNs();
  auto greeted = std::async(std::launch::async, [port, hello] { return Talk(port, hello); });
  auto idle = std::async(std::launch::async, [port] { return Talk(port, ""); });
  auto half = std::async(std::launch::async, [port, hello] { return Talk(port, hello.substr(0, 20)); });
  EXPECT_EQ(Talk(port, "GET / HTTP/1.1\r\nHost: x\r\n\r\n"), "");
  EXPECT_EQ(Talk(port, std::string(8, '\xff')), "");
  EXPECT_EQ(Talk(port, std::string(4, '\0')), "");
  EXPECT_EQ(Talk(port, *MakeFrame(MessageType::kLeave, "")), "");
  EXPECT_EQ(Talk(port, *MakeFrame(MessageType::kFail, std::string(1, '\0') + "boo")), "");
  std::string hello_only = hello;
  hello_only[10] ^= 1;  // in the magic
  EXPECT_EQ(Talk(port, hello_only), "");
  EXPECT_LT(NowNs() - start, 500 * kMs);  // all of these at once, not by the time-out
  // A nonce is the most that a stranger gets, for its hello; a wrong proof, or a second hello, gets no more.
  size_t nonce_frame = 5 + kMagic.size() + 4 + kNonceBytes;
  EXPECT_LE(Talk(port, hello + *MakeFrame(MessageType::kProof, std::string(80, 'x'))).size(), nonce_frame);
  EXPECT_LE(Talk(port, hello + hello).size(), nonce_frame);
  EXPECT_EQ(idle.get(), "");
  EXPECT_EQ(half.get(), "");
  EXPECT_EQ(greeted.get().size(), nonce_frame);
  EXPECT_GT(NowNs() - start, 650 * kMs);
  EXPECT_LT(NowNs() - start, 1300 * kMs);
  ASSERT_TRUE(WaitFor([&] { return server.failure() != ""; }));
  EXPECT_THAT(server.failure(), HasSubstr("dropped 11 connections without the secret"));
}

TEST(Control, RanksJoinBesideStrangers) {
  ControlServer server("127.0.0.1", 0, 1, kSecret, ShortTimes());
  std::vector<int> strangers;
  std::string why;
  for (int i = 0; i < 400; ++i) {
    int fd = Connect("127.0.0.1", server.port(), 1000 * kMs, &why);
    if (fd >= 0) strangers.push_back(fd);
  }
  Rank rank(Options(server, 0, 1), [](ControlClient& c) { c.Leave(); });
  rank.Join();
  EXPECT_EQ(rank.error, "");
  for (int fd : strangers) close(fd);
}

// A server that knows no secret answers the proof with the client's own proof.
TEST(Control, ReflectedProofIsNoProof) {
  int port = 0;
  int listener = Listen("127.0.0.1", 0, 1, &port);
  std::thread impostor([listener] {
    pollfd p = {listener, POLLIN, 0};
    ASSERT_EQ(poll(&p, 1, 5000), 1);
    Channel channel(accept4(listener, nullptr, nullptr, SOCK_NONBLOCK));
    Frame frame;
    auto next = [&] {
      for (;;) {
        if (!channel.Fill()) return false;
        if (channel.Next(&frame, 4096) == 1) return true;
        pollfd q = {channel.fd(), POLLIN, 0};
        if (poll(&q, 1, 3000) != 1) return false;
      }
    };
    ASSERT_TRUE(next());
    channel.Queue(MessageType::kNonce, Writer().Bytes(kMagic).U32(kVersion).Bytes(frame.body.substr(20)).body());
    ASSERT_TRUE(channel.Flush());
    ASSERT_TRUE(next());
    channel.Queue(MessageType::kWelcome, frame.body.substr(0, 32));
    ASSERT_TRUE(channel.Flush());
    next();
  });
  ControlOptions o;
  o.port = port;
  o.secret = kSecret;
  o.times = ShortTimes();
  Rank rank(o, [](ControlClient&) {});
  rank.Join();
  EXPECT_THAT(rank.error, HasSubstr("it does not know the secret"));
  impostor.join();
  close(listener);
}

TEST(Control, FindsTheRightServerOfSeveralPorts) {
  // A stranger that never answers, a server of another run, ours.
  int port = 0;
  int stranger = -1;
  std::unique_ptr<ControlServer> other, ours;
  for (int attempt = 0; attempt < 20 && !ours; ++attempt) {
    stranger = Listen("127.0.0.1", 0, 1, &port);
    try {
      other = std::make_unique<ControlServer>("127.0.0.1", port + 1, 1, "another run's secret", ShortTimes());
      ours = std::make_unique<ControlServer>("127.0.0.1", port, 1, kSecret, ShortTimes(), 16);
    } catch (const Error&) {
      close(stranger);
    }
  }
  ASSERT_TRUE(ours);
  EXPECT_GE(ours->port(), port + 2);
  EXPECT_LT(ours->port(), port + 16);
  ControlOptions o = Options(*ours, 0, 1);
  o.port = port;
  o.port_span = 16;
  Rank rank(o, [](ControlClient& c) { c.Leave(); });
  rank.Join();
  EXPECT_EQ(rank.error, "");
  EXPECT_TRUE(ours->all_left());
  EXPECT_FALSE(other->all_left());
  EXPECT_THROW(ControlServer("127.0.0.1", ours->port(), 1, kSecret, ShortTimes()), Error);
  close(stranger);
}

TEST(Control, ClockOfAnotherHost) {
  ControlServer server("127.0.0.1", 0, 1, kSecret, ShortTimes());
  ControlOptions o = Options(server, 0, 1);
  o.host_id = "another host";
  int64_t offset = 0, trip = 0;
  int64_t start = NowNs();
  Rank rank(o, [&](ControlClient& c) {
    offset = c.clock_offset_ns();
    trip = NowNs() - start;
    c.Leave();
  });
  rank.Join();
  EXPECT_EQ(rank.error, "");
  // It is the same clock in truth. Half of a round trip bounds the error; all eight took less than `trip`.
  EXPECT_NE(offset, 0);
  EXPECT_LT(std::abs(offset), trip / 8);
}

TEST(Control, StatusThatThrowsIsNoFailure) {
  ControlServer server("127.0.0.1", 0, 1, kSecret, ShortTimes());
  ControlClient client(Options(server, 0, 1), []() -> std::string { throw std::runtime_error("no status"); }, nullptr);
  std::this_thread::sleep_for(std::chrono::milliseconds(120));
  EXPECT_EQ(client.AllGather("x").size(), 1u);
  client.Leave();
}

}  // namespace
}  // namespace disagmoe
