/* Callbacks that fail, that stop, or that call what waits for them; and limits that the caller's own tables state.
 *
 *   callbacks MODEL
 */
#define _POSIX_C_SOURCE 200809L
#include <pthread.h>
#include <quadriga.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

static qd_error error;

#define CHECK(condition)                                                            \
  do {                                                                              \
    if (!(condition)) {                                                             \
      fprintf(stderr, "%s:%d: %s: %s\n", __FILE__, __LINE__, #condition, error.message); \
      exit(EXIT_FAILURE);                                                           \
    }                                                                               \
  } while (0)

struct nested {
  qd_service *service;
  qd_request *other;
  qd_status generate, next;
  int submitted;
};

/* Waits for its own service, which waits for this. */
static int32_t ask_again(void *user_data, const uint32_t *tokens, size_t count, float *logits, size_t logit_count) {
  (void)tokens, (void)count, (void)logits, (void)logit_count;
  struct nested *nested = user_data;
  const qd_message message = {"user", "abc"};
  qd_request_params params = qd_request_default_params();
  params.max_tokens = 1;
  nested->generate = qd_service_generate(nested->service, "abc", &params, NULL, NULL, NULL, NULL);
  nested->next = qd_request_next(nested->other, NULL, NULL, NULL);
  nested->submitted = qd_service_submit(nested->service, &message, 1, &params, NULL) != NULL;
  return 0;
}
static int32_t fail(void *user_data, const uint32_t *tokens, size_t count, float *logits, size_t logit_count) {
  (void)user_data, (void)tokens, (void)count, (void)logits, (void)logit_count;
  return 7;
}
static int32_t stop_third(void *user_data, const qd_piece *piece) {
  (void)piece;
  return ++*(int *)user_data == 3;
}

static void services(const char *path) {
  qd_model *model = qd_model_open(path, NULL, &error);
  CHECK(model != NULL);
  qd_engine_params engine = qd_engine_default_params();
  engine.context = 256;
  engine.sequences = 2;
  qd_service *service = qd_service_new(model, &engine, &error);
  CHECK(service != NULL);
  const qd_message message = {"user", "abc"};
  qd_request_params params = qd_request_default_params();
  params.ignore_eos = 1;
  params.max_tokens = 2;
  qd_completion completion;

  struct nested nested = {service, qd_service_submit(service, &message, 1, &params, &error), 0, 0, 0};
  CHECK(nested.other != NULL);
  params.logits_callback = ask_again;
  params.logits_data = &nested;
  CHECK(qd_service_generate(service, "abc", &params, NULL, NULL, &completion, &error) == QD_STATUS_OK);
  CHECK(nested.generate == QD_STATUS_BUSY && nested.next == QD_STATUS_BUSY && nested.submitted == 0);
  CHECK(completion.answer_tokens == 2);
  qd_request_free(nested.other);

  params.logits_callback = fail;
  CHECK(qd_service_generate(service, "abc", &params, NULL, NULL, NULL, &error) == QD_STATUS_CALLBACK);
  CHECK(strstr(error.message, "7") != NULL);
  qd_request *request = qd_service_submit(service, &message, 1, &params, &error);
  CHECK(request != NULL && qd_request_next(request, NULL, NULL, &error) == QD_STATUS_CALLBACK);
  qd_request_free(request);
  params.logits_callback = NULL;

  int pieces = 0;
  params.max_tokens = 20;
  CHECK(qd_service_generate(service, "abc", &params, stop_third, &pieces, &completion, &error) == QD_STATUS_OK);
  CHECK(completion.finish == QD_FINISH_CANCELLED && completion.answer_tokens == 3);
  CHECK(completion.prompt_tokens > 0 && completion.prompt_seconds > 0);

  params.top_p = -3;
  CHECK(qd_service_generate(service, "abc", &params, NULL, NULL, NULL, &error) == QD_STATUS_INVALID_ARGUMENT);
  CHECK(strstr(error.message, "-3") != NULL);
  qd_generator *generator = qd_generator_new(model, &engine, &error);
  CHECK(generator != NULL);
  CHECK(qd_generator_generate(generator, "abc", &params, NULL, NULL, NULL, &error) == QD_STATUS_INVALID_ARGUMENT);
  params.top_p = 1;
  params.logits_callback = fail;
  CHECK(qd_generator_generate(generator, "abc", &params, NULL, NULL, NULL, &error) == QD_STATUS_CALLBACK);
  qd_generator_free(generator), qd_service_free(service), qd_model_free(model);
}

/* A request that its own callback frees, as the last user of the service. */
struct freeing {
  pthread_mutex_t lock;
  pthread_cond_t changed;
  qd_request *request;
  int is_freed;
  long reported;
};
static int32_t free_own(void *user_data, const uint32_t *tokens, size_t count, float *logits, size_t logit_count) {
  (void)tokens, (void)count, (void)logits, (void)logit_count;
  struct freeing *freeing = user_data;
  pthread_mutex_lock(&freeing->lock);
  while (freeing->request == NULL) pthread_cond_wait(&freeing->changed, &freeing->lock);
  if (!freeing->is_freed) {
    /* What goes wrong within a function that frees is only reported there. */
    FILE *reports = tmpfile();
    int before = dup(STDERR_FILENO);
    dup2(fileno(reports), STDERR_FILENO);
    qd_request_free(freeing->request);
    dup2(before, STDERR_FILENO);
    close(before);
    struct stat written;
    freeing->reported = fstat(fileno(reports), &written) == 0 ? (long)written.st_size : -1;
    fclose(reports);
    freeing->is_freed = 1;
    pthread_cond_broadcast(&freeing->changed);
  }
  pthread_mutex_unlock(&freeing->lock);
  return 0;
}
static void last_users(const char *path) {
  static struct freeing freeing = {PTHREAD_MUTEX_INITIALIZER, PTHREAD_COND_INITIALIZER, NULL, 0, 0};
  qd_model *model = qd_model_open(path, NULL, &error);
  CHECK(model != NULL);
  qd_engine_params engine = qd_engine_default_params();
  engine.context = 256;
  qd_service *service = qd_service_new(model, &engine, &error);
  CHECK(service != NULL);
  const qd_message message = {"user", "abc"};
  qd_request_params params = qd_request_default_params();
  params.ignore_eos = 1;
  params.max_tokens = 5;
  params.logits_callback = free_own;
  params.logits_data = &freeing;
  qd_request *request = qd_service_submit(service, &message, 1, &params, &error);
  CHECK(request != NULL);
  qd_service_free(service);
  qd_model_free(model);
  pthread_mutex_lock(&freeing.lock);
  freeing.request = request;
  pthread_cond_broadcast(&freeing.changed);
  while (!freeing.is_freed) pthread_cond_wait(&freeing.changed, &freeing.lock);
  pthread_mutex_unlock(&freeing.lock);
  CHECK(freeing.reported == 0);
}

/* In a child, the handles of its parent are errors, and new ones are not. */
static int in_child(qd_generator *generator, qd_model *model, const char *path) {
  qd_request_params params = qd_request_default_params();
  params.max_tokens = 2;
  if (qd_generator_generate(generator, "abc", &params, NULL, NULL, NULL, &error) != QD_STATUS_INVALID_HANDLE) return 1;
  if (strstr(error.message, "fork") == NULL) return 2;
  qd_generator_free(generator);
  qd_model_free(model);
  qd_model *own = qd_model_open(path, NULL, &error);
  if (own == NULL) return 3;
  qd_engine_params engine = qd_engine_default_params();
  engine.context = 256;
  qd_generator *new = qd_generator_new(own, &engine, &error);
  if (new == NULL) return 4;
  if (qd_generator_generate(new, "abc", &params, NULL, NULL, NULL, &error) != QD_STATUS_OK) return 5;
  qd_generator_free(new);
  qd_model_free(own);
  return 0;
}
static void forks(const char *path) {
  qd_model *model = qd_model_open(path, NULL, &error);
  CHECK(model != NULL);
  qd_engine_params engine = qd_engine_default_params();
  engine.context = 256;
  qd_generator *generator = qd_generator_new(model, &engine, &error);
  CHECK(generator != NULL);
  qd_request_params params = qd_request_default_params();
  params.max_tokens = 2;
  CHECK(qd_generator_generate(generator, "abc", &params, NULL, NULL, NULL, &error) == QD_STATUS_OK);
  int ends[2];
  CHECK(pipe(ends) == 0);
  pid_t child = fork();
  CHECK(child >= 0);
  if (child == 0) {
    /* A wait without end is an error of the test. */
    alarm(100);
    char result = (char)in_child(generator, model, path);
    if (write(ends[1], &result, 1) != 1) abort();
    /* What its parent's threads had is no leak of the child. */
    kill(getpid(), SIGKILL);
  }
  close(ends[1]);
  char result = 99;
  CHECK(read(ends[0], &result, 1) == 1);
  if (result != 0) fprintf(stderr, "the child found error %d\n", result);
  CHECK(result == 0);
  close(ends[0]);
  CHECK(waitpid(child, NULL, 0) == child);
  CHECK(qd_generator_generate(generator, "abc", &params, NULL, NULL, NULL, &error) == QD_STATUS_OK);
  qd_generator_free(generator);
  qd_model_free(model);
}

static qd_status same(void *context, const qd_tensor_info *inputs, size_t count, qd_tensor_info *output, qd_error *to) {
  (void)context, (void)inputs, (void)count, (void)output, (void)to;
  return QD_STATUS_OK;
}
static qd_status refuse(void *context, const qd_custom_call *call, qd_error *to) {
  (void)context, (void)call;
  qd_error_set(to, QD_STATUS_FAILED, "not today");
  return QD_STATUS_FAILED;
}

static void operations(void) {
  qd_custom_table table = qd_custom_default_params();
  table.name = "refusing";
  table.infer = same;
  table.compute = refuse;
  table.in_place = 100;
  CHECK(qd_custom_op_new(&table, &error) == NULL && error.code == QD_STATUS_INVALID_ARGUMENT);
  CHECK(strstr(error.message, "100") != NULL);
  table.in_place = -2;
  CHECK(qd_custom_op_new(&table, &error) == NULL && error.code == QD_STATUS_INVALID_ARGUMENT);
  table.in_place = -1;
  qd_custom_op *op = qd_custom_op_new(&table, &error);
  CHECK(op != NULL);
  qd_builder *g = qd_builder_new(&error);
  qd_tensor x = qd_input(g, "x", QD_DTYPE_F32, QD_SHAPE(4));
  qd_output(g, "y", qd_custom(g, op, &x, 1));
  qd_graph *graph = qd_builder_finish(g, &error);
  CHECK(graph != NULL);
  qd_builder_free(g), qd_custom_op_free(op);
  qd_backend *cpu = qd_backend_cpu(1, &error);
  const qd_backend *all[] = {cpu};
  qd_scheduler *scheduler = qd_scheduler_new(all, 1, &error);
  qd_plan *plan = qd_scheduler_plan(scheduler, graph, &error);
  qd_session *session = qd_session_new(plan, &error);
  CHECK(session != NULL);
  CHECK(qd_session_set_f32(session, "x", (const float[4]){1, 2, 3, 4}, 4, &error) == QD_STATUS_OK);
  CHECK(qd_session_run(session, &error) == QD_STATUS_CALLBACK && strstr(error.message, "not today") != NULL);
  qd_session_free(session), qd_plan_free(plan), qd_scheduler_free(scheduler), qd_graph_free(graph), qd_backend_free(cpu);
}

/* A device that counts what it is asked for. */
static void *own_allocate(void *context, size_t bytes, int32_t usage, qd_error *to) {
  (void)usage, (void)to;
  ++*(int *)context;
  return malloc(bytes + 1);
}
static void own_free(void *context, void *memory) {
  (void)context;
  free(memory);
}
static qd_status own_write(void *context, void *buffer, size_t offset, const void *data, size_t bytes, qd_error *to) {
  (void)context, (void)to;
  memcpy((char *)buffer + offset, data, bytes);
  return QD_STATUS_OK;
}
static qd_status own_read(void *context, const void *buffer, size_t offset, void *data, size_t bytes, qd_error *to) {
  (void)context, (void)to;
  memcpy(data, (const char *)buffer + offset, bytes);
  return QD_STATUS_OK;
}
static qd_status own_supports(void *context, const qd_node *node, qd_error *to) {
  (void)context, (void)node, (void)to;
  return QD_STATUS_OK;
}
static void *own_compile(void *context, const qd_node *const *nodes, size_t count, qd_error *to) {
  (void)context, (void)nodes, (void)to;
  return malloc(count + 1);
}
static qd_status own_run(void *context, void *program, qd_error *to) {
  (void)context, (void)program, (void)to;
  return QD_STATUS_OK;
}

static void limits(void) {
  int asked = 0;
  qd_backend_table table = qd_backend_default_params();
  table.name = "small";
  table.context = &asked;
  table.max_buffer = 8;
  table.alignment = 8;
  table.allocate = own_allocate;
  table.free = table.free_program = own_free;
  table.write = own_write;
  table.read = own_read;
  table.supports = own_supports;
  table.compile = own_compile;
  table.run = own_run;
  qd_backend *backend = qd_backend_new(&table, &error);
  CHECK(backend != NULL);
  CHECK(qd_buffer_new(backend, 32, QD_USAGE_COMPUTE, &error) == NULL && strstr(error.message, "max_buffer") != NULL);
  CHECK(asked == 0);
  qd_buffer *buffer = qd_buffer_new(backend, 8, QD_USAGE_COMPUTE, &error);
  CHECK(buffer != NULL && asked == 1);
  qd_buffer_free(buffer), qd_backend_free(backend);
}

static void types(void) {
  const struct {
    qd_dtype dtype;
    const char *name;
  } named[] = {
      {QD_DTYPE_Q8_1, "Q8_1"},   {QD_DTYPE_Q8_K, "Q8_K"},   {QD_DTYPE_IQ2_XXS, "IQ2_XXS"}, {QD_DTYPE_IQ2_XS, "IQ2_XS"},
      {QD_DTYPE_IQ2_S, "IQ2_S"}, {QD_DTYPE_IQ3_S, "IQ3_S"}, {QD_DTYPE_IQ3_XXS, "IQ3_XXS"}, {QD_DTYPE_IQ1_S, "IQ1_S"},
      {QD_DTYPE_IQ1_M, "IQ1_M"}, {QD_DTYPE_TQ1_0, "TQ1_0"}, {QD_DTYPE_TQ2_0, "TQ2_0"},     {QD_DTYPE_NVFP4, "NVFP4"},
  };
  for (size_t i = 0; i < sizeof named / sizeof *named; i++) CHECK(strcmp(qd_dtype_name(named[i].dtype), named[i].name) == 0);
}

int main(int argc, char **argv) {
  if (argc < 2) return EXIT_FAILURE;
  types();
  limits();
  operations();
  services(argv[1]);
  last_users(argv[1]);
  forks(argv[1]);
  CHECK(qd_live_handles() == 0);
  printf("callbacks end as they should\n");
  return EXIT_SUCCESS;
}
