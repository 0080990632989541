/* Models from a hub and with adapters, embeddings, ranks, conversations in JSON, tokens, KV caches in files, tensors of GGUF files.
 *
 *   text FOLDER     with model.gguf, encoder.gguf, and what models.py makes; HF_ENDPOINT is a hub with tests/tiny
 */
#include <quadriga.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static qd_error error;
static char paths[5][1024];

#define CHECK(condition)                                                            \
  do {                                                                              \
    if (!(condition)) {                                                             \
      fprintf(stderr, "%s:%d: %s: %s\n", __FILE__, __LINE__, #condition, error.message); \
      exit(EXIT_FAILURE);                                                           \
    }                                                                               \
  } while (0)

enum { WIDTH = 64, VOCABULARY = 512 };

/* The logits after three tokens, of a model with adapters. */
static void logits_of(const qd_model_params *params, float *logits) {
  qd_engine_params engine = qd_engine_default_params();
  engine.context = 64;
  engine.cache_keys = engine.cache_values = QD_DTYPE_F32;
  qd_model *model = qd_model_open(paths[0], params, &error);
  CHECK(model != NULL);
  qd_generator *generator = qd_generator_new(model, &engine, &error);
  CHECK(generator != NULL);
  size_t needed;
  CHECK(qd_generator_logits(generator, (const uint32_t[]){5, 6, 7}, 3, logits, VOCABULARY, &needed, &error) == QD_STATUS_OK);
  CHECK(needed == VOCABULARY);
  qd_generator_free(generator);
  qd_model_free(model);
}

static float difference(const float *a, const float *b) {
  float largest = 0;
  for (int i = 0; i < VOCABULARY; i++) largest = fmaxf(largest, fabsf(a[i] - b[i]));
  return largest;
}

static void adapters(void) {
  float plain[VOCABULARY], none[VOCABULARY], whole[VOCABULARY], halves[VOCABULARY];
  qd_model_params params = qd_model_default_params();
  logits_of(&params, plain);
  qd_adapter two[] = {{paths[3], 0}, {paths[3], 0.5f}};
  params.adapters = two;
  params.adapter_count = 1;
  logits_of(&params, none);
  two[0].scale = 1;
  logits_of(&params, whole);
  two[0].scale = 0.5f;
  params.adapter_count = 2;
  logits_of(&params, halves);
  /* The folder of an adapter of PEFT. */
  char folder[1100];
  snprintf(folder, sizeof folder, "%s/peft", paths[4]);
  qd_adapter peft = {folder, 1};
  float with_folder[VOCABULARY];
  params.adapters = &peft;
  params.adapter_count = 1;
  logits_of(&params, with_folder);
  CHECK(difference(plain, with_folder) > 1e-2f);
  snprintf(folder, sizeof folder, "%s/no-such-folder", paths[4]);
  CHECK(qd_model_open(paths[0], &params, &error) == NULL && strstr(error.message, "no-such-folder") != NULL);
  params.adapters = two;
  params.adapter_count = 2;
  CHECK(qd_model_open("", NULL, &error) == NULL && error.code == QD_STATUS_INVALID_ARGUMENT && strstr(error.message, "empty") != NULL);
  CHECK(difference(plain, none) < 1e-4f);
  CHECK(difference(plain, whole) > 1e-2f);
  CHECK(difference(whole, halves) < 1e-3f);
  two[1].path = paths[0];
  CHECK(qd_model_open(paths[0], &params, &error) == NULL && strstr(error.message, "adapter") != NULL);
  two[1].path = NULL;
  CHECK(qd_model_open(paths[0], &params, &error) == NULL && error.code == QD_STATUS_INVALID_ARGUMENT);
  two[1].path = "/no/such/adapter.gguf";
  CHECK(qd_model_open(paths[0], &params, &error) == NULL && error.code == QD_STATUS_NOT_FOUND);
}

static int32_t count_calls(void *user_data, uint64_t done, uint64_t total) {
  (void)done, (void)total;
  ++*(int *)user_data;
  return 0;
}
static int32_t stop(void *user_data, uint64_t done, uint64_t total) {
  (void)user_data, (void)done, (void)total;
  return 1;
}

static void hub(const char *folder) {
  char cache[1024];
  snprintf(cache, sizeof cache, "%s/cache", folder);
  qd_model_params params = qd_model_default_params();
  params.cache_dir = cache;
  params.offline = 1;
  CHECK(qd_model_open("tests/tiny:F32", &params, &error) == NULL && strstr(error.message, "tests/tiny") != NULL);
  params.offline = 0;
  params.progress = stop;
  CHECK(qd_model_open("tests/tiny:F32", &params, &error) == NULL && error.code == QD_STATUS_CALLBACK);
  int calls = 0;
  params.progress = count_calls;
  params.progress_data = &calls;
  qd_model *model = qd_model_open("tests/tiny:F32", &params, &error);
  CHECK(model != NULL && calls > 0);
  qd_model_free(model);
  /* A type that the repository lacks means the best that fits. */
  model = qd_model_open("tests/tiny:Q2_K", &params, &error);
  CHECK(model != NULL);
  qd_model_free(model);
  CHECK(qd_model_open("tests/nothing", &params, &error) == NULL);
  /* From the cache: the hub is not asked. */
  params.offline = 1;
  calls = 0;
  model = qd_model_open("tests/tiny", &params, &error);
  CHECK(model != NULL && calls == 0);
  qd_model_info info;
  CHECK(qd_model_describe(model, &info, &error) == QD_STATUS_OK && info.vocabulary == VOCABULARY);
  qd_model_free(model);
}

static void embeddings(void) {
  float a[WIDTH], again[WIDTH], b[WIDTH], length = 0, score = 0, other = 0;
  size_t needed;
  qd_model *model = qd_model_open(paths[1], NULL, &error);
  CHECK(model != NULL);
  qd_embedder *embedder = qd_embedder_new(model, NULL, &error);
  CHECK(embedder != NULL);
  CHECK(qd_embedder_embed(embedder, "abc", NULL, 0, &needed, &error) == QD_STATUS_BUFFER_TOO_SMALL && needed == WIDTH);
  CHECK(qd_embedder_embed(embedder, "abc", a, WIDTH, NULL, &error) == QD_STATUS_OK);
  CHECK(qd_embedder_embed(embedder, "abc", again, WIDTH, NULL, &error) == QD_STATUS_OK);
  CHECK(qd_embedder_embed(embedder, "hello there", b, WIDTH, NULL, &error) == QD_STATUS_OK);
  for (int i = 0; i < WIDTH; i++) length += a[i] * a[i];
  CHECK(fabsf(length - 1) < 1e-4f && memcmp(a, again, sizeof a) == 0 && memcmp(a, b, sizeof a) != 0);
  CHECK(qd_embedder_embed(embedder, NULL, a, WIDTH, NULL, &error) == QD_STATUS_INVALID_ARGUMENT);
  /* Without a classification head. */
  CHECK(qd_embedder_rank(embedder, "abc", "hello", &score, &error) != QD_STATUS_OK && error.message[0] != 0);
  qd_embedder_free(embedder);
  qd_model_free(model);

  model = qd_model_open(paths[2], NULL, &error);
  CHECK(model != NULL);
  embedder = qd_embedder_new(model, NULL, &error);
  CHECK(embedder != NULL);
  CHECK(qd_embedder_rank(embedder, "abc", "hello there", &score, &error) == QD_STATUS_OK && isfinite(score));
  CHECK(qd_embedder_rank(embedder, "abc", "something else", &other, &error) == QD_STATUS_OK && score != other);
  CHECK(qd_embedder_rank(embedder, "abc", "hello there", &other, &error) == QD_STATUS_OK && score == other);
  CHECK(qd_embedder_rank(embedder, "abc", "hello there", NULL, &error) == QD_STATUS_INVALID_ARGUMENT);
  CHECK(qd_embedder_rank(embedder, "abc", NULL, &score, &error) == QD_STATUS_INVALID_ARGUMENT);
  qd_embedder_free(embedder);
  CHECK(qd_embedder_rank(embedder, "abc", "abc", &score, &error) == QD_STATUS_INVALID_HANDLE);
  qd_model_free(model);
}

static void conversations(void) {
  qd_model *model = qd_model_open(paths[0], NULL, &error);
  qd_engine_params engine = qd_engine_default_params();
  engine.context = 256;
  qd_service *service = qd_service_new(model, &engine, &error);
  CHECK(service != NULL);
  qd_request_params params = qd_request_default_params();
  params.max_tokens = 4;
  params.ignore_eos = 1;
  const char *bad[] = {"", "{", "{}", "[1]", "[{\"role\": 3}]", "null"};
  for (size_t i = 0; i < sizeof bad / sizeof *bad; i++)
    CHECK(qd_service_submit_json(service, bad[i], &params, &error) == NULL && error.code == QD_STATUS_INVALID_ARGUMENT);
  qd_request *request = qd_service_submit_json(service, "[{\"role\": \"user\", \"content\": \"Hi\"}]", &params, &error);
  CHECK(request != NULL);
  int pieces = 0;
  qd_status status;
  while ((status = qd_request_next(request, NULL, NULL, &error)) == QD_STATUS_OK) pieces++;
  CHECK(status == QD_STATUS_END && pieces == 4);
  CHECK(qd_request_next(request, NULL, NULL, &error) == QD_STATUS_END);
  qd_service_state state;
  CHECK(qd_service_describe(service, &state, &error) == QD_STATUS_OK);
  CHECK(state.waiting == 0 && state.pages > 0 && state.computed > 4);
  qd_request_free(request);
  qd_service_free(service);
  qd_model_free(model);
}

static int32_t count_pieces(void *user_data, const qd_piece *piece) {
  (void)piece;
  ++*(int *)user_data;
  return 0;
}

/* Cancels the answer that it is given. */
static int32_t cancel(void *user_data, const qd_piece *piece) {
  qd_generator *generator = user_data;
  (void)piece;
  CHECK(qd_generator_cancel(generator, &error) == QD_STATUS_OK);
  return 0;
}

/* Prompts, tokens, answers and KV caches of a generator. */
static void generators(const char *folder) {
  char path[1024], text[1024];
  snprintf(path, sizeof path, "%s/kv", folder);
  size_t needed;
  uint8_t bytes[64];
  qd_model_params own = qd_model_default_params();
  own.chat_template = "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}";
  qd_model *model = qd_model_open(paths[0], &own, &error);
  CHECK(model != NULL);
  const qd_message messages[] = {{"user", "Hi"}};
  CHECK(qd_chat_prompt(model, messages, 1, NULL, 0, &needed, &error) == QD_STATUS_BUFFER_TOO_SMALL && needed == 9);
  CHECK(qd_chat_prompt(model, messages, 1, text, sizeof text, NULL, &error) == QD_STATUS_OK && strcmp(text, "<user>Hi") == 0);
  int ends = 0;
  for (uint32_t token = 0; token < VOCABULARY; token++) {
    ends += qd_token_is_end(model, token);
    CHECK(qd_token_piece(model, token, bytes, sizeof bytes, &needed, &error) == QD_STATUS_OK && needed <= sizeof bytes);
  }
  CHECK(ends >= 1 && ends < 16 && qd_token_is_end(model, VOCABULARY) == 0);
  CHECK(qd_token_piece(model, VOCABULARY, bytes, sizeof bytes, &needed, &error) != QD_STATUS_OK);

  qd_engine_params engine = qd_engine_default_params();
  engine.context = 128;
  qd_generator *generator = qd_generator_new(model, &engine, &error);
  CHECK(generator != NULL);
  qd_request_params params = qd_request_default_params();
  params.max_tokens = 6;
  params.ignore_eos = 1;
  params.temperature = 0;
  qd_completion completion;
  int pieces = 0;
  const char *conversation = "[{\"role\": \"user\", \"content\": \"Hi\"}]";
  CHECK(qd_generator_chat_json(generator, conversation, &params, count_pieces, &pieces, &completion, &error) == QD_STATUS_OK);
  CHECK(pieces == 6 && completion.finish == QD_FINISH_LENGTH);
  CHECK(qd_generator_chat_json(generator, "{", &params, NULL, NULL, NULL, &error) == QD_STATUS_INVALID_ARGUMENT);

  /* The KV cache of tokens, from a file, in another generator: all but the last token of the prompt are found. */
  const uint32_t tokens[] = {5, 6, 7, 8, 9, 10, 11, 12};
  CHECK(qd_generator_continue(generator, tokens, 8, &params, NULL, NULL, &completion, &error) == QD_STATUS_OK);
  CHECK(completion.prompt_tokens == 8 && completion.answer_tokens == 6);
  CHECK(qd_generator_save_file(generator, path, &error) == QD_STATUS_OK);
  CHECK(qd_generator_save_file(generator, "/no/such/folder/kv", &error) == QD_STATUS_NOT_FOUND);
  qd_generator *second = qd_generator_new(model, &engine, &error);
  CHECK(second != NULL && qd_generator_load_file(second, "/no/such/kv", &error) == QD_STATUS_NOT_FOUND);
  CHECK(qd_generator_load(second, (const uint8_t *)"nothing", 7, &error) == QD_STATUS_FILE);
  CHECK(qd_generator_load_file(second, path, &error) == QD_STATUS_OK);
  CHECK(qd_generator_continue(second, tokens, 8, &params, NULL, NULL, &completion, &error) == QD_STATUS_OK);
  CHECK(completion.cached_tokens == 7);
  qd_generator_free(second);

  CHECK(qd_generator_continue(generator, tokens, 8, &params, cancel, generator, &completion, &error) == QD_STATUS_OK);
  CHECK(completion.finish == QD_FINISH_CANCELLED && completion.answer_tokens < 6);
  /* The next answer is whole. */
  CHECK(qd_generator_continue(generator, tokens, 8, &params, NULL, NULL, &completion, &error) == QD_STATUS_OK);
  CHECK(completion.finish == QD_FINISH_LENGTH && completion.answer_tokens == 6);
  qd_generator_free(generator);
  qd_model_free(model);
}

/* The first matrix of the adapter, whose elements are known, as a weight. */
static void tensors(void) {
  CHECK(qd_gguf_open("/no/such/file.gguf", &error) == NULL && error.code == QD_STATUS_NOT_FOUND);
  CHECK(qd_gguf_open(NULL, &error) == NULL && error.code == QD_STATUS_INVALID_ARGUMENT);
  CHECK(qd_gguf_open(__FILE__, &error) == NULL && error.message[0] != 0);
  CHECK(qd_gguf_tensor_count(NULL) == 0);
  qd_gguf *file = qd_gguf_open(paths[3], &error);
  CHECK(file != NULL && qd_gguf_tensor_count(file) == 2);
  char name[64];
  size_t needed;
  CHECK(qd_gguf_tensor_name(file, 0, NULL, 0, &needed, &error) == QD_STATUS_BUFFER_TOO_SMALL);
  CHECK(qd_gguf_tensor_name(file, 0, name, sizeof name, NULL, &error) == QD_STATUS_OK);
  CHECK(strcmp(name, "blk.0.attn_q.weight.lora_a") == 0 && needed == strlen(name) + 1);
  CHECK(qd_gguf_tensor_name(file, 2, name, sizeof name, NULL, &error) == QD_STATUS_NOT_FOUND);

  qd_builder *g = qd_builder_new(&error);
  CHECK(qd_gguf_weight(g, file, "nothing") == QD_NO_TENSOR);
  CHECK(qd_builder_finish(g, &error) == NULL && strstr(error.message, "nothing") != NULL);
  qd_builder_free(g);
  g = qd_builder_new(&error);
  qd_tensor w = qd_gguf_weight(g, file, "blk.0.attn_q.weight.lora_a");
  qd_tensor_info info;
  CHECK(qd_builder_tensor(g, w, &info, &error) == QD_STATUS_OK && info.dims[2] == 2 && info.dims[3] == 64);
  qd_output(g, "y", qd_mul_mat(g, w, qd_input(g, "x", QD_DTYPE_F32, QD_SHAPE(1, 64))));
  qd_graph *graph = qd_builder_finish(g, &error);
  CHECK(graph != NULL);
  qd_builder_free(g);
  qd_gguf_free(file); /* the graph keeps it */
  CHECK(qd_gguf_tensor_count(file) == 0);
  CHECK(qd_graph_tensor_count(graph) == 3 && qd_graph_find(graph, "blk.0.attn_q.weight.lora_a") == w);
  CHECK(qd_graph_tensor_name(graph, w, name, sizeof name, NULL, &error) == QD_STATUS_OK && strstr(name, "lora_a") != NULL);
  qd_backend *cpu = qd_backend_cpu(1, &error);
  const qd_backend *all[] = {cpu};
  qd_scheduler *scheduler = qd_scheduler_new(all, 1, &error);
  qd_plan *plan = qd_scheduler_plan(scheduler, graph, &error);
  qd_session *session = qd_session_new(plan, &error);
  CHECK(session != NULL);
  float x[64] = {0}, y[2];
  x[3] = 256;
  CHECK(qd_session_set_f32(session, "x", x, 64, &error) == QD_STATUS_OK);
  CHECK(qd_session_run(session, &error) == QD_STATUS_OK);
  CHECK(qd_session_read_f32(session, "y", y, 2, NULL, &error) == QD_STATUS_OK && y[0] == 3 && y[1] == 67);
  qd_session_free(session), qd_plan_free(plan), qd_scheduler_free(scheduler), qd_graph_free(graph), qd_backend_free(cpu);
}

int main(int argc, char **argv) {
  if (argc < 2) return EXIT_FAILURE;
  const char *names[] = {"model", "encoder", "reranker", "adapter"};
  for (int i = 0; i < 4; i++) snprintf(paths[i], sizeof paths[i], "%s/%s.gguf", argv[1], names[i]);
  snprintf(paths[4], sizeof paths[4], "%s", argv[1]);
  adapters();
  hub(argv[1]);
  embeddings();
  conversations();
  generators(argv[1]);
  tensors();
  CHECK(qd_live_handles() == 0);
  printf("%s: text is as it should be\n", qd_version());
  return EXIT_SUCCESS;
}
