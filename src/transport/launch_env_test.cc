#include "transport/launch_env.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>

#include "base/error.h"

namespace disagmoe {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using Environment = std::map<std::string, std::string>;

GetEnvFunction Getter(const Environment& environment) {
  return [&environment](const char* name) -> const char* {
    auto at = environment.find(name);
    return at == environment.end() ? nullptr : at->second.c_str();
  };
}

RankEnv Detect(const Environment& environment) { return DetectRanks(Getter(environment)); }

std::string DetectError(const Environment& environment) {
  try {
    Detect(environment);
  } catch (const Error& e) {
    return e.what();
  }
  return "no error";
}

TEST(LaunchEnv, NothingSetMeansNoRanks) {
  EXPECT_FALSE(Detect({}).present);
  EXPECT_FALSE(Detect({{"RANK", ""}, {"MASTER_ADDR", "10.0.0.1"}}).present);
}

// The variables of `torchrun --nproc-per-node 2 --nnodes 2`, second node.
TEST(LaunchEnv, TorchrunWithAgentStore) {
  RankEnv e = Detect({{"RANK", "3"}, {"WORLD_SIZE", "4"}, {"LOCAL_RANK", "1"}, {"LOCAL_WORLD_SIZE", "2"},
                      {"MASTER_ADDR", "10.0.0.1"}, {"MASTER_PORT", "29400"}, {"TORCHELASTIC_USE_AGENT_STORE", "True"},
                      {"SLURM_PROCID", "1"}, {"SLURM_NTASKS", "2"}, {"SLURM_STEP_ID", "0"}});
  EXPECT_TRUE(e.present);
  EXPECT_EQ(e.source, "torchrun");
  EXPECT_EQ(e.rank, 3);
  EXPECT_EQ(e.world, 4);
  EXPECT_EQ(e.local_rank, 1);
  EXPECT_EQ(e.local_world, 2);
  EXPECT_EQ(e.master_addr, "10.0.0.1");
  EXPECT_EQ(e.master_port, 29400);
  EXPECT_TRUE(e.agent_store);
  EXPECT_EQ(e.control_port, 29401);  // the agent has 29400
  EXPECT_EQ(e.port_span, 16);
}

TEST(LaunchEnv, PlainVariablesUseTheGivenPortAlone) {
  RankEnv e = Detect({{"RANK", "0"}, {"WORLD_SIZE", "2"}, {"MASTER_PORT", "1234"}});
  EXPECT_EQ(e.local_world, 2);
  EXPECT_EQ(e.master_addr, "127.0.0.1");
  EXPECT_EQ(e.control_port, 1234);
  EXPECT_EQ(e.port_span, 1);
  EXPECT_FALSE(e.agent_store);
  EXPECT_EQ(Detect({{"RANK", "0"}, {"WORLD_SIZE", "2"}}).master_port, 29500);
  EXPECT_EQ(Detect({{"RANK", "0"}, {"WORLD_SIZE", "2"}, {"DISAGMOE_LAUNCHER", "1"}}).source, "launcher");
}

TEST(LaunchEnv, SlurmStepOnTwoNodes) {
  Environment step = {{"SLURM_PROCID", "5"}, {"SLURM_NTASKS", "7"}, {"SLURM_LOCALID", "1"}, {"SLURM_NODEID", "1"},
                      {"SLURM_STEP_ID", "0"}, {"SLURM_STEP_TASKS_PER_NODE", "4,3"},
                      {"SLURM_JOB_NODELIST", "node[01-02]"}, {"SLURM_JOB_ID", "1203"}};
  RankEnv e = Detect(step);
  EXPECT_EQ(e.source, "SLURM");
  EXPECT_EQ(e.rank, 5);
  EXPECT_EQ(e.world, 7);
  EXPECT_EQ(e.local_rank, 1);
  EXPECT_EQ(e.local_world, 3);
  EXPECT_EQ(e.master_addr, "node01");
  EXPECT_EQ(e.master_port, 29500 + 16 * 3);  // 1203 mod 200 = 3
  EXPECT_EQ(e.port_span, 16);
  step["SLURM_STEP_TASKS_PER_NODE"] = "4(x2)";
  EXPECT_EQ(Detect(step).local_world, 4);
  step["MASTER_ADDR"] = "10.1.1.1";
  step["MASTER_PORT"] = "4000";
  EXPECT_EQ(Detect(step).master_addr, "10.1.1.1");
  EXPECT_EQ(Detect(step).control_port, 4000);
  EXPECT_EQ(Detect(step).port_span, 1);
}

TEST(LaunchEnv, SlurmWithTheFourUsualVariables) {
  RankEnv e = Detect({{"SLURM_PROCID", "3"}, {"SLURM_NTASKS", "4"}, {"SLURM_LOCALID", "1"},
                      {"SLURM_JOB_NODELIST", "gpu-a,gpu-b"}});
  EXPECT_TRUE(e.present);
  EXPECT_EQ(e.local_world, 2);
  EXPECT_EQ(e.master_addr, "gpu-a");
}

TEST(LaunchEnv, SlurmWithoutSeveralTasksIsNoRank) {
  EXPECT_FALSE(Detect({{"SLURM_PROCID", "0"}, {"SLURM_NTASKS", "1"}, {"SLURM_STEP_ID", "0"}}).present);
  // An sbatch script, and an interactive step of a job with 8 tasks.
  EXPECT_FALSE(Detect({{"SLURM_PROCID", "0"}, {"SLURM_NTASKS", "8"}, {"ENVIRONMENT", "BATCH"}}).present);
  EXPECT_FALSE(Detect({{"SLURM_PROCID", "0"}, {"SLURM_NTASKS", "8"}, {"SLURM_STEP_ID", "0"},
                       {"SLURM_STEP_NUM_TASKS", "1"}}).present);
  EXPECT_TRUE(Detect({{"SLURM_PROCID", "0"}, {"SLURM_NTASKS", "8"}, {"SLURM_STEP_ID", "0"},
                      {"ENVIRONMENT", "BATCH"}}).present);
}

TEST(LaunchEnv, OpenMpiBeforeTheSlurmThatStartedIt) {
  Environment mpi = {{"OMPI_COMM_WORLD_RANK", "1"}, {"OMPI_COMM_WORLD_SIZE", "4"},
                     {"OMPI_COMM_WORLD_LOCAL_RANK", "1"}, {"OMPI_COMM_WORLD_LOCAL_SIZE", "4"},
                     {"SLURM_PROCID", "0"}, {"SLURM_NTASKS", "2"}};
  RankEnv e = Detect(mpi);
  EXPECT_EQ(e.source, "OpenMPI");
  EXPECT_EQ(e.world, 4);
  EXPECT_EQ(e.master_addr, "127.0.0.1");
  mpi["OMPI_COMM_WORLD_LOCAL_SIZE"] = "2";
  EXPECT_THAT(DetectError(mpi), HasSubstr("MASTER_ADDR"));
  EXPECT_THAT(DetectError(mpi), HasSubstr("mpirun -x"));
}

TEST(LaunchEnv, ContradictionsNameTheVariable) {
  EXPECT_THAT(DetectError({{"RANK", "1"}}), HasSubstr("WORLD_SIZE"));
  EXPECT_THAT(DetectError({{"WORLD_SIZE", "2"}}), HasSubstr("RANK"));
  EXPECT_THAT(DetectError({{"RANK", "one"}, {"WORLD_SIZE", "2"}}), HasSubstr("(RANK): got 'one'"));
  EXPECT_THAT(DetectError({{"RANK", "1x"}, {"WORLD_SIZE", "2"}}), HasSubstr("'1x'"));
  EXPECT_THAT(DetectError({{"RANK", "-1"}, {"WORLD_SIZE", "2"}}), HasSubstr("'-1'"));
  EXPECT_THAT(DetectError({{"RANK", "2"}, {"WORLD_SIZE", "2"}}), HasSubstr("less than WORLD_SIZE = 2"));
  EXPECT_THAT(DetectError({{"RANK", "0"}, {"WORLD_SIZE", "2"}, {"LOCAL_WORLD_SIZE", "4"}}),
              HasSubstr("LOCAL_WORLD_SIZE"));
  EXPECT_THAT(DetectError({{"RANK", "0"}, {"WORLD_SIZE", "2"}, {"LOCAL_RANK", "2"}}), HasSubstr("(LOCAL_RANK)"));
  EXPECT_THAT(DetectError({{"RANK", "0"}, {"WORLD_SIZE", "2"}, {"MASTER_PORT", "70000"}}), HasSubstr("(MASTER_PORT)"));
  EXPECT_THAT(DetectError({{"SLURM_PROCID", "9"}, {"SLURM_NTASKS", "4"}}), HasSubstr("(SLURM_PROCID): got 9"));
}

TEST(LaunchEnv, HostLists) {
  EXPECT_THAT(ExpandHostList("node[01-03,7],gpu-b"), ElementsAre("node01", "node02", "node03", "node7", "gpu-b"));
  EXPECT_THAT(ExpandHostList("n[9-11].lan"), ElementsAre("n9.lan", "n10.lan", "n11.lan"));
  EXPECT_THAT(ExpandHostList("r[1-2]n[08,9]"), ElementsAre("r1n08", "r1n9", "r2n08", "r2n9"));
  for (const char* bad : {"", "a,", "n[", "n[1", "n]", "n[]", "n[1-]", "n[x]", "n[3-1]", "n[[1]]", "n[1-99999999]"}) {
    EXPECT_THROW(ExpandHostList(bad), Error) << bad;
  }
}

TEST(LaunchEnv, ListensOnLoopbackUnlessToldOtherwise) {
  RankEnv two;
  two.world = 4;
  two.local_world = 2;
  two.master_addr = "10.0.0.1";
  EXPECT_THROW(ListenHost(two, "127.0.0.1"), Error);
  EXPECT_EQ(ListenHost(two, "0.0.0.0"), "0.0.0.0");
  EXPECT_EQ(ControlHost(two, "0.0.0.0"), "10.0.0.1");
  EXPECT_EQ(ControlHost(two, "192.168.0.1"), "192.168.0.1");
  RankEnv one = two;
  one.local_world = 4;
  EXPECT_EQ(ListenHost(one, "127.0.0.1"), "127.0.0.1");
  EXPECT_EQ(ControlHost(one, "127.0.0.1"), "127.0.0.1");
}

TEST(LaunchEnv, SecretIsRequired) {
  Environment environment;
  try {
    SecretFromEnv(Getter(environment));
    FAIL();
  } catch (const Error& e) {
    EXPECT_THAT(e.what(), HasSubstr("export DISAGMOE_SECRET=$(openssl rand -hex 16)"));
  }
  environment["DISAGMOE_SECRET"] = "short";
  EXPECT_THROW(SecretFromEnv(Getter(environment)), Error);
  environment["DISAGMOE_SECRET"] = "0123456789abcdef0123456789abcdef";
  EXPECT_EQ(SecretFromEnv(Getter(environment)), "0123456789abcdef0123456789abcdef");
}

}  // namespace
}  // namespace disagmoe
