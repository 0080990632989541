// A conversation in C++: an answer that is JSON of a schema, then two requests at once through a service, from two threads.
//
//   chat [MODEL]     MODEL: a GGUF file, ORG/REPO[:QUANT], or - for the default model
#include <quadriga.h>

#include <cstdio>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

namespace {

struct Error : qd_error {
  Error() { code = QD_STATUS_OK; }
  void check(qd_status status) const {
    if (status < 0) throw std::runtime_error(message);
  }
};

template <typename T>
struct Free;
template <>
struct Free<qd_model> {
  void operator()(qd_model *handle) const { qd_model_free(handle); }
};
template <>
struct Free<qd_generator> {
  void operator()(qd_generator *handle) const { qd_generator_free(handle); }
};
template <>
struct Free<qd_service> {
  void operator()(qd_service *handle) const { qd_service_free(handle); }
};
template <>
struct Free<qd_request> {
  void operator()(qd_request *handle) const { qd_request_free(handle); }
};
template <typename T>
using Handle = std::unique_ptr<T, Free<T>>;

template <typename T>
Handle<T> owned(T *handle, const Error &error) {
  if (handle == nullptr) throw std::runtime_error(error.message);
  return Handle<T>(handle);
}

// Callbacks must not throw.
int32_t append(void *user_data, const qd_piece *piece) noexcept {
  static_cast<std::string *>(user_data)->append(piece->text);
  return 0;
}

void converse(qd_model *model) {
  Error error;
  qd_engine_params engine = qd_engine_default_params();
  engine.context = 256;
  auto generator = owned(qd_generator_new(model, &engine, &error), error);
  qd_request_params request = qd_request_default_params();
  request.max_tokens = 12;
  request.temperature = 0;
  request.json_schema = R"({"type": "boolean"})";
  const std::vector<qd_message> messages = {{"system", "Answer in JSON."}, {"user", "Is water wet?"}};
  std::string answer;
  qd_completion completion;
  error.check(qd_generator_chat(generator.get(), messages.data(), messages.size(), &request, append, &answer,
                                &completion, &error));
  std::printf("%s\n", answer.c_str());
  if (answer != "true" && answer != "false") throw std::runtime_error("the answer is not of the schema: " + answer);
}

void serve(qd_model *model) {
  Error error;
  qd_engine_params engine = qd_engine_default_params();
  engine.context = 256;
  engine.sequences = 2;
  auto service = owned(qd_service_new(model, &engine, &error), error);
  std::vector<std::string> failures(2);
  auto ask = [&](size_t number) {
    Error error;
    qd_request_params request = qd_request_default_params();
    request.max_tokens = 6;
    request.temperature = 0;
    const std::vector<qd_message> messages = {{"user", number == 0 ? "Name a planet." : "Name a city."}};
    qd_request *submitted = qd_service_submit(service.get(), messages.data(), messages.size(), &request, &error);
    if (submitted == nullptr) {
      failures[number] = error.message;
      return;
    }
    Handle<qd_request> handle(submitted);
    qd_piece piece;
    qd_completion completion;
    qd_status status;
    std::string answer;
    while ((status = qd_request_next(submitted, &piece, &completion, &error)) == QD_STATUS_OK) answer += piece.text;
    if (status != QD_STATUS_END) failures[number] = error.message;
    if (completion.answer_tokens == 0) failures[number] = "no tokens";
    std::printf("%zu: %s\n", number, answer.c_str());
  };
  std::thread first(ask, 0), second(ask, 1);
  first.join();
  second.join();
  for (const std::string &failure : failures) {
    if (!failure.empty()) throw std::runtime_error(failure);
  }
}

}  // namespace

int main(int argc, char **argv) {
  try {
    Error error;
    const char *name = argc > 1 && std::strcmp(argv[1], "-") != 0 ? argv[1] : nullptr;
    auto model = owned(qd_model_open(name, nullptr, &error), error);
    converse(model.get());
    serve(model.get());
  } catch (const std::exception &failure) {
    std::fprintf(stderr, "%s\n", failure.what());
    return 1;
  }
  return qd_live_handles() == 0 ? 0 : 1;
}
