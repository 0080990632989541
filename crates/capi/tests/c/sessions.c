/* Sessions: inputs and outputs in parts and in buffers of the caller, states in files, other plans, overlapping runs.
 *
 *   sessions FOLDER     a folder that can be written
 */
#include <quadriga.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static qd_error error;
static qd_backend *cpu;
static qd_scheduler *scheduler;

#define CHECK(condition)                                                            \
  do {                                                                              \
    if (!(condition)) {                                                             \
      fprintf(stderr, "%s:%d: %s: %s\n", __FILE__, __LINE__, #condition, error.message); \
      exit(EXIT_FAILURE);                                                           \
    }                                                                               \
  } while (0)
#define OK(call) CHECK((call) == QD_STATUS_OK)

/* y = factor · x + total, and total becomes y. */
static qd_graph *adder(float factor) {
  qd_builder *g = qd_builder_new(&error);
  qd_tensor x = qd_input(g, "x", QD_DTYPE_F32, QD_SHAPE(4)), total = qd_state(g, "total", QD_DTYPE_F32, QD_SHAPE(4));
  qd_tensor y = qd_add(g, qd_scale(g, x, factor), total);
  qd_output(g, "y", qd_copy_into(g, y, total));
  qd_graph *graph = qd_builder_finish(g, &error);
  CHECK(graph != NULL);
  qd_builder_free(g);
  return graph;
}

static void parts(void) {
  qd_graph *graph = adder(2);
  qd_plan *plan = qd_scheduler_plan(scheduler, graph, &error);
  qd_session *session = qd_session_new(plan, &error);
  CHECK(session != NULL && qd_plan_backend_of(plan, qd_graph_find(graph, "y")) <= 0);
  const float x[4] = {1, 2, 3, 4};
  float y[4];
  size_t needed;
  CHECK(qd_session_set_at(session, "x", 0, x, 8, &error) != QD_STATUS_OK); /* the rest was never set */
  OK(qd_session_set_f32(session, "x", (const float[4]){9, 9, 9, 9}, 4, &error));
  OK(qd_session_set_at(session, "x", 0, x, 8, &error));
  OK(qd_session_set_at(session, "x", 8, x + 2, 8, &error));
  CHECK(qd_session_set_at(session, "x", 12, x, 8, &error) != QD_STATUS_OK);
  CHECK(qd_session_set_at(session, "x", (size_t)-4, x, 8, &error) != QD_STATUS_OK);
  CHECK(qd_session_set_f32(session, "x", x, 3, &error) != QD_STATUS_OK);
  CHECK(qd_session_set_f32(session, "z", x, 4, &error) != QD_STATUS_OK && strstr(error.message, "z") != NULL);
  OK(qd_session_start(session, &error));
  OK(qd_session_wait(session, &error));
  CHECK(qd_session_read(session, "y", NULL, 0, &needed, &error) == QD_STATUS_BUFFER_TOO_SMALL && needed == sizeof y);
  OK(qd_session_read_at(session, "y", 4, y, 8, &error));
  CHECK(y[0] == 4 && y[1] == 6);
  CHECK(qd_session_read_at(session, "y", 12, y, 8, &error) != QD_STATUS_OK);
  CHECK(qd_session_read_f32(session, "y", y, 2, &needed, &error) == QD_STATUS_BUFFER_TOO_SMALL && needed == 4);
  size_t offset;
  qd_buffer *buffer = qd_session_tensor(session, "y", &offset, &error);
  CHECK(buffer != NULL && qd_buffer_is_host(buffer) == 1);
  OK(qd_buffer_read(buffer, offset, y, sizeof y, &error));
  CHECK(y[3] == 8);
  qd_buffer_free(buffer);
  CHECK(qd_session_tensor(session, "nothing", &offset, &error) == NULL);

  /* The state: written, cleared, and a plan of another graph that shares it. */
  OK(qd_session_write_state(session, "total", 4, x, 4, &error));
  CHECK(qd_session_write_state(session, "total", 16, x, 4, &error) != QD_STATUS_OK);
  qd_graph *other = adder(10);
  qd_plan *second = qd_scheduler_plan(scheduler, other, &error);
  OK(qd_session_use_plan(session, second, &error));
  OK(qd_session_set_f32(session, "x", x, 4, &error));
  OK(qd_session_run(session, &error));
  OK(qd_session_read_f32(session, "y", y, 4, NULL, &error));
  CHECK(y[0] == 12 && y[1] == 21 && y[2] == 36);
  qd_plan *current = qd_session_plan(session, &error);
  CHECK(current != NULL && qd_plan_split_count(current) == 1);
  qd_plan_free(current);
  OK(qd_session_clear_state(session, &error));
  OK(qd_session_read_state(session, "total", 0, y, sizeof y, &error));
  CHECK(y[0] == 0 && y[3] == 0);
  qd_session_free(session), qd_plan_free(plan), qd_plan_free(second), qd_graph_free(graph), qd_graph_free(other);
}

static void files(const char *folder) {
  char path[1024];
  snprintf(path, sizeof path, "%s/state", folder);
  qd_graph *graph = adder(1);
  qd_session *session = qd_session_empty(scheduler, &error);
  CHECK(session != NULL && qd_session_run(session, &error) != QD_STATUS_OK);
  OK(qd_session_use_graph(session, graph, &error));
  const float x[4] = {1, 2, 3, 4};
  float y[4];
  OK(qd_session_set_f32(session, "x", x, 4, &error));
  OK(qd_session_run(session, &error));
  OK(qd_session_save_file(session, path, &error));
  OK(qd_session_clear_state(session, &error));
  OK(qd_session_restore_file(session, path, &error));
  OK(qd_session_read_state(session, "total", 0, y, sizeof y, &error));
  CHECK(memcmp(x, y, sizeof x) == 0);
  CHECK(qd_session_restore_file(session, "/no/such/file", &error) != QD_STATUS_OK);
  CHECK(qd_session_save_file(session, "/no/such/folder/file", &error) != QD_STATUS_OK);
  CHECK(qd_session_save_file(session, NULL, &error) == QD_STATUS_INVALID_ARGUMENT);
  qd_session_free(session);
  qd_graph_free(graph);
}

static void bound(void) {
  qd_builder *g = qd_builder_new(&error);
  qd_output(g, "y", qd_scale(g, qd_input(g, "x", QD_DTYPE_F32, QD_SHAPE(4)), 3));
  qd_graph *graph = qd_builder_finish(g, &error);
  qd_builder_free(g);
  qd_session *session = qd_session_empty(scheduler, &error);
  qd_buffer *in = qd_buffer_new(cpu, 256, QD_USAGE_COMPUTE, &error), *out = qd_buffer_new(cpu, 256, QD_USAGE_COMPUTE, &error);
  CHECK(in != NULL && out != NULL && qd_buffer_usage(in) == QD_USAGE_COMPUTE);
  qd_backend *owner = qd_buffer_backend(in, &error);
  CHECK(owner != NULL);
  qd_backend_free(owner);
  OK(qd_session_bind_leaf(session, "x", in, 64, 16, &error));
  CHECK(qd_session_bind_leaf(session, "x", in, 250, 16, &error) != QD_STATUS_OK);
  OK(qd_session_bind_output(session, "y", out, 128, 16, &error));
  OK(qd_session_use_graph(session, graph, &error));
  const float x[4] = {1, 2, 3, 4};
  float y[4];
  OK(qd_buffer_write(in, 64, x, sizeof x, &error));
  qd_buffer_free(in); /* the session keeps it */
  OK(qd_session_run(session, &error));
  OK(qd_buffer_read(out, 128, y, sizeof y, &error));
  CHECK(y[0] == 3 && y[3] == 12);
  qd_buffer_free(out), qd_session_free(session), qd_graph_free(graph);
}

/* A counter whose output is the next run's input; results of three runs are read while the next ones run. */
static void overlapping(void) {
  qd_builder *g = qd_builder_new(&error);
  qd_tensor x = qd_input(g, "x", QD_DTYPE_F32, QD_SHAPE(4));
  qd_output(g, "y", qd_scale_bias(g, x, 1, 1));
  qd_output(g, "z", qd_scale(g, x, 10));
  qd_graph *graph = qd_builder_finish(g, &error);
  qd_builder_free(g);
  qd_plan *plan = qd_scheduler_plan(scheduler, graph, &error);
  qd_session *session = qd_session_new(plan, &error);
  const float start[4] = {0, 1, 2, 3};
  const char *names[] = {"y", "z"}, *wrong[] = {"y", "w"};
  int32_t chained = -1;
  CHECK(qd_session_chain(session, "y", "x", &chained, &error) != QD_STATUS_OK); /* nothing has run */
  CHECK(qd_session_read_start(session, names, 2, &error) == NULL);
  OK(qd_session_set_f32(session, "x", start, 4, &error));
  OK(qd_session_start(session, &error));
  CHECK(qd_session_read_start(session, wrong, 2, &error) == NULL && strstr(error.message, "w") != NULL);
  CHECK(qd_session_read_start(session, NULL, 2, &error) == NULL && error.code == QD_STATUS_INVALID_ARGUMENT);
  CHECK(qd_session_chain(session, "y", "x", NULL, &error) == QD_STATUS_INVALID_ARGUMENT);
  CHECK(qd_session_chain(session, "y", "w", &chained, &error) != QD_STATUS_OK);
  qd_read *reads[3];
  float values[8];
  size_t needed;
  for (int run = 0; run < 3; run++) {
    reads[run] = qd_session_read_start(session, names, 2, &error);
    CHECK(reads[run] != NULL);
    OK(qd_session_chain(session, "y", "x", &chained, &error));
    CHECK(chained == 1);
    OK(qd_session_start(session, &error));
  }
  CHECK(qd_read_finish(reads[0], values, sizeof values, NULL, &error) != QD_STATUS_OK); /* the third took its place */
  CHECK(qd_read_finish(reads[1], NULL, 0, &needed, &error) == QD_STATUS_BUFFER_TOO_SMALL && needed == sizeof values);
  CHECK(qd_read_finish(reads[1], NULL, needed, NULL, &error) == QD_STATUS_INVALID_ARGUMENT);
  OK(qd_read_finish(reads[1], values, sizeof values, NULL, &error));
  CHECK(values[0] == 2 && values[3] == 5 && values[4] == 10 && values[7] == 40);
  CHECK(qd_read_finish(reads[1], values, sizeof values, NULL, &error) == QD_STATUS_INVALID_ARGUMENT);
  qd_session_free(session); /* a read keeps it */
  OK(qd_read_finish(reads[2], values, sizeof values, NULL, &error));
  CHECK(values[0] == 3 && values[7] == 50);
  for (int run = 0; run < 3; run++) qd_read_free(reads[run]);
  CHECK(qd_read_finish(reads[2], values, sizeof values, NULL, &error) == QD_STATUS_INVALID_HANDLE);
  CHECK(qd_session_read_start(NULL, names, 2, &error) == NULL && qd_session_chain(NULL, "y", "x", &chained, &error) != QD_STATUS_OK);
  qd_plan_free(plan), qd_graph_free(graph);
}

/* Weights that come later, pins, effort. */
static void weights(void) {
  qd_builder *g = qd_builder_new(&error);
  qd_tensor w = qd_weight(g, "w", QD_DTYPE_F32, QD_SHAPE(2, 2), NULL, 0);
  qd_output(g, "y", qd_mul_mat(g, w, qd_input(g, "x", QD_DTYPE_F32, QD_SHAPE(1, 2))));
  qd_graph *graph = qd_builder_finish(g, &error);
  CHECK(graph != NULL);
  qd_builder_free(g);
  OK(qd_scheduler_effort(scheduler, 100, &error));
  OK(qd_scheduler_check_plans(scheduler, 1, &error));
  OK(qd_scheduler_pin_tensor(scheduler, w, 0, &error));
  CHECK(qd_scheduler_pin_tensor(scheduler, w, 7, &error) != QD_STATUS_OK);
  qd_plan *plan = qd_scheduler_plan(scheduler, graph, &error);
  CHECK(plan != NULL);
  qd_session *session = qd_session_new(plan, &error);
  CHECK(session != NULL);
  const float values[4] = {1, 2, 3, 4}, x[2] = {10, 1};
  float y[2];
  OK(qd_session_set_f32(session, "x", x, 2, &error));
  CHECK(qd_session_run(session, &error) != QD_STATUS_OK && strstr(error.message, "w") != NULL);
  CHECK(qd_session_set_weight(session, "w", values, 4, &error) != QD_STATUS_OK);
  OK(qd_session_set_weight(session, "w", values, sizeof values, &error));
  OK(qd_session_run(session, &error));
  OK(qd_session_read_f32(session, "y", y, 2, NULL, &error));
  CHECK(y[0] == 12 && y[1] == 34);
  qd_session_free(session), qd_plan_free(plan), qd_graph_free(graph);
}

static void devices(void) {
  char text[128];
  size_t needed;
  CHECK(qd_device_count() >= 1);
  OK(qd_device_name(0, text, sizeof text, &needed, &error));
  CHECK(needed == strlen(text) + 1);
  CHECK(qd_device_name(qd_device_count(), text, sizeof text, &needed, &error) == QD_STATUS_NOT_FOUND);
  OK(qd_backend_description(cpu, text, sizeof text, &needed, &error));
  CHECK(text[0] != 0 && strlen(qd_version()) >= 5);
  CHECK(qd_dtype_block_elements(QD_DTYPE_Q4_0) == 32 && qd_dtype_block_elements(12345) == 0);
}

int main(int argc, char **argv) {
  if (argc < 2) return EXIT_FAILURE;
  cpu = qd_backend_cpu(1, &error);
  const qd_backend *all[] = {cpu};
  scheduler = qd_scheduler_new(all, 1, &error);
  CHECK(cpu != NULL && scheduler != NULL);
  devices();
  parts();
  files(argv[1]);
  bound();
  overlapping();
  weights();
  qd_scheduler_free(scheduler);
  qd_backend_free(cpu);
  CHECK(qd_live_handles() == 0);
  printf("sessions do what they should\n");
  return EXIT_SUCCESS;
}
