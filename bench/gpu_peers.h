// SPDX-License-Identifier: Apache-2.0
// Times of other libraries on the cases of gpu_cases.h: measured in the same run through PyTorch,
// or read from a table of figures taken on the same kind of GPU.
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
  int32_t page_size = 0;  // 0: contiguous keys
  bool measured = false;  // in this run; otherwise from the table, scaled by the ceilings
};

// Figures of a table, CSV with the columns peer, case, dtype, B, Hq, Hkv, D, Sq, Skv, page, us,
// tflops, gbps, note. Cases are named by phase, with "-sustained" behind it for that power state;
// rows of a first run ("run1" in the note) are left out. Rows of case ceiling-* say what the
// machine reached.
class PeerTable {
 public:
  // Error{io} or Error{corrupt_file} naming the line.
  static PeerTable open(const std::string& path);

  // Every figure of this work, at any page size, as it would be under the ceilings of this run:
  // scaled by the ratio of bandwidths or of matrix products, whichever binds.
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

// Runs the script with the cases on its standard input; every peer's times by case name. `kinds`:
// which of its peers, comma-separated.
// Error{unsupported} when it fails, for instance without torch.
std::map<std::string, std::vector<PeerTime>> run_peers(
    const std::string& script, const std::string& kinds, const std::vector<GpuCase>& cases,
    PowerState state, const std::function<void(std::string_view)>& progress);

// The fastest; nullopt when empty. same_page: of those whose page size is `page_size`, or whose
// keys are contiguous.
std::optional<PeerTime> best_peer(const std::vector<PeerTime>& peers);
std::optional<PeerTime> best_peer_with_page(const std::vector<PeerTime>& peers, int32_t page_size);

}  // namespace fovea::bench
