#include "spec/config.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <fstream>
#include <limits>

#include "base/error.h"
#include "spec/config_for_tests.h"
#include "spec/config_keys.h"
#include "spec/layout.h"

namespace disagmoe {
namespace {

using testing::HasSubstr;

TEST_F(ConfigTest, EmptyFileGivesDefaults) {
  const RunConfig config = Load("");
  EXPECT_EQ(config.train.steps, 100);
  EXPECT_EQ(config.out, "out");
  EXPECT_EQ(config.layout.workers(), 2);
}

TEST_F(ConfigTest, ReadsEveryType) {
  const RunConfig config = Load(
      "out = 'runs/a'\n"
      "train.lr = 1  # an integer where a number is wanted\n"
      "[model]\nqk_norm = true\nhidden_size = 0x40\n"
      "[layout]\np_a = 2\n"
      "[transport]\npaced_gbps = 2.5e1\n");
  EXPECT_EQ(config.out, "runs/a");
  EXPECT_EQ(config.train.lr, 1.0);
  EXPECT_TRUE(config.model.qk_norm);
  EXPECT_EQ(config.model.hidden_size, 64);
  EXPECT_EQ(config.layout.p_a, 2);
  EXPECT_EQ(config.transport.paced_gbps, 25.0);
}

TEST_F(ConfigTest, OverridesWinAndTheLastWins) {
  const RunConfig config =
      Load("[train]\nsteps = 5\n", {"train.steps=6", "train.steps = 7", "out=my run", "train.dtype=bf16",
                                   "data.path=\"a b\"", "train.save=false", "train.lr=2e-3", "data.split=90,10"});
  EXPECT_EQ(config.train.steps, 7);
  EXPECT_EQ(config.out, "my run");
  EXPECT_EQ(config.train.dtype, "bf16");
  EXPECT_EQ(config.data.path, "a b");
  EXPECT_FALSE(config.train.save);
  EXPECT_EQ(config.train.lr, 2e-3);
  EXPECT_EQ(config.data.split, "90,10");
}

TEST_F(ConfigTest, OverrideRepairsTheFile) {
  // Cross-checks look at the result, not at the file alone.
  EXPECT_EQ(Load("[model]\nnum_experts = 1\n", {"model.num_experts_per_tok=1"}).model.num_experts, 1);
}

struct Mistake {
  const char* file;
  std::vector<std::string> overrides;
  const char* line;
};

void PrintTo(const Mistake& m, std::ostream* out) { *out << m.line; }

class MistakeTest : public ConfigTest, public ::testing::WithParamInterface<Mistake> {};

TEST_P(MistakeTest, GetsItsLine) { EXPECT_EQ(Fault(GetParam().file, GetParam().overrides), GetParam().line); }

const Mistake kOfFiles[] = {
    {"\n[train]\nstpes = 3\n", {}, "unknown key (run.toml:3): got 'train.stpes'. Hint: did you mean 'train.steps'?"},
    {"steps = 3\n", {}, "unknown key (run.toml:1): got 'steps'. Hint: did you mean 'train.steps'?"},
    {"[model]\nseq_length = 3\n", {},
     "unknown key (run.toml:2): got 'model.seq_length'. Hint: did you mean 'train.seq_length'?"},
    {"[train]\nzzzzzzzzzz = 3\n", {}, "unknown key (run.toml:2): got 'train.zzzzzzzzzz'. Hint: `disagmoe train --help` lists all keys"},
    // The parser keeps keys sorted; the first mistake in the file is the one reported.
    {"[train]\nzz = 1\naa = 1\n[data]\nbb = 1\n", {}, "unknown key (run.toml:2): got 'train.zz'. Hint: `disagmoe train --help` lists all keys"},
    {"[trian]\nsteps = 3\n", {}, "unknown table (run.toml:1): got [trian]. Hint: did you mean [train]?"},
    {"[cluster]\n", {}, "unknown table (run.toml:1): got [cluster]. Hint: tables are [model], [layout], [schedule], "
                        "[train], [data], [transport], [device], [trace], [plan]"},
    {"[[model]]\nhidden_size = 3\n", {}, "wrong type (run.toml:1, model): got an array, expected a table [model]"},
    {"train = 3\n", {}, "wrong type (run.toml:1, train): got 3, expected a table [train]"},
    {"[train.lr]\n", {}, "wrong type (run.toml:1, train.lr): got a table, expected a number above 0"},
    {"[train]\nsteps = 1.0\n", {},
     "wrong type (run.toml:2, train.steps): got 1.0, expected an integer from 0 to 1000000000"},
    {"[train]\nsteps = '9'\n", {},
     "wrong type (run.toml:2, train.steps): got \"9\", expected an integer from 0 to 1000000000"},
    {"[train]\nsave = 1\n", {}, "wrong type (run.toml:2, train.save): got 1, expected true or false"},
    {"out = 1\n", {}, "wrong type (run.toml:1, out): got 1, expected a string that is not empty"},
    {"[train]\nlr = 1979-05-27\n", {}, "wrong type (run.toml:2, train.lr): got a date or time, expected a number above 0"},
    {"out = ''\n", {}, "value not allowed (run.toml:1, out): got \"\", expected a string that is not empty"},
    {"[train]\nlr = nan\n", {}, "value not allowed (run.toml:2, train.lr): got nan, expected a number above 0"},
    {"[train]\nclip_grad = inf\n", {},
     "value not allowed (run.toml:2, train.clip_grad): got inf, expected a number of at least 0"},
    {"[train]\nadam_beta2 = 1.0\n", {},
     "value not allowed (run.toml:2, train.adam_beta2): got 1.0, expected a number from 0 to below 1"},
    {"[train]\nseed = -1\n", {},
     "value not allowed (run.toml:2, train.seed): got -1, expected an integer from 0 to 9223372036854774784"},
    {"[layout]\np_a = 4294967297\n", {},  // 2^32 + 1 must not become 1
     "value not allowed (run.toml:2, layout.p_a): got 4294967297, expected an integer from 1 to 4096"},
    {"[train]\ndtype = 'fp16'\n", {},
     "value not allowed (run.toml:2, train.dtype): got \"fp16\", expected \"fp32\" or \"bf16\""},
    {"[model]\nrouter_aux_loss = 'batch'\n", {}, "value not allowed (run.toml:2, model.router_aux_loss): got \"batch\", "
                                                 "expected \"none\", \"sequence\" or \"global\""},
    {"[transport]\npaced_gbps = 0\n", {},
     "value not allowed (run.toml:2, transport.paced_gbps): got 0.0, expected a number above 0"},
    {"[layout]\nexpert_counts = [4, 4.0]\n", {},
     "wrong type (run.toml:2, layout.expert_counts): got an array, expected an array of integers from 0 to 65536, or an "
     "array of such arrays"},
    {"[layout]\nexpert_counts = [[4, 4], 8]\n", {},
     "wrong type (run.toml:2, layout.expert_counts): got an array, expected an array of integers from 0 to 65536, or an "
     "array of such arrays"},
    {"[layout]\nexpert_counts = 8\n", {},
     "wrong type (run.toml:2, layout.expert_counts): got 8, expected an array of integers from 0 to "
     "65536, or an array of such arrays"},
    {"[layout]\nn = 2\nexpert_counts = [9, -1]\n", {},
     "value not allowed (run.toml:3, layout.expert_counts): got -1, expected an array of integers from 0 to "
     "65536, or an array of such arrays"},
    {"[trace]\nfirst_step = 0\n", {},
     "value not allowed (run.toml:2, trace.first_step): got 0, expected an integer from 1 to 1000000000"},
};
INSTANTIATE_TEST_SUITE_P(Files, MistakeTest, ::testing::ValuesIn(kOfFiles));

const Mistake kOfOverrides[] = {
    {"", {"train.steps"}, "not an override (command line): got 'train.steps', expected table.key=value. Hint: for "
                          "example train.steps=20 or out=DIR"},
    {"", {"train.stes=2"}, "unknown key (command line): got 'train.stes'. Hint: did you mean 'train.steps'?"},
    {"", {"=2"}, "unknown key (command line): got ''. Hint: `disagmoe train --help` lists all keys"},
    {"", {"train.steps=many"},
     "wrong type (command line, train.steps): got \"many\", expected an integer from 0 to 1000000000"},
    {"", {"train.steps="}, "wrong type (command line, train.steps): got \"\", expected an integer from 0 to 1000000000"},
    {"", {"train.steps=1\nout = 'x'"},  // one override, one key
     "wrong type (command line, train.steps): got \"1\\u000Aout = 'x'\", expected an integer from 0 to 1000000000"},
    {"", {"train.lr=-1"}, "value not allowed (command line, train.lr): got -1.0, expected a number above 0"},
    {"", {"schedule.name=zero-bubble"},
     "value not allowed (command line, schedule.name): got \"zero-bubble\", expected \"auto\", \"af-pipe\", "
     "\"megatron-1f1b\", \"megatron-overlap\", \"tutel\", \"comet\", \"fastermoe\", \"lancet\", "
     "\"af-pipe-zb\", \"dualpipe\", \"dualpipe-v\" or \"hetermoe\""},
    {"", {"plan.settings=[\"a\", 5]"},
     "wrong type (command line, plan.settings): got an array, expected an array of strings"},
    {"", {"layout.head=router"},
     "value not allowed (command line, layout.head): got \"router\", expected \"ffn\" or \"attention\""},
    {"[train]\nsteps = -1", {"train.steps=1"},  // a mistake in the file stays one
     "value not allowed (run.toml:2, train.steps): got -1, expected an integer from 0 to 1000000000"},
};
INSTANTIATE_TEST_SUITE_P(Overrides, MistakeTest, ::testing::ValuesIn(kOfOverrides));

#define COLOCATED \
  "\"auto\", \"megatron-1f1b\", \"megatron-overlap\", \"tutel\", \"comet\", \"fastermoe\", \"lancet\", \"dualpipe\" or " \
  "\"dualpipe-v\""
const Mistake kContradictions[] = {
    {"[model]\nhead_dim = 33\n", {}, "contradiction (run.toml:2, model.head_dim): got 33, expected an even number "
                                     "(rotary embedding turns pairs)"},
    {"[model]\nnum_attention_heads = 6\nnum_key_value_heads = 4\n", {},
     "contradiction (run.toml:3, model.num_key_value_heads): got 4, expected a divisor of model.num_attention_heads = 6"},
    {"[model]\nnum_attention_heads = 5\n", {}, "contradiction (run.toml, default of model.num_key_value_heads): got 2, "
                                               "expected a divisor of model.num_attention_heads = 5"},
    {"[model]\nnum_experts = 3\n", {"model.num_experts_per_tok=4"},
     "contradiction (command line, model.num_experts_per_tok): got 4, expected at most model.num_experts = 3"},
    {"[model]\nfirst_k_dense_replace = 3\n", {},
     "contradiction (run.toml:2, model.first_k_dense_replace): got 3, expected at most model.num_hidden_layers = 2"},
    {"[layout]\np_a = 3\n", {}, "contradiction (run.toml:2, layout.p_a): got 3, expected at most "
                                "model.num_hidden_layers = 2. Hint: a group without a layer would idle; more workers go "
                                "into layout.m"},
    {"[layout]\np_f = 3\n", {}, "contradiction (run.toml:2, layout.p_f): got 3, expected at most "
                                "model.num_hidden_layers = 2. Hint: a group without a layer would idle; more workers go "
                                "into layout.n"},
    {"[layout]\ncolocated = true\np_f = 2\n", {}, "contradiction (run.toml:3, layout.p_f): got 2, expected 1 with "
                                                  "layout.colocated = true. Hint: layout.p_a counts the groups"},
    {"[layout]\ncolocated = true\nn = 2\n", {}, "contradiction (run.toml:3, layout.n): got 2, expected 1 with "
                                                "layout.colocated = true. Hint: layout.m counts the workers of a group"},
    {"[layout]\ncolocated = true\n[schedule]\nname = 'af-pipe'\n", {},
     "contradiction (run.toml:4, schedule.name): got \"af-pipe\", expected "
     COLOCATED " with layout.colocated = true"},
    {"[schedule]\nname = 'megatron-1f1b'\n", {},
     "contradiction (run.toml:2, schedule.name): got \"megatron-1f1b\", expected \"auto\", \"af-pipe\", "
     "\"af-pipe-zb\" or \"hetermoe\" with layout.colocated = false"},
    {"", {"schedule.name=dualpipe-v"},
     "contradiction (command line, schedule.name): got \"dualpipe-v\", expected \"auto\", \"af-pipe\", "
     "\"af-pipe-zb\" or \"hetermoe\" with layout.colocated = false"},
    {"[layout]\ncolocated = true\n", {"schedule.name=af-pipe-zb"},
     "contradiction (command line, schedule.name): got \"af-pipe-zb\", expected "
     COLOCATED " with layout.colocated = true"},
    {"[layout]\ncolocated = true\n[schedule]\nname = 'megatron-overlap'\nround = 2\n", {},
     "contradiction (run.toml:5, schedule.round): got 2, expected 0 or 1 with schedule.name = \"megatron-overlap\" and "
     "layout.p_a = 1. Hint: one group has no rounds"},
    {"[layout]\ncolocated = true\n[schedule]\nname = 'dualpipe-v'\nround = 2\n", {},
     "contradiction (run.toml:5, schedule.round): got 2, expected 0 with schedule.name = \"dualpipe-v\". Hint: it has "
     "no rounds"},
    {"[layout]\ncolocated = true\nhead = 'attention'\n[schedule]\nname = 'dualpipe-v'\n", {},
     "contradiction (run.toml:3, layout.head): got \"attention\", expected \"ffn\" with schedule.name = "
     "\"dualpipe-v\""},
    {"[layout]\ncolocated = true\np_a = 2\n[schedule]\nname = 'dualpipe-v'\n", {},
     "contradiction (run.toml:3, layout.p_a): got 2, expected at most half of model.num_hidden_layers = 2 with "
     "schedule.name = \"dualpipe-v\". Hint: a group holds two chunks of layers"},
    {"[layout]\ncolocated = true\np_a = 2\n[schedule]\nname = 'dualpipe-v'\n",
     {"model.num_hidden_layers=4", "train.micro_batches=3"},
     "contradiction (command line, train.micro_batches): got 3, expected at least twice layout.p_a = 2 with "
     "schedule.name = \"dualpipe-v\""},
    {"[schedule]\nround = 3\n", {}, "contradiction (run.toml:2, schedule.round): got 3, expected a divisor of "
                                    "train.micro_batches = 4. Hint: 0 chooses one"},
    {"[train]\nmin_lr = 0.1\n", {},
     "contradiction (run.toml:2, train.min_lr): got 0.1, expected at most train.lr = 0.001"},
    {"[train]\nlr_decay_steps = 10\n", {}, "contradiction (run.toml:2, train.lr_decay_steps): got 10, expected more than "
                                           "train.lr_warmup_steps = 10. Hint: 0 decays until train.steps"},
    {"[train]\neval_interval = 10\n", {}, "contradiction (run.toml:2, train.eval_interval): got 10, expected 0 without "
                                          "train.eval_micro_batches. Hint: set train.eval_micro_batches"},
    {"[train]\nsave = false\nsave_interval = 10\n", {},
     "contradiction (run.toml:3, train.save_interval): got 10, expected 0 with train.save = false"},
    {"[data]\nsplit = '1,2,3,4'\n", {}, "contradiction (run.toml:2, data.split): got \"1,2,3,4\", expected weights of "
                                        "training and held-out data (a third is left unused), such as \"98,2\""},
    {"[data]\nsplit = '-1,2'\n", {}, "contradiction (run.toml:2, data.split): got \"-1,2\", expected weights of training "
                                     "and held-out data (a third is left unused), such as \"98,2\""},
    {"[data]\nsplit = '1,2,'\n", {}, "contradiction (run.toml:2, data.split): got \"1,2,\", expected weights of training "
                                     "and held-out data (a third is left unused), such as \"98,2\""},
    {"[data]\nsplit = '1;2'\n", {}, "contradiction (run.toml:2, data.split): got \"1;2\", expected weights of training "
                                    "and held-out data (a third is left unused), such as \"98,2\""},
    {"[data]\nsplit = 'nan,1'\n", {}, "contradiction (run.toml:2, data.split): got \"nan,1\", expected weights of training "
                                      "and held-out data (a third is left unused), such as \"98,2\""},
    {"[data]\nsplit = '100'\n", {"train.eval_micro_batches=1"},
     "contradiction (run.toml:2, data.split): got \"100\", expected a held-out share above 0 with "
     "train.eval_micro_batches = 1"},
    {"[data]\npath = 'a'\n", {"data.blend=1 b"},
     "contradiction (command line, data.blend): got [\"1 b\"], expected [] with data.path = \"a\". Hint: data.path= clears the path"},
    {"[data]\nsplit = '0,1'\n", {},
     "contradiction (run.toml:2, data.split): got \"0,1\", expected a share of training data above 0"},
    {"[data]\nsplit = '1,0'\n", {"train.eval_micro_batches=1"},
     "contradiction (run.toml:2, data.split): got \"1,0\", expected a held-out share above 0 with "
     "train.eval_micro_batches = 1"},
    {"[train]\nseq_length = 4194304\nmicro_batch_size = 512\n", {},
     "contradiction (run.toml:3, train.micro_batch_size): got 512, expected fewer than 2^31 tokens a micro-batch with "
     "train.seq_length = 4194304"},
    {"[train]\nseq_length = 4194304\nmicro_batch_size = 64\n", {},  // 2^22 * 2^6 * 2
     "contradiction (run.toml:3, train.micro_batch_size): got 64, expected fewer than 2^29 tokens x experts a micro-batch "
     "with train.seq_length = 4194304 and model.num_experts_per_tok = 2"},
    {"[train]\nmicro_batches = 1048576\n[model]\nnum_hidden_layers = 4096\n", {},
     "contradiction (run.toml:2, train.micro_batches): got 1048576, expected a schedule of at most 20000000 stages x "
     "micro-batches with model.num_hidden_layers = 4096"},
    {"[layout]\np_f = 2\nn = 4096\n[model]\nnum_hidden_layers = 40\n", {"layout.p_f=40"},
     "contradiction (run.toml:3, layout.n): got 4096, expected at most 65536 workers in all"},
    {"[model]\nnum_experts = 65536\nmoe_intermediate_size = 1048576\n", {},
     "contradiction (run.toml:3, model.moe_intermediate_size): got 1048576, expected a weight of at most 2^40 elements"},
};
#undef COLOCATED
INSTANTIATE_TEST_SUITE_P(Contradictions, MistakeTest, ::testing::ValuesIn(kContradictions));

TEST_F(ConfigTest, SplitsOfMegatronAndOfOnePart) {
  for (const char* split : {"949,50,1", "0.98, 0.02", "100", "90,10"})
    EXPECT_EQ(Load("", {std::string("data.split=") + split}).data.split, split);
}

TEST_F(ConfigTest, BlendsAsArraysAndAsMegatronHasThem) {
  const std::vector<std::string> two = {"0.7 data/a", "0.3 data/b"}, flat = {"0.7 data/a 0.3 data/b"};
  EXPECT_EQ(Load("[data]\nblend = ['0.7 data/a', '0.3 data/b']\n").data.blend, two);
  EXPECT_EQ(Load("", {"data.blend=[\"0.7 data/a\", \"0.3 data/b\"]"}).data.blend, two);
  EXPECT_EQ(Load("", {"data.blend=0.7 data/a 0.3 data/b"}).data.blend, flat);
  EXPECT_EQ(Load("[data]\nblend = '0.7 data/a 0.3 data/b'\n").data.blend, flat);
  EXPECT_EQ(Load("[data]\nblend = ['1 a']\n", {"data.blend=[]", "data.path=b"}).data.blend, std::vector<std::string>());
}

TEST_F(ConfigTest, BadTomlNamesTheLine) {
  for (const char* text : {"\n[train]\nlr = 0.1\nlr = 0.2\n", "\n\n\nlr = \n", "\n\n\n[train\n"}) {
    // The rest of the line is the parser's own, and differs between its versions.
    EXPECT_TRUE(Fault(text).starts_with("not valid TOML (run.toml:4): got ")) << Fault(text);
    EXPECT_EQ(Fault(text).find('\n'), std::string::npos);
  }
}

TEST_F(ConfigTest, UnreadableFile) {
  EXPECT_THROW(LoadConfig("/nonexistent/run.toml", {}), Error);
  EXPECT_THROW(LoadConfig(::testing::TempDir(), {}), Error);
}

TEST_F(ConfigTest, LargestMicroBatch) {
  EXPECT_EQ(Load("", {"train.seq_length=4194304", "train.micro_batch_size=63"}).train.micro_batch_size, 63);
}

TEST_F(ConfigTest, WarmUpMayBeLongerThanAShortRun) { EXPECT_EQ(Load("", {"train.steps=1"}).train.lr_warmup_steps, 10); }

TEST_F(ConfigTest, CheckNamesThePlace) {
  RunConfig config;
  config.model.head_dim = 7;
  try {
    CheckConfig(config, "checkpoint step-20");
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.parts().where, "checkpoint step-20, model.head_dim");
  }
}

// Gives every key a value that is neither its default nor that of another key, where it can.
void Change(const ConfigKey& key, RunConfig& config, int index) {
  std::visit(
      [&](auto* value) {
        using T = std::remove_pointer_t<decltype(value)>;
        if constexpr (std::is_same_v<T, bool>) *value = !*value;
        else if constexpr (std::is_same_v<T, std::string>) *value = key.choices.empty() ? "a\"\\\n\x7f é" : key.choices.back();
        else if constexpr (std::is_same_v<T, double>) *value = 0.1 + 1.0 / (index + 3);
        else if constexpr (std::is_same_v<T, Ints>) *value = {index, 3, 1};
        else if constexpr (std::is_same_v<T, IntRows>) *value = {{0, index + 1}, {7, 0}};
        else if constexpr (std::is_same_v<T, Strings>) *value = {"a\"", "b=" + std::to_string(index)};
        else *value = static_cast<T>(key.max) - index;
      },
      key.value(config));
}

// Presets and folders stand for the keys of their config.json; keys given too change them, unless weights come along.
TEST_F(ConfigTest, ModelByName) {
  const RunConfig preset = Load("[model]\nfrom = 'gpt-oss-20b'\nnum_hidden_layers = 4\nlayer_types = []\n");
  EXPECT_EQ(preset.model.num_experts, 32);
  EXPECT_EQ(preset.model.num_hidden_layers, 4);
  EXPECT_EQ(preset.model.window(3), 128);
  EXPECT_EQ(preset.train.init, "auto");
  const std::string printed = PrintConfig(preset);
  EXPECT_EQ(printed.find("from = "), std::string::npos);
  EXPECT_EQ(PrintConfig(Load(printed)), printed);

  const std::string folder = DISAGMOE_HF_TESTDATA "/olmoe";
  const RunConfig weights = Load("", {"model.from=" + folder, "model.router_aux_loss=global"});
  EXPECT_EQ(weights.model.model_type, "olmoe");
  EXPECT_EQ(weights.model.router_aux_loss, "global");
  EXPECT_EQ(weights.train.init, folder);
  EXPECT_EQ(Load("", {"model.from=" + folder, "train.init=random", "model.num_hidden_layers=1"}).train.init, "random");
  EXPECT_THAT(Fault("", {"model.from=" + folder, "model.rope_theta=7"}),
              HasSubstr("contradiction (command line, model.rope_theta): got 7.0, expected "));
  EXPECT_THAT(Fault("", {"model.from=gpt-oss-20"}), HasSubstr("did you mean 'gpt-oss-20b'?"));
}

TEST_F(ConfigTest, PrintedFormReadsBackEqual) {
  // Key by key through the printed text, without cross-checks: every member is printed under its own name.
  RunConfig changed;
  for (size_t i = 0; i < ConfigKeys().size(); ++i) Change(ConfigKeys()[i], changed, static_cast<int>(i));
  const std::string text = PrintConfig(changed);
  for (size_t i = 0; i < ConfigKeys().size(); ++i) {
    const ConfigKey& key = ConfigKeys()[i];
    if (key.name == "model.from") continue;  // the other keys say it
    const std::string line = std::string(key.leaf()) + " = " + TomlValue(key.value(changed)) + "\n";
    EXPECT_NE(text.find(line), std::string::npos) << key.name;
  }

  RunConfig config;  // and as a whole
  config.out = "a\"\\\n\x7f é";
  config.train.lr = 0.1 + 0.2;                                // 0.30000000000000004
  config.train.adam_eps = std::numeric_limits<double>::denorm_min();
  config.model.rope_theta = std::numeric_limits<double>::max();
  config.train.seed = 9223372036854774784ull;
  config.transport.paced = true;
  const RunConfig read = Load(PrintConfig(config));
  EXPECT_EQ(read.out, config.out);
  EXPECT_EQ(read.train.lr, config.train.lr);
  EXPECT_EQ(read.train.adam_eps, config.train.adam_eps);
  EXPECT_EQ(read.model.rope_theta, config.model.rope_theta);
  EXPECT_EQ(read.train.seed, config.train.seed);
  EXPECT_EQ(PrintConfig(read), PrintConfig(config));
}

TEST_F(ConfigTest, EveryKeyIsLoadedIntoItsOwnMember) {
  for (size_t i = 0; i < ConfigKeys().size(); ++i) {
    const ConfigKey& key = ConfigKeys()[i];
    if (key.name == "model.from") continue;  // brings all of [model]: ModelByName
    RunConfig changed;
    Change(key, changed, 0);
    const std::string assignment = std::string(key.name) + "=" + TomlValue(key.value(changed));
    try {
      EXPECT_EQ(PrintConfig(Load("", {assignment})), PrintConfig(changed)) << key.name;
    } catch (const Error& error) {
      // The extreme value may contradict another default; then it was at least read.
      EXPECT_EQ(error.parts().what, "contradiction") << error.what();
    }
  }
}

TEST_F(ConfigTest, HelpNamesEveryKey) {
  const std::string help = ConfigHelp();
  for (const ConfigKey& key : ConfigKeys()) {
    EXPECT_FALSE(key.help.empty()) << key.name;
    EXPECT_NE(help.find("  " + std::string(key.leaf()) + " = "), std::string::npos) << key.name;
  }
}

}  // namespace
}  // namespace disagmoe
