/* A backend in C whose queues go on working while the host does other things: each queue is a thread with a list of commands,
 * events are counters that threads wait for. A graph runs half on it and half on the CPU, many times, and must be right each
 * time; a program that fails is reported when the session waits.
 */
#include <quadriga.h>
#include <pthread.h>
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

struct device {
  pthread_mutex_t lock;
  pthread_cond_t changed;
  int fail, alive;
};

struct event {
  unsigned long recorded, reached;
  int failed;
};

enum kind { WRITE, COPY, RUN, RECORD, WAIT, STOP };

struct command {
  enum kind kind;
  char *to;
  const char *from;
  char *owned;
  size_t bytes;
  struct program *program;
  struct event *event;
  unsigned long count;
  struct command *next;
};

struct queue {
  struct device *device;
  pthread_t thread;
  struct command *first, *last;
  unsigned long submitted, done;
  int failed;
};

/* sqr and add of contiguous F32 tensors of equal shape */
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

static void execute(struct queue *queue, struct command *command) {
  struct device *device = queue->device;
  switch (command->kind) {
    case WRITE:
    case COPY: memmove(command->to, command->from, command->bytes); break;
    case RUN:
      if (device->fail) queue->failed = 1;
      for (size_t i = 0; i < command->program->count; i++) {
        struct step *s = &command->program->steps[i];
        for (size_t k = 0; k < s->elements; k++) s->to[k] = s->add ? s->a[k] + s->b[k] : s->a[k] * s->a[k];
      }
      break;
    case RECORD:
      pthread_mutex_lock(&device->lock);
      if (command->event->reached < command->count) command->event->reached = command->count;
      command->event->failed |= queue->failed;
      pthread_mutex_unlock(&device->lock);
      break;
    case WAIT:
      pthread_mutex_lock(&device->lock);
      while (command->event->reached < command->count) pthread_cond_wait(&device->changed, &device->lock);
      pthread_mutex_unlock(&device->lock);
      break;
    case STOP: break;
  }
}

static void *work(void *argument) {
  struct queue *queue = argument;
  struct device *device = queue->device;
  for (;;) {
    pthread_mutex_lock(&device->lock);
    while (queue->first == NULL) pthread_cond_wait(&device->changed, &device->lock);
    struct command *command = queue->first;
    queue->first = command->next;
    if (queue->first == NULL) queue->last = NULL;
    pthread_mutex_unlock(&device->lock);
    execute(queue, command);
    int stop = command->kind == STOP;
    pthread_mutex_lock(&device->lock);
    queue->done++;
    pthread_cond_broadcast(&device->changed);
    pthread_mutex_unlock(&device->lock);
    free(command->owned);
    free(command);
    if (stop) return NULL;
  }
}

static void submit(struct queue *queue, struct command command) {
  struct command *kept = malloc(sizeof *kept);
  *kept = command;
  kept->next = NULL;
  struct device *device = queue->device;
  pthread_mutex_lock(&device->lock);
  if (kept->kind == RECORD) kept->count = ++kept->event->recorded;
  if (kept->kind == WAIT) kept->count = kept->event->recorded;
  if (queue->last != NULL) queue->last->next = kept;
  else queue->first = kept;
  queue->last = kept;
  queue->submitted++;
  pthread_cond_broadcast(&device->changed);
  pthread_mutex_unlock(&device->lock);
}

static qd_status finish(struct queue *queue, qd_error *e) {
  struct device *device = queue->device;
  pthread_mutex_lock(&device->lock);
  while (queue->done < queue->submitted) pthread_cond_wait(&device->changed, &device->lock);
  int failed = queue->failed;
  queue->failed = 0;
  pthread_mutex_unlock(&device->lock);
  if (!failed) return QD_STATUS_OK;
  qd_error_set(e, QD_STATUS_DEVICE, "a command of the queue failed");
  return QD_STATUS_DEVICE;
}

static void *allocate(void *c, size_t bytes, int32_t usage, qd_error *e) {
  (void)c, (void)usage, (void)e;
  return malloc(bytes + 1);
}
static void release(void *c, void *buffer) {
  (void)c;
  free(buffer);
}
static qd_status write_buffer(void *c, void *b, size_t offset, const void *data, size_t bytes, qd_error *e) {
  (void)c, (void)e;
  memcpy((char *)b + offset, data, bytes);
  return QD_STATUS_OK;
}
static qd_status read_buffer(void *c, const void *b, size_t offset, void *data, size_t bytes, qd_error *e) {
  (void)c, (void)e;
  memcpy(data, (const char *)b + offset, bytes);
  return QD_STATUS_OK;
}
static qd_status supports(void *c, const qd_node *node, qd_error *e) {
  (void)c;
  int known = strcmp(node->operation, "sqr") == 0 || strcmp(node->operation, "add") == 0;
  for (size_t i = 0; i < node->input_count; i++) {
    const qd_tensor_info *a = &node->inputs[i].info, *o = &node->output.info;
    known = known && a->dtype == QD_DTYPE_F32 && memcmp(a->dims, o->dims, sizeof a->dims) == 0 &&
            memcmp(a->strides, o->strides, sizeof a->strides) == 0 && a->bytes == 4 * a->elements;
  }
  if (known) return QD_STATUS_OK;
  qd_error_set(e, QD_STATUS_UNSUPPORTED, "only sqr and add");
  return QD_STATUS_UNSUPPORTED;
}
static void *compile(void *c, const qd_node *const *nodes, size_t count, qd_error *e) {
  (void)c, (void)e;
  struct program *program = malloc(sizeof *program);
  program->count = count;
  program->steps = calloc(count + 1, sizeof *program->steps);
  for (size_t i = 0; i < count; i++) {
    const qd_operand *a = &nodes[i]->inputs[0], *b = &nodes[i]->inputs[nodes[i]->input_count - 1];
    const qd_operand *to = &nodes[i]->output;
    program->steps[i] = (struct step){(const float *)(void *)((char *)a->buffer + a->offset),
                                      (const float *)(void *)((char *)b->buffer + b->offset),
                                      (float *)(void *)((char *)to->buffer + to->offset), to->info.elements,
                                      strcmp(nodes[i]->operation, "add") == 0};
  }
  return program;
}
static qd_status run(void *c, void *program, qd_error *e) {
  (void)c, (void)program, (void)e;
  return QD_STATUS_FAILED; /* queues run programs */
}
static void free_program(void *c, void *program) {
  (void)c;
  free(((struct program *)program)->steps);
  free(program);
}

static void *queue_new(void *c, qd_error *e) {
  (void)e;
  struct queue *queue = calloc(1, sizeof *queue);
  queue->device = c;
  if (pthread_create(&queue->thread, NULL, work, queue) != 0) {
    free(queue);
    return NULL;
  }
  queue->device->alive++;
  return queue;
}
static void queue_free(void *c, void *q) {
  struct queue *queue = q;
  submit(queue, (struct command){.kind = STOP});
  pthread_join(queue->thread, NULL);
  free(queue);
  ((struct device *)c)->alive--;
}
static qd_status queue_write(void *c, void *q, void *b, size_t offset, const void *data, size_t bytes, qd_error *e) {
  (void)c, (void)e;
  char *copy = malloc(bytes + 1);
  memcpy(copy, data, bytes);
  submit(q, (struct command){.kind = WRITE, .to = (char *)b + offset, .from = copy, .owned = copy, .bytes = bytes});
  return QD_STATUS_OK;
}
static qd_status queue_read(void *c, void *q, const void *b, size_t offset, void *data, size_t bytes, qd_error *e) {
  qd_status status = finish(q, e);
  return status == QD_STATUS_OK ? read_buffer(c, b, offset, data, bytes, e) : status;
}
static qd_status queue_copy(void *c, void *q, const void *from, size_t from_offset, void *to, size_t to_offset,
                            size_t bytes, qd_error *e) {
  (void)c, (void)e;
  submit(q, (struct command){
                .kind = COPY, .to = (char *)to + to_offset, .from = (const char *)from + from_offset, .bytes = bytes});
  return QD_STATUS_OK;
}
static qd_status queue_run(void *c, void *q, void *program, qd_error *e) {
  (void)c, (void)e;
  submit(q, (struct command){.kind = RUN, .program = program});
  return QD_STATUS_OK;
}
static qd_status queue_synchronize(void *c, void *q, qd_error *e) {
  (void)c;
  return finish(q, e);
}
static void *event_new(void *c, qd_error *e) {
  (void)c, (void)e;
  return calloc(1, sizeof(struct event));
}
static void event_free(void *c, void *event) {
  (void)c;
  free(event);
}
static qd_status event_record(void *c, void *q, void *event, qd_error *e) {
  (void)c, (void)e;
  submit(q, (struct command){.kind = RECORD, .event = event});
  return QD_STATUS_OK;
}
static qd_status event_wait(void *c, void *q, void *event, qd_error *e) {
  (void)c, (void)e;
  submit(q, (struct command){.kind = WAIT, .event = event});
  return QD_STATUS_OK;
}
static qd_status event_state(struct device *device, struct event *event, int wait, qd_error *e) {
  pthread_mutex_lock(&device->lock);
  unsigned long recorded = event->recorded;
  while (wait && event->reached < recorded) pthread_cond_wait(&device->changed, &device->lock);
  int done = event->reached >= recorded, failed = event->failed;
  if (done) event->failed = 0;
  pthread_mutex_unlock(&device->lock);
  if (done && failed) {
    qd_error_set(e, QD_STATUS_DEVICE, "a command before the event failed");
    return QD_STATUS_DEVICE;
  }
  return done && !wait ? QD_STATUS_END : QD_STATUS_OK;
}
static qd_status event_synchronize(void *c, void *event, qd_error *e) { return event_state(c, event, 1, e); }
static qd_status event_query(void *c, void *event, qd_error *e) { return event_state(c, event, 0, e); }

int main(void) {
  struct device device = {.fail = 0};
  pthread_mutex_init(&device.lock, NULL);
  pthread_cond_init(&device.changed, NULL);
  qd_backend_table table = qd_backend_default_params();
  table.name = "queues";
  table.context = &device;
  table.allocate = allocate;
  table.free = release;
  table.write = write_buffer;
  table.read = read_buffer;
  table.supports = supports;
  table.compile = compile;
  table.run = run;
  table.free_program = free_program;
  table.queue_new = queue_new;
  table.queue_free = queue_free;
  table.queue_write = queue_write;
  table.queue_read = queue_read;
  table.queue_copy = queue_copy;
  table.queue_run = queue_run;
  table.queue_synchronize = queue_synchronize;
  table.event_new = event_new;
  table.event_free = event_free;
  table.event_record = event_record;
  table.event_wait = event_wait;
  table.event_synchronize = event_synchronize;
  CHECK(qd_backend_new(&table, &error) == NULL && strstr(error.message, "event_query") != NULL);
  table.event_query = event_query;
  qd_backend *own = qd_backend_new(&table, &error);
  CHECK(own != NULL);
  qd_device_info info;
  CHECK(qd_backend_device(own, &info, &error) == QD_STATUS_OK && info.asynchronous == 1);

  qd_builder *g = qd_builder_new(&error);
  qd_tensor x = qd_input(g, "x", QD_DTYPE_F32, QD_SHAPE(4, 64));
  qd_tensor y = qd_sqr(g, x);
  for (int i = 0; i < 4; i++) y = qd_add(g, qd_scale(g, qd_sqr(g, y), 0.5f), x);
  qd_output(g, "y", y);
  qd_graph *graph = qd_builder_finish(g, &error);
  CHECK(graph != NULL);
  qd_builder_free(g);
  qd_backend *cpu = qd_backend_cpu(1, &error);
  const qd_backend *backends[] = {own, cpu};
  qd_scheduler *scheduler = qd_scheduler_new(backends, 2, &error);
  qd_plan *plan = qd_scheduler_plan(scheduler, graph, &error);
  CHECK(plan != NULL && qd_plan_split_count(plan) == 9);
  qd_session *session = qd_session_new(plan, &error);
  CHECK(session != NULL);
  for (int round = 0; round < 50; round++) {
    float input[256], output[256];
    for (int i = 0; i < 256; i++) input[i] = (float)(i + round) / 512;
    CHECK(qd_session_set(session, "x", input, sizeof input, &error) == QD_STATUS_OK);
    CHECK(qd_session_start(session, &error) == QD_STATUS_OK);
    CHECK(qd_session_read(session, "y", output, sizeof output, NULL, &error) == QD_STATUS_OK);
    for (int i = 0; i < 256; i++) {
      float expected = input[i] * input[i];
      for (int k = 0; k < 4; k++) expected = 0.5f * (expected * expected) + input[i];
      float difference = output[i] - expected;
      CHECK(difference < 1e-5f && difference > -1e-5f);
    }
  }
  device.fail = 1;
  qd_status status = qd_session_run(session, &error);
  CHECK(status == QD_STATUS_DEVICE && strstr(error.message, "failed") != NULL);
  device.fail = 0;
  qd_session_free(session);
  qd_plan_free(plan);
  qd_scheduler_free(scheduler);
  qd_backend_free(own);
  qd_backend_free(cpu);
  qd_graph_free(graph);
  CHECK(device.alive == 0 && qd_live_handles() == 0);
  pthread_cond_destroy(&device.changed);
  pthread_mutex_destroy(&device.lock);
  printf("50 rounds of 9 splits\n");
  return EXIT_SUCCESS;
}
