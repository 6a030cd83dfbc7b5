// SPDX-License-Identifier: Apache-2.0
// Chooses a backend and keeps every reason of every rejection. Include fovea/fovea.h.
#ifndef FOVEA_C_SELECT_H_
#define FOVEA_C_SELECT_H_

#include "fovea/c/specs.h"

#ifdef __cplusplus
extern "C" {
#endif

// Codes of reasons. A later library may have more.
enum {
  FOVEA_REJECT_DEVICE = 0,
  FOVEA_REJECT_KIND = 1,
  FOVEA_REJECT_SCOPE = 2,
  FOVEA_REJECT_MASK = 3,
  FOVEA_REJECT_HEADS = 4,
  FOVEA_REJECT_HEAD_DIM = 5,
  FOVEA_REJECT_Q_DTYPE = 6,
  FOVEA_REJECT_KV_DTYPE = 7,
  FOVEA_REJECT_KV_SCALE = 8,
  FOVEA_REJECT_KV_LAYOUT = 9,
  FOVEA_REJECT_WINDOW = 10,
  FOVEA_REJECT_CHUNK = 11,
  FOVEA_REJECT_DUAL_CHUNK = 12,
  FOVEA_REJECT_LOGIT_CAP = 13,
  FOVEA_REJECT_SINKS = 14,
  FOVEA_REJECT_ALIBI = 15,
  FOVEA_REJECT_ROPE = 16,
  FOVEA_REJECT_LSE = 17,
  FOVEA_REJECT_BATCH_INVARIANT = 18,
  FOVEA_REJECT_LIMITS = 19,
  FOVEA_REJECT_NOT_BUILT = 20,
  FOVEA_REJECT_KERNELS = 21
};
// Gives the name of a code: "head_dim".
FOVEA_C_API fovea_status fovea_reject_code_name(int32_t code, char* text, size_t* bytes);

typedef struct fovea_selection_request {
  uint32_t struct_size;
  // 1: a request that no backend accepts gives a selection without a chosen backend, whose
  // candidates have the reasons. 0: it gives FOVEA_UNSUPPORTED.
  int32_t allow_none;
  const fovea_attention_spec* spec;
  const fovea_kv_cache_spec* cache;  // NULL for linear kinds and uncached scopes
  const fovea_batch_limits* limits;
  // NULL: the CPU of this process. On the CPU, `cores` is the size of the thread pool that the
  // backend will get.
  const fovea_device_info* device;
  const char* backend;  // "auto", "NAME" or "prefer:NAME"; NULL: auto
} fovea_selection_request;
FOVEA_C_API fovea_status fovea_selection_request_init(fovea_selection_request* request,
                                                      size_t struct_size);

typedef struct fovea_selection fovea_selection;
// Chooses a backend. It touches no device.
FOVEA_C_API fovea_status fovea_selection_create(const fovea_selection_request* request,
                                                fovea_selection** selection);
FOVEA_C_API fovea_status fovea_selection_destroy(fovea_selection* selection);

// Gives the name of the chosen backend; empty: none accepts.
FOVEA_C_API fovea_status fovea_selection_name(const fovea_selection* selection, char* text,
                                              size_t* bytes);
// Gives the name or alias that the request asked for; empty: auto.
FOVEA_C_API fovea_status fovea_selection_asked(const fovea_selection* selection, char* text,
                                               size_t* bytes);
// Gives the reason why the preferred backend was not chosen; empty: it was.
FOVEA_C_API fovea_status fovea_selection_fallback(const fovea_selection* selection, char* text,
                                                  size_t* bytes);
// Gives a line about how the chosen backend serves the request; may be empty.
FOVEA_C_API fovea_status fovea_selection_notes(const fovea_selection* selection, char* text,
                                               size_t* bytes);
// Gives the choice and every rejected backend with its reasons, as plain text.
FOVEA_C_API fovea_status fovea_selection_explain(const fovea_selection* selection, char* text,
                                                 size_t* bytes);
FOVEA_C_API fovea_status fovea_selection_workspace_bytes(const fovea_selection* selection,
                                                         size_t* bytes);
// Sets *captured to 1 if every pass of the chosen backend can be captured in a CUDA graph.
FOVEA_C_API fovea_status fovea_selection_graphs(const fovea_selection* selection,
                                                int32_t* captured);

// Candidates are all backends in order of preference. One without reasons accepts the request.
FOVEA_C_API fovea_status fovea_selection_candidates(const fovea_selection* selection,
                                                    size_t* count);
FOVEA_C_API fovea_status fovea_candidate_name(const fovea_selection* selection, size_t candidate,
                                              char* text, size_t* bytes);
FOVEA_C_API fovea_status fovea_candidate_reasons(const fovea_selection* selection, size_t candidate,
                                                 size_t* count);
FOVEA_C_API fovea_status fovea_reason_code(const fovea_selection* selection, size_t candidate,
                                           size_t reason, int32_t* code);
// Gives the reason's text, which names the value and the accepted values.
FOVEA_C_API fovea_status fovea_reason_text(const fovea_selection* selection, size_t candidate,
                                           size_t reason, char* text, size_t* bytes);

#ifdef __cplusplus
}
#endif

#endif  // FOVEA_C_SELECT_H_
