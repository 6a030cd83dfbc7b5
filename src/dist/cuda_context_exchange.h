// SPDX-License-Identifier: Apache-2.0
// Queries and states of context parallel attention on GPUs.
#pragma once

#include <memory>

#include "dist/context_links.h"
#include "fovea/context_parallel.h"
#include "kernels/cuda/portable/context/launch.h"

namespace fovea {

class CudaContextExchange final : public ContextExchange {
 public:
  // `links` must outlive it unless it gets `own`, the same object, too. Throws Error{unsupported}
  // for types and widths without a kernel.
  CudaContextExchange(const ContextExchangeShape& shape, ContextLinks& links,
                      std::unique_ptr<ContextLinks> own = {});
  ~CudaContextExchange() override { links_.context().bind_to_free(); }

  // Rows of `all` and of `part` are those of the tokens order[row], an array of the device; null:
  // of the tokens as they come.
  void set_order(const int32_t* order) { order_ = order; }

  void gather_queries(const HeadRows& q, const HeadRows& all, int64_t tokens,
                      Stream stream) override;
  void merge(const AttentionState& part, const AttentionState& merged, int64_t tokens,
             const float* sinks, Stream stream) override;

 private:
  // How a call is cut into messages.
  struct Pieces {
    int64_t tokens;
    int32_t dim;  // values of a head
    int64_t at_once;
    bool has_parts;  // every rank gets a message of its own
  };
  template <typename Params, typename Launch, typename Communicate>
  void run(Params params, const Pieces& pieces, const Launch& launch,
           const Communicate& communicate);
  int64_t tokens_at_once(int64_t words_of_head) const;

  const ContextExchangeShape shape_;
  std::unique_ptr<ContextLinks> own_links_;
  ContextLinks& links_;
  kernels::cuda::ContextMail mail_;
  const int32_t* order_ = nullptr;
};

}  // namespace fovea
