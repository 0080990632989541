// A server that speaks the part of the API that the page uses. Tests script its answers; the page's files are the real ones.

import { createServer } from 'node:http';
import { readFile } from 'node:fs/promises';
import { extname, join, normalize } from 'node:path';
import { fileURLToPath } from 'node:url';

const WEB = fileURLToPath(new URL('../web', import.meta.url));
const CSP =
  "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data: blob:; " +
  "base-uri 'none'; form-action 'none'; frame-ancestors 'none'";
const TYPES = { '.html': 'text/html; charset=utf-8', '.css': 'text/css', '.js': 'text/javascript', '.svg': 'image/svg+xml' };
const PLAN = `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 400 80"><style>.block{fill:#6f87b5}text{font:12px system-ui;fill:#1b2430}
  @media(prefers-color-scheme:dark){text{fill:#e6ebf3}}</style><rect class="block" x="8" y="30" width="180" height="40" rx="4"/>
  <rect class="block" x="200" y="30" width="190" height="40" rx="4"/><text x="8" y="18">Plan of mock-model</text></svg>`;

/** One streamed answer. */
class Reply {
  constructor(response, body) {
    this.response = response;
    this.body = body;
    this.tokens = 0;
    this.open = true;
    /** Resolves when the client closes the connection. */
    this.closed = new Promise((resolve) => {
      response.on('close', () => {
        this.open = false;
        resolve();
      });
    });
  }

  fail(status, error, headers = {}) {
    this.response.writeHead(status, { 'content-type': 'application/json', ...headers }).end(JSON.stringify({ error }));
  }

  event(data) {
    if (!this.response.headersSent)
      this.response.writeHead(200, { 'content-type': 'text/event-stream', 'cache-control': 'no-cache' });
    this.response.write(`data: ${typeof data === 'string' ? data : JSON.stringify(data)}\n\n`);
  }

  chunk(delta, rest = {}) {
    this.event({
      id: 'chatcmpl-1',
      object: 'chat.completion.chunk',
      model: this.body.model,
      choices: [{ index: 0, delta, finish_reason: null }],
      ...rest,
    });
  }

  content(text) {
    this.tokens += 1;
    this.chunk({ content: text });
  }

  thought(text) {
    this.tokens += 1;
    this.chunk({ reasoning_content: text });
  }

  /** The chunks that end an answer. */
  done({ finish = 'stop', prompt = 20, cached = 12 } = {}) {
    this.event({ model: this.body.model, choices: [{ index: 0, delta: {}, finish_reason: finish }] });
    this.event({
      choices: [],
      usage: {
        prompt_tokens: prompt,
        completion_tokens: this.tokens,
        total_tokens: prompt + this.tokens,
        prompt_tokens_details: { cached_tokens: cached },
      },
      timings: {
        cache_n: cached,
        prompt_n: prompt - cached,
        prompt_ms: 40,
        predicted_n: this.tokens,
        predicted_ms: 20 * (this.tokens - 1),
      },
    });
    this.event('[DONE]');
    this.response.end();
  }
}

export class Mock {
  /** The bodies of the chat requests, in order. */
  requests = [];

  replies = [];

  polls = 0;

  key = null;

  models = ['mock-model', 'other-model'];

  plan = PLAN;

  /** The models whose plans were asked for. */
  plans = [];

  status = {
    model: 'mock-model',
    uptime_s: 3725,
    version: '0.1.0',
    steps: 5120,
    running: 2,
    waiting: 1,
    pages: { total: 512, used: 128, cached: 256 },
    host_bytes: 3 << 20,
    computed_tokens: 1000,
    cached_tokens: 3000,
    preempted: 1,
    guessed: 100,
    guessed_right: 75,
    tok_s: 42.5,
    requests: [
      { id: 1, state: 'running', prompt_tokens: 800, generated_tokens: 150, age_s: 4.2 },
      { id: 2, state: 'running', prompt_tokens: 300, generated_tokens: 0, age_s: 0.4 },
      { id: 3, state: 'waiting', prompt_tokens: 64, generated_tokens: 0, age_s: 0.1 },
    ],
  };

  /** Answers a chat request; tests replace it. */
  answer = (reply) => {
    reply.content('Hello');
    reply.content(' there.');
    reply.done();
  };

  async start() {
    this.server = createServer((request, response) =>
      this.handle(request, response).catch((error) => {
        console.error('mock:', error);
        response.destroy();
      }),
    );
    await new Promise((resolve) => {
      this.server.listen(0, '127.0.0.1', resolve);
    });
    this.url = `http://127.0.0.1:${this.server.address().port}/`;
    return this;
  }

  stop() {
    this.server.closeAllConnections();
    return new Promise((resolve) => {
      this.server.close(resolve);
    });
  }

  async handle(request, response) {
    const { pathname } = new URL(request.url, this.url);
    const api = ['/v1/models', '/v1/chat/completions', '/status', '/plan.svg'].includes(pathname);
    const json = (value) => response.writeHead(200, { 'content-type': 'application/json' }).end(JSON.stringify(value));
    if (api && this.key && request.headers.authorization !== `Bearer ${this.key}`) {
      response.writeHead(401, { 'content-type': 'application/json' });
      response.end(
        JSON.stringify({ error: { message: 'Invalid API key', type: 'authentication_error', code: 'invalid_api_key' } }),
      );
    } else if (pathname === '/v1/models') {
      json({ object: 'list', data: this.models.map((id) => ({ id, object: 'model', created: 1, owned_by: 'quadriga' })) });
    } else if (pathname === '/v1/chat/completions') {
      await this.chat(request, response);
    } else if (pathname === '/status') {
      this.polls += 1;
      if (this.status) json(this.status);
      else response.writeHead(500).end('{"error":{"message":"device lost"}}');
    } else if (pathname === '/plan.svg') {
      this.plans.push(new URL(request.url, 'http://mock').searchParams.get('model'));
      if (this.plan) response.writeHead(200, { 'content-type': 'image/svg+xml' }).end(this.plan);
      else response.writeHead(404).end('{"error":{"message":"no plan"}}');
    } else await file(pathname, response);
  }

  async chat(request, response) {
    const pieces = [];
    for await (const piece of request) pieces.push(piece);
    const body = JSON.parse(Buffer.concat(pieces).toString());
    const reply = new Reply(response, body);
    this.requests.push(body);
    this.replies.push(reply);
    await this.answer(reply, body);
  }
}

async function file(pathname, response) {
  const path = join(WEB, normalize(pathname === '/' ? '/index.html' : pathname));
  try {
    const content = await readFile(path);
    response.writeHead(200, {
      'content-type': TYPES[extname(path)] ?? 'application/octet-stream',
      'content-security-policy': CSP,
      'x-content-type-options': 'nosniff',
    });
    response.end(content);
  } catch {
    response.writeHead(404).end();
  }
}
