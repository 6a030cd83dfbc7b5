// SPDX-License-Identifier: Apache-2.0
#include "attention/host/speculation.h"

#include <algorithm>
#include <limits>
#include <vector>

#include "attention/draft_params.h"
#include "attention/row_pieces.h"
#include "attention/validate/drafts.h"
#include "kernels/cpu/drafts.h"

namespace fovea {
namespace {

namespace cpu = kernels::cpu;

constexpr int32_t kMaxPieceBytes = 1 << 20;

class HostSpeculation final : public Speculation {
 public:
  HostSpeculation(const SpeculationLimits& limits, std::span<KvPool* const> pools,
                  ThreadPool& threads)
      : limits_(limits), threads_(threads), pieces_(row_pieces(pools, kMaxPieceBytes)) {
    for (const kernels::RowPiece& piece : pieces_) slots_ = std::min(slots_, piece.slots);
  }

  void describe(const Drafts& drafts, const DraftPlaces& places, const DraftArrays& arrays,
                Stream) override {
    check_drafts(drafts, limits_);
    check_describe(drafts, places, arrays);
    check_draft_entries(drafts);
    if (!arrays.out_slots.empty()) check_place_entries(drafts, places);
    cpu::describe_drafts(describe_params(drafts, places, arrays));
  }

  void accept(const Drafts& drafts, const TargetTokens& target, const AcceptedDrafts& accepted,
              Stream) override {
    check_drafts(drafts, limits_);
    check_accept(drafts, target, accepted);
    check_draft_entries(drafts);
    cpu::accept_tokens(accept_params(drafts, target, accepted));
  }

  void accept(const Drafts& drafts, const TargetProbabilities& target,
              const AcceptedDrafts& accepted, Stream) override {
    check_drafts(drafts, limits_);
    check_accept(drafts, target, accepted);
    check_draft_entries(drafts);
    check_token_entries(drafts, target.vocabulary);
    cpu::accept_sampled(accept_params(drafts, target, accepted), threads_);
  }

  void commit(const Drafts& drafts, const DraftArrays& arrays, const AcceptedDrafts& accepted,
              const CommittedArrays& committed, Stream) override {
    check_drafts(drafts, limits_);
    check_commit(drafts, arrays, accepted, committed);
    check_commit_entries(drafts, arrays, accepted, slots_);
    cpu::commit_drafts(commit_params(drafts, arrays, accepted, committed, pieces_), threads_);
  }

 private:
  const SpeculationLimits limits_;
  ThreadPool& threads_;
  const std::vector<kernels::RowPiece> pieces_;
  int64_t slots_ = std::numeric_limits<int32_t>::max();
};

}  // namespace

std::unique_ptr<Speculation> make_host_speculation(const SpeculationLimits& limits,
                                                   std::span<KvPool* const> pools,
                                                   ThreadPool& threads) {
  return std::make_unique<HostSpeculation>(limits, pools, threads);
}

}  // namespace fovea
