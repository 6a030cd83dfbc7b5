// SPDX-License-Identifier: Apache-2.0
// Times of other libraries on the cases of gpu_cases.h, either measured in the same run through
// PyTorch, or read from a table measured on the same kind of GPU.
#pragma once

#include <functional>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "bench/gpu_cases.h"
#include "bench/gpu_ceilings.h"

namespace fovea::bench {

struct PeerTime {
  std::string name;  // "FA3", "cuDNN (torch)"
  double seconds = 0;
  int32_t page_size = 0;  // 0 for contiguous keys
  // True if measured in this run; otherwise scaled by the ceilings from the table.
  bool measured = false;
};

// A CSV table with the columns peer, case, dtype, B, Hq, Hkv, D, Sq, Skv, page, us, tflops, gbps,
// note. Cases are named by phase, with the suffix "-sustained" for that power state. Rows of a
// first run ("run1" in the note) are ignored. Rows of cases named ceiling-* give the ceilings of
// the machine.
class PeerTable {
 public:
  // Throws Error{io}, or Error{corrupt_file} naming the line.
  static PeerTable open(const std::string& path);

  // Returns the times of this work at all page sizes, scaled by the ratio of this run's bandwidth
  // or matrix product rate to the table's, whichever binds.
  std::vector<PeerTime> find(const GpuCase& config, PowerState state,
                             const GpuCeilings& ceilings) const;

 private:
  struct Figure {
    std::string peer;
    int32_t page_size = 0;
    double seconds = 0;
  };
  std::multimap<std::string, Figure> figures_;  // by case, dtype and shape
  double read_bytes_ = 0;
  std::map<std::string, double> matmul_flops_;  // by power state, and "fp8"
};

// Runs the script with the cases on its standard input and returns all peers' times by case name.
// `kinds` selects its peers, comma-separated. Throws Error{unsupported} if the script fails, for
// example without torch.
std::map<std::string, std::vector<PeerTime>> run_peers(
    const std::string& script, const std::string& kinds, const std::vector<GpuCase>& cases,
    PowerState state, const std::function<void(std::string_view)>& progress);

// Returns the fastest peer, or nullopt if there is none. With same_page, considers only peers with
// that page size or with contiguous keys.
std::optional<PeerTime> best_peer(const std::vector<PeerTime>& peers);
std::optional<PeerTime> best_peer_with_page(const std::vector<PeerTime>& peers, int32_t page_size);

}  // namespace fovea::bench
