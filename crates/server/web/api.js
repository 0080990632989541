// Requests to the server. Paths are relative to the page, so that a prefix of a proxy is kept.

import { events } from './sse.js';

/** An error that the server answered, or that kept the answer from arriving (`status` 0). */
export class ApiError extends Error {
  constructor(message, { status = 0, code = null, param = null, retryAfter = null } = {}) {
    super(message);
    this.name = 'ApiError';
    Object.assign(this, { status, code, param, retryAfter });
  }
}

/** The message in an error body of any of the usual shapes. */
function errorOf(text, status, headers) {
  let body = null;
  try {
    body = JSON.parse(text)?.error ?? null;
  } catch {
    /* not JSON: the text itself is the message */
  }
  const fields = typeof body === 'object' && body !== null ? body : {};
  const message = fields.message ?? (typeof body === 'string' ? body : text.slice(0, 500).trim());
  const seconds = Number(headers?.get('retry-after') ?? NaN);
  return new ApiError(message || `The server answered with status ${status}.`, {
    status,
    code: fields.code ?? fields.type ?? null,
    param: fields.param ?? null,
    retryAfter: Number.isFinite(seconds) ? seconds : null,
  });
}

export class Client {
  /** `key` returns the API key, or an empty string. */
  constructor(key) {
    this.key = key;
  }

  /** A response with status 200; everything else is thrown. */
  async request(path, { method = 'GET', body, signal } = {}) {
    const headers = {};
    if (this.key()) headers.authorization = `Bearer ${this.key()}`;
    if (body !== undefined) headers['content-type'] = 'application/json';
    let response;
    try {
      response = await fetch(path, { method, headers, body: body && JSON.stringify(body), signal, cache: 'no-store' });
    } catch (error) {
      if (error.name === 'AbortError') throw error;
      throw new ApiError('The server cannot be reached. Is it still running?');
    }
    if (!response.ok) throw errorOf(await response.text().catch(() => ''), response.status, response.headers);
    return response;
  }

  async json(path, options) {
    const response = await this.request(path, options);
    try {
      return await response.json();
    } catch {
      throw new ApiError(`${path} did not return JSON.`, { status: response.status });
    }
  }

  /** The ids of the models. */
  async models() {
    const { data } = await this.json('v1/models');
    return Array.isArray(data) ? data.map((model) => String(model.id)) : [];
  }

  status(signal) {
    return this.json('status', { signal });
  }

  /** The picture of a model's plan, as a blob for an image element. */
  async plan(model) {
    const response = await this.request(planPath('plan.svg', model));
    return new Blob([await response.arrayBuffer()], { type: 'image/svg+xml' });
  }

  /** The page of a model's plan. */
  async planPage(model) {
    const response = await this.request(planPath('plan', model));
    return new Blob([await response.arrayBuffer()], { type: 'text/html' });
  }

  /** Yields the chunks of a chat completion; throws an `ApiError` for an error event or an end before `[DONE]`. */
  async *chat(body, signal) {
    const response = await this.request('v1/chat/completions', { method: 'POST', body, signal });
    let finished = false;
    try {
      for await (const data of events(response.body)) {
        if (data === '[DONE]') return;
        const chunk = parseChunk(data);
        finished ||= Boolean(chunk.choices?.[0]?.finish_reason);
        yield chunk;
      }
    } catch (error) {
      if (error.name === 'AbortError' || error instanceof ApiError) throw error;
      throw new ApiError('The connection to the server was lost.');
    }
    if (!finished) throw new ApiError('The server closed the connection before the answer was complete.');
  }
}

/** The path of a model's plan; without a model, of the first one's. */
export function planPath(path, model) {
  return model == null ? path : `${path}?model=${encodeURIComponent(model)}`;
}

function parseChunk(data) {
  let chunk;
  try {
    chunk = JSON.parse(data);
  } catch {
    throw new ApiError(`The server sent an event that is not JSON: ${data.slice(0, 200)}`);
  }
  if (chunk?.error) throw errorOf(data, Number(chunk.error.code) || 0, null);
  return chunk ?? {};
}
