/* Every operation of the builder once, with numbers small enough to check by hand: a wrapper that passes an argument in the
 * wrong place computes something else. */
#include <quadriga.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static qd_error error;
static qd_backend *cpu;
static qd_builder *g;
static int leaves, checked;

#define CHECK(condition)                                                            \
  do {                                                                              \
    if (!(condition)) {                                                             \
      fprintf(stderr, "%s:%d: %s: %s\n", __FILE__, __LINE__, #condition, error.message); \
      exit(EXIT_FAILURE);                                                           \
    }                                                                               \
  } while (0)

/* A constant of the graph that is being built. */
static qd_tensor numbers(const size_t *dims, size_t rank, const float *values) {
  char name[16];
  size_t count = 1;
  for (size_t i = 0; i < rank; i++) count *= dims[i];
  snprintf(name, sizeof name, "c%d", leaves++);
  return qd_constant(g, name, QD_DTYPE_F32, dims, rank, values, count * sizeof *values);
}
static qd_tensor indices(const size_t *dims, size_t rank, const int32_t *values) {
  char name[16];
  size_t count = 1;
  for (size_t i = 0; i < rank; i++) count *= dims[i];
  snprintf(name, sizeof name, "c%d", leaves++);
  return qd_constant(g, name, QD_DTYPE_I32, dims, rank, values, count * sizeof *values);
}
#define F(...) (const float[]){__VA_ARGS__}
#define I(...) (const int32_t[]){__VA_ARGS__}
#define D(...) QD_SHAPE(__VA_ARGS__)

/* Finishes the graph with this result, computes it, and compares its elements, as numbers, with those that are expected. */
static void expect(int line, qd_tensor y, const size_t *dims, size_t rank, const float *expected) {
  qd_tensor_info info;
  memset(&error, 0, sizeof error);
  qd_output(g, "y", y);
  qd_graph *graph = qd_builder_finish(g, &error);
  if (graph == NULL) {
    fprintf(stderr, "line %d: %s\n", line, error.message);
    exit(EXIT_FAILURE);
  }
  const qd_backend *all[] = {cpu};
  qd_scheduler *scheduler = qd_scheduler_new(all, 1, &error);
  qd_plan *plan = qd_scheduler_plan(scheduler, graph, &error);
  CHECK(plan != NULL);
  qd_session *session = qd_session_new(plan, &error);
  CHECK(session != NULL);
  CHECK(qd_session_run(session, &error) == QD_STATUS_OK);
  CHECK(qd_session_output(session, "y", &info, &error) == QD_STATUS_OK);
  size_t count = 1;
  int same = info.rank == rank;
  for (size_t i = 0; i < rank; i++) count *= dims[i], same = same && info.dims[QD_MAX_DIMS - rank + i] == dims[i];
  float found[64] = {0};
  if (info.dtype == QD_DTYPE_I32) {
    int32_t whole[64];
    CHECK(qd_session_read(session, "y", whole, sizeof whole, NULL, &error) == QD_STATUS_OK);
    for (size_t i = 0; i < count; i++) found[i] = (float)whole[i];
  } else {
    CHECK(qd_session_read_f32(session, "y", found, 64, NULL, &error) == QD_STATUS_OK);
  }
  for (size_t i = 0; i < count; i++)
    same = same && (found[i] == expected[i] || fabsf(found[i] - expected[i]) <= 2e-3f * (1 + fabsf(expected[i])));
  if (!same) {
    fprintf(stderr, "line %d: shape of rank %zu", line, (size_t)info.rank);
    for (size_t i = 0; i < QD_MAX_DIMS; i++) fprintf(stderr, " %zu", info.dims[i]);
    for (size_t i = 0; i < count; i++) fprintf(stderr, "%s%g (%g)", i ? ", " : ": ", found[i], expected[i]);
    fprintf(stderr, "\n");
    exit(EXIT_FAILURE);
  }
  qd_session_free(session);
  qd_plan_free(plan);
  qd_scheduler_free(scheduler);
  qd_graph_free(graph);
  qd_builder_free(g);
  g = qd_builder_new(&error);
  checked++;
}
#define EXPECT(y, ...) expect(__LINE__, y, __VA_ARGS__)

static void elementwise(void) {
  EXPECT(qd_add(g, numbers(D(2), F(1, 2)), numbers(D(2), F(10, 20))), D(2), F(11, 22));
  EXPECT(qd_sub(g, numbers(D(2), F(1, 2)), numbers(D(2), F(10, 20))), D(2), F(-9, -18));
  EXPECT(qd_mul(g, numbers(D(2), F(3, 2)), numbers(D(2), F(10, 20))), D(2), F(30, 40));
  EXPECT(qd_div(g, numbers(D(2), F(3, 2)), numbers(D(2), F(10, 20))), D(2), F(0.3f, 0.1f));
  EXPECT(qd_add1(g, numbers(D(2), F(3, 2)), numbers(D(1), F(5))), D(2), F(8, 7));
  EXPECT(qd_scale(g, numbers(D(2), F(3, 2)), 4), D(2), F(12, 8));
  EXPECT(qd_scale_bias(g, numbers(D(2), F(3, 2)), 4, 1), D(2), F(13, 9));
  EXPECT(qd_clamp(g, numbers(D(3), F(-3, 2, 9)), -1, 4), D(3), F(-1, 2, 4));
  EXPECT(qd_tanh(g, numbers(D(2), F(0, 1))), D(2), F(0, 0.76159f));
  EXPECT(qd_sqr(g, numbers(D(2), F(-3, 2))), D(2), F(9, 4));
  const float of_two[] = {4,      1.41421f, 0.693147f, 7.38906f, 0.909297f, -0.416147f, 2,       -2,       1, 1, 2,
                          1.9546f, 1.9545f,  1.9357f,   1.76159f, 0.880797f, 0.964028f,  2,       1.66667f, 0.83333f, 2.12693f};
  for (int32_t function = QD_UNARY_SQR; function <= QD_UNARY_SOFTPLUS; function++)
    EXPECT(qd_unary(g, numbers(D(1), F(2)), function), D(1), &of_two[function]);
  const float of_minus_one[] = {-0.158808f, -0.158655f, -0.154198f, -0.268941f, 0.268941f, -0.761594f, -0.632121f};
  for (int32_t function = QD_UNARY_GELU; function <= QD_UNARY_ELU; function++)
    EXPECT(qd_unary(g, numbers(D(1), F(-1)), function), D(1), &of_minus_one[function - QD_UNARY_GELU]);
  EXPECT(qd_gated(g, numbers(D(1), F(2)), numbers(D(1), F(10)), QD_GATE_SWIGLU), D(1), F(17.6159f));
  EXPECT(qd_gated(g, numbers(D(1), F(2)), numbers(D(1), F(10)), QD_GATE_GEGLU), D(1), F(19.546f));
  EXPECT(qd_gated(g, numbers(D(2), F(2, -2)), numbers(D(2), F(10, 10)), QD_GATE_REGLU), D(2), F(20, 0));
  EXPECT(qd_gated_halves(g, numbers(D(4), F(2, -2, 10, 20)), QD_GATE_REGLU, 0), D(2), F(20, 0));
  EXPECT(qd_gated_halves(g, numbers(D(4), F(10, 20, 2, -2)), QD_GATE_REGLU, 1), D(2), F(20, 0));
}

static void rows(void) {
  EXPECT(qd_norm(g, numbers(D(1, 4), F(1, 1, 3, 3)), 0), D(1, 4), F(-1, -1, 1, 1));
  EXPECT(qd_rms_norm(g, numbers(D(1, 2), F(1, 7)), 0), D(1, 2), F(0.2f, 1.4f));
  EXPECT(qd_l2_norm(g, numbers(D(1, 2), F(3, 4)), 0), D(1, 2), F(0.6f, 0.8f));
  EXPECT(qd_group_norm(g, numbers(D(1, 4, 1, 1), F(1, 3, 10, 30)), 2, 0), D(1, 4, 1, 1), F(-1, 1, -1, 1));
  EXPECT(qd_sum(g, numbers(D(2, 2), F(1, 2, 3, 4))), D(1), F(10));
  EXPECT(qd_sum_rows(g, numbers(D(2, 2), F(1, 2, 3, 4))), D(2, 1), F(3, 7));
  EXPECT(qd_mean(g, numbers(D(2, 2), F(1, 2, 3, 4))), D(2, 1), F(1.5f, 3.5f));
  EXPECT(qd_argmax(g, numbers(D(2, 3), F(1, 9, 3, 4, 0, 2))), D(2), F(1, 0));
  EXPECT(qd_argsort(g, numbers(D(1, 3), F(1, 9, 3)), 0), D(1, 3), F(0, 2, 1));
  EXPECT(qd_argsort(g, numbers(D(1, 3), F(1, 9, 3)), 1), D(1, 3), F(1, 2, 0));
  EXPECT(qd_top_k(g, numbers(D(1, 3), F(1, 9, 3)), 2), D(1, 2), F(1, 2));
  EXPECT(qd_cross_entropy_loss(g, numbers(D(1, 2), F(0, 0)), numbers(D(1, 2), F(0.5f, 0.5f))), D(1), F(0.693147f));
  EXPECT(qd_arange(g, 1, 8, 3), D(3), F(1, 4, 7));
  EXPECT(qd_soft_max(g, numbers(D(1, 2), F(0, 1.098612f)), 1, QD_NO_TENSOR, QD_NO_TENSOR), D(1, 2), F(0.25f, 0.75f));
  EXPECT(qd_soft_max(g, numbers(D(1, 2), F(0, 1)), 1.098612f, numbers(D(1, 2), F(0, -INFINITY)), QD_NO_TENSOR), D(1, 2), F(1, 0));
  EXPECT(qd_soft_max(g, numbers(D(1, 1, 1, 1), F(0)), 1, QD_NO_TENSOR, numbers(D(1), F(1.098612f))), D(1, 1, 1, 1), F(0.25f));
  EXPECT(qd_diag_mask_zero(g, numbers(D(2, 3), F(1, 2, 3, 4, 5, 6)), 1), D(2, 3), F(1, 2, 0, 4, 5, 6));
  EXPECT(qd_diag_mask_inf(g, numbers(D(2, 2), F(1, 2, 3, 4)), 0), D(2, 2), F(1, -INFINITY, 3, 4));
}

static void matrices(void) {
  EXPECT(qd_mul_mat(g, numbers(D(2, 3), F(1, 0, 0, 0, 1, 1)), numbers(D(1, 3), F(5, 6, 7))), D(1, 2), F(5, 13));
  /* Two experts, [2, 1, 2]; the second token uses the second one first. */
  EXPECT(qd_mul_mat_id(g, numbers(D(2, 1, 2), F(1, 0, 0, 1)), numbers(D(2, 1, 2), F(5, 6, 7, 8)), indices(D(2, 2), I(0, 1, 1, 0))),
         D(2, 2, 1), F(5, 6, 8, 7));
  EXPECT(qd_mul_mat_sparse(g, numbers(D(2, 2), F(1, 0, 0, 1)), numbers(D(1, 2), F(5, 6)), numbers(D(1, 2), F(2, 0)), QD_NO_TENSOR),
         D(1, 2), F(10, 0));
  EXPECT(qd_axpy_sparse(g, numbers(D(2, 3), F(1, 2, 3, 10, 20, 30)), numbers(D(1, 2), F(2, 1))), D(1, 3), F(12, 24, 36));
  EXPECT(qd_out_prod(g, numbers(D(1, 2), F(1, 2)), numbers(D(1, 3), F(1, 10, 100))), D(3, 2), F(1, 2, 10, 20, 100, 200));
  EXPECT(qd_get_rows(g, numbers(D(3, 2), F(1, 2, 3, 4, 5, 6)), indices(D(2), I(2, 0))), D(2, 2), F(5, 6, 1, 2));
  qd_tensor table = qd_state(g, "table", QD_DTYPE_F32, D(3, 2));
  EXPECT(qd_set_rows(g, table, numbers(D(1, 2), F(8, 9)), indices(D(1), I(1))), D(3, 2), F(0, 0, 8, 9, 0, 0));
  EXPECT(qd_select_experts(g, numbers(D(1, 4), F(1, 4, 3, 2)), 2, 1, 1), D(1, 2), F(1, 2));
  EXPECT(qd_select_experts(g, numbers(D(1, 4), F(4, 4, 7, 0)), 1, 2, 1), D(1, 1), F(0));
  EXPECT(qd_select_experts_by_largest(g, numbers(D(1, 4), F(4, 4, 7, 0)), 1, 2, 1), D(1, 1), F(2));
  EXPECT(qd_expert_weights(g, numbers(D(1, 3), F(0.2f, 0.3f, 0.5f)), indices(D(1, 2), I(2, 1)), 0, 1, 4), D(1, 2), F(2.5f, 1.5f));
  EXPECT(qd_expert_weights(g, numbers(D(1, 3), F(0, 0, 1.098612f)), indices(D(1, 2), I(2, 1)), 1, 0, 4), D(1, 2), F(3, 1));
  EXPECT(qd_add_id(g, numbers(D(1, 2, 1), F(1, 2)), numbers(D(2, 1), F(10, 20)), indices(D(1, 2), I(1, 0))), D(1, 2, 1), F(21, 12));
  EXPECT(qd_sum_experts(g, numbers(D(1, 2, 2), F(1, 2, 3, 4)), numbers(D(1, 2), F(10, 1))), D(1, 2), F(13, 24));
  EXPECT(qd_ssm_conv(g, numbers(D(3, 1), F(1, 2, 3)), numbers(D(1, 2), F(10, 1))), D(2, 1), F(12, 23));
  qd_attention_params params = qd_attention_default_params();
  qd_tensor q = numbers(D(1, 1, 1, 1), F(1)), k = numbers(D(1, 1, 2, 1), F(0, 1.098612f)), v = numbers(D(1, 1, 2, 2), F(4, 0, 8, 4));
  EXPECT(qd_attention(g, q, k, v, &params), D(1, 1, 1, 2), F(7, 3));
  q = numbers(D(1, 1, 1, 1), F(1)), k = numbers(D(1, 1, 2, 1), F(0, 1.098612f)), v = numbers(D(1, 1, 2, 2), F(4, 0, 8, 4));
  params.mask = numbers(D(1, 1, 1, 2), F(0, -INFINITY));
  EXPECT(qd_attention(g, q, k, v, &params), D(1, 1, 1, 2), F(4, 0));
}

static void shapes(void) {
  const float six[] = {1, 2, 3, 4, 5, 6};
  EXPECT(qd_cast(g, qd_cast(g, numbers(D(2), F(1.5f, 2)), QD_DTYPE_F16), QD_DTYPE_F32), D(2), F(1.5f, 2));
  EXPECT(qd_cont(g, qd_transpose(g, numbers(D(2, 3), six))), D(3, 2), F(1, 4, 2, 5, 3, 6));
  EXPECT(qd_cont(g, qd_permute(g, numbers(D(1, 2, 3), six), (const size_t[]){2, 0, 1}, 3)), D(3, 1, 2), F(1, 4, 2, 5, 3, 6));
  EXPECT(qd_reshape(g, numbers(D(2, 3), six), D(3, 2)), D(3, 2), six);
  EXPECT(qd_cont(g, qd_slice(g, numbers(D(2, 3), six), 1, 1, 2)), D(2, 2), F(2, 3, 5, 6));
  /* Every second element of the second row. */
  EXPECT(qd_cont(g, qd_view(g, numbers(D(2, 3), six), D(2), (const size_t[]){0, 0, 0, 8}, 12)), D(2), F(4, 6));
  qd_tensor both[] = {numbers(D(1, 2), F(1, 2)), numbers(D(1, 2), F(3, 4))};
  EXPECT(qd_concat(g, both, 2, 0), D(2, 2), F(1, 2, 3, 4));
  both[0] = numbers(D(1, 2), F(1, 2)), both[1] = numbers(D(1, 1), F(3));
  EXPECT(qd_concat(g, both, 2, 1), D(1, 3), F(1, 2, 3));
  EXPECT(qd_repeat(g, numbers(D(1, 2), F(1, 2)), D(2, 4)), D(2, 4), F(1, 2, 1, 2, 1, 2, 1, 2));
  EXPECT(qd_pad(g, numbers(D(1, 2), F(1, 2)), (const size_t[]){1, 2}, 2), D(2, 4), F(1, 2, 0, 0, 0, 0, 0, 0));
  EXPECT(qd_upscale(g, numbers(D(1, 2), F(1, 2)), D(2, 4), 0), D(2, 4), F(1, 1, 2, 2, 1, 1, 2, 2));
  qd_tensor total = qd_state(g, "total", QD_DTYPE_F32, D(2));
  EXPECT(qd_copy_into(g, numbers(D(2), F(5, 6)), total), D(2), F(5, 6));
  qd_rope_params rope = qd_rope_default_params();
  rope.dims = 2;
  /* A quarter turn is π/2, which is no whole position: one radian. */
  EXPECT(qd_rope(g, numbers(D(1, 1, 2), F(1, 0)), indices(D(1), I(1)), QD_NO_TENSOR, &rope), D(1, 1, 2), F(0.540302f, 0.841471f));
}

static void windows(void) {
  const float nine[] = {1, 2, 3, 4, 5, 6, 7, 8, 9};
  qd_window two = qd_window_default_params(2, 2), wide = qd_window_default_params(1, 2), tall = qd_window_default_params(2, 1);
  EXPECT(qd_im2col(g, numbers(D(1, 1, 2, 3), nine), &two, QD_DTYPE_F32), D(1, 1, 2, 4), F(1, 2, 4, 5, 2, 3, 5, 6));
  EXPECT(qd_conv_1d(g, numbers(D(1, 1, 3), nine), numbers(D(1, 1, 2), F(10, 1)), &wide), D(1, 1, 2), F(12, 23));
  EXPECT(qd_conv_2d(g, numbers(D(1, 1, 3, 3), nine), numbers(D(1, 1, 2, 1), F(10, 1)), &tall), D(1, 1, 2, 3), F(14, 25, 36, 47, 58, 69));
  EXPECT(qd_conv_2d_depthwise(g, numbers(D(1, 2, 1, 2), nine), numbers(D(2, 1, 1, 2), F(10, 1, 1, 0)), &wide), D(1, 2, 1, 1), F(12, 3));
  EXPECT(qd_conv_transpose_1d(g, numbers(D(1, 1, 2), nine), numbers(D(1, 1, 2), F(10, 1)), 2), D(1, 1, 4), F(10, 1, 20, 2));
  EXPECT(qd_conv_transpose_2d(g, numbers(D(1, 1, 2, 1), nine), numbers(D(1, 1, 1, 1), F(10)), 2, 1), D(1, 1, 3, 1), F(10, 0, 20));
  qd_window step = wide;
  step.stride[1] = 2;
  EXPECT(qd_pool_1d(g, numbers(D(1, 4), nine), QD_POOL_MAX, &step), D(1, 2), F(2, 4));
  EXPECT(qd_pool_2d(g, numbers(D(1, 1, 2, 3), nine), QD_POOL_AVERAGE, &two), D(1, 1, 1, 2), F(3, 4));
}

/* The gated delta rule with one head and one value: the state is a number s, and after each token s = g·s + β·k·(v − k·g·s). */
static void recurrence(void) {
  qd_delta_rule rule;
  memset(&rule, 0, sizeof rule);
  CHECK(qd_gated_delta_rule(g, NULL, NULL) == QD_NO_TENSOR);
  qd_builder_free(g);
  g = qd_builder_new(&error);
  rule.queries = numbers(D(2, 1, 1), F(1, 1));
  rule.keys = numbers(D(2, 1, 1), F(1, 1));
  rule.values = numbers(D(2, 1, 1), F(4, 8));
  rule.gates = numbers(D(2, 1), F(0, 0));
  rule.betas = numbers(D(2, 1), F(0.5f, 0.5f));
  rule.scale = 1;
  rule.delta = 1;
  rule.state = qd_state(g, "state", QD_DTYPE_F32, D(1, 1, 1));
  qd_tensor after = QD_NO_TENSOR;
  qd_tensor y = qd_gated_delta_rule(g, &rule, &after);
  CHECK(after != QD_NO_TENSOR && after != y);
  EXPECT(y, D(2, 1, 1), F(2, 5));
}

int main(void) {
  cpu = qd_backend_cpu(1, &error);
  g = qd_builder_new(&error);
  CHECK(cpu != NULL && g != NULL);
  elementwise();
  rows();
  matrices();
  shapes();
  windows();
  recurrence();
  qd_builder_free(g);
  qd_backend_free(cpu);
  CHECK(qd_live_handles() == 0);
  printf("%d results are right\n", checked);
  return EXIT_SUCCESS;
}
