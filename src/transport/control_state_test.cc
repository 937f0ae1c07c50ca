#include "transport/control_state.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "transport/control_wire.h"

namespace disagmoe::control {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

constexpr int64_t kSecond = 1'000'000'000;
constexpr int64_t kMs = 1'000'000;

// Three joined ranks: 0 and 2 of the attention pool, 1 of the experts. Default times; starts at 1000 s.
class RunStateTest : public ::testing::Test {
 protected:
  RunStateTest() : state_(3, ControlTimes(), now_) {
    state_.Joined(0, "A-group 0 worker 0", "process 10", now_);
    state_.Joined(1, "F-group 0 worker 0", "process 11", now_);
    state_.Joined(2, "A-group 0 worker 1", "process 12", now_);
    state_.SetStatus(1, "in forward of experts layer 3 micro-batch 2 step 7");
  }
  // Advances; everybody but `silent` is heard.
  void Advance(int64_t ns, int silent = -1) {
    now_ += ns;
    for (int rank = 0; rank < 3; ++rank) {
      if (rank != silent) state_.Heard(rank, now_);
    }
  }
  bool Decide() {  // after the grace of the first failure, not before
    Advance(299 * kMs);
    EXPECT_FALSE(state_.Tick(now_));
    Advance(2 * kMs);
    return state_.Tick(now_);
  }
  int64_t now_ = 1000 * kSecond;
  RunState state_;
};

TEST_F(RunStateTest, KilledRankSaysWhatItDidAndWhoWaited) {
  state_.SetStatus(0, "awaiting activations of layer 3 micro-batch 2 from rank 1");
  state_.SetStatus(2, "awaiting gradients from rank 12");  // not rank 1
  state_.Died(1, "killed by signal 9", now_);
  ASSERT_TRUE(Decide());
  EXPECT_EQ(state_.reason(),
            "rank 1 (F-group 0 worker 0) was killed by signal 9 while in forward of experts layer 3 micro-batch 2 step 7; "
            "rank 0 (A-group 0 worker 0) was awaiting activations of layer 3 micro-batch 2 from rank 1");
  EXPECT_EQ(state_.kind(), FailureKind::kDeath);
}

TEST_F(RunStateTest, DeathTakesThePlaceOfWhatFollowedFromIt) {
  state_.Reported(0, FailureKind::kPeerLost, "lost rank 1: connection reset", now_);
  state_.ConnectionLost(1, "connection closed", now_ + 1 * kMs);
  state_.Died(1, "killed by signal 9", now_ + 2 * kMs);
  state_.Reported(2, FailureKind::kUser, "receive failed", now_ + 3 * kMs);
  ASSERT_TRUE(Decide());
  EXPECT_THAT(state_.reason(), HasSubstr("rank 1 (F-group 0 worker 0) was killed by signal 9"));
}

TEST_F(RunStateTest, OwnReportTakesThePlaceOfLostPeer) {
  state_.Reported(0, FailureKind::kPeerLost, "lost rank 1", now_);
  state_.Reported(1, FailureKind::kInternal, "index out of range", now_);
  ASSERT_TRUE(Decide());
  EXPECT_EQ(state_.reason(), "rank 1 (F-group 0 worker 0): index out of range");
  EXPECT_EQ(state_.kind(), FailureKind::kInternal);
}

TEST_F(RunStateTest, FirstOfTwoReportsDecides) {
  state_.Reported(2, FailureKind::kUser, "no such file\nnext line", now_);
  state_.Reported(0, FailureKind::kInternal, "later", now_ + 1);
  ASSERT_TRUE(Decide());
  EXPECT_EQ(state_.reason(), "rank 2 (A-group 0 worker 1): no such file next line");
  state_.Died(1, "killed by signal 9", now_);
  EXPECT_FALSE(state_.Tick(now_ + kSecond));
  EXPECT_THAT(state_.reason(), HasSubstr("no such file"));
}

TEST_F(RunStateTest, DeathAfterOwnReportIsNotNews) {
  state_.Reported(1, FailureKind::kUser, "disk full", now_);
  state_.Died(1, "killed by signal 6", now_);
  ASSERT_TRUE(Decide());
  EXPECT_EQ(state_.reason(), "rank 1 (F-group 0 worker 0): disk full");
}

TEST_F(RunStateTest, SilenceAfterFiveSeconds) {
  Advance(4999 * kMs, 1);
  EXPECT_EQ(state_.NextDeadline(), now_ + 1 * kMs);
  EXPECT_FALSE(state_.Tick(now_));
  EXPECT_FALSE(state_.pending());
  Advance(1 * kMs, 1);
  EXPECT_FALSE(state_.Tick(now_));
  EXPECT_TRUE(state_.pending());
  Advance(300 * kMs, 1);
  ASSERT_TRUE(state_.Tick(now_));
  EXPECT_THAT(state_.reason(), HasSubstr("rank 1 (F-group 0 worker 0) stopped answering for 5.0 s while in forward"));
}

TEST_F(RunStateTest, SilenceWhileTheServerSleptIsExcused) {
  now_ += 8 * kSecond;
  state_.Excuse(8 * kSecond);
  EXPECT_FALSE(state_.Tick(now_));
  EXPECT_FALSE(state_.pending());
}

// A transport may notice a stopped peer before silence_ns is over: the one that does not answer is to blame.
TEST_F(RunStateTest, LostPeerThatDoesNotAnswerIsBlamed) {
  Advance(4 * kSecond, 1);
  state_.Reported(0, FailureKind::kPeerLost, "lost rank 1: timed out", now_);
  EXPECT_FALSE(state_.Tick(now_));
  Advance(300 * kMs, 1);
  ASSERT_TRUE(state_.Tick(now_));
  EXPECT_THAT(state_.reason(), HasSubstr("rank 1 (F-group 0 worker 0) stopped answering for 4.3 s"));
}

TEST_F(RunStateTest, LostPeerAloneIsToldAsItIs) {
  state_.Reported(0, FailureKind::kPeerLost, "lost rank 1: timed out", now_);
  ASSERT_TRUE(Decide());
  EXPECT_EQ(state_.reason(), "rank 0 (A-group 0 worker 0): lost rank 1: timed out");
}

TEST_F(RunStateTest, LeavingIsNoFailure) {
  state_.Left(1);
  state_.ConnectionLost(1, "connection closed", now_);
  state_.Died(1, "exit code 0", now_);
  Advance(10 * kSecond, 1);
  EXPECT_FALSE(state_.Tick(now_));
  EXPECT_FALSE(state_.pending());
  EXPECT_FALSE(state_.all_left());
  state_.Left(0);
  state_.Left(2);
  EXPECT_TRUE(state_.all_left());
}

TEST_F(RunStateTest, ExitWithoutLeaving) {
  state_.Died(1, "exit code 0", now_);
  ASSERT_TRUE(Decide());
  EXPECT_THAT(state_.reason(), HasSubstr("rank 1 (F-group 0 worker 0) ended with exit code 0 while in forward"));
}

TEST_F(RunStateTest, GatherNamesWhoIsMissing) {
  state_.GatherWaits(2, {true, false, true}, now_);
  Advance(299 * kSecond);
  EXPECT_FALSE(state_.Tick(now_));
  Advance(1 * kSecond);
  EXPECT_FALSE(state_.Tick(now_));
  ASSERT_TRUE(Decide());
  EXPECT_EQ(state_.reason(),
            "all-gather 3 of the control channel timed out after 300.0 s: missing rank 1 of 3; "
            "rank 1 (F-group 0 worker 0) is in forward of experts layer 3 micro-batch 2 step 7");
}

TEST_F(RunStateTest, GatherWithARankThatLeft) {
  state_.Left(1);
  state_.GatherWaits(0, {true, false, false}, now_);
  EXPECT_FALSE(state_.Tick(now_));
  ASSERT_TRUE(Decide());
  EXPECT_THAT(state_.reason(), HasSubstr("rank 1 (F-group 0 worker 0) has left, but others wait for it in all-gather 1"));
}

TEST(RunState, RendezvousNamesWhoIsMissing) {
  ControlTimes times;
  RunState state(16, times, 0);
  for (int rank : {0, 1, 2, 4, 8, 9, 10, 11, 12, 13, 14, 15}) EXPECT_TRUE(state.Joined(rank, "", "", 59 * kSecond));
  EXPECT_FALSE(state.Joined(4, "", "", 59 * kSecond));
  state.DroppedStranger("10.0.0.9");
  EXPECT_EQ(state.NextDeadline(), 60 * kSecond);
  EXPECT_FALSE(state.Tick(60 * kSecond));
  ASSERT_TRUE(state.Tick(60 * kSecond + times.grace_ns));
  EXPECT_EQ(state.reason(),
            "rendezvous timed out after 60.0 s: missing ranks 3, 5-7 of 16; dropped 1 connection without the secret of "
            "this run, the last from 10.0.0.9");
}

TEST(RunState, DeathBeforeJoining) {
  RunState state(2, ControlTimes(), 0);
  state.Joined(0, "A-group 0 worker 0", "", 0);
  state.Died(1, "exit code 2", 0);
  ASSERT_TRUE(state.Tick(kSecond));
  EXPECT_EQ(state.reason(), "rank 1 ended with exit code 2 before it joined");
}

TEST(ControlWire, RankRanges) {
  EXPECT_EQ(RankRanges({}), "");
  EXPECT_EQ(RankRanges({3}), "3");
  EXPECT_EQ(RankRanges({3, 5, 6, 7}), "3, 5-7");
  EXPECT_EQ(RankRanges({0, 1, 9}), "0, 1, 9");
  std::vector<int> even;
  for (int i = 0; i < 60; i += 2) even.push_back(i);
  EXPECT_THAT(RankRanges(even), ::testing::EndsWith("36, 38 and 10 more"));
}

// RFC 2104/4231 fix HMAC-SHA256; here: what the proof must depend on, and that it cannot be reflected.
TEST(ControlWire, ProofDependsOnAllOfIt) {
  std::string p = Prove("secret", "client", "cn", "sn", "claim");
  EXPECT_EQ(p.size(), 32u);
  EXPECT_TRUE(SameBytes(p, Prove("secret", "client", "cn", "sn", "claim")));
  EXPECT_FALSE(SameBytes(p, Prove("secret", "server", "cn", "sn", "claim")));
  EXPECT_FALSE(SameBytes(p, Prove("secreT", "client", "cn", "sn", "claim")));
  EXPECT_FALSE(SameBytes(p, Prove("secret", "client", "cns", "n", "claim")));
  EXPECT_FALSE(SameBytes(p, Prove("secret", "client", "cn", "sn", "claIm")));
  EXPECT_FALSE(SameBytes(p, p.substr(1)));
  EXPECT_FALSE(SameBytes(MakeNonce(), MakeNonce()));
}

TEST(ControlWire, ReaderStopsAtTheEnd) {
  std::string body = Writer().U32(7).Text("abc").body();
  EXPECT_EQ(body, std::string("\7\0\0\0\3\0\0\0abc", 11));  // little-endian
  Reader r(body);
  EXPECT_EQ(r.U32(), 7u);
  EXPECT_EQ(r.Text(), "abc");
  EXPECT_TRUE(r.AtEnd());
  Reader longer(std::string_view("\xff\xff\xff\xff" "abc", 7));  // a text of 4 GiB
  EXPECT_EQ(longer.Text(), "");
  EXPECT_FALSE(longer.ok());
  EXPECT_EQ(longer.U64(), 0u);
}

// Their clock is 1 s ahead. A round trip of 10 ms that is slow on one way only is wrong by at most 5 ms; one of
// 2 ms, even on both ways, is exact.
TEST(ControlWire, ClockFilterBelievesTheShortestTrip) {
  ClockFilter filter;
  EXPECT_EQ(filter.offset_ns(), 0);
  filter.Add(100 * kMs, 109 * kMs + kSecond, 110 * kMs);
  EXPECT_EQ(filter.offset_ns(), kSecond + 4 * kMs);
  filter.Add(200 * kMs, 201 * kMs + kSecond, 202 * kMs);
  EXPECT_EQ(filter.offset_ns(), kSecond);
  for (int i = 0; i < 16; ++i) filter.Add(300 * kMs, 301 * kMs - kSecond, 304 * kMs);  // old samples are forgotten
  EXPECT_EQ(filter.offset_ns(), -kSecond - 1 * kMs);
}

TEST(ControlWire, OneLine) {
  EXPECT_EQ(OneLine("a\nb\x1b[31m", 100), "a b [31m");
  EXPECT_EQ(OneLine("abcdef", 3), "abc");
}

}  // namespace
}  // namespace disagmoe::control
