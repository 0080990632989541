/* What a program asks of backends, buffers, allocators, graphs and schedulers, and what they answer. */
#include <quadriga.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static qd_error error;
static qd_backend *cpu;

#define CHECK(condition)                                                            \
  do {                                                                              \
    if (!(condition)) {                                                             \
      fprintf(stderr, "%s:%d: %s: %s\n", __FILE__, __LINE__, #condition, error.message); \
      exit(EXIT_FAILURE);                                                           \
    }                                                                               \
  } while (0)
#define OK(call) CHECK((call) == QD_STATUS_OK)

/* y = (a · x)², in two scopes with a barrier between them. */
static qd_graph *scaled(void) {
  const float a[4] = {1, 2, 3, 4};
  qd_builder *g = qd_builder_new(&error);
  qd_tensor x = qd_input(g, "x", QD_DTYPE_F32, QD_SHAPE(2, 4));
  qd_tensor w = qd_weight(g, "a", QD_DTYPE_F32, QD_SHAPE(4), a, sizeof a);
  qd_scope_begin(g, "first");
  qd_tensor product = qd_set_name(g, qd_mul(g, x, w), "product");
  qd_scope_end(g);
  qd_barrier(g);
  qd_output(g, "y", qd_set_name(g, qd_sqr(g, product), "square"));
  qd_graph *graph = qd_builder_finish(g, &error);
  CHECK(graph != NULL);
  qd_builder_free(g);
  return graph;
}

static void backends(void) {
  char name[64];
  size_t needed;
  OK(qd_backend_name(cpu, name, sizeof name, &needed, &error));
  CHECK(strstr(name, "cpu") != NULL || strstr(name, "CPU") != NULL);
  CHECK(needed == strlen(name) + 1 && qd_backend_name(cpu, name, 1, NULL, &error) == QD_STATUS_BUFFER_TOO_SMALL);
  OK(qd_backend_set_threads(cpu, 2, &error));
  CHECK(strcmp(qd_dtype_name(QD_DTYPE_F32), "F32") == 0);
  CHECK(qd_dtype_block_bytes(QD_DTYPE_Q4_0) == 18 && qd_dtype_block_bytes(QD_DTYPE_F32) == 4);
}

static void buffers(void) {
  qd_buffer *buffer = qd_buffer_new(cpu, 64, QD_USAGE_STATE, &error);
  CHECK(buffer != NULL && qd_buffer_is_host(buffer) == 1 && qd_buffer_address(buffer) != 0);
  uint8_t bytes[64];
  memset(bytes, 7, sizeof bytes);
  OK(qd_buffer_write(buffer, 0, bytes, sizeof bytes, &error));
  OK(qd_buffer_clear(buffer, 16, 32, &error));
  /* The host may follow the address. */
  const uint8_t *at = (const uint8_t *)(uintptr_t)qd_buffer_address(buffer);
  CHECK(at[15] == 7 && at[16] == 0 && at[47] == 0 && at[48] == 7);
  CHECK(qd_buffer_clear(buffer, 40, 32, &error) == QD_STATUS_INVALID_ARGUMENT);
  qd_buffer_free(buffer);
}

/* An allocator that measures finds the size with which one in a buffer succeeds. */
static void allocators(const qd_graph *graph) {
  const qd_tensor tensors[2] = {qd_graph_find(graph, "x"), qd_graph_find(graph, "y")};
  qd_allocator *measured = qd_allocator_measure(cpu, &error);
  CHECK(measured != NULL);
  qd_allocation allocation;
  for (int i = 0; i < 2; i++) OK(qd_allocator_allocate(measured, graph, tensors[i], "measured", &allocation, &error));
  size_t bytes = (size_t)qd_allocator_high_water(measured);
  CHECK(bytes >= 64 && bytes <= 1024);
  qd_allocator_free(measured);
  qd_buffer *buffer = qd_buffer_new(cpu, bytes, QD_USAGE_COMPUTE, &error);
  qd_allocator *real = qd_allocator_new(buffer, &error);
  for (int i = 0; i < 2; i++) OK(qd_allocator_allocate(real, graph, tensors[i], "real", &allocation, &error));
  qd_allocator_free(real), qd_buffer_free(buffer);

  qd_allocator *aligned = qd_allocator_measure_aligned(256, &error);
  CHECK(aligned != NULL);
  for (uint64_t i = 0; i < 2; i++) {
    OK(qd_allocator_allocate(aligned, graph, tensors[i], "aligned", &allocation, &error));
    CHECK(allocation.offset == 256 * i);
  }
  qd_allocator_free(aligned);
  CHECK(qd_allocator_measure_aligned(24, &error) == NULL && error.code == QD_STATUS_INVALID_ARGUMENT);
}

static void facts(const qd_graph *graph) {
  char text[4096];
  size_t needed;
  qd_tensor_info info;
  CHECK(qd_graph_node_count(graph) == 2);
  OK(qd_graph_tensor(graph, qd_graph_find(graph, "x"), &info, &error));
  CHECK(info.dtype == QD_DTYPE_F32 && info.dims[2] == 2 && info.dims[3] == 4 && info.elements == 8);
  CHECK(qd_graph_tensor(graph, 1000, &info, &error) == QD_STATUS_NOT_FOUND);
  OK(qd_graph_text(graph, text, sizeof text, &needed, &error));
  CHECK(needed == strlen(text) + 1 && strstr(text, "first") != NULL && strstr(text, "sqr") != NULL);
}

/* Leaves of this name go to the second backend. */
static int32_t place(void *user_data, const char *name) {
  ++*(int *)user_data;
  return strcmp(name, "a") == 0 ? 1 : -1;
}

static void placements(const qd_graph *graph) {
  qd_backend *other = qd_backend_cpu(1, &error);
  const qd_backend *all[] = {cpu, other};
  qd_scheduler *scheduler = qd_scheduler_new(all, 2, &error);
  CHECK(other != NULL && scheduler != NULL);
  OK(qd_scheduler_pin(scheduler, "square", 1, &error));
  CHECK(qd_scheduler_pin(scheduler, "square", 2, &error) != QD_STATUS_OK);
  qd_plan *plan = qd_scheduler_plan(scheduler, graph, &error);
  CHECK(plan != NULL && qd_plan_backend_of(plan, qd_graph_find(graph, "y")) == 1);
  qd_session *session = qd_session_new(plan, &error);
  const float x[8] = {1, 1, 1, 1, 2, 2, 2, 2};
  float y[8];
  int32_t done = 0;
  OK(qd_session_set_f32(session, "x", x, 8, &error));
  OK(qd_session_start(session, &error));
  OK(qd_session_wait(session, &error));
  OK(qd_session_is_done(session, &done, &error));
  OK(qd_session_read_f32(session, "y", y, 8, NULL, &error));
  CHECK(done == 1 && y[0] == 1 && y[3] == 16 && y[7] == 64);
  qd_session_free(session), qd_plan_free(plan);

  int calls = 0;
  OK(qd_scheduler_place(scheduler, place, &calls, &error));
  plan = qd_scheduler_plan(scheduler, graph, &error);
  CHECK(plan != NULL && calls > 0 && qd_plan_backend_of(plan, qd_graph_find(graph, "a")) == 1);
  qd_plan_free(plan);
  OK(qd_scheduler_place(scheduler, NULL, NULL, &error));
  /* A byte of each backend holds nothing, and the error says of which. */
  OK(qd_scheduler_budget(scheduler, 0, 1, &error));
  OK(qd_scheduler_budget(scheduler, 1, 1, &error));
  CHECK(qd_scheduler_plan(scheduler, graph, &error) == NULL && error.message[0] != 0);
  CHECK(qd_scheduler_budget(scheduler, 2, 1, &error) != QD_STATUS_OK);
  qd_scheduler_free(scheduler), qd_backend_free(other);
}

int main(void) {
  cpu = qd_backend_cpu(1, &error);
  CHECK(cpu != NULL);
  qd_graph *graph = scaled();
  backends();
  buffers();
  allocators(graph);
  facts(graph);
  placements(graph);
  qd_graph_free(graph);
  qd_backend_free(cpu);
  CHECK(qd_live_handles() == 0);
  printf("the answers are right\n");
  return EXIT_SUCCESS;
}
