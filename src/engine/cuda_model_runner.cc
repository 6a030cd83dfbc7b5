// SPDX-License-Identifier: Apache-2.0
// Passes on a GPU. A decode step replays a graph, and so does one that verifies drafts or computes
// small chunks of prompts. There is a graph for each size of graph_sizes.h; it serves any lengths
// within, because all arrays keep their addresses. Decode steps whose requests share prefixes have
// their own graphs, because the search for groups takes time. Other passes are enqueued. Passes
// of a graph's size without graphs are enqueued exactly as they would be captured, so that their
// bits are the same. One copy uploads the arrays. Tokens are drawn on the GPU, where the next pass
// can take them, and copied to the host; logits only on request. Draws with masks follow the graph.
#include "engine/cuda_model_runner.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <optional>
#include <utility>

#include "core/check.h"
#include "engine/cuda_batch.h"
#include "engine/padded_passes.h"
#include "engine/pass_clock.h"
#include "engine/wait_for_pass.h"
#include "fovea/pass_addresses.h"

namespace fovea {
namespace {

class CudaModelRunner final : public ModelRunner {
 public:
  CudaModelRunner(ReservedModel model, CacheSet& caches, const SharedPrefixes& prefixes,
                  const ModelRunnerOptions& options);
  ~CudaModelRunner() override;
  void enqueue(std::span<const PassPart> parts) override;
  void draw_masked(std::span<const grammar::TokenMask> masks) override;
  PassTimes collect(std::span<float> logits, std::span<int32_t> drawn) override;
  void abandon() override;
  bool draws() const override { return vocabulary() <= kernels::cuda::kMaxVocabulary; }
  bool finds_likeliest() const override { return finds_likeliest_; }
  std::span<const TokenLogprob> likeliest(size_t draw) const override {
    return batch_.likeliest(collected_, draw);
  }
  DrawnLists drawn_lists() const override { return batch_.drawn_lists(); }
  RunnerStats stats() const override { return stats_; }

 private:
  struct Captured {
    gpu::Graph graph;
    PassAddresses addresses;
  };
  // A pass in flight, by its place in the ring of CudaBatch.
  struct Flight {
    gpu::Event begin, end;
    int32_t logit_rows = 0;
    PassSize size;
    size_t masked = 0;  // draws that wait for masks
    void check_drawn() const {
      check_argument(masked == 0, "{} draws of a pass in flight wait for masks", masked);
    }
    struct Draw {
      bool is_drawn, has_logits;
    };
    std::vector<Draw> draws;
  };

  PaddedPassOptions padded_options(const ModelRunnerOptions& options) const;
  void warm_up();
  void run_first(const PassSize& size);
  void capture(const PassSize& size);
  void capture_all();
  void enqueue(const PassSize& size);
  std::span<float> logits_of(int32_t rows) const {
    return {logits_.data<float>(), static_cast<size_t>(rows) * static_cast<size_t>(vocabulary())};
  }
  PassAddresses addresses(const PassSize& size) const;
  PassSize prepare(std::span<const PassPart> parts, PassSize size);
  void launch(const PassSize& size, std::span<const PassPart> parts);
  void end_pass(Flight& flight);
  void read_logits(std::span<float> logits);

  ModelDevice& device() const { return model_.model().device(); }
  Stream stream() const { return device().stream(); }
  int32_t vocabulary() const { return model_.model().info().vocabulary; }

  ReservedModel model_;
  CacheSet& caches_;
  BatchLimits limits_;
  CudaBatch batch_;
  bool finds_likeliest_;
  size_t collected_ = 0;        // place of the pass collected last
  gpu::DeviceBuffer logits_;    // [ModelRunnerOptions::logit_rows, vocabulary]
  gpu::PinnedBuffer readable_;  // [max_requests, vocabulary] logits of a decode step
  SharedPrefixes prefixes_;
  int32_t logit_rows_;
  PaddedPasses padded_;
  bool replays_;
  std::map<PaddedPasses::Key, Captured> graphs_;
  RunnerStats stats_;
  std::array<Flight, CudaBatch::kPlaces> flights_;
  std::deque<size_t> in_flight_;  // places, the oldest first
  PassClock clock_;
};

CudaModelRunner::CudaModelRunner(ReservedModel model, CacheSet& caches,
                                 const SharedPrefixes& prefixes, const ModelRunnerOptions& options)
    : model_(std::move(model)),
      caches_(caches),
      limits_(options.limits),
      batch_(options.limits, caches.table(), model_.model().device().sm(),
             {options.max_width, bits_of_masks(options.masked_draws, vocabulary()),
              options.likeliest, options.drawn_lists},
             options.drawn),
      finds_likeliest_(options.likeliest > 0 && draws()),
      prefixes_(prefixes),
      logit_rows_(std::clamp(options.logit_rows, std::min(limits_.max_requests, limits_.max_tokens),
                             limits_.max_tokens)),
      padded_(padded_options(options), prefixes),
      replays_(options.cuda_graphs) {
  const auto row_bytes = static_cast<size_t>(vocabulary()) * sizeof(float);
  logits_ = gpu::DeviceBuffer(static_cast<size_t>(logit_rows_) * row_bytes);
  readable_ = gpu::PinnedBuffer(static_cast<size_t>(limits_.max_requests) * row_bytes);
  stats_.memory = model_.memory();
  stats_.memory.batch = batch_.bytes();
  stats_.memory.logits = logits_.bytes();
  warm_up();
  if (replays_) capture_all();
  clock_.start(stream());
}

PaddedPassOptions CudaModelRunner::padded_options(const ModelRunnerOptions& options) const {
  return {
      .limits = limits_,
      .max_requests =
          std::min({limits_.max_requests, limits_.max_tokens, options.max_graph_requests}),
      .max_width = options.captures_extends ? std::min(options.max_width, limits_.max_q_len) : 1,
      .logit_rows = logit_rows_,
      .chunks = options.captures_extends,
      .draws = draws(),
      .snapshots = caches_.has_state() && !caches_.keeps_drafts(),
      .kept_drafts = caches_.keeps_drafts(),
      .trees = options.trees};
}

// Model and caches are there while the pass ends and memory is freed.
CudaModelRunner::~CudaModelRunner() {
  abandon();
  try {
    device().bind();
  } catch (const Error&) {  // the driver has failed, and so will all that follows
  }
}

// Runs passes of every power of two of rows over the empty requests that the arrays begin with.
// Libraries choose, load and allocate when an operation first runs at a size; this happens here.
void CudaModelRunner::warm_up() {
  for (int32_t rows = 1;; rows *= 2) {
    PassSize size;
    size.requests = 1;
    size.tokens = size.logit_rows = std::min(rows, limits_.max_tokens);
    run_first(size);
    if (rows >= limits_.max_tokens) return;
  }
}

// Ranks wait for one another in a pass. None may load or allocate meanwhile, because the driver may
// wait for all GPUs then.
void CudaModelRunner::run_first(const PassSize& size) {
  if (device().ranks() != nullptr) {
    device().rehearse(true);
    enqueue(size);
    gpu::synchronize(stream());
    device().rehearse(false);
    device().meet_ranks();
  }
  enqueue(size);
  gpu::synchronize(stream());
  device().meet_ranks();
}

// Runs the pass once eagerly, so that nothing is chosen or allocated during the capture, and
// replays the graph once, so that no request waits for its upload to the device.
void CudaModelRunner::capture(const PassSize& size) {
  run_first(size);
  const size_t free = gpu::free_bytes();
  Captured captured;
  captured.graph = gpu::Graph::capture(stream(), [&](Stream) { enqueue(size); });
  captured.addresses = addresses(size);
  device().meet_ranks();
  captured.graph.launch(stream());
  gpu::synchronize(stream());
  device().meet_ranks();
  const size_t bytes = free - std::min(free, gpu::free_bytes());
  GraphCount& count = PaddedPasses::count_of(size, stats_.graphs);
  ++count.graphs;
  count.bytes += bytes;
  stats_.memory.graphs += bytes;
  graphs_[PaddedPasses::key_of(size)] = std::move(captured);
}

void CudaModelRunner::capture_all() {
  // The largest first, so that smaller ones find the memory that the driver took for those.
  std::vector<PassSize> sizes = padded_.sizes();
  std::ranges::stable_sort(sizes, std::greater(), &PassSize::tokens);
  for (const PassSize& size : sizes) capture(size);
}

void CudaModelRunner::enqueue(const PassSize& size) {
  batch_.record_slots(size, stream());
  model_.forward(batch_.view(size), batch_.inputs(size));
  // Without draws the caller may read the first rows; read_logits() computes the others.
  const int32_t rows = size.draws ? size.logit_rows : std::min(size.logit_rows, logit_rows_);
  for (int32_t first = 0; first < rows; first += logit_rows_) {
    const int32_t count = std::min(logit_rows_, rows - first);
    model_.model().logits(first, logits_of(count));
    if (!size.draws) return;
    batch_.draw(size, {logits_.data<float>(), vocabulary(), first, count}, stream());
  }
}

// Notes the filled pass, pads it to the size of a graph if there is one, and returns the sizes of
// the pass to run.
PassSize CudaModelRunner::prepare(std::span<const PassPart> parts, PassSize size) {
  size.draws = size.draws && draws();
  Flight& flight = flights_[batch_.place()];
  flight.logit_rows = size.logit_rows;
  flight.draws.clear();
  for (const PassPart& part : parts) {
    const Flight::Draw draw{size.draws && part.sampling != nullptr, part.logit_rows > 0};
    flight.draws.insert(flight.draws.end(), static_cast<size_t>(part.draws()), draw);
  }
  size.shares_prefixes = prefixes_.find(parts, caches_.table(), batch_.shared_prefix(size.tokens));
  stats_.shared_steps += size.shares_prefixes;
  const std::optional<PassSize> padded = padded_.find(parts, size);
  if (!padded) return size;
  batch_.pad(size, *padded);
  return *padded;
}

void CudaModelRunner::enqueue(std::span<const PassPart> parts) {
  check_argument(!parts.empty(), "a pass has no parts");
  check_argument(in_flight_.size() < 2, "{} passes are in flight, the limit is 2",
                 in_flight_.size());
  if (!in_flight_.empty()) flights_[in_flight_.front()].check_drawn();
  device().bind();
  const PassSize filled = batch_.fill(parts, caches_.table());
  try {
    launch(prepare(parts, filled), parts);
  } catch (const std::exception& error) {
    device().end_ranks(error.what());
    try {
      gpu::synchronize(stream());  // the pass may read its place of the ring
    } catch (const Error&) {       // the first error says more
    }
    batch_.step_back();
    throw;
  }
  in_flight_.push_back(batch_.place());
}

void CudaModelRunner::launch(const PassSize& size, std::span<const PassPart> parts) {
  Flight& flight = flights_[batch_.place()];
  caches_.publish_changes(stream());
  batch_.upload(size, parts, caches_.table(), stream());
  flight.begin.record(stream());
  if (replays_ && size.padded) {
    const Captured& captured = graphs_.at(PaddedPasses::key_of(size));
#ifndef NDEBUG
    captured.addresses.check(addresses(size));
#endif
    captured.graph.launch(stream());
  } else {
    enqueue(size);
  }
  flight.size = size;
  flight.masked = size.draws ? batch_.masked_draws() : 0;
  if (flight.masked == 0) end_pass(flight);
}

void CudaModelRunner::end_pass(Flight& flight) {
  if (flight.size.draws) batch_.return_drawn(flight.size, stream());
  flight.end.record(stream());
}

// Computes logits again that later rows of the pass have replaced in the buffer.
void CudaModelRunner::draw_masked(std::span<const grammar::TokenMask> masks) {
  Flight& flight = flights_[batch_.place()];
  check_masks(in_flight_.size(), masks.size(), flight.masked);
  device().bind();
  try {
    batch_.upload_masks(masks, stream());
    for (int32_t first = 0, rows = flight.size.logit_rows; first < rows; first += logit_rows_) {
      const int32_t count = std::min(logit_rows_, rows - first);
      if (rows > logit_rows_) model_.model().logits(first, logits_of(count));
      batch_.draw_masked(flight.size, {logits_.data<float>(), vocabulary(), first, count},
                         stream());
    }
    end_pass(flight);
  } catch (const std::exception& error) {
    device().end_ranks(error.what());
    throw;
  }
  flight.masked = 0;
}

PassTimes CudaModelRunner::collect(std::span<float> logits, std::span<int32_t> drawn) {
  check_argument(!in_flight_.empty(), "no pass was enqueued");
  const size_t place = in_flight_.front();
  const Flight& flight = flights_[place];
  check_argument(drawn.size() == flight.draws.size(), "drawn holds {}, must hold {} draws",
                 drawn.size(), flight.draws.size());
  flight.check_drawn();
  check_argument(logits.empty() || (in_flight_.size() == 1 &&
                                    logits.size() == static_cast<size_t>(flight.logit_rows) *
                                                         static_cast<size_t>(vocabulary())),
                 "logits holds {} floats, must hold {} rows of {} of the last pass", logits.size(),
                 flight.logit_rows, vocabulary());
  device().bind();
  wait_for_pass(device(), flight.end);
  bool all = true;
  for (size_t i = 0; i < drawn.size(); ++i) {
    drawn[i] = flight.draws[i].is_drawn ? batch_.drawn(place, i) : -1;
    all = all && (drawn[i] >= 0 || !flight.draws[i].has_logits);
  }
  if (!all) read_logits(logits);
  const PassTimes times = clock_.next(flight.begin, flight.end);
  collected_ = place;
  in_flight_.pop_front();
  return times;
}

// Errors of the device come again when it is used next.
void CudaModelRunner::abandon() {
  if (in_flight_.empty()) return;
  in_flight_.clear();
  try {
    device().bind();
    gpu::synchronize(stream());
    clock_.start(stream());
  } catch (const Error&) {
  }
}

// Copies the logits that are computed already, and computes the others in the same buffer. Draws
// from more rows than the buffer holds have left the last ones there.
void CudaModelRunner::read_logits(std::span<float> logits) {
  const auto rows = static_cast<int32_t>(logits.size() / static_cast<size_t>(vocabulary()));
  for (int32_t begin = 0; begin < rows; begin += logit_rows_) {
    const std::span<float> computed = logits_of(std::min(logit_rows_, rows - begin));
    if (begin > 0 || rows > logit_rows_) model_.model().logits(begin, computed);
    const bool fits = computed.size_bytes() <= readable_.bytes();
    float* const to = fits ? readable_.data<float>() : logits.data();
    gpu::copy_to_host(to, computed.data(), computed.size_bytes(), stream());
    gpu::synchronize(stream());
    if (fits) std::memcpy(logits.data(), to, computed.size_bytes());
    logits = logits.subspan(computed.size());
  }
}

PassAddresses CudaModelRunner::addresses(const PassSize& size) const {
  const ModelInputs inputs = batch_.inputs(size);
  PassAddresses found;
  found.add(batch_.view(size));
  found.add("tokens", inputs.tokens.data());
  found.add("positions of tokens", inputs.positions.data());
  found.add("logit_rows", inputs.logit_rows.data());
  found.add("features of tokens", inputs.features.data());
  found.add("draws", batch_.draws(size));
  found.add("logits", logits_.data());
  for (size_t group = 0; group < model_.model().info().groups.size(); ++group) {
    const KvPool* const pool = caches_.kv(group);
    if (pool != nullptr) found.add(*pool, fmt::format(" of layer group {}", group));
    const StatePool* const states = caches_.state(group);
    if (states != nullptr) found.add(*states, fmt::format(" of layer group {}", group));
  }
  return found;
}

}  // namespace

std::unique_ptr<ModelRunner> make_cuda_model_runner(ReservedModel model, CacheSet& caches,
                                                    const SharedPrefixes& prefixes,
                                                    const ModelRunnerOptions& options) {
  return std::make_unique<CudaModelRunner>(std::move(model), caches, prefixes, options);
}

}  // namespace fovea
