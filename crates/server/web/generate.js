// One answer: the request of a conversation, and its stream into a message.

import { ancestors } from './tree.js';
import { requestFields } from './settings.js';

/** The body of the request whose answer follows `last`. Throws a `SettingError` for a wrong setting. */
export function requestBody(conversation, last, model) {
  const { settings } = conversation;
  const messages = ancestors(conversation, last).map(({ role, content }) => ({ role, content }));
  if (settings.system?.trim()) messages.unshift({ role: 'system', content: settings.system });
  return {
    ...(model ? { model } : {}),
    messages,
    stream: true,
    stream_options: { include_usage: true },
    ...requestFields(settings),
  };
}

/** Streams the answer into `message` and calls `changed` after each piece; errors end up in the message. */
export async function generate(client, body, message, changed, signal) {
  const clock = { start: performance.now(), first: null, content: null };
  message.state = 'streaming';
  try {
    for await (const chunk of client.chat(body, signal)) {
      take(message, chunk, clock);
      changed();
    }
    message.state = 'done';
  } catch (error) {
    if (error.name === 'AbortError') message.state = 'stopped';
    else fail(message, error);
  }
  finish(message, clock);
  changed();
}

function take(message, chunk, clock) {
  const choice = chunk.choices?.[0];
  const delta = choice?.delta ?? {};
  const reasoning = delta.reasoning_content ?? delta.reasoning ?? '';
  const content = delta.content ?? '';
  if (reasoning || content) clock.first ??= performance.now();
  if (content) clock.content ??= performance.now();
  if (reasoning) message.reasoning = (message.reasoning ?? '') + reasoning;
  message.content += content;
  if (choice?.finish_reason) message.finish = choice.finish_reason;
  if (chunk.model) message.model = chunk.model;
  message.stats ??= {};
  const { stats } = message;
  if (reasoning || content) stats.pieces = (stats.pieces ?? 0) + 1;
  if (clock.first !== null) stats.first_ms = clock.first - clock.start;
  if (message.reasoning) stats.thought_ms = (clock.content ?? performance.now()) - clock.first;
  if (chunk.usage) counts(stats, chunk.usage);
  if (chunk.timings) times(stats, chunk.timings);
}

const set = (stats, name, value) => {
  if (Number.isFinite(value)) stats[name] = value;
};

function counts(stats, usage) {
  set(stats, 'prompt_tokens', usage.prompt_tokens);
  set(stats, 'tokens', usage.completion_tokens);
  set(stats, 'cached_tokens', usage.prompt_tokens_details?.cached_tokens);
}

function times(stats, timings) {
  set(stats, 'tokens', timings.predicted_n);
  set(stats, 'cached_tokens', timings.cache_n);
  set(stats, 'prompt_ms', timings.prompt_ms);
  set(stats, 'prompt_n', timings.prompt_n);
  set(stats, 'predicted_ms', timings.predicted_ms);
}

function fail(message, error) {
  message.state = 'failed';
  message.error = error.message;
  message.status = error.status ?? 0;
  if (error.retryAfter) message.retryAfter = error.retryAfter;
}

function finish(message, clock) {
  if (clock.first === null) return;
  message.stats.stream_ms = performance.now() - clock.first;
}

/** Tokens per second: as the server measured them, or else as they arrived. Either time begins with the first token. */
export function tokensPerSecond(stats) {
  if (stats.tokens > 1 && stats.predicted_ms > 0) return (1000 * (stats.tokens - 1)) / stats.predicted_ms;
  const tokens = stats.tokens ?? stats.pieces ?? 0;
  return tokens > 1 && stats.stream_ms > 0 ? (1000 * (tokens - 1)) / stats.stream_ms : null;
}
