// SPDX-License-Identifier: Apache-2.0
#include "bench/gpu_ranks.h"

#include <algorithm>
#include <functional>

#include "bench/rank_timing.h"
#include "core/check.h"
#include "engine/rank_links.h"
#include "fovea/gpu.h"

namespace fovea::bench {
namespace {

// One rank with its buffers.
class Rank {
 public:
  Rank(const ModelRanks& links, int gpu, size_t max_bytes)
      : links_(links),
        context_(gpu),
        send_(max_bytes),
        receive_(max_bytes * static_cast<size_t>(links.communicator->size())) {}
  ~Rank() { context_.bind_to_free(); }

  using Call = std::function<bool(Rank& rank, size_t bytes)>;

  // Returns the time of one call. All ranks call this at once.
  // `expected` is each of its results' first values.
  double microseconds(const Call& call, size_t bytes, float expected) {
    context_.bind();
    fill(bytes);
    links_.host->barrier();
    const bool served = call(*this, bytes);  // libraries load when a call first runs
    gpu::synchronize(stream_.get());
    links_.host->barrier();
    if (!served) return -1;
    const double time = time_calls(*links_.host, stream_.get(), [&] { call(*this, bytes); });
    check(bytes, expected);
    return time;
  }

  bool nccl(size_t bytes) {
    links_.communicator->all_reduce(send_.data(), receive_.data(), count(bytes), DType::f32,
                                    ReduceOp::sum, stream_.get());
    return true;
  }
  bool sums(size_t bytes) {
    return links_.sums != nullptr &&
           links_.sums->all_reduce(send_.data<float>(), receive_.data<float>(), count(bytes),
                                   stream_.get());
  }
  bool gather(size_t bytes) {
    links_.communicator->all_gather(send_.data(), receive_.data(), bytes, stream_.get());
    return true;
  }

 private:
  static int64_t count(size_t bytes) { return static_cast<int64_t>(bytes / sizeof(float)); }

  void fill(size_t bytes) {
    gpu::fill_floats(send_.data<float>(), value(), bytes / sizeof(float), stream_.get());
    gpu::fill_floats(receive_.data<float>(), -1, receive_.bytes() / sizeof(float), stream_.get());
    gpu::synchronize(stream_.get());
  }
  float value() const { return static_cast<float>(links_.communicator->rank() + 1); }

  void check(size_t bytes, float expected) const {
    std::vector<float> got(bytes / sizeof(float));
    gpu::copy_to_host(got.data(), receive_.data(), bytes, stream_.get());
    gpu::synchronize(stream_.get());
    for (const float each : got) {
      if (each == expected) continue;
      fail(ErrorCode::device_failure, "a collective of {} bytes gave {}, expected {}", bytes, each,
           expected);
    }
  }

  const ModelRanks links_;
  gpu::Context context_;
  gpu::OwnedStream stream_;
  gpu::DeviceBuffer send_, receive_;
};

double copy_gbps() {
  constexpr size_t kBytes = size_t{256} << 20;
  constexpr int kTries = 7;
  const gpu::Context other(1);
  gpu::DeviceBuffer from(kBytes);
  const gpu::Context context(0);
  const gpu::DeviceBuffer to(kBytes);
  const gpu::OwnedStream stream;
  double best = 0;
  for (int i = 0; i < kTries; ++i) {
    gpu::Event begin, end;
    begin.record(stream.get());
    gpu::copy_on_device(to.data(), from.data(), kBytes, stream.get());
    end.record(stream.get());
    end.wait();
    best = std::max(best, static_cast<double>(kBytes) / 1e6 / end.milliseconds_since(begin));
  }
  other.bind();
  from = {};
  context.bind();
  return best;
}

}  // namespace

RankFigures measure_ranks(const RankBenchOptions& options) {
  const auto there = static_cast<int>(gpu_devices().size());
  check_argument(options.ranks >= 2, "ranks is {}, must be at least 2", options.ranks);
  if (there < options.ranks) {
    fail(ErrorCode::unsupported, "ranks is {}, there are {} GPUs{}", options.ranks, there,
         why_no_gpu().empty() ? "" : ": " + why_no_gpu());
  }
  std::vector<int> gpus;
  for (int gpu = 0; gpu < options.ranks; ++gpu) gpus.push_back(gpu);
  RankThreads threads(options.ranks, true);
  const ParallelOptions parallel{.tensor_parallel = threads.size(),
                                 .context_parallel = threads.size()};
  RankLinks links(threads, gpus, parallel);
  RankFigures figures;
  figures.copy_gbps = copy_gbps();
  for (size_t bytes = options.min_bytes; bytes <= options.max_bytes; bytes *= 2) {
    figures.times.push_back({.bytes = bytes});
  }
  std::vector<std::unique_ptr<Rank>> ranks(gpus.size());
  const auto measure = [&](int rank) {
    const auto own = static_cast<size_t>(rank);
    const float sum = static_cast<float>(options.ranks * (options.ranks + 1)) / 2;
    ranks[own] = std::make_unique<Rank>(links.of(rank), gpus[own], options.max_bytes);
    for (RankSumTime& time : figures.times) {
      RankSumTime measured = time;
      measured.nccl = ranks[own]->microseconds(&Rank::nccl, time.bytes, sum);
      measured.sums = ranks[own]->microseconds(&Rank::sums, time.bytes, sum);
      measured.gather = ranks[own]->microseconds(&Rank::gather, time.bytes, 1);
      if (rank == 0) time = measured;
    }
    const ModelRanks own_links = links.of(rank);
    std::vector<DecoderLayerTime> decoder_layers = measure_decoder_layers(own_links, gpus[own]);
    std::vector<ContextTime> exchanges = measure_exchanges(own_links, gpus[own]);
    std::vector<ContextLayerTime> layers = measure_context_layers(own_links, gpus[own]);
    if (rank == 0) {
      figures.decoder_layers = std::move(decoder_layers);
      figures.exchanges = std::move(exchanges);
      figures.layers = std::move(layers);
    }
  };
  threads.run([&](int rank) {
    try {
      measure(rank);
    } catch (const std::exception& error) {
      links.abort(error.what());
      throw;
    }
  });
  threads.run([&](int rank) { ranks[static_cast<size_t>(rank)].reset(); });
  return figures;
}

}  // namespace fovea::bench
