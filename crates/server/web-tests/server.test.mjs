// The main flows against `quadriga serve` itself, with a small model of random weights: what it says is noise.

import assert from 'node:assert/strict';
import { spawn, spawnSync } from 'node:child_process';
import { mkdtempSync, rmSync, writeFileSync } from 'node:fs';
import { after, before, test } from 'node:test';
import { join } from 'node:path';
import { tmpdir } from 'node:os';
import { answered, ask, open, ready, texts } from './browser.mjs';

const BINARY = process.env.QUADRIGA_BINARY;
const TEMPLATE =
  '{% for message in messages %}[{{ message.role }}] {{ message.content }}\n{% endfor %}{% if add_generation_prompt %}[assistant] {% endif %}';
/** Long enough for some pages of the KV cache: a token is a byte. */
const QUESTION = 'What is gravity, and why does everything fall at the same speed? '.repeat(8).trim();
const folder = mkdtempSync(join(tmpdir(), 'quadriga-page-'));
const model = join(folder, 'tiny.gguf');
const servers = [];

/** Starts a server and returns its address. */
async function serve(...options) {
  const server = spawn(BINARY, [
    'serve',
    '-m',
    model,
    '--port',
    '0',
    '--chat-template-file',
    join(folder, 'template.jinja'),
    '-t',
    '1',
    ...options,
  ]);
  servers.push(server);
  let output = '';
  return new Promise((resolve, reject) => {
    const take = (text) => {
      output += text;
      const found = /http:\/\/127\.0\.0\.1:\d+/.exec(output);
      if (found) resolve(`${found[0]}/`);
    };
    server.stdout.on('data', take);
    server.stderr.on('data', take);
    server.on('exit', (code) => reject(new Error(`quadriga serve ended with ${code}: ${output}`)));
  });
}

async function status(url) {
  return (await fetch(`${url}status`)).json();
}

async function set(page, values) {
  await page.click('#open-settings');
  for (const [name, value] of Object.entries(values)) await page.fill(`#setting-${name}`, value);
  await page.click('#close-settings');
}

let url;
before(async () => {
  assert.ok(BINARY, 'QUADRIGA_BINARY names the command; scripts/browser-tests builds it');
  writeFileSync(join(folder, 'template.jinja'), TEMPLATE);
  const made = spawnSync(BINARY, ['synth', '-o', model, '--context', '32768'], { encoding: 'utf8' });
  assert.equal(made.status, 0, made.stderr);
  url = await serve();
});
after(() => {
  for (const server of servers) server.kill();
  rmSync(folder, { recursive: true });
});

test('a conversation with quadriga serve', async (t) => {
  const { page } = await open(t, { url });
  assert.match(await page.inputValue('#model'), /tiny/);
  await set(page, { max_tokens: '24', temperature: '0' });
  await ask(page, QUESTION);
  const [question, first] = await texts(page);
  assert.equal(question, QUESTION);
  const stats = await page.innerText('.message.assistant .stats');
  assert.match(stats, /tok\/s[\s\S]*to first token[\s\S]*\d+ tokens?[\s\S]*\d+ prompt/);
  // Greedy sampling repeats the answer, and its prompt is in the KV cache now.
  await page.click('.regenerate');
  await answered(page);
  assert.equal((await texts(page))[1], first);
  assert.match(await page.innerText('.message.assistant .stats'), /\d+ cached/);
  assert.equal(await page.innerText('.message.assistant .versions'), '2/2');
  await page.hover('.message.user');
  await page.click('.message.user .edit');
  await page.fill('.editor textarea', 'What is light?');
  await page.press('.editor textarea', 'Enter');
  await answered(page);
  await page.click('.message.user .previous');
  assert.deepEqual(await texts(page), [question, first]);
  await page.reload();
  await ready(page);
  assert.deepEqual(await texts(page), [question, first]);
});

test('stop ends the generation of quadriga serve', async (t) => {
  const endless = await serve('--ignore-eos');
  const { page } = await open(t, { url: endless });
  await page.fill('#input', 'Talk');
  await page.press('#input', 'Enter');
  await page.waitForFunction(() => /so far/.test(document.querySelector('.message.streaming .stats')?.textContent ?? ''));
  await page.click('#send');
  await answered(page);
  assert.match(await page.innerText('.message.assistant .stats'), /Stopped/);
  for (let { running } = await status(endless); running > 0; { running } = await status(endless));
});

test('an error of quadriga serve is shown', async (t) => {
  const { page } = await open(t, { url });
  await set(page, { max_tokens: '8' });
  await ask(page, 'too long '.repeat(5000));
  assert.match(await page.innerText('.failure:not([hidden])'), /refused the request[\s\S]*400[\s\S]*context/);
  await page.hover('.message.user');
  await page.click('.message.user .edit');
  await page.fill('.editor textarea', 'short');
  await page.press('.editor textarea', 'Enter');
  await answered(page);
  assert.equal(await page.locator('.failure:not([hidden])').count(), 0);
});

test('the tab Server shows quadriga serve', async (t) => {
  const { page } = await open(t, { url, hash: '#server' });
  await page.waitForSelector('#status-model:has-text("tiny")');
  await page.waitForSelector('#plan:not([hidden])');
  assert.ok(await page.evaluate(() => document.querySelector('#plan').naturalWidth > 0));
  assert.match(await page.innerText('#status-pages'), /\d+ in use[\s\S]*\d+ cached[\s\S]*\d+ free/);
});

test('a key is asked for and used', async (t) => {
  const guarded = await serve('--api-key', 'secret');
  const { page } = await open(t, { url: guarded });
  await page.waitForSelector('#connection:not([hidden])');
  await page.click('#connection-action');
  await page.keyboard.type('secret');
  await page.keyboard.press('Enter');
  await page.waitForSelector('#connection', { state: 'hidden' });
  await page.keyboard.press('Escape');
  await set(page, { max_tokens: '8' });
  await ask(page, 'Hi');
  assert.equal(await page.locator('.failure:not([hidden])').count(), 0);
  // The plan as a page needs the key, too, which a link does not send.
  await page.click('#server-tab');
  await page.waitForSelector('#plan:not([hidden])');
  const saved = page.waitForEvent('download');
  await page.click('#plan-page');
  assert.equal((await saved).suggestedFilename(), 'plan.html');
});

test('an answer of quadriga serve has the form of a schema', async (t) => {
  const { page } = await open(t, { url });
  await set(page, { max_tokens: '64', schema: JSON.stringify({ enum: ['certainly'] }) });
  await ask(page, 'Are you sure?');
  // It is shown as code.
  assert.match((await texts(page))[1], /^json\s+"certainly"$/);
});
