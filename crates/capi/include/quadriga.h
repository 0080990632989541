/*
 * Quadriga as a C library. Generated from the sources of crates/capi; do not edit.
 *
 * Two halves: text generation (qd_model, qd_generator, qd_service, qd_embedder) and the runtime (qd_backend, qd_buffer,
 * qd_builder, qd_graph, qd_scheduler, qd_plan, qd_session, qd_custom_op), which takes own operations and own backends.
 *
 * Handles. A pointer to an opaque type is a handle: a number that the library looks up, never an address. NULL, a handle
 * that was freed and one of another type are errors (QD_STATUS_INVALID_HANDLE). Handles may be freed in any order, by any
 * thread: an object keeps what it needs. Freeing NULL or a freed handle does nothing. After fork(), handles of the parent
 * are errors in the child, and freeing them does nothing there: their threads do not exist. Make handles after fork().
 *
 * Errors. A function that can fail takes a `qd_error *` as its last parameter, which may be NULL, and returns a qd_status,
 * or a handle that is NULL after an error. Nothing is written to `*error` on success. Functions that build a graph record
 * the first error for qd_builder_finish instead. No function aborts the process or lets an exception pass.
 *
 * Texts are UTF-8 and end with NUL. Texts and arrays are copied before a function returns, unless it says otherwise; what a
 * callback is given is valid during that call.
 *
 * Buffers of the caller. A function with `capacity` and `needed` writes at most `capacity` elements and stores the number
 * that it has in `*needed`, which may be NULL. If they do not fit, nothing is written and the status is
 * QD_STATUS_BUFFER_TOO_SMALL. With a `capacity` of 0 the buffer may be NULL: call twice. For texts, `needed` counts the NUL.
 *
 * Structures of parameters begin with their size, which the functions *_default_params set; another size is an error. NULL
 * stands for the defaults. A program runs with every library of the QD_ABI_VERSION that it was compiled for: functions may
 * come, but neither a function nor a structure changes without a new version.
 *
 * Threads. Every function says it. "any" means that any number of threads may call it at the same time. "one at a time"
 * means that a call with an object that another call is using returns QD_STATUS_BUSY at once, also from a callback of that
 * call; nothing else happens. Callbacks run on the thread that the function names.
 */

#ifndef QUADRIGA_H
#define QUADRIGA_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

// Bytes of the message of an error, the NUL included.
#define QD_ERROR_MESSAGE_BYTES 1020

// The version of the interface that this header describes. It grows when a function or a structure changes or goes away, and is part of
// the shared library's name and of its symbols' versions.
#define QD_ABI_VERSION 1

// The most dimensions of a tensor.
#define QD_MAX_DIMS 4

// The model generated an end-of-generation token.
#define QD_FINISH_END 0

// A stop string was found.
#define QD_FINISH_STOP 1

// The answer has as many tokens as were asked for.
#define QD_FINISH_LENGTH 2

// The context is full.
#define QD_FINISH_CONTEXT 3

// It was cancelled, or stopped by its callback.
#define QD_FINISH_CANCELLED 4

// All layers on accelerators, for qd_engine_params.gpu_layers.
#define QD_GPU_LAYERS_ALL -1

// As much on accelerators as fits their memory, for qd_engine_params.gpu_layers.
#define QD_GPU_LAYERS_AUTO -2

// The host's processor.
#define QD_DEVICE_CPU 0

// A graphics processor.
#define QD_DEVICE_GPU 1

// A device that is simulated, or any other.
#define QD_DEVICE_OTHER 2

// Parameters: written once, then only read.
#define QD_USAGE_WEIGHTS 0

// Tensors that outlive a run.
#define QD_USAGE_STATE 1

// Inputs, results and copies of one run.
#define QD_USAGE_COMPUTE 2

// Host memory that transfers go through.
#define QD_USAGE_STAGING 3

// x².
#define QD_UNARY_SQR 0

// √x.
#define QD_UNARY_SQRT 1

// Natural logarithm.
#define QD_UNARY_LOG 2

// eˣ.
#define QD_UNARY_EXP 3

// Sine.
#define QD_UNARY_SIN 4

// Cosine.
#define QD_UNARY_COS 5

// |x|.
#define QD_UNARY_ABS 6

// −x.
#define QD_UNARY_NEG 7

// −1, 0 or 1.
#define QD_UNARY_SIGN 8

// 1 where x > 0, else 0.
#define QD_UNARY_STEP 9

// max(x, 0).
#define QD_UNARY_RELU 10

// GELU by the tanh approximation.
#define QD_UNARY_GELU 11

// GELU by the error function.
#define QD_UNARY_GELU_ERF 12

// x · sigmoid(1.702 x).
#define QD_UNARY_GELU_QUICK 13

// x · sigmoid(x).
#define QD_UNARY_SILU 14

// 1 / (1 + e⁻ˣ).
#define QD_UNARY_SIGMOID 15

// Hyperbolic tangent.
#define QD_UNARY_TANH 16

// x where x > 0, else eˣ − 1.
#define QD_UNARY_ELU 17

// x · clamp((x + 3) / 6, 0, 1).
#define QD_UNARY_HARD_SWISH 18

// clamp((x + 3) / 6, 0, 1).
#define QD_UNARY_HARD_SIGMOID 19

// ln(1 + eˣ).
#define QD_UNARY_SOFTPLUS 20

// SiLU.
#define QD_GATE_SWIGLU 0

// GELU by the tanh approximation.
#define QD_GATE_GEGLU 1

// ReLU.
#define QD_GATE_REGLU 2

// The clamped SwiGLU of gpt-oss.
#define QD_GATE_SWIGLU_OAI 3

// The largest element.
#define QD_POOL_MAX 0

// The sum divided by the size of the window.
#define QD_POOL_AVERAGE 1

// The mean of the elements that are not padding.
#define QD_POOL_AVERAGE_INSIDE 2

// Splits, copies and bytes as text.
#define QD_PLAN_TEXT 0

// As QD_PLAN_TEXT, with a line for each node and the reason for its placement.
#define QD_PLAN_REASONS 1

// Everything as JSON: docs/plan-schema.md.
#define QD_PLAN_JSON 2

// An interactive page.
#define QD_PLAN_HTML 3

// A drawing as SVG.
#define QD_PLAN_SVG 4

// The graph with its splits, for Graphviz.
#define QD_PLAN_DOT 5

// Set by the caller before each run.
#define QD_TENSOR_INPUT 0

// A parameter.
#define QD_TENSOR_WEIGHT 1

// A constant of the graph.
#define QD_TENSOR_CONSTANT 2

// Keeps its content between runs.
#define QD_TENSOR_STATE 3

// The result of a node.
#define QD_TENSOR_COMPUTED 4

// Allocates tensors one at a time in one buffer: best fit over a free list, as ggml's tensor allocator does.
typedef struct qd_allocator qd_allocator;

// A device that owns memory and computes: the CPU, a GPU, or a backend of the caller's own.
typedef struct qd_backend qd_backend;

// A range of a backend's memory. It is freed when its handle and everything that uses it are freed.
typedef struct qd_buffer qd_buffer;

// Builds a graph. The first error is kept, with what it was about; everything after it is ignored, and
// qd_builder_finish returns it.
typedef struct qd_builder qd_builder;

// An operation of the caller's own, for any number of graphs.
typedef struct qd_custom_op qd_custom_op;

// Computes embeddings of texts, with an encoder such as BERT or with the hidden states of any other model.
typedef struct qd_embedder qd_embedder;

// Generates text with a model: one answer after another. What the next prompt has in common with the previous one and its
// answer is in the KV cache, and is not computed again.
typedef struct qd_generator qd_generator;

// A GGUF file of any content, mapped into memory.
typedef struct qd_gguf qd_gguf;

// A finished graph: immutable.
typedef struct qd_graph qd_graph;

// A model file, opened and checked. Generators, services and embedders share its weights' memory map.
typedef struct qd_model qd_model;

// Where and when every node of a graph runs, and how many bytes that takes: immutable.
typedef struct qd_plan qd_plan;

// Outputs on their way to the host. It keeps its session.
typedef struct qd_read qd_read;

// A request that a service answers. Freeing it cancels it.
typedef struct qd_request qd_request;

// Decides where and when each node of a graph runs.
typedef struct qd_scheduler qd_scheduler;

// Answers requests of any number of threads with one model: they are computed together, and share what their prompts have in common.
typedef struct qd_service qd_service;

// Runs plans: it owns the memory, the compiled splits and the queues.
typedef struct qd_session qd_session;

// An element type: one of QD_DTYPE_…, the numbers of GGUF files and of ggml.
typedef uint32_t qd_dtype;

// A low-rank adapter (LoRA).
typedef struct {
  // A GGUF file.
  const char *path;
  // The factor of its products; usually 1.
  float scale;
} qd_adapter;

// Is told how far a download or the loading of weights is, in bytes; `total` is 0 while it is not known. 0 to go on,
// anything else to stop.
typedef int32_t (*qd_progress_callback)(void *user_data, uint64_t done, uint64_t total);

// How a model is found and opened.
typedef struct {
  // The size of this structure.
  size_t struct_size;
  // The folder of downloaded models; NULL: the user's cache folder.
  const char *cache_dir;
  // 1: use models in the cache only.
  int32_t offline;
  // Another chat template than the file's, or NULL.
  const char *chat_template;
  // Adapters, added while the model runs: GGUF files, or folders that PEFT saves.
  const qd_adapter *adapters;
  // How many.
  size_t adapter_count;
  // Called while a model is downloaded, on the thread that opens the model, or NULL.
  qd_progress_callback progress;
  // For the callback.
  void *progress_data;
} qd_model_params;

// How a call ended: one of the constants QD_STATUS_….
typedef int32_t qd_status;

// An error, in memory of the caller; it need not be initialized or freed.
typedef struct {
  // One of QD_STATUS_….
  qd_status code;
  // What happened and what can be done, as UTF-8 with NUL at the end. Longer messages are cut.
  char message[QD_ERROR_MESSAGE_BYTES];
} qd_error;

// Facts about a model.
typedef struct {
  // Tokens of the vocabulary.
  size_t vocabulary;
  // Tokens of context that it was trained with.
  size_t context;
  // Elements of its hidden states, and so of embeddings.
  size_t width;
  // Layers.
  size_t layers;
  // Bytes of its file.
  uint64_t bytes;
  // 1 if it is an encoder, which makes embeddings and no text.
  int32_t encoder;
  // 1 if it has a chat template.
  int32_t has_template;
} qd_model_info;

// A number that is added to a token's logit.
typedef struct {
  // The token.
  uint32_t token;
  // The number; -INFINITY bans the token.
  float bias;
} qd_logit_bias;

// Sees the logits before a token is sampled, and may change them: -INFINITY excludes a token. `tokens` are those of the
// prompt and of the answer so far. 0 to go on, anything else to end the answer with an error.
typedef int32_t (*qd_logits_callback)(void *user_data,
                                      const uint32_t *tokens,
                                      size_t token_count,
                                      float *logits,
                                      size_t logit_count);

// What an answer is to be like. The names are llama.cpp's.
typedef struct {
  // The size of this structure.
  size_t struct_size;
  // The most tokens of the answer; 0: as many as the context has room for.
  size_t max_tokens;
  // The sampling temperature; 0 always takes the most probable token.
  float temperature;
  // Keep the K most probable tokens; 0 keeps all.
  uint32_t top_k;
  // Keep the most probable tokens up to this sum of probabilities; 1 keeps all.
  float top_p;
  // Keep tokens with at least this share of the largest probability; 0 keeps all.
  float min_p;
  // Locally typical sampling; 1 keeps all.
  float typical_p;
  // Keep tokens whose logit is within so many standard deviations of the largest; 0 keeps all.
  float top_n_sigma;
  // The probability that XTC removes the most probable tokens; 0 disables it.
  float xtc_probability;
  // The probability above which XTC counts a token.
  float xtc_threshold;
  // Repetition penalty; 1 disables it.
  float repeat_penalty;
  // The number of recent tokens for the penalties.
  uint32_t repeat_last_n;
  // Presence penalty; 0 disables it.
  float presence_penalty;
  // Frequency penalty; 0 disables it.
  float frequency_penalty;
  // The factor of the DRY penalty; 0 disables it.
  float dry_multiplier;
  // The base of its growth.
  float dry_base;
  // The longest repetition that it allows.
  uint32_t dry_allowed_length;
  // The number of recent tokens that it looks at.
  uint32_t dry_last_n;
  // 1: end-of-generation tokens are banned.
  int32_t ignore_eos;
  // The random seed.
  uint64_t seed;
  // 1: random numbers start with the seed. 0: a generator's continue from its previous answer.
  int32_t reseed;
  // Numbers that are added to logits.
  const qd_logit_bias *logit_biases;
  // How many.
  size_t logit_bias_count;
  // Stop strings: the answer ends before the first of them.
  const char *const *stops;
  // How many.
  size_t stop_count;
  // The answer is JSON that satisfies this schema, or NULL. Of the four constraints at most one is given.
  const char *json_schema;
  // The answer belongs to this grammar in llama.cpp's GBNF, or NULL.
  const char *grammar;
  // The answer belongs to this grammar in llguidance's Lark, or NULL.
  const char *lark;
  // The answer matches this regular expression, or NULL.
  const char *regex;
  // 1: prompts are used as they are, without the chat template.
  int32_t raw;
  // 1: control tokens that are spelled out in messages become those tokens. Not for text of users.
  int32_t special;
  // The system prompt of conversations that begin with no system message, or NULL.
  const char *system;
  // Keyword arguments of the chat template, and the list "tools", as a JSON object, or NULL.
  const char *template_variables;
  // Sees and changes logits, on the thread that generates, or NULL.
  qd_logits_callback logits_callback;
  // For the callback.
  void *logits_data;
  // Of a service: requests of higher priority are started first.
  int32_t priority;
  // Of a service: clients of one priority get equal shares.
  uint64_t client;
  // Of a service: requests share prefixes of the KV cache only with those of the same salt.
  uint64_t salt;
} qd_request_params;

// Where a model runs, and how much it can hold.
typedef struct {
  // The size of this structure.
  size_t struct_size;
  // The largest number of tokens of a sequence; 0: what the model was trained with, at most 4096.
  size_t context;
  // The most tokens that are computed at once.
  size_t batch;
  // Sequences that are computed at once: of a service, an embedder.
  size_t sequences;
  // Threads of the CPU; 0: one for each core.
  size_t threads;
  // Layers on accelerators, QD_GPU_LAYERS_ALL or QD_GPU_LAYERS_AUTO.
  int32_t gpu_layers;
  // Bytes that the model may use on each accelerator; 0: what is free.
  uint64_t gpu_budget;
  // Names of devices, such as "cpu" and "cuda:0"; NULL: the first GPU, if there is one, and the CPU.
  const char *const *devices;
  // How many.
  size_t device_count;
  // Instead of devices: a scheduler whose backends, placements and budgets are used, own backends among them; or NULL.
  const qd_scheduler *scheduler;
  // The element type of keys in the KV cache: F32, F16, BF16, Q8_0, Q5_1 or Q4_0.
  qd_dtype cache_keys;
  // The element type of values in the KV cache.
  qd_dtype cache_values;
  // Called while weights are loaded, on the calling thread, or NULL. Its result is ignored.
  qd_progress_callback progress;
  // For the callback.
  void *progress_data;
} qd_engine_params;

// A token of an answer, and the text that it completes. Texts end with NUL, and are empty while a character or a possible
// stop string is incomplete.
typedef struct {
  // The token.
  uint32_t token;
  // A part of the answer.
  const char *text;
  // A part of the model's reasoning, which is not part of its answer.
  const char *reasoning;
  // Parts of calls of tools as a JSON list, or NULL: {"index", "name" in the first part, "arguments"}.
  const char *tool_calls;
} qd_piece;

// Is given an answer as it is generated. 0 to go on, anything else to stop.
typedef int32_t (*qd_piece_callback)(void *user_data, const qd_piece *piece);

// How an answer ended.
typedef struct {
  // Why: QD_FINISH_….
  int32_t finish;
  // With QD_FINISH_STOP, which stop string.
  size_t stop;
  // Tokens of the prompt.
  size_t prompt_tokens;
  // Of those, the ones that were in the KV cache.
  size_t cached_tokens;
  // Generated tokens.
  size_t answer_tokens;
  // Of those, the ones of reasoning.
  size_t reasoning_tokens;
  // Seconds of the prefill.
  double prompt_seconds;
  // Seconds from the first generated token to the last.
  double decode_seconds;
} qd_completion;

// A message of a conversation.
typedef struct {
  // "system", "user", "assistant" or "tool".
  const char *role;
  // The text.
  const char *content;
} qd_message;

// What a service is doing.
typedef struct {
  // Requests that wait.
  size_t waiting;
  // Requests that are being computed.
  size_t running;
  // Pages of the KV cache.
  size_t pages;
  // Pages in use.
  size_t used_pages;
  // Tokens computed so far.
  uint64_t computed;
  // Tokens of prompts found in the KV cache so far.
  uint64_t cached;
} qd_service_state;

// Facts about a device.
typedef struct {
  // Its kind: QD_DEVICE_….
  int32_t kind;
  // 1 if its queues return before their work is done.
  int32_t asynchronous;
  // 1 if the host can address its memory.
  int32_t host;
  // Tensors start at multiples of this.
  size_t alignment;
  // The most bytes of one buffer; 0 if there is no limit.
  size_t max_buffer;
  // All of its memory in bytes; 0 if not known.
  uint64_t total_bytes;
  // Free bytes of it now; 0 if not known.
  uint64_t free_bytes;
} qd_device_info;

// Is told that the library no longer uses memory of the caller, on any thread.
typedef void (*qd_release_callback)(void *user_data);

// A tensor of a graph, by number: the builder, its graph and plans of it use the same.
typedef int32_t qd_tensor;

// Type and shape of a tensor. Dimensions and byte strides are outermost first, and always four: those that a tensor does
// not have come first and are 1.
typedef struct {
  // The element type.
  qd_dtype dtype;
  // The number of dimensions.
  uint32_t rank;
  // The extents.
  size_t dims[QD_MAX_DIMS];
  // Bytes from one element (of quantized types: one block) to the next.
  size_t strides[QD_MAX_DIMS];
  // Elements in all.
  size_t elements;
  // Bytes from the first to the last element, gaps included.
  size_t bytes;
} qd_tensor_info;

// The tensors and parameters of qd_gated_delta_rule: `g` key heads, `h` value heads, `t` tokens.
typedef struct {
  // Queries `[t, g, d]`.
  qd_tensor queries;
  // Keys `[t, g, d]`.
  qd_tensor keys;
  // Values `[t, h, e]`.
  qd_tensor values;
  // The logarithm of the state's decay `[t, h]`.
  qd_tensor gates;
  // The rates at which the state learns `[t, h]`.
  qd_tensor betas;
  // The state before the first token `[h, d, e]`.
  qd_tensor state;
  // The factor of the results.
  float scale;
  // 1: value head `i` uses key head `i mod g`, else `i / (h / g)`.
  int32_t tiled;
  // 1: the state learns differences (the delta rule), else the values.
  int32_t delta;
} qd_delta_rule;

// Parameters of a rotary position embedding.
typedef struct {
  // The size of this structure.
  size_t struct_size;
  // The number of leading elements of each row that are rotated, even.
  size_t dims;
  // 0: elements `2i` and `2i + 1` are a pair (llama.cpp's "norm"); 1: `i` and `i + dims/2` ("neox").
  int32_t half;
  // The base of the frequencies.
  float base;
  // The factor of positions.
  float scale;
  // YaRN: the weight of extrapolation; 0 disables it.
  float ext_factor;
  // The factor of the result.
  float attn_factor;
  // YaRN: the rotation count above which a dimension extrapolates.
  float beta_fast;
  // YaRN: the rotation count below which a dimension interpolates.
  float beta_slow;
  // YaRN: the context length that the model was trained with.
  size_t original_context;
} qd_rope_params;

// What attention can be given besides queries, keys and values.
typedef struct {
  // The size of this structure.
  size_t struct_size;
  // The factor of the scores; 0: `1 / √d`.
  float scale;
  // Limits scores to ± this by a tanh; 0: no limit.
  float soft_cap;
  // `[b|1, h|1, ≥t, n]`, added to the scores, or QD_NO_TENSOR.
  qd_tensor mask;
  // `[t, 2]` (I32): for each query, the first visible key and one past the last, or QD_NO_TENSOR.
  qd_tensor spans;
  // `[h]`: a score of each head that is part of the denominator only, or QD_NO_TENSOR.
  qd_tensor sinks;
  // `[s, p]` (I32): a page table, or QD_NO_TENSOR.
  qd_tensor pages;
} qd_attention_params;

// How a window moves over the two inner dimensions: vertical first, then horizontal. In one dimension the first numbers are
// those of a height of 1: kernel 1, stride 1, padding 0, dilation 1.
typedef struct {
  // Elements of the window.
  size_t kernel[2];
  // Elements from one position to the next.
  size_t stride[2];
  // Elements of padding on each side.
  size_t padding[2];
  // Distance between the elements of the window.
  size_t dilation[2];
} qd_window;

// The result's type and shape: the callback sets `output->dtype`, `rank` and `dims`; they begin as those of input 0.
// QD_STATUS_OK, or another status with the reason why the operation does not take these inputs. It runs on the thread that
// builds a graph.
typedef qd_status (*qd_infer_callback)(void *context,
                                       const qd_tensor_info *inputs,
                                       size_t input_count,
                                       qd_tensor_info *output,
                                       qd_error *error);

// An input of a custom operation.
typedef struct {
  // Type, shape and strides.
  qd_tensor_info info;
  // The first element; NULL for the input that the result overwrites: its elements are in the output.
  const void *data;
} qd_custom_input;

// A part of a result to compute.
typedef struct {
  // The inputs.
  const qd_custom_input *inputs;
  // How many.
  size_t input_count;
  // The first unit to compute, of all units of the result; units are rows unless the operation says otherwise.
  size_t first_unit;
  // How many units to compute.
  size_t unit_count;
  // The number of units of the whole result.
  size_t all_units;
  // Type and shape of the whole result, which is contiguous.
  qd_tensor_info output;
  // The first element of this part.
  void *output_data;
  // The number of that element in the whole result.
  size_t output_first;
  // Bytes of this part.
  size_t output_bytes;
  // Scratch memory of this thread.
  void *scratch;
  // How much.
  size_t scratch_bytes;
} qd_custom_call;

// Computes some units of a result: QD_STATUS_OK, or another status with the reason. Several threads call it at the same time
// for different units.
typedef qd_status (*qd_compute_callback)(void *context, const qd_custom_call *call, qd_error *error);

// An operation of the caller's own as a table of functions.
typedef struct {
  // The size of this structure.
  size_t struct_size;
  // Its name in plans and messages.
  const char *name;
  // For the functions.
  void *context;
  // The rule.
  qd_infer_callback infer;
  // The code.
  qd_compute_callback compute;
  // Called once, on any thread, when nothing uses the operation any more, or at once after an error; may be NULL.
  void (*destroy)(void *context);
  // The input, one of the first eight, that the result overwrites, or -1. It has the result's type and shape.
  int32_t in_place;
  // Equal parts of the result, for threads to compute; 0: its rows.
  size_t units;
  // Bytes of scratch memory for each thread.
  size_t scratch_bytes;
  // What distinguishes this operation from others of the same name and functions, or NULL: then it equals only itself,
  // and a graph that is built again does not find its plan.
  const void *attributes;
  // How many bytes.
  size_t attribute_bytes;
} qd_custom_table;

// Chooses the backend, by number, of a weight, constant, state or input of this name; a negative number leaves it to the
// scheduler.
typedef int32_t (*qd_place_callback)(void *user_data, const char *name);

// The memory that a plan takes of one backend, in bytes.
typedef struct {
  // Weights and constants to be loaded.
  uint64_t weights;
  // Weights that are read in the file map.
  uint64_t mapped;
  // States.
  uint64_t state;
  // Inputs, results and copies.
  uint64_t compute;
  // The backend's work memory.
  uint64_t work;
  // Host memory for copies.
  uint64_t staging;
  // What is allocated of the backend's own memory in all.
  uint64_t total;
} qd_plan_bytes;

// The result of a node, right after it was computed.
typedef struct {
  // The tensor.
  qd_tensor tensor;
  // Its name.
  const char *name;
  // The operation.
  const char *operation;
  // The number of the backend that computed it.
  size_t backend;
  // Its type and shape.
  qd_tensor_info info;
  // Its bytes, with its own strides; NULL when the observer is asked whether it wants them.
  const void *data;
  // How many.
  size_t bytes;
} qd_observed;

// Is asked before a run whether the result of a node is wanted: 0 if not.
typedef int32_t (*qd_wants_callback)(void *user_data, const qd_observed *observed);

// Sees a result. 0 to go on, anything else to end the run.
typedef int32_t (*qd_observe_callback)(void *user_data, const qd_observed *observed);

// The memory of a tensor in an allocator.
typedef struct {
  // Its number, for qd_allocator_release.
  uint64_t id;
  // Bytes from the start of the buffer.
  uint64_t offset;
  // Bytes taken, padding included.
  uint64_t bytes;
} qd_allocation;

// A tensor of a node: what it is, and where.
typedef struct {
  // Type, shape and byte strides.
  qd_tensor_info info;
  // QD_TENSOR_….
  int32_t kind;
  // Its name.
  const char *name;
  // What the backend's `allocate` returned; NULL when `supports` is asked.
  void *buffer;
  // Bytes from the start of the buffer to the first element.
  size_t offset;
} qd_operand;

// A number that an operation has.
typedef struct {
  // Its name, such as "eps".
  const char *name;
  // The number; flags are 0 or 1.
  double value;
} qd_parameter;

// A node: an operation on tensors. A result may have the memory of an input that nothing else needs.
typedef struct {
  // The operation, such as "add", "silu" or "mul_mat".
  const char *operation;
  // The name of the result, for messages.
  const char *name;
  // 1 if the result is a view of an input: nothing is to be computed.
  int32_t is_view;
  // 1 if the result is read after the nodes that are compiled together. A backend that fuses nodes need not write others.
  int32_t kept;
  // The inputs. Those that are optional follow the others, as the builder's function has them.
  const qd_operand *inputs;
  // How many.
  size_t input_count;
  // The result.
  qd_operand output;
  // The operation's numbers.
  const qd_parameter *parameters;
  // How many.
  size_t parameter_count;
} qd_node;

// A backend of the caller's own as a table of functions. Those that return a qd_status return QD_STATUS_OK, or another status and
// a message in `*error`; QD_STATUS_OUT_OF_MEMORY and QD_STATUS_DEVICE_LOST are passed on as such.
//
// The library calls the functions from any thread, several at the same time, but never two on one program or one queue.
// Without `queue_new`, work is done when a function returns; with it, queues of the backend go on working, and the functions
// that begin with `queue_` and `event_` are needed, too. Buffers, programs, queues, events and the context are only given
// back to these functions.
typedef struct {
  // The size of this structure.
  size_t struct_size;
  // The name in plans and messages, such as "npu:0".
  const char *name;
  // The vendor's name of the device, or NULL.
  const char *description;
  // Its kind: QD_DEVICE_….
  int32_t kind;
  // Tensors start at multiples of this, a power of two.
  size_t alignment;
  // The most bytes of one buffer; 0: no limit.
  size_t max_buffer;
  // For the functions.
  void *context;
  // Called once, on any thread, when nothing uses the backend any more, or at once after an error; may be NULL.
  void (*destroy)(void *context);
  // All bytes of memory and the free ones, where they are known (0 if not); may be NULL.
  void (*memory)(void *context, uint64_t *total, uint64_t *free);
  // Allocates memory for QD_USAGE_…. NULL after an error.
  void *(*allocate)(void *context, size_t bytes, int32_t usage, qd_error *error);
  // Frees a buffer.
  void (*free)(void *context, void *buffer);
  // Copies bytes of the host into a buffer. The library has checked the range.
  qd_status (*write)(void *context, void *buffer, size_t offset, const void *data, size_t bytes, qd_error *error);
  // Copies bytes of a buffer to the host. The library has checked the range.
  qd_status (*read)(void *context, const void *buffer, size_t offset, void *data, size_t bytes, qd_error *error);
  // Sets bytes of a buffer to zero; NULL: the library writes zeros.
  qd_status (*clear)(void *context, void *buffer, size_t offset, size_t bytes, qd_error *error);
  // Copies bytes within the backend's memory; NULL: through the host.
  qd_status (*copy)(void *context,
                    const void *from,
                    size_t from_offset,
                    void *to,
                    size_t to_offset,
                    size_t bytes,
                    qd_error *error);
  // The address of a buffer's first byte in the device's address space; NULL: 0.
  uint64_t (*address)(void *context, const void *buffer);
  // Bytes to allocate for a tensor, at least its own; NULL: its own.
  size_t (*storage_bytes)(void *context, const qd_tensor_info *tensor);
  // Called for each tensor when it has been given memory, before anything is written there; may be NULL.
  qd_status (*placed)(void *context, void *buffer, size_t offset, const qd_tensor_info *tensor, qd_error *error);
  // Called for each tensor before its memory is used for another or freed; may be NULL.
  void (*released)(void *context, void *buffer, size_t offset, const qd_tensor_info *tensor);
  // QD_STATUS_OK if it computes a node; otherwise the reason is in `*error`, and another backend computes the node.
  qd_status (*supports)(void *context, const qd_node *node, qd_error *error);
  // Compiles nodes, in execution order, into a program that is run many times. What it needs of the nodes it copies; their
  // buffers stay valid as long as the program. NULL after an error. With `run`, or both are NULL.
  void *(*compile)(void *context, const qd_node *const *nodes, size_t node_count, qd_error *error);
  // Runs a program.
  qd_status (*run)(void *context, void *program, qd_error *error);
  // Frees a program; may be NULL.
  void (*free_program)(void *context, void *program);
  // Instead of `compile` and `run`: computes one node. Views are not passed.
  qd_status (*run_node)(void *context, const qd_node *node, qd_error *error);
  // A queue of commands, which are executed in order while the host goes on. NULL after an error.
  void *(*queue_new)(void *context, qd_error *error);
  // Frees a queue whose commands are done.
  void (*queue_free)(void *context, void *queue);
  // Copies bytes of the host into a buffer; the bytes may be reused when it returns.
  qd_status (*queue_write)(void *context,
                           void *queue,
                           void *buffer,
                           size_t offset,
                           const void *data,
                           size_t bytes,
                           qd_error *error);
  // Copies bytes of a buffer to the host after all earlier commands of the queue, and returns when they are copied.
  qd_status (*queue_read)(void *context,
                          void *queue,
                          const void *buffer,
                          size_t offset,
                          void *data,
                          size_t bytes,
                          qd_error *error);
  // Copies bytes within the backend's memory.
  qd_status (*queue_copy)(void *context,
                          void *queue,
                          const void *from,
                          size_t from_offset,
                          void *to,
                          size_t to_offset,
                          size_t bytes,
                          qd_error *error);
  // Runs a program of `compile`, which it needs.
  qd_status (*queue_run)(void *context, void *queue, void *program, qd_error *error);
  // Waits until all commands of a queue are done; the status of the first that failed.
  qd_status (*queue_synchronize)(void *context, void *queue, qd_error *error);
  // An event: a point in a queue, which counts as done before it is recorded. NULL after an error.
  void *(*event_new)(void *context, qd_error *error);
  // Frees an event.
  void (*event_free)(void *context, void *event);
  // Records this point of a queue in an event.
  qd_status (*event_record)(void *context, void *queue, void *event, qd_error *error);
  // Lets later commands of a queue wait for an event of this backend.
  qd_status (*event_wait)(void *context, void *queue, void *event, qd_error *error);
  // Waits, on the host, until the work before an event is done; a failed status if that work failed.
  qd_status (*event_synchronize)(void *context, void *event, qd_error *error);
  // QD_STATUS_END if the work before an event is done, QD_STATUS_OK if not yet.
  qd_status (*event_query)(void *context, void *event, qd_error *error);
} qd_backend_table;

// How the cases of the conformance suite ended.
typedef struct {
  // Cases that were computed correctly.
  size_t passed;
  // Cases that the backend does not support.
  size_t unsupported;
  // Cases that were computed wrongly, or failed.
  size_t failed;
} qd_conformance;

// Success.
#define QD_STATUS_OK 0

// A stream has ended; not an error.
#define QD_STATUS_END 1

// An argument is NULL, out of range, or not UTF-8.
#define QD_STATUS_INVALID_ARGUMENT -1

// A handle is NULL, was freed, or is of another type.
#define QD_STATUS_INVALID_HANDLE -2

// The caller's buffer is too small.
#define QD_STATUS_BUFFER_TOO_SMALL -3

// Another call is using the object.
#define QD_STATUS_BUSY -4

// A file, device, tensor or model of this name does not exist.
#define QD_STATUS_NOT_FOUND -5

// Memory of a device or of the host does not suffice.
#define QD_STATUS_OUT_OF_MEMORY -6

// An operation, a model or an option that is not supported.
#define QD_STATUS_UNSUPPORTED -7

// A file cannot be read or written, or is malformed.
#define QD_STATUS_FILE -8

// A model could not be downloaded.
#define QD_STATUS_NETWORK -9

// A device failed.
#define QD_STATUS_DEVICE -10

// A device is lost with everything on it.
#define QD_STATUS_DEVICE_LOST -11

// A graph breaks a rule of its operations.
#define QD_STATUS_GRAPH -12

// A prompt does not fit the context.
#define QD_STATUS_CONTEXT_FULL -13

// A callback of the caller failed or asked for the end.
#define QD_STATUS_CALLBACK -14

// Any other failure; the message says which.
#define QD_STATUS_FAILED -15

// A bug of the library.
#define QD_STATUS_INTERNAL -16

// 32-bit floating point.
#define QD_DTYPE_F32 0

// 16-bit floating point.
#define QD_DTYPE_F16 1

// 4-bit blocks of 32 with a scale.
#define QD_DTYPE_Q4_0 2

// 4-bit blocks of 32 with a scale and a minimum.
#define QD_DTYPE_Q4_1 3

// 5-bit blocks of 32 with a scale.
#define QD_DTYPE_Q5_0 6

// 5-bit blocks of 32 with a scale and a minimum.
#define QD_DTYPE_Q5_1 7

// 8-bit blocks of 32 with a scale.
#define QD_DTYPE_Q8_0 8

// 8-bit blocks of 32 with a scale and a sum, for intermediate results.
#define QD_DTYPE_Q8_1 9

// 2-bit k-quants.
#define QD_DTYPE_Q2_K 10

// 3-bit k-quants.
#define QD_DTYPE_Q3_K 11

// 4-bit k-quants.
#define QD_DTYPE_Q4_K 12

// 5-bit k-quants.
#define QD_DTYPE_Q5_K 13

// 6-bit k-quants.
#define QD_DTYPE_Q6_K 14

// 8-bit blocks of 256 with a scale and sums, for intermediate results.
#define QD_DTYPE_Q8_K 15

// Codebook quantization, 2.06 bits.
#define QD_DTYPE_IQ2_XXS 16

// Codebook quantization, 2.31 bits.
#define QD_DTYPE_IQ2_XS 17

// Codebook quantization, 3.06 bits.
#define QD_DTYPE_IQ3_XXS 18

// Codebook quantization, 1.56 bits.
#define QD_DTYPE_IQ1_S 19

// 4-bit non-linear blocks of 32.
#define QD_DTYPE_IQ4_NL 20

// Codebook quantization, 3.44 bits.
#define QD_DTYPE_IQ3_S 21

// Codebook quantization, 2.56 bits.
#define QD_DTYPE_IQ2_S 22

// 4-bit non-linear blocks of 256.
#define QD_DTYPE_IQ4_XS 23

// 8-bit integer.
#define QD_DTYPE_I8 24

// 16-bit integer.
#define QD_DTYPE_I16 25

// 32-bit integer.
#define QD_DTYPE_I32 26

// 64-bit integer.
#define QD_DTYPE_I64 27

// 64-bit floating point.
#define QD_DTYPE_F64 28

// Codebook quantization, 1.75 bits.
#define QD_DTYPE_IQ1_M 29

// Brain floating point.
#define QD_DTYPE_BF16 30

// Ternary weights, 1.69 bits.
#define QD_DTYPE_TQ1_0 34

// Ternary weights, 2.06 bits.
#define QD_DTYPE_TQ2_0 35

// 4-bit floating point in blocks of 32 with a scale.
#define QD_DTYPE_MXFP4 39

// 4-bit floating point in blocks of 64 with scales of 16.
#define QD_DTYPE_NVFP4 40

// No tensor: for optional arguments, and after errors.
#define QD_NO_TENSOR -1

#ifdef __cplusplus
extern "C" {
#endif // __cplusplus

// The version of the interface of the library that is linked: compare it with QD_ABI_VERSION.
//
// Threads: any.
uint32_t qd_abi_version(void);

// The version of Quadriga, such as "0.1.0".
//
// Threads: any.
const char *qd_version(void);

// The number of handles that were not freed yet: 0 at the end of a program without leaks.
//
// Threads: any.
size_t qd_live_handles(void);

// The name of an element type, such as "Q4_K"; NULL if there is none of this number.
//
// Threads: any.
const char *qd_dtype_name(qd_dtype dtype);

// The number of elements of a block, 1 for types that are not quantized; 0 if there is no such type.
//
// Threads: any.
size_t qd_dtype_block_elements(qd_dtype dtype);

// The bytes of a block; 0 if there is no such type.
//
// Threads: any.
size_t qd_dtype_block_bytes(qd_dtype dtype);

// The default parameters of qd_model_open.
//
// Threads: any.
qd_model_params qd_model_default_params(void);

// Opens a model: a GGUF file, or ORG/REPO or ORG/REPO:QUANT of Hugging Face's hub, which is downloaded into the cache
// once; NULL is the default model (SmolLM2 135M). Without :QUANT, or where the repository does not have it, it is the best
// that fits in this machine's memory.
//
// Threads: any.
qd_model *qd_model_open(const char *name,
                        const qd_model_params *params,
                        qd_error *error);

// Frees a model. What was made of it stays usable.
//
// Threads: any.
void qd_model_free(qd_model *model);

// Facts about a model.
//
// Threads: any.
qd_status qd_model_describe(const qd_model *model, qd_model_info *info, qd_error *error);

// A value of the file's metadata as text: that of a key such as "general.architecture".
//
// Threads: any.
qd_status qd_model_metadata(const qd_model *model,
                            const char *key,
                            char *buffer,
                            size_t capacity,
                            size_t *needed,
                            qd_error *error);

// The tokens of a text. With `add_special`, a beginning-of-text token comes first if the model uses one; with
// `parse_special`, control tokens that are spelled out in the text become those tokens (not for text of users).
//
// Threads: any.
qd_status qd_tokenize(const qd_model *model,
                      const char *text,
                      int32_t add_special,
                      int32_t parse_special,
                      uint32_t *tokens,
                      size_t capacity,
                      size_t *needed,
                      qd_error *error);

// The text of tokens. Control tokens have no text.
//
// Threads: any.
qd_status qd_detokenize(const qd_model *model,
                        const uint32_t *tokens,
                        size_t token_count,
                        char *buffer,
                        size_t capacity,
                        size_t *needed,
                        qd_error *error);

// The bytes of one token's text, which may be a part of a character; none for control tokens. No NUL follows.
//
// Threads: any.
qd_status qd_token_piece(const qd_model *model,
                         uint32_t token,
                         uint8_t *bytes,
                         size_t capacity,
                         size_t *needed,
                         qd_error *error);

// 1 if a token ends an answer, 0 if not or if there is no such token or model.
//
// Threads: any.
int32_t qd_token_is_end(const qd_model *model, uint32_t token);

// The default parameters of a request.
//
// Threads: any.
qd_request_params qd_request_default_params(void);

// Writes a code and a message to an error: for callbacks that fail. NULL is ignored.
//
// Threads: any; one at a time for each error.
void qd_error_set(qd_error *error, int32_t code, const char *message);

// The default parameters of generators, services and embedders.
//
// Threads: any.
qd_engine_params qd_engine_default_params(void);

// Makes a generator: plans the model for the devices, loads its weights, and allocates the KV cache.
//
// Threads: any.
qd_generator *qd_generator_new(const qd_model *model, const qd_engine_params *params, qd_error *error);

// Frees a generator. A call that is using it ends first.
//
// Threads: any.
void qd_generator_free(qd_generator *generator);

// Answers a prompt; the callback gets the answer on the calling thread. The prompt is a user's message, or with `raw` text
// that is continued.
//
// Threads: one at a time for each generator.
qd_status qd_generator_generate(qd_generator *generator,
                                const char *prompt,
                                const qd_request_params *params,
                                qd_piece_callback callback,
                                void *user_data,
                                qd_completion *completion,
                                qd_error *error);

// Answers the last message of a conversation; the callback gets the answer on the calling thread.
//
// Threads: one at a time for each generator.
qd_status qd_generator_chat(qd_generator *generator,
                            const qd_message *messages,
                            size_t message_count,
                            const qd_request_params *params,
                            qd_piece_callback callback,
                            void *user_data,
                            qd_completion *completion,
                            qd_error *error);

// As qd_generator_chat, for messages as a JSON list in OpenAI's format, with calls of tools and their results.
//
// Threads: one at a time for each generator.
qd_status qd_generator_chat_json(qd_generator *generator,
                                 const char *messages,
                                 const qd_request_params *params,
                                 qd_piece_callback callback,
                                 void *user_data,
                                 qd_completion *completion,
                                 qd_error *error);

// Continues tokens; the callback gets the answer on the calling thread.
//
// Threads: one at a time for each generator.
qd_status qd_generator_continue(qd_generator *generator,
                                const uint32_t *tokens,
                                size_t token_count,
                                const qd_request_params *params,
                                qd_piece_callback callback,
                                void *user_data,
                                qd_completion *completion,
                                qd_error *error);

// Ends the answer that a generator is computing, after its current token. The next prompt is not affected.
//
// Threads: any, while another one generates.
qd_status qd_generator_cancel(qd_generator *generator, qd_error *error);

// The prompt of a conversation as text, rendered with the model's chat template.
//
// Threads: any.
qd_status qd_chat_prompt(const qd_model *model,
                         const qd_message *messages,
                         size_t message_count,
                         char *buffer,
                         size_t capacity,
                         size_t *needed,
                         qd_error *error);

// Computes the logits after tokens: one number for each token of the vocabulary. Tokens that are in the KV cache already
// are not computed again.
//
// Threads: one at a time for each generator.
qd_status qd_generator_logits(qd_generator *generator,
                              const uint32_t *tokens,
                              size_t token_count,
                              float *logits,
                              size_t capacity,
                              size_t *needed,
                              qd_error *error);

// Writes the KV cache of the latest prompt and its answer to a file.
//
// Threads: one at a time for each generator.
qd_status qd_generator_save_file(qd_generator *generator, const char *path, qd_error *error);

// Restores a KV cache that qd_generator_save_file has written, with the same model and cache type.
//
// Threads: one at a time for each generator.
qd_status qd_generator_load_file(qd_generator *generator, const char *path, qd_error *error);

// The KV cache of the latest prompt and its answer as bytes.
//
// Threads: one at a time for each generator.
qd_status qd_generator_save(qd_generator *generator, uint8_t *bytes, size_t capacity, size_t *needed, qd_error *error);

// Restores a KV cache from bytes of qd_generator_save.
//
// Threads: one at a time for each generator.
qd_status qd_generator_load(qd_generator *generator, const uint8_t *bytes, size_t byte_count, qd_error *error);

// Forgets the KV cache.
//
// Threads: one at a time for each generator.
qd_status qd_generator_clear(qd_generator *generator, qd_error *error);

// Starts a service: plans the model, loads its weights, and allocates the KV cache. `sequences` of the parameters are
// computed at the same time; 0: 16.
//
// Threads: any.
qd_service *qd_service_new(const qd_model *model, const qd_engine_params *params, qd_error *error);

// Frees a service; it ends when its requests are freed, too.
//
// Threads: any.
void qd_service_free(qd_service *service);

// Submits a conversation, and returns at once.
//
// Threads: any.
qd_request *qd_service_submit(qd_service *service,
                              const qd_message *messages,
                              size_t message_count,
                              const qd_request_params *params,
                              qd_error *error);

// As qd_service_submit, for messages as a JSON list in OpenAI's format.
//
// Threads: any.
qd_request *qd_service_submit_json(qd_service *service,
                                   const char *messages,
                                   const qd_request_params *params,
                                   qd_error *error);

// Waits for the next piece of an answer: QD_STATUS_OK and the piece, whose texts are valid until the next call with the
// request, or QD_STATUS_END when the answer is complete, with `*completion`. Either may be NULL.
//
// Threads: one at a time for each request.
qd_status qd_request_next(qd_request *request, qd_piece *piece, qd_completion *completion, qd_error *error);

// Frees a request; an answer that is not complete is cancelled.
//
// Threads: any.
void qd_request_free(qd_request *request);

// Answers a prompt: submits it, and gives the answer to a callback on the calling thread. An answer that the callback stops
// has the tokens and times that were seen until then; how many tokens of its prompt were cached is not known.
//
// Threads: any.
qd_status qd_service_generate(qd_service *service,
                              const char *prompt,
                              const qd_request_params *params,
                              qd_piece_callback callback,
                              void *user_data,
                              qd_completion *completion,
                              qd_error *error);

// What a service was doing after its latest step.
//
// Threads: any.
qd_status qd_service_describe(const qd_service *service, qd_service_state *state, qd_error *error);

// Makes an embedder: plans the model and loads its weights. Embeddings have length 1.
//
// Threads: any.
qd_embedder *qd_embedder_new(const qd_model *model, const qd_engine_params *params, qd_error *error);

// Frees an embedder.
//
// Threads: any.
void qd_embedder_free(qd_embedder *embedder);

// The embedding of a text: as many numbers as the model's width.
//
// Threads: one at a time for each embedder.
qd_status qd_embedder_embed(qd_embedder *embedder,
                            const char *text,
                            float *vector,
                            size_t capacity,
                            size_t *needed,
                            qd_error *error);

// How well a document answers a query, by a reranker's classification head: the larger the better.
//
// Threads: one at a time for each embedder.
qd_status qd_embedder_rank(qd_embedder *embedder,
                           const char *query,
                           const char *document,
                           float *score,
                           qd_error *error);

// The number of devices of this machine.
//
// Threads: any.
size_t qd_device_count(void);

// The name of a device, counted from 0: "cpu", "cuda:0" ….
//
// Threads: any.
qd_status qd_device_name(size_t index, char *buffer, size_t capacity, size_t *needed, qd_error *error);

// Opens a device by name: "cpu", "cuda:0".
//
// Threads: any.
qd_backend *qd_backend_open(const char *name, qd_error *error);

// Opens the CPU with this number of threads, the caller's included; 0: one for each core.
//
// Threads: any.
qd_backend *qd_backend_cpu(size_t threads, qd_error *error);

// Changes the number of threads of a CPU backend, once its current run is over.
//
// Threads: any.
qd_status qd_backend_set_threads(qd_backend *backend, size_t threads, qd_error *error);

// Frees a backend. Schedulers, plans, sessions and buffers of it stay usable.
//
// Threads: any.
void qd_backend_free(qd_backend *backend);

// The name of a backend in messages and plans.
//
// Threads: any.
qd_status qd_backend_name(const qd_backend *backend, char *buffer, size_t capacity, size_t *needed, qd_error *error);

// The vendor's name of a backend's device.
//
// Threads: any.
qd_status qd_backend_description(const qd_backend *backend,
                                 char *buffer,
                                 size_t capacity,
                                 size_t *needed,
                                 qd_error *error);

// Facts about a backend's device.
//
// Threads: any.
qd_status qd_backend_device(const qd_backend *backend, qd_device_info *info, qd_error *error);

// Allocates memory of a backend: QD_USAGE_…. Its bytes are zero.
//
// Threads: any.
qd_buffer *qd_buffer_new(const qd_backend *backend, size_t bytes, int32_t usage, qd_error *error);

// A buffer of a CPU backend over memory of the caller, which is used in place. The caller keeps it until `release` is called, on
// any thread, and does not access it while a run uses it. After an error `release` has been called, too.
//
// Threads: any.
qd_buffer *qd_buffer_wrap(const qd_backend *backend,
                          void *memory,
                          size_t bytes,
                          qd_release_callback release,
                          void *user_data,
                          qd_error *error);

// Frees a buffer's handle.
//
// Threads: any.
void qd_buffer_free(qd_buffer *buffer);

// The size of a buffer in bytes; 0 without one.
//
// Threads: any.
size_t qd_buffer_bytes(const qd_buffer *buffer);

// What a buffer is used for: QD_USAGE_…; -1 without one.
//
// Threads: any.
int32_t qd_buffer_usage(const qd_buffer *buffer);

// The address of a buffer's first byte in its backend's address space. It may be followed only where the host can address
// the memory (qd_buffer_is_host); 0 without a buffer.
//
// Threads: any.
uint64_t qd_buffer_address(const qd_buffer *buffer);

// 1 if the host can address a buffer's memory.
//
// Threads: any.
int32_t qd_buffer_is_host(const qd_buffer *buffer);

// A handle on the backend of a buffer, to be freed.
//
// Threads: any.
qd_backend *qd_buffer_backend(const qd_buffer *buffer, qd_error *error);

// Copies bytes out of a buffer. The caller makes sure that no run that writes them is in flight.
//
// Threads: any.
qd_status qd_buffer_read(const qd_buffer *buffer, size_t offset, void *data, size_t bytes, qd_error *error);

// Copies bytes into a buffer. The caller makes sure that no run that uses them is in flight.
//
// Threads: any.
qd_status qd_buffer_write(qd_buffer *buffer, size_t offset, const void *data, size_t bytes, qd_error *error);

// Sets bytes of a buffer to zero.
//
// Threads: any.
qd_status qd_buffer_clear(qd_buffer *buffer, size_t offset, size_t bytes, qd_error *error);

// Copies bytes from one buffer to another, on the same backend or another one, and waits for the end.
//
// Threads: any.
qd_status qd_buffer_copy(const qd_buffer *from,
                         size_t from_offset,
                         qd_buffer *to,
                         size_t to_offset,
                         size_t bytes,
                         qd_error *error);

// A builder of an empty graph.
//
// Threads: any.
qd_builder *qd_builder_new(qd_error *error);

// Frees a builder, finished or not.
//
// Threads: any.
void qd_builder_free(qd_builder *builder);

// The finished graph, or the first error. The builder is empty afterwards, and is still to be freed.
//
// Threads: one at a time for each builder.
qd_graph *qd_builder_finish(qd_builder *builder, qd_error *error);

// Declares a tensor that the caller sets before each run. Dimensions are outermost first: rows, then columns (ggml's are the
// other way round).
//
// Threads: one at a time for each builder.
qd_tensor qd_input(qd_builder *builder,
                   const char *name,
                   qd_dtype dtype,
                   const size_t *dims,
                   size_t rank);

// Declares a tensor that keeps its content between runs, such as a KV cache; zero at first.
//
// Threads: one at a time for each builder.
qd_tensor qd_state(qd_builder *builder, const char *name, qd_dtype dtype, const size_t *dims, size_t rank);

// Declares a constant; its bytes are copied.
//
// Threads: one at a time for each builder.
qd_tensor qd_constant(qd_builder *builder,
                      const char *name,
                      qd_dtype dtype,
                      const size_t *dims,
                      size_t rank,
                      const void *data,
                      size_t bytes);

// Declares a weight. Its bytes are copied; with NULL, qd_session_set_weight sets them later.
//
// Threads: one at a time for each builder.
qd_tensor qd_weight(qd_builder *builder,
                    const char *name,
                    qd_dtype dtype,
                    const size_t *dims,
                    size_t rank,
                    const void *data,
                    size_t bytes);

// Declares a weight whose bytes stay where they are. The caller keeps them unchanged until `release` is called, on any thread:
// when nothing uses them any more, or at once if there is an error.
//
// Threads: one at a time for each builder.
qd_tensor qd_weight_in_place(qd_builder *builder,
                             const char *name,
                             qd_dtype dtype,
                             const size_t *dims,
                             size_t rank,
                             const void *data,
                             size_t bytes,
                             qd_release_callback release,
                             void *user_data);

// Makes a tensor an output: it can be read under this name after a run.
//
// Threads: one at a time for each builder.
void qd_output(qd_builder *builder, const char *name, qd_tensor tensor);

// Labels a result; its name in plans and messages is the scope and this label. Returns the tensor.
//
// Threads: one at a time for each builder.
qd_tensor qd_set_name(qd_builder *builder, qd_tensor tensor, const char *label);

// Opens a scope: names of results begin with its name, until qd_scope_end.
//
// Threads: one at a time for each builder.
void qd_scope_begin(qd_builder *builder, const char *name);

// Closes the scope that was opened last.
//
// Threads: one at a time for each builder.
void qd_scope_end(qd_builder *builder);

// Everything built before is executed before everything built after.
//
// Threads: one at a time for each builder.
void qd_barrier(qd_builder *builder);

// Type and shape of a tensor of a graph that is being built. Its name and bytes are known once the graph is finished.
//
// Threads: one at a time for each builder.
qd_status qd_builder_tensor(qd_builder *builder, qd_tensor tensor, qd_tensor_info *info, qd_error *error);

// Opens a GGUF file, or the first part of a split one, and checks every header, type, shape and range.
//
// Threads: any.
qd_gguf *qd_gguf_open(const char *path, qd_error *error);

// Frees a file. Graphs with its weights keep it.
//
// Threads: any.
void qd_gguf_free(qd_gguf *file);

// The number of tensors of a file; 0 without one.
//
// Threads: any.
size_t qd_gguf_tensor_count(const qd_gguf *file);

// The name of a tensor of a file, counted from 0.
//
// Threads: any.
qd_status qd_gguf_tensor_name(const qd_gguf *file,
                              size_t index,
                              char *buffer,
                              size_t capacity,
                              size_t *needed,
                              qd_error *error);

// Declares a weight with the type, shape and bytes of a tensor of a file, and its name.
//
// Threads: one at a time for each builder.
qd_tensor qd_gguf_weight(qd_builder *builder, const qd_gguf *file, const char *name);

// `a + b`, element by element; `b` is repeated to the shape of `a`.
//
// Threads: one at a time for each builder.
qd_tensor qd_add(qd_builder *builder, qd_tensor a, qd_tensor b);

// `a − b`, element by element; `b` is repeated to the shape of `a`.
//
// Threads: one at a time for each builder.
qd_tensor qd_sub(qd_builder *builder, qd_tensor a, qd_tensor b);

// `a · b`, element by element; `b` is repeated to the shape of `a`.
//
// Threads: one at a time for each builder.
qd_tensor qd_mul(qd_builder *builder, qd_tensor a, qd_tensor b);

// `a / b`, element by element; `b` is repeated to the shape of `a`.
//
// Threads: one at a time for each builder.
qd_tensor qd_div(qd_builder *builder, qd_tensor a, qd_tensor b);

// `x + value`, where `value` has one element.
//
// Threads: one at a time for each builder.
qd_tensor qd_add1(qd_builder *builder, qd_tensor x, qd_tensor value);

// `scale · x`.
//
// Threads: one at a time for each builder.
qd_tensor qd_scale(qd_builder *builder, qd_tensor x, float scale);

// `scale · x + bias`.
//
// Threads: one at a time for each builder.
qd_tensor qd_scale_bias(qd_builder *builder, qd_tensor x, float scale, float bias);

// Each element clamped to `min` … `max`.
//
// Threads: one at a time for each builder.
qd_tensor qd_clamp(qd_builder *builder, qd_tensor x, float min, float max);

// A function of each element: QD_UNARY_….
//
// Threads: one at a time for each builder.
qd_tensor qd_unary(qd_builder *builder, qd_tensor x, int32_t function);

// `x · sigmoid(x)`.
//
// Threads: one at a time for each builder.
qd_tensor qd_silu(qd_builder *builder, qd_tensor x);

// GELU by the tanh approximation.
//
// Threads: one at a time for each builder.
qd_tensor qd_gelu(qd_builder *builder, qd_tensor x);

// `max(x, 0)`.
//
// Threads: one at a time for each builder.
qd_tensor qd_relu(qd_builder *builder, qd_tensor x);

// Hyperbolic tangent.
//
// Threads: one at a time for each builder.
qd_tensor qd_tanh(qd_builder *builder, qd_tensor x);

// Squares.
//
// Threads: one at a time for each builder.
qd_tensor qd_sqr(qd_builder *builder, qd_tensor x);

// `activation(x) · up`, with an activation QD_GATE_….
//
// Threads: one at a time for each builder.
qd_tensor qd_gated(qd_builder *builder, qd_tensor x, qd_tensor up, int32_t activation);

// `activation(gate) · up` of the two halves of each row; the first half is the gate unless `swapped`.
//
// Threads: one at a time for each builder.
qd_tensor qd_gated_halves(qd_builder *builder, qd_tensor x, int32_t activation, int32_t swapped);

// Rows normalized to mean 0 and variance 1.
//
// Threads: one at a time for each builder.
qd_tensor qd_norm(qd_builder *builder, qd_tensor x, float eps);

// Rows divided by their root mean square.
//
// Threads: one at a time for each builder.
qd_tensor qd_rms_norm(qd_builder *builder, qd_tensor x, float eps);

// `[b, c, h, w]`: groups of channels normalized to mean 0 and variance 1.
//
// Threads: one at a time for each builder.
qd_tensor qd_group_norm(qd_builder *builder, qd_tensor x, size_t groups, float eps);

// Rows divided by their Euclidean length.
//
// Threads: one at a time for each builder.
qd_tensor qd_l2_norm(qd_builder *builder, qd_tensor x, float eps);

// Matrix multiplication: weights `[n, k]`, `x […, m, k]` → `x · weightsᵀ […, m, n]`.
//
// Threads: one at a time for each builder.
qd_tensor qd_mul_mat(qd_builder *builder, qd_tensor weights, qd_tensor x);

// Matrix multiplication with selected experts: weights `[e, n, k]`, `x [t, u|1, k]`, ids `[t, u]` (I32) → `[t, u, n]`.
//
// Threads: one at a time for each builder.
qd_tensor qd_mul_mat_id(qd_builder *builder,
                        qd_tensor weights,
                        qd_tensor x,
                        qd_tensor ids);

// Rows `[m, k]` times `x [t, k]` and times their gates `[t, n]`; rows whose gates are 0 are not read. `ids [m]` (I32) may be
// QD_NO_TENSOR.
//
// Threads: one at a time for each builder.
qd_tensor qd_mul_mat_sparse(qd_builder *builder,
                            qd_tensor weights,
                            qd_tensor x,
                            qd_tensor gates,
                            qd_tensor ids);

// The sum of rows `[n, k]` times factors `[t, n]`; rows whose factors are 0 are not read.
//
// Threads: one at a time for each builder.
qd_tensor qd_axpy_sparse(qd_builder *builder, qd_tensor rows, qd_tensor factors);

// The sum of outer products: `a […, k, p]`, `b […, k, q]` → `[…, q, p]`.
//
// Threads: one at a time for each builder.
qd_tensor qd_out_prod(qd_builder *builder, qd_tensor a, qd_tensor b);

// Rows of `x […, r, n]` by `ids […, t]` (I32), as F32.
//
// Threads: one at a time for each builder.
qd_tensor qd_get_rows(qd_builder *builder, qd_tensor x, qd_tensor ids);

// Overwrites the rows `ids` (I32) of a state or result; returns the tensor after the write.
//
// Threads: one at a time for each builder.
qd_tensor qd_set_rows(qd_builder *builder, qd_tensor target, qd_tensor rows, qd_tensor ids);

// The sum of all elements.
//
// Threads: one at a time for each builder.
qd_tensor qd_sum(qd_builder *builder, qd_tensor x);

// The sum of each row: `[…, n]` → `[…, 1]`.
//
// Threads: one at a time for each builder.
qd_tensor qd_sum_rows(qd_builder *builder, qd_tensor x);

// The mean of each row: `[…, n]` → `[…, 1]`.
//
// Threads: one at a time for each builder.
qd_tensor qd_mean(qd_builder *builder, qd_tensor x);

// The index of each row's largest element, I32.
//
// Threads: one at a time for each builder.
qd_tensor qd_argmax(qd_builder *builder, qd_tensor x);

// The indices that sort each row, I32; largest first if `descending`.
//
// Threads: one at a time for each builder.
qd_tensor qd_argsort(qd_builder *builder, qd_tensor x, int32_t descending);

// The indices of each row's `k` largest elements, largest first, I32.
//
// Threads: one at a time for each builder.
qd_tensor qd_top_k(qd_builder *builder, qd_tensor x, size_t k);

// The cross-entropy loss of logits and labels, which are probabilities of the same shape: one number.
//
// Threads: one at a time for each builder.
qd_tensor qd_cross_entropy_loss(qd_builder *builder, qd_tensor logits, qd_tensor labels);

// The values `start`, `start + step` … below `stop`, F32.
//
// Threads: one at a time for each builder.
qd_tensor qd_arange(qd_builder *builder, float start, float stop, float step);

// The experts of each token: scores `[t, e]` → ids `[t, used]` (I32), from the best `groups_used` of `groups` groups. The score
// of a group is the sum of its two largest.
//
// Threads: one at a time for each builder.
qd_tensor qd_select_experts(qd_builder *builder,
                            qd_tensor scores,
                            size_t used,
                            size_t groups,
                            size_t groups_used);

// `qd_select_experts` where the score of a group is its largest.
//
// Threads: one at a time for each builder.
qd_tensor qd_select_experts_by_largest(qd_builder *builder,
                                       qd_tensor scores,
                                       size_t used,
                                       size_t groups,
                                       size_t groups_used);

// The weights of selected experts: probabilities `[t, e]`, ids `[t, u]` → `[t, u]`; their softmax, or divided by their sum,
// and times `scale`.
//
// Threads: one at a time for each builder.
qd_tensor qd_expert_weights(qd_builder *builder,
                            qd_tensor probabilities,
                            qd_tensor ids,
                            int32_t softmax,
                            int32_t normalize,
                            float scale);

// Adds to each row of `x [t, u, n]` the bias `[e, n]` of its expert in `ids [t, u]`.
//
// Threads: one at a time for each builder.
qd_tensor qd_add_id(qd_builder *builder, qd_tensor x, qd_tensor biases, qd_tensor ids);

// The sum over `u` of `x [t, u, n]`, each row times its weight in `[t, u]`.
//
// Threads: one at a time for each builder.
qd_tensor qd_sum_experts(qd_builder *builder, qd_tensor x, qd_tensor weights);

// Causal convolution of each channel of `x [k − 1 + t, c]` with a kernel `[c, k]`.
//
// Threads: one at a time for each builder.
qd_tensor qd_ssm_conv(qd_builder *builder, qd_tensor x, qd_tensor kernel);

// The gated delta rule, a linear attention: the results `[t, h, e]`. The state after the last token goes to `*state`, which
// may be NULL.
//
// Threads: one at a time for each builder.
qd_tensor qd_gated_delta_rule(qd_builder *builder,
                              const qd_delta_rule *rule,
                              qd_tensor *state);

// Softmax along rows of `scale · x + mask`, with an attention sink per head; `mask` and `sinks` may be QD_NO_TENSOR.
//
// Threads: one at a time for each builder.
qd_tensor qd_soft_max(qd_builder *builder, qd_tensor x, float scale, qd_tensor mask, qd_tensor sinks);

// −∞ where `column > past + row`.
//
// Threads: one at a time for each builder.
qd_tensor qd_diag_mask_inf(qd_builder *builder, qd_tensor x, size_t past);

// 0 where `column > past + row`.
//
// Threads: one at a time for each builder.
qd_tensor qd_diag_mask_zero(qd_builder *builder, qd_tensor x, size_t past);

// Defaults of qd_rope: 128 elements, base 10000, no scaling.
//
// Threads: any.
qd_rope_params qd_rope_default_params(void);

// Rotary position embedding of `x […, t, h, d]` at `positions [t]` (I32); `factors [dims/2]` may be QD_NO_TENSOR.
//
// Threads: one at a time for each builder.
qd_tensor qd_rope(qd_builder *builder,
                  qd_tensor x,
                  qd_tensor positions,
                  qd_tensor factors,
                  const qd_rope_params *params);

// Defaults of qd_attention: every query sees every key.
//
// Threads: any.
qd_attention_params qd_attention_default_params(void);

// Fused attention of queries `[b, h, t, d]` over keys `[b, g, n, d]` and values `[b, g, n, e]` → `[b, t, h, e]`.
//
// Threads: one at a time for each builder.
qd_tensor qd_attention(qd_builder *builder,
                       qd_tensor queries,
                       qd_tensor keys,
                       qd_tensor values,
                       const qd_attention_params *params);

// A contiguous copy in another type.
//
// Threads: one at a time for each builder.
qd_tensor qd_cast(qd_builder *builder, qd_tensor x, qd_dtype dtype);

// A contiguous copy.
//
// Threads: one at a time for each builder.
qd_tensor qd_cont(qd_builder *builder, qd_tensor x);

// Copies the elements of `x` to `target`, a state or result, cast to its type; returns the target after the write.
//
// Threads: one at a time for each builder.
qd_tensor qd_copy_into(qd_builder *builder, qd_tensor x, qd_tensor target);

// Tensors concatenated along dimension `axis`, counted from the outermost.
//
// Threads: one at a time for each builder.
qd_tensor qd_concat(qd_builder *builder, const qd_tensor *tensors, size_t tensor_count, size_t axis);

// The tensor repeated along every dimension to fill a shape.
//
// Threads: one at a time for each builder.
qd_tensor qd_repeat(qd_builder *builder, qd_tensor x, const size_t *dims, size_t rank);

// Zeros appended along the innermost dimensions; `after` has their numbers, outermost dimension first.
//
// Threads: one at a time for each builder.
qd_tensor qd_pad(qd_builder *builder, qd_tensor x, const size_t *after, size_t count);

// The same elements under another shape.
//
// Threads: one at a time for each builder.
qd_tensor qd_reshape(qd_builder *builder, qd_tensor x, const size_t *dims, size_t rank);

// A view with any shape, byte strides (of four dimensions, outermost first) and byte offset.
//
// Threads: one at a time for each builder.
qd_tensor qd_view(qd_builder *builder,
                  qd_tensor x,
                  const size_t *dims,
                  size_t rank,
                  const size_t *strides,
                  size_t offset);

// Elements `start` … `start + len` along dimension `axis`, as a view.
//
// Threads: one at a time for each builder.
qd_tensor qd_slice(qd_builder *builder, qd_tensor x, size_t axis, size_t start, size_t len);

// The dimensions reordered, as a view: dimension `i` of the result is dimension `axes[i]` of `x`.
//
// Threads: one at a time for each builder.
qd_tensor qd_permute(qd_builder *builder, qd_tensor x, const size_t *axes, size_t count);

// The two innermost dimensions swapped, as a view.
//
// Threads: one at a time for each builder.
qd_tensor qd_transpose(qd_builder *builder, qd_tensor x);

// A dense window of this size with stride 1 and no padding.
//
// Threads: any.
qd_window qd_window_default_params(size_t height, size_t width);

// The patches that a window sees, as rows: `[n, c, h, w]` → `[n, oh, ow, c · kh · kw]`, F32 or F16.
//
// Threads: one at a time for each builder.
qd_tensor qd_im2col(qd_builder *builder, qd_tensor x, const qd_window *window, qd_dtype dtype);

// Convolution: kernel `[oc, ic, kw]`, `x [n, ic, w]` → `[n, oc, ow]`.
//
// Threads: one at a time for each builder.
qd_tensor qd_conv_1d(qd_builder *builder, qd_tensor x, qd_tensor kernel, const qd_window *window);

// Convolution: kernel `[oc, ic, kh, kw]`, `x [n, ic, h, w]` → `[n, oc, oh, ow]`.
//
// Threads: one at a time for each builder.
qd_tensor qd_conv_2d(qd_builder *builder, qd_tensor x, qd_tensor kernel, const qd_window *window);

// Depthwise convolution: kernel `[c, 1, kh, kw]`, `x [n, c, h, w]` → `[n, c, oh, ow]`.
//
// Threads: one at a time for each builder.
qd_tensor qd_conv_2d_depthwise(qd_builder *builder, qd_tensor x, qd_tensor kernel, const qd_window *window);

// Transposed convolution: kernel `[ic, oc, kw]`, `x [n, ic, w]`.
//
// Threads: one at a time for each builder.
qd_tensor qd_conv_transpose_1d(qd_builder *builder, qd_tensor x, qd_tensor kernel, size_t stride);

// Transposed convolution: kernel `[ic, oc, kh, kw]`, `x [n, ic, h, w]`.
//
// Threads: one at a time for each builder.
qd_tensor qd_conv_transpose_2d(qd_builder *builder,
                               qd_tensor x,
                               qd_tensor kernel,
                               size_t stride_height,
                               size_t stride_width);

// Pooling along rows: `[…, w]` → `[…, ow]`; QD_POOL_….
//
// Threads: one at a time for each builder.
qd_tensor qd_pool_1d(qd_builder *builder, qd_tensor x, int32_t pool, const qd_window *window);

// Pooling of windows: `[n, c, h, w]` → `[n, c, oh, ow]`; QD_POOL_….
//
// Threads: one at a time for each builder.
qd_tensor qd_pool_2d(qd_builder *builder, qd_tensor x, int32_t pool, const qd_window *window);

// The tensor resized to a shape: nearest elements, or with `bilinear` interpolated.
//
// Threads: one at a time for each builder.
qd_tensor qd_upscale(qd_builder *builder, qd_tensor x, const size_t *dims, size_t rank, int32_t bilinear);

// A table without functions, to be filled in.
//
// Threads: any.
qd_custom_table qd_custom_default_params(void);

// Makes an operation of a table, which is copied.
//
// Threads: any.
qd_custom_op *qd_custom_op_new(const qd_custom_table *table, qd_error *error);

// Frees an operation. Graphs that use it keep it.
//
// Threads: any.
void qd_custom_op_free(qd_custom_op *op);

// Applies an operation of the caller's own to tensors.
//
// Threads: one at a time for each builder.
qd_tensor qd_custom(qd_builder *builder, const qd_custom_op *op, const qd_tensor *tensors, size_t tensor_count);

// Frees a graph. Plans and sessions of it stay usable.
//
// Threads: any.
void qd_graph_free(qd_graph *graph);

// The graph as text: a line for each tensor.
//
// Threads: any.
qd_status qd_graph_text(const qd_graph *graph, char *buffer, size_t capacity, size_t *needed, qd_error *error);

// The number of nodes of a graph; 0 without one.
//
// Threads: any.
size_t qd_graph_node_count(const qd_graph *graph);

// The number of tensors of a graph; 0 without one.
//
// Threads: any.
size_t qd_graph_tensor_count(const qd_graph *graph);

// The tensor of a name: a leaf, an output, or a labelled result; QD_NO_TENSOR if there is none.
//
// Threads: any.
qd_tensor qd_graph_find(const qd_graph *graph, const char *name);

// Type and shape of a tensor of a graph.
//
// Threads: any.
qd_status qd_graph_tensor(const qd_graph *graph, qd_tensor tensor, qd_tensor_info *info, qd_error *error);

// The name of a tensor of a graph.
//
// Threads: any.
qd_status qd_graph_tensor_name(const qd_graph *graph,
                               qd_tensor tensor,
                               char *buffer,
                               size_t capacity,
                               size_t *needed,
                               qd_error *error);

// A scheduler for backends, the most preferred first. Sessions of one scheduler load the same weights only once.
//
// Threads: any.
qd_scheduler *qd_scheduler_new(const qd_backend *const *backends, size_t backend_count, qd_error *error);

// Frees a scheduler. Its plans and sessions stay usable.
//
// Threads: any.
void qd_scheduler_free(qd_scheduler *scheduler);

// Places the leaf or result of this name on a backend, by number, in every graph that has one. Every node that writes it
// runs there. The graphs are planned later, so a name that none of them has is not an error.
//
// Threads: one at a time for each scheduler.
qd_status qd_scheduler_pin(qd_scheduler *scheduler,
                           const char *name,
                           size_t backend,
                           qd_error *error);

// Places a tensor of the next graph on a backend, by number.
//
// Threads: one at a time for each scheduler.
qd_status qd_scheduler_pin_tensor(qd_scheduler *scheduler, qd_tensor tensor, size_t backend, qd_error *error);

// Places leaves by name; nodes that read them tend to run there. The callback runs on the thread that plans a graph, also
// later, until the scheduler and everything that was made of it are freed; NULL removes it.
//
// Threads: one at a time for each scheduler.
qd_status qd_scheduler_place(qd_scheduler *scheduler,
                             qd_place_callback callback,
                             void *user_data,
                             qd_error *error);

// Limits the bytes that a plan may take of a backend, by number.
//
// Threads: one at a time for each scheduler.
qd_status qd_scheduler_budget(qd_scheduler *scheduler, size_t backend, uint64_t bytes, qd_error *error);

// Lets the memory planner search for plans that take less memory, for so many steps of about 50 ns; 0: not at all.
//
// Threads: one at a time for each scheduler.
qd_status qd_scheduler_effort(qd_scheduler *scheduler, uint64_t steps, qd_error *error);

// 1: check every plan by code that is independent of the planner.
//
// Threads: one at a time for each scheduler.
qd_status qd_scheduler_check_plans(qd_scheduler *scheduler, int32_t check, qd_error *error);

// Plans a graph. Nothing is allocated.
//
// Threads: one at a time for each scheduler.
qd_plan *qd_scheduler_plan(const qd_scheduler *scheduler, const qd_graph *graph, qd_error *error);

// Frees a plan. Its sessions stay usable.
//
// Threads: any.
void qd_plan_free(qd_plan *plan);

// A plan in one of the formats QD_PLAN_…. `title` is for pages and drawings, and may be NULL.
//
// Threads: any.
qd_status qd_plan_write(const qd_plan *plan,
                        int32_t format,
                        const char *title,
                        char *buffer,
                        size_t capacity,
                        size_t *needed,
                        qd_error *error);

// The number of splits of a plan: groups of nodes that one backend runs in one call.
//
// Threads: any.
size_t qd_plan_split_count(const qd_plan *plan);

// The number of copies between backends in each run.
//
// Threads: any.
size_t qd_plan_copy_count(const qd_plan *plan);

// The number of the backend that runs a split, counted from 0; -1 if there is no such split.
//
// Threads: any.
int32_t qd_plan_split_backend(const qd_plan *plan, size_t split);

// The number of the backend that a tensor is on; -1 for leaves that are on every backend that reads them.
//
// Threads: any.
int32_t qd_plan_backend_of(const qd_plan *plan, qd_tensor tensor);

// The memory that a plan takes of a backend, by number, before anything is allocated.
//
// Threads: any.
qd_status qd_plan_memory(const qd_plan *plan, size_t backend, qd_plan_bytes *bytes, qd_error *error);

// A session that runs a plan: allocates, loads weights, compiles.
//
// Threads: any.
qd_session *qd_session_new(const qd_plan *plan, qd_error *error);

// A session without a plan, on the backends of a scheduler: qd_session_use_graph plans as it needs.
//
// Threads: one at a time for each scheduler.
qd_session *qd_session_empty(const qd_scheduler *scheduler, qd_error *error);

// Frees a session, with its memory. A call that is using it ends first.
//
// Threads: any.
void qd_session_free(qd_session *session);

// Makes a graph the current one; one that was used before is found again, with its plan.
//
// Threads: one at a time for each session.
qd_status qd_session_use_graph(qd_session *session, const qd_graph *graph, qd_error *error);

// Makes a plan of the same backends the current one.
//
// Threads: one at a time for each session.
qd_status qd_session_use_plan(qd_session *session, const qd_plan *plan, qd_error *error);

// The current plan of a session, to be freed.
//
// Threads: one at a time for each session.
qd_plan *qd_session_plan(const qd_session *session, qd_error *error);

// Sets an input by name, as the bytes of its type. It keeps its value for later runs.
//
// Threads: one at a time for each session.
qd_status qd_session_set(qd_session *session, const char *name, const void *data, size_t bytes, qd_error *error);

// Sets a part of an input that was set as a whole before, from a byte on.
//
// Threads: one at a time for each session.
qd_status qd_session_set_at(qd_session *session,
                            const char *name,
                            size_t offset,
                            const void *data,
                            size_t bytes,
                            qd_error *error);

// Sets an input from 32-bit floating point numbers, converted to its type.
//
// Threads: one at a time for each session.
qd_status qd_session_set_f32(qd_session *session, const char *name, const float *values, size_t count, qd_error *error);

// Sets the bytes of a weight that its graph has no data for. The session keeps a copy.
//
// Threads: one at a time for each session.
qd_status qd_session_set_weight(qd_session *session, const char *name, const void *data, size_t bytes, qd_error *error);

// Runs the current plan, and waits for the end.
//
// Threads: one at a time for each session.
qd_status qd_session_run(qd_session *session, qd_error *error);

// Starts the current plan. Asynchronous devices go on working when this returns: inputs of the next run may be set
// meanwhile.
//
// Threads: one at a time for each session.
qd_status qd_session_start(qd_session *session, qd_error *error);

// Waits until everything that was started is done.
//
// Threads: one at a time for each session.
qd_status qd_session_wait(qd_session *session, qd_error *error);

// Stores 1 in `*done` if everything that was started is done, else 0.
//
// Threads: one at a time for each session.
qd_status qd_session_is_done(qd_session *session, int32_t *done, qd_error *error);

// Reads an output of the latest run by name, as the bytes of its type; waits for it.
//
// Threads: one at a time for each session.
qd_status qd_session_read(qd_session *session,
                          const char *name,
                          void *data,
                          size_t capacity,
                          size_t *needed,
                          qd_error *error);

// Reads a part of an output of the latest run, from a byte on; waits for it.
//
// Threads: one at a time for each session.
qd_status qd_session_read_at(qd_session *session,
                             const char *name,
                             size_t offset,
                             void *data,
                             size_t bytes,
                             qd_error *error);

// Reads an output of the latest run, converted to 32-bit floating point; waits for it.
//
// Threads: one at a time for each session.
qd_status qd_session_read_f32(qd_session *session,
                              const char *name,
                              float *values,
                              size_t capacity,
                              size_t *needed,
                              qd_error *error);

// Type and shape of an output of the current graph.
//
// Threads: one at a time for each session.
qd_status qd_session_output(const qd_session *session, const char *name, qd_tensor_info *info, qd_error *error);

// The buffer in which a tensor of the current graph is, to be freed, and its offset there: an output, a leaf or any other
// result, by name. The memory of results is reused by the next run.
//
// Threads: one at a time for each session.
qd_buffer *qd_session_tensor(const qd_session *session,
                             const char *name,
                             size_t *offset,
                             qd_error *error);

// Uses a buffer of the caller for the input or state of this name, in every graph that qd_session_use_graph makes the current
// one afterwards. Plans that were made already do not use it.
//
// Threads: one at a time for each session.
qd_status qd_session_bind_leaf(qd_session *session,
                               const char *name,
                               const qd_buffer *buffer,
                               size_t offset,
                               size_t bytes,
                               qd_error *error);

// Uses a buffer of the caller for the output of this name, which must be computed, in every graph that qd_session_use_graph
// makes the current one afterwards. Plans that were made already do not use it.
//
// Threads: one at a time for each session.
qd_status qd_session_bind_output(qd_session *session,
                                 const char *name,
                                 const qd_buffer *buffer,
                                 size_t offset,
                                 size_t bytes,
                                 qd_error *error);

// Makes an output of the latest run an input of the next one, without waiting for it: the bytes stay on their device. Stores
// 1 in `*chained`, or 0, and nothing has happened, if the two are not on one device: then read the output and set the input.
//
// Threads: one at a time for each session.
qd_status qd_session_chain(qd_session *session,
                           const char *output,
                           const char *input,
                           int32_t *chained,
                           qd_error *error);

// Starts to read outputs of the latest run, without waiting: they are copied to the host when the run is done, and runs that
// are started meanwhile do not change them. qd_read_finish waits for the bytes. Two reads of a session may be pending; a third
// takes the place of the older one.
//
// Threads: one at a time for each session.
qd_read *qd_session_read_start(qd_session *session,
                               const char *const *outputs,
                               size_t output_count,
                               qd_error *error);

// Waits for outputs that are being read, and copies their bytes, one output after the other. A read is finished once; one whose
// buffer was too small can be finished with another.
//
// Threads: one at a time for each session.
qd_status qd_read_finish(qd_read *read,
                         void *data,
                         size_t capacity,
                         size_t *needed,
                         qd_error *error);

// Frees a read. One that was not finished is abandoned.
//
// Threads: any.
void qd_read_free(qd_read *read);

// Reads a part of a state, from a byte on; waits for the run in flight.
//
// Threads: one at a time for each session.
qd_status qd_session_read_state(qd_session *session,
                                const char *name,
                                size_t offset,
                                void *data,
                                size_t bytes,
                                qd_error *error);

// Writes a part of a state, from a byte on; waits for the run in flight.
//
// Threads: one at a time for each session.
qd_status qd_session_write_state(qd_session *session,
                                 const char *name,
                                 size_t offset,
                                 const void *data,
                                 size_t bytes,
                                 qd_error *error);

// Sets every state to zero.
//
// Threads: one at a time for each session.
qd_status qd_session_clear_state(qd_session *session, qd_error *error);

// All states as bytes.
//
// Threads: one at a time for each session.
qd_status qd_session_save(qd_session *session, uint8_t *bytes, size_t capacity, size_t *needed, qd_error *error);

// Restores all states from bytes of qd_session_save; on an error they are as they were.
//
// Threads: one at a time for each session.
qd_status qd_session_restore(qd_session *session, const uint8_t *bytes, size_t byte_count, qd_error *error);

// Writes all states to a file.
//
// Threads: one at a time for each session.
qd_status qd_session_save_file(qd_session *session, const char *path, qd_error *error);

// Restores all states from a file of qd_session_save_file; on an error they are as they were.
//
// Threads: one at a time for each session.
qd_status qd_session_restore_file(qd_session *session, const char *path, qd_error *error);

// Runs the current plan with the inputs that are set, and shows the results of nodes to a callback, on the calling thread.
// `wants` says which; NULL: all. QD_STATUS_END if the callback ended the run: outputs cannot be read then.
//
// Threads: one at a time for each session.
qd_status qd_session_observe(qd_session *session,
                             qd_wants_callback wants,
                             qd_observe_callback observe,
                             void *user_data,
                             qd_error *error);

// An allocator in a buffer.
//
// Threads: any.
qd_allocator *qd_allocator_new(const qd_buffer *buffer, qd_error *error);

// An allocator without memory: it makes the same decisions, and its high-water mark is the size of the buffer to allocate.
//
// Threads: any.
qd_allocator *qd_allocator_measure(const qd_backend *backend,
                                   qd_error *error);

// As qd_allocator_measure, for tensors that take their own bytes, with an alignment that is a power of two.
//
// Threads: any.
qd_allocator *qd_allocator_measure_aligned(size_t alignment, qd_error *error);

// Frees an allocator. Its buffer stays.
//
// Threads: any.
void qd_allocator_free(qd_allocator *allocator);

// Allocates a tensor of a graph; `name` is for messages.
//
// Threads: one at a time for each allocator.
qd_status qd_allocator_allocate(qd_allocator *allocator,
                                const qd_graph *graph,
                                qd_tensor tensor,
                                const char *name,
                                qd_allocation *allocation,
                                qd_error *error);

// Frees the memory of a tensor, by the number of its allocation.
//
// Threads: one at a time for each allocator.
qd_status qd_allocator_release(qd_allocator *allocator, uint64_t id, qd_error *error);

// Frees all tensors, and forgets the high-water mark.
//
// Threads: one at a time for each allocator.
qd_status qd_allocator_reset(qd_allocator *allocator, qd_error *error);

// The highest end of an allocation since the last reset, in bytes; 0 without an allocator.
//
// Threads: one at a time for each allocator.
uint64_t qd_allocator_high_water(const qd_allocator *allocator);

// Bytes that are allocated now; 0 without an allocator.
//
// Threads: one at a time for each allocator.
uint64_t qd_allocator_used(const qd_allocator *allocator);

// Makes a backend of a table, which is copied. It is used like any other: in schedulers, for buffers, for models.
//
// Threads: any.
qd_backend *qd_backend_new(const qd_backend_table *table, qd_error *error);

// A number of a node's operation by name, such as "eps"; `otherwise` if it has none of this name.
//
// Threads: any.
double qd_node_parameter(const qd_node *node, const char *name, double otherwise);

// A table without functions, to be filled in.
//
// Threads: any.
qd_backend_table qd_backend_default_params(void);

// Compares what a backend computes with a reference in 64-bit floating point, in guarded memory: `cases` random cases of more
// than 40,000, each of them in memory of its own, and in place where the operation allows it; 0: all. The report as text
// goes to `buffer`, as in other functions. QD_STATUS_OK also if cases failed.
//
// Threads: any.
qd_status qd_backend_check(const qd_backend *backend,
                           size_t cases,
                           uint64_t seed,
                           qd_conformance *totals,
                           char *buffer,
                           size_t capacity,
                           size_t *needed,
                           qd_error *error);

#ifdef __cplusplus
}  // extern "C"
#endif  // __cplusplus

#endif  /* QUADRIGA_H */

/* A shape as two arguments, dimensions outermost first: qd_input(g, "x", QD_DTYPE_F32, QD_SHAPE(2, 8)). C only. */
#ifndef __cplusplus
#define QD_SHAPE(...) (const size_t[]){__VA_ARGS__}, sizeof((const size_t[]){__VA_ARGS__}) / sizeof(size_t)
#endif
