/* What a careless or hostile caller does: NULL everywhere, handles that were freed or are of another type, wrong sizes,
 * callbacks that fail, handles freed in any order, several threads. Everything is an error or does nothing; memory checkers
 * see no mistake.
 *
 *   hostile MODEL
 */
#include <quadriga.h>
#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static qd_error error;

#define CHECK(condition)                                                            \
  do {                                                                              \
    if (!(condition)) {                                                             \
      fprintf(stderr, "%s:%d: %s: %s\n", __FILE__, __LINE__, #condition, error.message); \
      exit(EXIT_FAILURE);                                                           \
    }                                                                               \
  } while (0)

static void nulls(void) {
  char text[8];
  float numbers[2];
  uint32_t tokens[2];
  uint8_t bytes[2];
  size_t needed;
  int32_t done;
  qd_model_info model;
  qd_tensor_info tensor;
  qd_device_info device;
  qd_plan_bytes plan_bytes;
  qd_allocation allocation;
  qd_conformance totals;
  const qd_status bad = QD_STATUS_INVALID_HANDLE;
  CHECK(qd_model_describe(NULL, &model, NULL) == bad);
  CHECK(qd_model_metadata(NULL, "a", text, 8, &needed, &error) == bad);
  CHECK(qd_tokenize(NULL, "a", 1, 0, tokens, 2, &needed, &error) == bad);
  CHECK(qd_detokenize(NULL, tokens, 0, text, 8, &needed, &error) == bad);
  CHECK(qd_token_piece(NULL, 0, bytes, 2, &needed, &error) == bad);
  CHECK(qd_token_is_end(NULL, 0) == 0);
  CHECK(qd_chat_prompt(NULL, NULL, 0, text, 8, &needed, &error) == bad);
  CHECK(qd_generator_new(NULL, NULL, &error) == NULL && error.code == bad);
  CHECK(qd_generator_generate(NULL, "a", NULL, NULL, NULL, NULL, &error) == bad);
  CHECK(qd_generator_generate(NULL, NULL, NULL, NULL, NULL, NULL, &error) == QD_STATUS_INVALID_ARGUMENT);
  CHECK(qd_generator_chat(NULL, NULL, 3, NULL, NULL, NULL, NULL, &error) == QD_STATUS_INVALID_ARGUMENT);
  CHECK(qd_generator_chat_json(NULL, "[]", NULL, NULL, NULL, NULL, &error) == bad);
  CHECK(qd_generator_continue(NULL, tokens, 0, NULL, NULL, NULL, NULL, &error) == bad);
  CHECK(qd_generator_logits(NULL, tokens, 0, numbers, 2, &needed, &error) == bad);
  CHECK(qd_generator_cancel(NULL, &error) == bad);
  CHECK(qd_generator_clear(NULL, &error) == bad);
  CHECK(qd_generator_save(NULL, bytes, 2, &needed, &error) == bad);
  CHECK(qd_generator_load(NULL, bytes, 2, &error) == bad);
  CHECK(qd_generator_save_file(NULL, "a", &error) == bad);
  CHECK(qd_generator_load_file(NULL, "a", &error) == bad);
  CHECK(qd_service_new(NULL, NULL, &error) == NULL);
  CHECK(qd_service_submit(NULL, NULL, 0, NULL, &error) == NULL);
  CHECK(qd_service_generate(NULL, "a", NULL, NULL, NULL, NULL, &error) == bad);
  CHECK(qd_service_describe(NULL, NULL, &error) == bad);
  CHECK(qd_request_next(NULL, NULL, NULL, &error) == bad);
  CHECK(qd_embedder_new(NULL, NULL, &error) == NULL);
  CHECK(qd_embedder_embed(NULL, "a", numbers, 2, &needed, &error) == bad);
  CHECK(qd_backend_open(NULL, &error) == NULL && error.code == QD_STATUS_INVALID_ARGUMENT);
  CHECK(qd_backend_open("npu", &error) == NULL && error.code == QD_STATUS_NOT_FOUND);
  CHECK(qd_backend_device(NULL, &device, &error) == bad);
  CHECK(qd_backend_name(NULL, text, 8, &needed, &error) == bad);
  CHECK(qd_backend_new(NULL, &error) == NULL);
  CHECK(qd_backend_check(NULL, 1, 1, &totals, NULL, 0, NULL, &error) == bad);
  CHECK(qd_backend_set_threads(NULL, 1, &error) == bad);
  CHECK(qd_buffer_new(NULL, 8, QD_USAGE_COMPUTE, &error) == NULL);
  CHECK(qd_buffer_wrap(NULL, bytes, 2, NULL, NULL, &error) == NULL);
  CHECK(qd_buffer_read(NULL, 0, bytes, 2, &error) == bad && qd_buffer_write(NULL, 0, bytes, 2, &error) == bad);
  CHECK(qd_buffer_bytes(NULL) == 0 && qd_buffer_address(NULL) == 0 && qd_buffer_usage(NULL) == -1);
  CHECK(qd_buffer_copy(NULL, 0, NULL, 0, 1, &error) == bad && qd_buffer_clear(NULL, 0, 1, &error) == bad);
  CHECK(qd_input(NULL, "x", 0, NULL, 0) == QD_NO_TENSOR);
  CHECK(qd_add(NULL, 0, 0) == QD_NO_TENSOR && qd_mul_mat(NULL, -5, 7) == QD_NO_TENSOR);
  qd_output(NULL, "y", 0);
  qd_scope_begin(NULL, NULL);
  qd_scope_end(NULL);
  qd_barrier(NULL);
  CHECK(qd_builder_finish(NULL, &error) == NULL);
  CHECK(qd_custom_op_new(NULL, &error) == NULL && qd_custom(NULL, NULL, NULL, 0) == QD_NO_TENSOR);
  CHECK(qd_graph_tensor(NULL, 0, &tensor, &error) == bad && qd_graph_find(NULL, "x") == QD_NO_TENSOR);
  CHECK(qd_graph_text(NULL, text, 8, &needed, &error) == bad && qd_graph_node_count(NULL) == 0);
  CHECK(qd_scheduler_new(NULL, 1, &error) == NULL && qd_scheduler_new(NULL, 0, &error) == NULL);
  CHECK(qd_scheduler_pin(NULL, "x", 0, &error) == bad && qd_scheduler_budget(NULL, 0, 1, &error) == bad);
  CHECK(qd_scheduler_plan(NULL, NULL, &error) == NULL && qd_scheduler_place(NULL, NULL, NULL, &error) == bad);
  CHECK(qd_plan_memory(NULL, 0, &plan_bytes, &error) == bad && qd_plan_split_count(NULL) == 0);
  CHECK(qd_plan_write(NULL, QD_PLAN_JSON, NULL, text, 8, &needed, &error) == bad);
  CHECK(qd_session_new(NULL, &error) == NULL && qd_session_empty(NULL, &error) == NULL);
  CHECK(qd_session_set(NULL, "x", bytes, 2, &error) == bad && qd_session_run(NULL, &error) == bad);
  CHECK(qd_session_read(NULL, "y", bytes, 2, &needed, &error) == bad && qd_session_is_done(NULL, &done, &error) == bad);
  CHECK(qd_session_observe(NULL, NULL, NULL, NULL, &error) == QD_STATUS_INVALID_ARGUMENT);
  CHECK(qd_allocator_new(NULL, &error) == NULL && qd_allocator_measure(NULL, &error) == NULL);
  CHECK(qd_allocator_allocate(NULL, NULL, 0, "x", &allocation, &error) == bad);
  CHECK(qd_allocator_release(NULL, 1, &error) == bad && qd_allocator_high_water(NULL) == 0);
  qd_model_free(NULL), qd_generator_free(NULL), qd_service_free(NULL), qd_request_free(NULL), qd_embedder_free(NULL);
  qd_backend_free(NULL), qd_buffer_free(NULL), qd_builder_free(NULL), qd_graph_free(NULL), qd_custom_op_free(NULL);
  qd_scheduler_free(NULL), qd_plan_free(NULL), qd_session_free(NULL), qd_allocator_free(NULL);
  qd_error_set(NULL, 1, NULL);
  CHECK(qd_dtype_name(12345) == NULL && qd_dtype_block_bytes(12345) == 0);
  CHECK(qd_node_parameter(NULL, "eps", 7) == 7);
}

static void handles(void) {
  qd_backend *cpu = qd_backend_cpu(1, &error);
  CHECK(cpu != NULL);
  /* Of another type, and made up. */
  CHECK(qd_session_run((qd_session *)(void *)cpu, &error) == QD_STATUS_INVALID_HANDLE);
  CHECK(qd_session_run((qd_session *)(size_t)0xdeadbeef8, &error) == QD_STATUS_INVALID_HANDLE);
  qd_session_free((qd_session *)(void *)cpu);
  qd_backend_free(cpu);
  /* Freed, twice. */
  qd_device_info info;
  CHECK(qd_backend_device(cpu, &info, &error) == QD_STATUS_INVALID_HANDLE);
  CHECK(strstr(error.message, "freed") != NULL);
  qd_backend_free(cpu);
  /* An error that is NULL is not written. */
  CHECK(qd_backend_device(cpu, &info, NULL) == QD_STATUS_INVALID_HANDLE);
}

static qd_graph *small_graph(void) {
  qd_builder *g = qd_builder_new(&error);
  qd_tensor x = qd_input(g, "x", QD_DTYPE_F32, QD_SHAPE(2, 4));
  qd_output(g, "y", qd_scale(g, qd_sqr(g, x), 2));
  qd_graph *graph = qd_builder_finish(g, &error);
  CHECK(graph != NULL);
  /* A builder that is finished is empty. */
  CHECK(qd_builder_finish(g, &error) == NULL && error.code == QD_STATUS_INVALID_ARGUMENT);
  CHECK(qd_sqr(g, x) == QD_NO_TENSOR);
  qd_builder_free(g);
  return graph;
}

static void graphs(void) {
  const size_t five[5] = {1, 1, 1, 1, 1}, huge[2] = {(size_t)-1, (size_t)-1};
  for (int number = 0; number < 14; number++) {
    qd_builder *g = qd_builder_new(&error);
    qd_tensor x = qd_input(g, "x", QD_DTYPE_F32, QD_SHAPE(2, 4)), y = QD_NO_TENSOR;
    qd_rope_params rope = qd_rope_default_params();
    switch (number) {
      case 0: y = qd_add(g, x, 99); break;
      case 1: y = qd_add(g, x, QD_NO_TENSOR); break;
      case 2: y = qd_input(g, NULL, QD_DTYPE_F32, NULL, 0); break;
      case 3: y = qd_input(g, "z", 4, NULL, 0); break;
      case 4: y = qd_input(g, "z", QD_DTYPE_F32, five, 5); break;
      case 5: y = qd_input(g, "z", QD_DTYPE_F32, huge, 2); break;
      case 6: y = qd_input(g, "x", QD_DTYPE_F32, NULL, 0); break;
      case 7: y = qd_unary(g, x, 1000); break;
      case 8: y = qd_constant(g, "c", QD_DTYPE_F32, QD_SHAPE(4), "abc", 3); break;
      case 9: y = qd_mul_mat(g, x, qd_input(g, "z", QD_DTYPE_F32, QD_SHAPE(3))); break;
      case 10: y = qd_conv_2d(g, x, x, NULL); break;
      case 11: rope.struct_size = 1 << 20; y = qd_rope(g, x, x, QD_NO_TENSOR, &rope); break;
      case 12: qd_scope_end(g); break;
      case 13: y = qd_input(g, "\xff\xfe", QD_DTYPE_F32, NULL, 0); break;
    }
    qd_output(g, "y", y);
    error.code = QD_STATUS_OK;
    CHECK(qd_builder_finish(g, &error) == NULL && error.code != QD_STATUS_OK && error.message[0] != 0);
    qd_builder_free(g);
  }
}

struct failing {
  int allocations, fail_at, fail_run, destroyed;
};

static void *failing_allocate(void *context, size_t bytes, int32_t usage, qd_error *e) {
  struct failing *f = context;
  (void)usage;
  if (f->allocations++ == f->fail_at) {
    qd_error_set(e, QD_STATUS_OUT_OF_MEMORY, "no memory today");
    return NULL;
  }
  return malloc(bytes + 1);
}
static void failing_free(void *context, void *buffer) {
  (void)context;
  free(buffer);
}
static qd_status failing_write(void *c, void *b, size_t o, const void *d, size_t n, qd_error *e) {
  (void)c, (void)e;
  memcpy((char *)b + o, d, n);
  return QD_STATUS_OK;
}
static qd_status failing_read(void *c, const void *b, size_t o, void *d, size_t n, qd_error *e) {
  (void)c, (void)e;
  memcpy(d, (const char *)b + o, n);
  return QD_STATUS_OK;
}
static qd_status failing_supports(void *c, const qd_node *n, qd_error *e) {
  (void)c, (void)n, (void)e;
  return QD_STATUS_OK;
}
static void *failing_compile(void *context, const qd_node *const *nodes, size_t count, qd_error *e) {
  struct failing *f = context;
  (void)nodes, (void)e;
  return f->fail_run == 2 ? NULL : malloc(count + 1);
}
static qd_status failing_run(void *context, void *program, qd_error *e) {
  struct failing *f = context;
  (void)program;
  if (f->fail_run == 1) {
    qd_error_set(e, QD_STATUS_DEVICE, "not today");
    return QD_STATUS_DEVICE;
  }
  return QD_STATUS_OK;
}
static void failing_destroy(void *context) { ((struct failing *)context)->destroyed++; }

static void backends(void) {
  for (int fail_run = 0; fail_run < 3; fail_run++)
    for (int fail_at = 0; fail_at < 4; fail_at++) {
      struct failing f = {.fail_at = fail_at, .fail_run = fail_run};
      qd_backend_table table = qd_backend_default_params();
      table.name = "failing";
      table.context = &f;
      table.destroy = failing_destroy;
      table.allocate = failing_allocate;
      table.free = failing_free;
      table.write = failing_write;
      table.read = failing_read;
      table.supports = failing_supports;
      table.compile = failing_compile;
      table.run = failing_run;
      table.free_program = failing_free;
      qd_backend *backend = qd_backend_new(&table, &error);
      CHECK(backend != NULL);
      qd_graph *graph = small_graph();
      const qd_backend *all[] = {backend};
      qd_scheduler *scheduler = qd_scheduler_new(all, 1, &error);
      qd_plan *plan = qd_scheduler_plan(scheduler, graph, &error);
      CHECK(plan != NULL);
      qd_session *session = qd_session_new(plan, &error);
      if (session != NULL) {
        float x[8] = {0};
        CHECK(qd_session_set(session, "x", x, sizeof x, &error) == QD_STATUS_OK);
        qd_status status = qd_session_run(session, &error);
        CHECK((status == QD_STATUS_OK) == (fail_run == 0));
        if (fail_run == 1) CHECK(strstr(error.message, "not today") != NULL);
      } else {
        CHECK(error.code == QD_STATUS_OUT_OF_MEMORY || fail_run == 2);
      }
      /* In this order everything is freed before what it was made of is. */
      qd_backend_free(backend);
      qd_scheduler_free(scheduler);
      qd_graph_free(graph);
      CHECK(f.destroyed == 0);
      if (fail_at % 2 == 0) qd_plan_free(plan), qd_session_free(session);
      else qd_session_free(session), qd_plan_free(plan);
      CHECK(f.destroyed == 1);
    }
  /* Tables that cannot be used. */
  for (int number = 0; number < 5; number++) {
    struct failing f = {0};
    qd_backend_table table = qd_backend_default_params();
    table.name = number == 0 ? NULL : "x";
    table.context = &f;
    table.destroy = failing_destroy;
    table.allocate = number == 1 ? NULL : failing_allocate;
    table.free = failing_free;
    table.write = failing_write;
    table.read = failing_read;
    table.supports = failing_supports;
    table.run = number == 2 ? NULL : failing_run;
    table.compile = failing_compile;
    table.alignment = number == 3 ? 3 : 64;
    table.kind = number == 4 ? 77 : QD_DEVICE_OTHER;
    CHECK(qd_backend_new(&table, &error) == NULL && error.code == QD_STATUS_INVALID_ARGUMENT);
    CHECK(f.destroyed == 1);
  }
}

static int32_t stop_after_two(void *user_data, const qd_piece *piece) {
  (void)piece;
  return ++*(int *)user_data == 2;
}
static int32_t bad_logits(void *user_data, const uint32_t *tokens, size_t count, float *logits, size_t logit_count) {
  (void)tokens, (void)count;
  for (size_t i = 0; i < logit_count; i++) logits[i] = NAN;
  return *(int32_t *)user_data;
}
struct reentrant {
  qd_generator *generator;
  qd_status inner;
};
static int32_t call_again(void *user_data, const qd_piece *piece) {
  (void)piece;
  struct reentrant *r = user_data;
  if (r->inner != QD_STATUS_OK) return 0;
  r->inner = qd_generator_generate(r->generator, "x", NULL, NULL, NULL, NULL, NULL);
  qd_generator_free(r->generator); /* the running call keeps it */
  return 0;
}

static void *ask(void *argument) {
  qd_request_params request = qd_request_default_params();
  request.max_tokens = 3;
  request.raw = 1;
  return (void *)(size_t)(qd_service_generate(argument, "abc", &request, NULL, NULL, NULL, NULL) != QD_STATUS_OK);
}

static void models(const char *path) {
  CHECK(qd_model_open("/no/such/file.gguf", NULL, &error) == NULL && error.code == QD_STATUS_NOT_FOUND);
  qd_model_params wrong = qd_model_default_params();
  wrong.struct_size = 3;
  CHECK(qd_model_open(path, &wrong, &error) == NULL && error.code == QD_STATUS_INVALID_ARGUMENT);
  qd_model_params offline = qd_model_default_params();
  offline.offline = 1;
  offline.cache_dir = "/nonexistent";
  CHECK(qd_model_open("nobody/nothing:Q4_0", &offline, &error) == NULL);
  qd_model *model = qd_model_open(path, NULL, &error);
  CHECK(model != NULL);
  uint32_t tokens[64];
  char text[64];
  size_t count, needed;
  CHECK(qd_tokenize(model, "hello", 1, 0, NULL, 0, &count, &error) == QD_STATUS_BUFFER_TOO_SMALL && count > 0);
  CHECK(qd_tokenize(model, "hello", 1, 0, tokens, 64, &count, &error) == QD_STATUS_OK);
  CHECK(qd_detokenize(model, tokens, count, text, 64, &needed, &error) == QD_STATUS_OK);
  CHECK(needed == strlen(text) + 1 && strstr(text, "hello") != NULL);
  tokens[0] = 123456789;
  CHECK(qd_detokenize(model, tokens, 1, text, 64, &needed, &error) != QD_STATUS_OK);
  CHECK(qd_model_metadata(model, "general.architecture", text, 64, NULL, &error) == QD_STATUS_OK);
  CHECK(qd_model_metadata(model, "no.such.key", text, 64, NULL, &error) == QD_STATUS_NOT_FOUND);

  qd_engine_params engine = qd_engine_default_params();
  const char *no_device = "npu";
  engine.devices = &no_device;
  engine.device_count = 1;
  CHECK(qd_generator_new(model, &engine, &error) == NULL && error.code == QD_STATUS_NOT_FOUND);
  engine = qd_engine_default_params();
  engine.context = 64;
  engine.cache_keys = 12345;
  CHECK(qd_generator_new(model, &engine, &error) == NULL && error.code == QD_STATUS_INVALID_ARGUMENT);
  engine.cache_keys = QD_DTYPE_F32;
  engine.cache_values = QD_DTYPE_F32;
  qd_generator *generator = qd_generator_new(model, &engine, &error);
  CHECK(generator != NULL);

  qd_request_params request = qd_request_default_params();
  request.raw = 1;
  request.ignore_eos = 1;
  request.max_tokens = 5;
  qd_completion completion;
  int pieces = 0;
  CHECK(qd_generator_generate(generator, "abc", &request, stop_after_two, &pieces, &completion, &error) == QD_STATUS_OK);
  CHECK(pieces == 2 && completion.finish == QD_FINISH_CANCELLED && completion.answer_tokens == 2);
  int32_t result = 0;
  request.logits_callback = bad_logits;
  request.logits_data = &result;
  CHECK(qd_generator_generate(generator, "abc", &request, NULL, NULL, NULL, &error) != QD_STATUS_OK);
  result = 1;
  CHECK(qd_generator_generate(generator, "abc", &request, NULL, NULL, NULL, &error) != QD_STATUS_OK);
  request.logits_callback = NULL;
  request.json_schema = "{";
  CHECK(qd_generator_generate(generator, "abc", &request, NULL, NULL, NULL, &error) == QD_STATUS_INVALID_ARGUMENT);
  request.json_schema = NULL;
  request.grammar = "root ::= nonsense";
  CHECK(qd_generator_generate(generator, "abc", &request, NULL, NULL, NULL, &error) != QD_STATUS_OK);
  request.grammar = NULL;
  request.temperature = NAN;
  CHECK(qd_generator_generate(generator, "abc", &request, NULL, NULL, NULL, &error) != QD_STATUS_OK);
  request.temperature = 0;

  /* The KV cache: saved, damaged, restored. */
  CHECK(qd_generator_generate(generator, "abc", &request, NULL, NULL, &completion, &error) == QD_STATUS_OK);
  CHECK(qd_generator_save(generator, NULL, 0, &needed, &error) == QD_STATUS_BUFFER_TOO_SMALL);
  uint8_t *saved = malloc(needed);
  CHECK(qd_generator_save(generator, saved, needed, NULL, &error) == QD_STATUS_OK);
  CHECK(qd_generator_clear(generator, &error) == QD_STATUS_OK);
  CHECK(qd_generator_load(generator, saved, needed / 2, &error) != QD_STATUS_OK);
  CHECK(qd_generator_load(generator, saved, needed, &error) == QD_STATUS_OK);
  CHECK(qd_generator_generate(generator, "abc", &request, NULL, NULL, &completion, &error) == QD_STATUS_OK);
  CHECK(completion.cached_tokens > 0);
  free(saved);
  qd_model_info info;
  CHECK(qd_model_describe(model, &info, &error) == QD_STATUS_OK);
  CHECK(qd_tokenize(model, "hello", 1, 0, tokens, 64, &count, &error) == QD_STATUS_OK);
  float *logits = malloc(info.vocabulary * sizeof *logits);
  CHECK(qd_generator_logits(generator, tokens, count, logits, 1, &needed, &error) == QD_STATUS_BUFFER_TOO_SMALL);
  CHECK(needed == info.vocabulary);
  CHECK(qd_generator_logits(generator, tokens, count, logits, needed, NULL, &error) == QD_STATUS_OK);
  for (size_t i = 0; i < needed; i++) CHECK(isfinite(logits[i]));
  free(logits);

  struct reentrant r = {generator, QD_STATUS_OK};
  CHECK(qd_generator_generate(generator, "abc", &request, call_again, &r, NULL, &error) == QD_STATUS_OK);
  CHECK(r.inner == QD_STATUS_BUSY);
  CHECK(qd_generator_cancel(generator, &error) == QD_STATUS_INVALID_HANDLE);

  engine.sequences = 2;
  qd_service *service = qd_service_new(model, &engine, &error);
  CHECK(service != NULL);
  pthread_t threads[4];
  for (int i = 0; i < 4; i++) CHECK(pthread_create(&threads[i], NULL, ask, service) == 0);
  for (int i = 0; i < 4; i++) {
    void *failed;
    CHECK(pthread_join(threads[i], &failed) == 0 && failed == NULL);
  }
  const qd_message message = {"user", "abc"};
  request.max_tokens = 50;
  qd_request *cancelled = qd_service_submit(service, &message, 1, &request, &error);
  CHECK(cancelled != NULL);
  CHECK(qd_request_next(cancelled, NULL, NULL, &error) == QD_STATUS_OK);
  qd_model_free(model);
  qd_service_free(service); /* the request keeps it */
  CHECK(qd_request_next(cancelled, NULL, NULL, &error) == QD_STATUS_OK);
  qd_request_free(cancelled);
}

static void released(void *user_data) { ++*(int *)user_data; }

static void memory(void) {
  qd_backend *cpu = qd_backend_cpu(1, &error);
  qd_buffer *buffer = qd_buffer_new(cpu, 256, QD_USAGE_COMPUTE, &error);
  uint8_t bytes[64] = {7};
  CHECK(buffer != NULL && qd_buffer_bytes(buffer) == 256);
  CHECK(qd_buffer_write(buffer, 250, bytes, 64, &error) == QD_STATUS_INVALID_ARGUMENT);
  CHECK(qd_buffer_write(buffer, (size_t)-8, bytes, 64, &error) == QD_STATUS_INVALID_ARGUMENT);
  CHECK(qd_buffer_read(buffer, 0, NULL, 64, &error) == QD_STATUS_INVALID_ARGUMENT);
  CHECK(qd_buffer_new(cpu, 8, 99, &error) == NULL);
  _Alignas(64) uint8_t own[128];
  memset(own, 1, sizeof own);
  int count = 0;
  qd_buffer *wrapped = qd_buffer_wrap(cpu, own, sizeof own, released, &count, &error);
  CHECK(wrapped != NULL);
  CHECK(qd_buffer_copy(wrapped, 0, buffer, 64, 64, &error) == QD_STATUS_OK);
  CHECK(qd_buffer_read(buffer, 64, bytes, 64, &error) == QD_STATUS_OK && bytes[63] == 1);

  qd_graph *graph = small_graph();
  qd_allocator *allocator = qd_allocator_new(buffer, &error);
  qd_allocation a, b;
  CHECK(qd_allocator_allocate(allocator, graph, 0, "x", &a, &error) == QD_STATUS_OK && a.bytes >= 32);
  CHECK(qd_allocator_allocate(allocator, graph, 77, "x", &b, &error) == QD_STATUS_NOT_FOUND);
  CHECK(qd_allocator_release(allocator, a.id, &error) == QD_STATUS_OK);
  CHECK(qd_allocator_release(allocator, a.id, &error) == QD_STATUS_NOT_FOUND);
  int made = 0;
  while (qd_allocator_allocate(allocator, graph, 0, "x", &a, &error) == QD_STATUS_OK) made++;
  CHECK(made >= 1 && error.code == QD_STATUS_OUT_OF_MEMORY && qd_allocator_high_water(allocator) <= 256);
  CHECK(qd_allocator_reset(allocator, &error) == QD_STATUS_OK && qd_allocator_used(allocator) == 0);

  /* Weights in place are released once, when nothing uses them, or at once after an error. */
  float weights[16] = {1};
  int weight_count = 0;
  qd_builder *g = qd_builder_new(&error);
  qd_tensor w = qd_weight_in_place(g, "w", QD_DTYPE_F32, QD_SHAPE(4, 4), weights, sizeof weights, released, &weight_count);
  qd_output(g, "y", qd_sqr(g, w));
  qd_graph *weighted = qd_builder_finish(g, &error);
  CHECK(weighted != NULL && weight_count == 0);
  qd_builder_free(g);
  qd_graph_free(weighted);
  CHECK(weight_count == 1);
  CHECK(qd_weight_in_place(NULL, "w", 0, NULL, 0, weights, 4, released, &weight_count) == QD_NO_TENSOR && weight_count == 2);

  qd_backend_free(cpu);
  qd_buffer_free(wrapped);
  CHECK(count == 1);
  qd_buffer_free(buffer);
  qd_graph_free(graph);
  CHECK(qd_allocator_used(allocator) == 0);
  qd_allocator_free(allocator);
}

int main(int argc, char **argv) {
  if (argc < 2) return EXIT_FAILURE;
  nulls();
  handles();
  graphs();
  backends();
  memory();
  models(argv[1]);
  CHECK(qd_live_handles() == 0);
  printf("everything was refused\n");
  return EXIT_SUCCESS;
}
