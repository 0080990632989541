// Sending, streaming, stopping, regenerating, editing, versions, and errors of the server.

import assert from 'node:assert/strict';
import { test } from 'node:test';
import { answered, ask, open, texts, until } from './browser.mjs';

test('an answer is shown while it streams, with its measurements at the end', async (t) => {
  const { page, mock } = await open(t);
  let finish;
  mock.answer = async (reply) => {
    reply.content('The first **half');
    await new Promise((resolve) => {
      finish = resolve;
    });
    reply.content('** and the rest.');
    reply.done({ prompt: 1200, cached: 1100 });
  };
  await page.fill('#input', 'Go on');
  await page.press('#input', 'Enter');
  await page.waitForSelector('.message.assistant strong:text-is("half")');
  assert.equal(await page.getAttribute('.message.assistant', 'aria-busy'), 'true');
  assert.equal(await page.getAttribute('#send', 'aria-label'), 'Stop');
  // The browser of the tests asks for reduced motion.
  assert.equal(await page.evaluate(() => document.getAnimations().length), 0);
  finish();
  await answered(page);
  assert.deepEqual(await texts(page), ['Go on', 'The first half and the rest.']);
  const stats = await page.innerText('.message.assistant .stats');
  assert.match(stats, /50\.0 tok\/s/);
  assert.match(stats, /to first token/);
  assert.match(stats, /2 tokens/);
  assert.match(stats, /1,200 prompt, 1,100 cached/);
  assert.match(stats, /mock-model/);
  const [body] = mock.requests;
  assert.deepEqual(body, {
    model: 'mock-model',
    messages: [{ role: 'user', content: 'Go on' }],
    stream: true,
    stream_options: { include_usage: true },
  });
  await page.waitForFunction(() => document.querySelector('#announcements').textContent.startsWith('Answer complete'));
});

test('stop ends the request on the server and keeps what has arrived', async (t) => {
  const { page, mock } = await open(t);
  let dropped = false;
  mock.answer = async (reply) => {
    while (reply.open && reply.tokens < 10_000) {
      reply.content('word ');
      await Promise.race([
        reply.closed,
        new Promise((resolve) => {
          setTimeout(resolve, 5);
        }),
      ]);
    }
    dropped = !reply.open;
  };
  await page.fill('#input', 'Count');
  await page.press('#input', 'Enter');
  await page.waitForSelector('.message.assistant p:has-text("word")');
  await page.click('#send');
  await answered(page);
  await until(() => dropped, 'the server sees the end of the connection');
  assert.match((await texts(page))[1], /^(word ?)+$/);
  assert.match(await page.innerText('.message.assistant .stats'), /Stopped/);
  mock.answer = (reply) => {
    reply.content('next');
    reply.done();
  };
  await ask(page, 'And now?');
  assert.equal((await texts(page))[3], 'next');
});

test('thoughts are folded and can be opened', async (t) => {
  const { page, mock } = await open(t);
  let finish;
  mock.answer = async (reply) => {
    reply.thought('First, ');
    reply.thought('think *hard*.');
    await new Promise((resolve) => {
      finish = resolve;
    });
    reply.content('42');
    reply.done();
  };
  await page.fill('#input', 'Why?');
  await page.press('#input', 'Enter');
  await page.waitForSelector('.thinking summary:has-text("Thinking")');
  assert.equal(await page.isVisible('.thinking .markdown'), false);
  await page.click('.thinking summary');
  await page.waitForSelector('.thinking em:text-is("hard")');
  finish();
  await answered(page);
  assert.match(await page.innerText('.thinking summary'), /^Thought for/);
  assert.deepEqual(await texts(page), ['Why?', '42']);
  // Thoughts are not sent back.
  mock.answer = (reply) => reply.done();
  await ask(page, 'Sure?');
  assert.deepEqual(
    mock.requests[1].messages.map(({ content }) => content),
    ['Why?', '42', 'Sure?'],
  );
});

test('regenerating and editing keep the earlier versions', async (t) => {
  const { page, mock } = await open(t);
  let number = 0;
  mock.answer = (reply, body) => {
    number += 1;
    reply.content(`answer ${number} to ${body.messages.at(-1).content}`);
    reply.done();
  };
  await ask(page, 'one');
  await ask(page, 'two');
  await page.click('.message:nth-child(2) .regenerate');
  await answered(page);
  // The branch below the first answer is not part of the new one.
  assert.deepEqual(await texts(page), ['one', 'answer 3 to one']);
  assert.deepEqual(mock.requests[2].messages, [{ role: 'user', content: 'one' }]);
  assert.equal(await page.innerText('.message:nth-child(2) .versions'), '2/2');
  await page.click('.message:nth-child(2) .previous');
  assert.deepEqual(await texts(page), ['one', 'answer 1 to one', 'two', 'answer 2 to two']);
  assert.equal(await page.isDisabled('.message:nth-child(2) .previous'), true);

  await page.hover('.message:nth-child(3)');
  await page.click('.message:nth-child(3) .edit');
  await page.fill('.editor textarea', 'three');
  await page.press('.editor textarea', 'Enter');
  await answered(page);
  assert.deepEqual(await texts(page), ['one', 'answer 1 to one', 'three', 'answer 4 to three']);
  assert.deepEqual(
    mock.requests[3].messages.map(({ content }) => content),
    ['one', 'answer 1 to one', 'three'],
  );
  await page.click('.message:nth-child(3) .previous');
  assert.deepEqual(await texts(page), ['one', 'answer 1 to one', 'two', 'answer 2 to two']);

  // An edited answer is a version, too, and is what the model sees from then on.
  await page.click('.message:nth-child(4) .edit');
  await page.fill('.editor textarea', 'my own answer');
  await page.click('.editor .primary');
  assert.equal((await texts(page))[3], 'my own answer');
  await ask(page, 'four');
  assert.equal(mock.requests[4].messages[3].content, 'my own answer');
});

test('errors before the first byte are shown, and can be retried', async (t) => {
  const { page, mock } = await open(t);
  const failures = [
    [
      400,
      { message: 'temperature must be at least 0', type: 'invalid_request_error', param: 'temperature' },
      {},
      /refused the request/,
    ],
    [429, { message: 'The queue is full', type: 'rate_limit_exceeded' }, { 'retry-after': '7' }, /busy/],
    [500, { message: 'The device was lost', type: 'server_error' }, {}, /failed/],
  ];
  await page.fill('#input', 'Hi');
  const [first, ...others] = failures;
  mock.answer = (reply) => reply.fail(first[0], first[1], first[2]);
  await page.press('#input', 'Enter');
  await answered(page);
  assert.match(await page.innerText('.failure'), first[3]);
  assert.match(await page.innerText('.failure'), /temperature must be at least 0/);
  for (const [status, error, headers, heading] of others) {
    mock.answer = (reply) => reply.fail(status, error, headers);
    await page.click('.failure .retry');
    await answered(page);
    const text = await page.innerText('.failure');
    assert.match(text, heading);
    assert.ok(text.includes(error.message) && text.includes(String(status)));
    if (status === 429) assert.match(text, /7 seconds/);
  }
  mock.answer = (reply) => {
    reply.content('Fine.');
    reply.done();
  };
  await page.click('.failure .retry');
  await answered(page);
  assert.deepEqual(await texts(page), ['Hi', 'Fine.']);
  assert.equal(await page.isVisible('.failure'), false);
  // Failures without text are not kept as versions.
  assert.equal(await page.isVisible('.versions'), false);
});

test('an error or an end in mid-stream keeps the beginning of the answer', async (t) => {
  const { page, mock } = await open(t);
  mock.answer = (reply) => {
    reply.content('It began');
    reply.event({ error: { message: 'out of pages', type: 'server_error', code: 500 } });
    reply.response.end();
  };
  await ask(page, 'Hi');
  assert.equal((await texts(page))[1], 'It began');
  assert.match(await page.innerText('.failure'), /interrupted[\s\S]*out of pages/);
  mock.answer = (reply) => {
    reply.content('Again');
    reply.response.end();
  };
  await page.click('.failure .retry');
  await answered(page);
  assert.match(await page.innerText('.failure'), /closed the connection before the answer was complete/);
  mock.answer = (reply) => {
    reply.content('Once more');
    setTimeout(() => reply.response.destroy(), 50);
  };
  await page.click('.failure .retry');
  await answered(page);
  assert.match(await page.innerText('.failure'), /connection to the server was lost/);
  assert.equal(await page.innerText('.message.assistant .versions'), '3/3');
});

test('a server that is gone, and one that wants a key', async (t) => {
  const { page, mock } = await open(t);
  mock.key = 'secret';
  await page.fill('#input', 'Hi');
  await page.press('#input', 'Enter');
  await answered(page);
  assert.match(await page.innerText('.failure'), /API key[\s\S]*Invalid API key/);
  await page.click('.failure button:text-is("Enter API key")');
  await page.keyboard.type('secret');
  await page.keyboard.press('Enter');
  await page.keyboard.press('Escape');
  await page.click('.failure .retry');
  await answered(page);
  assert.deepEqual(await texts(page), ['Hi', 'Hello there.']);
  const kept = await page.evaluate(() => [
    sessionStorage.getItem('quadriga.key'),
    JSON.stringify(localStorage).includes('secret'),
  ]);
  assert.deepEqual(kept, ['secret', false]);
  mock.server.closeAllConnections();
  mock.server.close();
  await ask(page, 'Still there?');
  assert.match(await page.innerText('.failure:not([hidden])'), /No connection[\s\S]*cannot be reached/);
});

test('settings and a JSON schema are checked and sent', async (t) => {
  const { page, mock } = await open(t);
  mock.answer = (reply, body) => {
    reply.content(body.response_format ? '{"name": "*Ann*", "age": 7}' : 'text');
    reply.done();
  };
  await page.click('#open-settings');
  const values = {
    system: 'Be brief.',
    temperature: '0.5',
    top_p: '0.9',
    top_k: '40',
    min_p: '0.05',
    max_tokens: '100',
    seed: '7',
    repeat_penalty: '1.1',
    presence_penalty: '0.2',
    frequency_penalty: '-0.5',
    stop: 'END\\n\n###',
  };
  for (const [name, value] of Object.entries(values)) await page.fill(`#setting-${name}`, value);
  await page.selectOption('#setting-effort', 'none');
  await page.fill('#setting-schema', '{"type": "object"');
  assert.match(await page.innerText('#setting-schema-note'), /not valid JSON/);
  await page.click('#close-settings');
  // A wrong setting opens the panel at its field, and nothing is sent.
  await page.fill('#input', 'Who?');
  await page.press('#input', 'Enter');
  assert.equal(await page.evaluate(() => document.activeElement.id), 'setting-schema');
  assert.equal(mock.requests.length, 0);
  await page.fill('#setting-schema', '[1]');
  assert.match(await page.innerText('#setting-schema-note'), /must be an object/);
  const schema = { type: 'object', properties: { name: { type: 'string' } } };
  await page.fill('#setting-schema', JSON.stringify(schema));
  await page.fill('#setting-top_k', '1.5');
  assert.match(await page.innerText('#setting-top_k-note'), /whole number/);
  await page.fill('#setting-top_k', '40');
  await page.keyboard.press('Escape');
  assert.equal(await page.inputValue('#input'), 'Who?');
  await page.press('#input', 'Enter');
  await answered(page);
  const { messages, stream, stream_options: options, model, ...fields } = mock.requests[0];
  assert.deepEqual(messages, [
    { role: 'system', content: 'Be brief.' },
    { role: 'user', content: 'Who?' },
  ]);
  assert.deepEqual(fields, {
    temperature: 0.5,
    top_p: 0.9,
    top_k: 40,
    min_p: 0.05,
    max_tokens: 100,
    seed: 7,
    repeat_penalty: 1.1,
    presence_penalty: 0.2,
    frequency_penalty: -0.5,
    stop: ['END\n', '###'],
    reasoning_effort: 'none',
    response_format: { type: 'json_schema', json_schema: { name: 'answer', schema } },
  });
  assert.equal((await page.innerText('.message.assistant .code code')).trim(), '{"name": "*Ann*", "age": 7}');
  assert.match(await page.innerText('#chips'), /System prompt[\s\S]*JSON schema[\s\S]*more/);
  // The next conversation begins with them; resetting empties all.
  await page.click('#new');
  await page.click('#open-settings');
  assert.equal(await page.inputValue('#setting-temperature'), '0.5');
  await page.click('#reset-settings');
  await page.keyboard.press('Escape');
  await ask(page, 'Plain');
  assert.deepEqual(Object.keys(mock.requests[1]).sort(), ['messages', 'model', 'stream', 'stream_options']);
  assert.equal((await texts(page))[1], 'text');
});

test('an answer goes on while another conversation is shown', async (t) => {
  const { page, mock } = await open(t);
  let finish;
  mock.answer = async (reply, body) => {
    reply.content('slow ');
    if (body.messages[0].content === 'first')
      await new Promise((resolve) => {
        finish = resolve;
      });
    reply.content('end');
    reply.done();
  };
  await page.fill('#input', 'first');
  await page.press('#input', 'Enter');
  await page.waitForSelector('.message.assistant p');
  // A second answer in the same conversation has to wait.
  assert.equal(await page.isVisible('.message.user .edit'), false);
  await page.fill('#input', 'too early');
  await page.press('#input', 'Enter');
  assert.equal(await page.inputValue('#input'), 'too early');
  await page.fill('#input', '');
  await page.click('#new');
  await ask(page, 'second');
  await page.waitForSelector('.item .pulse');
  finish();
  await page.waitForFunction(() => !document.querySelector('.item .pulse'));
  await page.click('.item .open:has-text("first")');
  await page.waitForSelector('.bubble:text-is("first")');
  assert.deepEqual(await texts(page), ['first', 'slow end']);
});

test('the model of the picker is asked, and kept', async (t) => {
  const { page, mock } = await open(t);
  await page.selectOption('#model', 'other-model');
  await ask(page, 'Hi');
  assert.equal(mock.requests[0].model, 'other-model');
  await page.reload();
  await page.waitForSelector('html[data-ready]', { state: 'attached' });
  assert.equal(await page.inputValue('#model'), 'other-model');
});
