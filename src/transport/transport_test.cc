// The contract of Transport, over every wire, with ranks as threads.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <thread>

#include "base/rng.h"
#include "base/time.h"
#include "transport/faulty.h"
#include "transport/inproc.h"
#include "transport/paced.h"
#include "transport/ucx.h"

namespace disagmoe {
namespace {

using testing::HasSubstr;

constexpr int64_t kMs = 1'000'000;
constexpr int64_t kPatience = 20'000 * kMs;
using Group = std::vector<std::unique_ptr<Transport>>;

Group MakeUcx(int ranks, const std::string& tls, const std::string& devices) {
  std::vector<std::unique_ptr<UcxTransport>> made;
  std::vector<std::string> addresses;
  for (int r = 0; r < ranks; ++r) {
    UcxOptions options;
    options.rank = r;
    options.size = ranks;
    options.token = 42;
    options.tls = tls;
    options.net_devices = devices;
    made.push_back(std::make_unique<UcxTransport>(options));
    addresses.push_back(made.back()->address());
  }
  Group group;
  for (auto& transport : made) {
    transport->Connect(addresses);
    group.push_back(std::move(transport));
  }
  return group;
}

Group MakeGroup(const std::string& wire, int ranks) {
  if (wire == "inproc") return MakeInproc(ranks);
  if (wire == "ucx_shm") return MakeUcx(ranks, "posix,cma,self", "");
  if (wire == "ucx_tcp") return MakeUcx(ranks, "tcp,self", "lo");
  Group group = MakeInproc(ranks);
  for (auto& t : group) {
    if (wire == "paced") t = MakePaced(std::move(t), {4e9, 4e9, 20'000, 5'000 * kMs});
    if (wire == "faulty") t = MakeFaulty(std::move(t), {});
  }
  return group;
}

// Transports close together, as ranks do: each waits a little for the farewell of the others.
void Close(Group& group) {
  std::vector<std::thread> threads;
  for (auto& t : group) threads.emplace_back([&t] { t.reset(); });
  for (auto& t : threads) t.join();
}

MessageKey Key(int micro_batch, MessageKind kind = MessageKind::kForward) { return {7, kind, 3, micro_batch}; }

void Fill(Buffer& buffer, uint64_t seed) {
  Rng rng(seed);
  for (size_t i = 0; i < buffer.size; i += 8) {
    const uint64_t word = rng.Next();
    std::memcpy(buffer.data + i, &word, std::min<size_t>(8, buffer.size - i));
  }
}

bool Holds(const Buffer& buffer, size_t size, uint64_t seed) {
  if (buffer.size != size) return false;
  Rng rng(seed);
  for (size_t i = 0; i < size; i += 8) {
    const uint64_t word = rng.Next();
    if (std::memcmp(buffer.data + i, &word, std::min<size_t>(8, size - i)) != 0) return false;
  }
  return true;
}

Buffer Filled(Transport& transport, size_t size, uint64_t seed) {
  Buffer buffer = transport.Allocate(size);
  Fill(buffer, seed);
  return buffer;
}

std::string FailureOf(const RequestPtr& request, int64_t timeout_ns = kPatience) {
  try {
    request->Wait(timeout_ns);
  } catch (const Error& e) {
    return e.what();
  }
  return "";
}

class Contract : public testing::TestWithParam<std::string> {
 protected:
  void Start(int ranks) { group_ = MakeGroup(GetParam(), ranks); }
  void TearDown() override { Close(group_); }
  Transport& at(int rank) { return *group_[rank]; }
  Group group_;
};

TEST_P(Contract, EverySizeArrivesWhole) {
  Start(2);
  const size_t sizes[] = {0, 1, 63, 8192, 8193, 65535, 1 << 20, 16 << 20};
  for (bool receive_first : {true, false}) {
    int n = 0;
    for (size_t size : sizes) {
      const MessageKey key = Key(n++);
      RequestPtr recv;
      if (receive_first) recv = at(1).PostRecv(0, key);
      const int64_t before = NowNs();
      RequestPtr send = at(0).PostSend(1, key, Filled(at(0), size, size + 1));
      const int64_t after = NowNs();
      if (!receive_first) recv = at(1).PostRecv(0, key);
      recv->Wait(kPatience);
      send->Wait(kPatience);
      EXPECT_TRUE(Holds(recv->buffer(), size, size + 1)) << size;
      EXPECT_GE(recv->sender_posted_ns(), before);
      EXPECT_LE(recv->sender_posted_ns(), after);
      EXPECT_GE(recv->done_ns(), recv->sender_posted_ns());
    }
  }
}

TEST_P(Contract, MatchesByKeyNotByOrder) {
  Start(3);
  std::vector<RequestPtr> sends, recvs;
  for (int m = 0; m < 10; ++m) {
    for (int src : {1, 2}) {
      const size_t size = m % 2 ? 100 : 100'000;
      sends.push_back(at(src).PostSend(0, Key(m), Filled(at(src), size, 100 * src + m)));
    }
  }
  for (int m = 9; m >= 0; --m) {
    for (int src : {1, 2}) recvs.push_back(at(0).PostRecv(src, Key(m)));
  }
  for (auto& r : recvs) {
    r->Wait(kPatience);
    const int m = r->key().micro_batch;
    EXPECT_TRUE(Holds(r->buffer(), m % 2 ? 100 : 100'000, 100 * r->peer() + m)) << r->Describe();
  }
}

TEST_P(Contract, EveryFieldOfTheKeyCounts) {
  Start(2);
  const MessageKey base{1, MessageKind::kForward, 1, 1};
  std::vector<MessageKey> keys(5, base);
  keys[1].step = 2;
  keys[2].kind = MessageKind::kCollective;
  keys[3].stage = -1;
  keys[4].micro_batch = 2;
  std::vector<RequestPtr> recvs;
  for (const auto& key : keys) recvs.push_back(at(1).PostRecv(0, key));
  for (int i = 4; i >= 0; --i) at(0).PostSend(1, keys[i], Filled(at(0), 40, i))->Wait(kPatience);
  for (int i = 0; i < 5; ++i) {
    recvs[i]->Wait(kPatience);
    EXPECT_TRUE(Holds(recvs[i]->buffer(), 40, i)) << i;
  }
}

TEST_P(Contract, LargePayloadWaitsForItsReceive) {
  Start(2);
  RequestPtr send = at(0).PostSend(1, Key(0), Filled(at(0), 4 << 20, 5));
  EXPECT_THAT(FailureOf(send, 150 * kMs), HasSubstr("timed out"));
  EXPECT_EQ(at(1).counters().bytes_received, 0u);
  // What is behind it is not held up.
  RequestPtr small = at(0).PostSend(1, Key(1), Filled(at(0), 10, 6));
  RequestPtr got = at(1).PostRecv(0, Key(1));
  got->Wait(kPatience);
  RequestPtr recv = at(1).PostRecv(0, Key(0));
  recv->Wait(kPatience);
  send->Wait(kPatience);
  EXPECT_TRUE(Holds(recv->buffer(), 4 << 20, 5));
}

TEST_P(Contract, BufferIsFreeOnceTheSendIsDone) {
  Start(2);
  for (size_t size : {200, 2 << 20}) {
    Buffer buffer = Filled(at(0), size, 1);
    RequestPtr recv = at(1).PostRecv(0, Key(0));
    at(0).PostSend(1, Key(0), buffer)->Wait(kPatience);
    Fill(buffer, 2);
    recv->Wait(kPatience);
    EXPECT_TRUE(Holds(recv->buffer(), size, 1));
  }
}

TEST_P(Contract, SecondMessageWithAKeyStopsTheReceiver) {
  Start(2);
  RequestPtr other = at(1).PostRecv(0, Key(5));
  std::vector<RequestPtr> sends;
  for (int i = 0; i < 2; ++i) sends.push_back(at(0).PostSend(1, Key(0), Filled(at(0), 100, i)));
  EXPECT_THAT(FailureOf(other), HasSubstr("rank 0 sent " + Key(0).Describe() + " twice"));
}

TEST_P(Contract, KeyIsFreeAgainOnceTaken) {
  Start(2);
  for (int i = 0; i < 3; ++i) {
    RequestPtr send = at(0).PostSend(1, Key(0), Filled(at(0), 100, i));
    RequestPtr recv = at(1).PostRecv(0, Key(0));
    recv->Wait(kPatience);
    send->Wait(kPatience);
    EXPECT_TRUE(Holds(recv->buffer(), 100, i));
  }
}

TEST_P(Contract, SecondReceiveOfAKeyIsRefused) {
  Start(2);
  RequestPtr first = at(1).PostRecv(0, Key(0));
  EXPECT_THAT(FailureOf(at(1).PostRecv(0, Key(0))), HasSubstr("already posted"));
  RequestPtr send = at(0).PostSend(1, Key(0), Filled(at(0), 100, 1));
  first->Wait(kPatience);
  EXPECT_TRUE(Holds(first->buffer(), 100, 1));
}

TEST_P(Contract, TimeOutNamesWhatWasAwaited) {
  Start(2);
  const int64_t before = NowNs();
  EXPECT_EQ(FailureOf(at(1).PostRecv(0, {7, MessageKind::kForward, 3, 2}), 100 * kMs),
            "timed out after 0.1 s waiting for activations over boundary 3 (FFN of layer 1 to what follows), "
            "micro-batch 2, from rank 0");
  EXPECT_GE(NowNs() - before, 100 * kMs);
  EXPECT_LT(NowNs() - before, 5'000 * kMs);
}

TEST_P(Contract, AbortEndsWaitsAndLaterPosts) {
  Start(2);
  RequestPtr recv = at(1).PostRecv(0, Key(0));
  RequestPtr send = at(1).PostSend(0, Key(1), Filled(at(1), 1 << 20, 1));
  std::string heard;
  std::thread waiter([&] { heard = FailureOf(recv); });
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  const int64_t before = NowNs();
  at(1).Abort("the data loader failed");
  at(1).Abort("a later reason");
  waiter.join();
  EXPECT_LT(NowNs() - before, 2'000 * kMs);
  EXPECT_THAT(heard, HasSubstr("could not receive"));
  for (const std::string& text :
       {heard, FailureOf(send), FailureOf(at(1).PostRecv(0, Key(3))), FailureOf(at(1).PostSend(0, Key(4), {}))}) {
    EXPECT_THAT(text, HasSubstr("the data loader failed"));
  }
}

TEST_P(Contract, OneNeverExchangesWithOneself) {
  Start(2);
  EXPECT_THROW(at(0).PostRecv(0, Key(0)), InternalError);
  EXPECT_THROW(at(0).PostSend(2, Key(0), {}), InternalError);
}

TEST_P(Contract, ClosingDeliversWhatWasSent) {
  Start(2);
  RequestPtr never = at(1).PostRecv(0, Key(9));
  RequestPtr send = at(0).PostSend(1, Key(0), Filled(at(0), 3 << 20, 3));
  RequestPtr small = at(0).PostSend(1, Key(1), Filled(at(0), 30, 4));
  std::thread closer([&] { group_[0].reset(); });
  std::this_thread::sleep_for(std::chrono::milliseconds(100));
  RequestPtr recv = at(1).PostRecv(0, Key(0)), recv_small = at(1).PostRecv(0, Key(1));
  recv->Wait(kPatience);
  recv_small->Wait(kPatience);
  closer.join();
  EXPECT_TRUE(Holds(recv->buffer(), 3 << 20, 3));
  EXPECT_TRUE(Holds(recv_small->buffer(), 30, 4));
  EXPECT_EQ(FailureOf(send), "");
  EXPECT_THAT(FailureOf(never), HasSubstr("rank 0 has closed its transport"));
  EXPECT_THAT(FailureOf(at(1).PostSend(0, Key(2), {})), HasSubstr("rank 0 has closed its transport"));
}

TEST_P(Contract, ClosingEndsOwnRequests) {
  Start(2);
  RequestPtr recv = at(1).PostRecv(0, Key(9));
  Close(group_);
  EXPECT_TRUE(recv->done());
  EXPECT_NE(FailureOf(recv), "");
}

// Everybody sends to everybody, in an order of its own, and receives in another; then the counters must add up.
TEST_P(Contract, Storm) {
  constexpr int kRanks = 4, kEach = 40;
  Start(kRanks);
  auto size_of = [](int src, int dst, int m) -> size_t {
    Rng rng(1000 * src + 100 * dst + m);
    const size_t kind = rng.Below(4);
    return kind == 0 ? 0 : kind == 1 ? rng.Below(9000) : kind == 2 ? rng.Below(100'000) : rng.Below(1'000'000);
  };
  auto seed_of = [](int src, int dst, int m) { return SeedFor(src * 7 + dst, std::to_string(m)); };
  std::vector<std::thread> threads;
  std::vector<int> wrong(kRanks, 0);
  for (int me = 0; me < kRanks; ++me) {
    threads.emplace_back([&, me] {
      std::vector<std::array<int, 3>> todo;  // peer, message, send?
      for (int peer = 0; peer < kRanks; ++peer) {
        for (int m = 0; m < kEach && peer != me; ++m) {
          todo.push_back({peer, m, 0});
          todo.push_back({peer, m, 1});
        }
      }
      Rng rng(me);
      for (size_t i = todo.size(); i > 1; --i) std::swap(todo[i - 1], todo[rng.Below(i)]);
      std::vector<RequestPtr> posted;
      for (auto [peer, m, is_send] : todo) {
        const MessageKey key = Key(m, static_cast<MessageKind>(m % 4));
        posted.push_back(is_send ? at(me).PostSend(peer, key, Filled(at(me), size_of(me, peer, m), seed_of(me, peer, m)))
                                 : at(me).PostRecv(peer, key));
      }
      for (auto& r : posted) {
        const int m = r->key().micro_batch;
        if (FailureOf(r) != "" ||
            (!r->is_send() && !Holds(r->buffer(), size_of(r->peer(), me, m), seed_of(r->peer(), me, m)))) {
          ++wrong[me];
        }
      }
    });
  }
  for (auto& t : threads) t.join();
  for (int me = 0; me < kRanks; ++me) {
    EXPECT_EQ(wrong[me], 0) << "rank " << me;
    uint64_t sent = 0, received = 0;
    for (int peer = 0; peer < kRanks; ++peer) {
      for (int m = 0; m < kEach && peer != me; ++m) {
        sent += size_of(me, peer, m);
        received += size_of(peer, me, m);
      }
    }
    EXPECT_EQ(at(me).counters().bytes_sent, sent);
    EXPECT_EQ(at(me).counters().bytes_received, received);
    EXPECT_EQ(at(me).counters().messages_sent, 1u * kEach * (kRanks - 1));
    EXPECT_EQ(at(me).counters().messages_received, 1u * kEach * (kRanks - 1));
  }
}

TEST_P(Contract, WaitingBurnsNoProcessorTime) {
  Start(3);
  RequestPtr warm = at(1).PostRecv(0, Key(1));
  at(0).PostSend(1, Key(1), Filled(at(0), 1 << 20, 1))->Wait(kPatience);
  RequestPtr recv = at(1).PostRecv(0, Key(0));
  auto used_ns = [] {
    rusage u{};
    getrusage(RUSAGE_SELF, &u);
    return (u.ru_utime.tv_sec + u.ru_stime.tv_sec) * 1'000 * kMs + (u.ru_utime.tv_usec + u.ru_stime.tv_usec) * 1'000;
  };
  const int64_t before = used_ns();
  EXPECT_THAT(FailureOf(recv, 500 * kMs), HasSubstr("timed out"));
  EXPECT_LT(used_ns() - before, 50 * kMs);  // a spinning thread would use 500 ms; three sleeping ones use about 2
}

TEST_P(Contract, HooksRunOnce) {
  Start(2);
  std::atomic<int> calls{0};
  RequestPtr recv = at(1).PostRecv(0, Key(0));
  recv->OnDone([&calls, recv] { calls += recv->done() ? 1 : 100; });
  RequestPtr send = at(0).PostSend(1, Key(0), Filled(at(0), 50'000, 1));
  recv->Wait(kPatience);
  send->Wait(kPatience);
  send->OnDone([&calls] { calls += 10; });
  for (int i = 0; i < 1000 && calls < 11; ++i) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  EXPECT_EQ(calls, 11);
}

std::vector<std::string> Wires() {
  std::vector<std::string> wires{"inproc", "paced", "faulty"};
  if (UcxAvailable()) wires.insert(wires.end(), {"ucx_shm", "ucx_tcp"});
  return wires;
}
INSTANTIATE_TEST_SUITE_P(Wires, Contract, testing::ValuesIn(Wires()),
                         [](const auto& info) { return info.param; });

TEST(Ucx, RefusesWhatIsNoAddress) {
  if (!UcxAvailable()) GTEST_SKIP();
  UcxOptions options;
  options.size = 2;
  options.tls = "tcp,self";
  UcxTransport transport(options);
  EXPECT_THROW(transport.Connect({transport.address(), "rank 1 sent nonsense"}), Error);
}

TEST(Ucx, UnknownDeviceIsAnError) {
  if (!UcxAvailable()) GTEST_SKIP();
  UcxOptions options;
  options.size = 2;
  options.tls = "tcp,self";
  options.net_devices = "no_such_device0";
  try {
    UcxTransport transport(options);
    FAIL();
  } catch (const Error& e) {
    EXPECT_THAT(e.what(), HasSubstr("no_such_device0"));
    EXPECT_THAT(e.what(), HasSubstr("lo"));  // what there is
  }
}

TEST(MessageKey, Describes) {
  EXPECT_EQ((MessageKey{1, MessageKind::kBackward, 0, 5}).Describe(),
            "gradients over boundary 0 (attention of layer 0 to its FFN), micro-batch 5");
  EXPECT_EQ((MessageKey{2, MessageKind::kCollective, 4, 1}).Describe(), "sums of shared parameters 4");
  EXPECT_EQ((MessageKey{2, MessageKind::kControl, 4, 1}).Describe(), "figures of the step (4)");
}

TEST(Request, FirstEndCounts) {
  Request done(false, 1, Key(0)), failed(true, 1, Key(0));
  EXPECT_TRUE(done.Complete({}, 5));
  EXPECT_FALSE(done.Fail("too late"));
  EXPECT_EQ(done.state(), Request::State::kDone);
  EXPECT_EQ(done.reason(), "");
  EXPECT_EQ(done.sender_posted_ns(), 5);
  EXPECT_TRUE(failed.Fail("first"));
  EXPECT_FALSE(failed.Fail("second"));
  EXPECT_FALSE(failed.Complete({}, 5));
  EXPECT_EQ(failed.state(), Request::State::kFailed);
  EXPECT_EQ(failed.reason(), "first");
}

TEST(BufferPool, RecyclesBlocks) {
  BufferPool pool;
  std::byte* first;
  {
    Buffer a = pool.Allocate(100'000);
    first = a.data;
    EXPECT_EQ(a.size, 100'000u);
    EXPECT_EQ(reinterpret_cast<uintptr_t>(a.data) % 64, 0u);
  }
  const size_t held = pool.bytes_held();
  EXPECT_GE(held, 100'000u);
  EXPECT_LE(held, 125'000u);
  Buffer again = pool.Allocate(99'999);
  EXPECT_EQ(again.data, first);
  EXPECT_EQ(pool.bytes_held(), held);
  Buffer other = pool.Allocate(99'999);
  EXPECT_NE(other.data, first);
  EXPECT_EQ(pool.bytes_held(), 2 * held);
}

TEST(BufferPool, BlocksOutliveThePool) {
  Buffer kept;
  {
    BufferPool pool;
    kept = pool.Allocate(64);
  }
  std::memset(kept.data, 1, kept.size);
  EXPECT_EQ(kept.data[63], std::byte{1});
}

TEST(BufferPool, EverySizeFits) {
  BufferPool pool;
  for (size_t size = 1; size < 70'000; size = size * 5 / 4 + 1) {
    for (size_t s : {size - 1, size}) {
      Buffer b = pool.Allocate(s);
      ASSERT_EQ(b.size, s);
      if (s > 0) std::memset(b.data, 0, s);  // for the sanitizer
    }
  }
}

TEST(Faulty, DelaysDropsFailsAndHangs) {
  Group group = MakeInproc(2);
  using Kind = Fault::Kind;
  group[0] = MakeFaulty(std::move(group[0]), {{Kind::kDelay, 1, 200 * kMs}, {Kind::kDrop, 2, 0}, {Kind::kFail, 3, 0},
                                              {Kind::kHang, 5, 0}});
  std::vector<RequestPtr> recv, send;
  const int64_t start = NowNs();
  for (int i = 0; i < 6; ++i) recv.push_back(group[1]->PostRecv(0, Key(i)));
  for (int i = 0; i < 6; ++i) send.push_back(group[0]->PostSend(1, Key(i), {}));
  recv[3]->Wait(kPatience);
  recv[0]->Wait(kPatience);
  EXPECT_GE(recv[0]->done_ns() - start, 200 * kMs);
  EXPECT_LT(recv[3]->done_ns(), recv[0]->done_ns());
  EXPECT_EQ(FailureOf(send[0]), "");
  EXPECT_EQ(FailureOf(send[1]), "");
  EXPECT_THAT(FailureOf(recv[1], 50 * kMs), HasSubstr("timed out"));
  EXPECT_THAT(FailureOf(send[2]), HasSubstr("injected"));
  EXPECT_FALSE(send[4]->done());
  EXPECT_FALSE(send[5]->done());
  RequestPtr held = group[0]->PostRecv(1, Key(0));
  group[1]->PostSend(0, Key(0), {});
  EXPECT_THAT(FailureOf(held, 50 * kMs), HasSubstr("timed out"));
  group[0]->Abort("enough");
  for (auto& r : {send[4], send[5], held}) EXPECT_THAT(FailureOf(r), HasSubstr("enough"));
  group[1]->Abort("enough");
}

}  // namespace
}  // namespace disagmoe
