// SPDX-License-Identifier: Apache-2.0
// Prompts in one process, decodes in another. The first process reads a prompt into pages of 16
// tokens and sends them, region by region, over a pipe, where an engine would use NIXL or Mooncake.
// The second one lands them in a pool of the same kind, copies the request to its own pages of 64
// tokens, in another order, and decodes on. Its results have the bits of a single process.
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <iostream>
#include <vector>

#include "fovea/convert_pages.h"
#include "fovea/pool_regions.h"
#include "fovea/select_backend.h"

namespace {

using namespace fovea;

constexpr int32_t kQHeads = 8, kKvHeads = 2, kHeadDim = 64, kPrompt = 40, kDecodes = 30;
constexpr int64_t kPages = 8;
const AttentionSpec kSpec{
    .q_heads = kQHeads, .kv_heads = kKvHeads, .head_dim = kHeadDim, .head_dim_v = kHeadDim};

KvCacheSpec cache_of(int32_t page_size, KvOrder order) {
  return {.order = order,
          .layers = 1,
          .kv_heads = kKvHeads,
          .head_dim = kHeadDim,
          .head_dim_v = kHeadDim,
          .page_size = page_size};
}
const KvCacheSpec kPromptCache = cache_of(16, KvOrder::nhd);
const KvCacheSpec kDecodeCache = cache_of(64, KvOrder::hnd);

// The values a model would compute for one token.
std::vector<float> token_values(int32_t heads, int32_t position) {
  std::vector<float> values(static_cast<size_t>(heads * kHeadDim));
  for (size_t i = 0; i < values.size(); ++i) {
    values[i] = static_cast<float>((i * 7 + static_cast<size_t>(position) * 29) % 31) / 31 - 0.5f;
  }
  return values;
}

// One layer of an engine with a single request.
class Layer {
 public:
  explicit Layer(const KvCacheSpec& cache)
      : pool_(make_kv_pool(cache, kPages)), pages_(kPages, cache.page_size) {
    const BatchLimits limits{.max_tokens = kPrompt, .max_q_len = kPrompt, .max_kv_len = 128};
    const BackendRegistry registry = BackendRegistry::builtin();
    const Selection choice = select_backend(registry, {kSpec, cache, limits, cpu_device()});
    backend_ = choice.chosen->create({.spec = kSpec, .kv = pool_.get(), .threads = &threads_});
    backend_->reserve(limits);
  }

  // Takes slots for `count` more tokens.
  void extend(int32_t count) {
    const int64_t last = slots_.empty() ? -1 : slots_.back();
    const auto length = static_cast<int32_t>(slots_.size());
    std::vector<int64_t> added;
    if (!pages_.extend(length, length + count, last, added)) std::abort();
    slots_.insert(slots_.end(), added.begin(), added.end());
  }

  // Attends for the last `count` tokens and returns out [count, q_heads, head_dim].
  std::vector<float> attend(int32_t count) {
    const auto length = static_cast<int32_t>(slots_.size());
    std::vector<float> q, k, v;
    for (int32_t t = length - count; t < length; ++t) {
      const auto append = [](std::vector<float>& to, const std::vector<float>& values) {
        to.insert(to.end(), values.begin(), values.end());
      };
      append(q, token_values(kQHeads, t));
      append(k, token_values(kKvHeads, t + 1));
      append(v, token_values(kKvHeads, t + 2));
    }
    const std::vector<int32_t> indptr{0, count}, lens{length}, rows{0};
    const std::vector<int32_t> table(slots_.begin(), slots_.end());
    BatchView batch{.mode = ForwardMode::extend, .requests = 1, .tokens = count};
    batch.q_indptr = indptr;
    batch.kv_lens = lens;
    batch.request_rows = rows;
    batch.table = {.entries = table.data(), .stride = length, .rows = 1};
    batch.hints.max_kv_len = length;
    batch.out_slots = std::span(slots_).last(static_cast<size_t>(count));
    backend_->plan(batch);
    std::vector<float> out(q.size());
    backend_->forward({.q = dense_rows(q.data(), DType::f32, kQHeads, kHeadDim),
                       .k = dense_rows(k.data(), DType::f32, kKvHeads, kHeadDim),
                       .v = dense_rows(v.data(), DType::f32, kKvHeads, kHeadDim),
                       .out = dense_rows(out.data(), DType::f32, kQHeads, kHeadDim)});
    return out;
  }

  // The pages of the request, in order.
  std::vector<int64_t> pages() const {
    std::vector<int64_t> pages;
    const auto size = static_cast<size_t>(pool_->spec().page_size);
    for (size_t token = 0; token < slots_.size(); token += size) {
      pages.push_back(slots_[token] / static_cast<int64_t>(size));
    }
    return pages;
  }
  KvPool& pool() { return *pool_; }

 private:
  ThreadPool threads_;
  std::unique_ptr<KvPool> pool_;
  PageAllocator pages_;
  std::unique_ptr<AttentionBackend> backend_;
  std::vector<int64_t> slots_;
};

void send(int pipe, const void* data, size_t bytes) {
  for (const char* from = static_cast<const char*>(data); bytes > 0;) {
    const ssize_t sent = write(pipe, from, bytes);
    if (sent <= 0) _exit(1);
    from += sent;
    bytes -= static_cast<size_t>(sent);
  }
}
bool receive(int pipe, void* data, size_t bytes) {
  for (char* to = static_cast<char*>(data); bytes > 0;) {
    const ssize_t got = read(pipe, to, bytes);
    if (got <= 0) return false;
    to += got;
    bytes -= static_cast<size_t>(got);
  }
  return true;
}

// The process for prompts: sends what its pages mean, and their bytes.
void run_prompt(int pipe) {
  Layer layer(kPromptCache);
  layer.extend(kPrompt);
  layer.attend(kPrompt);
  const PoolDescription description = describe_pool(layer.pool());
  send(pipe, &description.checksum, sizeof description.checksum);
  for (const PoolRegion& region : description.regions) {
    for (const int64_t page : layer.pages()) send(pipe, region.unit(page), region.unit_bytes);
  }
}

std::vector<float> decode(Layer& layer) {
  std::vector<float> all;
  for (int32_t i = 0; i < kDecodes; ++i) {
    layer.extend(1);
    const std::vector<float> out = layer.attend(1);
    all.insert(all.end(), out.begin(), out.end());
  }
  return all;
}

// The process for decodes. Returns the results of all its tokens, or nothing if the pages did not
// come.
std::vector<float> run_decodes(int pipe) {
  const auto landing = make_kv_pool(kPromptCache, kPages);
  const PoolDescription description = describe_pool(*landing);
  uint64_t checksum = 0;
  if (!receive(pipe, &checksum, sizeof checksum) || checksum != description.checksum) return {};
  std::vector<int64_t> landed;
  for (int64_t page = 1; (page - 1) * kPromptCache.page_size < kPrompt; ++page) {
    landed.push_back(page);
  }
  for (const PoolRegion& region : description.regions) {
    for (const int64_t page : landed) {
      if (!receive(pipe, region.unit(page), region.unit_bytes)) return {};
    }
  }
  Layer layer(kDecodeCache);
  layer.extend(kPrompt);
  make_page_converter(*landing, layer.pool())->convert(landed, layer.pages(), kPrompt);
  return decode(layer);
}

std::vector<float> run_alone() {
  Layer layer(kDecodeCache);
  layer.extend(kPrompt);
  layer.attend(kPrompt);
  return decode(layer);
}

}  // namespace

int main() {
  int ends[2];
  if (pipe(ends) != 0) return 1;
  const pid_t prompts = fork();
  if (prompts < 0) return 1;
  if (prompts == 0) {
    close(ends[0]);
    run_prompt(ends[1]);
    _exit(0);
  }
  close(ends[1]);
  const std::vector<float> moved = run_decodes(ends[0]);
  int status = 1;
  waitpid(prompts, &status, 0);
  const bool equal = status == 0 && !moved.empty() && moved == run_alone();
  std::cout << "results after the move have " << (equal ? "equal" : "different") << " bits\n";
  return equal ? 0 : 1;
}
