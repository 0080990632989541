/* A graph of one's own: built, planned, run, observed; a state that lives on between runs, and its bytes saved and restored. */
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

static int32_t count_results(void *user_data, const qd_observed *observed) {
  int *count = user_data;
  *count += 1;
  printf("  %s (%s): %zu bytes on backend %zu\n", observed->name, observed->operation, observed->bytes, observed->backend);
  return 0;
}

int main(void) {
  qd_error error = {0};
  float weights[3 * 4];
  for (int i = 0; i < 12; i++) weights[i] = (float)i / 10;

  qd_builder *g = qd_builder_new(&error);
  qd_tensor x = qd_input(g, "x", QD_DTYPE_F32, QD_SHAPE(2, 4));
  qd_tensor w = qd_weight(g, "w", QD_DTYPE_F32, QD_SHAPE(3, 4), weights, sizeof weights);
  qd_tensor total = qd_state(g, "total", QD_DTYPE_F32, QD_SHAPE(2, 3));
  qd_tensor y = qd_silu(g, qd_set_name(g, qd_mul_mat(g, w, x), "product"));
  qd_output(g, "y", y);
  qd_output(g, "total", qd_copy_into(g, qd_add(g, total, y), total));
  qd_graph *graph = qd_builder_finish(g, &error);
  qd_builder_free(g);
  CHECK(graph != NULL);

  qd_backend *cpu = qd_backend_cpu(2, &error);
  CHECK(cpu != NULL);
  const qd_backend *backends[] = {cpu};
  qd_scheduler *scheduler = qd_scheduler_new(backends, 1, &error);
  CHECK(scheduler != NULL);
  qd_plan *plan = qd_scheduler_plan(scheduler, graph, &error);
  CHECK(plan != NULL);
  qd_plan_bytes bytes;
  CHECK(qd_plan_memory(plan, 0, &bytes, &error) == QD_STATUS_OK);
  size_t needed;
  CHECK(qd_plan_write(plan, QD_PLAN_TEXT, NULL, NULL, 0, &needed, &error) == QD_STATUS_BUFFER_TOO_SMALL);
  char *text = malloc(needed);
  CHECK(qd_plan_write(plan, QD_PLAN_TEXT, NULL, text, needed, NULL, &error) == QD_STATUS_OK);
  printf("%s\n%llu bytes of weights, %llu to compute\n", text, (unsigned long long)bytes.weights,
         (unsigned long long)bytes.compute);
  free(text);

  qd_session *session = qd_session_new(plan, &error);
  CHECK(session != NULL);
  float input[8], output[6], expected[6], state[6];
  for (int i = 0; i < 8; i++) input[i] = (float)(i - 3) / 2;
  for (int row = 0; row < 2; row++)
    for (int column = 0; column < 3; column++) {
      float sum = 0;
      for (int k = 0; k < 4; k++) sum += input[4 * row + k] * weights[4 * column + k];
      expected[3 * row + column] = sum / (1 + expf(-sum));
    }
  CHECK(qd_session_set(session, "x", input, sizeof input, &error) == QD_STATUS_OK);
  CHECK(qd_session_run(session, &error) == QD_STATUS_OK);
  CHECK(qd_session_read(session, "y", output, sizeof output, NULL, &error) == QD_STATUS_OK);
  for (int i = 0; i < 6; i++) CHECK(fabsf(output[i] - expected[i]) < 1e-5f);

  /* The state has the sum of two runs; its bytes can be saved and restored. */
  CHECK(qd_session_save(session, NULL, 0, &needed, &error) == QD_STATUS_BUFFER_TOO_SMALL);
  uint8_t *saved = malloc(needed);
  CHECK(qd_session_save(session, saved, needed, NULL, &error) == QD_STATUS_OK);
  int results = 0;
  CHECK(qd_session_observe(session, NULL, count_results, &results, &error) == QD_STATUS_OK);
  CHECK(results > 2);
  CHECK(qd_session_read_state(session, "total", 0, state, sizeof state, &error) == QD_STATUS_OK);
  for (int i = 0; i < 6; i++) CHECK(fabsf(state[i] - 2 * expected[i]) < 1e-4f);
  CHECK(qd_session_restore(session, saved, needed, &error) == QD_STATUS_OK);
  CHECK(qd_session_read_state(session, "total", 0, state, sizeof state, &error) == QD_STATUS_OK);
  for (int i = 0; i < 6; i++) CHECK(fabsf(state[i] - expected[i]) < 1e-4f);
  free(saved);

  /* Errors name what is wrong. */
  CHECK(qd_session_set(session, "z", input, sizeof input, &error) == QD_STATUS_NOT_FOUND);
  printf("%s\n", error.message);

  qd_backend_free(cpu);
  qd_scheduler_free(scheduler);
  qd_graph_free(graph);
  qd_plan_free(plan);
  CHECK(qd_session_run(session, &error) == QD_STATUS_OK); /* the session keeps what it needs */
  qd_session_free(session);
  CHECK(qd_live_handles() == 0);
  return EXIT_SUCCESS;
}
