#include "plan/roofline.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <sstream>

#include "base/error.h"
#include "plan/roofline_print.h"

namespace disagmoe {
namespace {

RooflineRequest RequestOf(const std::string& model, int64_t seq_length = 4096, Dedup dedup = Dedup::kExpert) {
  RooflineRequest r;
  r.model = LoadModelShape(model);
  r.attention = r.ffn = LoadCluster("h800x32");
  r.seq_length = seq_length;
  r.dedup = dedup;
  return r;
}

// All products at half the peak, memory traffic free: operations of one speed.
void MakePlain(ClusterSpec* c) {
  EfficiencySpec& e = c->efficiency;
  e.attention_forward = e.attention_backward = e.gemm = e.grouped_gemm = 0.5;
  e.grouped_gemm_half_rows = 0;
  c->gpu.memory_gbytes_s = 1e30;
}

void MakePlain(RooflineRequest* r) {
  MakePlain(&r->attention);
  MakePlain(&r->ffn);
}

std::string All(const std::vector<std::string>& sentences) {
  std::string out;
  for (const std::string& s : sentences) out += s + "\n";
  return out;
}

bool Has(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

// One token and layer of deepseek-moe (2048, 16 heads of 128, 64 experts of 1408, top 4) at 4096, a row for each
// expert, 4 * 2048 * 2 = 16384 bytes:
//   projections 2 * 4 * 2048 * 2048 = 33554432, router 2 * 2048 * 64 = 262144, scores and values
//   2 * 4097 * 16 * 128 = 16781312: 50597888 FLOPs; experts 6 * 4 * 2048 * 1408 = 69206016
// Backward: twice the bytes in all, products three times, scores and values 3.5 times.
// Printed: (2048 (2 + 2) + 4 * 4096) / (2 * 4) and 2 * 1408.
TEST(Roofline, IntensitiesOfDeepseekMoe) {
  const Roofline r = MakeRoofline(RequestOf("deepseek-moe"));
  EXPECT_DOUBLE_EQ(r.rows, 4);
  EXPECT_DOUBLE_EQ(r.attention.forward.intensity(), 50597888.0 / 16384);
  EXPECT_DOUBLE_EQ(r.ffn.forward.intensity(), 69206016.0 / 16384);
  EXPECT_DOUBLE_EQ(r.attention.step.intensity(), (3.0 * (33554432 + 262144) + 3.5 * 16781312) / (2 * 16384));
  EXPECT_DOUBLE_EQ(r.ffn.step.intensity(), 3.0 * 69206016 / (2 * 16384));
  EXPECT_DOUBLE_EQ(r.attention.layer_intensity, 50597888.0 / 16384);  // all layers are alike
  EXPECT_DOUBLE_EQ(r.ffn.layer_intensity, 4224);
  EXPECT_DOUBLE_EQ(r.attention.printed, 3072);
  EXPECT_DOUBLE_EQ(r.ffn.printed, 2816);
}

// As in work_test: 210780160 FLOPs and 301989888 over 8 * 4096 * 2 bytes.
TEST(Roofline, IntensitiesOfQwen3) {
  const Roofline r = MakeRoofline(RequestOf("qwen3-235b-a22b"));
  EXPECT_DOUBLE_EQ(r.attention.forward.intensity(), 210780160.0 / 65536);
  EXPECT_DOUBLE_EQ(r.ffn.forward.intensity(), 4608);
  EXPECT_DOUBLE_EQ(r.attention.printed, 1568);
  EXPECT_DOUBLE_EQ(r.ffn.printed, 3072);
}

// The mean is that of all FLOPs over all bytes. deepseek-moe-16b's layer 0 is dense (10944) and sends one row to the
// token's home; the other 27 have 6 of 64 experts and shared ones of 2 * 1408.
TEST(Roofline, ADenseLayerSendsOneRow) {
  const Roofline r = MakeRoofline(RequestOf("deepseek-moe-16b"));
  const double flops = 6.0 * 2048 * 10944 + 27 * 6.0 * 2048 * (6 * 1408 + 2 * 1408);
  EXPECT_NEAR(r.ffn.forward.intensity() / (flops / (2 * 2048 * (1 + 27 * 6))), 1, 1e-12);
  EXPECT_EQ(r.typical_layer, 1);
  EXPECT_DOUBLE_EQ(r.ffn.layer_intensity, 6.0 * 2048 * (6 * 1408 + 2 * 1408) / (2 * 2048 * 6));
}

// Every other layer of gpt-oss has a window: the first without one is typical, and above the mean.
TEST(Roofline, TheTypicalLayerHasNoWindow) {
  const RooflineRequest request = RequestOf("gpt-oss-120b", 16384);
  const Roofline r = MakeRoofline(request);
  EXPECT_EQ(request.model.window[r.typical_layer], 0);
  EXPECT_GT(r.attention.layer_intensity, r.attention.forward.intensity());
}

// A worker of 8 has 8 of 64 experts: none of a token's 4 are there with C(56, 4) / C(64, 4) = 367290 / 635376. Two
// nodes of 8 workers have 32 experts each: C(32, 4) = 35960. The FLOPs of the experts stay.
TEST(Roofline, RowsByDedup) {
  RooflineRequest request = RequestOf("deepseek-moe", 4096, Dedup::kWorker);
  const Roofline worker = MakeRoofline(request);
  EXPECT_NEAR(worker.rows, 8 * (1 - 367290.0 / 635376), 1e-12);
  EXPECT_NEAR(worker.ffn.forward.intensity(), 69206016 / (worker.rows * 4096), 1e-9);
  request.dedup = Dedup::kNode;
  request.ffn_workers = 16;
  EXPECT_NEAR(MakeRoofline(request).rows, 2 * (1 - 35960.0 / 635376), 1e-12);
}

// 989 TFLOP/s over 50 GB/s. At half of one and 0.8 of the other 494.5e12 / 40e9 = 12362.5; two NICs halve that.
TEST(Roofline, TurningPoint) {
  RooflineRequest request = RequestOf("deepseek-moe");
  MakePlain(&request);
  request.nics_f = 2;
  const Roofline r = MakeRoofline(request);
  for (const OperationRoof* o : {&r.attention, &r.ffn}) {
    EXPECT_DOUBLE_EQ(o->nominal_turning_point, 19780);
    for (const RoofPoint& p : {o->forward, o->step}) {
      EXPECT_NEAR(p.tflops(), 494.5, 1e-9);
      EXPECT_NEAR(p.turning_point(1), 12362.5, 1e-8);
      EXPECT_NEAR(p.turning_point(2), 6181.25, 1e-8);
    }
  }
  // Below it, a GPU reaches FLOP a byte times bytes a second.
  EXPECT_NEAR(r.attention.forward.attainable_tflops(1), 50597888.0 / 16384 * 40e-3, 1e-9);
  EXPECT_NEAR(r.ffn.forward.attainable_tflops(r.ffn.nics), 4224 * 80e-3, 1e-9);
  EXPECT_NEAR(r.ffn.forward.attainable_tflops(4), 494.5, 1e-9);
  EXPECT_NEAR(r.ffn.forward.over(2), 4224 / 6181.25, 1e-12);
}

// deepseek-moe: 33816576 + 4096 (s + 1) FLOPs over 16384 bytes are 19780 at s = 79120 - 8256 - 1 = 70863, exactly, and
// 12362.5 at 49450 - 8257 = 41193. A step: (3 * 33816576 + 3.5 * 4096 (s + 1)) / 32768 = 12362.5 at
// s = (405094400 - 101449728) / 14336 - 1 = 21179.1.
TEST(Roofline, WhereAttentionCrosses) {
  RooflineRequest request = RequestOf("deepseek-moe");
  MakePlain(&request);
  const Crossing c = MakeRoofline(request).crossing;
  EXPECT_EQ(c.nominal, 70863);
  EXPECT_NEAR(static_cast<double>(c.forward.value()), 41193, 1);  // rounding of a quotient that is a whole number
  EXPECT_EQ(c.step, 21180);
}

TEST(Roofline, AWindowMayNeverCross) {
  RooflineRequest request = RequestOf("gpt-oss-120b");
  const Crossing mixed = MakeRoofline(request).crossing;
  request.seq_length = mixed.nominal.value();
  EXPECT_GE(MakeRoofline(request).attention.forward.intensity(), 19780);
  --request.seq_length;
  EXPECT_LT(MakeRoofline(request).attention.forward.intensity(), 19780);
  // With a window of 128 in each layer a query sees at most 128 keys: (4 * 2880 * 4096 * 9 / 8 + 2 * 2880 * 128 +
  // 4 * 128 * 4096) / (4 * 2880 * 2) = 2427 FLOP a byte.
  std::fill(request.model.window.begin(), request.model.window.end(), 128);
  const Roofline windows = MakeRoofline(request);
  EXPECT_FALSE(windows.crossing.nominal || windows.crossing.forward || windows.crossing.step);
  EXPECT_TRUE(Has(All(RooflineVerdict(windows)), "at no length forward"));
  request.nics_a = 100;
  EXPECT_EQ(MakeRoofline(request).crossing.forward, 1);
}

// system.md section 6: min over M of max(a / M, f / N) = (a + f) / W.
TEST(Roofline, SplittingByItselfGainsNothing) {
  for (const auto& [a, f] : {std::pair{3.0, 1.0}, {1.0, 3.0}, {2.0, 2.0}, {0.1, 40.0}}) {
    const double w = 16;
    double least = 1e300;
    for (int i = 1; i < 100000; ++i) least = std::min(least, SplitNs(a, f, w * i / 100000, w - w * i / 100000));
    EXPECT_GE(least, (a + f) / w * (1 - 1e-12));
    EXPECT_LE(least, (a + f) / w * 1.01);
  }
  const Roofline r = MakeRoofline(RequestOf("qwen3-235b-a22b"));
  const double both = r.attention.step.compute_ns + r.ffn.step.compute_ns;
  EXPECT_NEAR(r.split_ns / both, 1, 1e-12);
  EXPECT_NEAR(r.colocated_ns / both, 1, 1e-12);
  EXPECT_TRUE(Has(All(RooflineVerdict(r)), "Splitting by itself gains nothing: "));
}

// FFN GPUs whose grouped products are twice as fast, attention GPUs whose attention is: with a and f of a plain GPU the
// pools do a / 2 and f / 2 where each of their GPUs alone would do a / 2 + f or a + f / 2. The other way round they
// lose.
TEST(Roofline, HardwareThatSuits) {
  RooflineRequest request = RequestOf("deepseek-moe");
  MakePlain(&request);
  EfficiencySpec& a = request.attention.efficiency;
  a.attention_forward = a.attention_backward = a.gemm = 1;
  request.ffn.efficiency.grouped_gemm = 1;
  const Roofline good = MakeRoofline(request);
  const double attention = 2 * good.attention.step.compute_ns, ffn = 2 * good.ffn.step.compute_ns;
  const double m = attention / (attention + ffn), n = 1 - m;
  EXPECT_NEAR(good.split_ns, (attention + ffn) / 2, 1e-6);
  EXPECT_NEAR(good.colocated_ns, 1 / (m / (attention / 2 + ffn) + n / (attention + ffn / 2)), 1e-6);
  EXPECT_TRUE(Has(All(RooflineVerdict(good)), "the hardware that suits it better"));
  std::swap(request.attention, request.ffn);
  const Roofline bad = MakeRoofline(request);
  EXPECT_GT(bad.split_ns, bad.colocated_ns);
  EXPECT_TRUE(Has(All(RooflineVerdict(bad)), "Splitting by itself gains nothing and loses "));
}

// At the ratios both pools take as long; with the NICs that are needed, transfers take as long as computation.
TEST(Roofline, Balance) {
  RooflineRequest request = RequestOf("deepseek-moe-16b", 16384, Dedup::kWorker);
  request.nics_a = 1;
  request.nics_f = 0.75;
  const Roofline r = MakeRoofline(request);
  const RoofPoint &a = r.attention.step, &f = r.ffn.step;
  EXPECT_NEAR(a.compute_ns / r.ratio_compute, f.compute_ns, 1e-9 * f.compute_ns);
  const double slower_a = std::max(a.compute_ns, a.network_ns), slower_f = std::max(f.compute_ns, f.network_ns / 0.75);
  EXPECT_NEAR(r.ratio_both, slower_a / slower_f, 1e-12);
  EXPECT_NEAR(r.hidden_ns, slower_a + slower_f, 1e-6);
  EXPECT_EQ(a.network_ns, f.network_ns);  // the same rows leave both
  EXPECT_NEAR(r.nics_needed, 2 * a.network_ns / (a.compute_ns + f.compute_ns), 1e-12);
  request.nics_a = a.nics_needed();
  request.nics_f = f.nics_needed();
  const Roofline fed = MakeRoofline(request);
  EXPECT_NEAR(fed.attention.step.over(fed.attention.nics), 1, 1e-12);
  EXPECT_NEAR(fed.ffn.step.over(fed.ffn.nics), 1, 1e-12);
  EXPECT_NEAR(fed.nics_needed, fed.nics_had, 1e-12);
  EXPECT_NEAR(fed.ratio_both, fed.ratio_compute, 1e-12);
}

// The head is three products of 2 * 2048 * 102400 FLOPs, the experts of 28 layers three of 69206016.
TEST(Roofline, TheHeadTakesFfnGpus) {
  RooflineRequest request = RequestOf("deepseek-moe");
  MakePlain(&request);
  const Roofline r = MakeRoofline(request);
  EXPECT_NEAR(r.ratio_compute / r.ratio_compute_with_head, 1 + 2.0 * 2048 * 102400 / (28 * 69206016.0), 1e-12);
}

TEST(Roofline, VerdictFollowsTheNic) {
  RooflineRequest request = RequestOf("deepseek-moe");
  const std::string slow = All(RooflineVerdict(MakeRoofline(request)));
  EXPECT_TRUE(Has(slow, "the network bounds it"));
  EXPECT_FALSE(Has(slow, "computation bounds it"));
  EXPECT_TRUE(Has(slow, "however these are divided"));
  for (ClusterSpec* c : {&request.attention, &request.ffn}) c->nic_gbytes_s *= 100;
  const std::string fast = All(RooflineVerdict(MakeRoofline(request)));
  EXPECT_FALSE(Has(fast, "the network bounds it"));
  EXPECT_TRUE(Has(fast, "computation bounds it"));
  EXPECT_TRUE(Has(fast, "both have enough"));
  EXPECT_FALSE(Has(fast, "however these are divided"));
}

// Long sequences leave the attention pool with more NICs than it needs.
TEST(Roofline, NicsThatCanMove) {
  RooflineRequest request = RequestOf("qwen3-235b-a22b", 32768, Dedup::kWorker);
  const Roofline r = MakeRoofline(request);
  ASSERT_LT(r.attention.step.nics_needed(), 1);
  ASSERT_GT(r.ffn.step.nics_needed(), 1);
  EXPECT_TRUE(Has(All(RooflineVerdict(r)), "the FFN pool lacks what the attention pool has to spare"));
  request.ffn.nic_gbytes_s /= 2;  // NICs of another kind cannot
  EXPECT_FALSE(Has(All(RooflineVerdict(MakeRoofline(request))), "moved there"));
}

TEST(Roofline, WhatCannotBe) {
  const auto message = [](auto change) {
    RooflineRequest request = RequestOf("deepseek-moe");
    change(&request);
    try {
      MakeRoofline(request);
    } catch (const Error& e) {
      return std::string(e.what());
    }
    return std::string();
  };
  using R = RooflineRequest;
  EXPECT_TRUE(Has(message([](R* r) { r->ffn_workers = 65; }), "65"));
  EXPECT_TRUE(Has(message([](R* r) { r->ffn_workers = 0; }), "FFN workers"));
  EXPECT_TRUE(Has(message([](R* r) { r->seq_length = 0; }), "tokens"));
  EXPECT_TRUE(Has(message([](R* r) { r->nics_a = -1; }), "NICs"));
  EXPECT_TRUE(Has(message([](R* r) { r->nics_f = NAN; }), "NICs"));
  EXPECT_TRUE(Has(message([](R* r) { r->tokens = INFINITY; }), "tokens"));
  EXPECT_TRUE(Has(message([](R* r) { r->model.num_experts = 0; }), "without experts"));
  EXPECT_TRUE(Has(message([](R* r) { r->model.dense.assign(28, true); }), "without experts"));
}

TEST(Roofline, Numbers) {
  EXPECT_EQ(Grouped(0), "0");
  EXPECT_EQ(Grouped(999.6), "1,000");
  EXPECT_EQ(Grouped(1234567), "1,234,567");
  EXPECT_EQ(Figures(0.4666), "0.467");
  EXPECT_EQ(Figures(0.99996), "1.00");
  EXPECT_EQ(Figures(9.996), "10.0");
  EXPECT_EQ(Figures(99.96), "100");
  EXPECT_EQ(SequenceName(32768), "32K");
  EXPECT_EQ(SequenceName(5000), "5,000");
  EXPECT_EQ(LogAxis({2, 50}).Ticks(), (std::vector<double>{2, 5, 10, 20, 50}));
  EXPECT_EQ(LogAxis({10, 1e5}).Ticks().size(), 5);
  EXPECT_DOUBLE_EQ(LogAxis({10, 1000}).At(100), 0.5);
}

// Lines of a text, and characters of one in UTF-8.
std::vector<std::string> Lines(const std::string& text) {
  std::istringstream in(text);
  std::vector<std::string> out;
  for (std::string line; std::getline(in, line);) out.push_back(line);
  return out;
}

size_t Characters(const std::string& line) {
  return static_cast<size_t>(std::count_if(line.begin(), line.end(), [](char c) { return (c & 0xC0) != 0x80; }));
}

std::vector<RooflineRequest> Different() {
  std::vector<RooflineRequest> out{RequestOf("deepseek-moe"), RequestOf("qwen3-235b-a22b", 32768, Dedup::kWorker),
                                   RequestOf("gpt-oss-120b", 1), RequestOf("deepseek-v3", 1 << 20, Dedup::kNode)};
  out[1].nics_a = 0.01, out[1].nics_f = 20;
  out[2].attention = LoadCluster("laptop");
  out[3].ffn.nic_gbytes_s = 1e5;
  return out;
}

TEST(RooflineText, LinesAreShort) {
  for (const RooflineRequest& request : Different()) {
    const Roofline r = MakeRoofline(request);
    for (const std::string& line : Lines(RooflineText(r))) EXPECT_LE(line.size(), 100) << line;
    EXPECT_TRUE(Has(RooflineText(r), "as published"));
  }
}

TEST(RooflineText, JsonHasTheSame) {
  const Roofline r = MakeRoofline(RequestOf("gpt-oss-120b", 8192));
  const nlohmann::json j = nlohmann::json::parse(RooflineJson(r).dump());
  EXPECT_DOUBLE_EQ(j["attention"]["forward"]["flop_per_byte"], r.attention.forward.intensity());
  EXPECT_EQ(j["ffn"]["step"]["bound"], r.ffn.step.over(r.ffn.nics) < 1 ? "network" : "compute");
  EXPECT_DOUBLE_EQ(j["gpu_ratio"]["both"], r.ratio_both);
  EXPECT_EQ(j["compute_bound_from_seq_length"]["nominal"], *r.crossing.nominal);
  EXPECT_EQ(j["attention_by_seq_length"].size(), 4);
  EXPECT_EQ(j["verdict"].size(), RooflineVerdict(r).size());
}

TEST(RooflineDrawing, LinesOfOneWidthWithEveryMark) {
  for (const RooflineRequest& request : Different()) {
    const Roofline r = MakeRoofline(request);
    for (int columns : {72, 80, 100, 133}) {
      const std::string drawing = DrawRoofline(r, columns);
      const std::vector<std::string> lines = Lines(drawing);
      EXPECT_EQ(lines.size(), 21);
      std::string plot;
      for (size_t i = 0; i < lines.size(); ++i) {
        EXPECT_EQ(Characters(lines[i]), columns) << lines[i];
        if (i > 0 && i <= 16) plot += lines[i];
      }
      for (char mark : {'A', 'F', 'a', 'f'}) EXPECT_EQ(std::count(plot.begin(), plot.end(), mark), 1) << mark;
      EXPECT_EQ(std::count(plot.begin(), plot.end(), '*'), 2);
    }
    EXPECT_EQ(DrawRoofline(r, 1), DrawRoofline(r, 72));
  }
}

// A roof is a slope and a flat: of what is computed twice as often for a byte, A is in the same line or higher.
TEST(RooflineDrawing, HigherIsMore) {
  const auto line_of_a = [](int64_t s) {
    const std::vector<std::string> lines = Lines(DrawRoofline(MakeRoofline(RequestOf("qwen3-235b-a22b", s)), 80));
    for (size_t i = 1; i < lines.size(); ++i) {
      if (Has(lines[i], "A")) return i;
    }
    return size_t{0};
  };
  EXPECT_GT(line_of_a(4096), line_of_a(16384));
  EXPECT_GT(line_of_a(16384), line_of_a(131072));
}

// Elements close in the order in which they opened, attributes are quoted and numbers finite.
void ExpectXml(const std::string& xml) {
  std::vector<std::string> open;
  size_t at = 0;
  for (size_t begin = 0; (begin = xml.find('<', at)) != std::string::npos;) {
    EXPECT_EQ(xml.substr(at, begin - at).find('>'), std::string::npos);
    const size_t end = xml.find('>', begin);
    ASSERT_NE(end, std::string::npos);
    const std::string tag = xml.substr(begin + 1, end - begin - 1);
    const std::string name = tag.substr(0, tag.find_first_of(" />", 1));
    EXPECT_EQ(std::count(tag.begin(), tag.end(), '"') % 2, 0) << tag;
    if (tag[0] == '/') {
      ASSERT_FALSE(open.empty());
      EXPECT_EQ("/" + open.back(), tag);
      open.pop_back();
    } else if (tag.back() != '/') {
      open.push_back(name);
    }
    at = end + 1;
  }
  EXPECT_TRUE(open.empty());
}

// Every coordinate is finite and in the picture; the roofs are in the plot (its corners are 72, 56 and 960, 470).
void ExpectInside(const std::string& svg) {
  for (const char* name : {"x", "y", "x1", "x2", "y1", "y2", "cx", "cy", "points"}) {
    const std::string key = std::string(" ") + name + "=\"";
    const bool roof = std::string(name) == "points";
    for (size_t at = svg.find(key); at != std::string::npos; at = svg.find(key, at + 1)) {
      const size_t begin = at + key.size();
      std::string values = svg.substr(begin, svg.find('"', begin) - begin);
      std::replace(values.begin(), values.end(), ',', ' ');
      std::istringstream in(values);
      int count = 0;
      for (std::string value; in >> value; ++count) {
        const double x = std::stod(value);
        const bool vertical = roof ? count % 2 == 1 : Has(name, "y");
        EXPECT_TRUE(std::isfinite(x)) << name << " " << values;
        EXPECT_GE(x, roof ? (vertical ? 56 : 72) : 0) << name << " " << values;
        EXPECT_LE(x, roof ? (vertical ? 470 : 960) : (vertical ? 640 : 1000)) << name << " " << values;
      }
      EXPECT_EQ(count, roof ? 6 : 1);
    }
  }
}

TEST(RooflineSvg, IsXmlWithFiniteNumbers) {
  for (RooflineRequest& request : Different()) {
    request.model.name = "<a & \"b\">";
    const std::string svg = RooflineSvg(MakeRoofline(request));
    ExpectXml(svg);
    ExpectInside(svg);
    EXPECT_TRUE(Has(svg, "&lt;a &amp; &quot;b&quot;&gt;"));
    EXPECT_EQ(svg.find("http", svg.find("2000/svg")), std::string::npos) << "nothing is loaded from elsewhere";
  }
  const std::string svg = RooflineSvg(MakeRoofline(RequestOf("qwen3-235b-a22b", 8192)));
  for (const char* word : {">4K<", ">A 8K<", ">16K<", ">32K<", ">F experts<", "FLOP for each byte", "TFLOP/s of a"}) {
    EXPECT_TRUE(Has(svg, word)) << word;
  }
}

}  // namespace
}  // namespace disagmoe
