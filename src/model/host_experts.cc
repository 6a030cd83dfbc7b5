// SPDX-License-Identifier: Apache-2.0
// Groups rows by expert and runs one expert after another.
#include "model/host_experts.h"

#include <algorithm>

#include "core/check.h"
#include "model/layers.h"

namespace fovea {
namespace {

class HostExperts final : public Experts {
 public:
  HostExperts(std::vector<MlpParts> experts, bool weights_scale_input, ModelDevice& device)
      : experts_(std::move(experts)), weights_scale_input_(weights_scale_input), device_(device) {
    check_argument(!experts_.empty(), "there are no experts");
  }

  size_t scratch_bytes(int64_t rows, int32_t top_k) const override {
    Arena counter(device_.activation_dtype());
    buffers(counter, rows, top_k);
    return counter.used();
  }

  void run(const ExpertChoice& choice, Rows x, Rows out, int64_t rows, bool adds,
           std::byte* scratch) const override {
    const int32_t hidden = experts_[0].down.n;
    for (int64_t row = 0; row < rows && !adds; ++row) {
      std::fill_n(out.floats() + row * out.stride, hidden, 0.0f);
    }
    Arena arena(device_.activation_dtype(), {scratch, scratch_bytes(rows, choice.top_k)});
    const Buffers lists = buffers(arena, rows, choice.top_k);
    group(choice, lists, rows);
    for (size_t e = 0; e < experts_.size(); ++e) {
      const int32_t begin = lists.begins[e];
      const int64_t count = lists.begins[e + 1] - begin;
      if (count > 0)
        run_expert(e, count, lists.rows_of_expert + begin, lists.weights + begin, lists, x, out);
    }
  }

 private:
  struct Buffers {
    Rows gathered, out;
    MlpBuffers hidden;
    float* weights;
    int32_t *begins, *rows_of_expert;
  };

  Buffers buffers(Arena& arena, int64_t rows, int32_t top_k) const {
    const auto widest = std::ranges::max_element(experts_, {}, &MlpParts::width);
    return {.gathered = arena.rows(rows, experts_[0].gate.k),
            .out = arena.float_rows(rows, experts_[0].down.n),
            .hidden = mlp_buffers(*widest, arena, rows),
            .weights = arena.floats(rows * top_k),
            .begins = arena.ints(static_cast<int64_t>(experts_.size()) + 1),
            .rows_of_expert = arena.ints(rows * top_k)};
  }

  // Lists the rows of every expert in ascending order: rows_of_expert[begins[e] .. begins[e + 1]).
  void group(const ExpertChoice& choice, const Buffers& lists, int64_t rows) const {
    const int64_t choices = rows * choice.top_k;
    const size_t experts = experts_.size();
    int32_t* const begins = lists.begins;
    std::fill_n(begins, experts + 1, 0);
    for (int64_t i = 0; i < choices; ++i) {
      if (choice.ids[i] >= 0) ++begins[choice.ids[i] + 1];
    }
    for (size_t e = 0; e < experts; ++e) begins[e + 1] += begins[e];
    for (int64_t i = 0; i < choices; ++i) {
      if (choice.ids[i] < 0) continue;
      const int32_t place = begins[choice.ids[i]]++;
      lists.rows_of_expert[place] = static_cast<int32_t>(i / choice.top_k);
      lists.weights[place] = choice.weights[i];
    }
    // Filling has moved every begin to its end, which is the begin of the next expert.
    std::copy_backward(begins, begins + experts, begins + experts + 1);
    begins[0] = 0;
  }

  void run_expert(size_t expert, int64_t rows, const int32_t* index, const float* weights,
                  const Buffers& lists, Rows x, Rows out) const {
    kernels::ExpertRowsParams move;
    move.index = index;
    move.rows = rows;
    move.x = x.floats();
    move.x_stride = x.stride;
    move.out = lists.gathered.floats();
    move.out_stride = lists.gathered.stride;
    move.weight = weights_scale_input_ ? weights : nullptr;
    move.dim = experts_[expert].gate.k;
    kernels::gather_rows(move, *device_.threads());
    apply_mlp(experts_[expert], device_, lists.hidden, lists.gathered, lists.out, rows);
    move.x = lists.out.floats();
    move.x_stride = lists.out.stride;
    move.out = out.floats();
    move.out_stride = out.stride;
    move.weight = weights_scale_input_ ? nullptr : weights;
    move.dim = experts_[expert].down.n;
    kernels::scatter_add_rows(move, *device_.threads());
  }

  std::vector<MlpParts> experts_;
  bool weights_scale_input_;
  ModelDevice& device_;
};

}  // namespace

std::unique_ptr<Experts> make_host_experts(std::vector<MlpParts> experts, bool weights_scale_input,
                                           ModelDevice& device) {
  return std::make_unique<HostExperts>(std::move(experts), weights_scale_input, device);
}

}  // namespace fovea
