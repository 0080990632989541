// Conversations in the browser: kept, found, renamed, deleted, exported, imported, and a storage that is full or missing.

import assert from 'node:assert/strict';
import { readFile, writeFile, mkdtemp, rm } from 'node:fs/promises';
import { join } from 'node:path';
import { test } from 'node:test';
import { tmpdir } from 'node:os';
import { answered, ask, open, ready, texts } from './browser.mjs';

const echo = (reply, body) => {
  reply.content(`You said: ${body.messages.at(-1).content}`);
  reply.done();
};

const titles = (page) => page.locator('.item .open').allInnerTexts();

async function withTitles(page, expected) {
  await page
    .waitForFunction((wanted) => {
      const found = Array.from(document.querySelectorAll('.item .open'), (button) => button.innerText.trim());
      return JSON.stringify(found) === JSON.stringify(wanted);
    }, expected)
    .catch(async () => assert.deepEqual(await titles(page), expected));
}

test('conversations, versions and drafts survive a reload', async (t) => {
  const { page, mock } = await open(t);
  mock.answer = echo;
  await ask(page, 'alpha');
  await page.click('.regenerate');
  await answered(page);
  await page.click('.previous');
  await page.fill('#input', 'half a thought');
  await page.reload();
  await ready(page);
  assert.deepEqual(await texts(page), ['alpha', 'You said: alpha']);
  assert.equal(await page.innerText('.versions >> nth=1'), '1/2');
  assert.equal(await page.inputValue('#input'), 'half a thought');
  assert.match(await page.innerText('.message.assistant .stats'), /to first token/);
  assert.match(await page.title(), /^alpha/);
  // Also from the other tab.
  await page.click('#server-tab');
  await page.reload();
  await ready(page);
  assert.equal(await page.isVisible('#server-panel'), true);
  await page.click('#chat-tab');
  assert.deepEqual(await texts(page), ['alpha', 'You said: alpha']);
  // The address opens the same conversation.
  const address = page.url();
  await page.click('#new');
  await ask(page, 'beta');
  await page.goto(address);
  await page.waitForSelector('.bubble:text-is("alpha")');
});

test('an answer that was arriving when the page was closed is kept as stopped', async (t) => {
  const { page, mock } = await open(t);
  mock.answer = async (reply) => {
    reply.content('The beginning');
    await reply.closed;
  };
  await page.fill('#input', 'Go');
  await page.press('#input', 'Enter');
  await page.waitForSelector('.message.assistant p');
  await page.reload();
  await ready(page);
  assert.match(await page.innerText('.message.assistant .stats'), /Stopped/);
  assert.deepEqual(await texts(page), ['Go', 'The beginning']);
});

test('conversations are listed, searched, renamed and deleted', async (t) => {
  const { page, mock } = await open(t);
  mock.answer = echo;
  for (const text of ['apples and pears', 'bread', 'cheese']) {
    await page.click('#new');
    await ask(page, text);
  }
  await withTitles(page, ['cheese', 'bread', 'apples and pears']);
  await page.fill('#search', 'SAID: BREAD');
  await withTitles(page, ['bread']);
  await page.fill('#search', 'nothing like this');
  await page.waitForSelector('#no-conversations:text-is("Nothing found.")');
  await page.fill('#search', '');
  await withTitles(page, ['cheese', 'bread', 'apples and pears']);

  await page.hover('.item:has-text("bread")');
  await page.click('.item:has-text("bread") .rename');
  await page.keyboard.type('Rye <b>');
  await page.keyboard.press('Enter');
  await withTitles(page, ['cheese', 'Rye <b>', 'apples and pears']);

  await page.click('.item.current .delete');
  await withTitles(page, ['Rye <b>', 'apples and pears']);
  await page.click('.toast button:text-is("Undo")');
  await withTitles(page, ['cheese', 'Rye <b>', 'apples and pears']);
  await page.hover('.item:has-text("apples")');
  await page.click('.item:has-text("apples") .delete');
  await page.click('.toast [aria-label="Close notice"]');
  await withTitles(page, ['cheese', 'Rye <b>']);
  await page.reload();
  await ready(page);
  await withTitles(page, ['cheese', 'Rye <b>']);
});

test('an export can be imported into another browser', async (t) => {
  const { page, mock } = await open(t);
  const folder = await mkdtemp(join(tmpdir(), 'quadriga-page-'));
  t.after(() => rm(folder, { recursive: true }));
  mock.answer = echo;
  await ask(page, 'alpha');
  await page.click('.regenerate');
  await answered(page);
  await page.click('#open-settings');
  await page.fill('#setting-system', 'Be kind.');
  await page.keyboard.press('Escape');
  await ask(page, 'more');
  await page.click('#new');
  await ask(page, 'beta');
  const [download] = await Promise.all([page.waitForEvent('download'), page.click('#export')]);
  assert.match(download.suggestedFilename(), /^quadriga-conversations-[\d-]+\.json$/);
  const path = join(folder, 'export.json');
  await download.saveAs(path);

  const second = await open(t, { mock });
  await second.page.setInputFiles('#import-file', path);
  await second.page.waitForSelector('.toast:has-text("Imported 2 conversations.")');
  await withTitles(second.page, ['beta', 'alpha']);
  await second.page.click('.item .open:has-text("alpha")');
  await second.page.waitForSelector('.bubble:text-is("alpha")');
  assert.deepEqual(
    await texts(second.page),
    await (async () => {
      await page.click('.item .open:has-text("alpha")');
      await page.waitForSelector('.bubble:text-is("alpha")');
      return texts(page);
    })(),
  );
  assert.equal(await second.page.inputValue('#setting-system'), 'Be kind.');
  const [again] = await Promise.all([second.page.waitForEvent('download'), second.page.click('#export')]);
  await again.saveAs(join(folder, 'again.json'));
  const conversations = async (name) => JSON.parse(await readFile(join(folder, name), 'utf8')).conversations;
  assert.deepEqual(await conversations('again.json'), await conversations('export.json'));
  // Once more: nothing is doubled.
  await second.page.setInputFiles('#import-file', path);
  await second.page.waitForSelector('.toast:has-text("2 already here")');
  await withTitles(second.page, ['beta', 'alpha']);
});

test('a file that is wrong is refused as a whole, with the field named', async (t) => {
  const { page } = await open(t);
  const folder = await mkdtemp(join(tmpdir(), 'quadriga-page-'));
  t.after(() => rm(folder, { recursive: true }));
  const message = { id: 'm', parent: '', role: 'user', content: 'x' };
  const file = (conversations) => JSON.stringify({ format: 'quadriga-conversations', version: 1, conversations });
  const cases = [
    ['not JSON', /not JSON/],
    ['{"a": 1}', /not an export/],
    ['{"format": "quadriga-conversations", "version": 9, "conversations": []}', /version/],
    [file([{ messages: [message] }, { messages: [] }]), /conversations\[1\]\.messages/],
    [file([{ messages: [{ ...message, role: 'root' }] }]), /messages\[0\]\.role/],
    [file([{ messages: [{ ...message, parent: 'later' }] }]), /messages\[0\]\.parent/],
    [file([{ messages: [{ ...message, content: 5 }] }]), /messages\[0\]\.content/],
    [file([{ messages: [message, message] }]), /messages\[1\]\.id/],
    [file([{ title: {}, messages: [message] }]), /title/],
  ];
  for (const [content, expected] of cases) {
    const path = join(folder, 'wrong.json');
    await writeFile(path, content);
    await page.setInputFiles('#import-file', path);
    const toast = page.locator('.toast.failure');
    await toast.waitFor();
    assert.match(await toast.innerText(), expected);
    await toast.locator('[aria-label="Close notice"]').click();
  }
  assert.deepEqual(await titles(page), []);
});

test('without storage, and with a full one, the page still works', async (t) => {
  const { context, mock, page: first } = await open(t);
  mock.answer = echo;
  await first.evaluate(() => {
    IDBObjectStore.prototype.put = () => {
      throw new DOMException('full', 'QuotaExceededError');
    };
    Storage.prototype.setItem = () => {
      throw new DOMException('full', 'QuotaExceededError');
    };
  });
  await ask(first, 'one');
  await first.waitForSelector('.toast.failure:has-text("storage is full")');
  await ask(first, 'two');
  assert.equal(await first.locator('.toast.failure').count(), 1);
  assert.equal((await texts(first))[3], 'You said: two');
  await withTitles(first, ['one']);

  await context.addInitScript(() => {
    Object.defineProperty(globalThis, 'indexedDB', {
      get() {
        throw new DOMException('no', 'SecurityError');
      },
    });
    Object.defineProperty(globalThis, 'localStorage', {
      get() {
        throw new DOMException('no', 'SecurityError');
      },
    });
  });
  const page = await context.newPage();
  await page.goto(mock.url);
  await page.waitForSelector('.toast.failure:has-text("does not store")');
  await ask(page, 'three');
  await page.click('#new');
  await ask(page, 'four');
  await withTitles(page, ['four', 'three']);
  await page.click('.item .open:has-text("three")');
  await page.waitForSelector('.bubble:text-is("three")');
});

test('two tabs show the same conversations', async (t) => {
  const { context, mock, page } = await open(t);
  mock.answer = echo;
  await ask(page, 'from the first tab');
  const other = await context.newPage();
  await other.goto(page.url());
  await ready(other);
  assert.deepEqual(await texts(other), ['from the first tab', 'You said: from the first tab']);
  await ask(other, 'from the second');
  await page.waitForSelector('.bubble:text-is("from the second")');
  await page.waitForSelector('.message:nth-child(4) p:has-text("You said")');
});
