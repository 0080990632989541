/* A session keeps its graph when the next one fails, wherever that fails: a backend in C refuses memory, bytes and programs, one
 * call after another. The session runs its old graph with its old states after each of them, and takes the new one in the end.
 */
#include <quadriga.h>
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
#define OK(call) CHECK((call) == QD_STATUS_OK)

/* Once armed, so many calls succeed; then one fails, or with `for_good` each. */
struct device {
  long left;
  int armed, for_good, failed;
  long buffers;
};

static int fails(struct device *device, qd_error *e) {
  if (!device->armed || device->left-- > 0) return 0;
  if (!device->for_good) device->armed = 0;
  device->failed = 1;
  qd_error_set(e, QD_STATUS_DEVICE, "the device refuses");
  return 1;
}

static void *allocate(void *c, size_t bytes, int32_t usage, qd_error *e) {
  (void)usage;
  struct device *device = c;
  if (fails(device, e)) return NULL;
  device->buffers++;
  return malloc(bytes + 1);
}
static void release(void *c, void *buffer) {
  ((struct device *)c)->buffers--;
  free(buffer);
}
static qd_status write_buffer(void *c, void *b, size_t offset, const void *data, size_t bytes, qd_error *e) {
  if (fails(c, e)) return QD_STATUS_DEVICE;
  if (bytes > 0) memcpy((char *)b + offset, data, bytes);
  return QD_STATUS_OK;
}
static qd_status read_buffer(void *c, const void *b, size_t offset, void *data, size_t bytes, qd_error *e) {
  (void)c, (void)e;
  if (bytes > 0) memcpy(data, (const char *)b + offset, bytes);
  return QD_STATUS_OK;
}
static qd_status copy_buffer(void *c, const void *from, size_t from_offset, void *to, size_t to_offset, size_t bytes,
                             qd_error *e) {
  (void)c, (void)e;
  if (bytes > 0) memmove((char *)to + to_offset, (const char *)from + from_offset, bytes);
  return QD_STATUS_OK;
}

/* mul, add and copies of contiguous F32 tensors */
static qd_status supports(void *c, const qd_node *node, qd_error *e) {
  (void)c;
  int known = strcmp(node->operation, "mul") == 0 || strcmp(node->operation, "add") == 0;
  for (size_t i = 0; i < node->input_count; i++) {
    const qd_tensor_info *a = &node->inputs[i].info, *o = &node->output.info;
    known = known && a->dtype == QD_DTYPE_F32 && memcmp(a->dims, o->dims, sizeof a->dims) == 0 && a->bytes == 4 * a->elements;
  }
  if (known) return QD_STATUS_OK;
  qd_error_set(e, QD_STATUS_UNSUPPORTED, "only mul and add");
  return QD_STATUS_UNSUPPORTED;
}

struct step {
  const float *a, *b;
  float *to;
  size_t elements;
  int add;
};
struct program {
  size_t count;
  struct step *steps;
};

static void *compile(void *c, const qd_node *const *nodes, size_t count, qd_error *e) {
  if (fails(c, e)) return NULL;
  struct program *program = malloc(sizeof *program);
  program->count = count;
  program->steps = calloc(count + 1, sizeof *program->steps);
  for (size_t i = 0; i < count; i++) {
    const qd_operand *a = &nodes[i]->inputs[0], *b = &nodes[i]->inputs[nodes[i]->input_count - 1], *to = &nodes[i]->output;
    program->steps[i] = (struct step){(const float *)(void *)((char *)a->buffer + a->offset),
                                      (const float *)(void *)((char *)b->buffer + b->offset),
                                      (float *)(void *)((char *)to->buffer + to->offset), to->info.elements,
                                      strcmp(nodes[i]->operation, "add") == 0};
  }
  return program;
}
static qd_status run(void *c, void *p, qd_error *e) {
  (void)c, (void)e;
  const struct program *program = p;
  for (size_t i = 0; i < program->count; i++) {
    const struct step *s = &program->steps[i];
    for (size_t k = 0; k < s->elements; k++) s->to[k] = s->add ? s->a[k] + s->b[k] : s->a[k] * s->b[k];
  }
  return QD_STATUS_OK;
}
static void free_program(void *c, void *program) {
  (void)c;
  free(((struct program *)program)->steps);
  free(program);
}

/* y = x · w + total for rows of 4 elements, and total becomes its first row; with `more`, another state and weight. */
static qd_graph *graph_of(size_t rows, float factor, int more) {
  float *weights = malloc(rows * 4 * sizeof *weights);
  for (size_t i = 0; i < rows * 4; i++) weights[i] = factor;
  qd_builder *g = qd_builder_new(&error);
  char name[32];
  snprintf(name, sizeof name, "w%zu", rows);
  qd_tensor x = qd_input(g, "x", QD_DTYPE_F32, QD_SHAPE(rows, 4));
  qd_tensor w = qd_weight(g, name, QD_DTYPE_F32, QD_SHAPE(rows, 4), weights, rows * 4 * sizeof *weights);
  qd_tensor total = qd_state(g, more ? "more" : "total", QD_DTYPE_F32, QD_SHAPE(rows, 4));
  qd_tensor y = qd_add(g, qd_mul(g, x, w), total);
  qd_output(g, "y", qd_copy_into(g, y, total));
  if (more) qd_output(g, "z", qd_mul(g, qd_mul(g, x, x), qd_add(g, x, x)));
  qd_graph *graph = qd_builder_finish(g, &error);
  CHECK(graph != NULL);
  qd_builder_free(g);
  free(weights);
  return graph;
}

/* Runs the small graph: y = 2 · x + total. */
static void check_runs(qd_session *session, float *total) {
  const float x[4] = {1, 2, 3, 4};
  float y[4];
  OK(qd_session_set_f32(session, "x", x, 4, &error));
  OK(qd_session_run(session, &error));
  OK(qd_session_read_f32(session, "y", y, 4, NULL, &error));
  for (int i = 0; i < 4; i++) {
    total[i] += 2 * x[i];
    CHECK(y[i] == total[i]);
  }
}

static void check_keeps_plan(qd_session *session, const char *before) {
  char after[4096];
  qd_plan *plan = qd_session_plan(session, &error);
  CHECK(plan != NULL);
  OK(qd_plan_write(plan, QD_PLAN_REASONS, NULL, after, sizeof after, NULL, &error));
  CHECK(strcmp(before, after) == 0);
  qd_plan_free(plan);
}

static void fail_everywhere(struct device *device, const qd_scheduler *scheduler, int for_good) {
  qd_graph *small = graph_of(1, 2, 0), *large = graph_of(64, 3, 1);
  long failures = 0;
  for (long successes = 0;; successes++) {
    qd_session *session = qd_session_empty(scheduler, &error);
    CHECK(session != NULL && qd_session_plan(session, &error) == NULL);
    OK(qd_session_use_graph(session, small, &error));
    char before[4096];
    qd_plan *plan = qd_session_plan(session, &error);
    OK(qd_plan_write(plan, QD_PLAN_REASONS, NULL, before, sizeof before, NULL, &error));
    qd_plan_free(plan);
    float total[4] = {0};
    check_runs(session, total);
    long buffers = device->buffers;
    *device = (struct device){.left = successes, .armed = 1, .for_good = for_good, .buffers = buffers};
    qd_status status = qd_session_use_graph(session, large, &error);
    device->armed = 0;
    if (status != QD_STATUS_OK) {
      failures++;
      CHECK(strstr(error.message, "the device refuses") != NULL);
      check_keeps_plan(session, before);
      check_runs(session, total); /* the state has its values */
      check_runs(session, total);
      CHECK(qd_session_read_state(session, "more", 0, before, 4, &error) != QD_STATUS_OK); /* nothing of the other */
    }
    /* Once the device works again, the graph does. */
    OK(qd_session_use_graph(session, large, &error));
    float x[256], y[256];
    for (int i = 0; i < 256; i++) x[i] = (float)i;
    OK(qd_session_set_f32(session, "x", x, 256, &error));
    OK(qd_session_run(session, &error));
    OK(qd_session_read_f32(session, "y", y, 256, NULL, &error));
    CHECK(y[0] == 0 && y[255] == 3 * 255);
    OK(qd_session_use_graph(session, small, &error));
    check_runs(session, total);
    qd_session_free(session);
    CHECK(device->buffers == 0);
    /* A failure need not be fatal: memory that is refused beside the old is asked for again without it. */
    CHECK(device->failed || status == QD_STATUS_OK);
    if (!device->failed) break;
  }
  CHECK(failures >= 3); /* memory, bytes and programs */
  qd_graph_free(small), qd_graph_free(large);
}

/* What is refused before anything is allocated: a graph that no backend computes, and one whose state has another shape. */
static void refused(const qd_scheduler *scheduler, qd_backend *own) {
  qd_graph *small = graph_of(1, 2, 0), *other_state = graph_of(2, 2, 0);
  const qd_backend *all[] = {own};
  qd_scheduler *alone = qd_scheduler_new(all, 1, &error);
  qd_builder *g = qd_builder_new(&error);
  qd_output(g, "y", qd_gelu(g, qd_input(g, "x", QD_DTYPE_F32, QD_SHAPE(1, 4))));
  qd_graph *unsupported = qd_builder_finish(g, &error);
  qd_builder_free(g);
  qd_session *session = qd_session_empty(scheduler, &error);
  CHECK(alone != NULL && unsupported != NULL && session != NULL);
  float total[4] = {0};
  OK(qd_session_use_graph(session, small, &error));
  check_runs(session, total);
  CHECK(qd_session_use_graph(session, other_state, &error) != QD_STATUS_OK && strstr(error.message, "total") != NULL);
  check_runs(session, total);
  CHECK(qd_session_use_graph(session, NULL, &error) == QD_STATUS_INVALID_HANDLE);
  check_runs(session, total);
  qd_session_free(session);

  /* `copy_into` is the CPU's, so a session of this backend alone takes a graph without a state. */
  g = qd_builder_new(&error);
  qd_tensor x = qd_input(g, "x", QD_DTYPE_F32, QD_SHAPE(1, 4));
  qd_output(g, "y", qd_add(g, x, x));
  qd_graph *twice = qd_builder_finish(g, &error);
  qd_builder_free(g);
  session = qd_session_empty(alone, &error);
  OK(qd_session_use_graph(session, twice, &error));
  CHECK(qd_session_use_graph(session, unsupported, &error) != QD_STATUS_OK && strstr(error.message, "gelu") != NULL);
  float values[4] = {1, 2, 3, 4};
  OK(qd_session_set_f32(session, "x", values, 4, &error));
  OK(qd_session_run(session, &error));
  OK(qd_session_read_f32(session, "y", values, 4, NULL, &error));
  CHECK(values[3] == 8);
  qd_session_free(session), qd_scheduler_free(alone);
  qd_graph_free(small), qd_graph_free(other_state), qd_graph_free(unsupported), qd_graph_free(twice);
}

int main(void) {
  struct device device = {.armed = 0};
  qd_backend_table table = qd_backend_default_params();
  table.name = "failing";
  table.context = &device;
  table.allocate = allocate;
  table.free = release;
  table.write = write_buffer;
  table.read = read_buffer;
  table.copy = copy_buffer;
  table.supports = supports;
  table.compile = compile;
  table.run = run;
  table.free_program = free_program;
  qd_backend *own = qd_backend_new(&table, &error), *cpu = qd_backend_cpu(1, &error);
  CHECK(own != NULL && cpu != NULL);
  const qd_backend *all[] = {own, cpu};
  qd_scheduler *scheduler = qd_scheduler_new(all, 2, &error);
  CHECK(scheduler != NULL);
  fail_everywhere(&device, scheduler, 0);
  fail_everywhere(&device, scheduler, 1);
  refused(scheduler, own);
  qd_scheduler_free(scheduler), qd_backend_free(own), qd_backend_free(cpu);
  CHECK(qd_live_handles() == 0 && device.buffers == 0);
  printf("sessions keep their graphs\n");
  return EXIT_SUCCESS;
}
