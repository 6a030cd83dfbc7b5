// SPDX-License-Identifier: Apache-2.0
// Drafts whose acceptance is given, to measure the speed of steps apart from the quality of drafts.
#include <algorithm>
#include <cmath>

#include "engine/drafter.h"
#include "kernels/philox.h"

namespace fovea {
namespace {

// Returns p with 1 + p + p^2 + ... + p^drafts = length, by bisection.
double acceptance_for(double length, int32_t drafts) {
  double low = 0, high = 1;
  for (int i = 0; i < 60; ++i) {
    const double p = (low + high) / 2;
    double sum = 0, power = 1;
    for (int32_t k = 0; k <= drafts; ++k, power *= p) sum += power;
    (sum < length ? low : high) = p;
  }
  return (low + high) / 2;
}

class OracleDrafter final : public Drafter {
 public:
  OracleDrafter(double length, int32_t max_drafts, int32_t vocabulary)
      : acceptance_(acceptance_for(length, max_drafts)), vocabulary_(vocabulary) {}

  void draft(std::span<Request* const> requests, int32_t max_drafts, int32_t) override {
    for (Request* const request : requests) {
      request->drafts.begin(request->tokens.back());
      const int32_t count = std::min(max_drafts, request->max_drafts());
      for (int32_t i = 0; i < count; ++i) {
        const double drawn = number(*request, i + 1);
        request->drafts.tokens.push_back(static_cast<int32_t>(drawn * vocabulary_));
      }
    }
  }
  int32_t accepted_anyway(const Request& request) const override {
    const int32_t drafts = request.drafts.drafts();
    const double drawn = number(request, 0);
    int32_t accepted = 0;
    for (double p = acceptance_; accepted < drafts && drawn < p; p *= acceptance_) ++accepted;
    return accepted;
  }
  void forget(int64_t) override {}

 private:
  // Returns a number in [0, 1) that depends on the request and its length.
  static double number(const Request& request, int32_t draw) {
    return kernels::uniform_at(static_cast<uint64_t>(request.id),
                               static_cast<uint64_t>(request.length()),
                               static_cast<uint32_t>(draw));
  }

  double acceptance_;
  int32_t vocabulary_;
};

}  // namespace

std::unique_ptr<Drafter> make_oracle_drafter(double length, int32_t max_drafts,
                                             int32_t vocabulary) {
  return std::make_unique<OracleDrafter>(length, max_drafts, vocabulary);
}

}  // namespace fovea
