// SPDX-License-Identifier: Apache-2.0
#include "bench/gpu_peers.h"

#include <fmt/core.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>

#include "core/check.h"

namespace fovea::bench {
namespace {

enum Column {
  kPeer,
  kCase,
  kDtype,
  kBatch,
  kQHeads,
  kKvHeads,
  kDim,
  kQLen,
  kKvLen,
  kPage,
  kUs,
  kTflops,
  kGbps,
  kNote,
  kColumns
};

std::vector<std::string> split(const std::string& line) {
  std::vector<std::string> cells;
  std::istringstream stream(line);
  for (std::string cell; cells.size() + 1 < kColumns && std::getline(stream, cell, ',');) {
    cells.push_back(cell);
  }
  std::string note;
  if (std::getline(stream, note)) cells.push_back(note);  // may contain commas
  return cells;
}

// Returns the name of a case in the table. All requests have equal lengths, except in
// decode-varlen.
std::string key_of(const GpuCase& config, PowerState state) {
  const RequestLengths& first = config.requests.front();
  std::string phase = config.phase;
  if (state == PowerState::sustained) phase += "-sustained";
  const std::string lengths =
      config.phase == "decode-varlen" ? "1" : fmt::format("{},{}", first.q_len, first.kv_len);
  const bool two_widths = config.phase == "mla-prefill-causal";
  const std::string dims =
      two_widths ? fmt::format("{}/{}", cached_key_dim(config.spec), cached_value_dim(config.spec))
                 : std::to_string(cached_key_dim(config.spec));
  return fmt::format("{},{},{},{},{},{},{}", phase, config.fp8_products() ? "e4m3" : "bf16",
                     config.requests.size(), config.spec.q_heads, config.spec.kv_heads, dims,
                     lengths);
}

std::string key_of(const std::vector<std::string>& cells) {
  const bool varlen = cells[kCase] == "decode-varlen";
  return fmt::format("{},{},{},{},{},{},{}", cells[kCase], cells[kDtype], cells[kBatch],
                     cells[kQHeads], cells[kKvHeads], cells[kDim],
                     varlen ? cells[kQLen] : cells[kQLen] + "," + cells[kKvLen]);
}

}  // namespace

PeerTable PeerTable::open(const std::string& path) {
  std::ifstream file(path);
  if (!file) fail(ErrorCode::io, "{} cannot be read", path);
  PeerTable table;
  std::string line;
  std::getline(file, line);
  for (int number = 2; std::getline(file, line); ++number) {
    const std::vector<std::string> cells = split(line);
    if (cells.size() <= kGbps) {
      fail(ErrorCode::corrupt_file, "{}:{}: {} columns, expected {}", path, number, cells.size(),
           static_cast<int>(kColumns));
    }
    const std::string note = cells.size() > kNote ? cells[kNote] : "";
    const std::string& name = cells[kCase];
    const double seconds = std::atof(cells[kUs].c_str()) * 1e-6;
    if (name == "ceiling-read" && note.find("ldcs") != std::string::npos && seconds > 1e-3) {
      table.read_bytes_ = std::max(table.read_bytes_, std::atof(cells[kGbps].c_str()) * 1e9);
    }
    if (note.starts_with("run1")) continue;
    const double flops = std::atof(cells[kTflops].c_str()) * 1e12;
    if (name == "ceiling-gemm8192-NN") table.matmul_flops_["burst"] = flops;
    if (name == "ceiling-gemm8192-NN-sustained") table.matmul_flops_["sustained"] = flops;
    if (name == "ceiling-gemm8192-fastacc") table.matmul_flops_["fp8"] = flops;
    if (name.starts_with("ceiling")) continue;
    table.figures_.emplace(key_of(cells),
                           Figure{cells[kPeer], std::atoi(cells[kPage].c_str()), seconds});
  }
  if (table.read_bytes_ == 0 || !table.matmul_flops_.contains("burst")) {
    fail(ErrorCode::corrupt_file, "{}: no rows ceiling-read and ceiling-gemm8192-NN", path);
  }
  return table;
}

std::vector<PeerTime> PeerTable::find(const GpuCase& config, PowerState state,
                                      const GpuCeilings& ceilings) const {
  const bool compute_bound =
      config.flops() / ceilings.peak(config.fp8_products()) > config.bytes() / ceilings.read_bytes;
  double scale = read_bytes_ / ceilings.read_bytes;
  if (compute_bound) {
    const std::string which = config.fp8_products() ? "fp8" : std::string(power_state_name(state));
    const auto peak = matmul_flops_.find(which);
    if (peak == matmul_flops_.end()) return {};
    scale = peak->second / ceilings.peak(config.fp8_products());
  }
  std::vector<PeerTime> found;
  const auto [begin, end] = figures_.equal_range(key_of(config, state));
  for (auto figure = begin; figure != end; ++figure) {
    found.push_back(
        {figure->second.peer, figure->second.seconds * scale, figure->second.page_size, false});
  }
  return found;
}

std::map<std::string, std::vector<PeerTime>> run_peers(
    const std::string& script, const std::string& kinds, const std::vector<GpuCase>& cases,
    PowerState state, const std::function<void(std::string_view)>& progress) {
  nlohmann::json list = nlohmann::json::array();
  for (const GpuCase& config : cases) {
    const RequestLengths& first = config.requests.front();
    const bool uniform = std::ranges::all_of(config.requests, [&](const RequestLengths& request) {
      return request.q_len == first.q_len && request.kv_len == first.kv_len;
    });
    // scaled_dot_product_attention supports one length, heads of one width, bf16, and no features.
    if (!uniform || config.spec.kind != AttentionKind::mha || is_fp8(config.kv_dtype) ||
        config.has_features()) {
      continue;
    }
    list.push_back({{"name", config.name()},
                    {"phase", config.phase},
                    {"batch", config.requests.size()},
                    {"q_len", first.q_len},
                    {"kv_len", first.kv_len},
                    {"q_heads", config.spec.q_heads},
                    {"kv_heads", config.spec.kv_heads},
                    {"head_dim", cached_key_dim(config.spec)}});
  }
  std::string path = "/tmp/fovea_peer_cases_XXXXXX";
  const int file = mkstemp(path.data());
  if (file < 0) fail(ErrorCode::io, "{} cannot be made", path);
  const std::string text = list.dump();
  const bool written = write(file, text.data(), text.size()) == static_cast<ssize_t>(text.size());
  close(file);
  if (!written) fail(ErrorCode::io, "{} cannot be written", path);

  const std::string command = fmt::format("python3 '{}' --peers '{}' --state {} < {}", script,
                                          kinds, power_state_name(state), path);
  FILE* pipe = popen(command.c_str(), "r");
  if (!pipe) fail(ErrorCode::io, "python3 cannot be started");
  std::map<std::string, std::vector<PeerTime>> found;
  std::array<char, 4096> line;
  while (fgets(line.data(), line.size(), pipe)) {
    const auto row = nlohmann::json::parse(line.data(), nullptr, /*allow_exceptions=*/false);
    if (row.is_discarded() || !row.contains("seconds")) continue;
    const std::string name = row["case"];
    const std::string peer = row["peer"];
    if (progress) progress(fmt::format("{}: {}", peer, name));
    found[name].push_back({peer + " (torch)", row["seconds"], 0, true});
  }
  const int status = pclose(pipe);
  unlink(path.c_str());
  if (status != 0) fail(ErrorCode::unsupported, "{} failed with status {}", script, status);
  return found;
}

std::optional<PeerTime> best_peer(const std::vector<PeerTime>& peers) {
  const auto best = std::ranges::min_element(peers, {}, &PeerTime::seconds);
  return best == peers.end() ? std::nullopt : std::optional(*best);
}

std::optional<PeerTime> best_peer_with_page(const std::vector<PeerTime>& peers, int32_t page_size) {
  std::vector<PeerTime> same = peers;
  std::erase_if(same, [&](const PeerTime& peer) {
    return peer.page_size != 0 && peer.page_size != page_size;
  });
  return best_peer(same);
}

}  // namespace fovea::bench
