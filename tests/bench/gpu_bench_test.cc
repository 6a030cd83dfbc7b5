// SPDX-License-Identifier: Apache-2.0
// The parts of the GPU benchmark that need no GPU: the grid, the table of peers, the reports.
#include <fmt/core.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <fstream>
#include <nlohmann/json.hpp>
#include <set>

#include "bench/gpu_report.h"
#include "fovea/error.h"
#include "support/expect_error.h"

namespace fovea::bench {
namespace {

const GpuCase& case_named(const std::vector<GpuCase>& cases, const std::string& name) {
  for (const GpuCase& config : cases) {
    if (config.name() == name) return config;
  }
  throw std::runtime_error("no case " + name);
}

class PeerFile {
 public:
  explicit PeerFile(const std::string& rows) : path_(::testing::TempDir() + "peers.csv") {
    std::ofstream(path_)
        << "peer,case,dtype,B,Hq,Hkv,D,Sq,Skv,page,us,tflops,gbps,note\n"
        << "probe,ceiling-read,-,0,0,0,0,0,0,0,3782,0.0,4000,run1: ldcs over 16 GB\n"
        << "cuBLAS,ceiling-gemm8192-NN,bf16,0,0,0,0,8192,8192,0,1388,800,0,run2\n"
        << rows;
  }
  ~PeerFile() { std::remove(path_.c_str()); }
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

GpuReport one_result() {
  GpuReport report;
  report.device.name = "Test GPU";
  report.ceilings = {.read_bytes = 4e12, .matmul_flops = 8e14, .fp8_matmul_flops = 16e14};
  GpuResult result{.config = gpu_cases(GpuSuite::quick).front(), .backend = "flash"};
  result.forward.seconds = 300e-6;
  result.peers = {{"A", 330e-6, 64, false}, {"B", 270e-6, 16, false}};
  report.results.push_back(result);
  GpuResult refused{.config = gpu_cases(GpuSuite::quick)[1]};
  refused.refused = "too large, by far\nreally\n";
  report.results.push_back(refused);
  return report;
}

TEST(GpuCases, NamesAreUnique) {
  for (const GpuSuite suite : {GpuSuite::quick, GpuSuite::table, GpuSuite::full}) {
    std::set<std::string> names;
    for (const GpuCase& config : gpu_cases(suite)) {
      EXPECT_TRUE(names.insert(config.name()).second) << config.name();
      for (const RequestLengths& request : config.requests) {
        EXPECT_LE(request.q_len, request.kv_len) << config.name();
      }
    }
  }
}

TEST(GpuCases, CountWork) {
  const std::vector<GpuCase> cases = gpu_cases(GpuSuite::full);
  const GpuCase& prefill = case_named(cases, "prefill-causal 2x8k h32/8 d128 p64");
  EXPECT_EQ(prefill.flops(), 4.0 * 2 * 32 * 128 * (8192.0 * 8193 / 2));
  const GpuCase& decode = case_named(cases, "decode 8x4k h32/8 d128 p16");
  EXPECT_EQ(decode.kv_bytes(), 8.0 * 4096 * 8 * 256 * 2);
  EXPECT_EQ(decode.bytes(), decode.kv_bytes() + 2.0 * 8 * 32 * 128 * 2);
  const GpuCase& mla = case_named(cases, "mla-decode 8x4k h128/1 d576 p64");
  EXPECT_EQ(mla.kv_bytes(), 8.0 * 4096 * 576 * 2);
  EXPECT_EQ(mla.flops(), 2.0 * 8 * 4096 * 128 * (576 + 512));
  const GpuCase& projected = case_named(cases, "mla-decode-projected 8x4k h128/1 d576 p64");
  EXPECT_EQ(projected.flops(), mla.flops() + 2.0 * 8 * 128 * 512 * 256);
  EXPECT_EQ(projected.bytes(), mla.kv_bytes() + 2.0 * 128 * (8 * (192 + 128) + 512 * 256));
  const GpuCase& latent = case_named(cases, "mla-prefill 8x2k h16/1 d576 p64");
  EXPECT_EQ(latent.flops(), 2.0 * 8 * 16 * (2048.0 * 2049 / 2 * (192 + 128) + 2048.0 * 512 * 256));
  const GpuCase& window = case_named(cases, "prefill-window-1k 4x4k h32/8 d128 p64");
  EXPECT_EQ(window.flops(), 4.0 * 4 * 32 * 128 * (1024.0 * 1025 / 2 + 3072.0 * 1024));
  const GpuCase& chunk = case_named(cases, "prefill-chunk-8k 1x32k h32/8 d128 p64");
  EXPECT_EQ(chunk.flops(), 4.0 * 32 * 128 * 4 * (8192.0 * 8193 / 2));
}

TEST(PeerTable, FindsTheWorkAtEveryPageSizeAndScalesByTheCeilingThatBinds) {
  const PeerFile file(
      "FA3,decode,bf16,8,32,8,128,1,4096,64,40,1,1,run2, with a comma\n"
      "FA3,decode,bf16,8,32,8,128,1,4096,64,30,1,1,run1 hot\n"
      "FlashInfer,decode,bf16,8,32,8,128,1,4096,16,44,1,1,run2\n"
      "FA3,decode,bf16,8,32,8,128,1,1024,16,9,1,1,run2\n"
      "FA3,prefill-causal,bf16,2,32,8,128,8192,8192,0,1500,1,1,run2\n"
      "cuDNN,mla-prefill-causal,bf16,8,16,16,192/128,2048,2048,0,372,1,1,run2\n");
  const PeerTable table = PeerTable::open(file.path());
  const GpuCeilings here{.read_bytes = 5e12, .matmul_flops = 4e14, .fp8_matmul_flops = 8e14};
  const std::vector<GpuCase> cases = gpu_cases(GpuSuite::full);
  const GpuCase& decode = case_named(cases, "decode 8x4k h32/8 d128 p16");
  const auto found = table.find(decode, PowerState::burst, here);
  ASSERT_EQ(found.size(), 2u);
  EXPECT_DOUBLE_EQ(best_peer(found)->seconds, 40e-6 * 4 / 5);
  EXPECT_DOUBLE_EQ(best_peer_with_page(found, 16)->seconds, 44e-6 * 4 / 5);
  EXPECT_TRUE(table.find(decode, PowerState::sustained, here).empty());
  const GpuCase& prefill = case_named(cases, "prefill-causal 2x8k h32/8 d128 p64");
  const auto dense = table.find(prefill, PowerState::burst, here);
  ASSERT_EQ(dense.size(), 1u);
  EXPECT_DOUBLE_EQ(best_peer_with_page(dense, 64)->seconds, 1500e-6 * 2);
  const GpuCase& latent = case_named(cases, "mla-prefill-causal 8x2k h16/16 d192 p64");
  EXPECT_EQ(table.find(latent, PowerState::burst, here).size(), 1u);
  // Peers were not given the projections.
  const GpuCase& whole = case_named(cases, "mla-prefill 8x2k h16/1 d576 p64");
  EXPECT_TRUE(table.find(whole, PowerState::burst, here).empty());
}

TEST(PeerTable, NamesTheLineThatIsWrong) {
  const PeerFile file("FA3,decode,bf16,8\n");
  test::expect_error(ErrorCode::corrupt_file, ":4: 4 columns",
                     [&] { PeerTable::open(file.path()); });
  EXPECT_THROW(PeerTable::open("/nowhere/peers.csv"), Error);
}

TEST(GpuReport, EveryFormatHasTheRatioAndTheRefusal) {
  const GpuReport report = one_result();
  const std::string markdown = to_markdown(report);
  EXPECT_NE(markdown.find("1.10 A"), std::string::npos) << markdown;
  EXPECT_NE(markdown.find("0.90 B"), std::string::npos) << markdown;
  EXPECT_NE(markdown.find(fmt::format("Refused: {}: too large, by far; really.\n",
                                      report.results[1].config.name())),
            std::string::npos)
      << markdown;
  const auto json = nlohmann::json::parse(to_json({&report, 1}));
  EXPECT_EQ(json["results"][0]["seconds"], 300e-6);
  EXPECT_EQ(json["results"][1]["refused"], "too large, by far\nreally\n");
  const std::string csv = to_csv({&report, 1});
  size_t begin = 0;
  int commas = -1;
  for (size_t end; (end = csv.find('\n', begin)) != std::string::npos; begin = end + 1) {
    const auto count = static_cast<int>(std::count(&csv[begin], &csv[end], ','));
    if (commas < 0) commas = count;
    EXPECT_EQ(count, commas) << csv.substr(begin, end - begin);
  }
}

TEST(GpuReport, CeilingsAloneSayNothingOfAFirstCall) {
  GpuReport report = one_result();
  report.results.clear();
  report.first = {};
  const auto json = nlohmann::json::parse(to_json({&report, 1}));
  EXPECT_TRUE(json.contains("ceilings"));
  EXPECT_FALSE(json.contains("first_call"));
}

TEST(GpuReport, SeveralStatesAreOneDocument) {
  std::vector<GpuReport> reports(2, one_result());
  reports[1].state = PowerState::sustained;
  const auto json = nlohmann::json::parse(to_json(reports));
  ASSERT_EQ(json.size(), 2u);
  EXPECT_EQ(json[0]["state"], "burst");
  EXPECT_EQ(json[1]["state"], "sustained");
  const std::string csv = to_csv(reports);
  EXPECT_EQ(csv.rfind("case,phase,state"), 0u) << "a header in the middle: " << csv;
  EXPECT_EQ(std::count(csv.begin(), csv.end(), '\n'), 1 + 2 * 2) << csv;
  EXPECT_NE(csv.find(",sustained,flash,"), std::string::npos) << csv;
}

TEST(GpuReport, ComparesMixedInvariantAndPageSizes) {
  GpuReport report = one_result();
  report.results.clear();
  const std::vector<GpuCase> cases = gpu_cases(GpuSuite::table);
  const auto add = [&](const std::string& name, double microseconds) {
    GpuResult result{.config = case_named(cases, name)};
    result.forward.seconds = microseconds * 1e-6;
    report.results.push_back(result);
  };
  add("mixed 2x4k+64x8k h32/8 d128 p64", 500);
  add("prefill-causal 2x4k h32/8 d128 p64", 350);
  add("decode 64x8k h32/8 d128 p64", 250);
  add("extend 8x512 over 8k h32/8 d128 p1", 110);
  add("extend 8x512 over 8k h32/8 d128 p64", 100);
  add("extend 8x512 over 8k h32/8 d128 p64 invariant", 105);
  const std::string text = to_markdown(report);
  EXPECT_NE(text.find("600.0 us one after the other, 1.20 times faster"), std::string::npos)
      << text;
  EXPECT_NE(text.find("Batch-invariant over default: extend 8x512 over 8k h32/8 d128 p64 1.05.\n"),
            std::string::npos)
      << text;
  EXPECT_NE(text.find("page size: extend 8x512 over 8k h32/8 d128 1.10.\n"), std::string::npos)
      << text;
}

TEST(GpuReport, RooflineHasADotForTheResultAndARingForThePeer) {
  const std::string svg = to_svg(one_result());
  EXPECT_EQ(svg.rfind("</svg>\n"), svg.size() - 7);
  EXPECT_NE(svg.find("300.0 us"), std::string::npos);
  EXPECT_NE(svg.find("fill=\"none\" stroke=\"#1f77b4\""), std::string::npos);
}

}  // namespace
}  // namespace fovea::bench
