/* An operation of one's own: a moving average along rows, with a shape rule and code that several threads run. */
#include <quadriga.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#define CHECK(condition)                                                            \
  do {                                                                              \
    if (!(condition)) {                                                             \
      fprintf(stderr, "%s:%d: %s: %s\n", __FILE__, __LINE__, #condition, error.message); \
      exit(EXIT_FAILURE);                                                           \
    }                                                                               \
  } while (0)

struct moving_average {
  size_t window;
};

static qd_status infer(void *context, const qd_tensor_info *inputs, size_t input_count, qd_tensor_info *output,
                       qd_error *error) {
  const struct moving_average *average = context;
  if (input_count != 1 || inputs[0].dtype != QD_DTYPE_F32 || average->window == 0) {
    qd_error_set(error, QD_STATUS_INVALID_ARGUMENT, "one F32 input and a window of at least 1 are needed");
    return QD_STATUS_INVALID_ARGUMENT;
  }
  (void)output; /* it begins as input 0: the same type and shape */
  return QD_STATUS_OK;
}

static qd_status compute(void *context, const qd_custom_call *call, qd_error *error) {
  (void)error;
  const struct moving_average *average = context;
  const qd_custom_input *x = &call->inputs[0];
  size_t columns = x->info.dims[3];
  float *to = call->output_data;
  for (size_t unit = 0; unit < call->unit_count; unit++) {
    const float *row = (const float *)((const char *)x->data + (call->first_unit + unit) * x->info.strides[2]);
    for (size_t end = 1; end <= columns; end++) {
      size_t start = end > average->window ? end - average->window : 0;
      float sum = 0;
      for (size_t i = start; i < end; i++) sum += row[i];
      to[unit * columns + end - 1] = sum / (float)(end - start);
    }
  }
  return QD_STATUS_OK;
}

static void destroy(void *context) { free(context); }

int main(void) {
  qd_error error = {0};
  struct moving_average *average = malloc(sizeof *average);
  average->window = 2;
  qd_custom_table table = qd_custom_default_params();
  table.name = "moving_average";
  table.context = average;
  table.infer = infer;
  table.compute = compute;
  table.destroy = destroy;
  table.attributes = &average->window;
  table.attribute_bytes = sizeof average->window;
  qd_custom_op *op = qd_custom_op_new(&table, &error);
  CHECK(op != NULL);

  qd_builder *g = qd_builder_new(&error);
  qd_tensor x = qd_input(g, "x", QD_DTYPE_F32, QD_SHAPE(2, 4));
  qd_output(g, "y", qd_relu(g, qd_custom(g, op, &x, 1)));
  qd_graph *graph = qd_builder_finish(g, &error);
  CHECK(graph != NULL);

  /* The rule refuses integers, and the builder says so. */
  qd_builder *wrong = qd_builder_new(&error);
  qd_tensor ids = qd_input(wrong, "ids", QD_DTYPE_I32, QD_SHAPE(4));
  qd_output(wrong, "y", qd_custom(wrong, op, &ids, 1));
  CHECK(qd_builder_finish(wrong, &error) == NULL && error.code == QD_STATUS_GRAPH);
  printf("%s\n", error.message);

  qd_backend *cpu = qd_backend_open("cpu", &error);
  const qd_backend *backends[] = {cpu};
  qd_scheduler *scheduler = qd_scheduler_new(backends, 1, &error);
  qd_session *session = qd_session_empty(scheduler, &error);
  CHECK(session != NULL);
  CHECK(qd_session_use_graph(session, graph, &error) == QD_STATUS_OK);
  const float input[8] = {1, 3, 5, 7, -1, 1, 2, 3};
  const float expected[8] = {1, 2, 4, 6, 0, 0, 1.5f, 2.5f};
  float output[8];
  CHECK(qd_session_set(session, "x", input, sizeof input, &error) == QD_STATUS_OK);
  CHECK(qd_session_run(session, &error) == QD_STATUS_OK);
  CHECK(qd_session_read(session, "y", output, sizeof output, NULL, &error) == QD_STATUS_OK);
  for (int i = 0; i < 8; i++) {
    printf("%g ", (double)output[i]);
    CHECK(fabsf(output[i] - expected[i]) < 1e-6f);
  }
  printf("\n");

  qd_custom_op_free(op); /* the graph keeps it */
  CHECK(qd_session_run(session, &error) == QD_STATUS_OK);
  qd_session_free(session);
  qd_scheduler_free(scheduler);
  qd_backend_free(cpu);
  qd_graph_free(graph);
  qd_builder_free(g);
  qd_builder_free(wrong);
  CHECK(qd_live_handles() == 0);
  return EXIT_SUCCESS;
}
