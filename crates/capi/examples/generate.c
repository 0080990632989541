/* Generates text: an answer of at most 16 tokens is printed as it is generated.
 *
 *   generate [MODEL] [PROMPT]     MODEL: a GGUF file, ORG/REPO[:QUANT], or - for the default model
 */
#include <quadriga.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int32_t print_piece(void *user_data, const qd_piece *piece) {
  size_t *tokens = user_data;
  *tokens += 1;
  fputs(piece->text, stdout);
  return ferror(stdout); /* anything but 0 stops */
}

static int fail(const char *what, const qd_error *error) {
  fprintf(stderr, "%s: %s (%d)\n", what, error->message, error->code);
  return EXIT_FAILURE;
}

int main(int argc, char **argv) {
  if (qd_abi_version() != QD_ABI_VERSION) {
    fprintf(stderr, "the library has another version than the header\n");
    return EXIT_FAILURE;
  }
  const char *name = argc > 1 && strcmp(argv[1], "-") != 0 ? argv[1] : NULL;
  const char *prompt = argc > 2 ? argv[2] : "Why is the sky blue?";
  qd_error error;
  qd_model *model = qd_model_open(name, NULL, &error);
  if (model == NULL) return fail("open", &error);

  qd_engine_params engine = qd_engine_default_params();
  engine.context = 256;
  qd_generator *generator = qd_generator_new(model, &engine, &error);
  qd_model_free(model); /* the generator keeps what it needs */
  if (generator == NULL) return fail("load", &error);

  qd_request_params request = qd_request_default_params();
  request.max_tokens = 16;
  request.temperature = 0;
  size_t tokens = 0;
  qd_completion completion;
  int result = EXIT_SUCCESS;
  if (qd_generator_generate(generator, prompt, &request, print_piece, &tokens, &completion, &error) != QD_STATUS_OK) {
    result = fail("generate", &error);
  } else {
    printf("\n%zu tokens of a prompt of %zu\n", completion.answer_tokens, completion.prompt_tokens);
    if (tokens != completion.answer_tokens) result = EXIT_FAILURE;
  }
  qd_generator_free(generator);
  if (qd_live_handles() != 0) result = EXIT_FAILURE;
  return result;
}
