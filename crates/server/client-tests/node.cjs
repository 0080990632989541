// openai-node: chat, stream helpers, tools, parse, responses and embeddings.
const assert = require('node:assert/strict');
const { test } = require('node:test');
const { OpenAI } = require('openai');

const client = new OpenAI({ baseURL: `${process.env.QUADRIGA_URL}/v1`, apiKey: 'none', maxRetries: 0 });
const messages = [{ role: 'user', content: 'What is the capital of France? Answer with one word.' }];
const common = { model: 'smollm2', temperature: 0, max_tokens: 24 };
const parameters = {
  type: 'object',
  properties: { city: { type: 'string', maxLength: 20 }, unit: { enum: ['celsius', 'fahrenheit'] } },
  required: ['city', 'unit'],
  additionalProperties: false,
};

test('chat and stream', async () => {
  const answer = await client.chat.completions.create({ ...common, messages });
  assert.match(answer.choices[0].message.content, /Paris/);
  let text = '';
  for await (const chunk of await client.chat.completions.create({ ...common, messages, stream: true }))
    text += chunk.choices[0]?.delta?.content ?? '';
  assert.equal(text, answer.choices[0].message.content);
});

test('stream helper', async () => {
  const stream = client.chat.completions.stream({ ...common, messages });
  assert.match(await stream.finalContent(), /Paris/);
});

test('tools, whole and streamed', async () => {
  const tools = [{ type: 'function', function: { name: 'weather', parameters, strict: true } }];
  const request = { ...common, max_tokens: 100, tools, tool_choice: 'required', parallel_tool_calls: false, messages };
  const answer = await client.chat.completions.parse(request);
  const [call] = answer.choices[0].message.tool_calls;
  assert.ok(['celsius', 'fahrenheit'].includes(JSON.parse(call.function.arguments).unit));
  const final = await client.chat.completions.stream(request).finalChatCompletion();
  assert.deepEqual(JSON.parse(final.choices[0].message.tool_calls[0].function.arguments), JSON.parse(call.function.arguments));
});

test('parse', async () => {
  const answer = await client.chat.completions.parse({
    ...common,
    max_tokens: 100,
    messages,
    response_format: { type: 'json_schema', json_schema: { name: 'weather', schema: parameters, strict: true } },
  });
  assert.equal(typeof JSON.parse(answer.choices[0].message.content).city, 'string');
});

test('responses', async () => {
  const request = { model: 'smollm2', input: messages[0].content, max_output_tokens: 24, temperature: 0 };
  const answer = await client.responses.create(request);
  assert.match(answer.output_text, /Paris/);
  const final = await client.responses.stream(request).finalResponse();
  assert.equal(final.output_text, answer.output_text);
});

test('responses with a call and in form', async () => {
  const request = { model: 'smollm2', input: 'How is the weather in Bern?', max_output_tokens: 100, temperature: 0 };
  const tools = [{ type: 'function', name: 'weather', parameters, strict: true }];
  const called = { ...request, tools, tool_choice: 'required', parallel_tool_calls: false };
  const answer = await client.responses.create(called);
  const stream = client.responses.stream(called);
  const kinds = [];
  for await (const event of stream) kinds.push(event.type);
  assert.deepEqual(kinds.filter((kind) => !kind.endsWith('.delta')), [
    'response.created',
    'response.in_progress',
    'response.output_item.added',
    'response.function_call_arguments.done',
    'response.output_item.done',
    'response.completed',
  ]);
  const [call] = (await stream.finalResponse()).output;
  assert.equal(call.arguments, answer.output[0].arguments);
  assert.ok(['celsius', 'fahrenheit'].includes(JSON.parse(call.arguments).unit));
  const format = { type: 'json_schema', name: 'weather', schema: parameters, strict: true };
  const parsed = await client.responses.parse({ ...request, text: { format } });
  assert.equal(typeof parsed.output_parsed.city, 'string');
});

test('embeddings', async () => {
  const input = ['A cat is sleeping on the sofa.', 'A cat sleeps on the couch.', 'The central bank raised its interest rates.'];
  // The library asks for base64 by itself, and decodes it.
  const answer = await client.embeddings.create({ model: 'smollm2', input });
  const [first, second, third] = answer.data.map((item) => item.embedding);
  const product = (a, b) => a.reduce((sum, value, index) => sum + value * b[index], 0);
  assert.ok(Math.abs(product(first, first) - 1) < 1e-3);
  assert.ok(product(first, second) > product(first, third));
  const numbers = await client.embeddings.create({ model: 'smollm2', input, encoding_format: 'float' });
  assert.ok(product(first, numbers.data[0].embedding) > 0.9999);
});
