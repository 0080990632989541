/* A backend of one's own in C: it computes elementwise operations, norms, softmax and products of F32 matrices in memory of
 * its own, and leaves the rest to the CPU.
 *
 * The program runs the conformance suite on it, then a graph half of which runs here and half on the CPU, and a model, if the
 * path of one is given.
 */
#include <quadriga.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define CHECK(condition)                                                            \
  do {                                                                              \
    if (!(condition)) {                                                             \
      fprintf(stderr, "%s:%d: %s: %s\n", __FILE__, __LINE__, #condition, error.message); \
      exit(EXIT_FAILURE);                                                           \
    }                                                                               \
  } while (0)

/* ---- memory: a buffer is a block of the C library's heap */

static void *allocate(void *context, size_t bytes, int32_t usage, qd_error *error) {
  (void)context, (void)usage;
  void *buffer = malloc(bytes == 0 ? 1 : bytes);
  if (buffer == NULL) qd_error_set(error, QD_STATUS_OUT_OF_MEMORY, "malloc failed");
  return buffer;
}

static void release(void *context, void *buffer) {
  (void)context;
  free(buffer);
}

static qd_status write_buffer(void *context, void *buffer, size_t offset, const void *data, size_t bytes,
                              qd_error *error) {
  (void)context, (void)error;
  if (bytes > 0) memcpy((char *)buffer + offset, data, bytes);
  return QD_STATUS_OK;
}

static qd_status read_buffer(void *context, const void *buffer, size_t offset, void *data, size_t bytes,
                             qd_error *error) {
  (void)context, (void)error;
  if (bytes > 0) memcpy(data, (const char *)buffer + offset, bytes);
  return QD_STATUS_OK;
}

static qd_status copy_buffer(void *context, const void *from, size_t from_offset, void *to, size_t to_offset,
                             size_t bytes, qd_error *error) {
  (void)context, (void)error;
  if (bytes > 0) memmove((char *)to + to_offset, (const char *)from + from_offset, bytes);
  return QD_STATUS_OK;
}

/* ---- operations */

static int is(const qd_node *node, const char *operation) { return strcmp(node->operation, operation) == 0; }

static float unary(const char *operation, float x) {
  if (strcmp(operation, "sqr") == 0) return x * x;
  if (strcmp(operation, "abs") == 0) return fabsf(x);
  if (strcmp(operation, "neg") == 0) return -x;
  if (strcmp(operation, "relu") == 0) return x > 0 ? x : 0;
  if (strcmp(operation, "silu") == 0) return x / (1 + expf(-x));
  if (strcmp(operation, "sigmoid") == 0) return 1 / (1 + expf(-x));
  if (strcmp(operation, "tanh") == 0) return tanhf(x);
  return expf(x);
}

static int is_unary(const qd_node *node) {
  static const char *const known[] = {"sqr", "abs", "neg", "relu", "silu", "sigmoid", "tanh", "exp"};
  for (size_t i = 0; i < sizeof known / sizeof *known; i++)
    if (is(node, known[i])) return 1;
  return 0;
}

static float binary(const char *operation, float a, float b) {
  if (strcmp(operation, "add") == 0) return a + b;
  if (strcmp(operation, "sub") == 0) return a - b;
  if (strcmp(operation, "mul") == 0) return a * b;
  return a / b;
}

static int is_binary(const qd_node *node) {
  return is(node, "add") || is(node, "sub") || is(node, "mul") || is(node, "div");
}

static qd_status refuse(qd_error *error, const char *reason) {
  qd_error_set(error, QD_STATUS_UNSUPPORTED, reason);
  return QD_STATUS_UNSUPPORTED;
}

/* Asked for every node; a refusal sends the node to the next backend. */
static qd_status supports(void *context, const qd_node *node, qd_error *error) {
  (void)context;
  if (node->output.info.dtype != QD_DTYPE_F32) return refuse(error, "only F32");
  for (size_t i = 0; i < node->input_count; i++)
    if (node->inputs[i].info.dtype != QD_DTYPE_F32) return refuse(error, "only F32");
  if (is_unary(node) || is_binary(node) || is(node, "scale") || is(node, "rms_norm") || is(node, "mul_mat"))
    return QD_STATUS_OK;
  if (is(node, "soft_max") && node->input_count == 1) return QD_STATUS_OK;
  return refuse(error, "another operation");
}

/* An element by its indices, which wrap around: an operand that is smaller is repeated. */
static float *element(const qd_operand *operand, const size_t index[4]) {
  char *at = (char *)operand->buffer + operand->offset;
  for (int i = 0; i < 4; i++) at += index[i] % operand->info.dims[i] * operand->info.strides[i];
  return (float *)(void *)at;
}

static float dot(const qd_operand *w, const qd_operand *x, const size_t index[4]) {
  /* Head i of x uses head i / (h / h') of w; the result's column is a row of w. */
  const size_t *d = x->info.dims, *e = w->info.dims;
  size_t of_w[4] = {index[0] / (d[0] / e[0]), index[1] / (d[1] / e[1]), index[3], 0};
  size_t of_x[4] = {index[0], index[1], index[2], 0};
  double sum = 0;
  for (size_t k = 0; k < d[3]; k++) {
    of_w[3] = of_x[3] = k;
    sum += (double)*element(w, of_w) * (double)*element(x, of_x);
  }
  return (float)sum;
}

static void row(const qd_node *node, size_t index[4]) {
  const qd_operand *x = &node->inputs[0];
  size_t columns = x->info.dims[3];
  if (is(node, "rms_norm")) {
    double squares = 0;
    for (index[3] = 0; index[3] < columns; index[3]++) squares += (double)*element(x, index) * (double)*element(x, index);
    double factor = 1 / sqrt(squares / (double)columns + qd_node_parameter(node, "eps", 0));
    for (index[3] = 0; index[3] < columns; index[3]++)
      *element(&node->output, index) = (float)((double)*element(x, index) * factor);
    return;
  }
  float scale = (float)qd_node_parameter(node, "scale", 1), most = -INFINITY;
  double sum = 0;
  for (index[3] = 0; index[3] < columns; index[3]++) most = fmaxf(most, scale * *element(x, index));
  for (index[3] = 0; index[3] < columns; index[3]++)
    if (most > -INFINITY) sum += exp((double)(scale * *element(x, index) - most));
  for (index[3] = 0; index[3] < columns; index[3]++) {
    double value = sum > 0 ? exp((double)(scale * *element(x, index) - most)) / sum : 0;
    *element(&node->output, index) = (float)value;
  }
}

static qd_status run_node(void *context, const qd_node *node, qd_error *error) {
  (void)error;
  *(size_t *)context += 1;
  const size_t *dims = node->output.info.dims;
  const qd_operand *a = &node->inputs[0], *b = &node->inputs[node->input_count - 1];
  float scale = (float)qd_node_parameter(node, "scale", 1), bias = (float)qd_node_parameter(node, "bias", 0);
  int rows = is(node, "rms_norm") || is(node, "soft_max");
  size_t i[4];
  for (i[0] = 0; i[0] < dims[0]; i[0]++)
    for (i[1] = 0; i[1] < dims[1]; i[1]++)
      for (i[2] = 0; i[2] < dims[2]; i[2]++) {
        if (rows) {
          row(node, i);
          continue;
        }
        for (i[3] = 0; i[3] < dims[3]; i[3]++) {
          float *to = element(&node->output, i);
          if (is(node, "mul_mat"))
            *to = dot(a, b, i);
          else if (is(node, "scale"))
            *to = scale * *element(a, i) + bias;
          else if (is_binary(node))
            *to = binary(node->operation, *element(a, i), *element(b, i));
          else
            *to = unary(node->operation, *element(a, i));
        }
      }
  return QD_STATUS_OK;
}

static void destroyed(void *context) { printf("the backend computed %zu nodes\n", *(size_t *)context); }

int main(int argc, char **argv) {
  qd_error error = {0};
  size_t nodes = 0;
  qd_backend_table table = qd_backend_default_params();
  table.name = "own:0";
  table.description = "plain C";
  table.context = &nodes;
  table.destroy = destroyed;
  table.allocate = allocate;
  table.free = release;
  table.write = write_buffer;
  table.read = read_buffer;
  table.copy = copy_buffer;
  table.supports = supports;
  table.run_node = run_node;
  qd_backend *own = qd_backend_new(&table, &error);
  CHECK(own != NULL);

  /* The conformance suite: everything that the backend supports must be right. */
  const char *wanted = getenv("QUADRIGA_CASES");
  qd_conformance totals;
  size_t needed = 0, cases = wanted ? (size_t)strtoul(wanted, NULL, 10) : 500;
  char report[65536] = "";
  CHECK(qd_backend_check(own, cases, 1, &totals, report, sizeof report, &needed, &error) == QD_STATUS_OK);
  printf("conformance: %zu passed, %zu not supported, %zu failed\n", totals.passed, totals.unsupported, totals.failed);
  if (totals.failed > 0 || totals.passed == 0) {
    fprintf(stderr, "%s\n", report);
    return EXIT_FAILURE;
  }

  /* Half of this graph runs here, half on the CPU: gelu is not ours. */
  qd_builder *g = qd_builder_new(&error);
  qd_tensor x = qd_input(g, "x", QD_DTYPE_F32, QD_SHAPE(2, 4));
  qd_output(g, "y", qd_add(g, qd_gelu(g, qd_sqr(g, x)), x));
  qd_graph *graph = qd_builder_finish(g, &error);
  CHECK(graph != NULL);
  qd_backend *cpu = qd_backend_cpu(1, &error);
  CHECK(cpu != NULL);
  const qd_backend *backends[] = {own, cpu};
  qd_scheduler *scheduler = qd_scheduler_new(backends, 2, &error);
  CHECK(scheduler != NULL);
  qd_plan *plan = qd_scheduler_plan(scheduler, graph, &error);
  CHECK(plan != NULL);
  CHECK(qd_plan_split_count(plan) == 3);
  CHECK(qd_plan_split_backend(plan, 0) == 0 && qd_plan_split_backend(plan, 1) == 1);
  CHECK(qd_plan_split_backend(plan, 2) == 0 && qd_plan_copy_count(plan) == 2);
  qd_session *session = qd_session_new(plan, &error);
  CHECK(session != NULL);
  const float input[8] = {0, 0.5f, 1, 1.5f, -0.5f, -1, -1.5f, 2};
  float output[8];
  CHECK(qd_session_set(session, "x", input, sizeof input, &error) == QD_STATUS_OK);
  CHECK(qd_session_run(session, &error) == QD_STATUS_OK);
  CHECK(qd_session_read(session, "y", output, sizeof output, NULL, &error) == QD_STATUS_OK);
  for (int i = 0; i < 8; i++) {
    double s = (double)input[i] * (double)input[i];
    double gelu = 0.5 * s * (1 + tanh(0.7978845608 * (s + 0.044715 * s * s * s)));
    CHECK(fabs((double)output[i] - (gelu + (double)input[i])) < 1e-3);
  }
  qd_session_free(session);
  qd_plan_free(plan);
  qd_graph_free(graph);
  qd_builder_free(g);

  /* A model on both: the scheduler gives each node to the first backend that supports it. */
  if (argc > 1) {
    qd_model *model = qd_model_open(argv[1], NULL, &error);
    CHECK(model != NULL);
    qd_engine_params engine = qd_engine_default_params();
    engine.context = 64;
    engine.scheduler = scheduler;
    qd_generator *generator = qd_generator_new(model, &engine, &error);
    CHECK(generator != NULL);
    qd_request_params request = qd_request_default_params();
    request.max_tokens = 4;
    request.temperature = 0;
    request.raw = 1;
    qd_completion completion;
    size_t before = nodes;
    CHECK(qd_generator_generate(generator, "abc", &request, NULL, NULL, &completion, &error) == QD_STATUS_OK);
    printf("%zu tokens, with %zu nodes of the model on %s\n", completion.answer_tokens, nodes - before, table.name);
    CHECK(nodes > before);
    qd_generator_free(generator);
    qd_model_free(model);
  }
  qd_scheduler_free(scheduler);
  qd_backend_free(cpu);
  qd_backend_free(own);
  CHECK(qd_live_handles() == 0);
  return EXIT_SUCCESS;
}
