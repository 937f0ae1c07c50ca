#include "cli/commands.h"
#include "cost/job.h"

namespace disagmoe {
namespace {

constexpr const char* kProgram = R"(DisagMoE trains Mixture-of-Experts language models with attention and experts on separate workers.

  disagmoe data --out build/data/text book.txt          text to tokens
  disagmoe train configs/tiny.toml                      start the workers of the layout here, and train
  disagmoe train configs/tiny.toml layout.n=2 out=run2  any key can be given on the command line
  disagmoe timeline run2                                who computed and who waited
  disagmoe verify run2                                  does the run agree with the one-process reference?
  disagmoe generate run2 --prompt "To "                 what does the model write?
  disagmoe export run2 --out DIR                        its weights, for Hugging Face transformers and all that reads them
  disagmoe reference configs/tiny.toml                  the same training in one process
  disagmoe schedule configs/tiny.toml --grid            what every worker does, and when
  disagmoe simulate qwen3-235b-a22b h800x128 --seq 4k,16k    what each way of training costs on a cluster
  disagmoe plan qwen3-30b-a3b h800x128 --seq 16k --out plan.toml    does splitting pay there, and with which split?
  disagmoe profile configs/tiny.toml --out profile.json      measures the layers on this machine, for `simulate --profile`
  disagmoe reproduce                                    published claims beside the simulator

Commands: train, reference, schedule, plan, simulate, profile, reproduce, data, timeline, verify, generate, export. `disagmoe COMMAND --help` shows more, --version the version.
Exit code: 0 done, 1 a worker failed, 2 a mistake of use, configuration or environment, 3 a fault of ours.
)";

constexpr const char* kTrain = R"(Trains on separate attention and FFN workers.

  disagmoe train CONFIG.toml [key=value ...]

  disagmoe train configs/tiny.toml                       one attention worker, one FFN worker
  disagmoe train configs/tiny.toml layout.p_a=2 layout.n=3  two attention groups; three workers hold the experts
  disagmoe train configs/tiny.toml transport.kind=inproc    all workers as threads of one process
  disagmoe train configs/tiny.toml transport.paced=true transport.paced_gbps=1    behind an emulated 1 Gbit/s NIC
  disagmoe train configs/tiny.toml train.steps=40 train.resume=latest    go on from the last checkpoint
  torchrun --no-python --nnodes 2 --nproc-per-node 1 ... disagmoe train configs/tiny.toml    join other hosts' workers
  srun -n 2 disagmoe train configs/tiny.toml             the same under SLURM, or with mpirun

Without RANK (torchrun), SLURM_PROCID or OMPI_COMM_WORLD_RANK all workers are started on this machine; with them this
process is one worker. The folder `out` gets metrics.jsonl, trace.json (for ui.perfetto.dev), config.toml, checkpoints/.
  --json    for machines: metrics as JSON lines on stdout, errors as JSON
)";

constexpr const char* kReference = R"(Trains the same model on the same batches in one process, nothing disaggregated. What `train` must agree with.

  disagmoe reference CONFIG.toml [key=value ...]

  disagmoe reference configs/tiny.toml out=out/reference
  disagmoe reference configs/tiny.toml device.threads=2

  --json    for machines: metrics as JSON lines on stdout, errors as JSON
)";

constexpr const char* kVerify = R"(Compares a finished run with the one-process reference, on the same batches.

  disagmoe verify OUT

  disagmoe verify out/demo                  trains its first 20 steps again; checks the last checkpoint's held-out loss
  disagmoe verify out/demo --steps 100      more of them
  disagmoe verify out/demo --json

  --steps N     steps to train again (20)
  --threads N   of the reference (as many as a worker had; others round differently, and a router's choice can flip for it)
  --sample N    bytes of text that the last checkpoint writes (300; 0: none)
Exit code: 0 all figures agree within the tolerances shown, 1 some differ.
)";

constexpr const char* kGenerate = R"(What a model writes, in one process, token by token with cached keys and values.

  disagmoe generate OUT|CHECKPOINT|MODEL

  disagmoe generate out/demo --prompt "To " --tokens 500
  disagmoe generate out/demo/checkpoints/step-00000050
  disagmoe generate my-model --tokenizer my-model         a Hugging Face folder, here with the tokenizer named

Text goes through the tokenizer that the model came with (kept in OUT/hf), bytes for a vocabulary of 257; without one, tokens are numbers.
  --prompt TEXT         what it goes on from ("The ")
  --prompt-tokens 1,2   instead
  --tokenizer NAME      bytes, a SentencePiece FILE.model, a tokenizer.json or its folder
  --tokens N            how many, unless the text ends before (300)
  --temperature T       0: always the likeliest token (0.8)
  --top-k K             draw from the K likeliest (0: all)
  --top-p P             draw from the likeliest that make up P (1)
  --seed N              (1)
  --json                text, tokens and speed
)";

constexpr const char* kExport = R"(A checkpoint as a Hugging Face folder: safetensors, config.json, and the tokenizer that the model came with.

  disagmoe export OUT|CHECKPOINT --out DIR

  disagmoe export out/run1 --out my-model                 the latest checkpoint of a run
  disagmoe export out/run1/checkpoints/step-00000050 --out my-model --dtype bf16

A run that began with train.init (or model.from) keeps config.json and tokenizer of that folder in OUT/hf. Others get a
config.json of the family that can say what the model does; model.model_type names it.
  --dtype D     bf16, fp16 or fp32 (as in config.json, else bf16)
  --with DIR    config.json and tokenizer from there
  --shard GB    largest file (5)
  --no-check    do not read the files again
  --json        names, sizes and SHA-256 of the files
)";

constexpr const char* kKeys = R"(
Keys, their defaults and meaning (CONFIG.toml, or key=value with the table's name before it, as in train.steps=20):

)";

constexpr const char* kSchedule = R"(Prints the schedule that `train` would execute: for each group of workers, its computations and transfers in order.

  disagmoe schedule CONFIG.toml [key=value ...]

  disagmoe schedule configs/tiny.toml                    as text (F3.0: forward of stage 3, micro-batch 0; > sends, < receives)
  disagmoe schedule configs/tiny.toml --grid             drawn, one column a unit of time; B takes two
  disagmoe schedule configs/tiny.toml --grid --transfer 0.5    a transfer takes half as long as a forward
  disagmoe schedule configs/tiny.toml layout.p_a=2 --check     proves it complete and free of deadlock
  disagmoe schedule mine.txt --check                     the same for a schedule written by hand
  disagmoe schedule dualpipe layers=8 p=4 micro_batches=8 --grid      any schedule that can be simulated, by its name;
                         keys: layers, p (or p_a, p_f), m, n, v, micro_batches, round, slope, parts

  --grid          draw it
  --transfer T    with --grid: units of time of a transfer (0)
  --columns N     with --grid: not wider than this
  --check         validate, and print what is known about it
  --json          for machines
)";

constexpr const char* kPlan = R"(Plans: does splitting attention and experts pay on a model and a cluster, with which split, and will it fit?

  disagmoe plan MODEL CLUSTER [options]

  disagmoe plan qwen3-30b-a3b h800x128 --seq 16k             every schedule with its best layout, and the best of all
  disagmoe plan qwen3-30b-a3b h800x128 --out plan.toml       and a file that `train`, `simulate` and `profile` take
  disagmoe plan deepseek-moe h800x64+h100x64                 two kinds of machines: a pool on each
  disagmoe plan deepseek-moe h800x32 --set n=8 --set b=1     with some of the numbers given

MODEL and CLUSTER are those of `simulate`. Tried: groups, workers, NICs and nodes of each pool, sequences a micro-batch,
rounds, recomputation, where the head is; colocated: pipeline, expert parallelism, virtual stages. Layouts are ranked by
what they compute and send (the sizing program), estimated from smaller steps, and the best are simulated.
Exit code 0: a plan that fits, 1: nothing fits (and what would is said).
  --seq TOKENS         of a sequence: 4096 or 4k (4k)
  --batch N | LO:HI    sequences a step: within 5 % of N, or any between (1024)
  --schedule NAMES     "all" (as without), "trained" (what `train` executes), or names
  --set KEY=VALUE      a setting that stays, or SCHEDULE:KEY=VALUE; see `simulate --help`
  --expert-load FILE   a run's expert_load.json: uneven experts
  --out FILE           the plan, as a configuration
  --svg FILE           the roofline, drawn
  --effort X           X times the usual number of simulations
  --threads N          (all cores)
  --brief              the table alone: no what-ifs, no roofline
  --json               for machines
Ctrl-C ends the search with the best so far.

Sequences of changing length:
  --lengths L          shares of lengths, as 4k:0.7,32k:0.3, or a file with a length a line: each step has sequences of
                       one length; the layout that is best in expectation, and what changing it would gain and cost
  --phases P           4k:2000,32k:500: steps of each length, in order: which changes of the layout pay
  --restart S          seconds that a change takes beside moving parameters and optimizer state (10)
  --packed             sequences of --seq tokens, packed with documents of these lengths: attention stays within them

Real runs on this machine (MODEL may be a run's CONFIG.toml):
  --measure            runs the best layout of each schedule that trains, and layouts near the best, and plans the fastest
  --samples K          so many near it (6)
  --radius R           at most so many steps away (1)
  --seed N             which of them (1)
  --rounds N           runs of each, in turn (2)
  --steps N            steps of a run that count (5)
  --data PREFIX        of a .bin/.idx pair to train on
  --run KEY=VALUE      of the runs' configuration, as transport.kind=inproc
)";

constexpr const char* kSimulate = R"(Simulates a training step: of a model on a cluster, with each schedule's best layout; or of a run on this machine.

  disagmoe simulate MODEL CLUSTER
  disagmoe simulate PLAN.toml [key=value ...]
  disagmoe simulate CONFIG.toml --profile FILE [key=value ...]

  disagmoe simulate qwen3-235b-a22b h800x128 --schedule af-pipe,megatron-1f1b --seq 4k,8k,16k,32k
  disagmoe simulate deepseek-moe h800x32 --schedule af-pipe --set p=2 --set m=10 --set n=6 --set batch=240 --workers
  disagmoe simulate mixtral-8x7b h100x64 --schedule all --set dedup=node --set tutel:parts=4
  disagmoe simulate deepseek-moe h800x16+h200x8    the attention pool's machines and the FFN pool's
  disagmoe simulate my-model/config.json my-cluster.toml --schedule af-pipe --trace step.json
  disagmoe simulate plan.toml --workers                  just what the file says, a plan (its table [plan] names the cluster)
  disagmoe simulate configs/tiny.toml --profile profile.json --against out/tiny    predicted beside measured

What is not set is searched: groups, workers, virtual stages, sequences of a micro-batch, recomputation. Columns: shares of
the step in which a worker computes, computes while it communicates, waits for a message that is under way (exposed), waits
for nothing under way (bubble); the fullest worker's memory; the step over its limit (the busiest resource); speed against
plain and overlapped Megatron.

  --schedule A,B    (af-pipe,megatron-1f1b,megatron-overlap); "all"
  --seq A,B         tokens of a sequence, 4096 or 4k (4k)
  --set KEY=VALUE   see below; SCHEDULE:KEY=VALUE for one of them. What a schedule does not use is refused
  --expert-load F   relative loads of the experts: a run's expert_load.json, each layer's own at their experts; or one
                    JSON array, used by order of popularity, with another order of experts in each layer
  --workers         where the time and the memory of each kind of worker go
  --any-memory      layouts that do not fit as well
  --trace FILE      one simulation's step, with memory over time, for ui.perfetto.dev
  --json            for machines
With --profile: the step that `train` would run here.
  --profile FILE    from `disagmoe profile`
  --against RUN     compares with that run's traced steps, operation by operation
  --out DIR         writes its trace as a run does, for `disagmoe timeline DIR`
Exit code: 0 some layout fits in memory, 1 none does, 2 a mistake of use.
)";

constexpr const char* kReproduce = R"(Published claims about disaggregated training, and published runs of others, beside what the simulator says.

  disagmoe reproduce [TABLE ...]

  disagmoe reproduce                    all tables, about a minute
  disagmoe reproduce split other-runs
  disagmoe reproduce --markdown > docs/reproduction.md

One calibration a table, printed with it; none is fitted to a cell. Every verdict says what does not come out, and why.
  --markdown    as docs/reproduction.md is made
  --json        for machines
)";

constexpr const char* kProfile = R"(Measures the real layers of a configuration on this machine: what `simulate --profile` goes by.

  disagmoe profile CONFIG.toml [key=value ...] --out FILE

  disagmoe profile configs/tiny.toml --out build/profile.json
  disagmoe simulate configs/tiny.toml --profile build/profile.json    then any layout of the same model

Trains it for some steps at a time, as an attention and an FFN worker, in several sizes. Takes a minute, on a quiet machine.
  --out FILE      the profile (profile.json)
  --seq A,B       lengths of sequences to measure besides the configuration's (half of it)
  --rounds N      every measurement so often; the one with the smallest median counts (2)
  --patience S    seconds, in all, to wait for other programs to pause (60)
  --json          for machines
)";

constexpr const char* kData = R"(Makes training data: text or JSON lines, plain or gzip, to a Megatron .bin/.idx pair of tokens.

  disagmoe data --out PREFIX FILE...

  disagmoe data --out build/data/text book.txt more.txt.gz               bytes as tokens: a vocabulary of 257
  disagmoe data --out build/data/web --tokenizer llama/tokenizer.model web.jsonl.gz      a SentencePiece model
  disagmoe data --out build/data/web --tokenizer Qwen3-30B-A3B web.jsonl.gz      a folder with Hugging Face's tokenizer.json
  disagmoe data --out build/data/web --json-key content pages.jsonl      {"content": "..."}, one document a line
  disagmoe data --out build/data/dict --document-bytes 4096 dict.txt     cut at blank lines
  disagmoe data --inspect build/data/text                                what is in a pair
  disagmoe data --inspect "0.7 build/data/web 0.3 build/data/dict"       what is in a blend (data.blend)

  --out PREFIX          writes PREFIX.bin and PREFIX.idx
  --tokenizer NAME      "bytes", a SentencePiece FILE.model, a Hugging Face tokenizer.json or its folder (bytes)
  --json-key KEY        of *.jsonl files: the text of a document ("text")
  --document-bytes N    of other files: about so long a document; 0: a document a file (0)
  --eod TOKEN           of a Hugging Face tokenizer: ends a document (eos_token of tokenizer_config.json)
  --special-tokens      of a Hugging Face tokenizer: what it puts around a text, a beginning-of-text token say
  --workers N           threads or processes that encode; the output does not depend on it (as many as there are cores)
  --inspect PREFIX      checks a pair, or the pairs of a blend, and prints sizes and the beginning, as text of the tokenizer
  --json                for machines
)";

constexpr const char* kTimeline = R"(Draws a step of a run that has ended: who computed, who waited and for what.

  disagmoe timeline OUT

  disagmoe timeline out/tiny
  disagmoe timeline out/tiny --step 3 --svg step.svg

  --step N       a traced step (trace.first_step, trace.steps); without, the last
  --svg FILE     as a picture
  --columns N    width of the drawing
  --json         the times of every worker, for machines
)";

// What --set takes, and the names that there are.
std::string SimulateKeys() {
  std::string out = "\nSettings:\n";
  const auto line = [&](const std::string& name, const std::string& meaning) {
    out += "  " + name + std::string(name.size() < 24 ? 24 - name.size() : 1, ' ') + meaning + "\n";
  };
  for (const KnobHelp& knob : Knobs()) line(knob.name, knob.meaning);
  out += "\nSchedules:\n";
  for (const ScheduleName& s : ScheduleNames()) line(s.name, s.summary);
  out += "\nModels (or a config.json, a folder with one, a run's .toml):\n";
  for (const Preset& p : ModelPresets()) line(p.name, p.summary);
  out += "\nClusters (NAMExGPUS, or a .toml file):\n";
  for (const Preset& p : ClusterPresets()) line(p.name, p.summary);
  return out;
}

}  // namespace

std::string HelpOf(const std::string& command) {
  if (command == "train") return std::string(kTrain) + kKeys + ConfigHelp();
  if (command == "reference") return std::string(kReference) + "\nKeys: see `disagmoe train --help`.\n";
  if (command == "schedule") return kSchedule;
  if (command == "plan") return kPlan;
  if (command == "simulate") return kSimulate + SimulateKeys();
  if (command == "reproduce") return kReproduce;
  if (command == "profile") return kProfile;
  if (command == "data") return kData;
  if (command == "timeline") return kTimeline;
  if (command == "verify") return kVerify;
  if (command == "generate") return kGenerate;
  if (command == "export") return kExport;
  return kProgram;
}

}  // namespace disagmoe
